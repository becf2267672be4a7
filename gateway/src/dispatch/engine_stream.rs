//! A Generate stream to an engine: opens it, and maps its events and statuses to events for the client and
//! errors. Not here: engine selection, and what happens to an interrupted response.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use russet_rpc::engine::engine_client::EngineClient;
use russet_rpc::engine::{GenerateEvent, GenerateRequest};
use russet_rpc::tls::CONNECT_TIMEOUT;
use russet_wire::event::{
    EngineEvent, FailureKind, FinishReason, GenerationEvent, GenerationFailure, PromptToken,
};
use russet_wire::request::GenerationRequest;
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tonic::transport::Channel;

use super::deadline::Deadline;
use super::dispatcher::Dispatcher;
use super::engine_meter::EngineMeter;
use crate::backends::InFlightGuard;
use crate::demand::ActiveRequest;
use crate::error::{ErrorKind, GatewayError, RETRY_AFTER};
use crate::routes::{Endpoint, RoutingTable};

/// How often the routing table and a shutdown are watched while an engine's word is awaited: most words come sooner, and who
/// watches waits in a list of all requests, behind one lock.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);
/// Of how many events that nobody waited for one looks whether the gateway ends.
const EVENTS_AT_ONCE: u32 = 64;

/// The tokens of a prompt that an engine tells in pieces, until it says something else.
#[derive(Debug, Default)]
struct PromptGathering {
    /// Whether the client has them.
    is_passed: bool,
    /// Tokens of the prompt, as the engine counts them.
    expected: u32,
    tokens: Vec<PromptToken>,
    /// What came behind them.
    held: Option<GenerationEvent>,
}

impl PromptGathering {
    /// Of a request; `None` where it asks for none, or resumes and has told its prompt.
    fn of(request: &GenerationRequest) -> Option<Box<Self>> {
        (request.tells_prompt() && request.emitted.is_empty()).then(Box::default)
    }

    /// What the client gets now of an event: nothing of a piece of the prompt, and all of the prompt before what follows
    /// it, which is held. An engine that did not tell all of it is of a release that does not know what it was asked for.
    fn pass(
        &mut self,
        event: GenerationEvent,
        endpoint: &Endpoint,
    ) -> Result<Option<GenerationEvent>, AttemptError> {
        match event {
            GenerationEvent::Prompt { tokens } => {
                self.tokens.extend(tokens);
                Ok(None)
            }
            GenerationEvent::Started { prompt_tokens, .. } => {
                self.expected = prompt_tokens;
                Ok(Some(event))
            }
            event if !self.is_passed => {
                let count = self.tokens.len();
                if count != self.expected as usize {
                    let message = format!(
                        "the engine on node {} told {count} of the {} tokens of the prompt, which the request asks for",
                        endpoint.node, self.expected
                    );
                    return Err(AttemptError::Unsupported(message));
                }
                self.is_passed = true;
                self.held = Some(event);
                Ok(Some(GenerationEvent::Prompt { tokens: std::mem::take(&mut self.tokens) }))
            }
            event => Ok(Some(event)),
        }
    }
}

/// Why an endpoint sends no more.
pub(super) enum AttemptError {
    /// Another endpoint would not do better.
    Rejected(GatewayError),
    /// The engine is full.
    Busy(String),
    /// The engine is of a release that does not know what the request asks for; one of another release may.
    Unsupported(String),
    /// The engine is unreachable or was lost.
    Lost { work: LostWork, message: String },
}

impl AttemptError {
    /// Whether the engine said it, and so got the request.
    pub(super) fn is_of_engine(&self) -> bool {
        match self {
            Self::Rejected(error) => {
                matches!(error.kind, ErrorKind::InvalidRequest | ErrorKind::ContextLengthExceeded)
            }
            Self::Busy(_) | Self::Unsupported(_) => true,
            Self::Lost { .. } => false,
        }
    }
}

/// What a lost engine was doing with the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LostWork {
    /// Nothing: it never got the request, or kept it in its queue.
    None,
    /// It prepared the prompt or prefilled it.
    Prompt,
    /// It had emitted tokens.
    Tokens,
}

