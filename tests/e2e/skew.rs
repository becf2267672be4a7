//! Version skew: the far machine runs the previous release's agent and engine (`cargo xtask skew`). Engines
//! of two releases never share a group, and everything else works across releases.

use anyhow::{Context, Result, ensure};
use russet_tests::chat::{self, StreamEnd};
use russet_tests::cluster::{TestCluster, condition, kill, repository};
use serde_json::json;

use crate::{mistakes, path};

/// Scenarios that replace the usual ones.
pub fn scenarios() -> Vec<(&'static str, crate::Scenario)> {
    vec![
        ("engines_of_two_releases_are_not_put_into_one_group", |c| Box::pin(refused(c))),
        ("an_older_node_answers_every_prompt_right", |c| Box::pin(answers(c))),
        ("an_older_agent_adopts_its_engine_again", |c| Box::pin(adopts(c))),
        ("an_older_engine_is_replaced_when_it_is_lost", |c| Box::pin(replaces(c))),
        ("an_older_node_releases_its_memory", |c| Box::pin(releases_memory(c))),
    ]
}

async fn refused(cluster: &mut TestCluster) -> Result<()> {
    let samples = repository().join("manifests/samples/quickstart");
    cluster.russet(&["apply", "-f", &samples.display().to_string()]).await?;
    cluster
        .until("the group is refused by its engines' builds", async |cluster| {
            let deployment = cluster.get("modeldeployments smoke").await?;
            let ready = condition(&deployment, "Ready").map(ToString::to_string).unwrap_or_default();
            Ok(ready.contains("same engine build"))
        })
        .await?;
    let shards = cluster.get("shards").await?;
    ensure!(shards["items"].as_array().is_some_and(Vec::is_empty), "there are Shards all the same: {shards}");
    path::delete_object(cluster, "modeldeployments/smoke").await
}

async fn answers(cluster: &mut TestCluster) -> Result<()> {
    cluster.russet(&["cordon", "node-a"]).await?;
    let deployment = "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: older}\n\
                      spec:\n  modelRef: {name: smoke}\n  sharding:\n    mode: Single\n    \
                      kv: {contextTokens: 1024, maxSequences: 4}\n";
    mistakes::apply(cluster, deployment).await?;
    ready(cluster).await?;
    let shards = cluster.get("shards").await?;
    ensure!(shards["items"][0]["spec"]["nodeName"] == "node-b", "it is not on the older node: {shards}");
    path::answers_right(cluster, "older", path::prompts()?).await
}

async fn adopts(cluster: &mut TestCluster) -> Result<()> {
    let engines = cluster.engines().await?;
    let mut answer = stream(cluster).await?;
    kill(cluster.far_agent()?);
    cluster.restart_far_agent().await?;
    let end = answer.finish().await;
    ensure!(end == StreamEnd::Finished("length".into()), "the stream ended with {end:?}");
    ready(cluster).await?;
    ensure!(cluster.engines().await? == engines, "the engine was not adopted");
    Ok(())
}

async fn replaces(cluster: &mut TestCluster) -> Result<()> {
    let (_, pid) = *cluster.engines().await?.first().context("no engine")?;
    let mut answer = stream(cluster).await?;
    kill(pid);
    let end = answer.finish().await;
    // An engine that cannot resume a stream reports it, and the stream ends with a typed error.
    let typed = matches!(&end, StreamEnd::Failed(code) if code == "engine_lost");
    ensure!(typed || end == StreamEnd::Finished("length".into()), "the stream ended with {end:?}");
    cluster
        .until("a question is answered", async |cluster| {
            Ok(chat::answer(&cluster.base_url(), "older", "What is 17 + 25?").await.is_ok())
        })
        .await?;
    ready(cluster).await
}

async fn releases_memory(cluster: &mut TestCluster) -> Result<()> {
    path::delete_object(cluster, "modeldeployments/older").await?;
    cluster
        .until("nothing is granted on node-b", async |cluster| {
            Ok(cluster.get("inferencenodes node-b").await?["status"]["memory"]["grantedBytes"] == 0)
        })
        .await?;
    cluster.russet(&["uncordon", "node-a"]).await.map(|_| ())
}

async fn stream(cluster: &TestCluster) -> Result<chat::StreamedAnswer> {
    let body = chat::question("older", "What is Russet?", json!({"max_tokens": 700, "ignore_eos": true}));
    let mut answer = chat::ask(&cluster.base_url(), &body).await?;
    let piece = answer.piece().await;
    ensure!(matches!(piece, Ok(Some(_))), "the stream began with {piece:?}");
    Ok(answer)
}

async fn ready(cluster: &mut TestCluster) -> Result<()> {
    cluster
        .until("older is Ready", async |cluster| {
            let deployment = cluster.get("modeldeployments older").await?;
            Ok(condition(&deployment, "Ready").is_some_and(|ready| ready["status"] == "True"))
        })
        .await
}
