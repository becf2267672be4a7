//! Rank 0's side of the control stream: connect to every higher rank, join the rings together, and monitor
//! them. Not here: sending batches and cache commands (`Followers` in `group`).

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{select_all, try_join_all};
use russet_rpc::engine as pb;
use russet_rpc::engine::engine_client::EngineClient;
use russet_rpc::engine::follow_command::Command;
use russet_rpc::engine::follow_reply::Reply;
use russet_rpc::failure_detector::HEARTBEAT_INTERVAL;
use russet_rpc::tls::TlsFiles;
use russet_telemetry::errors::with_sources;
use russet_wire::engine_config::PeerRank;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Code, Status, Streaming};

use super::block_fetches::BlockFetches;
use super::{Followers, HeartbeatMonitor, decode_hashes};
use crate::executor::{Addresses, Executor, ReplyReceiver};
use crate::lifecycle::{FailureReport, Lifecycle, Phase};
use crate::prefix_cache::block_hash::BlockHash;

/// Retry interval while a rank does not listen yet.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);

/// Timeout for all ranks to join once all are loaded. MLX tries for half a minute and tunnels for a whole
/// one, but MLX itself waits forever for a neighbour that does not connect.
const JOIN_TIMEOUT: Duration = Duration::from_secs(90);

/// A higher rank, from rank 0's view.
struct FollowerStream {
    peer: PeerRank,
    replies: Streaming<pb::FollowReply>,
    heartbeat: HeartbeatMonitor,
    /// This rank's own executor: while it waits for a batch, it waits for the follower.
    compute: Arc<dyn Executor>,
}

/// Forms the group. On return every rank has joined; from then on a lost follower fails this rank. An error
/// says why the group cannot be formed.
pub async fn gather(
    peers: &[PeerRank],
    tls: &TlsFiles,
    hello: &pb::Hello,
    compute: &Arc<dyn Executor>,
    addresses: Addresses,
    life: &Lifecycle,
) -> Result<Followers, FailureReport> {
    let mut followers = Followers::default();
    let mut members = Vec::new();
    // The first rejection ends the wait for all others: it is the reason to report.
    for (sender, follower) in
        try_join_all(peers.iter().map(|peer| connect(peer, tls, hello, compute, life))).await?
    {
        followers.senders.push(sender);
        members.push(follower);
    }
    life.advance(Phase::Loaded, "joining the rings");
    if !peers.is_empty() {
        tracing::info!("joins the rings");
    }
    let joining = wait_for_join(compute.join(addresses), &mut members);
    followers.join();
    let too_long = |_| {
        let seconds = JOIN_TIMEOUT.as_secs();
        Err(FailureReport::group(format!("the ranks did not reach each other's rings within {seconds} s")))
    };
    followers.blocks_on_disk = tokio::time::timeout(JOIN_TIMEOUT, joining).await.unwrap_or_else(too_long)?;
    if !peers.is_empty() {
        tracing::info!("joined the rings");
    }
    tokio::spawn(watch_followers(members, followers.fetches.clone(), life.clone()));
    Ok(followers)
}

/// Waits until every rank has joined; returns the blocks on every other rank's disk, if there are other
/// ranks.
async fn wait_for_join(
    own: ReplyReceiver<()>,
    members: &mut [FollowerStream],
) -> Result<Option<Vec<BlockHash>>, FailureReport> {
    let own =
        async { Ok::<_, FailureReport>(own.await.map_err(|_| "the compute thread is gone".to_owned())??) };
    let ((), blocks_on_disk) =
        tokio::try_join!(own, try_join_all(members.iter_mut().map(FollowerStream::wait_joined)))?;
    Ok(blocks_on_disk.into_iter().reduce(|one, other| {
        let other: HashSet<BlockHash> = other.into_iter().collect();
        one.into_iter().filter(|hash| other.contains(hash)).collect()
    }))
}

