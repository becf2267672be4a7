//! The processes of a group, from their start to their end. What they say to each other goes through here;
//! what it means is theirs.

use std::{
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpListener},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        atomic::{AtomicU16, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use russet_engine::{
    compute::Addresses,
    runtime::environment::{self, Place},
};
use serde::{Deserialize, Serialize};

use crate::Case;

/// One group takes seconds; a group that hangs must fail the test and not hang it.
const PATIENCE: Duration = Duration::from_secs(300);

/// What one process of a group is told.
#[derive(Serialize, Deserialize)]
pub struct Orders {
    pub case: Case,
    pub rank: u32,
    pub addresses: Addresses,
}

/// The processes of a group. Only rank 0 speaks; the others listen.
pub struct Group {
    pub children: Vec<Child>,
    followers: Vec<ChildStdin>,
    lines: mpsc::Receiver<String>,
    pub started: Instant,
    _work: tempfile::TempDir,
}

impl Group {
    pub fn start(purpose: &str, case: &Case) -> Result<Self> {
        let work = tempfile::tempdir()?;
        let size = case.layers_per_rank().len();
        let members = case.members as usize;
        let (tensor, pipeline) = (free_addresses(size)?, free_addresses(size)?);
        let (say, lines) = mpsc::channel();
        let mut group =
            Self { children: Vec::new(), followers: Vec::new(), lines, started: Instant::now(), _work: work };
        for rank in 0..size {
            let stage = rank / members * members;
            let addresses = Addresses {
                tensor: tensor[stage..stage + members].to_vec(),
                pipeline: pipeline.iter().skip(rank % members).step_by(members).copied().collect(),
            };
            let orders = Orders { case: case.clone(), rank: rank as u32, addresses };
            let files = group._work.path().join(format!("{rank}.rank"));
            let place = Place { rank: rank as u32, files, jaccl: None };
            let child = Command::new(std::env::current_exe()?)
                .args(["rank", purpose, &serde_json::to_string(&orders)?])
                .envs(environment::variables(Some(&place)))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()?;
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
        group.followers = group.children.iter_mut().skip(1).filter_map(|child| child.stdin.take()).collect();
        Ok(group)
    }

    /// Passes rank 0's orders on until it says `word`; what follows the word.
    pub fn relay(&mut self, word: &str) -> Result<String> {
        loop {
            let left =
                PATIENCE.checked_sub(self.started.elapsed()).context("the group did not finish in time")?;
            let Ok(line) = self.lines.recv_timeout(left) else {
                bail!("rank 0 said no more\n{}", self.errors());
            };
            match line.split_once(' ') {
                Some((said, rest)) if said == word => return Ok(rest.to_owned()),
                Some(("order", order)) => {
                    for follower in &mut self.followers {
                        // A follower that is gone shows in rank 0's error.
                        let _ = writeln!(follower, "{order}").and_then(|()| follower.flush());
                    }
                }
                _ => bail!("rank 0 said {line:?}\n{}", self.errors()),
            }
        }
    }

    /// The end of their input is the end of the followers, and every rank has to end well.
    pub fn end(&mut self) -> Result<()> {
        self.followers.clear();
        for rank in 0..self.children.len() {
            let status = self.children[rank].wait()?;
            ensure!(status.success(), "rank {rank} ended with {status}\n{}", self.errors());
        }
        Ok(())
    }

    /// What the ranks wrote to standard error; ends them.
    pub fn errors(&mut self) -> String {
        let mut text = String::new();
        for (rank, child) in self.children.iter_mut().enumerate() {
            let _ = child.kill();
            if let Some(stderr) = child.stderr.take() {
                let lines: Vec<String> = BufReader::new(stderr).lines().map_while(Result::ok).collect();
                text.push_str(&format!("rank {rank}: {}\n", lines.join("\n")));
            }
        }
        text
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Addresses that are free, below the range from which systems take ports for outgoing connections: MLX
/// binds them a moment later, and nothing else may have got them by then.
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
