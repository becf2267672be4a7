//! Middleware before every dialect: request ids, the origin checks that keep web pages of other sites away
//! from a port that trusts this machine, and authentication by key. Not here: quotas, see `serving`.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::error::{ErrorKind, GatewayError, RETRY_AFTER};
use crate::keys::{AuthError, Caller, Keyring};
use crate::listen::Exposure;
use crate::metrics::Metrics;
use crate::rejection::{ErrorFormatter, reject, unknown_path};
use crate::request_id::RequestId;

/// State of the middleware.
#[derive(Clone)]
pub(crate) struct AuthLayer {
    /// Which machines can reach the listener.
    pub(crate) exposure: Exposure,
    /// The keys.
    pub(crate) keyring: watch::Receiver<Arc<Keyring>>,
    /// How long a request waits for the first list of keys after a start.
    pub(crate) wait: Duration,
    /// Counts rejected requests.
    pub(crate) metrics: Arc<Metrics>,
    /// Formats the errors of rejected requests.
    pub(crate) format: ErrorFormatter,
}

/// Gives the request an id, rejects it when it comes from a web page of another origin, and authenticates it.
pub(crate) async fn check_request(
    State(layer): State<AuthLayer>,
    mut request: Request,
    next: Next,
) -> Response {
    let id = RequestId::new(request.headers());
    let mut response = match check_origin(layer.exposure, request.uri(), request.headers()) {
        Err(error) => reject(request, &error, layer.format).await,
        Ok(()) => {
            let origin = request.headers().get(header::ORIGIN).cloned();
            request.extensions_mut().insert(id.clone());
            let mut response = authenticate(layer, request, next).await;
            if let Some(origin) = origin {
                allow_origin(response.headers_mut(), origin);
            }
            response
        }
    };
    id.set_header(response.headers_mut());
    response
}

/// Responds to preflight requests and probes, and passes other requests on with their caller.
async fn authenticate(layer: AuthLayer, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if request.headers().contains_key(header::ORIGIN) && request.method() == Method::OPTIONS {
        preflight()
    } else if layer.exposure == Exposure::Network && path == METRICS {
        unknown_path(request, layer.format).await
    } else if PROBES.contains(&path) {
        next.run(request).await
    } else {
        match layer.caller(request.headers()).await {
            Ok(caller) => {
                request.extensions_mut().insert(caller);
                next.run(request).await
            }
            Err(error) => {
                layer.metrics.rejected(&error);
                reject(request, &error, layer.format).await
            }
        }
    }
}

/// Lists every model and every key, which other machines must not see.
const METRICS: &str = "/metrics";
/// Paths that supervisors and collectors on this machine may request without a key.
const PROBES: &[&str] = &["/healthz", "/readyz", METRICS];

impl AuthLayer {
    async fn caller(&self, headers: &HeaderMap) -> Result<Caller, GatewayError> {
        let mut keyring = self.keyring.clone();
        // Until the first list of keys is complete, rejecting everything is the only safe choice.
        let keyring = match timeout(self.wait, keyring.wait_for(|keyring| keyring.synced)).await {
            Ok(Ok(keyring)) => keyring.clone(),
            _ => {
                let message = "the gateway has not reached the API server since it started, so it knows no keys and \
                               no models yet; check that `russet serve` runs";
                return Err(GatewayError::new(ErrorKind::ModelNotReady, message).retry_after(RETRY_AFTER));
            }
        };
        let open = self.exposure == Exposure::Loopback;
        keyring.caller(headers, open, Timestamp::now()).map_err(|error| {
            let message = match error {
                AuthError::MissingKey => {
                    "this gateway requires a key: send `Authorization: Bearer KEY`; `russet key create NAME` makes one"
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
        (header::ACCESS_CONTROL_ALLOW_METHODS, "GET, POST, OPTIONS"),
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

/// A page of another site can make a browser call this port: under a host name that resolves to loopback,
/// which the Host header shows, or directly, which the Origin header shows. Programs send neither.
fn check_origin(exposure: Exposure, uri: &Uri, headers: &HeaderMap) -> Result<(), GatewayError> {
    let forbidden = |message: String| Err(GatewayError::new(ErrorKind::Forbidden, message));
    if exposure == Exposure::Loopback {
        let host_header =
            headers.get(header::HOST).map(|host| host.to_str().ok().and_then(|host| host.parse().ok()));
        for authority in [uri.authority().cloned().map(Some), host_header].into_iter().flatten() {
            if !authority.as_ref().is_some_and(|authority: &Authority| is_loopback(authority.host())) {
                let host = authority.map_or_else(String::new, |authority| authority.host().to_owned());
                return forbidden(format!(
                    "the host `{host}` is not a loopback name of this machine; use http://127.0.0.1 or http://localhost"
                ));
            }
        }
    }
    if let Some(origin) = headers.get(header::ORIGIN) {
        let uri = origin.to_str().ok().and_then(|origin| origin.parse::<Uri>().ok());
        let is_local = uri.as_ref().and_then(Uri::host).is_some_and(is_loopback);
        if exposure == Exposure::Network || !is_local {
            return forbidden(
                "web pages of other origins may not use the gateway; only pages of its own machine may, over loopback"
                    .into(),
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
            // A network listener is reached under other names, and never by a web page.
            let network = check_origin(Exposure::Network, &Uri::from_static("/v1/models"), &headers);
            assert_eq!(network.is_ok(), origin.is_none(), "{host} {origin:?}");
        }
        // In HTTP/2 the host is in the URI.
        assert!(
            check_origin(Exposure::Loopback, &Uri::from_static("http://localhost/"), &HeaderMap::new())
                .is_ok()
        );
        assert!(
            check_origin(Exposure::Loopback, &Uri::from_static("http://evil.example/"), &HeaderMap::new())
                .is_err()
        );
    }
}
