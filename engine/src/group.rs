//! Control stream of a group: rank 0 leads, the other ranks follow. Activations travel between ranks through
//! MLX, never here. A lost rank is detected here, because MLX may block forever when a peer dies and a gRPC
//! stream does not.
//!
//! ```text
//! rank 0: Hello ─▶ (all loaded) ─▶ Join ─▶ (all Joined) ─▶ Batch, …, Reset ─▶ SmokeTested ─▶ Batch, …
//!                                                              the smoke prompt
//! ```
//!
//! In addition, both sides send heartbeats. A rank that dies closes its connections and is detected at once;
//! a frozen one, or one behind an unplugged cable, is detected by missing heartbeats. Heartbeats do not wait
//! for MLX, so a rank that waits for its neighbours, however long, still sends them: its own agent judges
//! that ([`crate::batch_monitor`]).

pub mod block_fetches;
pub mod follower;
pub mod leader;

use std::collections::HashSet;

use futures::future::join_all;
use russet_rpc::engine as pb;
use russet_rpc::engine::follow_command::Command;
use russet_rpc::failure_detector::{BUSY_TIMEOUT, HEARTBEAT_INTERVAL, IDLE_TIMEOUT, SilenceDetector};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

use crate::executor::{Executor, SequenceStep};
use crate::prefix_cache::{BlockCopy, CacheCommand, block_hash::BlockHash};
use block_fetches::BlockFetches;

/// Command streams to every higher rank.
#[derive(Clone, Debug, Default)]
pub struct Followers {
    // Unbounded: at most one step of a slot is in flight.
    senders: Vec<UnboundedSender<pb::FollowCommand>>,
    fetches: BlockFetches,
    blocks_on_disk: Option<Vec<BlockHash>>,
}

impl Followers {
    /// Whether the group has a single rank.
    pub fn is_empty(&self) -> bool {
        self.senders.is_empty()
    }

    /// Sends the steps of a batch to every follower.
    pub fn run(&self, batch: &[SequenceStep]) {
        // Only rank 0 samples and scores. That it scores the others have to know, because they wait for it.
        let step = |step: &SequenceStep| pb::Step {
            slot: step.slot,
            offset: step.offset,
            tokens: step.tokens.clone(),
            draft_tokens: step.draft_tokens,
            adapter: step.adapter,
            scored_tokens: step.scored_tokens(),
        };
        self.send(Command::Batch(pb::Batch { steps: batch.iter().map(step).collect() }));
    }

    /// Sends a cache command to every follower.
    pub fn apply_cache_command(&self, command: &CacheCommand) {
        self.send(to_follow_command(command));
    }

    /// Has every follower load blocks into the slot, some of them from disk; resolves to the number of
    /// leading blocks that all ranks loaded.
    pub fn fetch(&self, slot: u32, hashes: &[BlockHash]) -> oneshot::Receiver<u32> {
        let answer = self.fetches.expect(slot, self.senders.len());
        self.send(Command::FetchBlocks(pb::FetchBlocks { slot, hashes: encode_hashes(hashes) }));
        answer
    }

    /// The blocks that are on every follower's disk too.
    pub fn blocks_on_every_disk(&self, own: Vec<BlockHash>) -> Vec<BlockHash> {
        match &self.blocks_on_disk {
            None => own,
            Some(theirs) => {
                let theirs: HashSet<&BlockHash> = theirs.iter().collect();
                own.into_iter().filter(|key| theirs.contains(key)).collect()
            }
        }
    }

    /// Sends every follower the result of the smoke prompt: success, or why the group failed.
    pub fn report_smoke_test(&self, failure: Option<String>) {
        self.send(Command::SmokeTested(pb::SmokeTested { failure }));
    }

    /// Waits until every follower has left or is lost.
    pub async fn wait_left(&self) {
        join_all(self.senders.iter().map(UnboundedSender::closed)).await;
    }

    fn join(&self) {
        self.send(Command::Join(pb::Join {}));
    }

    fn send(&self, command: Command) {
        for sender in &self.senders {
            // The task that reads the replies notices a closed stream.
            let _ = sender.send(pb::FollowCommand { command: Some(command.clone()) });
        }
    }
}

fn encode_hashes(hashes: &[BlockHash]) -> Vec<Vec<u8>> {
    hashes.iter().map(|hash| hash.0.to_vec()).collect()
}

/// Parses block hashes; drops invalid ones.
fn decode_hashes(bytes: &[Vec<u8>]) -> Vec<BlockHash> {
    bytes.iter().filter_map(|bytes| BlockHash::from_bytes(bytes)).collect()
}

