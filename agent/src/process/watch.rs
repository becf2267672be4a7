//! Watching a running engine from outside: its own reports over the control socket, and its
//! process, whichever ends first. Nothing here decides what an end means.

use std::path::PathBuf;
use std::time::Duration;

use russet_rpc::engine as pb;
use russet_rpc::engine::control_client::ControlClient;
use tokio::process::Child;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::Event;
use super::adopt::Process;
use super::spawn;

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

/// An event and whose it is.
pub type Notice = (String, i64, Event);

/// Ends the watching, not the engine, when dropped.
#[derive(Debug)]
pub struct Watching(Vec<AbortHandle>);

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

/// Watches an engine; `child` is given when this very process started it.
pub fn watch(target: Target, child: Option<Child>, notices: mpsc::UnboundedSender<Notice>) -> Watching {
    let reports = tokio::spawn(reports(target.clone(), notices.clone()));
    let reader = reports.abort_handle();
    let end = tokio::spawn(async move {
        let how = match child {
            Some(child) => ended_child(child).await,
            None => ended_process(&target.process).await,
        };
        reports.abort();
        let words = spawn::last_words(&target.folder);
        let how = match words.is_empty() {
            true => format!("engine process {} {how}", target.process.pid),
            false => format!("engine process {} {how}; its last line: {words}", target.process.pid),
        };
        notices.send((target.shard, target.epoch, Event::Exited(how))).ok();
    });
    Watching(vec![reader, end.abort_handle()])
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

/// Passes an engine's reports on until it ends; an engine that was just started has no socket yet.
async fn reports(target: Target, notices: mpsc::UnboundedSender<Notice>) {
    let mut client = ControlClient::new(russet_rpc::tls::unix_channel(target.socket.clone()));
    loop {
        if let Ok(answer) = client.watch(pb::WatchRequest {}).await {
            let mut stream = answer.into_inner();
            while let Ok(Some(report)) = stream.message().await {
                // A socket may have been taken over; only the engine we mean is believed.
                if report.shard_uid != target.shard || report.epoch != target.epoch as u64 {
                    break;
                }
                let event = Event::Reported(Box::new(report));
                if notices.send((target.shard.clone(), target.epoch, event)).is_err() {
                    return;
                }
            }
        }
        tokio::time::sleep(POLL).await;
    }
}
