//! A response that is sent when it is complete.

use std::sync::Arc;

use axum::response::Response;
use russet_wire::event::{Delta, GenerationEvent};

use super::dialect::ResponseWriter;
use crate::dispatch::{Dispatcher, PendingRequest};
use crate::error::{ErrorKind, GatewayError};

/// The complete response to the request.
pub(super) async fn respond<W: ResponseWriter>(
    dispatcher: &Arc<Dispatcher>,
    request: PendingRequest,
    writer: W,
) -> Result<Response, GatewayError> {
    let mut events = dispatcher.respond(request).await?;
    let mut response = Delta::default();
    while let Some(event) = events.next().await {
        match event? {
            GenerationEvent::Token { id: _, delta } => response.append(delta),
            GenerationEvent::Finished { reason, usage } => return Ok(writer.whole(&response, reason, usage)),
            // Dispatch keeps the first to itself and turns the second into an error.
            GenerationEvent::Started { .. } | GenerationEvent::Failed(_) => {}
        }
    }
    Err(GatewayError::new(ErrorKind::Internal, "the response ended without a finish reason"))
}
