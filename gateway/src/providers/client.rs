//! The only sockets of a gateway to providers. They take [`Cleared`] requests alone, and connect to addresses of the zone for
//! which the request was cleared alone, whatever a name resolves to. Redirects are not followed and proxies not used: both
//! would lead elsewhere.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use jiff::Timestamp;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::{HeaderMap, RETRY_AFTER};
use reqwest::{Client, RequestBuilder, Response, StatusCode, Url};
use russet_crds::{ProviderApi, Zone};
use russet_rpc::addresses::{is_loopback, is_private, is_public};
use serde_json::Value;
use tokio::time::timeout;

use super::openai::error_message;
use super::provider_stream::ProviderStream;
use super::{Outcome, ProviderPermit, ProviderRequest, Providers, anthropic, openai};
use crate::audit::DepartedRequest;
use crate::error::{ErrorKind, GatewayError, shown};
use crate::routes::Provider;
use crate::zones::{Cleared, ZoneLimit};

/// How long a connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of an error's body that are read.
const MAX_ERROR_BYTES: usize = 64 * 1024;

/// Why a provider does not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ProviderError {
    /// The request is wrong, for others too.
    Rejected(GatewayError),
    /// It has too many requests now; it may say for how long.
    Busy(String, Option<Duration>),
    /// It cannot be reached, is out of order or takes no requests of this gateway.
    Failed(String),
}

/// A client for each zone.
pub(super) struct HttpClients {
    local: Client,
    lan: Client,
    cloud: Client,
}

impl HttpClients {
    pub(super) fn new() -> Result<Self, reqwest::Error> {
        let client = |zone| {
            Client::builder()
                .user_agent(concat!("russet-gateway/", env!("CARGO_PKG_VERSION")))
                .redirect(reqwest::redirect::Policy::none())
                .no_proxy()
                .dns_resolver(Arc::new(ZoneResolver(zone)))
                .connect_timeout(CONNECT_TIMEOUT)
                .build()
        };
        Ok(Self { local: client(Zone::Local)?, lan: client(Zone::Lan)?, cloud: client(Zone::Cloud)? })
    }

    fn of(&self, zone: Zone) -> Option<&Client> {
        match zone {
            Zone::Local => Some(&self.local),
            Zone::Lan => Some(&self.lan),
            Zone::Cloud => Some(&self.cloud),
            Zone::Unknown => None,
        }
    }
}

/// Whether an address is in a zone. None is in two, so that a provider of the cloud cannot be a way to machines at home.
fn is_in(zone: Zone, address: IpAddr) -> bool {
    match zone {
        Zone::Local => is_loopback(address),
        Zone::Lan => is_private(address),
        Zone::Cloud => is_public(address),
        Zone::Unknown => false,
    }
}

/// A resolver that leaves out addresses of other zones.
#[derive(Debug)]
struct ZoneResolver(Zone);

/// No address of a name is in the zone.
#[derive(Debug, thiserror::Error)]
#[error("it has no address in the zone {0}")]
struct OutOfZone(Zone);

impl Resolve for ZoneResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let Self(zone) = *self;
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let inside: Vec<SocketAddr> = found.filter(|found| is_in(zone, found.ip())).collect();
            if inside.is_empty() {
                return Err(OutOfZone(zone).into());
            }
            Ok(Box::new(inside.into_iter()) as Addrs)
        })
    }
}

/// The address of a call; an error where its host is an address of another zone.
fn url(provider: &Provider, path: &str, zone: Zone) -> Result<Url, String> {
    let text = format!("{}{path}", provider.spec.endpoint.trim_end_matches('/'));
    let url = Url::parse(&text).map_err(|error| format!("its endpoint is no URL: {error}"))?;
    if zone == Zone::Cloud && url.scheme() != "https" {
        return Err("its endpoint has no https://".to_owned());
    }
    let host = url.host_str().unwrap_or_default();
    match host.trim_matches(['[', ']']).parse() {
        // Names are resolved, and their addresses checked then.
        Ok(address) if !is_in(zone, address) => Err(OutOfZone(zone).to_string()),
        _ => Ok(url),
    }
}

