//! Requests to providers. They take [`Cleared`] ones alone, and send them by the client of the zone for which they were cleared.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use jiff::Timestamp;
use reqwest::header::{HeaderMap, RETRY_AFTER};
use reqwest::{RequestBuilder, Response, StatusCode, Url};
use russet_crds::{ProviderApi, Zone};
use serde_json::Value;
use tokio::time::timeout;

use super::openai::error_message;
use super::provider_stream::ProviderStream;
use super::rate_limits::{self, LimitedReply, SpentLimit};
use super::{Outcome, ProviderRequest, Providers, Trials, anthropic, credits, openai};
use crate::audit::DepartedRequest;
use crate::error::{ErrorKind, GatewayError, shown};
use crate::zone_client::url_in;
use crate::zones::{Cleared, ZoneLimit};

/// Bytes of an error's body that are read.
const MAX_ERROR_BYTES: usize = 64 * 1024;

/// Where OpenRouter is.
const OPENROUTER_DOMAIN: &str = "openrouter.ai";

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

impl Providers {
    /// Sends a request to its provider; the stream of its answer. It may be the one that tries the model.
    pub(crate) async fn open(
        self: &Arc<Self>,
        cleared: Cleared<ProviderRequest>,
        trials: Trials,
    ) -> Result<ProviderStream, ProviderError> {
        let (wanted, zone, limit) = cleared.into_parts();
        let name = wanted.provider.full_name();
        let Some(permit) = self.permit(&wanted.provider) else {
            let limit = wanted.provider.spec.max_concurrent_requests;
            let message = format!("ModelProvider {name} has {limit} requests of this gateway already");
            return Err(ProviderError::Busy(message, None));
        };
        let error = match self.send(&wanted, (zone, limit)).await {
            Ok(response) => {
                return Ok(ProviderStream::new(self.clone(), &wanted, response, (permit, trials)));
            }
            Err(error) => error,
        };
        let outcome = match &error {
            ProviderError::Rejected(_) => Outcome::Rejected,
            ProviderError::Busy(message, pause) => Outcome::Failed { message, is_busy: true, pause: *pause },
            ProviderError::Failed(message) => Outcome::Failed { message, is_busy: false, pause: None },
        };
        // Before another request tries the model.
        self.record(&wanted.provider, &wanted.model, outcome);
        drop(trials);
        Err(error)
    }

