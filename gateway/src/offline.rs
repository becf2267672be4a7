//! Requests that run without a client, of batches and of the inbox: sent to their route as their owner, again where the
//! gateway is busy, and what is written of them written until the store has it.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::http::{Extensions, HeaderMap, Method, Request, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use jiff::Timestamp;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::error::{ErrorKind, GatewayError};
use crate::keys::{Caller, Keyring};
use crate::request_id::RequestId;
use crate::response_store::ResponseStoreError;
use crate::serving::Dialect;

/// Longest time between two tries of a request, and of a write.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// The first time between two tries.
const MIN_WAIT: Duration = Duration::from_secs(1);
/// The header that is more exact than `Retry-After`.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// What requests without a client run with.
#[derive(Clone)]
pub(crate) struct OfflineContext {
    /// The routes of clients, without the middleware.
    pub(crate) router: Router,
    pub(crate) keyring: watch::Receiver<Arc<Keyring>>,
    /// The dialect with this name.
    pub(crate) dialect: fn(&str) -> Option<&'static Dialect>,
    /// The dialect of this path.
    pub(crate) dialect_of: fn(&str) -> &'static Dialect,
    /// Nothing begins after this; what runs has time to end.
    pub(crate) stopping: CancellationToken,
}

/// Why work does not go on: the gateway ends, or what it needs is gone.
#[derive(Debug)]
pub(crate) enum Interruption {
    Stopping,
    Lost(ResponseStoreError),
}

/// A request of an owner.
pub(crate) struct OfflineRequest<'a> {
    pub(crate) owner: &'a str,
    /// What the owner made, for the error where its key is gone.
    pub(crate) what: &'static str,
    pub(crate) id: RequestId,
    pub(crate) path: &'a str,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// What the route is told beside that.
    pub(crate) extensions: Extensions,
}

impl OfflineContext {
    /// Waits until the keys are known.
    pub(crate) async fn keys(&self) -> Result<(), Interruption> {
        let mut keyring = self.keyring.clone();
        tokio::select! {
            _ = keyring.wait_for(|keyring| keyring.synced) => Ok(()),
            () = self.stopping.cancelled() => Err(Interruption::Stopping),
        }
    }

    /// The response of its route to a request.
    pub(crate) async fn respond(&self, dialect: &Dialect, request: OfflineRequest<'_>) -> Response {
        let OfflineRequest { owner, what, id, path, headers, body, extensions } = request;
        let caller = self.keyring.borrow().caller_of(owner, Timestamp::now());
        let Some(caller) = caller else {
            let message = format!(
                "the key {owner} that made this {what} is gone, disabled or expired; make the {what} again with another one"
            );
            return (dialect.error_response)(&GatewayError::new(ErrorKind::InvalidApiKey, message), &id);
        };
        let mut request = Request::new(Body::from(body));
        *request.method_mut() = Method::POST;
        // Whoever kept it has seen it as a path.
        *request.uri_mut() = path.parse().unwrap_or_default();
        *request.headers_mut() = headers;
        let json = HeaderValue::from_static("application/json");
        request.headers_mut().entry(header::CONTENT_TYPE).or_insert(json);
        *request.extensions_mut() = extensions;
        request.extensions_mut().insert::<Caller>(caller);
        request.extensions_mut().insert(id);
        let routed = TowerToHyperService::new(self.router.clone()).call(request).await;
        routed.unwrap_or_else(|never| match never {})
    }

    /// Waits before another try, the longer the more there were; not beyond the gateway's end.
    pub(crate) async fn wait_to_retry(&self, wait: Duration, tries: u32) -> Result<(), Interruption> {
        self.wait(Self::retry_wait(wait, tries)).await
    }

    /// How long that is.
    pub(crate) fn retry_wait(wait: Duration, tries: u32) -> Duration {
        (wait.min(MAX_WAIT) * tries.min(60)).clamp(MIN_WAIT, MAX_WAIT)
    }

    /// Waits, but not beyond the gateway's end.
    pub(crate) async fn wait(&self, time: Duration) -> Result<(), Interruption> {
        tokio::select! {
            () = sleep(time) => Ok(()),
            () = self.stopping.cancelled() => Err(Interruption::Stopping),
        }
    }

    /// Writes, or reads, until the store does it: a disk that is full has room again some time.
    pub(crate) async fn persist<T, F: Future<Output = Result<T, ResponseStoreError>>>(
        &self,
        id: &str,
        write: impl Fn() -> F,
    ) -> Result<T, Interruption> {
        let mut wait = MIN_WAIT;
        loop {
            match write().await {
                Ok(done) => return Ok(done),
                Err(error @ ResponseStoreError::Deleted) => return Err(Interruption::Lost(error)),
                Err(error) => tracing::warn!(id, %error, "work without a client waits for its store"),
            }
            self.wait(wait).await?;
            wait = (2 * wait).min(MAX_WAIT);
        }
    }
}

/// How long the gateway asks to wait with a request that it cannot serve now; `None` where the response is the last word.
pub(crate) fn retry_after(status: StatusCode, headers: &HeaderMap) -> Option<Duration> {
    let is_busy = matches!(status.as_u16(), 429 | 503 | 529);
    let number = |name: HeaderName| headers.get(name)?.to_str().ok()?.parse::<u64>().ok();
    let wait = || {
        let exact = number(RETRY_AFTER_MS).map(Duration::from_millis);
        exact.or_else(|| number(header::RETRY_AFTER).map(Duration::from_secs))
    };
    if is_busy { wait() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_busy_gateway_is_asked_again() {
        for (status, headers, expected) in [
            (429, &[("retry-after", "2")][..], Some(2000)),
            (503, &[("retry-after", "2"), ("retry-after-ms", "1500")], Some(1500)),
            (529, &[("retry-after-ms", "0")], Some(0)),
            (503, &[("x-should-retry", "false")], None),
            (429, &[("retry-after", "soon")], None),
            (500, &[("retry-after", "2")], None),
            (200, &[("retry-after", "2")], None),
        ] {
            let headers: HeaderMap = headers
                .iter()
                .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()))
                .collect();
            let wait = retry_after(StatusCode::from_u16(status).unwrap(), &headers);
            assert_eq!(wait, expected.map(Duration::from_millis), "{status} {headers:?}");
        }
    }
}
