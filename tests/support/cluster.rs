//! A running cluster: a control plane and an agent on the near machine, an agent on the far one, started as a
//! user would. Everything ends when it is dropped: children exit when their input closes, engines when they
//! have no agent, and the rest is killed.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tokio::process::{Child, Command};

use crate::clock::Clock;
use crate::control_plane::embedded::Embedded;
use crate::control_plane::etcd::EtcdControlPlane;
use crate::control_plane::kubernetes::KubernetesControlPlane;
use crate::control_plane::{ControlPlane, PlaneKind, PlaneProcess};
use crate::hub::FakeHub;
use crate::lab::{LabMachine, TwoMachineLab};
use crate::mac::{self, FakeMac};
use crate::processes::{SupervisedProcess, oracle, processes, tail};
pub use crate::processes::{kill, program};
use crate::tool::Tool;

/// Timeout of all waits, which are for conditions.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// A cluster of two machines.
pub struct TestCluster {
    /// The machines.
    pub lab: TwoMachineLab,
    /// The hub that models come from.
    pub hub: FakeHub,
    /// Port of the API server.
    pub api_port: u16,
    /// Port of the gateway.
    pub gateway_port: u16,
    russet: PathBuf,
    far_russet: PathBuf,
    folder: tempfile::TempDir,
    plane: Option<ControlPlane>,
    join: Option<Child>,
    /// Simulated ports of both machines, if a cable joins them.
    pub macs: Option<[FakeMac; 2]>,
    /// Additional agents on the far machine, by node.
    extra_agents: Vec<(String, Child)>,
}

