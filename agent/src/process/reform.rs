//! Having an engine that lost its group be a rank of the next one, with the weights it has: what is asked over its
//! control socket. Engines of an older release know neither question; that and every other trouble is an
//! [`Event::Refused`], after which the engine is killed and another one started.

use std::path::PathBuf;
use std::time::Duration;

use russet_rpc::engine as pb;
use russet_rpc::engine::control_client::ControlClient;
use tokio::sync::mpsc;
use tonic::Status;
use tonic::transport::Channel;

use super::ProcessEvent;
use super::record::ProcessIdentity;
use super::watch::EngineEvent;

/// Time for MLX to leave a group: the engine itself gives it ten seconds.
pub const LEAVE_TIMEOUT: Duration = Duration::from_secs(12);
/// Time for an answer over a socket of this machine.
const RPC_TIMEOUT: Duration = Duration::from_secs(3);

/// One engine and who hears what becomes of it.
#[derive(Debug)]
pub struct ReformRequest {
    /// UID of the Shard.
    pub shard: String,
    /// Its process.
    pub process: ProcessIdentity,
    /// Its control socket.
    pub socket: PathBuf,
    /// Where events go.
    pub events: mpsc::UnboundedSender<EngineEvent>,
}

impl ReformRequest {
    /// Has it leave its group. That it has left, or cannot, is in its reports.
    pub fn leave_group(self, why: &'static str) {
        tokio::spawn(async move {
            let request = pb::DisbandRequest { why: why.to_owned() };
            let asked = self.call(|mut client| async move { client.disband(request).await.map(drop) });
            if let Err(why) = asked.await {
                self.send(ProcessEvent::ReformRefused(why));
            }
        });
    }

    /// Has it begin the next formation, told like a new process.
    pub fn reform(self, arguments: Vec<String>) {
        tokio::spawn(async move {
            let request = pb::FormRequest { arguments };
            let asked = self.call(|mut client| async move { client.form(request).await.map(drop) });
            let event = asked.await.map_or_else(ProcessEvent::ReformRefused, |()| ProcessEvent::Reformed);
            self.send(event);
        });
    }

    async fn call<F>(&self, question: impl FnOnce(ControlClient<Channel>) -> F) -> Result<(), String>
    where
        F: Future<Output = Result<(), Status>>,
    {
        let client = ControlClient::new(russet_rpc::tls::unix_channel(self.socket.clone()));
        match tokio::time::timeout(RPC_TIMEOUT, question(client)).await {
            Ok(answer) => answer.map_err(|status| status.message().to_owned()),
            Err(_) => Err(format!("it did not answer within {} s", RPC_TIMEOUT.as_secs())),
        }
    }

    fn send(self, event: ProcessEvent) {
        // Nobody hears it where the agent ends.
        self.events.send((self.shard, self.process, event)).ok();
    }
}