/// A stream from an engine that was sent a request.
pub(super) struct EngineStream {
    /// The engine's endpoint.
    pub(super) endpoint: Endpoint,
    /// The client's field that has the prompt.
    prompt_field: &'static str,
    /// Token ids of the response that this engine emitted.
    pub(super) emitted: Vec<u32>,
    /// Whether the engine has started work.
    pub(super) accepted: bool,
    /// The prompt, where the request asks for its tokens.
    prompt: Option<Box<PromptGathering>>,
    events: Streaming<GenerateEvent>,
    /// Since when its next event is awaited; none while it has come already.
    awaiting_since: Option<Instant>,
    /// When it was last looked whether the engine was replaced or the gateway ends.
    watched_at: Instant,
    /// Events that nobody waited for, of those since it was looked whether the gateway ends.
    at_once: u32,
    event_timeout: Duration,
    deadline: Option<Deadline>,
    table: watch::Receiver<Arc<RoutingTable>>,
    closing: CancellationToken,
    /// The request among those that run; none in one of two streams until it is the one that answers.
    active: Option<ActiveRequest>,
    in_flight: InFlightGuard,
    /// What it computes for the request.
    meter: Option<Box<EngineMeter>>,
}

impl EngineStream {
    /// Sends the request to the endpoint, within its deadline; so many tokens of its prompt have to be read there.
    pub(super) async fn open(
        dispatcher: &Dispatcher,
        endpoint: &Endpoint,
        request: &GenerationRequest,
        prompt_field: &'static str,
        deadline: Option<Deadline>,
        unread_tokens: u64,
        active: Option<ActiveRequest>,
    ) -> Result<Box<Self>, AttemptError> {
        let (mut client, mut in_flight) = acquire(dispatcher, endpoint)?;
        in_flight.reading(unread_tokens);
        let call = client.generate(GenerateRequest::from(request.clone()));
        // The response begins once the prompt is prepared. What `answer` gets of the call is a pointer: it would have a copy.
        let events = answer(dispatcher, endpoint, deadline, std::pin::pin!(call)).await?;
        Ok(Box::new(Self {
            endpoint: endpoint.clone(),
            prompt_field,
            emitted: Vec::new(),
            accepted: false,
            prompt: PromptGathering::of(request),
            events,
            awaiting_since: None,
            watched_at: Instant::now(),
            at_once: 0,
            event_timeout: dispatcher.limits.engine_timeout,
            deadline,
            table: dispatcher.table.clone(),
            closing: dispatcher.closing.clone(),
            active,
            in_flight,
            meter: None,
        }))
    }

    /// The same, with what reads how long it computes for the request.
    pub(super) fn metered(mut self: Box<Self>, meter: EngineMeter) -> Box<Self> {
        self.meter = Some(Box::new(meter));
        self
    }

    /// The same, as what answers the request that runs so.
    pub(super) fn answering(mut self: Box<Self>, active: ActiveRequest) -> Box<Self> {
        if !self.emitted.is_empty() {
            active.first_token();
        }
        self.active = Some(active);
        self
    }

    /// The next `Started`, `Prompt`, `Token` or `Finished`; failures and cancellations are errors. Cancel-safe: dropping
    /// the future loses nothing. There is at most one `Prompt`, which has all of it and comes with what follows it: a
    /// response whose engine is lost before begins anew, and one that goes on elsewhere has told its prompt.
    pub(super) async fn event(&mut self) -> Result<GenerationEvent, AttemptError> {
        loop {
            if let Some(event) = self.prompt.as_mut().and_then(|prompt| prompt.held.take()) {
                return Ok(event);
            }
            let event = self.sent().await?;
            let passed = match &mut self.prompt {
                Some(prompt) => prompt.pass(event, &self.endpoint)?,
                None => Some(event),
            };
            if let Some(event) = passed {
                return Ok(event);
            }
        }
    }

