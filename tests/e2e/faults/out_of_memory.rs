//! Memory that the system does not give: from one moment on a rank is given nothing more, as on a machine that is full.
//! Whatever its libraries make of that, the streams beside the request that needed more go on, and an engine that has
//! room again answers.

use anyhow::{Result, ensure};
use russet_tests::chat::{self, StreamEnd};
use russet_tests::cluster::TestCluster;
use serde_json::json;

use super::{TOKENS, answers_again, resumed_count, until_ended, engine_of, expected, finish_resumed, check_invariants};
use crate::path;

/// A rank is starved in the middle of a stream, and a prompt comes that needs more than it has.
pub async fn rank(cluster: &mut TestCluster, rank: i64) -> Result<()> {
    // New engines: one that has read such a prompt before has the room for it.
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
    ensure!(matches!(end, StreamEnd::Finished(_) | StreamEnd::Failed(_)), "what needed the memory ended with {end:?}");
    println!("  what needed the memory ended with {end:?}");
    until_ended(cluster, pid).await?;
    ensure!(resumed_count(cluster).await? > before, "the stream did not go on elsewhere");
    answers_again(cluster).await?;
    path::ready(cluster).await?;
    check_invariants(cluster).await
}

/// Has a process get no more memory to write to than it has.
#[cfg(target_os = "linux")]
fn starve(pid: i32) -> Result<()> {
    use anyhow::Context as _;
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    // Less than it has, so that not even what it gives back is had again; none at all would count as no limit.
    let limit = Rlimit { current: Some(4096), maximum: None };
    prlimit(Pid::from_raw(pid), Resource::Data, limit).with_context(|| format!("cannot limit {pid}"))?;
    Ok(())
}

/// A process limits itself alone here.
#[cfg(not(target_os = "linux"))]
fn starve(pid: i32) -> Result<()> {
    anyhow::bail!("nobody can limit the memory of process {pid} but itself on this system")
}
