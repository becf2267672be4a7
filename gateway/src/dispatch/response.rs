//! An answer being given, as one whoever gives it: what breaks off with its engine goes on with another. How another
//! is found is not its business.

use std::pin::Pin;
use std::sync::Arc;

use futures::{Stream, StreamExt as _};

use super::engine_stream::{EngineStream, AttemptError};
use super::attempt_loop::PendingRequest;
use super::{Dispatcher, ResponseChunk};
use crate::metrics::RequestTracker;
use crate::error::{ErrorKind, GatewayError};

/// An answer being given. Dropping it tells the engine to stop.
pub struct ResponseStream(Pin<Box<dyn Stream<Item = Result<ResponseChunk, GatewayError>> + Send>>);

impl ResponseStream {
    /// The next part; `None` after the end or a refusal. Nothing is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<Result<ResponseChunk, GatewayError>> {
        self.0.next().await
    }

    /// The answer to what was asked, whose first part came on this line.
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

/// The next part that comes on this line.
async fn next_chunk(line: &mut EngineStream) -> Result<ResponseChunk, AttemptError> {
    loop {
        let event = line.event().await?;
        if let Some(piece) = line.interpret(event) {
            return piece;
        }
    }
}
