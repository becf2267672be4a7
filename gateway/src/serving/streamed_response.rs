//! A response that is sent as it is generated, with keep-alives while there is no new text.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures::Stream;
use russet_wire::event::{FinishReason, GenerationEvent};
use tokio::sync::watch;
use tokio::time::{Instant, interval_at, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::api_state::StreamTimeouts;
use super::choices::{Choices, TotalUsage};
use super::dialect::ResponseWriter;
use super::stalled_reader::{ReadBody, ReadLimits};
use crate::dispatch::{Dispatcher, PendingRequest, PromptState};
use crate::error::GatewayError;

/// How long the first event of a prepared prompt may take: where the prompt is refused, it comes at once.
const LAST_WORD: Duration = Duration::from_millis(250);

/// The streamed response to the request, or an error that is early enough to have its own HTTP status.
pub(super) async fn respond<W: ResponseWriter>(
    dispatcher: Arc<Dispatcher>,
    mut requests: Vec<PendingRequest>,
    total: TotalUsage,
    writer: W,
    timeouts: StreamTimeouts,
    limits: ReadLimits,
) -> Result<Response, GatewayError> {
    let choices = requests.len();
    let begun = Instant::now();
    let prompts: Vec<_> = requests.iter_mut().map(PendingRequest::prompt).collect();
    let mut opening = Box::pin(Choices::open(dispatcher, requests));
    let mut opened = timeout(timeouts.headers, &mut opening).await.ok();
    if opened.is_none() {
        let prepared = timeout_at(begun + timeouts.prompt.max(timeouts.headers), prepared(prompts.clone()));
        opened = tokio::select! {
            opened = &mut opening => Some(opened),
            // What an engine found is its next word.
            _ = prepared => timeout(LAST_WORD, &mut opening).await.ok(),
        };
    }
    let opened = opened.transpose()?;
    let prompt_tokens = total.of_prompts(prompts.iter().map(|prompt| prompt.borrow().tokens));
    let opening = Opening { opening, opened, prompt_tokens };
    let never = CancellationToken::new();
    let body = events(opening, choices, total, writer, timeouts.keep_alive, never);
    Ok(response(W::STREAM_TYPE, body, limits))
}

/// The response whose body is this stream of bytes.
pub(super) fn response(
    content_type: &'static str,
    body: impl Stream<Item = Bytes> + Send + 'static,
    limits: ReadLimits,
) -> Response {
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::CACHE_CONTROL, "no-cache"),
        // Proxies that buffer a stream would defeat it.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(ReadBody::new(body, limits))).into_response()
}

/// Gives the response the length of its body, which is read from the store as it is sent: if it is deleted meanwhile, the client
/// sees that bytes are missing.
pub(super) fn set_length(response: &mut Response, bytes: u64) {
    response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(bytes));
}

/// Choices that are opened or being opened.
pub(super) struct Opening<F> {
    /// Opens them.
    pub(super) opening: F,
    /// They, where they are open: `opening` has ended then.
    pub(super) opened: Option<Choices>,
    /// Tokens of all their prompts, where they are counted.
    pub(super) prompt_tokens: Option<u32>,
}

/// The bytes of a response of so many choices until it ends or is cancelled.
pub(super) fn events<W: ResponseWriter>(
    Opening { mut opening, opened, prompt_tokens }: Opening<
        impl Future<Output = Result<Choices, GatewayError>> + Send + Unpin + 'static,
    >,
    choices: usize,
    mut total: TotalUsage,
    mut writer: W,
    keep_alive: Duration,
    cancelled: CancellationToken,
) -> impl Stream<Item = Bytes> + Send + 'static {
    let mut unfinished = choices;
    async_stream::stream! {
        let mut keep_alive = interval_at(Instant::now() + keep_alive, keep_alive);
        yield writer.start(prompt_tokens);
        let mut events = match opened {
            Some(events) => events,
            None => loop {
                let opened = tokio::select! {
                    opened = &mut opening => Some(opened),
                    _ = keep_alive.tick() => None,
                    () = cancelled.cancelled() => {
                        yield cancel(&mut writer, &total).await;
                        return;
                    }
                };
                match opened {
                    Some(Ok(events)) => break events,
                    Some(Err(error)) => {
                        yield fail(&mut writer, &error).await;
                        return;
                    }
                    None => yield writer.keep_alive(),
                }
            },
        };
        // Its future has all that opening takes, and nothing that is used again.
        drop(opening);
        loop {
            let bytes = tokio::select! {
                biased;
                () = cancelled.cancelled() => {
                    yield cancel(&mut writer, &total).await;
                    break;
                }
                event = events.next() => match event {
                    Some((choice, Ok(GenerationEvent::Prompt { tokens }))) => {
                        writer.observe_prompt(choice, tokens);
                        match writer.prompt(choice) {
                            nothing if nothing.is_empty() => continue,
                            bytes => bytes,
                        }
                    }
                    Some((choice, Ok(GenerationEvent::Token { id: _, delta }))) => writer.delta(choice, &delta),
                    Some((choice, Ok(GenerationEvent::Finished { reason, usage }))) => {
                        total.add(choice, usage);
                        unfinished = unfinished.saturating_sub(1);
                        if unfinished > 0 {
                            writer.finish(choice, reason, None)
                        } else {
                            match writer.keep(Ok((reason, total.total()))).await {
                                Ok(()) => writer.finish(choice, reason, Some(total.total())),
                                Err(error) => {
                                    yield writer.error(&error);
                                    break;
                                }
                            }
                        }
                    }
                    // Dispatch keeps the first to itself and turns the second into an error.
                    Some((_, Ok(GenerationEvent::Started { .. } | GenerationEvent::Failed(_)))) => continue,
                    // The other choices end with it.
                    Some((_, Err(error))) => {
                        yield fail(&mut writer, &error).await;
                        break;
                    }
                    None => break,
                },
                _ = keep_alive.tick() => writer.keep_alive(),
            };
            keep_alive.reset();
            yield bytes;
        }
    }
}

/// The last bytes of a response that an error ends. Its client gets them whether or not they are kept.
async fn fail<W: ResponseWriter>(writer: &mut W, error: &GatewayError) -> Bytes {
    let _ = writer.keep(Err(error)).await;
    writer.error(error)
}

/// The last bytes of a response that is cancelled.
async fn cancel<W: ResponseWriter>(writer: &mut W, total: &TotalUsage) -> Bytes {
    match writer.keep(Ok((FinishReason::Cancelled, total.total()))).await {
        Ok(()) => writer.finish(0, FinishReason::Cancelled, Some(total.total())),
        Err(error) => writer.error(&error),
    }
}

/// Waits until each of these prompts is prepared, or held.
async fn prepared(mut prompts: Vec<watch::Receiver<PromptState>>) {
    for prompt in &mut prompts {
        // Its sender is gone where its response has begun.
        let _ = prompt.wait_for(|prompt| !prompt.preparing).await;
    }
}
