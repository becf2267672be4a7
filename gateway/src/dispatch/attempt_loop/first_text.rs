//! The way of a request from an engine that gets it to its first text; hedged, from one of two engines: the second gets the
//! request too when the first has said nothing in time, whichever speaks first answers, and the other one's stream is dropped,
//! which frees its slot.

use russet_wire::event::GenerationEvent;
use russet_wire::request::GenerationRequest;

use super::within;
use crate::demand::ActiveRequest;
use crate::dispatch::attempts::resume_mismatch;
use crate::dispatch::deadline::Deadline;
use crate::dispatch::dispatcher::Dispatcher;
use crate::dispatch::engine_meter::EngineMeter;
use crate::dispatch::engine_stream::{AttemptError, EngineStream, LostWork};
use crate::dispatch::route_decision::ResumePoint;
use crate::dispatch::suspects::Isolation;
use crate::error::ErrorKind;
use crate::routes::Endpoint;

/// What engines say to `max_tokens: 0` whose release tells no prompts.
const NO_ANSWER_REFUSED: &str = "max_tokens is 0";

/// A request on its way to an engine.
pub(super) struct StreamAttempt<'a> {
    pub(super) dispatcher: &'a Dispatcher,
    pub(super) request: &'a GenerationRequest,
    /// The client's field that has the prompt.
    pub(super) prompt_field: &'static str,
    pub(super) deadline: Option<Deadline>,
    /// Where a response goes on that has begun.
    pub(super) resume_point: Option<&'a ResumePoint>,
}

/// What an engine has come to with the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EngineProgress {
    /// It prepares the prompt.
    Preparing,
    /// It does not prepare the prompt any more: it has, or it failed.
    PreparingEnded,
    /// It has prepared the prompt.
    Prepared,
    /// It has begun to work.
    Accepted,
    /// It left the engine's queue with a prompt of so many tokens.
    Started(u32),
}

/// The first event that the client sees, `Token` or `Finished`, and where it is from.
pub(super) struct FirstText {
    pub(super) event: GenerationEvent,
    pub(super) stream: Box<EngineStream>,
    /// Tokens of the prompt.
    pub(super) prompt_tokens: u32,
}

impl StreamAttempt<'_> {
    /// Opens a stream to an endpoint, of which so many tokens of the prompt have to be read there, and reads it up to the first
    /// text; `note` gets how far the engine is.
    pub(super) async fn first_text(
        &self,
        at: (&Endpoint, u64),
        meter: EngineMeter,
        active: Option<ActiveRequest>,
        isolation: &mut Option<Isolation>,
        note: impl FnMut(EngineProgress),
    ) -> Result<FirstText, AttemptError> {
        let read = self.read(at, meter, active, isolation, note).await;
        read.map_err(|error| self.unsupported(error, at.0))
    }

    /// The error; that of an engine that knows no request without an answer, as scores of a prompt are asked for, is of its
    /// release.
    fn unsupported(&self, error: AttemptError, endpoint: &Endpoint) -> AttemptError {
        match error {
            AttemptError::Rejected(error)
                if error.kind == ErrorKind::InvalidRequest
                    && self.request.tells_prompt()
                    && self.request.max_tokens == Some(0)
                    && error.message.contains(NO_ANSWER_REFUSED) =>
            {
                let message = format!(
                    "the engine on node {} refuses a prompt that is to be told without an answer: {}",
                    endpoint.node, error.message
                );
                AttemptError::Unsupported(message)
            }
            other => other,
        }
    }

    async fn read(
        &self,
        (endpoint, unread_tokens): (&Endpoint, u64),
        meter: EngineMeter,
        active: Option<ActiveRequest>,
        isolation: &mut Option<Isolation>,
        mut note: impl FnMut(EngineProgress),
    ) -> Result<FirstText, AttemptError> {
        let Self { dispatcher, request, prompt_field, deadline, resume_point } = *self;
        let opening =
            EngineStream::open(dispatcher, endpoint, request, prompt_field, deadline, unread_tokens, active);
        note(EngineProgress::Preparing);
        let opened = within(isolation, Box::pin(opening)).await;
        note(EngineProgress::PreparingEnded);
        let mut stream = opened?.metered(meter);
        note(EngineProgress::Prepared);
        if let Some(isolation) = isolation {
            isolation.queued();
        }
        let mut prompt_tokens = 0;
        loop {
            let event = within(isolation, std::pin::pin!(stream.event())).await;
            if stream.accepted {
                note(EngineProgress::Accepted);
            }
            match event? {
                GenerationEvent::Started { prompt_tokens: tokens, emitted_tokens } => {
                    if let Some(isolation) = isolation {
                        isolation.running();
                    }
                    prompt_tokens = tokens;
                    note(EngineProgress::Started(tokens));
                    let here = (tokens, emitted_tokens as usize);
                    let emitted = request.emitted.len();
                    if let Some(resume_point) = resume_point
                        && here != (resume_point.prompt_tokens, emitted)
                    {
                        let error = resume_mismatch(endpoint, here, resume_point, emitted);
                        return Err(AttemptError::Rejected(error));
                    }
                }
                GenerationEvent::Token { delta, .. } if delta.is_empty() => {}
                event => return Ok(FirstText { event, stream, prompt_tokens }),
            }
        }
    }
}

