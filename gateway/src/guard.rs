//! What every request passes before a dialect sees it: an id, and the checks that keep web pages of
//! other sites away from a port that trusts this machine. Keys and budgets are not here yet.

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use crate::dialects;
use crate::refusal::{Kind, Refusal};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest id taken from a client.
const MOST_ID: usize = 128;

/// Who a request is, in logs and headers.
#[derive(Clone, Debug)]
pub(crate) struct RequestId {
    /// Ours: no two requests share it.
    pub(crate) unique: String,
    /// What the client called it, or ours: comes back in `x-request-id`.
    pub(crate) shown: String,
}

/// Which names a request may call this gateway by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hosts {
    /// Names of this machine's loopback alone.
    Loopback,
    /// Any: the listener is open to the network.
    Any,
}

/// Gives the request an id and refuses it when it comes from a foreign web page.
pub(crate) async fn guard(State(hosts): State<Hosts>, mut request: Request, next: Next) -> Response {
    let unique = format!("{:024x}", rand::random::<u128>() >> 32);
    let shown = client_id(request.headers()).unwrap_or_else(|| format!("req_{unique}"));
    let origin = request.headers().get(header::ORIGIN).cloned();
    if let Err(refusal) = check(hosts, request.uri(), request.headers()) {
        return named(dialects::refuse(request.uri().path(), &refusal), &shown);
    }
    let mut response = if origin.is_some() && request.method() == Method::OPTIONS {
        preflight()
    } else {
        request.extensions_mut().insert(RequestId { unique, shown: shown.clone() });
        next.run(request).await
    };
    if let Some(origin) = origin {
        allow(response.headers_mut(), origin);
    }
    named(response, &shown)
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

fn allow(headers: &mut HeaderMap, origin: HeaderValue) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("*"));
    headers.append(header::VARY, HeaderValue::from_static("origin"));
}

fn named(mut response: Response, shown: &str) -> Response {
    if let Ok(value) = HeaderValue::from_str(shown) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

fn client_id(headers: &HeaderMap) -> Option<String> {
    let id = headers.get(REQUEST_ID)?.to_str().ok()?;
    let plain = !id.is_empty() && id.len() <= MOST_ID && id.bytes().all(|byte| byte.is_ascii_graphic());
    plain.then(|| id.to_owned())
}

/// A page of another site may make a browser call this port, by its own name pointed at loopback
/// (the Host header tells) or directly (the Origin header tells). Programs send neither.
fn check(hosts: Hosts, uri: &Uri, headers: &HeaderMap) -> Result<(), Refusal> {
    let forbidden = |message: String| Err(Refusal::new(Kind::Forbidden, message));
    if hosts == Hosts::Loopback {
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
        if !uri.as_ref().and_then(Uri::host).is_some_and(is_loopback) {
            return forbidden(
                "web pages of this origin may not use the gateway; only pages of this machine may".into(),
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
            let verdict = check(Hosts::Loopback, &Uri::from_static("/v1/models"), &headers);
            assert_eq!(verdict.is_ok(), passes, "{host} {origin:?}");
            // An open listener is called by other names; foreign pages stay out all the same.
            let open = check(Hosts::Any, &Uri::from_static("/v1/models"), &headers);
            assert_eq!(open.is_ok(), passes || origin.is_none(), "{host} {origin:?}");
        }
        // In HTTP/2 the name stands in the URI.
        assert!(check(Hosts::Loopback, &Uri::from_static("http://localhost/"), &HeaderMap::new()).is_ok());
        assert!(
            check(Hosts::Loopback, &Uri::from_static("http://evil.example/"), &HeaderMap::new()).is_err()
        );
    }
}
