//! Real `russet-engine` processes on loopback, with MLX and its ring, asked over mTLS as a gateway
//! asks them: answers, failures of single ranks, and what the agent is told.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/identities.rs"]
mod identities;
#[path = "support/model.rs"]
mod model;

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use russet_rpc::engine as pb;
use russet_rpc::engine::control_client::ControlClient;
use russet_rpc::engine::engine_client::EngineClient;
use russet_rpc::tls;
use russet_wire::event::{Event, Failure, FailureKind, FinishReason};
use russet_wire::request::{GenerationRequest, Message, Sampling};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tonic::Streaming;
use tonic::transport::Channel;

use identities::Identities;

/// A ring alone may take half a minute to form on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// What the smallest model's group may take to notice a rank that was killed.
const NOTICE: Duration = Duration::from_secs(10);

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future)
        .await
        .unwrap_or_else(|_| panic!("{what} took more than {PATIENCE:?}"))
}

/// One engine process; killed with the test.
struct Engine {
    child: Child,
    address: SocketAddr,
    node: String,
    socket: PathBuf,
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Engine {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    async fn exit(&mut self) -> ExitStatus {
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

    /// Watches as an agent does until a state fits; the last state seen if the watch ends before.
    async fn until(&self, fits: impl Fn(&pb::EngineState) -> bool) -> pb::EngineState {
        within("a state of an engine", async {
            let mut states = loop {
                let mut client = ControlClient::new(tls::unix_channel(self.socket.clone()));
                match client.watch(pb::WatchRequest {}).await {
                    Ok(states) => break states.into_inner(),
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            };
            let mut last = pb::EngineState::default();
            while let Ok(Some(state)) = states.message().await {
                last = state;
                if fits(&last) {
                    break;
                }
            }
            last
        })
        .await
    }

    async fn serving(&self) {
        let state = self.until(|state| state.phase() >= pb::Phase::Serving).await;
        assert_eq!(state.phase(), pb::Phase::Serving, "{}", state.message);
    }
}

/// What all engines of a test share.
struct Lab {
    identities: Identities,
    sockets: TempDir,
}

/// Ports nobody uses now; a test that loses one of them in between fails with the port's name.
fn free_addresses(count: usize) -> Vec<SocketAddr> {
    let held: Vec<TcpListener> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    held.iter().map(|listener| listener.local_addr().unwrap()).collect()
}

fn join(addresses: &[SocketAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

impl Lab {
    fn new() -> Self {
        Self { identities: Identities::new(), sockets: tempfile::tempdir().unwrap() }
    }

    /// A group with this split; index = rank.
    fn start(&self, model: &Path, layers: &[usize]) -> Vec<Engine> {
        let addresses = free_addresses(2 * layers.len());
        let (listen, ring) = addresses.split_at(layers.len());
        let peers: Vec<String> =
            listen.iter().enumerate().map(|(rank, address)| format!("{rank}={address}@n{rank}")).collect();
        let split = layers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        (0..layers.len())
            .map(|rank| {
                let node = format!("n{rank}");
                // Ports differ between groups, so sockets do too.
                let socket = self.sockets.path().join(format!("{}-{rank}", listen[0].port()));
                let mut command = Command::new(env!("CARGO_BIN_EXE_russet-engine"));
                command
                    .arg("--model-dir")
                    .arg(model)
                    .args(["--served-model-name", "small", "--dtype", "f32", "--context-tokens", "4096"])
                    .args(["--group-uid", "g", "--epoch", "1", "--rank", &rank.to_string()])
                    .args(["--listen", &listen[rank].to_string(), "--tls-dir"])
                    .arg(self.identities.node(&node))
                    .arg("--control-socket")
                    .arg(&socket);
                if layers.len() > 1 {
                    command.args(["--layers-per-rank", &split, "--ring-hosts", &join(ring)]);
                    command.args(["--peers", &peers.join(",")]);
                }
                let child = command.spawn().unwrap();
                Engine { child, address: listen[rank], node, socket }
            })
            .collect()
    }

    async fn client(&self, engine: &Engine) -> EngineClient<Channel> {
        engine.serving().await;
        let files = self.identities.user(tls::GATEWAY_USER);
        EngineClient::new(files.channel(&engine.address.to_string(), &engine.node).unwrap())
    }
}

fn say(content: &str) -> GenerationRequest {
    GenerationRequest {
        id: "test".into(),
        messages: vec![Message { role: "user".into(), content: content.into() }],
        max_tokens: Some(32),
        sampling: Sampling::default(),
        stop: Vec::new(),
        ignore_eos: false,
    }
}

/// An answer far longer than any test waits for.
fn endless() -> GenerationRequest {
    GenerationRequest { max_tokens: Some(2000), ignore_eos: true, ..say("on and on") }
}

async fn ask(client: &mut EngineClient<Channel>, request: GenerationRequest) -> Streaming<pb::GenerateEvent> {
    within("the answer's headers", client.generate(pb::GenerateRequest::from(request)))
        .await
        .unwrap()
        .into_inner()
}

async fn next(events: &mut Streaming<pb::GenerateEvent>) -> Option<Event> {
    within("an event", events.message()).await.unwrap().map(Event::from)
}

/// Ids, text and end of an answer.
async fn collect(events: &mut Streaming<pb::GenerateEvent>) -> (Vec<u32>, String, Event) {
    let (mut ids, mut text, mut end) = (Vec::new(), String::new(), None);
    while let Some(event) = next(events).await {
        assert!(end.is_none(), "{event:?} after {end:?}");
        match event {
            Event::Started { .. } => assert!(ids.is_empty()),
            Event::Token { id, text: piece } => {
                ids.push(id);
                text.push_str(&piece);
            }
            event => end = Some(event),
        }
    }
    (ids, text, end.expect("a stream never just ends"))
}

/// Reads until `count` tokens came.
async fn some_tokens(events: &mut Streaming<pb::GenerateEvent>, count: usize) {
    let mut seen = 0;
    while seen < count {
        match next(events).await {
            Some(Event::Token { .. }) => seen += 1,
            Some(Event::Started { .. }) => {}
            other => panic!("{other:?} before {count} tokens"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipelines_say_what_one_rank_says() {
    let lab = Lab::new();
    let model = model::random_model_dir();
    let long: String = (0..290).map(|n| format!("{n} and ")).collect();
    let sampled = Sampling { temperature: 1.0, top_p: 0.9, seed: Some(5), ..Sampling::default() };
    let questions = [
        say("hello"),
        say("日本語 and é"),
        // Longer than one step reads.
        say(&long),
        GenerationRequest { sampling: sampled, ..say("what is 17 + 25?") },
    ];
    let mut answers: Vec<Vec<Vec<u32>>> = Vec::new();
    for layers in [&[model::LAYERS][..], &[1, 3], &[1, 2, 1]] {
        let mut engines = lab.start(model.path(), layers);
        let mut client = lab.client(&engines[0]).await;
        // All at once, so that sequences share the steps.
        let mut streams = Vec::new();
        for question in &questions {
            let request = GenerationRequest { ignore_eos: true, ..question.clone() };
            streams.push(ask(&mut client, request).await);
        }
        let mut group = Vec::new();
        for mut events in streams {
            let (ids, _, end) = collect(&mut events).await;
            assert!(matches!(end, Event::Finished { reason: FinishReason::Length, .. }), "{end:?}");
            assert_eq!(ids.len(), 32);
            group.push(ids);
        }
        answers.push(group);
        // A drained group ends without a complaint: followers stay until rank 0 leaves.
        let (leader, followers) = engines.split_first().unwrap();
        for follower in followers {
            follower.signal(Signal::TERM);
            let state = follower.until(|state| state.message.starts_with("stopping")).await;
            assert_eq!(state.phase(), pb::Phase::Serving, "{}", state.message);
        }
        leader.signal(Signal::TERM);
        for engine in &mut engines {
            assert_eq!(engine.exit().await.code(), Some(0), "{} of {layers:?}", engine.node);
        }
    }
    assert_eq!(answers[1], answers[0], "two ranks");
    assert_eq!(answers[2], answers[0], "three ranks");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_dies_or_freezes_ends_the_stream_with_a_typed_error() {
    let lab = Lab::new();
    let model = model::random_model_dir();
    for (signal, victim) in [(Signal::KILL, 1), (Signal::KILL, 2), (Signal::STOP, 1)] {
        let mut engines = lab.start(model.path(), &[1, 2, 1]);
        let mut client = lab.client(&engines[0]).await;
        let mut events = ask(&mut client, endless()).await;
        some_tokens(&mut events, 3).await;
        let since = Instant::now();
        engines[victim].signal(signal);
        let (_, _, end) = collect(&mut events).await;
        let took = since.elapsed();
        let Event::Failed(Failure { kind, message }) = end else {
            panic!("{end:?} after {signal:?} of {victim}")
        };
        assert_eq!(kind, FailureKind::Unavailable, "{message}");
        eprintln!("{signal:?} of rank {victim}: {message} after {took:?}");
        let allowed = if signal == Signal::STOP { 2 * NOTICE } else { NOTICE };
        assert!(took < allowed, "{took:?}");
        for (rank, engine) in engines.iter_mut().enumerate().filter(|(rank, _)| *rank != victim) {
            assert_eq!(engine.exit().await.code(), Some(1), "rank {rank} after {signal:?} of {victim}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_end_with_rank_zero() {
    let lab = Lab::new();
    let model = model::random_model_dir();
    let mut engines = lab.start(model.path(), &[2, 2]);
    let mut client = lab.client(&engines[0]).await;
    let mut events = ask(&mut client, endless()).await;
    some_tokens(&mut events, 3).await;
    engines[0].signal(Signal::KILL);
    assert_eq!(engines[1].exit().await.code(), Some(1));
    // The caller of a killed rank 0 sees its connection break, which the gateway turns into an error.
    loop {
        match within("the broken stream", events.message()).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream of a killed engine ended as if it were complete"),
            Err(_) => break,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_checkpoint_is_told_to_the_agent_by_name() {
    let lab = Lab::new();
    let model = model::random_model_dir();
    let path = model.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[0..8].copy_from_slice(&u64::MAX.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let mut engines = lab.start(model.path(), &[model::LAYERS]);
    let state = engines[0].until(|state| state.phase() == pb::Phase::Failed).await;
    assert_eq!(state.phase(), pb::Phase::Failed);
    assert!(state.message.contains("model.safetensors"), "{}", state.message);
    assert_eq!(engines[0].exit().await.code(), Some(1));
}

/// The shipped smoke model, once it lies in its folder.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_smoke_model_can_add() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("smoke");
    let model = folder.join("model");
    if !model.join("config.json").exists() {
        eprintln!("{} is not there yet: nothing to ask", model.display());
        return;
    }
    let lab = Lab::new();
    let prompts = std::fs::read_to_string(folder.join("prompts.jsonl")).unwrap();
    let mut wrong = Vec::new();
    for layers in [&[4][..], &[2, 2]] {
        let engines = lab.start(&model, layers);
        let mut client = lab.client(&engines[0]).await;
        for line in prompts.lines() {
            let prompt: serde_json::Value = serde_json::from_str(line).unwrap();
            let messages: Vec<Message> = serde_json::from_value(prompt["messages"].clone()).unwrap();
            let request = GenerationRequest { messages, max_tokens: Some(600), ..say("") };
            let mut events = ask(&mut client, request).await;
            let (_, text, end) = collect(&mut events).await;
            let expected = prompt["expect"].as_str().unwrap();
            let stopped = matches!(end, Event::Finished { reason: FinishReason::Stop, .. });
            if text != expected || !stopped {
                wrong.push(format!("{} on {layers:?}: {text:?}, not {expected:?}", prompt["name"]));
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong answers:\n{}", wrong.len(), wrong.join("\n"));
}
