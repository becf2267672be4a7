//! A running cluster: `russet up` on the near machine, `russet join` on the far one, as a person
//! would start them. Everything ends with the value: children stop when their input closes, engines
//! when nobody watches them, and what is left is killed.

use std::net::{IpAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tokio::process::{Child, Command};

use crate::hub::Hub;
use crate::lab::{Lab, Machine};

/// Waits are for conditions; this bounds a wait that would never end.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A cluster of two machines.
pub struct Cluster {
    /// The machines.
    pub lab: Lab,
    /// Where models come from.
    pub hub: Hub,
    /// Port of the API server.
    pub api_port: u16,
    /// Port of the gateway.
    pub gateway_port: u16,
    russet: PathBuf,
    folder: tempfile::TempDir,
    up: Option<Child>,
    join: Option<Child>,
}

/// The programs, beside the running one.
pub fn program(name: &str) -> Result<PathBuf> {
    let mut folder = std::env::current_exe()?;
    folder.pop();
    if folder.ends_with("deps") {
        folder.pop();
    }
    let path = folder.join(name);
    if !path.exists() {
        bail!("{} is not built; `cargo xtask build` builds it", path.display());
    }
    Ok(path)
}

/// The repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A port free on loopback and on the machine's address, released right before it is used: the API
/// server opens both.
fn free_port(address: IpAddr) -> Result<u16> {
    for _ in 0..100 {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        if address.is_loopback() || TcpListener::bind((address, port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no port is free on loopback and on {address}")
}

impl Cluster {
    /// Starts both machines; `say` hears each step.
    pub async fn start(models: &[(&str, &Path)], say: &mut dyn FnMut(&str)) -> Result<Self> {
        let lab = Lab::new()?;
        if let Some(why) = &lab.fallback {
            say(&format!("both nodes share this machine's loopback, because {why}"));
        }
        let hub = Hub::start(lab.near.address, models).await?;
        let russet = program("russet")?;
        program("russet-engine")?;
        let folder = tempfile::Builder::new().prefix("russet-").tempdir()?;
        let (api_port, gateway_port) = (free_port(lab.near.address)?, free_port(lab.near.address)?);
        let mut cluster = Self { lab, hub, api_port, gateway_port, russet, folder, up: None, join: None };
        say("starting the control plane and node-a (russet up)");
        cluster.start_up().await?;
        say("joining node-b from its own machine (russet token create, russet join)");
        cluster.start_join().await?;
        Ok(cluster)
    }

    /// Data directory of the near machine.
    pub fn near_dir(&self) -> PathBuf {
        self.folder.path().join("node-a")
    }

    /// Data directory of the far machine.
    pub fn far_dir(&self) -> PathBuf {
        self.folder.path().join("node-b")
    }

    /// Administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.near_dir().join("kubeconfig")
    }

    /// Where the control plane shows its metrics, `ip:port`.
    pub fn serve_metrics(&self) -> Result<String> {
        let path = self.near_dir().join("serve/metrics-address");
        std::fs::read_to_string(&path).with_context(|| format!("{}", path.display()))
    }

    /// Base URL of the OpenAI API.
    pub fn base_url(&self) -> String {
        format!("http://127.0.0.1:{}/v1", self.gateway_port)
    }

    fn command(&self, machine: &Machine) -> Command {
        let mut command = machine.command(&self.russet);
        command
            .env("HF_ENDPOINT", self.hub.endpoint())
            .env("RUSSET_LOG", std::env::var("RUSSET_LOG").unwrap_or_else(|_| "info".into()))
            .env_remove("KUBECONFIG")
            .stdin(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    async fn start_up(&mut self) -> Result<()> {
        let near = self.lab.near.clone();
        let log = self.log("up.log")?;
        let data_dir = self.near_dir();
        let mut command = self.command(&near);
        command
            .args(["up", "--exit-with-parent", "--node-name", &near.name])
            .arg("--data-dir")
            .arg(&data_dir)
            .args(["--api-port", &self.api_port.to_string()])
            .args(["--gateway-port", &self.gateway_port.to_string()])
            .args(["--address", &near.address.to_string()])
            .stdout(log.try_clone()?)
            .stderr(log);
        self.up = Some(command.spawn().context("cannot start russet up")?);
        self.until("node-a is Ready", async |cluster| {
            if let Some(status) = cluster.up.as_mut().and_then(|child| child.try_wait().ok().flatten()) {
                bail!("russet up ended ({status}): {}", cluster.read_log("up.log"));
            }
            Ok(cluster.is_ready("inferencenodes", "node-a").await)
        })
        .await
    }

    async fn start_join(&mut self) -> Result<()> {
        let line = self
            .russet(&["token", "create", "--quiet", "--data-dir", &self.near_dir().display().to_string()])
            .await?;
        let token = line.trim().to_owned();
        let far = self.lab.far.clone();
        let log = self.log("join.log")?;
        let data_dir = self.far_dir();
        let mut command = self.command(&far);
        command
            .args(["join", &format!("https://{}:{}", self.lab.near.address, self.api_port)])
            .args(["--exit-with-parent", "--node-name", &far.name, "--token", &token])
            .args(["--address", &far.address.to_string()])
            .arg("--data-dir")
            .arg(&data_dir)
            .stdout(log.try_clone()?)
            .stderr(log);
        self.join = Some(command.spawn().context("cannot start russet join")?);
        self.until("node-b is Ready", async |cluster| {
            if let Some(status) = cluster.join.as_mut().and_then(|child| child.try_wait().ok().flatten()) {
                bail!("russet join ended ({status}): {}", cluster.read_log("join.log"));
            }
            Ok(cluster.is_ready("inferencenodes", "node-b").await)
        })
        .await
    }

    /// Starts the far machine's agent again after its process was killed, as a service manager would.
    pub async fn restart_far_agent(&mut self) -> Result<()> {
        if let Some(mut child) = self.join.take() {
            let _ = child.kill().await;
        }
        let far = self.lab.far.clone();
        let log = self.log("join.log")?;
        let data_dir = self.far_dir();
        let mut command = self.command(&far);
        command
            .args(["agent", "--exit-with-parent", "--node-name", &far.name])
            .args(["--address", &far.address.to_string()])
            .arg("--data-dir")
            .arg(&data_dir)
            .stdout(log.try_clone()?)
            .stderr(log);
        self.join = Some(command.spawn().context("cannot start russet agent")?);
        Ok(())
    }

    fn log(&self, name: &str) -> Result<std::fs::File> {
        Ok(std::fs::OpenOptions::new().create(true).append(true).open(self.folder.path().join(name))?)
    }

    fn read_log(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path().join(name)).unwrap_or_default()
    }

    /// Runs a `russet` verb of a person on the near machine and returns what it printed.
    pub async fn russet(&self, arguments: &[&str]) -> Result<String> {
        let output =
            Command::new(&self.russet).args(arguments).env("KUBECONFIG", self.kubeconfig()).output().await?;
        if !output.status.success() {
            bail!(
                "russet {} failed: {}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    /// One object or list as JSON.
    pub async fn get(&self, what: &str) -> Result<Value> {
        let mut arguments = vec!["get"];
        arguments.extend(what.split_whitespace());
        arguments.extend(["-o", "json"]);
        Ok(serde_json::from_str(&self.russet(&arguments).await?)?)
    }

    async fn is_ready(&self, resource: &str, name: &str) -> bool {
        self.get(&format!("{resource} {name}"))
            .await
            .is_ok_and(|object| condition(&object, "Ready").is_some_and(|ready| ready["status"] == "True"))
    }

    /// Waits until `check` holds, bounded by [`PATIENCE`]; returns how long it took.
    pub async fn until(
        &mut self,
        what: &str,
        mut check: impl AsyncFnMut(&mut Self) -> Result<bool>,
    ) -> Result<()> {
        let start = Instant::now();
        while !check(self).await? {
            if start.elapsed() > PATIENCE {
                bail!("not within {} s: {what}\n{}", PATIENCE.as_secs(), self.diagnosis().await);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    /// Tables and logs for a person who must find out what went wrong.
    pub async fn diagnosis(&self) -> String {
        let mut text = String::new();
        for what in ["russet", "events"] {
            if let Ok(table) = self.russet(&["get", what, "-A", "-o", "wide"]).await {
                text.push_str(&table);
            }
        }
        for name in ["up.log", "join.log"] {
            text.push_str(&format!("--- {name}\n{}", tail(&self.folder.path().join(name), 30)));
        }
        for machine in [self.near_dir(), self.far_dir()] {
            for folder in ["logs", "agent/engines"] {
                for entry in std::fs::read_dir(machine.join(folder)).into_iter().flatten().flatten() {
                    let path =
                        if entry.path().is_dir() { entry.path().join("engine.log") } else { entry.path() };
                    text.push_str(&format!("--- {}\n{}", path.display(), tail(&path, 30)));
                }
            }
        }
        text
    }

    /// Process ids of the engines, by rank, as the Shards' status names them.
    pub async fn engines(&self) -> Result<Vec<(i64, i32)>> {
        let shards = self.get("shards").await?;
        let mut found = Vec::new();
        for shard in shards["items"].as_array().into_iter().flatten() {
            if let (Some(rank), Some(pid)) =
                (shard["spec"]["rank"].as_i64(), shard["status"]["enginePid"].as_i64())
            {
                found.push((rank, pid as i32));
            }
        }
        found.sort_unstable();
        Ok(found)
    }

    /// Process id of a child of `russet up`, by its verb.
    pub fn child_of_up(&self, verb: &str) -> Result<i32> {
        let up = self.up.as_ref().and_then(Child::id).context("russet up is not running")?;
        processes()
            .into_iter()
            .find(|process| {
                process.parent == up as i32 && process.arguments.get(1).is_some_and(|word| word == verb)
            })
            .map(|process| process.pid)
            .with_context(|| format!("russet up has no child `{verb}`"))
    }

    /// Process id of the far machine's agent.
    pub fn far_agent(&self) -> Result<i32> {
        // `ip netns exec` replaces itself by the program, so the child is the agent.
        let pid = self.join.as_ref().and_then(Child::id).context("the far agent is not running")?;
        Ok(pid as i32)
    }

    /// Ends everything and waits until no process is left.
    pub async fn stop(mut self) -> Result<()> {
        for mut child in [self.join.take(), self.up.take()].into_iter().flatten() {
            // Held open until the end: a closed pipe means something else than Ctrl-C.
            let _input = child.stdin.take();
            if let Some(pid) = child.id().and_then(|pid| rustix::process::Pid::from_raw(pid as i32)) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
            }
            if tokio::time::timeout(Duration::from_secs(60), child.wait()).await.is_err() {
                bail!("a process did not end within 60 s of Ctrl-C:\n{}", self.diagnosis().await);
            }
        }
        // A killed process may take a moment to give its memory back.
        let begin = Instant::now();
        loop {
            let left = self.leftovers();
            if left.is_empty() {
                return Ok(());
            }
            if begin.elapsed() > Duration::from_secs(30) {
                bail!("processes outlived the cluster: {left:?}");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn leftovers(&self) -> Vec<(i32, String)> {
        let folder = self.folder.path().display().to_string();
        processes()
            .into_iter()
            .filter(|process| process.arguments.iter().any(|word| word.contains(&folder)))
            .map(|process| (process.pid, process.arguments.join(" ")))
            .collect()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for (pid, _) in self.leftovers() {
            kill(pid);
        }
    }
}

/// SIGKILL.
pub fn kill(pid: i32) {
    if let Some(pid) = rustix::process::Pid::from_raw(pid) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// The condition of an object.
pub fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a Value> {
    object["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == kind)
}

struct Process {
    pid: i32,
    parent: i32,
    arguments: Vec<String>,
}

fn processes() -> Vec<Process> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let Some((_, rest)) = stat.rsplit_once(')') else { continue };
        let mut fields = rest.split_whitespace();
        let state = fields.next().unwrap_or("");
        let parent = fields.next().and_then(|field| field.parse().ok()).unwrap_or(0);
        if state == "Z" {
            continue;
        }
        let arguments = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let arguments = arguments
            .split(|byte| *byte == 0)
            .map(|word| String::from_utf8_lossy(word).into_owned())
            .collect();
        found.push(Process { pid, parent, arguments });
    }
    found
}

fn tail(path: &Path, lines: usize) -> String {
    let text = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].iter().map(|line| format!("{line}\n")).collect()
}
