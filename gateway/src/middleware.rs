//! Middleware before every dialect: request ids, CORS, and authentication by key. Not here: which pages and names a
//! port that trusts this machine serves, see `origins`; quotas, see `serving`.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::error::{ErrorKind, GatewayError, RETRY_AFTER};
use crate::keys::{AuthError, Caller, Keyring, presents_key};
use crate::listen::{ClientAddress, Exposure, MAX_HEAD_BYTES};
use crate::metrics::Metrics;
use crate::origins::OriginPolicy;
use crate::rejection::{ErrorFormatter, reject, unknown_path};
use crate::request_id::RequestId;
use crate::serving::is_why;

/// State of the middleware.
pub(crate) struct AuthLayer {
    /// Which machines can reach the listener.
    pub(crate) exposure: Exposure,
    /// Pages and names that need no key on loopback.
    pub(crate) origins: Arc<OriginPolicy>,
    /// The keys.
    pub(crate) keyring: watch::Receiver<Arc<Keyring>>,
    /// How long a request waits for the first list of keys after a start.
    pub(crate) wait: Duration,
    /// Counts rejected requests.
    pub(crate) metrics: Arc<Metrics>,
    /// Formats the errors of rejected requests.
    pub(crate) format: ErrorFormatter,
}

/// Gives the request an id, and passes it on with its caller unless it is rejected.
pub(crate) async fn check_request(
    State(layer): State<Arc<AuthLayer>>,
    mut request: Request,
    next: Next,
) -> Response {
    let id = RequestId::new(request.headers());
    request.extensions_mut().insert(id.clone());
    request.extensions_mut().insert(layer.exposure);
    let origin = request.headers().get(header::ORIGIN).cloned();
    let mut response = authenticate(&layer, request, next).await;
    // A refusal too: a page that is not allowed may read why.
    if let Some(origin) = origin {
        allow_origin(response.headers_mut(), origin);
    }
    id.set_headers(response.headers_mut());
    response
}

/// Responds to preflight requests and probes, and passes other requests on with their caller.
async fn authenticate(layer: &AuthLayer, mut request: Request, next: Next) -> Response {
    let (path, headers) = (request.uri().path(), request.headers());
    let is_probe = PROBES.contains(&path);
    if let Err(error) = check_head(request.uri(), headers) {
        return reject(request, &error, layer.format).await;
    }
    if headers.contains_key(header::ORIGIN) && request.method() == Method::OPTIONS {
        // For every page: it has no effect, and shows no key. What follows it is checked.
        return preflight();
    }
    if layer.exposure == Exposure::Network && path == METRICS {
        return unknown_path(request, layer.format).await;
    }
    // Elsewhere than on loopback nothing but a key counts.
    let allowed = match layer.exposure {
        Exposure::Network if !is_probe => Ok(()),
        exposure => layer.origins.check(exposure, request.uri(), headers),
    };
    if is_probe && allowed.is_ok() {
        return next.run(request).await;
    }
    if is_why(path) && layer.exposure == Exposure::Loopback && !presents_key(headers) && allowed.is_ok() {
        // As it may read the metrics, which name every model and key.
        request.extensions_mut().insert(Caller::Anonymous);
        return next.run(request).await;
    }
    // Every connection has said it.
    let client = request.extensions().get::<ClientAddress>().map_or(UNKNOWN_CLIENT, |client| client.0);
    let caller = match allowed {
        Err(error) if is_probe || !presents_key(headers) => Err(error),
        allowed => match (layer.caller(headers, client).await, allowed) {
            (Ok(Caller::Anonymous), Err(error)) => Err(error),
            (caller, _) => caller.inspect_err(|error| layer.metrics.rejected(error)),
        },
    };
    match caller {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => reject(request, &error, layer.format).await,
    }
}

/// The limit of a head that is answered with a reason; the server refuses twice that without one.
fn check_head(uri: &Uri, headers: &HeaderMap) -> Result<(), GatewayError> {
    let target = uri.path_and_query().map_or(0, |target| target.as_str().len());
    let fields = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum::<usize>();
    if target + fields <= MAX_HEAD_BYTES {
        return Ok(());
    }
    let message = format!(
        "the request's head has {} bytes, and at most {MAX_HEAD_BYTES} are read; send fewer headers or cookies",
        target + fields
    );
    Err(GatewayError::new(ErrorKind::HeadTooLarge, message))
}

/// In no range that anybody names.
const UNKNOWN_CLIENT: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);

/// Lists every model and every key, which other machines must not see.
const METRICS: &str = "/metrics";
/// Paths that supervisors and collectors on this machine may request without a key.
const PROBES: &[&str] = &["/healthz", "/readyz", METRICS];

impl AuthLayer {
    /// The keys. Until the first list of them is complete, rejecting everything is the only safe choice.
    async fn synced_keyring(&self) -> Result<Arc<Keyring>, GatewayError> {
        let latest = self.keyring.borrow().clone();
        if latest.synced {
            return Ok(latest);
        }
        let mut keyring = self.keyring.clone();
        match timeout(self.wait, keyring.wait_for(|keyring| keyring.synced)).await {
            Ok(Ok(keyring)) => Ok(keyring.clone()),
            _ => {
                let message = "the gateway has not reached the API server since it started, so it knows no keys and \
                               no models yet; check that `russet serve` runs";
                Err(GatewayError::new(ErrorKind::ModelNotReady, message).retry_after(RETRY_AFTER))
            }
        }
    }

    async fn caller(&self, headers: &HeaderMap, client: IpAddr) -> Result<Caller, GatewayError> {
        let keyring = self.synced_keyring().await?;
        let open = self.exposure == Exposure::Loopback;
        keyring.caller(headers, client, open, Timestamp::now()).map_err(|error| {
            let message = match error {
                AuthError::MissingKey => {
                    "this gateway requires a key: send `Authorization: Bearer KEY` or `x-api-key: KEY`; `russet key create NAME` makes one"
                }
                AuthError::RejectedKey => "the key is not accepted; ask the administrator of this gateway for a valid one",
            };
            GatewayError::new(ErrorKind::InvalidApiKey, message)
        })
    }
}

/// The response to a CORS preflight request.
fn preflight() -> Response {
    let allowed = [
        (header::ACCESS_CONTROL_ALLOW_METHODS, "GET, POST, DELETE, OPTIONS"),
        // The wildcard does not cover the `authorization` header.
        (header::ACCESS_CONTROL_ALLOW_HEADERS, "*, authorization"),
        (header::ACCESS_CONTROL_MAX_AGE, "600"),
    ];
    (StatusCode::NO_CONTENT, allowed).into_response()
}

fn allow_origin(headers: &mut HeaderMap, origin: HeaderValue) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("*"));
    headers.append(header::VARY, HeaderValue::from_static("origin"));
}
