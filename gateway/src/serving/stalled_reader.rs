//! Ends a streamed response whose client does not read it. A server asks a body for more only while the client takes
//! it, so the body of a client that stops reading sees no deadline, and keeps its engine's slot and its place here.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use parking_lot::Mutex;
use thiserror::Error;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

/// How long a client may leave bytes unread once the deadline has passed: the last of them may be the error that says
/// so.
const OVERDUE_PATIENCE: Duration = Duration::from_millis(500);

/// The client did not read.
#[derive(Debug, Error)]
#[error("the client has not read its response in time")]
pub(super) struct StalledError;

/// When a client that does not read is given up.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadLimits {
    /// The longest time without reading.
    pub(super) timeout: Duration,
    /// The deadline of the response: after it, a client that is not reading now is given up.
    pub(super) deadline: Option<Instant>,
}

/// A response body that ends when its client does not read it.
pub(super) struct ReadBody<S> {
    state: Arc<Mutex<BodyState<S>>>,
    watchdog: AbortHandle,
}

struct BodyState<S> {
    /// `None` once it has ended or was given up.
    stream: Option<Pin<Box<S>>>,
    /// Since when the client has had the last bytes without asking for more; `None` while it waits for us.
    unread_since: Option<Instant>,
    given_up: bool,
}

impl<S: Stream<Item = Bytes> + Send + 'static> ReadBody<S> {
    /// The body of `stream` within these limits.
    pub(super) fn new(stream: S, limits: ReadLimits) -> Self {
        let stream = Some(Box::pin(stream));
        let state = BodyState { stream, unread_since: Some(Instant::now()), given_up: false };
        let state = Arc::new(Mutex::new(state));
        let watchdog = tokio::spawn(watch(state.clone(), limits)).abort_handle();
        Self { state, watchdog }
    }
}

/// Gives the response up once its client has stalled. Ends with the response.
async fn watch<S>(state: Arc<Mutex<BodyState<S>>>, ReadLimits { timeout, deadline }: ReadLimits) {
    // A response that is late ends by itself while its client reads.
    let give_up_at = |unread_since: Instant| {
        let overdue = deadline.map(|deadline| deadline.max(unread_since) + OVERDUE_PATIENCE);
        overdue.into_iter().fold(unread_since + timeout, Instant::min)
    };
    let mut wake = give_up_at(Instant::now());
    loop {
        sleep_until(wake).await;
        let stream = {
            let (mut state, now) = (state.lock(), Instant::now());
            if state.stream.is_none() {
                return;
            }
            wake = give_up_at(state.unread_since.unwrap_or(now));
            if wake <= now {
                state.given_up = true;
                state.stream.take()
            } else {
                None
            }
        };
        if stream.is_some() {
            tracing::debug!("gave up a response: its client does not read it");
            // This cancels the request in the engine, and is done outside the lock.
            drop(stream);
            return;
        }
    }
}

impl<S: Stream<Item = Bytes>> Stream for ReadBody<S> {
    type Item = Result<Bytes, StalledError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut state = self.state.lock();
        let Some(stream) = &mut state.stream else {
            // An error, so that the response does not look complete.
            let given_up = std::mem::take(&mut state.given_up);
            return Poll::Ready(given_up.then_some(Err(StalledError)));
        };
        let polled = stream.as_mut().poll_next(cx);
        state.unread_since = polled.is_ready().then(Instant::now);
        if let Poll::Ready(None) = polled {
            state.stream = None;
        }
        polled.map(|bytes| bytes.map(Ok))
    }
}

impl<S> Drop for ReadBody<S> {
    fn drop(&mut self) {
        self.watchdog.abort();
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;
    use tokio::sync::oneshot;

    use super::*;

    /// A stream of two chunks that then waits; the receiver says when it is dropped.
    fn endless() -> (impl Stream<Item = Bytes> + Send + 'static, oneshot::Receiver<()>) {
        let (alive, dropped) = oneshot::channel::<()>();
        let stream = async_stream::stream! {
            let _alive = alive;
            yield Bytes::from_static(b"a");
            yield Bytes::from_static(b"b");
            std::future::pending::<()>().await;
        };
        (stream, dropped)
    }

    const LONG: Duration = Duration::from_secs(600);

    #[tokio::test]
    async fn a_client_that_does_not_read_ends_its_response() {
        let short = Duration::from_millis(10);
        let past = Some(Instant::now());
        for limits in [
            ReadLimits { timeout: short, deadline: None },
            ReadLimits { timeout: LONG, deadline: past.map(|now| now + short) },
        ] {
            let (stream, dropped) = endless();
            let mut body = ReadBody::new(stream, limits);
            assert_eq!(body.next().await.unwrap().unwrap(), "a");
            assert!(dropped.await.is_err(), "the stream is dropped though nothing asks for it");
            assert!(body.next().await.unwrap().is_err());
            assert!(body.next().await.is_none());
        }
    }

    #[tokio::test]
    async fn a_client_that_waits_for_text_is_not_given_up() {
        let short = Duration::from_millis(5);
        let (stream, mut dropped) = endless();
        let mut body = ReadBody::new(stream, ReadLimits { timeout: short, deadline: None });
        for expected in ["a", "b"] {
            assert_eq!(body.next().await.unwrap().unwrap(), expected);
        }
        let waited = tokio::time::timeout(4 * short, body.next()).await;
        assert!(
            waited.is_err()
                && dropped.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Empty)
        );
        drop(body);
        assert!(dropped.await.is_err());
    }
}