/// Opens the stream to one rank, retrying without a limit: the operator decides how long is too long.
async fn connect(
    peer: &PeerRank,
    tls: &TlsFiles,
    hello: &pb::Hello,
    compute: &Arc<dyn Executor>,
    life: &Lifecycle,
) -> Result<(mpsc::UnboundedSender<pb::FollowCommand>, FollowerStream), FailureReport> {
    let PeerRank { rank, address, node } = peer;
    let channel = tls.channel(&address.to_string(), node).map_err(|error| error.to_string())?;
    let mut client = EngineClient::new(channel);
    loop {
        let (sender, commands) = mpsc::unbounded_channel();
        let _ = sender.send(pb::FollowCommand { command: Some(Command::Hello(hello.clone())) });
        match client.follow(UnboundedReceiverStream::new(commands)).await {
            Ok(replies) => {
                tracing::info!(rank, node, "found and loaded");
                // The weak sender does not keep the stream open.
                tokio::spawn(send_heartbeats(sender.downgrade()));
                let (replies, compute) = (replies.into_inner(), compute.clone());
                return Ok((
                    sender,
                    FollowerStream {
                        peer: peer.clone(),
                        replies,
                        heartbeat: HeartbeatMonitor::new(),
                        compute,
                    },
                ));
            }
            Err(status) if is_final(&status) => {
                let message = status.message();
                return Err(FailureReport::group(format!(
                    "rank {rank} on {node} at {address} refused: {message}"
                )));
            }
            Err(status) => {
                let reason = describe(&status);
                life.advance(
                    Phase::Loaded,
                    &format!("waiting for rank {rank} on {node} at {address}: {reason}"),
                );
                tracing::debug!(rank, node, %address, reason, "not there yet");
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }
}

/// Sends heartbeats to a follower.
async fn send_heartbeats(commands: mpsc::WeakUnboundedSender<pb::FollowCommand>) {
    let heartbeat = pb::FollowCommand { command: Some(Command::Heartbeat(pb::Heartbeat {})) };
    while commands.upgrade().is_some_and(|commands| commands.send(heartbeat.clone()).is_ok()) {
        tokio::time::sleep(HEARTBEAT_INTERVAL).await;
    }
}

/// Whether a retry cannot help.
fn is_final(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::FailedPrecondition
            | Code::PermissionDenied
            | Code::Unauthenticated
            | Code::Unimplemented
            | Code::InvalidArgument
    )
}

/// A status with its causes: tonic's message of a failed connection names none.
fn describe(status: &Status) -> String {
    with_sources(status.message(), status)
}

impl FollowerStream {
    fn name(&self) -> String {
        let PeerRank { rank, address, node } = &self.peer;
        format!("rank {rank} on {node} at {address}")
    }

    /// Waits until the follower has joined; returns the blocks on its disk.
    async fn wait_joined(&mut self) -> Result<Vec<BlockHash>, FailureReport> {
        match self.next_reply().await? {
            Reply::Joined(pb::Joined { rank, blocks_on_disk }) if rank == self.peer.rank => {
                Ok(decode_hashes(&blocks_on_disk))
            }
            Reply::Joined(pb::Joined { rank, .. }) => {
                Err(format!("{} says it is rank {rank}; the peers are mixed up", self.name()).into())
            }
            Reply::Failed(_) | Reply::BlocksFetched(_) | Reply::Heartbeat(_) => Err(self.protocol_error()),
        }
    }

    /// A protocol violation: one of the two sides has a bug.
    fn protocol_error(&self) -> FailureReport {
        format!("{} broke the protocol", self.name()).into()
    }

    /// Waits for the end of the stream; returns why the follower is lost.
    async fn wait_lost(&mut self, fetches: BlockFetches) -> FailureReport {
        loop {
            match self.next_reply().await {
                Ok(Reply::BlocksFetched(pb::BlocksFetched { slot, count })) => {
                    fetches.record_reply(slot, count)
                }
                Ok(_) => return self.protocol_error(),
                Err(failure) => return failure,
            }
        }
    }

    /// The next message other than heartbeats, or why the follower is lost.
    async fn next_reply(&mut self) -> Result<Reply, FailureReport> {
        loop {
            let message = tokio::select! {
                biased;
                message = self.replies.message() => self.heartbeat.record(message),
                lost = self.heartbeat.check(self.compute.as_ref()) => match lost {
                    Some(how) => return Err(FailureReport::group(format!("{} is lost: {how}", self.name()))),
                    None => continue,
                },
            };
            let name = self.name();
            return match message {
                Ok(Some(pb::FollowReply { reply: Some(Reply::Heartbeat(pb::Heartbeat {})) })) => continue,
                Ok(Some(pb::FollowReply { reply: Some(Reply::Failed(failed)) })) => {
                    Err(FailureReport::group(format!("{name} failed: {}", failed.message)))
                }
                Ok(Some(pb::FollowReply { reply: Some(reply) })) => Ok(reply),
                Ok(Some(_)) => Err(self.protocol_error()),
                Ok(None) => Err(FailureReport::group(format!("{name} closed its stream"))),
                Err(status) => {
                    tracing::warn!(error = describe(&status), "{name} is gone");
                    Err(FailureReport::group(format!("{name} is gone: its connection broke")))
                }
            };
        }
    }
}

async fn watch_followers(mut members: Vec<FollowerStream>, fetches: BlockFetches, life: Lifecycle) {
    if members.is_empty() {
        return;
    }
    let (failure, ..) =
        select_all(members.iter_mut().map(|member| member.wait_lost(fetches.clone()).boxed())).await;
    life.fail_with(failure);
}
