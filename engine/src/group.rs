//! The control path of a group: rank 0 leads, the others follow. Activations travel between
//! ranks through MLX, never here; but a lost rank is noticed here, because MLX may block for ever
//! when a peer dies and a gRPC stream does not.
//!
//! ```text
//! rank 0: Hello ─▶ (all loaded) ─▶ Join ─▶ (all Joined) ─▶ Batch, …, Reset ─▶ Tried ─▶ Batch, Keep, Reset, Batch, …
//!                                                              the smoke prompt
//! ```
//!
//! Beside all of it both sides send beats. A rank that died closes its connections and is seen at once; one that is
//! frozen, or behind a cable that was pulled, is seen because its beats end. They do not wait for MLX, so a rank that
//! waits for its neighbours, however long, is heard all the time: its own agent judges that ([`crate::pulse`]).

pub mod block_fetches;
pub mod leader;
pub mod follower;

use std::collections::HashSet;

use futures::future::join_all;
use russet_rpc::engine as pb;
use russet_rpc::engine::follow_command::Command;
use russet_rpc::failure_detector::{HEARTBEAT_INTERVAL, BUSY_TIMEOUT, IDLE_TIMEOUT, SilenceDetector};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

use crate::executor::{Executor, SequenceStep};
use crate::prefix_cache::{BlockCopy, CacheCommand, block_hash::BlockHash};
use block_fetches::BlockFetches;

/// Senders to every higher rank.
#[derive(Clone, Debug, Default)]
pub struct Followers {
    // Not bounded: at most one step of a slot is on its way.
    senders: Vec<UnboundedSender<pb::FollowCommand>>,
    fetches: BlockFetches,
    blocks_on_disk: Option<Vec<BlockHash>>,
}

impl Followers {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.senders.is_empty()
    }

    /// Makes every follower run the steps too.
    pub fn run(&self, batch: &[SequenceStep]) {
        // The choice is rank 0's own business.
        let step =
            |step: &SequenceStep| pb::Step { slot: step.slot, offset: step.offset, tokens: step.tokens.clone() };
        self.send(Command::Batch(pb::Batch { steps: batch.iter().map(step).collect() }));
    }

    /// Makes every follower carry out the order too.
    pub fn apply_cache_command(&self, order: &CacheCommand) {
        self.send(to_follow_command(order));
    }

    /// Makes every follower forget the slot.
    pub fn reset(&self, slot: u32) {
        self.apply_cache_command(&CacheCommand::Reset { slot });
    }

    /// Makes every follower fill the slot from blocks of which some are on disk; how many of the first ones came
    /// everywhere.
    pub fn fetch(&self, slot: u32, keys: &[BlockHash]) -> oneshot::Receiver<u32> {
        let answer = self.fetches.expect(slot, self.senders.len());
        self.send(Command::Fetch(pb::Fetch { slot, keys: encode_hashes(keys) }));
        answer
    }

    /// Those of the blocks that are on every follower's disk too.
    pub fn blocks_on_every_disk(&self, own: Vec<BlockHash>) -> Vec<BlockHash> {
        match &self.blocks_on_disk {
            None => own,
            Some(theirs) => {
                let theirs: HashSet<&BlockHash> = theirs.iter().collect();
                own.into_iter().filter(|key| theirs.contains(key)).collect()
            }
        }
    }

    /// Tells every follower what came of the smoke prompt: nothing, or why the group is of no more use.
    pub fn report_smoke_test(&self, failure: Option<String>) {
        self.send(Command::Tried(pb::Tried { failure }));
    }

    /// Waits until every follower has left, or was lost.
    pub async fn wait_left(&self) {
        join_all(self.senders.iter().map(UnboundedSender::closed)).await;
    }

    fn join(&self) {
        self.send(Command::Join(pb::Join {}));
    }

    fn send(&self, command: Command) {
        for sender in &self.senders {
            // A closed stream is noticed by who watches its replies.
            let _ = sender.send(pb::FollowCommand { command: Some(command.clone()) });
        }
    }
}

