//! SIGSTOP: a process exists, keeps its connections and does nothing. To others it looks like a machine
//! without power or a network that drops all packets.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use russet_tests::chat::StreamEnd;
use russet_tests::cluster::TestCluster;
use russet_tests::control_plane::PlaneProcess;
use rustix::process::{Pid, Signal, kill_process};

use super::{
    TOKENS, answers_again, check_answers, check_invariants, engine_of, expected, finish_resumed,
    finish_undisturbed, resumed_count, until_ended,
};
use crate::path;

/// How long a process of the control plane stays frozen: longer than a Lease lasts, every fifth time,
/// starting with the first; else only as long as the checks meanwhile take.
fn freeze_time(rounds: &AtomicUsize) -> Duration {
    let long = rounds.fetch_add(1, Ordering::Relaxed).is_multiple_of(5);
    if long { Duration::from_secs(25) } else { Duration::ZERO }
}

/// Stopped processes; they continue when this is dropped, however the scenario ends.
pub struct FrozenProcesses(Vec<Pid>);

impl FrozenProcesses {
    /// Stops them.
    pub fn new(pids: &[i32]) -> Result<Self> {
        let pids: Vec<Pid> = pids.iter().filter_map(|pid| Pid::from_raw(*pid)).collect();
        ensure!(!pids.is_empty(), "there is nothing to freeze");
        let frozen = Self(pids);
        for pid in &frozen.0 {
            kill_process(*pid, Signal::STOP).with_context(|| format!("cannot stop {pid:?}"))?;
        }
        Ok(frozen)
    }
}

impl Drop for FrozenProcesses {
    fn drop(&mut self) {
        for pid in &self.0 {
            let _ = kill_process(*pid, Signal::CONT);
        }
    }
}

/// A rank freezes: the group re-forms, the stream resumes, the frozen process is gone.
pub async fn rank(cluster: &mut TestCluster, rank: i64) -> Result<()> {
    let undisturbed = expected(cluster).await?;
    let pid = engine_of(cluster, rank).await?;
    let before = resumed_count(cluster).await?;
    let mut answer = path::long_answer(cluster, TOKENS).await?;
    let _frozen = FrozenProcesses::new(&[pid])?;
    let longest = finish_resumed(&mut answer, &undisturbed).await?;
    println!("fault: rank {rank} frozen, stream stood still = {:.2} of 30", longest.as_secs_f64());
    answers_again(cluster).await?;
    ensure!(resumed_count(cluster).await? > before, "the stream did not go on elsewhere");
    path::ready(cluster).await?;
    until_ended(cluster, pid).await?;
    check_invariants(cluster).await
}

/// Each agent freezes: its engine keeps running, and still belongs to it afterwards.
pub async fn agents(cluster: &mut TestCluster) -> Result<()> {
    let undisturbed = expected(cluster).await?;
    for near in [true, false] {
        let engines = cluster.engines().await?;
        let pids = if near { cluster.pids(PlaneProcess::Agent)? } else { vec![cluster.far_agent()?] };
        let node = if near { "node-a" } else { "node-b" };
        let mut answer = path::long_answer(cluster, TOKENS).await?;
        let frozen = FrozenProcesses::new(&pids)?;
        let before = super::renew_time(cluster, node).await?;
        finish_undisturbed(&mut answer).await?;
        ensure!(answer.text == undisturbed, "the text changed:\n{}\n{undisturbed}", answer.text);
        let thawed = Instant::now();
        drop(frozen);
        super::until_renewed(cluster, node, before).await?;
        println!(
            "fault: agent of {node} frozen and back, Lease renewed = {:.2}",
            thawed.elapsed().as_secs_f64()
        );
        path::ready(cluster).await?;
        ensure!(cluster.engines().await? == engines, "the engines changed: {engines:?}");
        check_invariants(cluster).await?;
    }
    Ok(())
}

/// The API server and the operator freeze, which looks like a partition in front of them: no stream is
/// affected, and everything continues afterwards.
pub async fn serve(cluster: &mut TestCluster) -> Result<()> {
    let undisturbed = expected(cluster).await?;
    let engines = cluster.engines().await?;
    let mut answer = path::long_answer(cluster, TOKENS).await?;
    static ROUNDS: AtomicUsize = AtomicUsize::new(0);
    let length = freeze_time(&ROUNDS);
    let frozen = FrozenProcesses::new(&cluster.pids(PlaneProcess::Serve)?)?;
    finish_undisturbed(&mut answer).await?;
    ensure!(answer.text == undisturbed, "the text changed:\n{}\n{undisturbed}", answer.text);
    // New requests are answered too: the gateway knows its engines.
    check_answers(cluster).await?;
    // The duration of the fault itself, not a wait for a condition.
    tokio::time::sleep(length).await;
    let thawed = Instant::now();
    drop(frozen);
    cluster
        .until("the API answers", async |cluster| Ok(cluster.get("modeldeployments smoke").await.is_ok()))
        .await?;
    println!("fault: serve frozen and back, API answers = {:.2}", thawed.elapsed().as_secs_f64());
    super::until_caught_up(cluster).await?;
    path::ready(cluster).await?;
    ensure!(cluster.engines().await? == engines, "the engines changed: {engines:?}");
    check_invariants(cluster).await
}

/// The gateway freezes: its streams stall, and then continue.
pub async fn gateway(cluster: &mut TestCluster) -> Result<()> {
    let undisturbed = expected(cluster).await?;
    let engines = cluster.engines().await?;
    let mut answer = path::long_answer(cluster, TOKENS).await?;
    static ROUNDS: AtomicUsize = AtomicUsize::new(0);
    let length = freeze_time(&ROUNDS);
    let frozen = FrozenProcesses::new(&cluster.pids(PlaneProcess::Gateway)?)?;
    // Everything else still works meanwhile.
    path::ready(cluster).await?;
    // Chunks that it had sent before are read first.
    while let Ok(piece) = tokio::time::timeout(Duration::from_millis(500), answer.piece()).await {
        ensure!(matches!(piece, Ok(Some(_))), "the stream of a frozen gateway ended with {piece:?}");
    }
    tokio::time::sleep(length).await;
    let thawed = Instant::now();
    drop(frozen);
    let piece = answer.piece().await;
    ensure!(matches!(piece, Ok(Some(_))), "the stream went on with {piece:?}");
    println!("fault: gateway frozen and back, stream goes on = {:.2}", thawed.elapsed().as_secs_f64());
    let end = answer.finish().await;
    ensure!(end == StreamEnd::Finished("length".into()), "the stream ended with {end:?}");
    ensure!(answer.text == undisturbed, "the text changed:\n{}\n{undisturbed}", answer.text);
    answers_again(cluster).await?;
    ensure!(cluster.engines().await? == engines, "the engines changed: {engines:?}");
    check_invariants(cluster).await
}
