//! The stream of an answer: of an engine, of a provider, or of a run of a Pipeline, which comes at once. A provider never
//! resumes an answer and none of its answers is resumed: once a byte was sent, another one would go on with another answer.

use std::pin::pin;

use russet_crds::Money;
use russet_wire::event::{GenerationEvent, Usage};
use tokio_util::sync::CancellationToken;

use super::deadline::Deadline;
use super::dispatcher::Dispatcher;
use super::engine_stream::{AttemptError, EngineStream, LostWork, shutdown_error};
use crate::error::{ErrorKind, GatewayError};
use crate::providers::{ProviderError, ProviderRequest, ProviderStream, Trials};
use crate::zones::Cleared;

/// What a request waits for whose deadline passes.
const UNFINISHED: &str = "the provider has not sent all of its answer";

/// Where the events of an answer come from. In boxes: it is moved often on its way to the client.
pub(super) enum AnswerStream {
    /// An engine of this cluster.
    Engine(Box<EngineStream>),
    /// A provider outside of it.
    Provider(Box<ProviderAnswer>),
    /// A run that has ended, whose last event this is.
    Pipeline(Box<GenerationEvent>),
}

impl AnswerStream {
    /// The next event that the client sees: a `Token` that adds something, or `Finished`. Cancel-safe.
    pub(super) async fn output(&mut self) -> Result<GenerationEvent, AttemptError> {
        match self {
            Self::Engine(stream) => stream.output().await,
            Self::Provider(answer) => answer.output().await,
            Self::Pipeline(last) => Ok((**last).clone()),
        }
    }

    /// Tokens of the response that came from it.
    pub(super) fn emitted(&self) -> usize {
        match self {
            Self::Engine(stream) => stream.emitted.len(),
            Self::Provider(answer) => answer.emitted,
            // Its steps count them.
            Self::Pipeline(_) => 0,
        }
    }

    /// What of a usage is to be counted: the steps of a run have counted theirs.
    pub(super) fn counted(&self, usage: Usage) -> Usage {
        match self {
            Self::Engine(_) | Self::Provider(_) => usage,
            Self::Pipeline(_) => Usage::default(),
        }
    }

    /// What a provider says that the answer cost.
    pub(super) fn reported_cost(&self) -> Option<Money> {
        match self {
            Self::Engine(_) | Self::Pipeline(_) => None,
            Self::Provider(answer) => answer.stream.reported_cost(),
        }
    }

    /// Closes the stream after the last event of the response.
    pub(super) fn finish(self) {
        match self {
            Self::Engine(stream) => stream.finish(),
            Self::Provider(_) | Self::Pipeline(_) => {}
        }
    }
}

/// The answer of a provider, within the deadline of the request.
pub(super) struct ProviderAnswer {
    stream: ProviderStream,
    deadline: Option<Deadline>,
    closing: CancellationToken,
    /// Events with text so far: about as many tokens.
    emitted: usize,
}

impl ProviderAnswer {
    /// Sends a request to its provider.
    pub(super) async fn open(
        dispatcher: &Dispatcher,
        (cleared, trials): (Cleared<ProviderRequest>, Trials),
        deadline: Option<Deadline>,
    ) -> Result<Self, AttemptError> {
        let closing = dispatcher.closing.clone();
        let opening = pin!(dispatcher.providers.open(cleared, trials));
        let opened = tokio::select! {
            opened = opening => opened,
            error = Deadline::expired(deadline, UNFINISHED) => return Err(AttemptError::Rejected(error)),
            () = closing.cancelled() => return Err(AttemptError::Rejected(shutdown_error())),
        };
        let stream = opened.map_err(|error| attempt_error(error, false))?;
        Ok(Self { stream, deadline, closing, emitted: 0 })
    }

    /// The next event that the client sees. Cancel-safe.
    pub(super) async fn output(&mut self) -> Result<GenerationEvent, AttemptError> {
        let event = tokio::select! {
            biased;
            // Before its events, of which the next may always be there already.
            () = self.closing.cancelled() => return Err(AttemptError::Rejected(shutdown_error())),
            event = self.stream.event() => event,
            error = Deadline::expired(self.deadline, UNFINISHED) => return Err(AttemptError::Rejected(error)),
        };
        let event = event.map_err(|error| attempt_error(error, self.emitted > 0))?;
        if let Some(deadline) = self.deadline.filter(|deadline| deadline.remaining().is_none())
            && !matches!(event, GenerationEvent::Finished { .. })
        {
            // What it sends without a pause ends as well.
            return Err(AttemptError::Rejected(deadline.exceeded(UNFINISHED)));
        }
        self.emitted += usize::from(matches!(event, GenerationEvent::Token { .. }));
        Ok(event)
    }
}

/// What an error of a provider is for the request, of whose answer the client has something already or not.
fn attempt_error(error: ProviderError, has_begun: bool) -> AttemptError {
    match error {
        ProviderError::Rejected(error) => AttemptError::Rejected(error),
        ProviderError::Busy(message, _) | ProviderError::Failed(message) if has_begun => {
            AttemptError::Rejected(GatewayError::new(ErrorKind::ProviderFailed, message))
        }
        ProviderError::Busy(message, _) => AttemptError::Busy(message),
        ProviderError::Failed(message) => AttemptError::Lost { work: LostWork::None, message },
    }
}