impl Providers {
    /// Sends a request to its provider; the stream of its answer.
    pub(crate) async fn open(
        self: &Arc<Self>,
        cleared: Cleared<ProviderRequest>,
    ) -> Result<ProviderStream, ProviderError> {
        let (wanted, zone, limit) = cleared.into_parts();
        let name = wanted.provider.full_name();
        let Some(permit) = self.permit(&wanted.provider) else {
            let limit = wanted.provider.spec.max_concurrent_requests;
            let message = format!("ModelProvider {name} has {limit} requests of this gateway already");
            return Err(ProviderError::Busy(message, None));
        };
        let sent = self.send(&wanted, (zone, limit), permit).await;
        let outcome = match &sent {
            Ok(_) => return sent,
            Err(ProviderError::Rejected(_)) => Outcome::Rejected,
            Err(ProviderError::Busy(message, pause)) => {
                Outcome::Failed { message, is_busy: true, pause: *pause }
            }
            Err(ProviderError::Failed(message)) => Outcome::Failed { message, is_busy: false, pause: None },
        };
        self.record(&wanted.provider, &wanted.model, outcome);
        sent
    }

    async fn send(
        self: &Arc<Self>,
        wanted: &ProviderRequest,
        (zone, limit): (Zone, ZoneLimit),
        permit: ProviderPermit,
    ) -> Result<ProviderStream, ProviderError> {
        let ProviderRequest { provider, .. } = wanted;
        let name = provider.full_name();
        let failed = |message: String| ProviderError::Failed(format!("ModelProvider {name}: {message}"));
        let client =
            self.clients().map_err(|error| failed(format!("this gateway has no client: {error}")))?;
        let client = client.of(zone).ok_or_else(|| failed("its zone is of a newer release".to_owned()))?;
        let (path, body) = match provider.spec.api {
            ProviderApi::OpenAI => (openai::PATH, openai::body(wanted)),
            ProviderApi::Anthropic => (anthropic::PATH, anthropic::body(wanted)),
            ProviderApi::Unknown => return Err(failed("its API is of a newer release".to_owned())),
        };
        let url = url(provider, path, zone).map_err(failed)?;
        let token = match &provider.spec.secret_ref {
            Some(secret) => {
                Some(self.secrets.token(&provider.namespace, &secret.name).await.map_err(failed)?)
            }
            None => None,
        };
        if let Some(audit) = &self.audit {
            let ProviderRequest { model, request, key, .. } = wanted;
            let departed = DepartedRequest {
                request: request.id.clone(),
                key: key.clone(),
                provider: name.clone(),
                model: shown(model),
                zone: zone.to_string(),
                limit: limit.zone().to_string(),
                limit_by: shown(limit.by()),
            };
            // Before a byte of it leaves.
            audit.departed(departed).await.map_err(ProviderError::Failed)?;
        }
        let call = authorized(client.post(url).json(&body), provider.spec.api, token.as_deref());
        let patience = Duration::from_secs(provider.spec.timeout_seconds.into());
        let response = match timeout(patience, call.send()).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => {
                return Err(failed(russet_telemetry::errors::chain(&error.without_url()).to_string()));
            }
            Err(_) => return Err(failed(format!("it sent nothing for {} s", patience.as_secs()))),
        };
        if response.status() == StatusCode::OK {
            return Ok(ProviderStream::new(self.clone(), wanted, response, permit));
        }
        if matches!(response.status(), StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
            && let Some(secret) = &provider.spec.secret_ref
        {
            self.secrets.forget(&provider.namespace, &secret.name);
        }
        Err(refusal(&name, response, patience).await)
    }
}

fn authorized(call: RequestBuilder, api: ProviderApi, token: Option<&str>) -> RequestBuilder {
    match (api, token) {
        (ProviderApi::Anthropic, Some(token)) => {
            call.header("anthropic-version", anthropic::VERSION).header("x-api-key", token)
        }
        (ProviderApi::Anthropic, None) => call.header("anthropic-version", anthropic::VERSION),
        (ProviderApi::OpenAI | ProviderApi::Unknown, Some(token)) => call.bearer_auth(token),
        (ProviderApi::OpenAI | ProviderApi::Unknown, None) => call,
    }
}

