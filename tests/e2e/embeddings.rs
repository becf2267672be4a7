//! Vectors of a real model, through the real OpenAI SDK: all-MiniLM-L6-v2 in the form of its repository.

use std::path::Path;

use anyhow::{Result, ensure};
use russet_tests::cluster::{TestCluster, repository};
use tokio::process::Command;

use super::completions;
use super::mistakes::apply;
use super::path::{delete_object, quickstart, serves};

const OBJECTS: &str = "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {name: minilm}\n\
    spec: {source: {uri: 'hf://sentence-transformers/all-MiniLM-L6-v2'}}\n---\n\
    apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: minilm}\n\
    spec: {modelRef: {name: minilm}}\n";

/// A model that embeds becomes ready, embeds, and refuses to chat; a split of it is refused with the reason.
pub async fn minilm(cluster: &mut TestCluster) -> Result<()> {
    let (Some(python), Some(folder)) = (std::env::var_os("RUSSET_PYTHON"), std::env::var_os("RUSSET_MINILM"))
    else {
        ensure!(std::env::var_os("CI").is_none(), "CI must set RUSSET_PYTHON and RUSSET_MINILM");
        println!("  RUSSET_PYTHON and RUSSET_MINILM are not set: `cargo xtask test` sets them");
        return Ok(());
    };
    // For a model that does not embed.
    quickstart(cluster).await?;
    cluster.hub.add("sentence-transformers/all-MiniLM-L6-v2", Path::new(&folder));
    apply(cluster, OBJECTS).await?;
    serves(cluster, "minilm").await?;
    let model = cluster.get("models minilm").await?;
    let shape = &model["status"]["shape"];
    ensure!(shape["task"] == "Embed" && model["status"]["kvBytesPerToken"] == 0, "{shape:#}");
    let output = Command::new(&python)
        .arg(repository().join("tests/e2e/embeddings.py"))
        .args([&cluster.base_url(), "minilm"])
        .env("NO_PROXY", "*")
        .output()
        .await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    print!("    {}", String::from_utf8_lossy(&output.stdout));
    let route = "apiVersion: russet.dev/v1alpha1\nkind: ModelRoute\nmetadata: {name: embeds}\n\
                 spec: {models: ['text-embedding-3-small'], targets: [{deploymentRef: {name: minilm}}]}\n";
    apply(cluster, route).await?;
    // The SDK asks for base64 by itself, and its strict client checks the answer before it decodes it.
    completions::passes(cluster, "test_embeddings.py", &["[strict]", "[aiohttp]"]).await?;
    delete_object(cluster, "modelroutes/embeds").await?;
    let split = OBJECTS.replace("{name: minilm}}", "{name: minilm}, sharding: {mode: Tensor, ranks: 2}}");
    let split = split.replace(
        "kind: ModelDeployment\nmetadata: {name: minilm}",
        "kind: ModelDeployment\nmetadata: {name: split}",
    );
    apply(cluster, &split).await?;
    cluster
        .until("the split is refused with the reason", async |cluster| {
            let deployment = cluster.get("modeldeployments split").await?;
            Ok(deployment["status"].to_string().contains("which one rank computes whole"))
        })
        .await?;
    for object in ["modeldeployments/split", "modeldeployments/minilm", "models/minilm"] {
        delete_object(cluster, object).await?;
    }
    Ok(())
}
