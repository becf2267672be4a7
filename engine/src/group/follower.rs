//! A follower's side of the control stream: check the leader, join on command, and run every step in order.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use russet_rpc::engine as pb;
use russet_rpc::engine::follow_command::Command;
use russet_rpc::engine::follow_reply::Reply;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot::error::RecvError;
use tonic::{Status, Streaming};

use super::{HeartbeatMonitor, decode_hashes, encode_hashes, to_cache_command};
use crate::batch_time::ORDERED_TOP;
use crate::executor::{Addresses, Executor, ExecutorError, ScoreSpec, SequenceStep};
use crate::lifecycle::{FailureCause, FailureReport, Lifecycle, Phase};
use crate::metrics::EngineMetrics;

/// Timeout for the first message, which is sent with the request.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// State of a follower.
pub struct Follower {
    /// This rank.
    pub rank: u32,
    /// The `Hello` that rank 0 must send.
    pub hello: pb::Hello,
    /// Slots of the KV cache.
    pub max_sequences: u32,
    /// Its shard of the model.
    pub compute: Arc<dyn Executor>,
    /// Addresses of its MLX rings.
    pub addresses: Addresses,
    /// Its lifecycle.
    pub life: Lifecycle,
    /// Its metrics.
    pub metrics: EngineMetrics,
    /// Whether it has a leader already.
    pub has_leader: AtomicBool,
}

/// Leadership of one follower, released if the leader leaves before anything has started.
struct Leadership(Arc<Follower>);

impl Drop for Leadership {
    fn drop(&mut self) {
        self.0.has_leader.store(false, Ordering::Release);
    }
}

/// Replies to rank 0.
pub type ReplySink = UnboundedSender<Result<pb::FollowReply, Status>>;

impl Follower {
    /// Checks the leader, waits until the weights are loaded, and then executes its commands. The response
    /// headers tell rank 0 that this rank is loaded.
    pub async fn follow(
        self: Arc<Self>,
        mut commands: Streaming<pb::FollowCommand>,
        replies: ReplySink,
    ) -> Result<(), Status> {
        let first = tokio::time::timeout(HELLO_TIMEOUT, commands.message()).await;
        let hello = match first {
            Ok(Ok(Some(pb::FollowCommand { command: Some(Command::Hello(hello)) }))) => hello,
            Ok(Err(status)) => return Err(status),
            _ => return Err(Status::invalid_argument("the first message must be Hello")),
        };
        if let Some(difference) = difference(&self.hello, &hello) {
            tracing::warn!(rank = self.rank, difference, "refused a leader");
            return Err(Status::failed_precondition(format!(
                "{difference}; ranks of one group must be equal in all of these"
            )));
        }
        if self.has_leader.swap(true, Ordering::AcqRel) {
            return Err(Status::failed_precondition(format!(
                "rank {} is led already; a new leader needs a new epoch",
                self.rank
            )));
        }
        let leadership = Leadership(self.clone());
        let now = self.life.wait_until(|now| now.phase >= Phase::Loaded || now.stopped).await;
        if now.phase == Phase::Failed || now.draining.is_some() {
            return Err(Status::failed_precondition(self.life.unavailable_reason().unwrap_or_default()));
        }
        tokio::spawn(async move {
            let _leadership = leadership;
            self.run(commands, &replies).await;
            // Rank 0 gets the reason of any failure, if it is still connected.
            let now = self.life.status();
            if now.phase == Phase::Failed {
                let kind = pb::FailureKind::Unavailable as i32;
                let failed = pb::Failed { kind, message: now.message, ..Default::default() };
                let _ = replies.send(Ok(pb::FollowReply { reply: Some(Reply::Failed(failed)) }));
            }
        });
        Ok(())
    }

