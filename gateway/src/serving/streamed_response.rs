//! A response that is sent as it is generated, with keep-alives while there is no new text.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, header};
use axum::response::{IntoResponse as _, Response};
use russet_wire::event::GenerationEvent;
use tokio::sync::watch;
use tokio::time::{Instant, interval_at, timeout, timeout_at};

use super::api_state::StreamTimeouts;
use super::choices::{Choices, TotalUsage};
use super::dialect::ResponseWriter;
use super::stalled_reader::{ReadBody, ReadLimits};
use crate::dispatch::{Dispatcher, PendingRequest};
use crate::error::GatewayError;

/// How long the first event of a prepared prompt may take: where the prompt is refused, it comes at once.
const LAST_WORD: Duration = Duration::from_millis(250);

/// The streamed response to the request, or an error that is early enough to have its own HTTP status.
pub(super) async fn respond<W: ResponseWriter>(
    dispatcher: Arc<Dispatcher>,
    requests: Vec<PendingRequest>,
    mut total: TotalUsage,
    mut writer: W,
    timeouts: StreamTimeouts,
    limits: ReadLimits,
) -> Result<Response, GatewayError> {
    let mut unfinished = requests.len();
    let begun = Instant::now();
    let prepared = prepared(requests.iter().map(PendingRequest::preparing).collect());
    let mut opening = Box::pin(Choices::open(dispatcher, requests));
    let mut opened = timeout(timeouts.headers, &mut opening).await.ok();
    if opened.is_none() {
        let prepared = timeout_at(begun + timeouts.prompt.max(timeouts.headers), prepared);
        opened = tokio::select! {
            opened = &mut opening => Some(opened),
            // What an engine found is its next word.
            _ = prepared => timeout(LAST_WORD, &mut opening).await.ok(),
        };
    }
    let opened = opened.transpose()?;
    let body = async_stream::stream! {
        let mut keep_alive = interval_at(Instant::now() + timeouts.keep_alive, timeouts.keep_alive);
        yield writer.start();
        let mut events = match opened {
            Some(events) => events,
            None => loop {
                let opened = tokio::select! {
                    opened = &mut opening => Some(opened),
                    _ = keep_alive.tick() => None,
                };
                match opened {
                    Some(Ok(events)) => break events,
                    Some(Err(error)) => {
                        yield writer.error(&error);
                        return;
                    }
                    None => yield writer.keep_alive(),
                }
            },
        };
        loop {
            let bytes = tokio::select! {
                biased;
                event = events.next() => match event {
                    Some((choice, Ok(GenerationEvent::Token { id: _, delta }))) => writer.delta(choice, &delta),
                    Some((choice, Ok(GenerationEvent::Finished { reason, usage }))) => {
                        total.add(choice, usage);
                        unfinished = unfinished.saturating_sub(1);
                        let end = (unfinished == 0).then(|| total.total());
                        writer.finish(choice, reason, end)
                    }
                    // Dispatch keeps the first to itself and turns the second into an error.
                    Some((_, Ok(GenerationEvent::Started { .. } | GenerationEvent::Failed(_)))) => continue,
                    // The other choices end with it.
                    Some((_, Err(error))) => {
                        yield writer.error(&error);
                        break;
                    }
                    None => break,
                },
                _ = keep_alive.tick() => writer.keep_alive(),
            };
            keep_alive.reset();
            yield bytes;
        }
    };
    let headers = [
        (header::CONTENT_TYPE, W::STREAM_TYPE),
        (header::CACHE_CONTROL, "no-cache"),
        // Proxies that buffer a stream would defeat it.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, Body::from_stream(ReadBody::new(body, limits))).into_response())
}

/// Waits until each of these prompts is prepared, or held.
async fn prepared(mut prompts: Vec<watch::Receiver<bool>>) {
    for preparing in &mut prompts {
        // Its sender is gone where its response has begun.
        let _ = preparing.wait_for(|preparing| !preparing).await;
    }
}
