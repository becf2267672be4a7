//! Watches a running engine from outside: its reports over the control socket, its heartbeats, and its
//! process, whichever ends first. Not here: what follows from an end.

use std::path::PathBuf;
use std::time::Duration;

use russet_rpc::engine as pb;
use russet_rpc::engine::control_client::ControlClient;
use tokio::net::UnixStream;
use tokio::process::Child;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{Instant, MissedTickBehavior};

use super::ProcessEvent;
use super::record::ProcessIdentity;
use super::spawn;
use super::watchdog::{CHECK_INTERVAL, Watchdog};
use crate::engine_activity::{EngineActivity, HeartbeatReader};

/// Poll interval for an adopted process, which is not a child of this agent and sends no SIGCHLD. A lost rank
/// must be noticed in a fraction of the ten seconds that a group has to reform.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The engine to watch.
#[derive(Clone, Debug)]
pub struct WatchTarget {
    /// UID of the Shard.
    pub shard: String,
    /// Epoch.
    pub epoch: i64,
    /// Its process.
    pub process: ProcessIdentity,
    /// Its control socket.
    pub socket: PathBuf,
    /// Its directory.
    pub folder: PathBuf,
    /// Counts what it does.
    pub activity: EngineActivity,
}

/// An event with its Shard's UID and its process.
pub type EngineEvent = (String, ProcessIdentity, ProcessEvent);

/// Stops the watch, not the engine, when dropped.
#[derive(Debug)]
pub struct EngineWatch {
    reports_task: AbortHandle,
    exit_task: AbortHandle,
}

impl Drop for EngineWatch {
    fn drop(&mut self) {
        self.reports_task.abort();
        self.exit_task.abort();
    }
}

impl EngineWatch {
    /// Watches the same process as a rank of another formation.
    pub fn retarget(&mut self, target: WatchTarget, notices: mpsc::UnboundedSender<EngineEvent>) {
        self.reports_task.abort();
        self.reports_task = tokio::spawn(run_reports(target, notices)).abort_handle();
    }
}

/// Watches an engine; `child` is given when this agent started it.
pub fn watch(
    target: WatchTarget,
    child: Option<Child>,
    notices: mpsc::UnboundedSender<EngineEvent>,
) -> EngineWatch {
    let reports = tokio::spawn(run_reports(target.clone(), notices.clone())).abort_handle();
    let end = tokio::spawn(async move {
        let how = match child {
            Some(child) => wait_child(child).await,
            None => wait_process(&target.process).await,
        };
        let words = spawn::last_log_line(&target.folder);
        let how = match words.is_empty() {
            true => format!("engine process {} {how}", target.process.pid),
            false => format!("engine process {} {how}; its last line: {words}", target.process.pid),
        };
        notices.send((target.shard, target.process, ProcessEvent::Exited(how))).ok();
    });
    EngineWatch { reports_task: reports, exit_task: end.abort_handle() }
}

async fn wait_child(mut child: Child) -> String {
    match child.wait().await {
        Ok(status) => format!("ended ({status})"),
        Err(error) => format!("cannot be waited for ({error})"),
    }
}

async fn wait_process(process: &ProcessIdentity) -> String {
    while process.alive(&process.boot_id) {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    "ended".to_owned()
}

/// Forwards an engine's reports until it exits or hangs. Heartbeats without news go to the watchdog only, to
/// spare the receiver.
async fn run_reports(target: WatchTarget, notices: mpsc::UnboundedSender<EngineEvent>) {
    let (sender, mut signals) = mpsc::unbounded_channel();
    let listening = listen(&target, sender);
    tokio::pin!(listening);
    let mut looks = tokio::time::interval(CHECK_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut watchdog = Watchdog::new(Instant::now().into_std());
    let (mut last, mut reader) = (None, HeartbeatReader::default());
    loop {
        let event = tokio::select! {
            // Received messages are handled before the silence is checked.
            biased;
            () = &mut listening => return,
            Some(signal) = signals.recv() => {
                let now = Instant::now().into_std();
                let ControlSignal::State(state) = signal else {
                    watchdog.socket_found(now);
                    continue;
                };
                watchdog.heartbeat(&state, now);
                reader.read(&state, now, &target.activity);
                let state = without_heartbeat(*state);
                if last.as_ref() == Some(&state) {
                    continue;
                }
                last = Some(state.clone());
                ProcessEvent::Reported(Box::new(state))
            }
            now = looks.tick() => match watchdog.check(now.into_std(), || target.process.stopped()) {
                Some(hang) => ProcessEvent::Hung(hang),
                None => continue,
            },
        };
        let stalled = matches!(event, ProcessEvent::Hung(_));
        if notices.send((target.shard.clone(), target.process.clone(), event)).is_err() || stalled {
            return;
        }
    }
}

/// A report without the fields that change with every heartbeat.
fn without_heartbeat(state: pb::EngineState) -> pb::EngineState {
    pb::EngineState { batches_ended: 0, batch_estimate_seconds: 0.0, ..state }
}

/// A signal from an engine.
enum ControlSignal {
    /// Its socket exists.
    Socket,
    /// Its state.
    State(Box<pb::EngineState>),
}

/// Receives an engine's states until the task is aborted; a new process has no socket yet.
async fn listen(target: &WatchTarget, signals: mpsc::UnboundedSender<ControlSignal>) {
    let mut client = ControlClient::new(russet_rpc::tls::unix_channel(target.socket.clone()));
    loop {
        if UnixStream::connect(&target.socket).await.is_ok() && signals.send(ControlSignal::Socket).is_err() {
            return;
        }
        if let Ok(answer) = client.watch(pb::WatchRequest {}).await {
            let mut stream = answer.into_inner();
            while let Ok(Some(state)) = stream.message().await {
                // Another engine may have taken over the socket; its reports are ignored.
                if state.shard_uid != target.shard || state.epoch != target.epoch as u64 {
                    break;
                }
                if signals.send(ControlSignal::State(Box::new(state))).is_err() {
                    return;
                }
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
