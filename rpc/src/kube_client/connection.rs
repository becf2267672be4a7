//! HTTP connections to an API server: the stack that kube builds, with TCP keepalive and with the proxy of a
//! kubeconfig. Not here: which server, and when to change to another.

use std::time::Duration;

use base64::Engine as _;
use http::{HeaderValue, Uri};
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy::Builder;
use hyper_util::client::legacy::connect::proxy::{SocksV5, Tunnel};
use hyper_util::client::legacy::connect::{Connection, HttpConnector};
use hyper_util::rt::TokioExecutor;
use kube::client::{Body, ClientBuilder, ConfigExt as _, retry::RetryPolicy};
use kube::{Client, Config};
use tower::retry::RetryLayer;
use tower::{BoxError, Service, ServiceBuilder};

/// Silence after which the kernel asks the other end whether it is there. A watch may be silent for a minute,
/// and a server that lost power, or a machine that lost the address it connected from, closes no connection.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(4);
/// Time between two unanswered probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
/// Unanswered probes that end a connection: with the silence, ten seconds in all. Wi-Fi loses one or two.
const KEEPALIVE_PROBES: u32 = 3;
/// Time for sent bytes to be acknowledged, where no probe is sent: as long as the probes.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED: Duration = Duration::from_secs(10);

/// A client of one API server.
pub(super) fn client(config: &Config) -> Result<Client, kube::Error> {
    let mut connector = HttpConnector::new();
    connector.enforce_http(false);
    connector.set_keepalive(Some(KEEPALIVE_IDLE));
    connector.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    connector.set_keepalive_retries(Some(KEEPALIVE_PROBES));
    #[cfg(target_os = "linux")]
    connector.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
    match &config.proxy_url {
        None => with_connector(config, connector),
        Some(proxy) if proxy.scheme_str() == Some("http") => {
            let mut tunnel = Tunnel::new(proxy.clone(), connector);
            if let Some(login) = login(proxy) {
                tunnel = tunnel.with_auth(login);
            }
            with_connector(config, tunnel)
        }
        Some(proxy) => with_connector(config, SocksV5::new(proxy.clone(), connector)),
    }
}

/// Whether [`client`] can use a proxy.
pub(super) fn is_supported(proxy: &Uri) -> bool {
    match proxy.scheme_str() {
        Some("http") => true,
        // A login would be left out, and the proxy would refuse without words.
        Some("socks5") => !has_login(proxy),
        _ => false,
    }
}

/// A proxy without its login, for messages.
pub(super) fn without_login(proxy: &Uri) -> String {
    let authority = proxy.authority().map_or("", |authority| authority.as_str());
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    format!("{}://{host}", proxy.scheme_str().unwrap_or_default())
}

fn has_login(proxy: &Uri) -> bool {
    proxy.authority().is_some_and(|authority| authority.as_str().contains('@'))
}

/// The header with a proxy's login.
fn login(proxy: &Uri) -> Option<HeaderValue> {
    let (login, _) = proxy.authority()?.as_str().rsplit_once('@')?;
    let encoded = base64::engine::general_purpose::STANDARD.encode(percent_decode(login));
    HeaderValue::from_str(&format!("Basic {encoded}")).ok()
}

/// Decodes `%40`; anything else stays as it is.
fn percent_decode(text: &str) -> Vec<u8> {
    let mut rest = text.as_bytes();
    let mut decoded = Vec::with_capacity(rest.len());
    while let Some((first, after)) = rest.split_first() {
        let digits =
            after.get(..2).filter(|digits| *first == b'%' && digits.iter().all(u8::is_ascii_hexdigit));
        let byte = digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        decoded.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &after[2..] } else { after };
    }
    decoded
}

fn with_connector<C>(config: &Config, connector: C) -> Result<Client, kube::Error>
where
    C: Service<Uri> + Clone + Send + Sync + 'static,
    C::Response: Connection + hyper::rt::Read + hyper::rt::Write + Send + Unpin + 'static,
    C::Future: Send + 'static,
    C::Error: std::error::Error + Send + Sync + 'static,
{
    let mut connector = TimeoutConnector::new(config.rustls_https_connector_with_connector(connector)?);
    connector.set_connect_timeout(config.connect_timeout);
    connector.set_read_timeout(config.read_timeout);
    connector.set_write_timeout(config.write_timeout);
    connector.set_reset_reader_on_write(config.reset_reader_on_write);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.default_retry.then(|| RetryLayer::new(RetryPolicy::server_retry())))
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(Builder::new(TokioExecutor::new()).build::<_, Body>(connector));
    Ok(ClientBuilder::new(service, config.default_namespace.clone()).build())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxies_have_kinds_and_are_shown_without_their_login() {
        for (proxy, supported, shown, sent) in [
            ("http://proxy:8080", true, "http://proxy:8080", None),
            ("http://me:p%40ss@proxy", true, "http://proxy", Some("me:p@ss")),
            ("http://me:100%@proxy", true, "http://proxy", Some("me:100%")),
            ("socks5://proxy:1080", true, "socks5://proxy:1080", None),
            ("socks5://me:pass@proxy:1080", false, "socks5://proxy:1080", Some("me:pass")),
            ("https://proxy", false, "https://proxy", None),
        ] {
            let uri: Uri = proxy.parse().unwrap();
            assert_eq!((is_supported(&uri), without_login(&uri).as_str()), (supported, shown), "{proxy}");
            let header =
                sent.map(|sent| format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(sent)));
            assert_eq!(login(&uri).map(|value| value.to_str().unwrap().to_owned()), header, "{proxy}");
        }
    }
}
