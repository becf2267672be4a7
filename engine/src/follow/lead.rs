//! Rank 0's side: find every higher rank, join the rings together, and watch them to the end.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{select_all, try_join_all};
use russet_rpc::engine as pb;
use russet_rpc::engine::engine_client::EngineClient;
use russet_rpc::engine::follow_command::Command;
use russet_rpc::engine::follow_reply::Reply;
use russet_rpc::lull::BEAT;
use russet_rpc::tls::Files;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Code, Status, Streaming};

use super::fetches::Fetches;
use super::{Ear, Followers, keys_of};
use crate::args::Peer;
use crate::compute::{Addresses, Answer, Compute};
use crate::kept::chain::Key;
use crate::life::{Failure, Life, Phase};

/// Between two attempts to reach a rank that does not listen yet.
const RETRY: Duration = Duration::from_millis(250);

/// For all ranks to join once all are loaded. MLX tries for half a minute and tunnels for a whole one, but
/// MLX itself waits for ever for a neighbour that does not come.
const JOINING: Duration = Duration::from_secs(90);

/// One higher rank, as rank 0 sees it.
struct Follower {
    peer: Peer,
    replies: Streaming<pb::FollowReply>,
    ear: Ear,
    /// What this rank itself does: while it waits for a batch, it waits for the follower.
    compute: Arc<dyn Compute>,
}

/// Forms the group. On the way back every rank has joined; from then on a lost follower fails this
/// rank. An error says why the group cannot be.
pub async fn gather(
    peers: &[Peer],
    tls: &Files,
    hello: &pb::Hello,
    compute: &Arc<dyn Compute>,
    addresses: Addresses,
    life: &Life,
) -> Result<Followers, Failure> {
    let mut followers = Followers::default();
    let mut members = Vec::new();
    // One that refuses ends the waiting for all others: the reason is what a person has to see.
    for (sender, follower) in
        try_join_all(peers.iter().map(|peer| find(peer, tls, hello, compute, life))).await?
    {
        followers.senders.push(sender);
        members.push(follower);
    }
    life.advance(Phase::Loaded, "joining the rings");
    if !peers.is_empty() {
        tracing::info!("joins the rings");
    }
    let joining = everyone_joins(compute.join(addresses), &mut members);
    followers.join();
    let too_long = |_| {
        let seconds = JOINING.as_secs();
        Err(Failure::group(format!("the ranks did not reach each other's rings within {seconds} s")))
    };
    followers.shelved = tokio::time::timeout(JOINING, joining).await.unwrap_or_else(too_long)?;
    if !peers.is_empty() {
        tracing::info!("joined the rings");
    }
    tokio::spawn(watch(members, followers.fetches.clone(), life.clone()));
    Ok(followers)
}

/// This rank and every other one has joined; blocks that are on every other one's disk, if there are others.
async fn everyone_joins(own: Answer<()>, members: &mut [Follower]) -> Result<Option<Vec<Key>>, Failure> {
    let own = async { Ok::<_, Failure>(own.await.map_err(|_| "the compute thread is gone".to_owned())??) };
    let ((), shelved) = tokio::try_join!(own, try_join_all(members.iter_mut().map(Follower::joined)))?;
    Ok(shelved.into_iter().reduce(|one, other| {
        let other: HashSet<Key> = other.into_iter().collect();
        one.into_iter().filter(|key| other.contains(key)).collect()
    }))
}

