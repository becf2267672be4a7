//! A response that is sent when it is complete.

use std::sync::Arc;

use axum::response::Response;

use super::dialect::ResponseWriter;
use crate::dispatch::{Dispatcher, PendingRequest, ResponseChunk};
use crate::error::{ErrorKind, GatewayError};

/// The complete response to the request.
pub(super) async fn respond<W: ResponseWriter>(
    dispatcher: &Arc<Dispatcher>,
    request: PendingRequest,
    writer: W,
) -> Result<Response, GatewayError> {
    let mut chunks = dispatcher.respond(request).await?;
    let mut text = String::new();
    while let Some(chunk) = chunks.next().await {
        match chunk? {
            ResponseChunk::Text(more) => text.push_str(&more),
            ResponseChunk::End { reason, usage } => return Ok(writer.whole(&text, reason, usage)),
        }
    }
    Err(GatewayError::new(ErrorKind::Internal, "the answer ended without a finish reason"))
}
