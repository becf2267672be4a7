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

use super::Event;
use super::adopt::Process;
use super::spawn;
use super::watchdog::{LOOK, Watchdog};

/// How often an adopted process is looked at: it is nobody's child, so nothing wakes us. A lost
/// rank is to be noticed in a fraction of the ten seconds a group has to form anew.
const POLL: Duration = Duration::from_millis(100);

/// What is known of the engine to watch.
#[derive(Clone, Debug)]
pub struct Target {
    /// UID of the Shard.
    pub shard: String,
    /// Incarnation.
    pub epoch: i64,
    /// Its process.
    pub process: Process,
    /// Its control socket.
    pub socket: PathBuf,
    /// Its folder.
    pub folder: PathBuf,
}

/// An event and whose it is: of which Shard, and which process.
pub type Notice = (String, Process, Event);

/// Ends the watching, not the engine, when dropped.
#[derive(Debug)]
pub struct Watching {
    reports: AbortHandle,
    end: AbortHandle,
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.reports.abort();
        self.end.abort();
    }
}

impl Watching {
    /// From now on the same process is another formation's.
    pub fn again(&mut self, target: Target, notices: mpsc::UnboundedSender<Notice>) {
        self.reports.abort();
        self.reports = tokio::spawn(reports(target, notices)).abort_handle();
    }
}

/// Watches an engine; `child` is given when this very process started it.
pub fn watch(target: Target, child: Option<Child>, notices: mpsc::UnboundedSender<Notice>) -> Watching {
    let reports = tokio::spawn(reports(target.clone(), notices.clone())).abort_handle();
    let end = tokio::spawn(async move {
        let how = match child {
            Some(child) => ended_child(child).await,
            None => ended_process(&target.process).await,
        };
        let words = spawn::last_words(&target.folder);
        let how = match words.is_empty() {
            true => format!("engine process {} {how}", target.process.pid),
            false => format!("engine process {} {how}; its last line: {words}", target.process.pid),
        };
        notices.send((target.shard, target.process, Event::Exited(how))).ok();
    });
    Watching { reports, end: end.abort_handle() }
}

async fn ended_child(mut child: Child) -> String {
    match child.wait().await {
        Ok(status) => format!("ended ({status})"),
        Err(error) => format!("cannot be waited for ({error})"),
    }
}

async fn ended_process(process: &Process) -> String {
    while process.alive(&process.boot_id) {
        tokio::time::sleep(POLL).await;
    }
    "ended".to_owned()
}

/// Passes on what an engine says until it ends or stands still. A beat that says nothing new concerns the watchdog
/// alone: whoever hears of the rest has more to do than to count beats.
async fn reports(target: Target, notices: mpsc::UnboundedSender<Notice>) {
    let (sender, mut said) = mpsc::unbounded_channel();
    let listening = listen(&target, sender);
    tokio::pin!(listening);
    let mut looks = tokio::time::interval(LOOK);
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
                let Heard::State(state) = heard else {
                    watchdog.found(now);
                    continue;
                };
                watchdog.beat(&state, now);
                let state = without_beat(*state);
                if last.as_ref() == Some(&state) {
                    continue;
                }
                last = Some(state.clone());
                Event::Reported(Box::new(state))
            }
            now = looks.tick() => match watchdog.look(now.into_std(), || target.process.stopped()) {
                Some(trouble) => Event::Stalled(trouble),
                None => continue,
            },
        };
        let stalled = matches!(event, Event::Stalled(_));
        if notices.send((target.shard.clone(), target.process.clone(), event)).is_err() || stalled {
            return;
        }
    }
}

/// A report without what changes in every beat.
fn without_beat(state: pb::EngineState) -> pb::EngineState {
    pb::EngineState { batches_ended: 0, batch_forecast_seconds: 0.0, ..state }
}

/// What is heard of an engine.
enum Heard {
    /// Its socket is there.
    Socket,
    /// What it says.
    State(Box<pb::EngineState>),
}

/// Hears an engine for ever; one that was just started has no socket yet.
async fn listen(target: &Target, said: mpsc::UnboundedSender<Heard>) {
    let mut client = ControlClient::new(russet_rpc::tls::unix_channel(target.socket.clone()));
    loop {
        if UnixStream::connect(&target.socket).await.is_ok() && said.send(Heard::Socket).is_err() {
            return;
        }
        if let Ok(answer) = client.watch(pb::WatchRequest {}).await {
            let mut stream = answer.into_inner();
            while let Ok(Some(state)) = stream.message().await {
                // A socket may have been taken over; only the engine we mean is believed.
                if state.shard_uid != target.shard || state.epoch != target.epoch as u64 {
                    break;
                }
                if said.send(Heard::State(Box::new(state))).is_err() {
                    return;
                }
            }
        }
        tokio::time::sleep(POLL).await;
    }
}
