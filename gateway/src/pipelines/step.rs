//! Does one item of a step to its end: tries again where that may help, waits where somebody is busy, and reads the output by
//! its schema. Nothing of it is kept here.

use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use super::action::Action;
use super::calls::{Call, CallError, Reply};
use super::record::UsageRecord;
use super::schema::OutputSchema;
use crate::offline::{Interruption, OfflineContext};

/// The first time between two tries; it doubles with each.
const RETRY_WAIT: Duration = Duration::from_secs(1);

/// How often, how long and for what output.
#[derive(Clone, Copy)]
pub(super) struct RetryPolicy<'a> {
    pub(super) retries: u32,
    pub(super) timeout: Duration,
    pub(super) schema: &'a OutputSchema,
}

/// Why an item has no output.
#[derive(Debug)]
pub(super) enum StepError {
    /// For good, until a person resumes the run.
    Failed(String),
    /// For good, though an address did it: its answer cannot be kept.
    Unkept(String),
    /// The gateway ends, or the run was deleted.
    Interrupted(Interruption),
}

impl From<Interruption> for StepError {
    fn from(interruption: Interruption) -> Self {
        Self::Interrupted(interruption)
    }
}

/// Does an action until it has an output, which comes with what all its tries used.
pub(super) async fn perform(
    call: Call<'_>,
    action: &Action,
    policy: RetryPolicy<'_>,
) -> Result<(Value, UsageRecord), StepError> {
    let mut deadline = Instant::now() + policy.timeout;
    let offline = &call.context.offline;
    let (mut used, mut tries, mut waits) = (UsageRecord::default(), 0, 0);
    let late = |last: Option<String>| {
        let last = last.map_or_else(String::new, |last| format!("; {last}"));
        StepError::Failed(format!("it took more than {} s{last}", policy.timeout.as_secs()))
    };
    loop {
        // Waiting for the API server is no time of the step.
        let waited = Instant::now();
        call.lease.valid(offline).await?;
        deadline += waited.elapsed();
        let made = timeout_at(deadline, call.make(action)).await;
        let error = match made {
            Err(_) => return Err(late(None)),
            Ok(Ok(Reply { text, usage })) => {
                used = used.plus(usage);
                match policy.schema.read(text).await {
                    Ok(output) => return Ok((output, used)),
                    // Its effect is there, whatever it said.
                    Err(error) if matches!(action, Action::Http(_)) => return Err(StepError::Unkept(error)),
                    Err(error) => CallError::Again(error),
                }
            }
            Ok(Err(error)) => error,
        };
        if offline.stopping.is_cancelled() {
            // It may have failed for that.
            return Err(Interruption::Stopping.into());
        }
        let (wait, message) = match error {
            CallError::Failed(message) => return Err(StepError::Failed(message)),
            CallError::Unkept(message) => return Err(StepError::Unkept(message)),
            CallError::Again(message) if tries == policy.retries => {
                let times = if tries == 0 { String::new() } else { format!(" ({} tries)", tries + 1) };
                return Err(StepError::Failed(format!("{message}{times}")));
            }
            CallError::Again(message) => {
                tries += 1;
                (RETRY_WAIT * 2_u32.pow(tries.min(6) - 1), message)
            }
            CallError::Busy(wait, message) => {
                waits += 1;
                (OfflineContext::retry_wait(wait, waits), message)
            }
        };
        if Instant::now() + wait > deadline {
            return Err(late(Some(message)));
        }
        tracing::debug!(key = call.key, message, "a step of a Pipeline is tried again");
        offline.wait(wait).await?;
    }
}
