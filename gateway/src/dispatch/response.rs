//! A response stream that survives the loss of its engine by resuming on another. Not here: how another
//! engine is found.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::{Stream, StreamExt as _};
use russet_wire::event::GenerationEvent;

use super::answer_stream::AnswerStream;
use super::attempt_loop::OpenedStream;
use super::dispatcher::Dispatcher;
use super::engine_stream::AttemptError;
use super::pending_request::PendingRequest;
use super::response_cache::{CachedResponse, ResponseRecording};
use crate::error::{ErrorKind, GatewayError};
use crate::metrics::RequestTracker;

/// A running response: any number of `Token` with text, then one `Finished`, whose reason is never `Cancelled`, or an error.
/// Dropping it cancels the request in the engine.
pub(crate) struct ResponseStream(Pin<Box<dyn Stream<Item = Result<GenerationEvent, GatewayError>> + Send>>);

impl Stream for ResponseStream {
    type Item = Result<GenerationEvent, GatewayError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.as_mut().poll_next(context)
    }
}

impl ResponseStream {
    /// An answer that was kept.
    pub(super) fn cached(
        response: &CachedResponse,
        request: &PendingRequest,
        tracker: &mut RequestTracker,
    ) -> Self {
        tracker.dispatched();
        tracker.token();
        let recorder = request.recorder();
        recorder.cached(response.age());
        recorder.first_token();
        if let Some((reason, usage)) = response.end() {
            tracker.finished(usage);
            recorder.finished(Some(reason), usage);
        }
        Self(Box::pin(futures::stream::iter(response.events().map(Ok))))
    }

    /// The same response, which is recorded.
    pub(super) fn recorded(self, recording: Option<Box<ResponseRecording>>) -> Self {
        let Some(recording) = recording else { return self };
        let mut recording = Some(*recording);
        let Self(stream) = self;
        Self(Box::pin(stream.inspect(move |event| {
            recording = match (recording.take(), event) {
                (Some(recording), Ok(event)) => recording.push(event),
                (_, Ok(_) | Err(_)) => None,
            };
        })))
    }

    /// The response to the request, from the first event of an engine on.
    pub(super) fn new(
        dispatcher: Arc<Dispatcher>,
        mut request: Box<PendingRequest>,
        (first, mut stream): OpenedStream,
        mut tracker: RequestTracker,
    ) -> Self {
        Self(Box::pin(async_stream::stream! {
            let mut event = Ok(first);
            loop {
                let error = match event {
                    Ok(GenerationEvent::Finished { reason, usage }) => {
                        let counted = stream.counted(usage);
                        tracker.finished(counted);
                        request.recorder.reported_cost(stream.reported_cost());
                        request.recorder().finished(Some(reason), counted);
                        request.settle(counted);
                        stream.finish();
                        yield Ok(GenerationEvent::Finished { reason, usage });
                        return;
                    }
                    Ok(token) => {
                        request.record_emitted(stream.emitted());
                        yield Ok(token);
                        event = stream.output().await;
                        continue;
                    }
                    Err(AttemptError::Rejected(error)) => {
                        request.recorder().rejected(&error);
                        error
                    }
                    Err(AttemptError::Busy(message)) => {
                        request.recorder().busy(&message);
                        GatewayError::new(ErrorKind::Overloaded, message)
                    }
                    // It had known all that it told: nothing of an answer comes before that.
                    Err(AttemptError::Unsupported(message)) => {
                        request.recorder().lost(&message);
                        GatewayError::new(ErrorKind::ModelNotReady, message)
                    }
                    Err(AttemptError::Lost { message, .. }) => match stream {
                        AnswerStream::Provider(_) | AnswerStream::Pipeline(_) => {
                            GatewayError::new(ErrorKind::ProviderFailed, message)
                        }
                        AnswerStream::Engine(lost) => {
                            // It is large and seldom there: not a part of every response.
                            let resumed = dispatcher.resume(&mut request, lost, message, &mut tracker);
                            match Box::pin(resumed).await {
                                Ok((more, other)) => {
                                    (event, stream) = (Ok(more), other);
                                    continue;
                                }
                                Err(error) => error,
                            }
                        }
                    },
                };
                tracker.failed(&error);
                request.recorder().failed(&error);
                yield Err(error);
                return;
            }
        }))
    }
}
