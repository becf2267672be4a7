//! What every request passes before a dialect sees it: an id, the checks that keep web pages of other
//! sites away from a port that trusts this machine, and its key. Quotas are not here: a dialect shows
//! them in headers of its own.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::dialects;
use crate::keys::{Caller, Keyring, AuthError};
use crate::listen::Exposure;
use crate::metrics::Metrics;
use crate::error::{ErrorKind, GatewayError};
use crate::server::unknown_path;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest id taken from a client.
const MAX_ID_LENGTH: usize = 128;

/// Who a request is, in logs and headers.
#[derive(Clone, Debug)]
pub(crate) struct RequestId {
    /// Ours: no two requests share it.
    pub(crate) unique: String,
    /// What the client called it, or ours: comes back in `x-request-id`.
    pub(crate) shown: String,
}

/// What every request passes.
#[derive(Clone)]
pub(crate) struct AuthLayer {
    /// Who can reach the listener.
    pub(crate) exposure: Exposure,
    /// The keys.
    pub(crate) keyring: watch::Receiver<Arc<Keyring>>,
    /// How long the keys may take to be known after a start.
    pub(crate) wait: Duration,
    /// Where refusals are counted.
    pub(crate) metrics: Arc<Metrics>,
}

/// Gives the request an id, refuses it when it comes from a foreign web page, and finds out whose it
/// is.
pub(crate) async fn check_request(State(gate): State<AuthLayer>, mut request: Request, next: Next) -> Response {
    let unique = format!("{:024x}", rand::random::<u128>() >> 32);
    let shown = client_id(request.headers()).unwrap_or_else(|| format!("req_{unique}"));
    let origin = request.headers().get(header::ORIGIN).cloned();
    if let Err(refusal) = check_origin(gate.exposure, request.uri(), request.headers()) {
        return with_request_id(reject(request, &refusal).await, &shown);
    }
    let mut response = if origin.is_some() && request.method() == Method::OPTIONS {
        preflight()
    } else if gate.exposure == Exposure::Network && request.uri().path() == METRICS {
        unknown_path(request).await
    } else if PROBES.contains(&request.uri().path()) {
        next.run(request).await
    } else {
        match gate.caller(request.headers()).await {
            Ok(caller) => {
                let extensions = request.extensions_mut();
                extensions.insert(RequestId { unique, shown: shown.clone() });
                extensions.insert(caller);
                next.run(request).await
            }
            Err(refusal) => {
                gate.metrics.rejected(&refusal);
                reject(request, &refusal).await
            }
        }
    };
    if let Some(origin) = origin {
        allow_origin(response.headers_mut(), origin);
    }
    with_request_id(response, &shown)
}

async fn reject(request: Request, refusal: &GatewayError) -> Response {
    let response = dialects::error_response(request.uri().path(), refusal);
    dialects::discard(request.into_body()).await;
    response
}

/// Names every model and every key, which other machines need not know.
const METRICS: &str = "/metrics";
/// Paths that supervisors and collectors of this machine ask without a key.
const PROBES: &[&str] = &["/healthz", "/readyz", METRICS];

impl AuthLayer {
    async fn caller(&self, headers: &HeaderMap) -> Result<Caller, GatewayError> {
        let mut keyring = self.keyring.clone();
        // Until the keys were read once, letting nobody in is the only safe answer.
        let keyring = match timeout(self.wait, keyring.wait_for(|keyring| keyring.synced)).await {
            Ok(Ok(keyring)) => keyring.clone(),
            _ => {
                let message = "the gateway has not reached the API server since it started, so it knows no keys and \
                               no models yet; check that `russet serve` runs";
                return Err(GatewayError::new(ErrorKind::ModelNotReady, message).retry_after(Duration::from_secs(5)));
            }
        };
        let open = self.exposure == Exposure::Loopback;
        keyring.caller(headers, open, Timestamp::now()).map_err(|stranger| {
            let message = match stranger {
                AuthError::MissingKey => {
                    "this gateway wants a key: send `Authorization: Bearer KEY`; `russet key create NAME` makes one"
                }
                AuthError::RejectedKey => "the key is not accepted; ask whoever runs this gateway for one",
            };
            GatewayError::new(ErrorKind::InvalidApiKey, message)
        })
    }
}

