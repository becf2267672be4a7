//! What goes wrong with a request while an engine is looked for, and what its client is told when it is given up.

use std::time::Duration;

use super::TRY_AGAIN;
use super::choose::Begun;
use crate::refusal::{Kind, Refusal};
use crate::routes::Endpoint;

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
                    "{losses} engines were lost while they worked on this request, so it is not sent again; \
                     the last: {message}"
                ),
            ));
        }
        self.lost = Some(message);
        Ok(())
    }

    /// The refusal of a request that was held as long as it may be.
    pub(super) fn too_late(&mut self, model: &str, hold: Duration, waiting_for: &str) -> Refusal {
        let seconds = hold.as_secs();
        let refusal = match (self.lost.take(), self.busy.take()) {
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

/// The refusal of the rest of an answer that broke off, by what came of looking for another engine.
pub(super) fn cut_short(lost: &str, refusal: Refusal) -> Refusal {
    match refusal.kind {
        Kind::EngineLost
        | Kind::EngineSilent
        | Kind::DeadlineExceeded
        | Kind::Internal
        | Kind::ShuttingDown => refusal,
        // Nothing is wrong with what the client sent, and waiting was tried.
        _ => Refusal::new(Kind::EngineLost, format!("{lost}; its answer cannot go on: {}", refusal.message))
            .retry_after(TRY_AGAIN),
    }
}

/// The refusal of an answer that this engine would go on with differently: `here` are the tokens of its prompt and
/// those it goes on after.
pub(super) fn differs(endpoint: &Endpoint, here: (u32, usize), begun: &Begun, told: usize) -> Refusal {
    let (prompt, emitted) = here;
    Refusal::new(
        Kind::ModelNotReady,
        format!(
            "it was begun with a prompt of {} tokens and {told} of its own were told, and the engine on node {} would \
             go on after {emitted} with a prompt of {prompt}; let all engines be of one release",
            begun.prompt_tokens, endpoint.node
        ),
    )
}