    async fn send(
        self: &Arc<Self>,
        wanted: &ProviderRequest,
        (zone, limit): (Zone, ZoneLimit),
    ) -> Result<Response, ProviderError> {
        let ProviderRequest { provider, .. } = wanted;
        let name = provider.full_name();
        let failed = |message: String| ProviderError::Failed(format!("ModelProvider {name}: {message}"));
        let client = self.clients.of(zone).map_err(failed)?;
        let (path, body) = match provider.spec.api {
            ProviderApi::OpenAI => (openai::PATH, openai::body(wanted)),
            ProviderApi::Anthropic => (anthropic::PATH, anthropic::body(wanted)),
            ProviderApi::Unknown => return Err(failed("its API is of a newer release".to_owned())),
        };
        let endpoint = provider.spec.endpoint.trim_end_matches('/');
        let url = url_in(&format!("{endpoint}{path}"), zone).map_err(failed)?;
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
        let reply = match response.status() {
            StatusCode::TOO_MANY_REQUESTS => LimitedReply::Refusal {
                tokens: wanted.token_estimate(),
                retry_after: retry_after(response.headers(), Timestamp::now()),
            },
            _ => LimitedReply::Answer,
        };
        self.limited(wanted, &rate_limits::of_headers(response.headers(), reply, Timestamp::now()));
        if matches!(response.status(), StatusCode::OK | StatusCode::PAYMENT_REQUIRED) {
            self.ask_credits(provider, || {
                let url = url_in(&format!("{endpoint}{}", credits::PATH), zone).ok()?;
                Some(authorized(client.get(url), provider.spec.api, token.as_deref()))
            });
        }
        if response.status() == StatusCode::OK {
            return Ok(response);
        }
        if matches!(response.status(), StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
            && let Some(secret) = &provider.spec.secret_ref
        {
            self.secrets.forget(&provider.namespace, &secret.name);
        }
        let ProviderRejection { error, limits, is_unpaid } = refusal(&name, response, reply, patience).await;
        if is_unpaid {
            self.pause(provider, |pauses, generation, now| pauses.unpaid(&wanted.model, generation, now));
        }
        self.limited(wanted, &limits);
        Err(error)
    }

    /// Leaves models alone of whose limits nothing remains.
    fn limited(&self, wanted: &ProviderRequest, limits: &[SpentLimit]) {
        if !limits.is_empty() {
            self.pause(&wanted.provider, |pauses, generation, now| {
                let is_shared = shares_limits(&wanted.provider.spec.endpoint);
                pauses.spent((&wanted.model, is_shared), limits, generation, now);
            });
        }
    }
}

/// Whether a limit that has no name is one of all models: OpenRouter counts what an account sends, and those who took over its
/// headers, such as Together, what a model gets.
fn shares_limits(endpoint: &str) -> bool {
    let host = Url::parse(endpoint).ok().and_then(|url| url.host_str().map(str::to_owned));
    host.is_some_and(|host| host == OPENROUTER_DOMAIN || host.ends_with(&format!(".{OPENROUTER_DOMAIN}")))
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
struct ProviderRejection {
    error: ProviderError,
    /// The limits that its body names.
    limits: Vec<SpentLimit>,
    /// Whether the account has nothing left for any request that costs something.
    is_unpaid: bool,
}

/// Whether a 402 is of this request alone: OpenRouter says so of one that may have more tokens than the account can pay for,
/// and while others that run have reserved what is left.
fn is_of_one_request(text: &str) -> bool {
    let text = text.to_ascii_lowercase();
    ["can only afford", "fewer max_tokens", "in_flight_budget"].iter().any(|words| text.contains(words))
}

/// Reads what an answer without a stream says.
async fn refusal(
    name: &str,
    response: Response,
    reply: LimitedReply,
    patience: Duration,
) -> ProviderRejection {
    let status = response.status();
    let pause = retry_after(response.headers(), Timestamp::now());
    let text = timeout(patience, beginning(response)).await.unwrap_or_default();
    let error: Option<Value> = serde_json::from_str(&text).ok();
    let limits = error.as_ref().map(|error| rate_limits::of_error(error, reply, Timestamp::now()));
    let said = error.as_ref().map_or_else(|| text.clone(), error_message);
    let said = shown(said.trim());
    let message = format!("ModelProvider {name} answers {status}: {said}");
    let error = match status.as_u16() {
        400 | 413 | 422 => {
            let is_too_long = ["context length", "context_length", "prompt is too long", "context window"]
                .iter()
                .any(|words| text.to_ascii_lowercase().contains(words));
            let kind = if is_too_long { ErrorKind::ContextLengthExceeded } else { ErrorKind::InvalidRequest };
            ProviderError::Rejected(GatewayError::new(kind, message))
        }
        429 => ProviderError::Busy(message, pause),
        402 | 503 | 529 if pause.is_some() => ProviderError::Busy(message, pause),
        300..=399 => ProviderError::Failed(format!("{message}; redirects are not followed")),
        _ => ProviderError::Failed(message),
    };
    let is_unpaid = status == StatusCode::PAYMENT_REQUIRED && pause.is_none() && !is_of_one_request(&text);
    ProviderRejection { error, limits: limits.unwrap_or_default(), is_unpaid }
}

/// The beginning of a body as text.
pub(super) async fn beginning(response: Response) -> String {
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

    #[test]
    fn only_openrouter_has_limits_of_all_its_models() {
        for (endpoint, expected) in [
            ("https://openrouter.ai/api/v1", true),
            ("https://eu.openrouter.ai:443/api/v1", true),
            ("https://OpenRouter.ai/api/v1", true),
            ("https://api.together.xyz/v1", false),
            ("https://notopenrouter.ai/v1", false),
            ("https://example.com/openrouter.ai", false),
            ("nonsense", false),
        ] {
            assert_eq!(shares_limits(endpoint), expected, "{endpoint}");
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