/// A browser asks before it lets a page ask.
fn preflight() -> Response {
    let allowed = [
        (header::ACCESS_CONTROL_ALLOW_METHODS, "GET, POST, OPTIONS"),
        // The star does not cover the key.
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

fn with_request_id(mut response: Response, shown: &str) -> Response {
    if let Ok(value) = HeaderValue::from_str(shown) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

fn client_id(headers: &HeaderMap) -> Option<String> {
    let id = headers.get(REQUEST_ID)?.to_str().ok()?;
    let plain = !id.is_empty() && id.len() <= MAX_ID_LENGTH && id.bytes().all(|byte| byte.is_ascii_graphic());
    plain.then(|| id.to_owned())
}

/// A page of another site may make a browser call this port, by its own name pointed at loopback
/// (the Host header tells) or directly (the Origin header tells). Programs send neither.
fn check_origin(side: Exposure, uri: &Uri, headers: &HeaderMap) -> Result<(), GatewayError> {
    let forbidden = |message: String| Err(GatewayError::new(ErrorKind::Forbidden, message));
    if side == Exposure::Loopback {
        let named =
            headers.get(header::HOST).map(|host| host.to_str().ok().and_then(|host| host.parse().ok()));
        for authority in [uri.authority().cloned().map(Some), named].into_iter().flatten() {
            if !authority.as_ref().is_some_and(|authority: &Authority| is_loopback(authority.host())) {
                let host = authority.map_or_else(String::new, |authority| authority.host().to_owned());
                return forbidden(format!(
                    "the name `{host}` is not this machine's loopback; use http://127.0.0.1 or http://localhost"
                ));
            }
        }
    }
    if let Some(origin) = headers.get(header::ORIGIN) {
        let uri = origin.to_str().ok().and_then(|origin| origin.parse::<Uri>().ok());
        let own = uri.as_ref().and_then(Uri::host).is_some_and(is_loopback);
        if side == Exposure::Network || !own {
            return forbidden(
                "web pages may not use the gateway, but for those of its own machine over loopback".into(),
            );
        }
    }
    Ok(())
}

fn is_loopback(host: &str) -> bool {
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(&host);
    host == "localhost"
        || host.ends_with(".localhost")
        || bare.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_and_origins_of_this_machine_pass() {
        for (host, origin, passes) in [
            ("localhost:52415", None, true),
            ("LOCALHOST", None, true),
            ("127.0.0.1:52415", None, true),
            ("127.8.9.1", None, true),
            ("[::1]:52415", None, true),
            ("chat.localhost", None, true),
            ("localhost.", None, true),
            ("evil.example", None, false),
            ("localhost.evil.example", None, false),
            ("10.0.0.1", None, false),
            ("", None, false),
            ("local host", None, false),
            ("localhost", Some("http://localhost:3000"), true),
            ("localhost", Some("tauri://localhost"), true),
            ("localhost", Some("https://127.0.0.1"), true),
            ("localhost", Some("https://evil.example"), false),
            ("localhost", Some("https://localhost.evil.example"), false),
            ("localhost", Some("null"), false),
            ("localhost", Some(""), false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, HeaderValue::from_str(host).unwrap());
            if let Some(origin) = origin {
                headers.insert(header::ORIGIN, HeaderValue::from_str(origin).unwrap());
            }
            let verdict = check_origin(Exposure::Loopback, &Uri::from_static("/v1/models"), &headers);
            assert_eq!(verdict.is_ok(), passes, "{host} {origin:?}");
            // A listener for other machines is called by other names, and by no page.
            let network = check_origin(Exposure::Network, &Uri::from_static("/v1/models"), &headers);
            assert_eq!(network.is_ok(), origin.is_none(), "{host} {origin:?}");
        }
        // In HTTP/2 the name stands in the URI.
        assert!(check_origin(Exposure::Loopback, &Uri::from_static("http://localhost/"), &HeaderMap::new()).is_ok());
        assert!(check_origin(Exposure::Loopback, &Uri::from_static("http://evil.example/"), &HeaderMap::new()).is_err());
    }
}