fn to_follow_command(command: &CacheCommand) -> Command {
    match command {
        CacheCommand::Reset { slot } => Command::Reset(pb::Reset { slot: *slot }),
        CacheCommand::Truncate { slot, length } => {
            Command::Truncate(pb::Truncate { slot: *slot, length: *length })
        }
        CacheCommand::Snapshot { slot } => Command::Snapshot(pb::Snapshot { slot: *slot }),
        CacheCommand::Restore { slot } => Command::Restore(pb::Restore { slot: *slot }),
        CacheCommand::Fork { from, to } => Command::Fork(pb::Fork { from: *from, to: *to }),
        CacheCommand::Store { slot, blocks } => {
            let block = |block: &BlockCopy| pb::StoredBlock {
                index: block.index,
                hash: block.hash.0.to_vec(),
                in_memory: block.in_memory,
                on_disk: block.on_disk,
            };
            Command::StoreBlocks(pb::StoreBlocks { slot: *slot, blocks: blocks.iter().map(block).collect() })
        }
        CacheCommand::Load { slot, hashes } => {
            Command::LoadBlocks(pb::LoadBlocks { slot: *slot, hashes: encode_hashes(hashes) })
        }
        CacheCommand::Evict { in_memory, on_disk } => Command::EvictBlocks(pb::EvictBlocks {
            from_memory: encode_hashes(in_memory),
            from_disk: encode_hashes(on_disk),
        }),
    }
}

/// The cache command of a control message, if it is one.
fn to_cache_command(command: &Command) -> Option<CacheCommand> {
    Some(match command {
        Command::Reset(pb::Reset { slot }) => CacheCommand::Reset { slot: *slot },
        Command::Truncate(pb::Truncate { slot, length }) => {
            CacheCommand::Truncate { slot: *slot, length: *length }
        }
        Command::Snapshot(pb::Snapshot { slot }) => CacheCommand::Snapshot { slot: *slot },
        Command::Restore(pb::Restore { slot }) => CacheCommand::Restore { slot: *slot },
        Command::Fork(pb::Fork { from, to }) => CacheCommand::Fork { from: *from, to: *to },
        Command::StoreBlocks(pb::StoreBlocks { slot, blocks }) => {
            let block = |block: &pb::StoredBlock| {
                let pb::StoredBlock { index, hash, in_memory, on_disk } = block;
                let hash = BlockHash::from_bytes(hash)?;
                Some(BlockCopy { index: *index, hash, in_memory: *in_memory, on_disk: *on_disk })
            };
            CacheCommand::Store { slot: *slot, blocks: blocks.iter().filter_map(block).collect() }
        }
        Command::LoadBlocks(pb::LoadBlocks { slot, hashes }) => {
            CacheCommand::Load { slot: *slot, hashes: decode_hashes(hashes) }
        }
        Command::EvictBlocks(pb::EvictBlocks { from_memory, from_disk }) => {
            CacheCommand::Evict { in_memory: decode_hashes(from_memory), on_disk: decode_hashes(from_disk) }
        }
        _ => return None,
    })
}

/// Receiving side of the heartbeats of one peer.
#[derive(Debug)]
struct HeartbeatMonitor {
    check_interval: Interval,
    detector: SilenceDetector,
}

impl HeartbeatMonitor {
    fn new() -> Self {
        let mut check_interval = interval(HEARTBEAT_INTERVAL);
        check_interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { check_interval, detector: SilenceDetector::new(Instant::now().into_std()) }
    }

    /// Records that a message arrived.
    fn record<T>(&mut self, message: T) -> T {
        self.detector.reset(Instant::now().into_std());
        message
    }

    /// At the next tick: why the peer counts as lost, if it was silent too long for a working or an idle
    /// rank.
    async fn check(&mut self, compute: &dyn Executor) -> Option<String> {
        let now = self.check_interval.tick().await;
        let silent = self.detector.tick(now.into_std());
        let patience =
            if compute.batch_progress().running_estimate.is_some() { BUSY_TIMEOUT } else { IDLE_TIMEOUT };
        (silent >= patience).then(|| {
            let (silent, beat) = (silent.as_secs_f64(), HEARTBEAT_INTERVAL.as_secs_f64());
            format!("it was silent for {silent:.1} s and should beat every {beat} s; it is frozen or cut off")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_commands_survive_the_wire_to_followers() {
        let key = |number| BlockHash([number; 16]);
        for command in [
            CacheCommand::Reset { slot: 3 },
            CacheCommand::Truncate { slot: 3, length: 70 },
            CacheCommand::Snapshot { slot: 4 },
            CacheCommand::Restore { slot: 4 },
            CacheCommand::Fork { from: 4, to: 5 },
            CacheCommand::Store {
                slot: 1,
                blocks: vec![BlockCopy { index: 2, hash: key(9), in_memory: true, on_disk: false }],
            },
            CacheCommand::Load { slot: 2, hashes: vec![key(1), key(2)] },
            CacheCommand::Evict { in_memory: vec![key(1)], on_disk: vec![key(2)] },
        ] {
            assert_eq!(to_cache_command(&to_follow_command(&command)), Some(command));
        }
        assert_eq!(to_cache_command(&Command::Join(pb::Join {})), None);
    }
}
