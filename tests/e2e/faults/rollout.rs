//! A spec is edited or deleted in the middle of a stream: the stream resumes on the new plan, and ends with a
//! typed error if there is none.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use russet_tests::chat::StreamEnd;
use russet_tests::cluster::{TestCluster, condition, kill};

use super::{TOKENS, answers_again, check_invariants, engine_of, expected, finish_resumed};
use crate::path;

/// The context grows or shrinks a little, which is another plan every time.
pub async fn edit(cluster: &mut TestCluster) -> Result<()> {
    let undisturbed = expected(cluster).await?;
    let before = cluster.get("modeldeployments smoke").await?;
    let context = before["spec"]["sharding"]["kv"]["contextTokens"].as_u64().context("no context")?;
    let expected = if context == 1024 { 1088 } else { 1024 };
    let mut answer = path::long_answer(cluster, TOKENS).await?;
    let edited = format!(
        "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: smoke}}\nspec:\n  \
         modelRef: {{name: smoke}}\n  sharding:\n    mode: Pipeline\n    ranks: 2\n    \
         kv: {{contextTokens: {expected}, maxSequences: 4}}\n"
    );
    crate::mistakes::apply(cluster, &edited).await?;
    let struck = Instant::now();
    let longest = finish_resumed(&mut answer, &undisturbed).await?;
    println!("fault: spec edited, stream stood still = {:.2} of 60", longest.as_secs_f64());
    cluster
        .until("the edited plan serves", async |cluster| {
            let now = cluster.get("modeldeployments smoke").await?;
            let seen = now["status"]["observedGeneration"] == now["metadata"]["generation"];
            let groups = cluster.get("shardgroups").await?;
            let groups = groups["items"].as_array().map_or(0, Vec::len);
            let ready = condition(&now, "Ready").is_some_and(|ready| ready["status"] == "True");
            Ok(seen && ready && groups == 1)
        })
        .await?;
    answers_again(cluster).await?;
    println!("fault: spec edited, new plan answers = {:.2} of 60", struck.elapsed().as_secs_f64());
    check_invariants(cluster).await
}

/// A rank of a deleted deployment dies: its streams cannot be resumed.
pub async fn deletion(cluster: &mut TestCluster) -> Result<()> {
    let undisturbed = expected(cluster).await?;
    let pid = engine_of(cluster, 0).await?;
    let mut answer = path::long_answer(cluster, TOKENS).await?;
    path::delete_object(cluster, "modeldeployments/smoke").await?;
    kill(pid);
    let struck = Instant::now();
    let end = answer.finish().await;
    ensure!(end == StreamEnd::Failed("engine_lost".into()), "the stream ended with {end:?}");
    println!("fault: deleted and lost, stream ended = {:.2}", struck.elapsed().as_secs_f64());
    ensure!(undisturbed.starts_with(&answer.text), "wrong tokens before the error:\n{}", answer.text);
    cluster
        .until("its shards are gone", async |cluster| {
            Ok(cluster.get("shards").await?["items"].as_array().is_some_and(Vec::is_empty))
        })
        .await?;
    path::quickstart(cluster).await?;
    answers_again(cluster).await?;
    check_invariants(cluster).await
}