/// Opens the stream to one rank, for as long as it takes: whether that is too long, the operator
/// decides.
async fn find(
    peer: &Peer,
    tls: &Files,
    hello: &pb::Hello,
    compute: &Arc<dyn Compute>,
    life: &Life,
) -> Result<(mpsc::UnboundedSender<pb::FollowCommand>, Follower), Failure> {
    let Peer { rank, address, node } = peer;
    let channel = tls.channel(address, node).map_err(|error| error.to_string())?;
    let mut client = EngineClient::new(channel);
    loop {
        let (sender, commands) = mpsc::unbounded_channel();
        let _ = sender.send(pb::FollowCommand { command: Some(Command::Hello(hello.clone())) });
        match client.follow(UnboundedReceiverStream::new(commands)).await {
            Ok(replies) => {
                tracing::info!(rank, node, "found and loaded");
                // It holds the stream open no longer than others do.
                tokio::spawn(beat(sender.downgrade()));
                let (replies, compute) = (replies.into_inner(), compute.clone());
                return Ok((sender, Follower { peer: peer.clone(), replies, ear: Ear::new(), compute }));
            }
            Err(status) if is_final(&status) => {
                let message = status.message();
                return Err(Failure::group(format!("rank {rank} on {node} at {address} refused: {message}")));
            }
            Err(status) => {
                let reason = describe(&status);
                life.advance(
                    Phase::Loaded,
                    &format!("waiting for rank {rank} on {node} at {address}: {reason}"),
                );
                tracing::debug!(rank, node, address, reason, "not there yet");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

/// Tells a follower that this rank is there.
async fn beat(commands: mpsc::WeakUnboundedSender<pb::FollowCommand>) {
    let beat = pb::FollowCommand { command: Some(Command::Beat(pb::Beat {})) };
    while commands.upgrade().is_some_and(|commands| commands.send(beat.clone()).is_ok()) {
        tokio::time::sleep(BEAT).await;
    }
}

/// A refusal that waiting does not heal.
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

/// A status with its causes: tonic's own message of a failed connection names none, and causes
/// repeat each other.
fn describe(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let words = error.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        cause = error.source();
    }
    text
}

impl Follower {
    fn name(&self) -> String {
        let Peer { rank, address, node } = &self.peer;
        format!("rank {rank} on {node} at {address}")
    }

    /// Waits until it has joined; the blocks on its disk.
    async fn joined(&mut self) -> Result<Vec<Key>, Failure> {
        match self.word().await? {
            Reply::Joined(pb::Joined { rank, shelved }) if rank == self.peer.rank => Ok(keys_of(&shelved)),
            Reply::Joined(pb::Joined { rank, .. }) => {
                Err(format!("{} says it is rank {rank}; the peers are mixed up", self.name()).into())
            }
            Reply::Failed(_) | Reply::Fetched(_) | Reply::Beat(_) => Err(self.broke_the_protocol()),
        }
    }

    /// One of the two has a bug.
    fn broke_the_protocol(&self) -> Failure {
        format!("{} broke the protocol", self.name()).into()
    }

    /// Waits for the end of the stream; returns why the follower is of no more use.
    async fn end(&mut self, fetches: Fetches) -> Failure {
        loop {
            match self.word().await {
                Ok(Reply::Fetched(pb::Fetched { slot, count })) => fetches.came(slot, count),
                Ok(_) => return self.broke_the_protocol(),
                Err(failure) => return failure,
            }
        }
    }

    /// The next thing it says beside its beats, or why it is of no more use.
    async fn word(&mut self) -> Result<Reply, Failure> {
        loop {
            let message = tokio::select! {
                biased;
                message = self.replies.message() => self.ear.heard(message),
                lost = self.ear.look(self.compute.as_ref()) => match lost {
                    Some(how) => return Err(Failure::group(format!("{} is lost: {how}", self.name()))),
                    None => continue,
                },
            };
            let name = self.name();
            return match message {
                Ok(Some(pb::FollowReply { reply: Some(Reply::Beat(pb::Beat {})) })) => continue,
                Ok(Some(pb::FollowReply { reply: Some(Reply::Failed(failed)) })) => {
                    Err(Failure::group(format!("{name} failed: {}", failed.message)))
                }
                Ok(Some(pb::FollowReply { reply: Some(reply) })) => Ok(reply),
                Ok(Some(_)) => Err(self.broke_the_protocol()),
                Ok(None) => Err(Failure::group(format!("{name} closed its stream"))),
                Err(status) => {
                    tracing::warn!(error = describe(&status), "{name} is gone");
                    Err(Failure::group(format!("{name} is gone: its connection broke")))
                }
            };
        }
    }
}

async fn watch(mut members: Vec<Follower>, fetches: Fetches, life: Life) {
    if members.is_empty() {
        return;
    }
    let (failure, ..) =
        select_all(members.iter_mut().map(|member| member.end(fetches.clone()).boxed())).await;
    life.fail_with(failure);
}
