//! A batch on its way through the group: whose it is, what was asked, and what came of it.

use std::time::Duration;

use tokio::time::Instant;

use crate::executor::{ReplyReceiver, Sampled, ExecutorError};
use crate::lifecycle::FailureReport;

/// A step that takes longer hangs. Reading 2,048 tokens with the largest model on the slowest
/// machine we know of takes a fraction of it. The agent knows much sooner; this is for an engine without one.
const STEP_TIMEOUT: Duration = Duration::from_secs(300);

/// Work on its way, and whose it is.
pub(super) struct InFlight {
    /// Stays of its sequences.
    pub(super) admissions: Vec<u64>,
    pub(super) started: Instant,
    pub(super) work: WorkKind,
}

/// What was begun.
pub(super) enum WorkKind {
    /// A batch.
    Batch {
        /// Whether tokens are read and none chosen behind them.
        prefills: bool,
        /// Guesses of all of them.
        draft_tokens: u32,
        /// What comes of it.
        reply: PendingBatch,
    },
    /// Guesses of the draft model.
    Draft {
        /// For each sequence.
        reply: ReplyReceiver<Vec<Vec<u32>>>,
    },
}

/// What came of it.
pub(super) enum Completion {
    Batch { prefills: bool, draft_tokens: u32, sampled: Vec<Sampled> },
    Draft(Result<Vec<Vec<u32>>, String>),
}

impl WorkKind {
    /// Waits for it; an error is why the group cannot go on.
    pub(super) async fn wait(self) -> Result<Completion, FailureReport> {
        Ok(match self {
            Self::Batch { prefills: reads, draft_tokens: guesses, reply: answer } => {
                Completion::Batch { prefills: reads, draft_tokens: guesses, sampled: answer.wait().await? }
            }
            Self::Draft { reply: answer } => Completion::Draft(within_timeout(answer).await?.map_err(|error| error.to_string())),
        })
    }
}

/// The answer of the compute thread, which may be that something failed.
async fn within_timeout<T>(answer: ReplyReceiver<T>) -> Result<Result<T, ExecutorError>, String> {
    match tokio::time::timeout(STEP_TIMEOUT, answer).await {
        Ok(Ok(answered)) => Ok(answered),
        Ok(Err(_)) => Err("the compute thread is gone; see the engine's log".into()),
        Err(_) => {
            let seconds = STEP_TIMEOUT.as_secs();
            Err(format!("a step did not end within {seconds} s; the group hangs"))
        }
    }
}

/// From one token of every stream to the next.
pub(super) struct DecodeRound {
    pub(super) started: Instant,
    /// Tokens so far.
    pub(super) emitted: u32,
    pub(super) streams: u32,
}

/// What was asked of a batch.
pub(super) struct PendingBatch {
    /// How many tokens each of its steps chooses.
    pub(super) sample_counts: Vec<usize>,
    pub(super) reply: ReplyReceiver<Vec<Sampled>>,
}

impl PendingBatch {
    /// What came of each step; an error is why the group cannot go on.
    pub(super) async fn wait(self) -> Result<Vec<Sampled>, FailureReport> {
        let answered = within_timeout(self.reply).await??;
        if !answered.iter().map(Vec::len).eq(self.sample_counts) {
            let wrong = "the compute half did not choose tokens where it had to, and only there";
            return Err(wrong.to_owned().into());
        }
        Ok(answered)
    }
}
