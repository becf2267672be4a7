//! Real engine processes for tests, one group at a time, and a client that sends requests like a gateway.

#![allow(dead_code, reason = "each of its users needs another part")]

use std::collections::BTreeSet;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use russet_rpc::engine as pb;
use russet_rpc::engine::control_client::ControlClient;
use russet_rpc::engine::engine_client::EngineClient;
use russet_rpc::{ports, tls};
use russet_wire::conversation::Message;
use russet_wire::engine_config::{Dtype, EngineConfig, PeerRank};
use russet_wire::event::GenerationEvent;
use russet_wire::request::GenerationRequest;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::Streaming;
use tonic::transport::Channel;

use crate::identities::Identities;

/// The engine binary.
const PROGRAM: &str = env!("CARGO_BIN_EXE_russet-engine");
/// Forming a ring alone may take half a minute on a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(120);
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TEST_TIMEOUT, future)
        .await
        .unwrap_or_else(|_| panic!("{what} took more than {TEST_TIMEOUT:?}"))
}

/// One engine process; killed with the test.
pub struct TestEngine {
    child: Child,
    address: SocketAddr,
    pub node: String,
    socket: PathBuf,
}

impl Drop for TestEngine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl TestEngine {
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Peak memory of the process, if the system reports it.
    pub fn process_peak(&self) -> Option<u64> {
        self.status("VmHWM:")
    }

    /// Current memory of the process, if the system reports it.
    pub fn process_memory(&self) -> Option<u64> {
        self.status("VmRSS:")
    }

