//! From a name to an answer in one command: `russet run` adds the Model, deploys it and sends a prompt; a
//! second run uses the existing objects.

use anyhow::{Result, ensure};
use russet_tests::cluster::TestCluster;

use crate::path::{delete_and_wait, delete_object};

/// The hub's name of a model that only this scenario fetches.
pub const RUN: &str = "russet/run-me";
/// The name that `russet run` derives from it.
const NAME: &str = "run-me";

/// Run, run again, and add a Model from an entry, twice.
pub async fn run(cluster: &mut TestCluster) -> Result<()> {
    let (source, gateway) = (format!("hf://{RUN}"), format!("http://127.0.0.1:{}", cluster.gateway_port));
    for model in [source.as_str(), NAME] {
        let words =
            ["run", model, "--prompt", "What is 17 + 25?", "--temperature", "0", "--gateway", &gateway];
        let answer = cluster.russet(&words).await?;
        ensure!(answer == "17 + 25 = 42.\n", "russet run {model} printed {answer:?}, not the answer alone");
    }
    let deployments = cluster.get("modeldeployments").await?;
    let own = deployments["items"].as_array().into_iter().flatten();
    let own = own.filter(|deployment| deployment["spec"]["modelRef"]["name"] == NAME).count();
    ensure!(own == 1, "{own} deployments serve {NAME}, and one is enough");

    for _ in 0..2 {
        let added = cluster.russet(&["catalog", "add", "tinyllama-1-1b-4bit"]).await?;
        ensure!(added == "model/tinyllama-1-1b-4bit applied\n", "russet catalog add printed {added:?}");
    }
    delete_object(cluster, "models/tinyllama-1-1b-4bit").await?;
    delete_and_wait(cluster, NAME).await?;
    delete_object(cluster, &format!("models/{NAME}")).await
}
