//! Which web pages and host names may use a listener on loopback. A page of another site can make a browser call this
//! port: under a host name that resolves to loopback, which the `Host` header shows, or directly, which the `Origin`
//! header shows. Programs send neither. Not here: keys; a request that shows an accepted key needs no test, as no page
//! has the key.

use axum::http::uri::Authority;
use axum::http::{HeaderMap, Uri, header};

use crate::error::{ErrorKind, GatewayError, shown};
use crate::listen::Exposure;
use crate::routes::matches_pattern;

/// Schemes of pages that are part of a program on this machine: no page of the web can have such an origin.
const APP_SCHEMES: &[&str] = &["app", "capacitor", "file", "ionic", "tauri", "vscode-file", "vscode-webview"];
/// Top-level domains that the public DNS never has, so that no owner of a domain can let a name below them lead to
/// loopback: the names of machines nearby (RFC 6762), and of container engines for their host, as in
/// `host.docker.internal` and `host.containers.internal`.
const PRIVATE_DOMAINS: &[&str] = &[".internal", ".local"];

/// What may use a listener on loopback, beside this machine's own names, pages and programs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OriginPolicy {
    /// Origins of pages, such as `https://chat.example.org`; `*` matches any characters.
    pub origins: Vec<String>,
    /// Host names, such as `studio.example.org`; `*` matches any characters.
    pub hosts: Vec<String>,
}

impl OriginPolicy {
    /// Checks a request by its names; an error that says how to allow them.
    pub(crate) fn check(
        &self,
        exposure: Exposure,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<(), GatewayError> {
        if exposure == Exposure::Loopback {
            let host = headers.get(header::HOST).map(|host| host.to_str().ok()?.parse::<Authority>().ok());
            // In HTTP/2 the host is in the URI.
            for authority in [uri.authority().cloned().map(Some), host].into_iter().flatten() {
                let host = authority.as_ref().map_or("", Authority::host);
                if !self.allows_host(host) {
                    return Err(forbidden(format!(
                        "the host `{}` is no name of this machine; use http://127.0.0.1 or http://localhost, send a \
                         key, or start `russet up` or `russet gateway` with --allow-host {0}",
                        shown(host)
                    )));
                }
            }
        }
        match headers.get(header::ORIGIN) {
            Some(origin) if !origin.to_str().is_ok_and(|origin| self.allows_origin(origin)) => {
                Err(forbidden(format!(
                    "web pages of `{}` may not use the gateway without a key; send one, or start `russet up` or \
                     `russet gateway` with --allow-origin {0}",
                    shown(&String::from_utf8_lossy(origin.as_bytes()))
                )))
            }
            _ => Ok(()),
        }
    }

    fn allows_host(&self, host: &str) -> bool {
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        let is_private = PRIVATE_DOMAINS.iter().any(|domain| {
            host.strip_suffix(domain).is_some_and(|name| !name.is_empty() && !name.starts_with('.'))
        });
        is_loopback(&host) || is_private || self.hosts.iter().any(|pattern| matches(pattern, &host))
    }

    fn allows_origin(&self, origin: &str) -> bool {
        let scheme = origin.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
        let is_app = scheme.is_some_and(|scheme| APP_SCHEMES.contains(&scheme.as_str()));
        let uri = origin.parse::<Uri>().ok();
        let is_local = uri.as_ref().and_then(Uri::host).is_some_and(is_loopback);
        is_app || is_local || self.origins.iter().any(|pattern| matches(pattern, origin))
    }
}

fn forbidden(message: String) -> GatewayError {
    GatewayError::new(ErrorKind::Forbidden, message)
}

fn matches(pattern: &str, text: &str) -> bool {
    matches_pattern(&pattern.to_ascii_lowercase(), &text.to_ascii_lowercase())
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
    use axum::http::HeaderValue;

    use super::*;

    fn check(policy: &OriginPolicy, host: &str, origin: Option<&str>) -> Result<(), GatewayError> {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, HeaderValue::from_str(host).unwrap());
        if let Some(origin) = origin {
            headers.insert(header::ORIGIN, HeaderValue::from_str(origin).unwrap());
        }
        policy.check(Exposure::Loopback, &Uri::from_static("/v1/models"), &headers)
    }

    #[test]
    fn only_names_that_the_public_dns_lacks_pass_as_hosts() {
        let policy = OriginPolicy::default();
        for (host, passes) in [
            ("localhost:52415", true),
            ("LOCALHOST", true),
            ("127.0.0.1:52415", true),
            ("127.8.9.1", true),
            ("[::1]:52415", true),
            ("chat.localhost", true),
            ("localhost.", true),
            ("host.docker.internal:52415", true),
            ("host.containers.internal", true),
            ("studio.local", true),
            ("Studio.Local.:52415", true),
            ("evil.example", false),
            ("localhost.evil.example", false),
            ("local", false),
            (".local", false),
            ("local.evil.example", false),
            ("evillocal", false),
            ("studio.local.evil.example", false),
            ("10.0.0.1", false),
            ("studio", false),
            ("", false),
            ("local host", false),
        ] {
            assert_eq!(check(&policy, host, None).is_ok(), passes, "{host}");
        }
        let uri = |uri| policy.check(Exposure::Loopback, &Uri::from_static(uri), &HeaderMap::new());
        assert!(uri("http://localhost/").is_ok() && uri("http://evil.example/").is_err());
    }

    #[test]
    fn only_pages_of_this_machine_and_its_programs_pass() {
        let policy = OriginPolicy::default();
        for (origin, passes) in [
            ("http://localhost:3000", true),
            ("https://127.0.0.1", true),
            ("http://tauri.localhost", true),
            ("tauri://localhost", true),
            ("app://obsidian.md", true),
            ("vscode-webview://1abc", true),
            ("file://", true),
            ("capacitor://localhost", true),
            ("https://evil.example", false),
            ("https://localhost.evil.example", false),
            ("https://app.evil.example", false),
            ("http://studio.local:3000", false),
            ("chrome-extension://abc", false),
            ("null", false),
            ("", false),
            ("app", false),
        ] {
            assert_eq!(check(&policy, "localhost", Some(origin)).is_ok(), passes, "{origin}");
        }
    }

    #[test]
    fn what_flags_allow_passes_and_the_refusal_names_them() {
        let policy = OriginPolicy {
            origins: vec!["https://*.example.org".into(), "chrome-extension://*".into(), "null".into()],
            hosts: vec!["Studio.example.org".into(), "*.lan".into()],
        };
        for (host, origin, flag) in [
            ("studio.example.org:52415", None, None),
            ("a.lan", Some("https://chat.example.org"), None),
            ("localhost", Some("chrome-extension://abc"), None),
            ("localhost", Some("null"), None),
            ("other.example.org", None, Some("--allow-host other.example.org")),
            ("localhost", Some("https://example.org"), Some("--allow-origin https://example.org")),
            ("localhost", Some("http://chat.example.org"), Some("--allow-origin http://chat.example.org")),
        ] {
            let error = check(&policy, host, origin).err().map(|error| error.message);
            match flag {
                None => assert_eq!(error, None, "{host} {origin:?}"),
                Some(flag) => assert!(error.is_some_and(|error| error.contains(flag)), "{host} {origin:?}"),
            }
        }
    }
}
