//! A pool of the one machine that a user labelled, and a split by reference to a strategy.

use anyhow::{Context, Result, ensure};
use russet_tests::cluster::{TestCluster, repository};

use crate::mistakes::apply;
use crate::path::{answers, delete_and_wait, delete_object, serves};

const NODE: &str = "apiVersion: russet.dev/v1alpha1\nkind: InferenceNode\nmetadata: {name: node-b";

/// By default, the deployment would run on node-a.
pub async fn pools(cluster: &mut TestCluster) -> Result<()> {
    let model = repository().join("manifests/samples/quickstart/model.yaml");
    cluster.russet(&["apply", "-f", &model.display().to_string()]).await?;
    let written = "apiVersion: russet.dev/v1alpha1\nkind: NodePool\nmetadata: {name: far}\n\
                   spec: {selector: {matchLabels: {rack: far}}}\n---\n\
                   apiVersion: russet.dev/v1alpha1\nkind: ShardingStrategy\nmetadata: {name: small}\n\
                   spec: {mode: Single, kv: {contextTokens: 1024, maxSequences: 4}}\n---\n\
                   apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: pooled}\n\
                   spec: {modelRef: {name: smoke}, strategyRef: {name: small}, poolRefs: [{name: far}]}\n";
    apply(cluster, &format!("{written}---\n{NODE}, labels: {{rack: far}}}}\n")).await?;
    serves(cluster, "pooled").await?;
    let deployment = cluster.get("modeldeployments pooled").await?;
    let nodes = deployment["status"]["nodes"].as_str().context("no nodes are named")?;
    ensure!(nodes == "node-b", "pooled runs on {nodes}");
    answers(cluster, "pooled").await?;
    for (kind, words) in
        [("nodepools", ["far", "True", "1/1"]), ("shardingstrategies", ["small", "Single", "True"])]
    {
        let table = cluster.russet(&["get", kind]).await?;
        ensure!(words.iter().all(|word| table.contains(word)), "{words:?} are not all in\n{table}");
    }
    delete_and_wait(cluster, "pooled").await?;
    delete_object(cluster, "nodepools/far").await?;
    delete_object(cluster, "shardingstrategies/small").await?;
    apply(cluster, &format!("{NODE}}}\n")).await
}
