//! The control path of a group: rank 0 leads, the others follow. Activations travel between
//! ranks through MLX, never here; but a lost rank is noticed here, because MLX may block for ever
//! when a peer dies and a gRPC stream does not.
//!
//! ```text
//! rank 0: Hello ─▶ (all loaded) ─▶ Join ─▶ (all Joined) ─▶ Batch, …, Reset ─▶ Tried ─▶ Batch, Reset, Batch, …
//!                                                              the smoke prompt
//! ```

pub mod lead;
pub mod obey;

use futures::future::join_all;
use russet_rpc::engine as pb;
use russet_rpc::engine::follow_command::Command;
use tokio::sync::mpsc::UnboundedSender;

use crate::compute::Step;

/// Senders to every higher rank.
#[derive(Clone, Debug, Default)]
pub struct Followers {
    // Not bounded: at most one step of a slot is on its way.
    senders: Vec<UnboundedSender<pb::FollowCommand>>,
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

    /// Makes every follower forget the slot.
    pub fn reset(&self, slot: u32) {
        self.send(Command::Reset(pb::Reset { slot }));
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
