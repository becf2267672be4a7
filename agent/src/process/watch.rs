//! Watching a running engine from outside: its own reports over the control socket, whether they go on, and its
//! process, whichever ends first. Nothing here decides what an end means.

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

/// How often an adopted process is looked at: it is nobody's child, so nothing wakes us. A lost
/// rank is to be noticed in a fraction of the ten seconds a group has to form anew.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// What is known of the engine to watch.
#[derive(Clone, Debug)]
pub struct WatchTarget {
    /// UID of the Shard.
    pub shard: String,
    /// Incarnation.
    pub epoch: i64,
    /// Its process.
    pub process: ProcessIdentity,
    /// Its control socket.
    pub socket: PathBuf,
    /// Its folder.
    pub folder: PathBuf,
}

/// An event and whose it is: of which Shard, and which process.
pub type EngineEvent = (String, ProcessIdentity, ProcessEvent);

/// Ends the watching, not the engine, when dropped.
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
    /// From now on the same process is another formation's.
    pub fn retarget(&mut self, target: WatchTarget, notices: mpsc::UnboundedSender<EngineEvent>) {
        self.reports_task.abort();
        self.reports_task = tokio::spawn(run_reports(target, notices)).abort_handle();
    }
}

/// Watches an engine; `child` is given when this very process started it.
pub fn watch(target: WatchTarget, child: Option<Child>, notices: mpsc::UnboundedSender<EngineEvent>) -> EngineWatch {
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

/// Passes on what an engine says until it ends or stands still. A beat that says nothing new concerns the watchdog
/// alone: whoever hears of the rest has more to do than to count beats.
async fn run_reports(target: WatchTarget, notices: mpsc::UnboundedSender<EngineEvent>) {
    let (sender, mut said) = mpsc::unbounded_channel();
    let listening = listen(&target, sender);
    tokio::pin!(listening);
    let mut looks = tokio::time::interval(CHECK_INTERVAL);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut watchdog = Watchdog::new(Instant::now().into_std());
    let mut last = None;
    loop {
        let event = tokio::select! {
            // What has been said is heard before anybody counts as silent.
            biased;
            () = &mut listening => return,
            Some(heard) = said.recv() => {
                let now = Instant::now().into_std();
                let ControlSignal::State(state) = heard else {
                    watchdog.socket_found(now);
                    continue;
                };
                watchdog.heartbeat(&state, now);
                let state = without_heartbeat(*state);
                if last.as_ref() == Some(&state) {
                    continue;
                }
                last = Some(state.clone());
                ProcessEvent::Reported(Box::new(state))
            }
            now = looks.tick() => match watchdog.check(now.into_std(), || target.process.stopped()) {
                Some(trouble) => ProcessEvent::Hung(trouble),
                None => continue,
            },
        };
        let stalled = matches!(event, ProcessEvent::Hung(_));
        if notices.send((target.shard.clone(), target.process.clone(), event)).is_err() || stalled {
            return;
        }
    }
}

/// A report without what changes in every beat.
fn without_heartbeat(state: pb::EngineState) -> pb::EngineState {
    pb::EngineState { batches_ended: 0, batch_forecast_seconds: 0.0, ..state }
}

/// What is heard of an engine.
enum ControlSignal {
    /// Its socket is there.
    Socket,
    /// What it says.
    State(Box<pb::EngineState>),
}

/// Hears an engine for ever; one that was just started has no socket yet.
async fn listen(target: &WatchTarget, said: mpsc::UnboundedSender<ControlSignal>) {
    let mut client = ControlClient::new(russet_rpc::tls::unix_channel(target.socket.clone()));
    loop {
        if UnixStream::connect(&target.socket).await.is_ok() && said.send(ControlSignal::Socket).is_err() {
            return;
        }
        if let Ok(answer) = client.watch(pb::WatchRequest {}).await {
            let mut stream = answer.into_inner();
            while let Ok(Some(state)) = stream.message().await {
                // A socket may have been taken over; only the engine we mean is believed.
                if state.shard_uid != target.shard || state.epoch != target.epoch as u64 {
                    break;
                }
                if said.send(ControlSignal::State(Box::new(state))).is_err() {
                    return;
                }
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
