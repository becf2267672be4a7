//! Reform: has an engine that lost its group become a rank of the next one with its loaded weights, over its
//! control socket. Engines of older releases lack both calls; that and every other error is a
//! [`ProcessEvent::ReformRefused`], after which the engine is killed and another one started.

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

/// Timeout for MLX to leave a group: the engine itself allows ten seconds.
pub const LEAVE_TIMEOUT: Duration = Duration::from_secs(12);
/// RPC timeout over a socket of this machine.
const RPC_TIMEOUT: Duration = Duration::from_secs(3);

/// One engine, and the receiver of its events.
#[derive(Debug)]
pub struct ReformRequest {
    /// UID of the Shard.
    pub shard: String,
    /// Its process.
    pub process: ProcessIdentity,
    /// Its control socket.
    pub socket: PathBuf,
    /// Sender of events.
    pub events: mpsc::UnboundedSender<EngineEvent>,
}

impl ReformRequest {
    /// Has the engine leave its group. Its reports say whether it has left.
    pub fn leave_group(self, reason: &'static str) {
        tokio::spawn(async move {
            let request = pb::DisbandRequest { reason: reason.to_owned() };
            let reply = self.call(|mut client| async move { client.disband(request).await.map(drop) });
            if let Err(reason) = reply.await {
                self.send(ProcessEvent::ReformRefused(reason));
            }
        });
    }

    /// Has the engine join the next formation, with the JSON that a new process would read.
    pub fn reform(self, config: String) {
        tokio::spawn(async move {
            let request = pb::FormRequest { config };
            let reply = self.call(|mut client| async move { client.form(request).await.map(drop) });
            let event = reply.await.map_or_else(ProcessEvent::ReformRefused, |()| ProcessEvent::Reformed);
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
        // There is no receiver when the agent exits.
        self.events.send((self.shard, self.process, event)).ok();
    }
}
