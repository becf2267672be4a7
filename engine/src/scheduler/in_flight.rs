//! Batches in flight: their sequences, the request to the executor, and the result.

use std::time::Duration;

use tokio::time::Instant;

use super::engine_time::BatchPart;
use crate::executor::{ExecutorError, ReplyReceiver, StepResult};
use crate::lifecycle::FailureReport;

/// Timeout of a batch. Prefilling 2,048 tokens with the largest model on the slowest machine we know of takes
/// a fraction of it. The agent detects a hang much sooner; this is for an engine without an agent.
const STEP_TIMEOUT: Duration = Duration::from_secs(300);

/// Work in flight, and the sequences it belongs to.
pub(super) struct InFlight {
    /// Admission ids of its sequences.
    pub(super) admissions: Vec<u64>,
    /// What each of them has in it.
    pub(super) parts: Vec<BatchPart>,
    pub(super) started: Instant,
    pub(super) work: WorkKind,
}

/// Kind of work.
pub(super) enum WorkKind {
    /// A batch.
    Batch {
        /// Whether some tokens are prefilled without sampling after them.
        prefills: bool,
        /// Tokens beyond one of each decoding sequence: draft tokens, and those that run again after some were
        /// rejected.
        extra_tokens: u32,
        /// Pending result.
        reply: PendingBatch,
    },
    /// A request to the draft model.
    Draft {
        /// Draft tokens per sequence, pending.
        reply: ReplyReceiver<Vec<Vec<u32>>>,
    },
}

/// Result of the work.
pub(super) enum Completion {
    Batch { prefills: bool, extra_tokens: u32, results: Vec<StepResult> },
    Draft(Result<Vec<Vec<u32>>, String>),
}

impl WorkKind {
    /// Waits for the result; an error is why the group has failed.
    pub(super) async fn wait(self) -> Result<Completion, FailureReport> {
        Ok(match self {
            Self::Batch { prefills, extra_tokens, reply } => {
                Completion::Batch { prefills, extra_tokens, results: reply.wait().await? }
            }
            Self::Draft { reply } => {
                Completion::Draft(within_timeout(reply).await?.map_err(|error| error.to_string()))
            }
        })
    }
}

/// Waits for a reply of the executor, up to the timeout; the reply may be an error.
async fn within_timeout<T>(reply: ReplyReceiver<T>) -> Result<Result<T, ExecutorError>, String> {
    match tokio::time::timeout(STEP_TIMEOUT, reply).await {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(_)) => Err("the compute thread is gone; see the engine's log".into()),
        Err(_) => {
            let seconds = STEP_TIMEOUT.as_secs();
            Err(format!("a step did not end within {seconds} s; the group hangs"))
        }
    }
}

/// A decode round: from one token of every stream to the next.
pub(super) struct DecodeRound {
    pub(super) started: Instant,
    /// Tokens so far.
    pub(super) emitted: u32,
    pub(super) streams: u32,
}

/// A batch handed to the executor.
pub(super) struct PendingBatch {
    /// Number of tokens that each step samples, and of those that it scores.
    pub(super) counts: Vec<(usize, usize)>,
    pub(super) reply: ReplyReceiver<Vec<StepResult>>,
}

impl PendingBatch {
    /// Waits for the results of the steps; an error is why the group has failed.
    pub(super) async fn wait(self) -> Result<Vec<StepResult>, FailureReport> {
        let results = within_timeout(self.reply).await??;
        let count = |result: &StepResult| (result.sampled.len(), result.scores.len());
        if !results.iter().map(count).eq(self.counts) {
            let wrong = "the executor did not sample and score exactly the tokens that the batch asks for";
            return Err(wrong.to_owned().into());
        }
        Ok(results)
    }
}
