//! What goes wrong with a request before its first token, and what its client is told when it is given up.

use std::time::Duration;

use super::TRY_AGAIN;
use crate::refusal::{Kind, Refusal};

/// What went wrong with one request so far.
#[derive(Default)]
pub(super) struct Setbacks {
    /// What the last full engine said.
    pub(super) busy: Option<String>,
    /// What became of the last one that was lost.
    pub(super) lost: Option<String>,
    losses: u32,
}

impl Setbacks {
    /// One more engine was lost; an error once they are as many as may be.
    pub(super) fn lost(&mut self, accepted: bool, message: String, most: u32) -> Result<(), Refusal> {
        self.losses += u32::from(accepted);
        if self.losses >= most {
            let losses = self.losses;
            return Err(Refusal::new(
                Kind::EngineLost,
                format!(
                    "{losses} engines in a row were lost while they worked on this request, so it is not sent again; \
                     the last: {message}"
                ),
            ));
        }
        self.lost = Some(message);
        Ok(())
    }

    /// The refusal of a request that was held as long as it may be.
    pub(super) fn too_late(self, model: &str, hold: Duration, waiting_for: &str) -> Refusal {
        let seconds = hold.as_secs();
        let refusal = match (self.lost, self.busy) {
            (Some(lost), _) => Refusal::new(
                Kind::EngineLost,
                format!(
                    "model `{model}`: {lost}; no group of it was ready again within {seconds} s ({waiting_for})"
                ),
            ),
            (None, Some(busy)) => return overloaded(busy),
            (None, None) if hold.is_zero() => Refusal::new(
                Kind::ModelNotReady,
                format!(
                    "model `{model}` does not answer, and its ModelRoute holds no requests: {waiting_for}"
                ),
            ),
            (None, None) => Refusal::new(
                Kind::ModelNotReady,
                format!("model `{model}` is not ready after {seconds} s of waiting: {waiting_for}"),
            ),
        };
        refusal.retry_after(TRY_AGAIN)
    }
}

/// The refusal of a request for which every engine is full.
pub(super) fn overloaded(message: String) -> Refusal {
    Refusal::new(Kind::Overloaded, message).retry_after(Duration::from_secs(1))
}
