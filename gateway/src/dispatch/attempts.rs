//! Failed attempts of one request, and the error its client gets when the gateway gives up.

use std::collections::HashMap;
use std::time::Duration;

use super::engine_stream::LostWork;
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
    /// Attempts of a request that lost an engine in an earlier one of its client's tries.
    pub(super) fn of_suspect() -> Self {
        Self { losses: 1, ..Self::default() }
    }

    /// Whether an engine was lost while it worked on the request: it may be the cause.
    pub(super) fn is_suspect(&self) -> bool {
        self.losses > 0
    }

    /// Records an engine that was lost while it did this `work`; an error once the request is not to be sent again.
    /// `exclusive` when it was the only suspect at that engine: a second loss then convicts it. Without that it may
    /// have been beside the cause twice, and `max_losses` counts.
    pub(super) fn record_lost(
        &mut self,
        work: LostWork,
        exclusive: bool,
        message: String,
        max_losses: u32,
    ) -> Result<(), GatewayError> {
        self.losses += u32::from(work != LostWork::None);
        if work == LostWork::Prompt && exclusive && self.losses >= 2 {
            return Err(ends_engines(&message));
        }
        if self.losses >= max_losses {
            let losses = self.losses;
            return Err(GatewayError::new(
                ErrorKind::EngineLost,
                format!(
                    "{losses} engines were lost while they worked on this request, so the gateway does not send it \
                     again; the last loss: {message}"
                ),
            ));
        }
        self.last_lost = Some(message);
        Ok(())
    }

    /// The error for a request whose hold time is over.
    pub(super) fn hold_expired(&mut self, model: &str, hold: Duration, waiting_for: &str) -> GatewayError {
        let seconds = hold.as_secs();
        let error = match (self.last_lost.take(), self.last_busy.take()) {
            (Some(lost), _) => GatewayError::new(
                ErrorKind::EngineLost,
                format!(
                    "model `{model}`: {lost}; no group was ready again within {seconds} s ({waiting_for})"
                ),
            ),
            (None, Some(busy)) => return overloaded(busy),
            (None, None) if hold.is_zero() => GatewayError::new(
                ErrorKind::ModelNotReady,
                format!(
                    "model `{model}` is not ready, and its ModelRoute does not hold requests: {waiting_for}"
                ),
            ),
            (None, None) => GatewayError::new(
                ErrorKind::ModelNotReady,
                format!("model `{model}` is not ready after {seconds} s of waiting: {waiting_for}"),
            ),
        };
        error.retry_after(RETRY_AFTER)
    }
}

/// The error for a request that ends engines.
pub(super) fn ends_engines(last: &str) -> GatewayError {
    let message = format!(
        "engines are lost while they prepare this request, so the gateway does not send it again for some minutes; \
         shorten or change its messages; the last loss: {last}"
    );
    GatewayError::new(ErrorKind::PoisonRequest, message)
}

/// The error for a request that every engine is of too old a release for, each with what it said.
pub(super) fn unsupported(model: &str, engines: &HashMap<Endpoint, String>) -> GatewayError {
    let mut nodes: Vec<&str> = engines.keys().map(|endpoint| &*endpoint.node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let said = engines.values().min().map(String::as_str).unwrap_or_default();
    let message = format!(
        "no replica of model `{model}` can answer this request: {said}; update Russet on {}, so that all engines are of the same release",
        nodes.join(", ")
    );
    GatewayError::new(ErrorKind::ModelNotReady, message).retry_after(RETRY_AFTER)
}

/// The error for a request for which every engine is full.
pub(super) fn overloaded(message: String) -> GatewayError {
    GatewayError::new(ErrorKind::Overloaded, message).retry_after(Duration::from_secs(1))
}

/// The error for the rest of an interrupted response, from the error of the attempt to resume it.
pub(super) fn interrupted(lost: &str, error: GatewayError) -> GatewayError {
    match error.kind {
        ErrorKind::EngineLost
        | ErrorKind::PoisonRequest
        | ErrorKind::EngineSilent
        | ErrorKind::DeadlineExceeded
        | ErrorKind::Internal
        | ErrorKind::ShuttingDown => error,
        // The request itself is valid, and the gateway has already waited.
        _ => GatewayError::new(
            ErrorKind::EngineLost,
            format!("{lost}; no other engine can resume the response: {}", error.message),
        )
        .retry_after(RETRY_AFTER),
    }
}

/// The error when this engine would resume differently: `here` holds its count of prompt tokens and of
/// emitted tokens.
pub(super) fn resume_mismatch(
    endpoint: &Endpoint,
    here: (u32, usize),
    resume_point: &ResumePoint,
    emitted: usize,
) -> GatewayError {
    let (prompt_here, emitted_here) = here;
    GatewayError::new(
        ErrorKind::ModelNotReady,
        format!(
            "the response has a prompt of {} tokens and {emitted} emitted tokens, but the engine on node {} counts \
             {prompt_here} and {emitted_here}; run the same release on all engines",
            resume_point.prompt_tokens, endpoint.node
        ),
    )
}
