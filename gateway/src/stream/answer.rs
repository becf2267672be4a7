//! An answer being given: what the engine's events and statuses mean to a client, and how each way of
//! going wrong is called. Which engine is asked was decided before.

use std::time::Duration;

use russet_rpc::engine::GenerateEvent;
use russet_wire::event::{Event, Failure, FailureKind, FinishReason};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tonic::Streaming;

use super::{Piece, TRY_AGAIN};
use crate::backends::Lease;
use crate::demand::Active;
use crate::metrics::Tracker;
use crate::refusal::{Kind, Refusal};
use crate::routes::Endpoint;

/// Why an endpoint gave no first token.
pub(super) enum Setback {
    /// No other endpoint would do better.
    Refused(Refusal),
    /// It is full.
    Busy(String),
    /// It cannot be reached, or was lost; `accepted` when it had begun to work.
    Lost { accepted: bool, message: String },
}

/// A request that an engine has begun to answer.
pub(super) struct Opened {
    pub(super) first: Piece,
    pub(super) events: Streaming<GenerateEvent>,
    pub(super) lease: Lease,
    pub(super) active: Active,
    pub(super) endpoint: Endpoint,
}

/// An answer being given. Dropping it tells the engine to stop.
pub struct Answer {
    first: Option<Piece>,
    over: bool,
    heard: Instant,
    silence: Duration,
    closing: CancellationToken,
    /// Gone once the answer is over.
    events: Option<Streaming<GenerateEvent>>,
    endpoint: Endpoint,
    tracker: Tracker,
    _lease: Lease,
    _active: Active,
}

impl Answer {
    pub(super) fn new(
        opened: Opened,
        tracker: Tracker,
        silence: Duration,
        closing: CancellationToken,
    ) -> Self {
        let Opened { first, events, lease, active, endpoint } = opened;
        let (first, heard) = (Some(first), Instant::now());
        let events = Some(events);
        let (_lease, _active) = (lease, active);
        Self { first, over: false, heard, silence, closing, events, endpoint, tracker, _lease, _active }
    }

    /// The next part; `None` after the end or a refusal. Nothing is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<Result<Piece, Refusal>> {
        if self.over {
            return None;
        }
        let piece = match self.first.take() {
            Some(piece) => Ok(piece),
            None => self.later().await,
        };
        match &piece {
            Ok(Piece::Text(_)) => {}
            Ok(Piece::End { usage, .. }) => {
                self.over = true;
                self.tracker.finished(*usage);
                if let Some(events) = self.events.take() {
                    tokio::spawn(see_off(events));
                }
            }
            Err(refusal) => {
                self.over = true;
                self.tracker.refused(refusal);
            }
        }
        Some(piece)
    }

    async fn later(&mut self) -> Result<Piece, Refusal> {
        let Some(events) = &mut self.events else { return Err(lost(ended(&self.endpoint))) };
        loop {
            let event = tokio::select! {
                event = timeout_at(self.heard + self.silence, events.message()) => event,
                () = self.closing.cancelled() => return Err(closing()),
            };
            self.heard = Instant::now();
            let event = match event {
                Ok(Ok(Some(event))) => Event::from(event),
                Ok(Ok(None)) => return Err(lost(ended(&self.endpoint))),
                Ok(Err(status)) => {
                    return Err(match setback(&self.endpoint, &status, true) {
                        Setback::Refused(refusal) => refusal,
                        Setback::Busy(message) => Refusal::new(Kind::Overloaded, message),
                        Setback::Lost { message, .. } => lost(message),
                    });
                }
                Err(_) => return Err(silent(&self.endpoint, self.silence)),
            };
            if let Some(piece) = judge(&self.endpoint, event) {
                return piece;
            }
        }
    }
}

/// How long the end of a finished stream is waited for.
const FAREWELL: Duration = Duration::from_secs(1);

/// Reads the trailers of a finished answer. Dropped before them, its stream would be reset, and an engine
/// that sees many resets takes the connection, with every other answer on it, for an attack.
async fn see_off(mut events: Streaming<GenerateEvent>) {
    let _ = timeout(FAREWELL, async { while let Ok(Some(_)) = events.message().await {} }).await;
}

/// What an event means to a client; `None` when there is nothing to say yet.
pub(super) fn judge(endpoint: &Endpoint, event: Event) -> Option<Result<Piece, Refusal>> {
    match event {
        Event::Started { .. } => None,
        Event::Token { text, .. } if text.is_empty() => None,
        Event::Token { text, .. } => Some(Ok(Piece::Text(text))),
        Event::Finished { reason: FinishReason::Cancelled, .. } => Some(Err(lost(format!(
            "the engine on node {} stopped the answer before it was complete, because it is going down",
            endpoint.node
        )))),
        Event::Finished { reason, usage } => Some(Ok(Piece::End { reason, usage })),
        Event::Failed(Failure { kind, message }) => Some(Err(match kind {
            FailureKind::InvalidRequest => Refusal::new(Kind::InvalidRequest, message),
            FailureKind::Overloaded => {
                Refusal::new(Kind::Overloaded, message).retry_after(Duration::from_secs(1))
            }
            FailureKind::Unavailable => lost(message),
            FailureKind::DeadlineExceeded => Refusal::new(Kind::DeadlineExceeded, message),
            FailureKind::Internal => Refusal::new(Kind::Internal, message),
        })),
    }
}

pub(super) fn setback(endpoint: &Endpoint, status: &tonic::Status, accepted: bool) -> Setback {
    use tonic::Code;
    // A status that did not travel over the wire has a cause on this side: the connection broke.
    let broken = std::error::Error::source(status).is_some();
    match status.code() {
        Code::InvalidArgument | Code::OutOfRange => {
            Setback::Refused(Refusal::new(Kind::InvalidRequest, status.message()))
        }
        Code::ResourceExhausted => Setback::Busy(status.message().to_owned()),
        Code::Unavailable
        | Code::Unknown
        | Code::Cancelled
        | Code::Aborted
        | Code::DeadlineExceeded
        | Code::FailedPrecondition
        | Code::DataLoss => Setback::Lost { accepted, message: gone(endpoint, status) },
        _ if broken => Setback::Lost { accepted, message: gone(endpoint, status) },
        code => {
            tracing::error!(node = endpoint.node, address = endpoint.address, ?code, "{}", status.message());
            Setback::Refused(Refusal::new(
                Kind::Internal,
                format!(
                    "the engine on node {} refused the gateway ({code:?}): {}",
                    endpoint.node,
                    status.message()
                ),
            ))
        }
    }
}

fn gone(endpoint: &Endpoint, status: &tonic::Status) -> String {
    let cause = match status.message() {
        "" => format!("{:?}", status.code()),
        message => message.to_owned(),
    };
    format!("the engine on node {} at {} was lost: {cause}", endpoint.node, endpoint.address)
}

pub(super) fn ended(endpoint: &Endpoint) -> String {
    format!(
        "the engine on node {} at {} ended the answer without finishing it",
        endpoint.node, endpoint.address
    )
}

pub(super) fn lost(message: String) -> Refusal {
    Refusal::new(Kind::EngineLost, message).retry_after(TRY_AGAIN)
}

pub(super) fn silent(endpoint: &Endpoint, silence: Duration) -> Refusal {
    Refusal::new(
        Kind::EngineSilent,
        format!(
            "the engine on node {} said nothing for {} s; the answer is given up",
            endpoint.node,
            silence.as_secs()
        ),
    )
}

pub(super) fn closing() -> Refusal {
    Refusal::new(Kind::ShuttingDown, "the gateway is shutting down; send the request again")
        .retry_after(TRY_AGAIN)
}