    /// The next event of the engine; failures and cancellations are errors. Cancel-safe.
    async fn sent(&mut self) -> Result<GenerationEvent, AttemptError> {
        let event = match self.events.message().now_or_never() {
            Some(event) => {
                // A client may be slower than its engine, whose next event is always there then.
                self.at_once = (self.at_once + 1) % EVENTS_AT_ONCE;
                if self.at_once == 0 && self.closing.is_cancelled() {
                    return Err(AttemptError::Rejected(shutdown_error()));
                }
                Ok(event)
            }
            None => {
                let since = *self.awaiting_since.get_or_insert_with(Instant::now);
                let until = event_deadline(since, self.event_timeout, self.deadline);
                let watch_at = self.watched_at + WATCH_INTERVAL;
                match timeout_at(until.min(watch_at), self.events.message()).await {
                    Ok(event) => Ok(event),
                    Err(_) => {
                        // An engine that speaks all the time is watched as well.
                        self.watched_at = Instant::now();
                        tokio::select! {
                            biased;
                            event = timeout_at(until, self.events.message()) => event,
                            () = self.closing.cancelled() => {
                                return Err(AttemptError::Rejected(shutdown_error()));
                            }
                            () = superseded(&mut self.table, &self.endpoint) => {
                                let Endpoint { node, epoch, .. } = &self.endpoint;
                                return Err(self.lost(format!(
                                    "the engine on node {node} sends no events, and its group was re-formed after epoch \
                                     {epoch}"
                                )));
                            }
                        }
                    }
                }
            }
        };
        self.awaiting_since = None;
        let event = match event {
            Ok(Ok(Some(event))) => {
                let event = EngineEvent::from(event);
                if let Some(meter) = &mut self.meter {
                    meter.read(&event);
                }
                event.event
            }
            Ok(Ok(None)) => return Err(self.lost(truncated_message(&self.endpoint))),
            Ok(Err(status)) => return Err(attempt_error(&self.endpoint, &status, self.work())),
            Err(_) => {
                return Err(AttemptError::Rejected(silence_error(
                    &self.endpoint,
                    self.event_timeout,
                    self.deadline,
                )));
            }
        };
        // An engine whose first event is a failure has not started work.
        self.accepted |= !matches!(event, GenerationEvent::Failed(_));
        if let GenerationEvent::Token { id, .. } = &event {
            if self.emitted.is_empty() {
                self.active.iter().for_each(ActiveRequest::first_token);
                self.in_flight.reading(0);
            }
            self.emitted.push(*id);
        }
        if let GenerationEvent::Finished { usage, .. } = &event {
            // An answer that nobody asked for says nothing of how long answers are.
            if usage.completion_tokens > 0 {
                self.in_flight.answered(usage.completion_tokens);
            }
        }
        self.check(event)
    }

    /// The next event that the client sees: a `Prompt`, a `Token` that adds something, or `Finished`. Cancel-safe like
    /// `event`.
    pub(super) async fn output(&mut self) -> Result<GenerationEvent, AttemptError> {
        loop {
            match self.event().await? {
                GenerationEvent::Started { .. } => {}
                GenerationEvent::Token { delta, .. } if delta.is_empty() => {}
                event => return Ok(event),
            }
        }
    }

    /// The event, or the error that it reports.
    fn check(&self, event: GenerationEvent) -> Result<GenerationEvent, AttemptError> {
        match event {
            GenerationEvent::Finished { reason: FinishReason::Cancelled, .. } => Err(self.lost(format!(
                "the engine on node {} is shutting down and stopped the response before it was complete",
                self.endpoint.node
            ))),
            GenerationEvent::Failed(failure) => Err(self.failed(failure)),
            GenerationEvent::Started { .. }
            | GenerationEvent::Prompt { .. }
            | GenerationEvent::Token { .. }
            | GenerationEvent::Finished { .. } => Ok(event),
        }
    }

    fn failed(&self, failure: GenerationFailure) -> AttemptError {
        failure_error(failure, self.prompt_field, self.deadline, self.work())
    }

    /// Closes the stream after the last event of the response, with which the trailers mostly come.
    pub(super) fn finish(mut self: Box<Self>) {
        if !matches!(self.events.message().now_or_never(), Some(Ok(None) | Err(_))) {
            tokio::spawn(drain(self.events));
        }
    }

    fn lost(&self, message: String) -> AttemptError {
        AttemptError::Lost { work: self.work(), message }
    }

    fn work(&self) -> LostWork {
        match (self.accepted, self.emitted.is_empty()) {
            (false, _) => LostWork::None,
            (true, true) => LostWork::Prompt,
            (true, false) => LostWork::Tokens,
        }
    }
}