/// Which of two engines answered, and what came of the other one.
#[derive(Default)]
pub(super) struct HedgeOutcome {
    /// The second one answered.
    pub(super) is_second: bool,
    /// Why the other one could not; none where it was later, or never got the request.
    pub(super) loser: Option<AttemptError>,
}

/// Why none of them answered; of one or of both.
pub(super) struct HedgeFailure {
    pub(super) first: Option<AttemptError>,
    pub(super) second: Option<AttemptError>,
}

impl AttemptError {
    /// Whether no other engine would do better, whatever it has done so far: another one would refuse the request too, or be
    /// lost with it.
    fn is_of_every_engine(&self) -> bool {
        match self {
            Self::Rejected(error) => matches!(
                error.kind,
                ErrorKind::InvalidRequest | ErrorKind::ContextLengthExceeded | ErrorKind::ShuttingDown
            ),
            Self::Lost { work, .. } => *work != LostWork::None,
            Self::Busy(_) | Self::Unsupported(_) => false,
        }
    }
}

/// The text of the engine that answers first: `first`, or `second`, which is begun when `first` has said nothing until `late`. An
/// error for which the other one would do no better counts at once.
pub(super) async fn hedged<T>(
    first: impl Future<Output = Result<T, AttemptError>>,
    late: impl Future<Output = ()>,
    second: impl Future<Output = Result<T, AttemptError>>,
) -> Result<(T, HedgeOutcome), HedgeFailure> {
    let mut first = std::pin::pin!(first);
    let failed = |first, second| HedgeFailure { first, second };
    let by = |is_second, loser| move |text| (text, HedgeOutcome { is_second, loser });
    tokio::select! {
        biased;
        done = &mut first => return done.map(by(false, None)).map_err(|error| failed(Some(error), None)),
        () = late => {}
    }
    let mut second = std::pin::pin!(second);
    tokio::select! {
        biased;
        done = &mut first => match done {
            Ok(text) => Ok(by(false, None)(text)),
            Err(error) if error.is_of_every_engine() => Err(failed(Some(error), None)),
            Err(error) => match second.await {
                Ok(text) => Ok(by(true, Some(error))(text)),
                Err(other) => Err(failed(Some(error), Some(other))),
            },
        },
        done = &mut second => match done {
            Ok(text) => Ok(by(true, None)(text)),
            Err(error) if error.is_of_every_engine() => Err(failed(None, Some(error))),
            Err(error) => match first.await {
                Ok(text) => Ok(by(false, Some(error))(text)),
                Err(other) => Err(failed(Some(other), Some(error))),
            },
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Outcome = Result<&'static str, AttemptError>;

    /// Says it when it was looked at so many times.
    async fn says(looks: u32, outcome: Outcome) -> Outcome {
        waits(looks).await;
        outcome
    }

    async fn waits(looks: u32) {
        for _ in 0..looks {
            tokio::task::yield_now().await;
        }
    }

    fn full() -> AttemptError {
        AttemptError::Busy("full".to_owned())
    }

    fn rejected(kind: ErrorKind) -> AttemptError {
        AttemptError::Rejected(crate::error::GatewayError::new(kind, "no"))
    }

    fn lost(work: LostWork) -> AttemptError {
        AttemptError::Lost { work, message: "lost".to_owned() }
    }

    #[tokio::test]
    async fn whichever_speaks_first_answers() {
        let late = || rejected(ErrorKind::DeadlineExceeded);
        let wrong = || rejected(ErrorKind::InvalidRequest);
        // Which one answers, and whether the other one failed; of failures who did.
        for (story, first, second, expected) in [
            ("in time", says(4, Ok("a")), says(1, Ok("b")), Ok(("a", false, false))),
            ("the second is quicker", says(60, Ok("a")), says(1, Ok("b")), Ok(("b", true, false))),
            ("the first after all", says(7, Ok("a")), says(9, Ok("b")), Ok(("a", false, false))),
            ("the second is full", says(9, Ok("a")), says(1, Err(full())), Ok(("a", false, true))),
            ("the first is full", says(6, Err(full())), says(9, Ok("b")), Ok(("b", true, true))),
            (
                "lost while it waited",
                says(6, Err(lost(LostWork::None))),
                says(9, Ok("b")),
                Ok(("b", true, true)),
            ),
            ("too late for the first", says(6, Err(late())), says(9, Ok("b")), Ok(("b", true, true))),
            ("full before the second", says(3, Err(full())), says(1, Ok("b")), Err((true, false))),
            ("both are full", says(6, Err(full())), says(9, Err(full())), Err((true, true))),
            ("no engine does better", says(6, Err(wrong())), says(9, Ok("b")), Err((true, false))),
            ("nor than the second", says(60, Ok("a")), says(1, Err(wrong())), Err((false, true))),
            // A prompt that ends engines ends no second one at once.
            ("lost with it", says(6, Err(lost(LostWork::Prompt))), says(9, Ok("b")), Err((true, false))),
            ("the second is", says(60, Ok("a")), says(1, Err(lost(LostWork::Prompt))), Err((false, true))),
        ] {
            let found = hedged(first, waits(5), second).await;
            let found = found.map(|(text, outcome)| (text, outcome.is_second, outcome.loser.is_some()));
            let found = found.map_err(|failure| (failure.first.is_some(), failure.second.is_some()));
            assert_eq!(found, expected, "{story}");
        }
    }
}
