//! A response that is sent as it is generated, with keep-alives while there is no new text.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderName, header};
use axum::response::{IntoResponse as _, Response};
use russet_wire::event::GenerationEvent;
use tokio::time::{Instant, interval_at, timeout};

use super::api_state::StreamTimeouts;
use super::choices::{Choices, TotalUsage};
use super::dialect::ResponseWriter;
use super::stalled_reader::{ReadBody, ReadLimits};
use crate::dispatch::{Dispatcher, PendingRequest};
use crate::error::GatewayError;

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
    let mut opening = Box::pin(Choices::open(dispatcher, requests));
    let opened = match timeout(timeouts.headers, &mut opening).await {
        Ok(opened) => Some(opened?),
        Err(_) => None,
    };
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
