//! The processes of a group, from start to exit. Relays their messages; not here: the meaning of these.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener},
    process::{Child, Command, Stdio},
    sync::{
        atomic::{AtomicU16, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use russet_engine::{
    executor::Addresses,
    runtime::environment::{self, MlxEnvironment},
};
use serde::{Deserialize, Serialize};

use crate::Case;

/// One group takes seconds; a group that hangs must fail the test and not hang it.
const GROUP_TIMEOUT: Duration = Duration::from_secs(300);

/// How often ranks are looked after while rank 0 says nothing.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Orders for one process of a group.
#[derive(Serialize, Deserialize)]
pub struct RankOrders {
    pub case: Case,
    pub rank: u32,
    pub addresses: Addresses,
}

/// The processes of a group. Only rank 0 sends; the others receive.
pub struct RankGroup {
    pub children: Vec<Child>,
    /// Queued orders for each follower, so that a blocked one does not delay the others.
    followers: Vec<mpsc::Sender<String>>,
    lines: mpsc::Receiver<String>,
    /// Standard error of each rank, read continuously: a full pipe would block the rank.
    errors: Vec<JoinHandle<String>>,
    pub started: Instant,
    _work: tempfile::TempDir,
}

impl RankGroup {
    pub fn start(purpose: &str, case: &Case) -> Result<Self> {
        let work = tempfile::tempdir()?;
        let size = case.layers_per_rank().len();
        let members = case.members as usize;
        let (tensor, pipeline) = (free_addresses(size)?, free_addresses(size)?);
        let (say, lines) = mpsc::channel();
        let mut group = Self {
            children: Vec::new(),
            followers: Vec::new(),
            lines,
            errors: Vec::new(),
            started: Instant::now(),
            _work: work,
        };
        for rank in 0..size {
            let stage = rank / members * members;
            let addresses = Addresses {
                tensor: tensor[stage..stage + members].to_vec(),
                pipeline: pipeline.iter().skip(rank % members).step_by(members).copied().collect(),
            };
            let orders = RankOrders { case: case.clone(), rank: rank as u32, addresses };
            let files = group._work.path().join(format!("{rank}.rank"));
            let place = MlxEnvironment { rank: rank as u32, files, jaccl: None, fast_fence: false };
            let mut child = Command::new(std::env::current_exe()?)
                .args(["rank", purpose, &serde_json::to_string(&orders)?])
                .envs(environment::variables(Some(&place)))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()?;
            let mut stderr = child.stderr.take().context("a rank has no standard error")?;
            group.errors.push(std::thread::spawn(move || {
                let mut bytes = Vec::new();
                // Whatever was read until then is still worth showing.
                let _ = stderr.read_to_end(&mut bytes);
                String::from_utf8_lossy(&bytes).trim_end().to_owned()
            }));
            group.children.push(child);
        }
        let output = group.children[0].stdout.take().context("rank 0 has no output")?;
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if say.send(line).is_err() {
                    break;
                }
            }
        });
        for mut input in group.children.iter_mut().skip(1).filter_map(|child| child.stdin.take()) {
            let (pass, orders) = mpsc::channel::<String>();
            group.followers.push(pass);
            std::thread::spawn(move || {
                for order in orders {
                    // A dead follower shows in rank 0's error.
                    let _ = writeln!(input, "{order}").and_then(|()| input.flush());
                }
            });
        }
        Ok(group)
    }

    /// Relays rank 0's orders until it prints a keyword; returns the rest of that line.
    pub fn relay(&mut self, word: &str) -> Result<String> {
        loop {
            let left = GROUP_TIMEOUT.saturating_sub(self.started.elapsed());
            let line = match self.lines.recv_timeout(left.min(CHECK_INTERVAL)) {
                Ok(line) => line,
                Err(mpsc::RecvTimeoutError::Timeout) if left > CHECK_INTERVAL => {
                    // The others wait for one that has failed.
                    let failed = |child: &mut Child| {
                        child.try_wait().is_ok_and(|ended| ended.is_some_and(|it| !it.success()))
                    };
                    ensure!(
                        !self.children.iter_mut().any(failed),
                        "a rank failed before rank 0 said {word:?}:{}",
                        self.end_all()
                    );
                    continue;
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    bail!("rank 0 ended before it said {word:?}:{}", self.end_all())
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    bail!(
                        "rank 0 did not say {word:?} within {} s:{}",
                        GROUP_TIMEOUT.as_secs(),
                        self.end_all()
                    )
                }
            };
            match line.split_once(' ') {
                Some((said, rest)) if said == word => return Ok(rest.to_owned()),
                Some(("order", order)) => {
                    for follower in &self.followers {
                        // Its thread ends only with this sender.
                        let _ = follower.send(order.to_owned());
                    }
                }
                _ => bail!("rank 0 said {line:?}:{}", self.end_all()),
            }
        }
    }

    /// Closes the followers' input, which ends them; every rank has to exit successfully.
    pub fn end(&mut self) -> Result<()> {
        self.followers.clear();
        for rank in 0..self.children.len() {
            self.ended_well(rank)?;
        }
        Ok(())
    }

    /// Waits until a rank has exited by itself.
    pub fn ended_well(&mut self, rank: usize) -> Result<()> {
        let status = loop {
            if let Some(status) = self.children[rank].try_wait()? {
                break status;
            }
            if self.started.elapsed() > GROUP_TIMEOUT {
                bail!("rank {rank} did not end within {} s:{}", GROUP_TIMEOUT.as_secs(), self.end_all());
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        ensure!(status.success(), "rank {rank} ended with {status}:{}", self.end_all());
        Ok(())
    }

    /// Ends the ranks; reports which were killed, and the standard error of each.
    fn end_all(&mut self) -> String {
        let state = |child: &mut Child| match child.try_wait() {
            Ok(Some(status)) => status.to_string(),
            _ => "still running".to_owned(),
        };
        let states: Vec<String> = self.children.iter_mut().map(state).collect();
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        let said = self.errors.drain(..).map(|reader| reader.join().unwrap_or_default());
        let ranks = states.iter().zip(said).enumerate();
        ranks.map(|(rank, (state, said))| format!("\nrank {rank}, {state}: {said}")).collect()
    }
}

impl Drop for RankGroup {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Free addresses below the ephemeral port range: MLX binds them a moment later, and no outgoing connection
/// may take them before.
fn free_addresses(count: usize) -> Result<Vec<SocketAddr>> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let base = 20_000 + (std::process::id() % 100) as u16 * 100;
    let mut addresses = Vec::new();
    for _ in 0..10_000 {
        let port = base.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        if port >= 20_000 && TcpListener::bind(address).is_ok() {
            addresses.push(address);
        }
        if addresses.len() == count {
            return Ok(addresses);
        }
    }
    bail!("no {count} free ports on loopback")
}