/// The repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A port free on loopback and on the machine's address, released right before it is used: the API server
/// opens both.
pub fn free_port(address: IpAddr) -> Result<u16> {
    for _ in 0..100 {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        if address.is_loopback() || TcpListener::bind((address, port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no port is free on loopback and on {address}")
}

impl TestCluster {
    /// Starts both machines with the control plane selected by the environment; `say` gets each step.
    pub async fn start(models: &[(&str, &Path)], say: &mut dyn FnMut(&str)) -> Result<Self> {
        let kind = PlaneKind::from_environment()?;
        let lab = TwoMachineLab::new()?;
        if let Some(why) = &lab.fallback {
            say(&format!("both nodes share this machine's loopback, because {why}"));
        }
        let hub = FakeHub::start(lab.near.address, models).await?;
        let russet = program("russet")?;
        program("russet-engine")?;
        // Set by `cargo xtask skew`: the programs of another release, for the far machine.
        let far_russet =
            std::env::var_os("RUSSET_FAR_BIN").map_or(russet.clone(), |dir| Path::new(&dir).join("russet"));
        let folder = tempfile::Builder::new().prefix("russet-").tempdir()?;
        let (api_port, gateway_port) = (free_port(lab.near.address)?, free_port(lab.near.address)?);
        let macs = match lab.wire {
            Some([near, far]) => Some([
                FakeMac::new(folder.path(), &lab.near.name, near)?,
                FakeMac::new(folder.path(), &lab.far.name, far)?,
            ]),
            None => None,
        };
        let mut cluster = Self {
            lab,
            hub,
            api_port,
            gateway_port,
            russet,
            far_russet,
            folder,
            plane: None,
            join: None,
            macs,
            extra_agents: Vec::new(),
        };
        match kind {
            PlaneKind::Embedded => {
                say("starting the control plane and node-a (russet up)");
                cluster.start_up(&[])?;
            }
            PlaneKind::Etcd => {
                say("starting three members of etcd and a second server (russet serve)");
                cluster.start_on_etcd(say).await?;
            }
            PlaneKind::Kubernetes => {
                say("starting etcd, kube-apiserver and kube-controller-manager");
                cluster.start_kubernetes(say).await?;
            }
        }
        cluster.until_joined("node-a").await?;
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

    /// Log files of the agents of both machines.
    pub fn agent_logs(&self) -> Vec<PathBuf> {
        // The near one is a child of `russet up`, or runs separately.
        let near = [self.near_dir().join("logs/agent.log"), self.folder.path().join("near.log")];
        near.into_iter().chain([self.folder.path().join("join.log")]).filter(|path| path.exists()).collect()
    }

    /// The clock of a machine, if machines have their own.
    pub fn clock(&self, machine: &LabMachine) -> Result<Clock> {
        Clock::chosen(self.folder.path(), &machine.name).context("the machines share the real clock")
    }

    /// Ports of the API servers.
    pub fn api_ports(&self) -> Result<Vec<u16>> {
        let mut ports = vec![self.api_port];
        if let ControlPlane::Etcd(plane) = self.plane()? {
            let port = plane.second_url().rsplit(':').next().and_then(|port| port.parse().ok());
            ports.push(port.context("the URL of a server ends in its port")?);
        }
        Ok(ports)
    }

    /// The control plane.
    pub fn plane(&self) -> Result<&ControlPlane> {
        self.plane.as_ref().context("there is no control plane")
    }

    /// Administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.plane.as_ref().map(ControlPlane::kubeconfig).unwrap_or_default()
    }

    /// Base URL of the OpenAI API.
    pub fn base_url(&self) -> String {
        format!("http://127.0.0.1:{}/v1", self.gateway_port)
    }

    fn command(&self, machine: &LabMachine) -> Result<Command> {
        let program = if machine.name == self.lab.far.name { &self.far_russet } else { &self.russet };
        let mut command = machine.command(program);
        command
            .env("HF_ENDPOINT", self.hub.endpoint())
            .env("RUSSET_LOG", log_level())
            .env_remove("KUBECONFIG")
            .stdin(Stdio::piped())
            .kill_on_drop(true);
        if let Some(clock) = Clock::chosen(self.folder.path(), &machine.name) {
            clock.apply_to(&mut command)?;
        }
        let tools = mac::folder(self.folder.path(), &machine.name);
        if tools.exists() {
            command.env("RUSSET_FABRIC_TOOLS", tools);
        }
        Ok(command)
    }

    fn start_up(&mut self, more: &[String]) -> Result<()> {
        let near = self.lab.near.clone();
        let mut arguments = [
            ("--node-name", near.name.clone()),
            ("--api-port", self.api_port.to_string()),
            ("--gateway-port", self.gateway_port.to_string()),
            ("--address", near.address.to_string()),
        ]
        .into_iter()
        .flat_map(|(flag, value)| [flag.to_owned(), value])
        .collect::<Vec<_>>();
        arguments.extend_from_slice(more);
        let log = self.log("up.log")?;
        let up = Embedded::start(self.command(&near)?, &self.near_dir(), log, &arguments)?;
        match &mut self.plane {
            Some(ControlPlane::Etcd(plane)) => plane.set_up(up),
            _ => self.plane = Some(ControlPlane::Embedded(Box::new(up))),
        }
        Ok(())
    }

    /// Stops the `russet up` of an embedded control plane as Ctrl-C does, and starts it again after `between`, with
    /// more arguments. The far machine's agent goes on.
    pub async fn restart_up(
        &mut self,
        more: &[String],
        between: impl AsyncFnOnce(&Self) -> Result<()>,
    ) -> Result<()> {
        match self.plane.take() {
            Some(ControlPlane::Embedded(up)) => {
                let kubeconfig = up.kubeconfig();
                up.stop().await?;
                between(self).await?;
                // It says that the server is ready, and lies there from before.
                std::fs::remove_file(kubeconfig)?;
            }
            other => {
                self.plane = other;
                bail!("the control plane is no embedded one");
            }
        }
        self.start_up(more)?;
        self.until_joined("node-a").await?;
        self.until_joined("node-b").await
    }

    async fn start_on_etcd(&mut self, say: &mut dyn FnMut(&str)) -> Result<()> {
        let near = self.lab.near.clone();
        let url = format!("https://{}:{}", near.address, free_port(near.address)?);
        let log = self.log("second.log")?;
        let plane =
            EtcdControlPlane::start(self.command(&near)?, &self.folder.path().join("second"), log, &url)?;
        let flags = plane.flags();
        self.plane = Some(ControlPlane::Etcd(Box::new(plane)));
        self.until("the second server is ready", async |cluster| {
            let (checked, ready) = match cluster.plane_mut()? {
                ControlPlane::Etcd(plane) => (plane.check(), plane.second_is_ready()),
                _ => bail!("the control plane went"),
            };
            checked.map_err(|error| error.context(cluster.read_log("second.log")))?;
            Ok(ready)
        })
        .await?;
        say("starting the first server and node-a (russet up)");
        self.start_up(&flags)
    }

    /// The control plane, mutable.
    pub fn plane_mut(&mut self) -> Result<&mut ControlPlane> {
        self.plane.as_mut().context("there is no control plane")
    }

    async fn start_kubernetes(&mut self, say: &mut dyn FnMut(&str)) -> Result<()> {
        let folder = self.folder.path().join("kubernetes");
        let mut plane = KubernetesControlPlane::bare(self.lab.near.address, self.api_port, &folder).await?;
        say("installing charts/russet-crds and charts/russet with Helm");
        plane.install(&repository().join("charts"), self.gateway_port).await?;
        say("running the chart's Deployments as processes");
        let programs = self.russet.parent().context("a program has a folder")?.to_owned();
        plane.run_pods(&programs).await?;
        self.plane = Some(ControlPlane::Kubernetes(Box::new(plane)));
        say("joining node-a (russet token create, russet join)");
        let arguments = self.join_arguments(&self.lab.near, &self.near_dir()).await?;
        let (near, russet, endpoint) = (self.lab.near.clone(), self.russet.clone(), self.hub.endpoint());
        let tools = mac::folder(self.folder.path(), &near.name);
        let agent =
            SupervisedProcess::start("near agent", &self.folder.path().join("near.log"), move || {
                let mut command = near.command(&russet);
                command.args(&arguments).env("HF_ENDPOINT", &endpoint).env("RUSSET_LOG", log_level());
                command.env_remove("KUBECONFIG");
                if tools.exists() {
                    command.env("RUSSET_FABRIC_TOOLS", &tools);
                }
                command
            })?;
        match &mut self.plane {
            Some(ControlPlane::Kubernetes(plane)) => plane.set_agent(agent),
            _ => bail!("the control plane went"),
        }
        Ok(())
    }

    /// `join URL …` with a fresh token, for a machine.
    async fn join_arguments(&self, machine: &LabMachine, data_dir: &Path) -> Result<Vec<String>> {
        let mut create = vec!["token".to_owned(), "create".into(), "--quiet".into()];
        create.extend(self.plane()?.token_arguments());
        let create: Vec<&str> = create.iter().map(String::as_str).collect();
        let token = self.russet(&create).await?.trim().to_owned();
        let (url, address) =
            (format!("https://{}:{}", self.lab.near.address, self.api_port), machine.address.to_string());
        let data_dir = data_dir.display().to_string();
        let words = ["join", &url, "--exit-with-parent", "--node-name", &machine.name, "--token", &token];
        let second = match self.plane()? {
            ControlPlane::Etcd(plane) => Some(plane.second_url()),
            _ => None,
        };
        // On the machine's own address, so that metrics of all machines are readable.
        let metrics = SocketAddr::new(machine.address, 0).to_string();
        let more = ["--address", &address, "--data-dir", &data_dir, "--metrics-listen", &metrics];
        let words = words.into_iter().chain(more).chain(second);
        Ok(words.map(str::to_owned).collect())
    }

    async fn until_joined(&mut self, node: &str) -> Result<()> {
        self.until(&format!("{node} is Ready"), async |cluster| {
            let checked = match cluster.plane.as_mut() {
                Some(ControlPlane::Embedded(up)) => up.check(),
                Some(ControlPlane::Etcd(plane)) => plane.check(),
                _ => Ok(()),
            };
            checked.map_err(|error| error.context(cluster.read_log("up.log")))?;
            if let Some(status) = cluster.join.as_mut().and_then(|child| child.try_wait().ok().flatten()) {
                bail!("russet join ended ({status}): {}", cluster.read_log("join.log"));
            }
            Ok(cluster.is_ready("inferencenodes", node).await)
        })
        .await
    }

    async fn start_join(&mut self) -> Result<()> {
        let far = self.lab.far.clone();
        let arguments = self.join_arguments(&far, &self.far_dir()).await?;
        let log = self.log("join.log")?;
        let mut command = self.command(&far)?;
        command.args(&arguments).stdout(log.try_clone()?).stderr(log);
        self.join = Some(command.spawn().context("cannot start russet join")?);
        self.until_joined("node-b").await
    }

    /// Joins one more node: another agent on the far machine.
    pub async fn add_agent(&mut self, node: &str) -> Result<()> {
        let mut far = self.lab.far.clone();
        far.name = node.to_owned();
        let data_dir = self.folder.path().join(node);
        let arguments = self.join_arguments(&far, &data_dir).await?;
        let log = self.log(&format!("{node}.log"))?;
        let mut command = self.command(&far)?;
        command.args(&arguments).stdout(log.try_clone()?).stderr(log);
        self.extra_agents.push((node.to_owned(), command.spawn().context("cannot start russet join")?));
        self.until_joined(node).await
    }

    /// Stops the added agents, as Ctrl-C does, and deletes their nodes.
    pub async fn remove_agents(&mut self) -> Result<()> {
        for (node, child) in std::mem::take(&mut self.extra_agents) {
            interrupt(child, &node).await?;
            self.russet(&["delete", &format!("inferencenodes/{node}")]).await?;
        }
        Ok(())
    }

    /// Restarts the far machine's agent after it was killed, as a service manager would.
    pub async fn restart_far_agent(&mut self) -> Result<()> {
        if let Some(mut child) = self.join.take() {
            let _ = child.kill().await;
        }
        let far = self.lab.far.clone();
        let log = self.log("join.log")?;
        let data_dir = self.far_dir();
        let mut command = self.command(&far)?;
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

    /// Runs a client verb of `russet` on the near machine and returns its output.
    pub async fn russet(&self, arguments: &[&str]) -> Result<String> {
        let output = Command::new(&self.russet)
            .args(arguments)
            .env("KUBECONFIG", self.kubeconfig())
            .kill_on_drop(true)
            .output()
            .await?;
        if !output.status.success() {
            bail!(
                "russet {} failed: {}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    /// The oracles' kubectl, as the administrator.
    pub fn kubectl(&self) -> Result<Tool> {
        Ok(Tool::new(oracle("RUSSET_KUBECTL")?, &self.kubeconfig(), self.folder.path()))
    }

    /// An object or list as JSON.
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

    /// Waits until `check` holds, at most [`PATIENCE`]; returns how long it took.
    pub async fn until(
        &mut self,
        what: &str,
        mut check: impl AsyncFnMut(&mut Self) -> Result<bool>,
    ) -> Result<()> {
        let start = Instant::now();
        while !check(self).await? {
            if start.elapsed() > WAIT_TIMEOUT {
                bail!("not within {} s: {what}\n{}", WAIT_TIMEOUT.as_secs(), self.diagnostics().await);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    /// Tables and logs for the analysis of a failure.
    pub async fn diagnostics(&self) -> String {
        let mut text = String::new();
        for what in ["russet", "events"] {
            if let Ok(table) = self.russet(&["get", what, "-A", "-o", "wide"]).await {
                text.push_str(&table);
            }
        }
        let root = self.folder.path();
        for folder in ["", "kubernetes", "node-a/logs", "node-a/agent/engines", "node-b/agent/engines"] {
            for entry in std::fs::read_dir(root.join(folder)).into_iter().flatten().flatten() {
                let path = if entry.path().is_dir() { entry.path().join("engine.log") } else { entry.path() };
                if path.extension().is_some_and(|extension| extension == "log") && path.exists() {
                    text.push_str(&format!("--- {}\n{}", path.display(), tail(&path, 30)));
                }
            }
        }
        text
    }

    /// Process ids of the engines, by rank, as in the Shards' status.
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

    /// Process ids of a role of the control plane or the near machine: one with the embedded API server,
    /// several elsewhere.
    pub fn pids(&self, role: PlaneProcess) -> Result<Vec<i32>> {
        self.plane()?.pids(role)
    }

    /// Process id of the far machine's agent.
    pub fn far_agent(&self) -> Result<i32> {
        // `ip netns exec` replaces itself by the program, so the child is the agent.
        let pid = self.join.as_ref().and_then(Child::id).context("the far agent is not running")?;
        Ok(pid as i32)
    }

    /// Stops everything and waits until no process is left.
    pub async fn stop(mut self) -> Result<()> {
        let more = std::mem::take(&mut self.extra_agents).into_iter();
        for (node, child) in
            self.join.take().map(|child| ("node-b".to_owned(), child)).into_iter().chain(more)
        {
            if let Err(error) = interrupt(child, &node).await {
                bail!("{error:#}:\n{}", self.diagnostics().await);
            }
        }
        if let Some(plane) = self.plane.take() {
            plane.stop().await?;
        }
        // A killed process may take a moment to release its memory.
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

impl Drop for TestCluster {
    fn drop(&mut self) {
        for (pid, _) in self.leftovers() {
            kill(pid);
        }
    }
}

/// Stops an agent as Ctrl-C does.
async fn interrupt(mut child: Child, node: &str) -> Result<()> {
    // Held open until the end: a closed pipe means something else than Ctrl-C.
    let _input = child.stdin.take();
    if let Some(pid) = child.id().and_then(|pid| rustix::process::Pid::from_raw(pid as i32)) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
    }
    let ended = tokio::time::timeout(Duration::from_secs(60), child.wait()).await;
    ended.map(|_| ()).with_context(|| format!("the agent of {node} did not end within 60 s of Ctrl-C"))
}

/// The condition of an object.
pub fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a Value> {
    object["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == kind)
}

/// Whether an object is Ready as it was last edited.
pub fn is_ready_as_edited(object: &Value) -> bool {
    object["status"]["observedGeneration"] == object["metadata"]["generation"]
        && condition(object, "Ready").is_some_and(|ready| ready["status"] == "True")
}

fn log_level() -> String {
    std::env::var("RUSSET_LOG").unwrap_or_else(|_| "info".into())
}
