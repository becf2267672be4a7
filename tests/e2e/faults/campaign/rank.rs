//! Files in which a rank's agent records its engine, and the engine its progress: a rank's stage shows up
//! there soon enough to inject a fault, which it would not at the API server.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use russet_tests::cluster::{TestCluster, WAIT_TIMEOUT};
use serde_json::Value;

/// Stage of a rank at the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankStage {
    /// It does not listen yet.
    Starts,
    /// It listens, and its weights are not all in memory.
    Loads,
    /// It connects to the others, and runs the smoke prompt with them.
    Joins,
    /// It serves, without a prompt in prefill.
    Serves,
    /// It serves, with a prompt in prefill.
    Reads,
}

impl fmt::Display for RankStage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Starts => "as it starts",
            Self::Loads => "as it loads",
            Self::Joins => "as it joins",
            Self::Serves => "in answers",
            Self::Reads => "in prompts",
        })
    }
}

/// The event to wait for before the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankMilestone {
    /// Its process exists.
    Born,
    /// Its sockets listen.
    Listens,
    /// Its weights are loaded.
    Loaded,
    /// It connects to the others' rings.
    Joins,
    /// All rings are connected.
    Joined,
}

impl RankMilestone {
    /// The event's text in the engine's log.
    fn words(self) -> &'static str {
        match self {
            // That line starts the part of this process.
            Self::Born | Self::Listens => "",
            Self::Loaded => LOADED,
            Self::Joins => "joins the rings",
            Self::Joined => "joined the rings",
        }
    }
}

impl fmt::Display for RankMilestone {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Born => "just born",
            Self::Listens => "listening",
            Self::Loaded => "loaded",
            Self::Joins => "joining the rings",
            Self::Joined => "in all rings",
        })
    }
}

const LOADED: &str = "the weights are in memory";
const SERVES: &str = "serving";

/// One rank's folder on its node.
pub struct RankFolder {
    /// The rank.
    pub rank: i64,
    folder: PathBuf,
}

impl RankFolder {
    /// The folders of all ranks.
    pub async fn all(cluster: &TestCluster) -> Result<Vec<Self>> {
        let shards = path_of_smoke(cluster).await?;
        let rank_folder = |shard: &Value| {
            let node = match shard["spec"]["nodeName"].as_str() {
                Some("node-a") => cluster.near_dir(),
                _ => cluster.far_dir(),
            };
            let uid = shard["metadata"]["uid"].as_str().context("a Shard without a UID")?;
            let rank = shard["spec"]["rank"].as_i64().context("a Shard without a rank")?;
            Ok(Self { rank, folder: node.join("agent/engines").join(uid) })
        };
        shards.iter().map(rank_folder).collect()
    }

    /// Epoch and process of its engine, as its agent recorded them.
    pub fn engine(&self) -> Option<(i64, i32)> {
        let record: Value =
            serde_json::from_slice(&std::fs::read(self.folder.join("state.json")).ok()?).ok()?;
        Some((record["epoch"].as_i64()?, record["process"]["pid"].as_i64()? as i32))
    }

    /// The log of the engine with this process id since it listens for its epoch; `None` before that: a
    /// process may serve several epochs, one after the other.
    fn log_since_listening(&self, pid: i32) -> Option<String> {
        let (epoch, _) = self.engine()?;
        let text = std::fs::read(self.folder.join("engine.log")).ok()?;
        let text = String::from_utf8_lossy(&text);
        let marks = [format!("pid={pid}"), format!("epoch={epoch}")];
        let listens = |line: &str| {
            line.contains("listening")
                && marks.iter().all(|mark| line.split_whitespace().any(|word| word == mark))
        };
        let lines: Vec<&str> = text.lines().collect();
        let from = lines.iter().rposition(|line| listens(line))?;
        Some(lines[from..].join("\n"))
    }

    /// Its stage.
    pub fn stage(&self, pid: i32) -> RankStage {
        match self.log_since_listening(pid) {
            None => RankStage::Starts,
            Some(said) if said.contains(SERVES) => RankStage::Serves,
            Some(said) if said.contains(LOADED) => RankStage::Joins,
            Some(_) => RankStage::Loads,
        }
    }

    /// Waits until the engine of a later epoch than this one has reached the event; returns its process id.
    pub async fn until(&self, cluster: &TestCluster, epoch: i64, mark: &RankMilestone) -> Result<i32> {
        let started = Instant::now();
        loop {
            if let Some((now, pid)) = self.engine()
                && now > epoch
                && (*mark == RankMilestone::Born
                    || self.log_since_listening(pid).is_some_and(|said| said.contains(mark.words())))
            {
                return Ok(pid);
            }
            if started.elapsed() > WAIT_TIMEOUT {
                let diagnosis = cluster.diagnostics().await;
                ensure!(false, "rank {} was not {mark} again after epoch {epoch}\n{diagnosis}", self.rank);
            }
            // Loading a small model takes a few dozen milliseconds.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

async fn path_of_smoke(cluster: &TestCluster) -> Result<Vec<Value>> {
    crate::path::shards_of(cluster, "smoke").await
}
