//! Files on both machines before anybody needs them: a deployment then starts without a transfer.

use std::time::Instant;

use anyhow::{Result, ensure};
use russet_tests::cluster::{Cluster, condition};

use crate::mistakes::apply;
use crate::path::{answers, delete_object, gone, serves};

/// The hub's name of a model that only this scenario fetches.
pub const AHEAD: &str = "russet/ahead";

pub async fn ahead(cluster: &mut Cluster) -> Result<()> {
    let model = format!(
        "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {{name: ahead}}\n\
         spec: {{source: {{uri: 'hf://{AHEAD}'}}, preload: {{policy: Always}}}}\n"
    );
    apply(cluster, &model).await?;
    let asked = Instant::now();
    cluster
        .until("both machines hold the files", async |cluster| {
            let model = cluster.get("models ahead").await?;
            let preloaded = condition(&model, "Preloaded").is_some_and(|it| it["status"] == "True");
            Ok(preloaded && model["status"]["preloaded"] == "2/2")
        })
        .await?;
    println!("  both machines hold the files after {:.1} s", asked.elapsed().as_secs_f64());
    for kind in ["models", "modelcopies"] {
        println!("{}", cluster.russet(&["get", kind]).await?);
    }

    // From here on the hub writes down what is fetched, and would let nothing through.
    let held = cluster.hub.hold();
    let deployment = "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: ahead}\n\
                      spec: {modelRef: {name: ahead}, sharding: {mode: Pipeline, ranks: 2, kv: {contextTokens: 512}}}\n";
    apply(cluster, deployment).await?;
    serves(cluster, "ahead").await?;
    let begun = cluster.hub.begun();
    ensure!(begun.is_empty(), "the files were there, and transfers began at {begun:?}");
    drop(held);
    answers(cluster, "ahead").await?;

    // Who reads files leaves a note, and what is kept says so.
    cluster
        .until("both copies were used", async |cluster| {
            let copies = cluster.get("modelcopies").await?;
            let own = copies["items"].as_array().into_iter().flatten();
            let own = own.filter(|copy| copy["spec"]["modelRef"]["name"] == "ahead");
            Ok(own.filter(|copy| copy["status"]["lastUsedTime"].is_string()).count() == 2)
        })
        .await?;
    for kind in ["models", "modelcopies"] {
        println!("{}", cluster.russet(&["get", kind]).await?);
    }
    gone(cluster, "ahead").await?;
    let copies = cluster.get("modelcopies").await?;
    let left = copies["items"].as_array().into_iter().flatten();
    ensure!(
        left.filter(|copy| copy["spec"]["modelRef"]["name"] == "ahead").count() == 2,
        "files went with their deployment"
    );
    delete_object(cluster, "models/ahead").await
}