    /// A field of `/proc/PID/status`, in bytes.
    pub fn status(&self, field: &str) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(field))?;
        let kibibytes: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
        Some(kibibytes * 1024)
    }

    /// A page of its metrics address, including headers.
    pub async fn page(&self, path: &str) -> std::io::Result<String> {
        let address = self.until(|state| !state.metrics_address.is_empty()).await.metrics_address;
        page(&address, path).await
    }

    /// Its metrics page.
    pub async fn metrics(&self) -> String {
        self.page("/metrics").await.unwrap()
    }

    /// The number of the first metric whose line begins with this.
    pub async fn metric(&self, begins: &str) -> f64 {
        let text = self.metrics().await;
        let line = text.lines().find(|line| line.starts_with(begins)).unwrap();
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    }

    pub async fn exit(&mut self) -> ExitStatus {
        within("the exit of an engine", async {
            loop {
                if let Some(status) = self.child.try_wait().unwrap() {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await
    }

    /// Whether it has exited; its status stays to be read.
    fn has_exited(&self) -> bool {
        let peek = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(self.pid()), peek).is_ok_and(|status| status.is_some())
    }

    /// Opens a watch like an agent.
    pub async fn watch(&self) -> Streaming<pb::EngineState> {
        within("the watch of an engine", self.try_watch()).await.expect("the engine runs")
    }

    /// Opens a watch as soon as it listens; `None` if it exits before.
    async fn try_watch(&self) -> Option<Streaming<pb::EngineState>> {
        while !self.has_exited() {
            let mut client = ControlClient::new(tls::unix_channel(self.socket.clone()));
            match client.watch(pb::WatchRequest {}).await {
                Ok(states) => return Some(states.into_inner()),
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
        None
    }

    /// Watches like an agent until a state matches, over formations too, each of which ends the watches of the one
    /// before; returns the last state if it exits before.
    pub async fn until(&self, fits: impl Fn(&pb::EngineState) -> bool) -> pb::EngineState {
        within("a state of an engine", async {
            let mut last = pb::EngineState::default();
            while let Some(mut states) = self.try_watch().await {
                while let Ok(Some(state)) = states.message().await {
                    last = state;
                    if fits(&last) {
                        return last;
                    }
                }
            }
            last
        })
        .await
    }

    pub async fn serving(&self) {
        let state = self.until(|state| state.phase() >= pb::Phase::Serving).await;
        assert_eq!(state.phase(), pb::Phase::Serving, "{}", state.message);
    }
}

/// A page of an address, including headers.
pub async fn page(address: &str, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    Ok(text)
}

/// One formation of a group.
#[derive(Clone)]
pub struct Formation {
    /// Its epoch.
    pub epoch: u64,
    /// Layers of each stage.
    layers: Vec<usize>,
    /// Tensor parallel size.
    members: usize,
    /// For all ranks: listen addresses, pipeline ring addresses, tensor ring addresses.
    addresses: Vec<SocketAddr>,
    /// Part of its ranks' socket names.
    name: u16,
}

impl Formation {
    /// The first formation of a group with these layers per stage and tensor parallel size.
    pub fn first(layers: &[usize], members: usize) -> Self {
        let addresses = free_addresses(3 * layers.len() * members);
        let name = addresses[0].port();
        Self { epoch: 1, layers: layers.to_owned(), members, addresses, name }
    }

    /// The next formation, at other addresses.
    pub fn next(&self) -> Self {
        let addresses = free_addresses(self.addresses.len());
        Self { epoch: self.epoch + 1, addresses, ..self.clone() }
    }

    fn size(&self) -> usize {
        self.layers.len() * self.members
    }
}

/// Settings that all engines of a test share.
pub struct EngineHarness {
    /// Configuration of engines that start from now on, without what the harness knows: model, formation,
    /// rank, identity and socket.
    pub config: EngineConfig,
    /// Folder of the ranks' disk tiers, each in a folder named by its rank.
    pub prefix_dir: Option<PathBuf>,
    /// Folder of the ranks' logs, each in a file named by its rank; without it, they share the test's output.
    pub log_dir: Option<PathBuf>,
    identities: Identities,
    sockets: TempDir,
}

/// Free ports; a test that loses one of them before its engine binds it fails with the port's number.
pub fn free_addresses(count: usize) -> Vec<SocketAddr> {
    // The ports are not reserved, and tests of this process run in parallel: none is handed out twice.
    static GIVEN: Mutex<BTreeSet<SocketAddr>> = Mutex::new(BTreeSet::new());
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut found = Vec::new();
    while found.len() < count {
        let free = ports::free_addresses(Ipv4Addr::LOCALHOST.into(), count - found.len()).unwrap();
        found.extend(free.into_iter().filter(|address| given.insert(*address)));
    }
    found
}

impl EngineHarness {
    pub fn new() -> Self {
        Self {
            // 32 bits are faster on a CPU.
            config: EngineConfig { dtype: Dtype::F32, ..EngineConfig::default() },
            prefix_dir: None,
            log_dir: None,
            identities: Identities::new(),
            sockets: tempfile::tempdir().unwrap(),
        }
    }

    /// Starts a pipeline with this split; index = rank.
    pub fn start(&self, model: &Path, layers: &[usize]) -> Vec<TestEngine> {
        self.start_stages(model, layers, 1)
    }

    /// Starts a group with these layers per stage and tensor parallel size; index = rank.
    pub fn start_stages(&self, model: &Path, layers: &[usize], members: usize) -> Vec<TestEngine> {
        self.start_with(model, layers, members, |_| Command::new(PROGRAM))
    }

    /// Starts such a group with each rank pinned to a core of its own, from core `first` on.
    pub fn start_pinned(
        &self,
        model: &Path,
        layers: &[usize],
        members: usize,
        first: usize,
    ) -> Vec<TestEngine> {
        self.start_with(model, layers, members, |rank| {
            let mut command = Command::new("taskset");
            command.args(["-c", &(first + rank).to_string(), PROGRAM]);
            command
        })
    }

    fn start_with(
        &self,
        model: &Path,
        layers: &[usize],
        members: usize,
        program: impl Fn(usize) -> Command,
    ) -> Vec<TestEngine> {
        let formation = Formation::first(layers, members);
        (0..formation.size()).map(|rank| self.begin_with(model, &formation, rank, program(rank))).collect()
    }

    /// Starts one rank of a formation, in a process of its own.
    pub fn begin(&self, model: &Path, formation: &Formation, rank: usize) -> TestEngine {
        self.begin_with(model, formation, rank, Command::new(PROGRAM))
    }

    fn begin_with(
        &self,
        model: &Path,
        formation: &Formation,
        rank: usize,
        mut command: Command,
    ) -> TestEngine {
        let file = self.socket(formation, rank).with_extension("json");
        std::fs::write(&file, self.config(model, formation, rank).to_json().unwrap()).unwrap();
        command.arg("--config").arg(file);
        if let Some(dir) = &self.log_dir {
            command
                .stderr(File::options().create(true).append(true).open(dir.join(rank.to_string())).unwrap());
        }
        let child = command.spawn().unwrap();
        let socket = self.socket(formation, rank);
        TestEngine { child, address: formation.addresses[rank], node: format!("n{rank}"), socket }
    }

    /// Asks the process of a rank to join a later formation; returns its message if it refuses.
    pub async fn form(
        &self,
        engine: &mut TestEngine,
        model: &Path,
        formation: &Formation,
        rank: usize,
    ) -> Result<(), tonic::Status> {
        let mut client = ControlClient::new(tls::unix_channel(engine.socket.clone()));
        let config = self.config(model, formation, rank).to_json().unwrap();
        within("the answer to Form", client.form(pb::FormRequest { config })).await?;
        engine.address = formation.addresses[rank];
        Ok(())
    }

    // Ports differ between groups, so socket names do too.
    fn socket(&self, formation: &Formation, rank: usize) -> PathBuf {
        self.sockets.path().join(format!("{}-{rank}", formation.name))
    }

    fn config(&self, model: &Path, formation: &Formation, rank: usize) -> EngineConfig {
        let Formation { epoch, layers, members, addresses, .. } = formation;
        let size = formation.size();
        let (listen, rings) = addresses.split_at(size);
        let (ring, tensor) = rings.split_at(size);
        let mut config = EngineConfig {
            model_dir: model.to_owned(),
            served_model_name: "small".into(),
            group_uid: "g".into(),
            epoch: *epoch,
            rank: rank as u32,
            listen: listen[rank],
            tls_dir: self.identities.node(&format!("n{rank}")),
            control_socket: self.socket(formation, rank),
            prefix_dir: self.prefix_dir.as_ref().map(|dir| dir.join(rank.to_string())),
            ..self.config.clone()
        };
        if size > 1 {
            config.layers_per_rank =
                layers.iter().flat_map(|&layers| vec![layers as u32; *members]).collect();
            let peer = |(rank, &address)| PeerRank { rank, address, node: format!("n{rank}") };
            config.peers = (0..).zip(listen).map(peer).collect();
        }
        if layers.len() > 1 {
            config.ring_hosts = ring.to_owned();
        }
        if *members > 1 {
            config.tensor_size = *members as u32;
            config.tensor_hosts = tensor.to_owned();
        }
        config
    }

    pub async fn client(&self, engine: &TestEngine) -> EngineClient<Channel> {
        engine.serving().await;
        let files = self.identities.user(tls::GATEWAY_USER);
        EngineClient::new(files.channel(&engine.address.to_string(), &engine.node).unwrap())
    }
}

pub fn say(content: &str) -> GenerationRequest {
    GenerationRequest {
        id: "test".into(),
        messages: vec![Message::new("user", content)],
        max_tokens: Some(32),
        ..GenerationRequest::default()
    }
}

pub async fn ask(
    client: &mut EngineClient<Channel>,
    request: GenerationRequest,
) -> Streaming<pb::GenerateEvent> {
    within("the answer's headers", client.generate(pb::GenerateRequest::from(request)))
        .await
        .unwrap()
        .into_inner()
}

pub async fn next(events: &mut Streaming<pb::GenerateEvent>) -> Option<GenerationEvent> {
    within("an event", events.message()).await.unwrap().map(GenerationEvent::from)
}

/// Token ids, text and end of a response.
pub async fn collect(events: &mut Streaming<pb::GenerateEvent>) -> (Vec<u32>, String, GenerationEvent) {
    let (mut ids, mut text, mut end) = (Vec::new(), String::new(), None);
    while let Some(event) = next(events).await {
        assert!(end.is_none(), "{event:?} after {end:?}");
        match event {
            GenerationEvent::Started { .. } | GenerationEvent::Prompt { .. } => assert!(ids.is_empty()),
            GenerationEvent::Token { id, delta } => {
                ids.push(id);
                text.push_str(&delta.text);
            }
            event => end = Some(event),
        }
    }
    (ids, text, end.expect("a stream never just ends"))
}
