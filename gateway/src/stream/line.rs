//! A line to an engine that answers: what its events and statuses mean to a client, and how each way of going wrong
//! is called. Which engine is asked is decided elsewhere, and so is what becomes of an answer that breaks off.

use std::sync::Arc;
use std::time::Duration;

use russet_rpc::engine::GenerateEvent;
use russet_wire::event::{Event, Failure, FailureKind, FinishReason};
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tonic::Streaming;

use super::{Core, Deadline, Piece, TRY_AGAIN};
use crate::backends::Lease;
use crate::demand::Active;
use crate::refusal::{Kind, Refusal};
use crate::routes::{Endpoint, Table};

/// Why an endpoint says no more.
pub(super) enum Setback {
    /// No other endpoint would do better.
    Refused(Refusal),
    /// It is full.
    Busy(String),
    /// It cannot be reached, or was lost; `accepted` when it had begun to work.
    Lost { accepted: bool, message: String },
}

/// An engine that was given a request.
pub(super) struct Line {
    /// Who it is.
    pub(super) endpoint: Endpoint,
    /// Tokens of the answer it has given.
    pub(super) told: Vec<u32>,
    /// Whether it has begun to work.
    pub(super) accepted: bool,
    events: Streaming<GenerateEvent>,
    heard: Instant,
    silence: Duration,
    deadline: Option<Deadline>,
    table: watch::Receiver<Arc<Table>>,
    closing: CancellationToken,
    active: Active,
    _lease: Lease,
}

impl Line {
    /// The line on which these events come.
    pub(super) fn new(
        core: &Core,
        endpoint: &Endpoint,
        events: Streaming<GenerateEvent>,
        deadline: Option<Deadline>,
        active: Active,
        lease: Lease,
    ) -> Self {
        let Core { table, limits, closing, .. } = core;
        Self {
            endpoint: endpoint.clone(),
            told: Vec::new(),
            accepted: false,
            events,
            heard: Instant::now(),
            silence: limits.silence,
            deadline,
            table: table.clone(),
            closing: closing.clone(),
            active,
            _lease: lease,
        }
    }

    /// The next event. Nothing is lost when the future is dropped.
    pub(super) async fn event(&mut self) -> Result<Event, Setback> {
        let event = tokio::select! {
            biased;
            event = timeout_at(bound(self.heard, self.silence, self.deadline), self.events.message()) => event,
            () = self.closing.cancelled() => return Err(Setback::Refused(closing())),
            () = succeeded(&mut self.table, &self.endpoint) => {
                let Endpoint { node, epoch, .. } = &self.endpoint;
                return Err(self.lost(format!(
                    "the engine on node {node} says nothing, and its group was formed anew after epoch {epoch}"
                )));
            }
        };
        self.heard = Instant::now();
        let event = match event {
            Ok(Ok(Some(event))) => Event::from(event),
            Ok(Ok(None)) => return Err(self.lost(ended(&self.endpoint))),
            Ok(Err(status)) => return Err(setback(&self.endpoint, &status, self.accepted)),
            Err(_) => return Err(Setback::Refused(silent(&self.endpoint, self.silence, self.deadline))),
        };
        // An engine that refuses as its first word has not begun to work.
        self.accepted |= !matches!(event, Event::Failed(_));
        if let Event::Token { id, .. } = event {
            if self.told.is_empty() {
                self.active.first_token();
            }
            self.told.push(id);
        }
        Ok(event)
    }

    /// What an event means to a client; `None` when there is nothing to say yet.
    pub(super) fn judge(&self, event: Event) -> Option<Result<Piece, Setback>> {
        match event {
            Event::Started { .. } => None,
            Event::Token { text, .. } if text.is_empty() => None,
            Event::Token { text, .. } => Some(Ok(Piece::Text(text))),
            Event::Finished { reason: FinishReason::Cancelled, .. } => Some(Err(self.lost(format!(
                "the engine on node {} stopped the answer before it was complete, because it is going down",
                self.endpoint.node
            )))),
            Event::Finished { reason, usage } => Some(Ok(Piece::End { reason, usage })),
            Event::Failed(Failure { kind, message }) => Some(Err(match kind {
                FailureKind::InvalidRequest => Setback::Refused(Refusal::new(Kind::InvalidRequest, message)),
                FailureKind::Overloaded => Setback::Busy(message),
                FailureKind::Unavailable => self.lost(message),
                FailureKind::DeadlineExceeded => {
                    // It knows of what was left when it was asked.
                    let given =
                        self.deadline.map(|Deadline { given, .. }| format!(" (asked with {given:?})"));
                    let message = message + &given.unwrap_or_default();
                    Setback::Refused(Refusal::new(Kind::DeadlineExceeded, message))
                }
                FailureKind::Internal => Setback::Refused(Refusal::new(Kind::Internal, message)),
            })),
        }
    }

    /// Ends it after the answer's last event.
    pub(super) fn hang_up(self) {
        tokio::spawn(see_off(self.events));
    }

    fn lost(&self, message: String) -> Setback {
        Setback::Lost { accepted: self.accepted, message }
    }
}

/// Until the group of this endpoint answers under a higher epoch: whatever its connection looks like, the engine is
/// dead, or frozen and will be killed.
async fn succeeded(table: &mut watch::Receiver<Arc<Table>>, endpoint: &Endpoint) {
    let after = |one: &Endpoint| one.group == endpoint.group && one.epoch > endpoint.epoch;
    loop {
        changed(table).await;
        let now = table.borrow_and_update();
        if now.deployments.iter().flat_map(|deployment| &deployment.endpoints).any(after) {
            return;
        }
    }
}

/// The next change; never, once nobody can publish one.
pub(super) async fn changed(table: &mut watch::Receiver<Arc<Table>>) {
    if table.changed().await.is_err() {
        std::future::pending().await
    }
}

/// How long the end of a finished stream is waited for.
const FAREWELL: Duration = Duration::from_secs(1);

/// Reads the trailers of a finished answer. Dropped before them, its stream would be reset, and an engine
/// that sees many resets takes the connection, with every other answer on it, for an attack.
async fn see_off(mut events: Streaming<GenerateEvent>) {
    let _ = timeout(FAREWELL, async { while let Ok(Some(_)) = events.message().await {} }).await;
}

/// What a status of the engine means; `accepted` when it had begun to work.
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

fn ended(endpoint: &Endpoint) -> String {
    format!(
        "the engine on node {} at {} ended the answer without finishing it",
        endpoint.node, endpoint.address
    )
}

/// Until when an engine that was heard then may say nothing.
pub(super) fn bound(heard: Instant, silence: Duration, deadline: Option<Deadline>) -> Instant {
    let silent = heard + silence;
    deadline.map_or(silent, |deadline| deadline.overdue().min(silent))
}

/// The refusal of a request about which a connected engine says nothing, for so long or beyond its deadline.
pub(super) fn silent(endpoint: &Endpoint, silence: Duration, deadline: Option<Deadline>) -> Refusal {
    let node = &endpoint.node;
    match deadline {
        Some(deadline) if deadline.left().is_none() => {
            deadline.missed(&format!("the engine on node {node} had not completed the answer"))
        }
        _ => Refusal::new(
            Kind::EngineSilent,
            format!(
                "the engine on node {node} said nothing for {} s; the answer is given up",
                silence.as_secs()
            ),
        ),
    }
}

/// The refusal of what a gateway that ends cannot wait for.
pub(super) fn closing() -> Refusal {
    Refusal::new(Kind::ShuttingDown, "the gateway is shutting down; send the request again")
        .retry_after(TRY_AGAIN)
}