    async fn run(&self, mut commands: Streaming<pb::FollowCommand>, replies: &ReplySink) {
        let mut running = FuturesUnordered::new();
        let mut fetching = FuturesUnordered::new();
        let mut joining = None;
        let mut heartbeat = HeartbeatMonitor::new();
        loop {
            tokio::select! {
                biased;
                _ = self.life.wait_failed() => return,
                Some(result) = running.next() => {
                    if let Some(FailureReport { cause, reason }) = failure_of(result) {
                        return self.life.fail_at(cause, format!("rank {}: {reason}", self.rank));
                    }
                }
                Some((slot, count)) = fetching.next() => {
                    // Without a reply the slot stays empty, and rank 0 prefills the prompt.
                    let count: Result<Result<u32, ExecutorError>, RecvError> = count;
                    let count = count.map_or(0, |count| count.unwrap_or(0));
                    let fetched = pb::BlocksFetched { slot, count };
                    let _ = replies.send(Ok(pb::FollowReply { reply: Some(Reply::BlocksFetched(fetched)) }));
                }
                result = async { joining.as_mut().expect("polled only while joining").await }, if joining.is_some() => {
                    joining = None;
                    if let Some(FailureReport { cause, reason }) = failure_of(result) {
                        let reason = format!("rank {} cannot join the ring: {reason}", self.rank);
                        return self.life.fail_at(cause, reason);
                    }
                    tracing::info!("joined the rings");
                    self.life.advance(Phase::Loaded, "joined; rank 0 tries the smoke prompt");
                    let joined = pb::Joined { rank: self.rank, blocks_on_disk: encode_hashes(&self.compute.blocks_on_disk()) };
                    let _ = replies.send(Ok(pb::FollowReply { reply: Some(Reply::Joined(joined)) }));
                }
                message = commands.message() => match self.command(heartbeat.record(message)) {
                    Ok(Some(Command::Heartbeat(pb::Heartbeat {}))) => {}
                    Ok(Some(Command::Batch(pb::Batch { steps }))) => {
                        self.metrics.steps.inc_by(steps.len() as u64);
                        running.push(self.compute.run(steps.into_iter().map(to_sequence_step).collect()));
                    }
                    Ok(Some(Command::FetchBlocks(pb::FetchBlocks { slot, hashes }))) => {
                        let count = self.compute.fetch(slot, decode_hashes(&hashes));
                        fetching.push(async move { (slot, count.await) });
                    }
                    Ok(Some(Command::SmokeTested(pb::SmokeTested { failure: None }))) => {
                        self.life.advance(Phase::Serving, "");
                        tracing::info!("serving");
                    }
                    Ok(Some(Command::SmokeTested(pb::SmokeTested { failure: Some(reason) }))) => {
                        return self.life.fail_at(FailureCause::Smoke, reason);
                    }
                    Ok(Some(Command::Join(pb::Join {}))) if joining.is_none() => {
                        tracing::info!("joins the rings");
                        joining = Some(self.compute.join(self.addresses.clone()));
                    }
                    Ok(Some(Command::Join(_) | Command::Hello(_))) => {
                        return self.life.fail("rank 0 broke the protocol: it joined or said Hello twice");
                    }
                    Ok(Some(command)) => match to_cache_command(&command) {
                        Some(command) => self.compute.apply_cache_command(command),
                        None => return self.life.fail("rank 0 sent a command that this rank cannot execute; run equal builds on all ranks"),
                    },
                    Ok(None) => return self.life.stop(),
                    Err(failure) => return self.life.fail_with(failure),
                },
                lost = heartbeat.check(self.compute.as_ref()) => {
                    if let Some(how) = lost {
                        return self.life.fail_with(FailureReport::group(format!("rank 0 is lost: {how}")));
                    }
                    let _ = replies.send(Ok(pb::FollowReply { reply: Some(Reply::Heartbeat(pb::Heartbeat {})) }));
                }
            }
        }
    }

    /// Checks a batch: every step has a slot of its own, and tokens or a way to learn the token that rank 0
    /// sampled.
    fn check_batch(&self, batch: &pb::Batch) -> Result<(), String> {
        let Self { max_sequences, hello, .. } = self;
        let hears = hello.size == hello.tensor_size;
        let mut slots = BTreeSet::new();
        for pb::Step { slot, tokens, scored_tokens, .. } in &batch.steps {
            if *scored_tokens as usize > tokens.len() {
                return Err(format!(
                    "rank 0 sent a step of {} tokens of which it scores {scored_tokens}; report it with both logs",
                    tokens.len(),
                ));
            }
            if slot >= max_sequences || (tokens.is_empty() && !hears) {
                return Err(format!(
                    "rank 0 sent a step of {} tokens for slot {slot}, but there are {max_sequences} slots; start all ranks with the same maxSequences",
                    tokens.len(),
                ));
            }
            if !slots.insert(slot) {
                return Err(format!(
                    "rank 0 sent two steps for slot {slot} at once; report it with both logs"
                ));
            }
        }
        Ok(())
    }

