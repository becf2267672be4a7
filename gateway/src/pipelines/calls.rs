//! Does one action: asks a model by the gateway's own routes, as the holder of the run's key, or calls an endpoint, within the
//! zone of the Pipeline. Not here: when, and how often, see `step`.

use std::time::Duration;

use axum::body::Body;
use axum::http::{Extensions, HeaderMap, HeaderValue, StatusCode, header};
use futures::StreamExt as _;
use http_body_util::{BodyExt as _, Limited};
use jiff::Timestamp;
use reqwest::Method;
use russet_crds::names;
use serde_json::Value;

use super::action::{Action, HttpAction};
use super::record::{RunRecord, UsageRecord};
use super::references::MAX_TEXT_BYTES;
use super::{PipelineContext, RunnerLease};
use crate::audit::DepartedRequest;
use crate::error::shown;
use crate::keys::{Caller, LOOPBACK};
use crate::offline::{OfflineRequest, retry_after};
use crate::request_id::RequestId;
use crate::request_log::RequestOutcome;
use crate::routes::LABELS;
use crate::serving::InboxRequest;
use crate::zone_client::url_in;
use crate::zones::ZoneLimit;

/// Longest response of a model that is read: a text of the longest in JSON, or vectors.
const MAX_RESPONSE_BYTES: usize = 4 * MAX_TEXT_BYTES;
/// How long a busy endpoint is left alone that does not say how long.
const BUSY_WAIT: Duration = Duration::from_secs(5);

/// Why an action was not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CallError {
    /// Another try would end the same way.
    Failed(String),
    /// It was done, and its answer cannot be kept.
    Unkept(String),
    /// Another try may help.
    Again(String),
    /// It was not even tried: whoever was asked has too much to do.
    Busy(Duration, String),
}

/// What an action made.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Reply {
    pub(super) text: ReplyText,
    pub(super) usage: UsageRecord,
}

/// A text, or JSON that needs no schema.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ReplyText {
    Text(String),
    Json(Value),
}

/// Which action of which run.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) context: &'a PipelineContext,
    pub(super) run: &'a RunRecord,
    /// The name of the step.
    pub(super) step: &'a str,
    /// What is sent as `Idempotency-Key`.
    pub(super) key: &'a str,
    /// Whether the run is still this gateway's.
    pub(super) lease: &'a RunnerLease,
}

