//! Fake engine without a model, for this crate's tests: it reads the real configuration, serves the real
//! control socket, goes through the real phases and sends heartbeats. It computes nothing. After SIGUSR1 it
//! reports the same running batch forever, after SIGUSR2 64 GiB of memory. One that serves a model called
//! `again` leaves its group when asked and reforms; with a model called `mute` it does not answer the second
//! call; otherwise it knows neither call, as older releases.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures::Stream;
use russet_rpc::engine as pb;
use russet_rpc::engine::control_server::{Control, ControlServer};
use russet_wire::engine_config::EngineConfig;
use tokio::signal::unix::{SignalKind, signal};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Request, Response, Status};

/// Exits by itself when unwatched, so that no test leaves one behind.
const UNWATCHED_TIMEOUT: Duration = Duration::from_secs(15);

struct FakeEngine {
    epoch: u64,
    shard_uid: String,
    watchers: Arc<AtomicUsize>,
    hangs: Arc<AtomicBool>,
    overgrown: Arc<AtomicBool>,
    model: String,
    /// The file that it was started with.
    config_file: PathBuf,
    left_group: Arc<AtomicBool>,
}

impl FakeEngine {
    fn state(&self, phase: pb::Phase) -> pb::EngineState {
        pb::EngineState {
            phase: phase as i32,
            loaded_bytes: 7,
            total_bytes: 7,
            memory_bytes: 7,
            build: russet_rpc::ENGINE_BUILD.into(),
            epoch: self.epoch,
            shard_uid: self.shard_uid.clone(),
            metrics_address: "127.0.0.1:1".into(),
            batches_ended: 3,
            heartbeat_milliseconds: 250,
            ..Default::default()
        }
    }
}

/// Counts a watcher while its stream is open.
struct Watcher(Arc<AtomicUsize>);

impl Drop for Watcher {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[tonic::async_trait]
impl Control for FakeEngine {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<pb::EngineState, Status>> + Send>>;

    async fn watch(&self, _: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        self.watchers.fetch_add(1, Ordering::SeqCst);
        let watcher = Watcher(self.watchers.clone());
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        let states =
            [pb::Phase::Loading, pb::Phase::Loaded, pb::Phase::Serving].map(|phase| self.state(phase));
        let (last, hangs, left) =
            (self.state(pb::Phase::Serving), self.hangs.clone(), self.left_group.clone());
        let grown = self.overgrown.clone();
        tokio::spawn(async move {
            let _watcher = watcher;
            for state in states {
                if sender.send(Ok(state)).await.is_err() {
                    return;
                }
            }
            loop {
                tokio::time::sleep(Duration::from_millis(250)).await;
                let batch_estimate_seconds = if hangs.load(Ordering::SeqCst) { 0.02 } else { 0.0 };
                let mut beat = pb::EngineState { batch_estimate_seconds, ..last.clone() };
                if grown.load(Ordering::SeqCst) {
                    beat.memory_bytes = 64 << 30;
                }
                if left.load(Ordering::SeqCst) {
                    (beat.phase, beat.reuse) = (pb::Phase::Failed as i32, pb::Reuse::Yes as i32);
                }
                if sender.send(Ok(beat)).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn stop(&self, _: Request<pb::StopRequest>) -> Result<Response<pb::StopReply>, Status> {
        std::process::exit(0);
    }

    async fn disband(&self, _: Request<pb::DisbandRequest>) -> Result<Response<pb::DisbandReply>, Status> {
        if !["again", "mute"].contains(&self.model.as_str()) {
            return Err(Status::unimplemented("this engine forms no group anew"));
        }
        self.left_group.store(true, Ordering::SeqCst);
        Ok(Response::new(pb::DisbandReply {}))
    }

    async fn form(&self, request: Request<pb::FormRequest>) -> Result<Response<pb::FormReply>, Status> {
        if self.model == "mute" {
            std::future::pending::<()>().await;
        }
        let config_file = self.config_file.clone();
        tokio::spawn(async move {
            // The reply is sent first; the process id stays the same.
            tokio::time::sleep(Duration::from_millis(100)).await;
            std::fs::write(&config_file, request.into_inner().config).expect("its own file");
            let program = std::env::current_exe().expect("a program has a path");
            std::process::Command::new(program).arg("--config").arg(config_file).exec()
        });
        Ok(Response::new(pb::FormReply {}))
    }
}

/// Whether a signal has arrived.
fn on_signal(kind: SignalKind) -> Arc<AtomicBool> {
    let mut signals = signal(kind).expect("signals are heard");
    let stopped = Arc::new(AtomicBool::new(false));
    let tell = stopped.clone();
    tokio::spawn(async move {
        while signals.recv().await.is_some() {
            tell.store(true, Ordering::SeqCst);
        }
    });
    stopped
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [flag, file] = &arguments[..] else { panic!("--config FILE is needed") };
    assert_eq!(flag, "--config");
    let text = std::fs::read_to_string(file).expect("a configuration");
    let config = EngineConfig::from_json(&text).expect("a configuration of this release");
    // A real engine would fail here as well: its model, its identity and its port must exist.
    assert!(config.model_dir.join("config.json").exists(), "no model");
    assert!(config.tls_dir.join("tls.key").exists(), "no identity");
    let _port = tokio::net::TcpListener::bind(config.listen).await.expect("the port is free");

    let hangs = on_signal(SignalKind::user_defined1());
    let overgrown = on_signal(SignalKind::user_defined2());
    let watchers = Arc::new(AtomicUsize::new(0));
    let engine = FakeEngine {
        epoch: config.epoch,
        shard_uid: config.shard_uid.clone(),
        watchers: watchers.clone(),
        hangs,
        overgrown,
        model: config.served_model_name.clone(),
        config_file: file.into(),
        left_group: Arc::default(),
    };
    let _ = std::fs::remove_file(&config.control_socket);
    let socket = tokio::net::UnixListener::bind(&config.control_socket).expect("a free socket");
    let server = tonic::transport::Server::builder()
        .add_service(ControlServer::new(engine))
        .serve_with_incoming(UnixListenerStream::new(socket));
    let lonely = async {
        let mut alone = Duration::ZERO;
        while alone < UNWATCHED_TIMEOUT {
            tokio::time::sleep(Duration::from_millis(100)).await;
            alone = if watchers.load(Ordering::SeqCst) == 0 {
                alone + Duration::from_millis(100)
            } else {
                Duration::ZERO
            };
        }
    };
    tokio::select! {
        result = server => result.expect("the control socket serves"),
        () = lonely => println!("nobody watches"),
    }
}