/// A client of an engine; it counts as in flight while the guard is there.
pub(super) fn acquire(
    dispatcher: &Dispatcher,
    endpoint: &Endpoint,
) -> Result<(EngineClient<Channel>, InFlightGuard), AttemptError> {
    dispatcher.backends.acquire(endpoint).map_err(|error| {
        tracing::error!("{}", russet_telemetry::errors::chain(&error));
        let message = "the gateway cannot use its client certificate; see its log";
        AttemptError::Rejected(GatewayError::new(ErrorKind::Internal, message))
    })
}

/// An engine's answer to a call, within the deadline and as long as the engine is there.
pub(super) async fn answer<T>(
    dispatcher: &Dispatcher,
    endpoint: &Endpoint,
    deadline: Option<Deadline>,
    mut call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>> + Unpin,
) -> Result<T, AttemptError> {
    let (began, patience) = (Instant::now(), dispatcher.limits.engine_timeout);
    let until = event_deadline(began, patience, deadline);
    let answered = match timeout_at(until.min(began + WATCH_INTERVAL), &mut call).await {
        Ok(answered) => Ok(answered),
        Err(_) => {
            let mut changes = dispatcher.table.clone();
            tokio::select! {
                answered = timeout_at(until, call) => answered,
                // A frozen machine accepts connections and sends nothing; its group may be ready elsewhere by now.
                () = endpoint_removed(&mut changes, endpoint) => {
                    let Endpoint { address, node, .. } = endpoint;
                    let message = format!("the engine on node {node} at {address} does not respond and is being replaced");
                    let connected = began.elapsed() > CONNECT_TIMEOUT;
                    let work = if connected { LostWork::Prompt } else { LostWork::None };
                    return Err(AttemptError::Lost { work, message });
                }
                () = dispatcher.closing.cancelled() => return Err(AttemptError::Rejected(shutdown_error())),
            }
        }
    };
    match answered {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => {
            let work = if broke_connection(&status) { LostWork::Prompt } else { LostWork::None };
            Err(attempt_error(endpoint, &status, work))
        }
        Err(_) => Err(AttemptError::Rejected(silence_error(endpoint, patience, deadline))),
    }
}

/// The error of a failure that an engine reports, which was doing this `work`; `prompt` is the field with the texts.
pub(super) fn failure_error(
    GenerationFailure { kind, message }: GenerationFailure,
    prompt: &str,
    deadline: Option<Deadline>,
    work: LostWork,
) -> AttemptError {
    match kind {
        FailureKind::InvalidRequest => {
            AttemptError::Rejected(GatewayError::new(ErrorKind::InvalidRequest, message))
        }
        FailureKind::ContextLengthExceeded => AttemptError::Rejected(GatewayError {
            param: Some(prompt.into()),
            ..GatewayError::new(ErrorKind::ContextLengthExceeded, message)
        }),
        FailureKind::Overloaded => AttemptError::Busy(message),
        FailureKind::Unavailable => AttemptError::Lost { work, message },
        FailureKind::DeadlineExceeded => {
            // The engine only knows the time that remained when it received the request.
            let total = deadline
                .map(|Deadline { duration, .. }| format!(" (the timeout of the request is {duration:?})"));
            let message = message + &total.unwrap_or_default();
            AttemptError::Rejected(GatewayError::new(ErrorKind::DeadlineExceeded, message))
        }
        FailureKind::Internal => AttemptError::Rejected(GatewayError::new(ErrorKind::Internal, message)),
    }
}

/// Waits until no deployment of the table lists this endpoint.
async fn endpoint_removed(table: &mut watch::Receiver<Arc<RoutingTable>>, endpoint: &Endpoint) {
    let listed =
        |table: &Arc<RoutingTable>| table.deployments.iter().any(|one| one.endpoints.contains(endpoint));
    if table.wait_for(|table| !listed(table)).await.is_err() {
        std::future::pending().await
    }
}

/// Waits until the group of this endpoint is ready under a higher epoch. Whatever the state of its
/// connection, this engine is then dead, or frozen and about to be killed.
async fn superseded(table: &mut watch::Receiver<Arc<RoutingTable>>, endpoint: &Endpoint) {
    let is_successor = |other: &Endpoint| other.group == endpoint.group && other.epoch > endpoint.epoch;
    loop {
        table_changed(table).await;
        let latest = table.borrow_and_update();
        if latest.deployments.iter().flat_map(|deployment| &deployment.endpoints).any(is_successor) {
            return;
        }
    }
}

