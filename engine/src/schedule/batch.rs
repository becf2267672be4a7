//! A batch on its way through the group: whose it is, what was asked, and what came of it.

use std::time::Duration;

use tokio::time::Instant;

use crate::compute::{Answer, Chosen};

/// A step that takes longer hangs. Reading 2,048 tokens with the largest model on the slowest
/// machine we know of takes a fraction of it. The agent knows much sooner; this is for an engine without one.
const STEP_DEADLINE: Duration = Duration::from_secs(300);

/// A batch on its way, and whose it is.
pub(super) struct Begun {
    /// Stays of its sequences.
    pub(super) rows: Vec<u64>,
    /// Whether tokens are read and none chosen behind them.
    pub(super) reads: bool,
    /// Guesses of all of them.
    pub(super) guesses: u32,
    pub(super) since: Instant,
    pub(super) answer: Asked,
}

/// From one token of every stream to the next.
pub(super) struct Lap {
    pub(super) begun: Instant,
    /// Tokens so far.
    pub(super) told: u32,
    pub(super) streams: u32,
}

/// What was asked of a batch.
pub(super) struct Asked {
    /// How many tokens each of its steps chooses.
    pub(super) choices: Vec<usize>,
    pub(super) answer: Answer<Vec<Chosen>>,
}

impl Asked {
    /// What came of each step; an error is why the group cannot go on.
    pub(super) async fn answered(self) -> Result<Vec<Chosen>, String> {
        let answered = match tokio::time::timeout(STEP_DEADLINE, self.answer).await {
            Ok(Ok(answered)) => answered.map_err(|error| error.to_string())?,
            Ok(Err(_)) => return Err("the compute thread is gone; see the engine's log".into()),
            Err(_) => {
                let seconds = STEP_DEADLINE.as_secs();
                return Err(format!("a step did not end within {seconds} s; the group hangs"));
            }
        };
        if !answered.iter().map(Vec::len).eq(self.choices) {
            return Err("the compute half did not choose tokens where it had to, and only there".into());
        }
        Ok(answered)
    }
}
