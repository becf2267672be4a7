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

pub mod fetches;
pub mod lead;
pub mod obey;

use std::collections::HashSet;

use futures::future::join_all;
use russet_rpc::engine as pb;
use russet_rpc::engine::follow_command::Command;
use russet_rpc::lull::{BEAT, LOST, LOST_AT_REST, Lull};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

use crate::compute::{Compute, Step};
use crate::kept::{Kept, Order, chain::Key};
use fetches::Fetches;

/// Senders to every higher rank.
#[derive(Clone, Debug, Default)]
pub struct Followers {
    // Not bounded: at most one step of a slot is on its way.
    senders: Vec<UnboundedSender<pb::FollowCommand>>,
    fetches: Fetches,
    shelved: Option<Vec<Key>>,
}

impl Followers {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.senders.is_empty()
    }

    /// Makes every follower run the steps too.
    pub fn run(&self, batch: &[Step]) {
        // The choice is rank 0's own business.
        let step =
            |step: &Step| pb::Step { slot: step.slot, offset: step.offset, tokens: step.tokens.clone() };
        self.send(Command::Batch(pb::Batch { steps: batch.iter().map(step).collect() }));
    }

    /// Makes every follower carry out the order too.
    pub fn arrange(&self, order: &Order) {
        self.send(command_of(order));
    }

    /// Makes every follower forget the slot.
    pub fn reset(&self, slot: u32) {
        self.arrange(&Order::Reset { slot });
    }

    /// Makes every follower fill the slot from blocks of which some are on disk; how many of the first ones came
    /// everywhere.
    pub fn fetch(&self, slot: u32, keys: &[Key]) -> oneshot::Receiver<u32> {
        let answer = self.fetches.expect(slot, self.senders.len());
        self.send(Command::Fetch(pb::Fetch { slot, keys: bytes_of(keys) }));
        answer
    }

    /// Those of the blocks that are on every follower's disk too.
    pub fn shelved_everywhere(&self, own: Vec<Key>) -> Vec<Key> {
        match &self.shelved {
            None => own,
            Some(theirs) => {
                let theirs: HashSet<&Key> = theirs.iter().collect();
                own.into_iter().filter(|key| theirs.contains(key)).collect()
            }
        }
    }

    /// Tells every follower what came of the smoke prompt: nothing, or why the group is of no more use.
    pub fn tried(&self, failure: Option<String>) {
        self.send(Command::Tried(pb::Tried { failure }));
    }

    /// Waits until every follower has left, or was lost.
    pub async fn left(&self) {
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

fn bytes_of(keys: &[Key]) -> Vec<Vec<u8>> {
    keys.iter().map(|key| key.0.to_vec()).collect()
}

/// Keys that are keys.
fn keys_of(bytes: &[Vec<u8>]) -> Vec<Key> {
    bytes.iter().filter_map(|bytes| Key::from_bytes(bytes)).collect()
}

fn command_of(order: &Order) -> Command {
    match order {
        Order::Reset { slot } => Command::Reset(pb::Reset { slot: *slot }),
        Order::Trim { slot, length } => Command::Trim(pb::Trim { slot: *slot, length: *length }),
        Order::Keep { slot, blocks } => {
            let block = |kept: &Kept| pb::KeptBlock {
                index: kept.index,
                key: kept.key.0.to_vec(),
                held: kept.held,
                shelved: kept.shelved,
            };
            Command::Keep(pb::Keep { slot: *slot, blocks: blocks.iter().map(block).collect() })
        }
        Order::Restore { slot, keys } => Command::Restore(pb::Restore { slot: *slot, keys: bytes_of(keys) }),
        Order::Forget { held, shelved } => {
            Command::Forget(pb::Forget { held: bytes_of(held), shelved: bytes_of(shelved) })
        }
    }
}

/// The order that a command stands for, if it is one.
fn order_of(command: &Command) -> Option<Order> {
    Some(match command {
        Command::Reset(pb::Reset { slot }) => Order::Reset { slot: *slot },
        Command::Trim(pb::Trim { slot, length }) => Order::Trim { slot: *slot, length: *length },
        Command::Keep(pb::Keep { slot, blocks }) => {
            let block = |block: &pb::KeptBlock| {
                let pb::KeptBlock { index, key, held, shelved } = block;
                let key = Key::from_bytes(key)?;
                Some(Kept { index: *index, key, held: *held, shelved: *shelved })
            };
            Order::Keep { slot: *slot, blocks: blocks.iter().filter_map(block).collect() }
        }
        Command::Restore(pb::Restore { slot, keys }) => Order::Restore { slot: *slot, keys: keys_of(keys) },
        Command::Forget(pb::Forget { held, shelved }) => {
            Order::Forget { held: keys_of(held), shelved: keys_of(shelved) }
        }
        _ => return None,
    })
}

/// One side's ear for the beats of the other.
#[derive(Debug)]
struct Ear {
    looks: Interval,
    lull: Lull,
}

impl Ear {
    fn new() -> Self {
        let mut looks = interval(BEAT);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { looks, lull: Lull::new(Instant::now().into_std()) }
    }

    /// What came, which ends the lull.
    fn heard<T>(&mut self, message: T) -> T {
        self.lull.end(Instant::now().into_std());
        message
    }

    /// At the next look: for how long nothing has come, where that is too long for a rank that works or rests.
    async fn look(&mut self, compute: &dyn Compute) -> Option<String> {
        let now = self.looks.tick().await;
        let silent = self.lull.look(now.into_std());
        let patience = if compute.pulse().running.is_some() { LOST } else { LOST_AT_REST };
        (silent >= patience).then(|| {
            let (silent, beat) = (silent.as_secs_f64(), BEAT.as_secs_f64());
            format!("it was silent for {silent:.1} s and should beat every {beat} s; it is frozen or cut off")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn followers_hear_the_orders_that_rank_0_carries_out() {
        let key = |number| Key([number; 16]);
        for order in [
            Order::Reset { slot: 3 },
            Order::Trim { slot: 3, length: 70 },
            Order::Keep { slot: 1, blocks: vec![Kept { index: 2, key: key(9), held: true, shelved: false }] },
            Order::Restore { slot: 2, keys: vec![key(1), key(2)] },
            Order::Forget { held: vec![key(1)], shelved: vec![key(2)] },
        ] {
            assert_eq!(order_of(&command_of(&order)), Some(order));
        }
        assert_eq!(order_of(&Command::Join(pb::Join {})), None);
    }
}