/// Waits for the next change of the table; pending forever once the sender is dropped.
pub(super) async fn table_changed(table: &mut watch::Receiver<Arc<RoutingTable>>) {
    if table.changed().await.is_err() {
        std::future::pending().await
    }
}

/// How long to wait for the trailers of a finished stream.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Reads the trailers of a finished response. Without this the stream would be reset, and an engine that sees
/// many resets treats them as an attack and closes the connection with all its other responses.
async fn drain(mut events: Streaming<GenerateEvent>) {
    let _ = timeout(DRAIN_TIMEOUT, async { while let Ok(Some(_)) = events.message().await {} }).await;
}

/// Whether an open connection broke: the engine was there when it got the request.
fn broke_connection(status: &tonic::Status) -> bool {
    let mut cause = std::error::Error::source(status);
    let is_local = cause.is_some();
    while let Some(error) = cause {
        if error.is::<tonic::ConnectError>() {
            return false;
        }
        cause = error.source();
    }
    is_local
}

/// Maps a gRPC status of the engine, which was doing this `work`.
pub(super) fn attempt_error(endpoint: &Endpoint, status: &tonic::Status, work: LostWork) -> AttemptError {
    use tonic::Code;
    // A status that did not travel over the wire has a local source: the connection broke.
    let disconnected = std::error::Error::source(status).is_some();
    match status.code() {
        Code::InvalidArgument | Code::OutOfRange => {
            AttemptError::Rejected(GatewayError::new(ErrorKind::InvalidRequest, status.message()))
        }
        Code::ResourceExhausted => AttemptError::Busy(status.message().to_owned()),
        Code::Unavailable
        | Code::Unknown
        | Code::Cancelled
        | Code::Aborted
        | Code::DeadlineExceeded
        | Code::FailedPrecondition
        | Code::DataLoss => AttemptError::Lost { work, message: lost_message(endpoint, status) },
        _ if disconnected => AttemptError::Lost { work, message: lost_message(endpoint, status) },
        code => {
            tracing::error!(
                node = &*endpoint.node,
                address = &*endpoint.address,
                ?code,
                "{}",
                status.message()
            );
            AttemptError::Rejected(GatewayError::new(
                ErrorKind::Internal,
                format!(
                    "the engine on node {} rejected the gateway's call ({code:?}): {}",
                    endpoint.node,
                    status.message()
                ),
            ))
        }
    }
}

fn lost_message(endpoint: &Endpoint, status: &tonic::Status) -> String {
    let cause = match status.message() {
        "" => format!("{:?}", status.code()),
        message => message.to_owned(),
    };
    format!("the engine on node {} at {} was lost: {cause}", endpoint.node, endpoint.address)
}

fn truncated_message(endpoint: &Endpoint) -> String {
    format!(
        "the engine on node {} at {} ended the stream without a finish event",
        endpoint.node, endpoint.address
    )
}

/// When an engine whose next event is awaited since then counts as silent, or the deadline passes.
pub(super) fn event_deadline(since: Instant, event_timeout: Duration, deadline: Option<Deadline>) -> Instant {
    let silent_at = since + event_timeout;
    deadline.map_or(silent_at, |deadline| deadline.with_grace().min(silent_at))
}

/// The error for a connected engine that sends nothing for `event_timeout` or beyond the request's deadline.
pub(super) fn silence_error(
    endpoint: &Endpoint,
    event_timeout: Duration,
    deadline: Option<Deadline>,
) -> GatewayError {
    let node = &endpoint.node;
    match deadline {
        Some(deadline) if deadline.remaining().is_none() => {
            deadline.exceeded(&format!("the engine on node {node} had not completed the response"))
        }
        _ => GatewayError::new(
            ErrorKind::EngineSilent,
            format!(
                "the engine on node {node} sent no event for {} s, so the gateway cancelled the request",
                event_timeout.as_secs()
            ),
        ),
    }
}

/// The error for requests that a gateway in shutdown cannot finish.
pub(super) fn shutdown_error() -> GatewayError {
    GatewayError::new(ErrorKind::ShuttingDown, "the gateway is shutting down; send the request again")
        .retry_after(RETRY_AFTER)
}