impl Call<'_> {
    /// Does it once.
    pub(super) async fn make(self, action: &Action) -> Result<Reply, CallError> {
        match action {
            Action::Chat(body) => self.chat(body).await,
            Action::Embed(body) => self.embed(body).await,
            Action::Http(http) => self.http(http).await,
        }
    }

    async fn chat(self, body: &Value) -> Result<Reply, CallError> {
        let (response, usage) = self.ask("/v1/chat/completions", body).await?;
        match response["choices"][0]["message"]["content"].as_str() {
            Some(text) if !text.is_empty() => Ok(Reply { text: ReplyText::Text(text.to_owned()), usage }),
            _ => Err(CallError::Again("the model wrote no text".to_owned())),
        }
    }

    async fn embed(self, body: &Value) -> Result<Reply, CallError> {
        let (mut response, mut usage) = self.ask("/v1/embeddings", body).await?;
        if usage == UsageRecord::default() {
            usage.prompt_tokens = response["usage"]["prompt_tokens"].as_u64().unwrap_or_default();
        }
        let data = response["data"].as_array_mut().map(std::mem::take).unwrap_or_default();
        let vectors = data.into_iter().map(|mut one| one["embedding"].take()).collect();
        Ok(Reply { text: ReplyText::Json(Value::Array(vectors)), usage })
    }

    /// Sends a request to a route of the gateway; its response, and what it used.
    async fn ask(self, path: &str, body: &Value) -> Result<(Value, UsageRecord), CallError> {
        let offline = &self.context.offline;
        let caller = self.caller()?;
        let RunRecord { namespace, pipeline_name, .. } = self.run;
        let outcome = RequestOutcome::of_step(&format!("{namespace}/{pipeline_name}/{}", self.step));
        let mut extensions = Extensions::new();
        extensions.insert(InboxRequest);
        extensions.insert(outcome.clone());
        let zone = format!("{}={}", names::LABEL_REQUEST_ZONE, self.limit(&caller).zone());
        let labels = HeaderValue::from_str(&zone).unwrap_or_else(|_| HeaderValue::from_static(""));
        let headers = HeaderMap::from_iter([(LABELS, labels)]);
        let id = RequestId::new(&HeaderMap::new());
        let request = OfflineRequest {
            owner: &self.run.owner,
            what: "run",
            id,
            path,
            headers,
            body: body.to_string().into(),
            extensions,
        };
        let response = offline.respond((offline.dialect_of)(path), request).await;
        let (parts, body) = response.into_parts();
        let wait = retry_after(parts.status, &parts.headers);
        let body = read(body).await.map_err(CallError::Again)?;
        let response: Value = serde_json::from_slice(&body).unwrap_or_default();
        if parts.status.is_success() && !outcome.has_failed() {
            return Ok((response, outcome.usage().map(UsageRecord::from).unwrap_or_default()));
        }
        // Not the message itself, which may quote the request: statuses are not for what models read and write.
        let code = || response["error"]["code"].as_str().unwrap_or("it gives no reason").to_owned();
        let said = outcome.failure().unwrap_or_else(code);
        let message = format!("the gateway answers {}: {said}", parts.status.as_u16());
        Err(match wait {
            Some(wait) => CallError::Busy(wait, message),
            None if parts.status.is_client_error() => CallError::Failed(message),
            None => CallError::Again(message),
        })
    }

    /// Who runs it, if that is still allowed.
    fn caller(self) -> Result<Caller, CallError> {
        let keyring = self.context.offline.keyring.borrow();
        let owner = &self.run.owner;
        if owner == LOOPBACK && keyring.object_count > 0 {
            let message =
                "there are AccessKeys now, and the run names none; create another one with spec.keyRef";
            return Err(CallError::Failed(message.to_owned()));
        }
        let gone = || CallError::Failed(format!("AccessKey {owner} is gone, disabled or expired"));
        keyring.caller_of(owner, Timestamp::now()).ok_or_else(gone)
    }

    /// How far from home a call of the run may go.
    fn limit(self, caller: &Caller) -> ZoneLimit {
        let RunRecord { namespace, pipeline_name, pipeline, .. } = self.run;
        let by = format!("spec.zone of Pipeline {namespace}/{pipeline_name}");
        ZoneLimit::of_route(pipeline.zone, by)
            .narrowed(self.context.table.borrow().namespace_limit(namespace))
            .narrowed(caller.facts().zone_limit())
    }

    async fn http(self, http: &HttpAction) -> Result<Reply, CallError> {
        let namespace = &self.run.namespace;
        let name = format!("HTTPEndpoint {namespace}/{}", http.endpoint);
        let failed = |message: String| CallError::Failed(format!("{name}: {message}"));
        let caller = self.caller()?;
        let endpoint = self.context.endpoint(namespace, &http.endpoint);
        let Some(endpoint) = endpoint.filter(|endpoint| http.is_at(endpoint)) else {
            return Err(failed(format!("it does not list {} any more", http.url)));
        };
        let cleared = self.limit(&caller).clear(http, endpoint.spec.zone, &name);
        let (http, zone, limit) = cleared.map_err(|error| CallError::Failed(error.message))?.into_parts();
        let client = self.context.clients.of(zone).map_err(failed)?;
        let url = url_in(&http.url, zone).map_err(failed)?;
        let method: Method = http.method.parse().map_err(|_| failed("it has no such method".to_owned()))?;
        let mut call = client.request(method, url).header("idempotency-key", self.key);
        for (header, value) in &http.headers {
            call = call.header(header, value);
        }
        if let Some(secret) = &endpoint.spec.secret_ref {
            let again = |message| CallError::Again(format!("{name}: {message}"));
            call =
                call.bearer_auth(self.context.secrets.token(namespace, &secret.name).await.map_err(again)?);
        }
        if let Some(body) = &http.body {
            call = call.body(body.clone());
        }
        if let Some(audit) = &self.context.audit {
            let departed = DepartedRequest {
                request: self.key.to_owned(),
                key: Some(self.run.owner.clone()).filter(|owner| owner.contains('/')),
                provider: name.clone(),
                model: String::new(),
                zone: zone.to_string(),
                limit: limit.zone().to_string(),
                limit_by: shown(limit.by()),
            };
            // Before a byte of it leaves.
            audit.departed(departed).await.map_err(CallError::Again)?;
        }
        let again = |message: String| CallError::Again(format!("{name}: {message}"));
        let response = call.send().await;
        let response = response
            .map_err(|error| again(russet_telemetry::errors::chain(&error.without_url()).to_string()))?;
        let (status, headers) = (response.status(), response.headers().clone());
        let body = collect(response).await.map_err(again)?;
        let Some(body) = body else {
            let message = format!("{name}: its answer has more than {} MiB", MAX_TEXT_BYTES >> 20);
            return Err(if status.is_success() {
                CallError::Unkept(message)
            } else {
                CallError::Failed(message)
            });
        };
        if status.is_success() {
            return Ok(Reply { text: reply_text(&headers, body), usage: UsageRecord::default() });
        }
        // Not what it answers: nobody knows whether that is for everybody who reads statuses.
        let message = format!("{name} answers {}", status.as_u16());
        Err(match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                CallError::Busy(retry_after(status, &headers).unwrap_or(BUSY_WAIT), message)
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                if let Some(secret) = &endpoint.spec.secret_ref {
                    self.context.secrets.forget(namespace, &secret.name);
                }
                CallError::Again(message)
            }
            StatusCode::REQUEST_TIMEOUT | StatusCode::CONFLICT => CallError::Again(message),
            status if status.is_server_error() => CallError::Again(message),
            status if status.is_redirection() => {
                CallError::Failed(format!("{message}; redirects are not followed"))
            }
            _ => CallError::Failed(message),
        })
    }
}

/// What an endpoint answered: JSON where it says so and that is true.
fn reply_text(headers: &HeaderMap, body: String) -> ReplyText {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let is_json = kind.split(';').next().is_some_and(|kind| kind.trim().ends_with("json"));
    match serde_json::from_str(&body) {
        Ok(json) if is_json => ReplyText::Json(json),
        _ => ReplyText::Text(body),
    }
}

async fn read(body: Body) -> Result<Vec<u8>, String> {
    let read = Limited::new(body, MAX_RESPONSE_BYTES).collect().await;
    let bytes = read.map_err(|error| format!("the answer broke off, or is too long: {error}"))?;
    Ok(bytes.to_bytes().to_vec())
}

/// The body of an endpoint's response as text; `None` where it is too long.
async fn collect(response: reqwest::Response) -> Result<Option<String>, String> {
    let mut bytes = Vec::new();
    let mut body = response.bytes_stream();
    while let Some(piece) = body.next().await {
        let piece = piece.map_err(|error| format!("its answer broke off: {}", error.without_url()))?;
        if bytes.len() + piece.len() > MAX_TEXT_BYTES {
            return Ok(None);
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}
