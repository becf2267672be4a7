//! The events of a response that runs or ran in the background, from any number on, and then those that come. The last event
//! says how the response ended, also where the gateway that wrote the others ended before it did.

use bytes::Bytes;
use futures::Stream;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::time::timeout;

use super::current::{ResponseHead, current};
use super::unreadable;
use crate::background::NextEvents;
use crate::dialects::openai::error::error_body;
use crate::dialects::sse::{KEEP_ALIVE, named_event};
use crate::error::GatewayError;
use crate::serving::OwnResponses;

/// The names of events that end a stream, as it has them.
const LAST: [&[u8]; 3] =
    [b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n"];

/// The number behind the event that says that a response is queued: what a client knows before anything is generated.
const QUEUED: u64 = 2;

/// The events numbered `from` and later.
pub(super) fn follow(
    own: OwnResponses,
    id: String,
    mut from: u64,
) -> impl Stream<Item = Bytes> + Send + 'static {
    async_stream::stream! {
        let mut is_over = false;
        let failure = 'lives: loop {
            let running = own.running_soon(&id).await;
            let failure = loop {
                let next = match &running {
                    None => NextEvents::Stored,
                    Some(running) => match timeout(own.keep_alive(), running.events(from)).await {
                        Ok(next) => next,
                        Err(_) => {
                            yield Bytes::from_static(KEEP_ALIVE);
                            continue;
                        }
                    },
                };
                let chunk = match next {
                    NextEvents::Newest(chunk) => chunk,
                    NextEvents::Stored => match own.events(&id, from).await {
                        Ok(Some(chunk)) => chunk,
                        Ok(None) => break None,
                        Err(error) => break Some(error),
                    },
                    NextEvents::Ended => break None,
                };
                if from <= QUEUED && chunk.next > QUEUED && running.is_some() {
                    // From now on it is not generated again.
                    own.deliver(&id).await;
                }
                let text = Bytes::copy_from_slice(chunk.from(from));
                is_over = is_last(&text);
                from = chunk.next;
                yield text;
            };
            if failure.is_none() && !is_over && from <= QUEUED && running.is_some() && own.is_waiting(&id) {
                // Its model is busy: it is tried again, with the same first events.
                continue 'lives;
            }
            break failure;
        };
        if !is_over {
            let last = match failure {
                None => last_event(&own, &id, from).await,
                Some(error) => Err(error),
            };
            yield last.unwrap_or_else(|error| error_event(&error, from));
        }
    }
}

/// Whether the last of these events ends the stream.
fn is_last(events: &[u8]) -> bool {
    let events = events.strip_suffix(b"\n\n").unwrap_or(events);
    let begin = events.windows(2).rposition(|two| two == b"\n\n").map_or(0, |end| end + 2);
    LAST.iter().any(|name| events[begin..].starts_with(name))
}

/// The event that says how the response ended.
async fn last_event(own: &OwnResponses, id: &str, sequence_number: u64) -> Result<Bytes, GatewayError> {
    #[derive(Serialize)]
    struct Event<'a> {
        r#type: &'static str,
        sequence_number: u64,
        response: &'a RawValue,
    }
    let body = current(own, id).await?;
    let response = serde_json::from_slice(&body).map_err(|error| unreadable(id, &error))?;
    let name = match ResponseHead::of(id, &body)?.status.as_str() {
        "completed" => "response.completed",
        "failed" => "response.failed",
        _ => "response.incomplete",
    };
    let mut out = Vec::new();
    named_event(&mut out, name, &Event { r#type: name, sequence_number, response });
    Ok(out.into())
}

/// The event of a stream that cannot go on: its response was deleted, or cannot be read.
fn error_event(error: &GatewayError, sequence_number: u64) -> Bytes {
    let mut event = error_body(error)["error"].take();
    event["type"] = "error".into();
    event["sequence_number"] = sequence_number.into();
    let mut out = Vec::new();
    named_event(&mut out, "error", &event);
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_event_is_known_by_its_name() {
        for (text, expected) in [
            ("", false),
            ("event: response.created\ndata: {}\n\n", false),
            ("event: response.completed\ndata: {}\n\n", true),
            ("event: response.incomplete\ndata: {}\n\n", true),
            ("event: a\ndata: {}\n\nevent: response.failed\ndata: {}\n\n", true),
            ("event: response.failed\ndata: {}\n\nevent: a\ndata: {}\n\n", false),
            ("event: a\ndata: \"event: response.failed\\n\"\n\n", false),
        ] {
            assert_eq!(is_last(text.as_bytes()), expected, "{text:?}");
        }
    }
}
