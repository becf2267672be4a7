//! Any rank killed or frozen at any step of its life, beside streams that have begun: while it starts, loads, joins the
//! others, reads prompts or answers. What is struck, where and beside what is drawn from `RUSSET_FAULT_SEED` and the
//! number of the round, so that a round can be had again.
//!
//! ```text
//! load, join:     streams run ─▶ a rank dies ─▶ the group forms anew ─▶ strike there ─▶ and once more ─▶ streams go on
//! prompt, answer: streams run ─▶ strike ─▶ the group forms anew ─▶ streams go on
//! ```

mod drawn;
mod seat;
mod streams;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use russet_tests::cluster::{Cluster, PATIENCE, kill};

use self::drawn::{Drawn, Fault};
use self::seat::{Seat, Stage};
use self::streams::Streams;
use super::frozen::Frozen;
use super::{answers_again, ended, sound};
use crate::path;

pub use self::drawn::Aim;

/// The notes of both agents, each from where they were when this was made.
struct Notes(Vec<(std::path::PathBuf, usize)>);

impl Notes {
    fn new(cluster: &Cluster) -> Self {
        let length = |path: &Path| std::fs::metadata(path).map_or(0, |data| data.len() as usize);
        Self(cluster.agent_logs().into_iter().map(|path| (path.clone(), length(&path))).collect())
    }

    /// What an agent noted of an engine that is of no more use, if one has.
    fn trouble(&self) -> Option<String> {
        self.0.iter().find_map(|(path, from)| {
            let bytes = std::fs::read(path).ok()?;
            let text = String::from_utf8_lossy(bytes.get(*from..)?).into_owned();
            let told = |line: &&str| line.contains("engine failed") || line.contains("engine is gone");
            text.lines().find(told).map(str::to_owned)
        })
    }
}

/// Waits until an agent has noticed, and says when that was and what it noted.
async fn noticed(cluster: &Cluster, notes: &Notes, struck: Instant) -> Result<(Duration, String)> {
    while struck.elapsed() < PATIENCE {
        if let Some(words) = notes.trouble() {
            return Ok((struck.elapsed(), words));
        }
        // Looked at often: this is what is measured.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    bail!("no agent noticed within {} s\n{}", PATIENCE.as_secs(), cluster.diagnosis().await)
}

/// One round: strikes where it was drawn, and demands that every stream goes on as if nothing had been.
pub async fn strike(cluster: &mut Cluster, aim: Aim) -> Result<()> {
    let drawn = Drawn::next(aim)?;
    println!("  {drawn}");
    path::quickstart(cluster).await?;
    let seats = Seat::all(cluster).await?;
    let seat = seats.iter().find(|seat| seat.rank == drawn.rank).context("the drawn rank has no Shard")?;
    let streams = Streams::begin(cluster, &drawn).await?;
    let pid = match aim {
        Aim::Load | Aim::Join => {
            let first = seats.iter().find(|seat| seat.rank == drawn.first).context("no such rank")?;
            let (epoch, pid) = first.engine().context("the rank that is to die first does not run")?;
            kill(pid);
            seat.until(cluster, epoch, &drawn.mark).await?
        }
        Aim::Prompt | Aim::Answer => seat.engine().context("the drawn rank does not run")?.1,
    };
    let notes = Notes::new(cluster);
    let (reading, struck) = (streams.reading(), Instant::now());
    let frozen = match drawn.fault {
        Fault::Kill => {
            kill(pid);
            None
        }
        Fault::Freeze => Some(Frozen::new(&[pid])?),
    };
    // Where it was by then: it went on while this was on its way.
    let stage = match seat.stage(pid) {
        Stage::Serves if reading => Stage::Reads,
        stage => stage,
    };
    let (seconds, words) = noticed(cluster, &notes, struck).await?;
    let what = format!("rank {} {} {}", drawn.rank, drawn.fault, stage);
    println!("  {what}: {words}");
    println!("fault: {what}, noticed = {:.2} of {}", seconds.as_secs_f64(), Fault::BOUND);
    let longest = streams.end(cluster).await?;
    println!("fault: {what}, streams stood still = {:.2} of {}", longest.as_secs_f64(), 30 + Fault::BOUND);
    answers_again(cluster).await?;
    path::ready(cluster).await?;
    drop(frozen);
    ended(cluster, pid).await?;
    ensure!(cluster.engines().await?.iter().all(|(_, new)| *new != pid), "the struck engine is still named");
    sound(cluster).await
}
