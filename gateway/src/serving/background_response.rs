//! A response that goes on without its client: a task of its own generates it, and its client gets what the dialect says of
//! it at once.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use futures::StreamExt as _;

use super::choices::{Choices, TotalUsage};
use super::dialect::{AcceptedResponse, DetachedResponse, ResponseWriter};
use super::stalled_reader::ReadLimits;
use super::streamed_response::{self, Opening};
use crate::background::EventLog;
use crate::dispatch::{Dispatcher, PendingRequest};

/// Nobody waits for a sign of life.
const KEEP_ALIVE: Duration = Duration::from_secs(86_400);

/// Starts the response; what its client gets now. Where nobody waits for that, it comes when the response has ended.
pub(super) async fn respond<W: ResponseWriter>(
    dispatcher: Arc<Dispatcher>,
    requests: Vec<PendingRequest>,
    total: TotalUsage,
    writer: W,
    DetachedResponse { log, accepted }: DetachedResponse,
    limits: ReadLimits,
    is_replayed: bool,
) -> Response {
    let generation = tokio::spawn(generate(dispatcher, requests, total, writer, log));
    if is_replayed && let Err(error) = generation.await {
        tracing::error!(%error, "a response in the background stopped");
    }
    match accepted {
        AcceptedResponse::Whole(response) => response,
        AcceptedResponse::Streamed(events) => streamed_response::response(W::STREAM_TYPE, events, limits),
    }
}

/// Generates the response to its end; the log gets its events.
async fn generate<W: ResponseWriter>(
    dispatcher: Arc<Dispatcher>,
    requests: Vec<PendingRequest>,
    total: TotalUsage,
    writer: W,
    log: EventLog,
) {
    let choices = requests.len();
    let opening = Box::pin(Choices::open(dispatcher, requests));
    let cancelled = log.cancelled();
    let opening = Opening { opening, opened: None, prompt_tokens: None };
    let mut events = pin!(streamed_response::events(opening, choices, total, writer, KEEP_ALIVE, cancelled));
    while let Some(bytes) = events.next().await {
        if let Err(error) = log.append(&bytes).await {
            // What is kept of it says that it has not ended, and so that it failed.
            tracing::warn!(%error, "a response in the background ends: its events cannot be kept");
            return;
        }
    }
    if let Err(error) = log.end().await {
        tracing::warn!(%error, "the last events of a response in the background cannot be kept");
    }
}
