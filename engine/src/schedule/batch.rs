//! A batch on its way through the group: whose it is, what was asked, and what came of it.

use std::time::Duration;

use tokio::time::Instant;

use crate::compute::{Answer, Chosen, ComputeError};
use crate::life::Failure;

/// A step that takes longer hangs. Reading 2,048 tokens with the largest model on the slowest
/// machine we know of takes a fraction of it. The agent knows much sooner; this is for an engine without one.
const STEP_DEADLINE: Duration = Duration::from_secs(300);

/// Work on its way, and whose it is.
pub(super) struct Begun {
    /// Stays of its sequences.
    pub(super) rows: Vec<u64>,
    pub(super) since: Instant,
    pub(super) work: Work,
}

/// What was begun.
pub(super) enum Work {
    /// A batch.
    Batch {
        /// Whether tokens are read and none chosen behind them.
        reads: bool,
        /// Guesses of all of them.
        guesses: u32,
        /// What comes of it.
        answer: Asked,
    },
    /// Guesses of the draft model.
    Draft {
        /// For each sequence.
        answer: Answer<Vec<Vec<u32>>>,
    },
}

/// What came of it.
pub(super) enum Done {
    Batch { reads: bool, guesses: u32, chosen: Vec<Chosen> },
    Draft(Result<Vec<Vec<u32>>, String>),
}

impl Work {
    /// Waits for it; an error is why the group cannot go on.
    pub(super) async fn done(self) -> Result<Done, Failure> {
        Ok(match self {
            Self::Batch { reads, guesses, answer } => {
                Done::Batch { reads, guesses, chosen: answer.answered().await? }
            }
            Self::Draft { answer } => Done::Draft(in_time(answer).await?.map_err(|error| error.to_string())),
        })
    }
}

/// The answer of the compute thread, which may be that something failed.
async fn in_time<T>(answer: Answer<T>) -> Result<Result<T, ComputeError>, String> {
    match tokio::time::timeout(STEP_DEADLINE, answer).await {
        Ok(Ok(answered)) => Ok(answered),
        Ok(Err(_)) => Err("the compute thread is gone; see the engine's log".into()),
        Err(_) => {
            let seconds = STEP_DEADLINE.as_secs();
            Err(format!("a step did not end within {seconds} s; the group hangs"))
        }
    }
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
    pub(super) async fn answered(self) -> Result<Vec<Chosen>, Failure> {
        let answered = in_time(self.answer).await??;
        if !answered.iter().map(Vec::len).eq(self.choices) {
            let wrong = "the compute half did not choose tokens where it had to, and only there";
            return Err(wrong.to_owned().into());
        }
        Ok(answered)
    }
}