fn encode_hashes(keys: &[BlockHash]) -> Vec<Vec<u8>> {
    keys.iter().map(|key| key.0.to_vec()).collect()
}

/// Keys that are keys.
fn decode_hashes(bytes: &[Vec<u8>]) -> Vec<BlockHash> {
    bytes.iter().filter_map(|bytes| BlockHash::from_bytes(bytes)).collect()
}

fn to_follow_command(order: &CacheCommand) -> Command {
    match order {
        CacheCommand::Reset { slot } => Command::Reset(pb::Reset { slot: *slot }),
        CacheCommand::Truncate { slot, length } => Command::Trim(pb::Trim { slot: *slot, length: *length }),
        CacheCommand::Store { slot, blocks } => {
            let block = |kept: &BlockCopy| pb::KeptBlock {
                index: kept.index,
                key: kept.hash.0.to_vec(),
                held: kept.in_memory,
                shelved: kept.on_disk,
            };
            Command::Keep(pb::Keep { slot: *slot, blocks: blocks.iter().map(block).collect() })
        }
        CacheCommand::Load { slot, hashes: keys } => Command::Restore(pb::Restore { slot: *slot, keys: encode_hashes(keys) }),
        CacheCommand::Evict { in_memory: held, on_disk: shelved } => {
            Command::Forget(pb::Forget { held: encode_hashes(held), shelved: encode_hashes(shelved) })
        }
    }
}

/// The order that a command stands for, if it is one.
fn to_cache_command(command: &Command) -> Option<CacheCommand> {
    Some(match command {
        Command::Reset(pb::Reset { slot }) => CacheCommand::Reset { slot: *slot },
        Command::Trim(pb::Trim { slot, length }) => CacheCommand::Truncate { slot: *slot, length: *length },
        Command::Keep(pb::Keep { slot, blocks }) => {
            let block = |block: &pb::KeptBlock| {
                let pb::KeptBlock { index, key, held, shelved } = block;
                let key = BlockHash::from_bytes(key)?;
                Some(BlockCopy { index: *index, hash: key, in_memory: *held, on_disk: *shelved })
            };
            CacheCommand::Store { slot: *slot, blocks: blocks.iter().filter_map(block).collect() }
        }
        Command::Restore(pb::Restore { slot, keys }) => CacheCommand::Load { slot: *slot, hashes: decode_hashes(keys) },
        Command::Forget(pb::Forget { held, shelved }) => {
            CacheCommand::Evict { in_memory: decode_hashes(held), on_disk: decode_hashes(shelved) }
        }
        _ => return None,
    })
}

/// One side's ear for the beats of the other.
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

    /// What came, which ends the lull.
    fn record<T>(&mut self, message: T) -> T {
        self.detector.reset(Instant::now().into_std());
        message
    }

    /// At the next look: for how long nothing has come, where that is too long for a rank that works or rests.
    async fn check(&mut self, compute: &dyn Executor) -> Option<String> {
        let now = self.check_interval.tick().await;
        let silent = self.detector.tick(now.into_std());
        let patience = if compute.batch_progress().running_estimate.is_some() { BUSY_TIMEOUT } else { IDLE_TIMEOUT };
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
        for order in [
            CacheCommand::Reset { slot: 3 },
            CacheCommand::Truncate { slot: 3, length: 70 },
            CacheCommand::Store { slot: 1, blocks: vec![BlockCopy { index: 2, hash: key(9), in_memory: true, on_disk: false }] },
            CacheCommand::Load { slot: 2, hashes: vec![key(1), key(2)] },
            CacheCommand::Evict { in_memory: vec![key(1)], on_disk: vec![key(2)] },
        ] {
            assert_eq!(to_cache_command(&to_follow_command(&order)), Some(order));
        }
        assert_eq!(to_cache_command(&Command::Join(pb::Join {})), None);
    }
}
