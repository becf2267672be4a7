//! Fault campaign: any rank is killed or frozen at any stage of its life, beside running streams: while it
//! starts, loads, joins, prefills or decodes. The fault, its target and the load are drawn from
//! `RUSSET_FAULT_SEED` and the number of the round, so that a round can be repeated.
//!
//! ```text
//! load, join:     streams run ─▶ a rank dies ─▶ the group re-forms ─▶ fault there ─▶ and again ─▶ streams resume
//! prompt, answer: streams run ─▶ fault ─▶ the group re-forms ─▶ streams resume
//! ```

mod draw;
mod rank;
mod streams;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use russet_tests::cluster::{TestCluster, WAIT_TIMEOUT, kill};

use self::draw::{Fault, FaultDraw};
use self::rank::{RankFolder, RankStage};
use self::streams::Streams;
use super::frozen::FrozenProcesses;
use super::{answers_again, check_invariants, until_ended};
use crate::path;

pub use self::draw::Aim;

/// The notes of both agents, each from its length when this was created.
struct AgentLogs(Vec<(std::path::PathBuf, usize)>);

impl AgentLogs {
    fn new(cluster: &TestCluster) -> Self {
        let length = |path: &Path| std::fs::metadata(path).map_or(0, |data| data.len() as usize);
        Self(cluster.agent_logs().into_iter().map(|path| (path.clone(), length(&path))).collect())
    }

    /// An agent's note of a failed engine, if there is one.
    fn engine_failure(&self) -> Option<String> {
        self.0.iter().find_map(|(path, from)| {
            let bytes = std::fs::read(path).ok()?;
            let text = String::from_utf8_lossy(bytes.get(*from..)?).into_owned();
            let lost = |line: &&str| line.contains("engine failed") || line.contains("engine is gone");
            text.lines().find(lost).map(str::to_owned)
        })
    }
}

/// Waits until an agent has detected the fault; returns when, and its note.
async fn until_noticed(
    cluster: &TestCluster,
    notes: &AgentLogs,
    struck: Instant,
) -> Result<(Duration, String)> {
    while struck.elapsed() < WAIT_TIMEOUT {
        if let Some(words) = notes.engine_failure() {
            return Ok((struck.elapsed(), words));
        }
        // Polled often: this is what is measured.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    bail!("no agent noticed within {} s\n{}", WAIT_TIMEOUT.as_secs(), cluster.diagnostics().await)
}

/// One round: injects the drawn fault, and requires that every stream completes as if undisturbed.
pub async fn strike(cluster: &mut TestCluster, aim: Aim) -> Result<()> {
    let drawn = FaultDraw::next(aim)?;
    println!("  {drawn}");
    path::quickstart(cluster).await?;
    let folders = RankFolder::all(cluster).await?;
    let folder =
        folders.iter().find(|folder| folder.rank == drawn.rank).context("the drawn rank has no Shard")?;
    let streams = Streams::start(cluster, &drawn).await?;
    let pid = match aim {
        Aim::Load | Aim::Join => {
            let first = folders.iter().find(|folder| folder.rank == drawn.first).context("no such rank")?;
            let (epoch, pid) = first.engine().context("the rank that is to die first does not run")?;
            kill(pid);
            folder.until(cluster, epoch, &drawn.mark).await?
        }
        Aim::Prompt | Aim::Answer => folder.engine().context("the drawn rank does not run")?.1,
    };
    let notes = AgentLogs::new(cluster);
    let (reading, struck) = (streams.reading(), Instant::now());
    let frozen = match drawn.fault {
        Fault::Kill => {
            kill(pid);
            None
        }
        Fault::Freeze => Some(FrozenProcesses::new(&[pid])?),
    };
    // Its actual stage: the rank went on while the fault was being injected.
    let stage = match folder.stage(pid) {
        RankStage::Serves if reading => RankStage::Reads,
        stage => stage,
    };
    let (seconds, words) = until_noticed(cluster, &notes, struck).await?;
    let what = format!("rank {} {} {}", drawn.rank, drawn.fault, stage);
    println!("  {what}: {words}");
    println!("fault: {what}, noticed = {:.2} of {}", seconds.as_secs_f64(), Fault::DETECTION_SECONDS);
    let longest = streams.end(cluster).await?;
    println!(
        "fault: {what}, streams stood still = {:.2} of {}",
        longest.as_secs_f64(),
        30 + Fault::DETECTION_SECONDS
    );
    answers_again(cluster).await?;
    path::ready(cluster).await?;
    drop(frozen);
    until_ended(cluster, pid).await?;
    ensure!(cluster.engines().await?.iter().all(|(_, new)| *new != pid), "the struck engine is still named");
    check_invariants(cluster).await
}
