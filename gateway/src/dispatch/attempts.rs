//! Failed attempts of one request, and the error its client gets when the gateway gives up.

use std::time::Duration;

use super::route_decision::ResumePoint;
use crate::error::{ErrorKind, GatewayError, RETRY_AFTER};
use crate::routes::Endpoint;

/// Failed attempts of one request so far.
#[derive(Default)]
pub(super) struct Attempts {
    /// The message of the last engine that was full.
    pub(super) last_busy: Option<String>,
    /// The message of the last engine that was lost.
    pub(super) last_lost: Option<String>,
    losses: u32,
}

impl Attempts {
    /// Records a lost engine; an error once the limit is reached.
    pub(super) fn record_lost(
        &mut self,
        accepted: bool,
        message: String,
        most: u32,
    ) -> Result<(), GatewayError> {
        self.losses += u32::from(accepted);
        if self.losses >= most {
            let losses = self.losses;
            return Err(GatewayError::new(
                ErrorKind::EngineLost,
                format!(
                    "{losses} engines were lost while they worked on this request, so it is not sent again; \
                     the last: {message}"
                ),
            ));
        }
        self.last_lost = Some(message);
        Ok(())
    }

    /// The error for a request whose hold time is over.
    pub(super) fn hold_expired(&mut self, model: &str, hold: Duration, waiting_for: &str) -> GatewayError {
        let seconds = hold.as_secs();
        let refusal = match (self.last_lost.take(), self.last_busy.take()) {
            (Some(lost), _) => GatewayError::new(
                ErrorKind::EngineLost,
                format!(
                    "model `{model}`: {lost}; no group of it was ready again within {seconds} s ({waiting_for})"
                ),
            ),
            (None, Some(busy)) => return overloaded(busy),
            (None, None) if hold.is_zero() => GatewayError::new(
                ErrorKind::ModelNotReady,
                format!(
                    "model `{model}` does not answer, and its ModelRoute holds no requests: {waiting_for}"
                ),
            ),
            (None, None) => GatewayError::new(
                ErrorKind::ModelNotReady,
                format!("model `{model}` is not ready after {seconds} s of waiting: {waiting_for}"),
            ),
        };
        refusal.retry_after(RETRY_AFTER)
    }
}

/// The error for a request for which every engine is full.
pub(super) fn overloaded(message: String) -> GatewayError {
    GatewayError::new(ErrorKind::Overloaded, message).retry_after(Duration::from_secs(1))
}

/// The error for the rest of an interrupted response, from the error of the attempt to resume it.
pub(super) fn interrupted(lost: &str, refusal: GatewayError) -> GatewayError {
    match refusal.kind {
        ErrorKind::EngineLost
        | ErrorKind::EngineSilent
        | ErrorKind::DeadlineExceeded
        | ErrorKind::Internal
        | ErrorKind::ShuttingDown => refusal,
        // The request itself is valid, and the gateway has already waited.
        _ => GatewayError::new(
            ErrorKind::EngineLost,
            format!("{lost}; its answer cannot go on: {}", refusal.message),
        )
        .retry_after(RETRY_AFTER),
    }
}

/// The error when this engine would resume differently: `here` holds its count of prompt tokens and of
/// emitted tokens after which it would continue.
pub(super) fn resume_mismatch(
    endpoint: &Endpoint,
    here: (u32, usize),
    begun: &ResumePoint,
    told: usize,
) -> GatewayError {
    let (prompt, emitted) = here;
    GatewayError::new(
        ErrorKind::ModelNotReady,
        format!(
            "it was begun with a prompt of {} tokens and {told} of its own were told, and the engine on node {} would \
             go on after {emitted} with a prompt of {prompt}; let all engines be of one release",
            begun.prompt_tokens, endpoint.node
        ),
    )
}