    /// A valid command; `None` if rank 0 has left and this rank was asked to stop anyway.
    fn command(
        &self,
        message: Result<Option<pb::FollowCommand>, Status>,
    ) -> Result<Option<Command>, FailureReport> {
        let left = |how: &str| {
            if self.life.status().draining.is_some() { Ok(None) } else { Err(FailureReport::group(how)) }
        };
        match message {
            Ok(Some(pb::FollowCommand { command: Some(command) })) => match &command {
                Command::Batch(batch) => Ok(self.check_batch(batch).map(|()| Some(command))?),
                _ => Ok(Some(command)),
            },
            Ok(Some(pb::FollowCommand { command: None })) => {
                let unknown = "rank 0 sent a command this build does not know; run equal builds on all ranks";
                Err(unknown.to_owned().into())
            }
            Ok(None) => left("rank 0 closed its stream"),
            Err(status) => {
                tracing::warn!(error = status.message(), "rank 0 is gone");
                left("rank 0 is gone: its connection broke")
            }
        }
    }
}

/// A step as this rank runs it. It computes no scores, but has to know of how many tokens rank 0 does, not of which.
fn to_sequence_step(step: pb::Step) -> SequenceStep {
    let pb::Step { slot, offset, tokens, draft_tokens, adapter, scored_tokens } = step;
    let score =
        (scored_tokens > 0).then(|| ScoreSpec { tokens: vec![0; scored_tokens as usize], top: ORDERED_TOP });
    SequenceStep { slot, offset, tokens, draft_tokens, adapter, sample: None, score }
}

fn failure_of<T>(result: Result<Result<T, ExecutorError>, RecvError>) -> Option<FailureReport> {
    match result {
        Ok(Ok(_)) => None,
        Ok(Err(error)) => Some(error.into()),
        Err(_) => Some("the compute thread is gone; see the engine's log".to_owned().into()),
    }
}

/// What two ranks disagree on, with both values.
fn difference(own: &pb::Hello, other: &pb::Hello) -> Option<String> {
    let pb::Hello { build, group_uid, epoch, size, tensor_size } = own;
    [
        ("builds", build.clone(), other.build.clone()),
        ("groups", group_uid.clone(), other.group_uid.clone()),
        ("epochs", epoch.to_string(), other.epoch.to_string()),
        ("sizes", size.to_string(), other.size.to_string()),
        ("tensor sizes", tensor_size.to_string(), other.tensor_size.to_string()),
    ]
    .into_iter()
    .find(|(_, own, other)| own != other)
    .map(|(what, own, other)| format!("the {what} differ: this rank has {own}, rank 0 has {other}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_follower_knows_how_many_tokens_rank_0_scores() {
        let step = pb::Step { slot: 1, tokens: vec![7; 9], scored_tokens: 9, ..Default::default() };
        assert_eq!(to_sequence_step(step.clone()).scored_tokens(), 9);
        assert_eq!(to_sequence_step(pb::Step { scored_tokens: 0, ..step }).score, None);
    }

    #[test]
    fn hello_difference_names_both_sides() {
        let own = pb::Hello { build: "b1".into(), group_uid: "g".into(), epoch: 3, size: 4, tensor_size: 2 };
        assert_eq!(difference(&own, &own.clone()), None);
        for (other, expected) in [
            (
                pb::Hello { build: "b2".into(), ..own.clone() },
                "the builds differ: this rank has b1, rank 0 has b2",
            ),
            (
                pb::Hello { group_uid: "h".into(), ..own.clone() },
                "the groups differ: this rank has g, rank 0 has h",
            ),
            (pb::Hello { epoch: 4, ..own.clone() }, "the epochs differ: this rank has 3, rank 0 has 4"),
            (pb::Hello { size: 3, ..own.clone() }, "the sizes differ: this rank has 4, rank 0 has 3"),
            (
                pb::Hello { tensor_size: 1, ..own.clone() },
                "the tensor sizes differ: this rank has 2, rank 0 has 1",
            ),
        ] {
            assert_eq!(difference(&own, &other).as_deref(), Some(expected));
        }
    }
}