/// What an answer without a stream means.
async fn refusal(name: &str, response: Response, patience: Duration) -> ProviderError {
    let status = response.status();
    let pause = retry_after(response.headers(), Timestamp::now());
    let text = timeout(patience, beginning(response)).await.unwrap_or_default();
    let error: Option<Value> = serde_json::from_str(&text).ok();
    let said = error.as_ref().map_or_else(|| text.clone(), error_message);
    let said = shown(said.trim());
    let message = format!("ModelProvider {name} answers {status}: {said}");
    match status.as_u16() {
        400 | 413 | 422 => {
            let is_too_long = ["context length", "context_length", "prompt is too long", "context window"]
                .iter()
                .any(|words| text.to_ascii_lowercase().contains(words));
            let kind = if is_too_long { ErrorKind::ContextLengthExceeded } else { ErrorKind::InvalidRequest };
            ProviderError::Rejected(GatewayError::new(kind, message))
        }
        429 => ProviderError::Busy(message, pause),
        503 | 529 if pause.is_some() => ProviderError::Busy(message, pause),
        300..=399 => ProviderError::Failed(format!("{message}; redirects are not followed")),
        _ => ProviderError::Failed(message),
    }
}

/// The beginning of a body as text.
async fn beginning(response: Response) -> String {
    let mut bytes = Vec::new();
    let mut body = response.bytes_stream();
    while let Some(Ok(piece)) = body.next().await {
        bytes.extend_from_slice(&piece);
        if bytes.len() >= MAX_ERROR_BYTES {
            bytes.truncate(MAX_ERROR_BYTES);
            break;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The pause that an answer asks for: seconds, or a date.
fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let until = jiff::fmt::rfc2822::parse(text).ok()?.timestamp();
    Duration::try_from(until.duration_since(now)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::providers::provider_stream::tests::provider;

    #[test]
    fn an_address_is_in_one_zone_at_most() {
        let zones = [Zone::Local, Zone::Lan, Zone::Cloud, Zone::Unknown];
        for (text, expected) in [
            ("127.0.0.1", Some(Zone::Local)),
            ("192.168.1.7", Some(Zone::Lan)),
            ("100.100.1.1", Some(Zone::Lan)),
            ("169.254.169.254", None),
            ("1.1.1.1", Some(Zone::Cloud)),
            ("0.0.0.0", None),
            ("::ffff:10.0.0.1", Some(Zone::Lan)),
        ] {
            let address = text.parse().unwrap();
            let found: Vec<Zone> = zones.into_iter().filter(|zone| is_in(*zone, address)).collect();
            assert_eq!(found, expected.into_iter().collect::<Vec<_>>(), "{text}");
        }
    }

    #[test]
    fn an_endpoint_of_another_zone_is_no_url() {
        for (endpoint, zone, expected) in [
            ("http://127.0.0.1:8080/v1", Zone::Local, Ok("http://127.0.0.1:8080/v1/chat/completions")),
            ("http://[::1]:8080/v1/", Zone::Local, Ok("http://[::1]:8080/v1/chat/completions")),
            ("http://127.0.0.1:8080/v1", Zone::Lan, Err("it has no address in the zone Lan")),
            ("https://10.0.0.1/v1", Zone::Cloud, Err("it has no address in the zone Cloud")),
            ("http://api.example.com/v1", Zone::Cloud, Err("its endpoint has no https://")),
            ("http://studio.local/v1", Zone::Lan, Ok("http://studio.local/v1/chat/completions")),
            ("https://[::ffff:127.0.0.1]/v1", Zone::Cloud, Err("it has no address in the zone Cloud")),
            // Forms of an address that only URLs know.
            ("https://2130706433/v1", Zone::Cloud, Err("it has no address in the zone Cloud")),
            ("https://0x7f.1/v1", Zone::Cloud, Err("it has no address in the zone Cloud")),
        ] {
            let found = url(&provider(endpoint), openai::PATH, zone).map(String::from);
            assert_eq!(found.as_deref().map_err(String::as_str), expected, "{endpoint} {zone}");
        }
    }

    #[test]
    fn a_pause_is_seconds_or_a_date() {
        let now: Timestamp = "2026-11-29T10:00:00Z".parse().unwrap();
        for (text, expected) in [
            ("7", Some(7)),
            ("Sun, 29 Nov 2026 10:00:30 GMT", Some(30)),
            ("Sun, 29 Nov 2026 09:00:00 GMT", None),
            ("-1", None),
            ("soon", None),
        ] {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, text.parse().unwrap())]);
            assert_eq!(retry_after(&headers, now), expected.map(Duration::from_secs), "{text}");
        }
        assert_eq!(retry_after(&HeaderMap::new(), now), None);
    }
}
