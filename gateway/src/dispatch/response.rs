//! A response stream that survives the loss of its engine by resuming on another. Not here: how another
//! engine is found.

use std::pin::Pin;
use std::sync::Arc;

use futures::{Stream, StreamExt as _};

use super::attempt_loop::PendingRequest;
use super::engine_stream::{AttemptError, EngineStream};
use super::{Dispatcher, ResponseChunk};
use crate::error::{ErrorKind, GatewayError};
use crate::metrics::RequestTracker;

/// A running response. Dropping it cancels the request in the engine.
pub struct ResponseStream(Pin<Box<dyn Stream<Item = Result<ResponseChunk, GatewayError>> + Send>>);

impl ResponseStream {
    /// The next chunk; `None` after the end or an error. Cancel-safe: dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Result<ResponseChunk, GatewayError>> {
        self.0.next().await
    }

    /// The response to the request; its first chunk came from this engine stream.
    pub(super) fn new(
        core: Arc<Dispatcher>,
        mut asked: PendingRequest,
        first: ResponseChunk,
        mut line: EngineStream,
        mut tracker: RequestTracker,
    ) -> Self {
        Self(Box::pin(async_stream::stream! {
            let mut piece = Ok(first);
            loop {
                let refusal = match piece {
                    Ok(ResponseChunk::End { reason, usage }) => {
                        tracker.finished(usage);
                        line.finish();
                        yield Ok(ResponseChunk::End { reason, usage });
                        return;
                    }
                    Ok(text) => {
                        yield Ok(text);
                        piece = next_chunk(&mut line).await;
                        continue;
                    }
                    Err(AttemptError::Rejected(refusal)) => refusal,
                    Err(AttemptError::Busy(message)) => GatewayError::new(ErrorKind::Overloaded, message),
                    Err(AttemptError::Lost { message, .. }) => {
                        match core.resume(&mut asked, line, message, &mut tracker).await {
                            Ok((more, other)) => {
                                (piece, line) = (Ok(more), other);
                                continue;
                            }
                            Err(refusal) => refusal,
                        }
                    }
                };
                tracker.refused(&refusal);
                yield Err(refusal);
                return;
            }
        }))
    }
}

/// The next chunk of this engine stream.
async fn next_chunk(line: &mut EngineStream) -> Result<ResponseChunk, AttemptError> {
    loop {
        let event = line.event().await?;
        if let Some(piece) = line.interpret(event) {
            return piece;
        }
    }
}
