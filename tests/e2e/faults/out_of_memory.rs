//! Memory exhaustion: from one moment on a rank gets no more memory, as on a full machine. However its
//! libraries react, the streams beside the request that needed more continue, and an engine with free memory
//! answers again.

use anyhow::{Result, ensure};
use russet_tests::chat::{self, StreamEnd};
use russet_tests::cluster::TestCluster;
use serde_json::json;

use super::{
    TOKENS, answers_again, check_invariants, engine_of, expected, finish_resumed, resumed_count, until_ended,
};
use crate::path;

/// A rank is starved in the middle of a stream, and a prompt arrives that needs more memory than it has.
pub async fn rank(cluster: &mut TestCluster, rank: i64) -> Result<()> {
    // New engines: one that has prefilled such a prompt before already has the memory for it.
    path::quickstart(cluster).await?;
    path::delete(cluster).await?;
    let undisturbed = expected(cluster).await?;
    let pid = engine_of(cluster, rank).await?;
    let before = resumed_count(cluster).await?;
    let mut answer = path::long_answer(cluster, TOKENS).await?;
    starve(pid)?;
    let sums: Vec<String> = (10..110).map(|number| format!("{number} + 25")).collect();
    let body = chat::question("smoke", &sums.join(", "), json!({"max_tokens": 20, "ignore_eos": true}));
    let url = cluster.base_url();
    let hungry = tokio::spawn(async move { anyhow::Ok(chat::ask(&url, &body).await?.finish().await) });
    let longest = finish_resumed(&mut answer, &undisturbed).await?;
    println!("fault: rank {rank} without memory, stream stood still = {:.2} of 30", longest.as_secs_f64());
    let end = hungry.await??;
    ensure!(
        matches!(end, StreamEnd::Finished(_) | StreamEnd::Failed(_)),
        "what needed the memory ended with {end:?}"
    );
    println!("  what needed the memory ended with {end:?}");
    until_ended(cluster, pid).await?;
    ensure!(resumed_count(cluster).await? > before, "the stream did not go on elsewhere");
    answers_again(cluster).await?;
    path::ready(cluster).await?;
    check_invariants(cluster).await
}

/// Prevents a process from getting more writable memory.
#[cfg(target_os = "linux")]
fn starve(pid: i32) -> Result<()> {
    use anyhow::Context as _;
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    // Less than it uses, so that it cannot even reuse freed memory; zero would count as no limit.
    let limit = Rlimit { current: Some(4096), maximum: None };
    prlimit(Pid::from_raw(pid), Resource::Data, limit).with_context(|| format!("cannot limit {pid}"))?;
    Ok(())
}

/// Here a process can limit only itself.
#[cfg(not(target_os = "linux"))]
fn starve(pid: i32) -> Result<()> {
    anyhow::bail!("nobody can limit the memory of process {pid} but itself on this system")
}
