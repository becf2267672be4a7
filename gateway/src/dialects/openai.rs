//! OpenAI's chat completions and model list. Unsupported features are rejected by name, so that no client
//! believes it got them; fields that change no answer are ignored and listed in a header.

mod request;
mod response;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use futures::StreamExt as _;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Dialect, discard};
use crate::dispatch::{Deadline, Dispatcher, ResponseChunk};
use crate::error::{ErrorKind, GatewayError};
use crate::keys::{Caller, Quota};
use crate::middleware::RequestId;
use crate::routes::{Deployment, DeploymentState, Resolved, RoutingTable};
use request::ChatRequest;
use response::ResponseWriter;

/// This dialect.
pub(super) const DIALECT: Dialect = Dialect {
    name: "openai",
    owns: |path| path.starts_with("/v1/"),
    routes: |core| {
        Router::new()
            .route("/v1/chat/completions", post(chat))
            .route("/v1/models", get(models))
            // Names may contain slashes: `namespace/name`, `meta-llama/Llama-3`.
            .route("/v1/models/{*id}", get(model))
            .with_state(core)
    },
    error_response,
};

/// Header with the names of fields that were recognised and ignored.
const IGNORED: HeaderName = HeaderName::from_static("x-russet-ignored-parameters");

async fn chat(
    State(core): State<Arc<Dispatcher>>,
    Extension(id): Extension<RequestId>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Response {
    let quota = core.admit(&caller);
    let answered = match quota.as_ref().and_then(over_quota) {
        None => complete_chat(core, &id, caller, request).await,
        Some(refusal) => {
            core.rejected(&refusal);
            discard(request.into_body()).await;
            Err(refusal)
        }
    };
    let mut response = answered.unwrap_or_else(|refusal| error_response(&refusal));
    if let Some(quota) = quota {
        set_quota_headers(&quota, response.headers_mut());
    }
    response
}

fn over_quota(quota: &Quota) -> Option<GatewayError> {
    let wait = quota.refused?;
    let message = format!(
        "the key's quota of {} requests a minute is used up; there is room for the next one in {}",
        quota.limit,
        openai_duration(wait)
    );
    Some(GatewayError::new(ErrorKind::QuotaExceeded, message).retry_after(wait))
}

/// Sets the quota headers in OpenAI's format.
fn set_quota_headers(quota: &Quota, headers: &mut HeaderMap) {
    let Quota { limit, remaining, reset, .. } = quota;
    headers.insert("x-ratelimit-limit-requests", HeaderValue::from(*limit));
    headers.insert("x-ratelimit-remaining-requests", HeaderValue::from(*remaining));
    if let Ok(reset) = HeaderValue::from_str(&openai_duration(*reset)) {
        headers.insert("x-ratelimit-reset-requests", reset);
    }
}

/// A duration in OpenAI's format: `120ms`, `8.64s`, `1m0s`.
fn openai_duration(duration: Duration) -> String {
    // Rounded up: a client that waits this long has waited long enough.
    let ms = duration.as_nanos().div_ceil(1_000_000);
    match ms {
        0..1_000 => format!("{ms}ms"),
        1_000..60_000 => format!("{}s", ms as f64 / 1000.0),
        _ => {
            let seconds = ms.div_ceil(1000);
            format!("{}m{}s", seconds / 60, seconds % 60)
        }
    }
}

async fn complete_chat(
    core: Arc<Dispatcher>,
    id: &RequestId,
    caller: Caller,
    request: Request,
) -> Result<Response, GatewayError> {
    // The time the body takes to arrive counts towards the request's timeout.
    let arrived = Instant::now();
    let (parts, body) = request.into_parts();
    let terms = caller.limits();
    let deadline = match terms.timeout(&parts.headers) {
        Ok(patience) => patience.map(|patience| Deadline::new(arrived, patience)),
        Err(refusal) => {
            discard(body).await;
            return Err(refusal);
        }
    };
    let read = core.bodies.read(&parts.headers, body, &caller).await;
    let (body, held) = read.inspect_err(|refusal| core.rejected(refusal))?;
    let ChatRequest { model, request, streamed, include_usage, service_tier, ignored } =
        ChatRequest::parse(&body, id.unique.clone(), &terms)?;
    drop(body);
    tracing::debug!(request_id = id.shown, engine_id = id.unique, model, streamed, "chat");
    let chat_id = format!("chatcmpl-{}", id.unique);
    let voice =
        ResponseWriter { id: chat_id, created: now(), model: model.clone(), include_usage, service_tier };
    let mut response = if streamed {
        let items = core.stream(model, request, deadline, held, caller).await?;
        let bytes = items.map(move |item| Ok::<_, Infallible>(voice.event(item)));
        let headers = [
            (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
            (header::CACHE_CONTROL, "no-cache"),
            // Proxies that buffer a stream would defeat it.
            (HeaderName::from_static("x-accel-buffering"), "no"),
        ];
        (headers, Body::from_stream(bytes)).into_response()
    } else {
        let mut answer = core.respond(&model, request, deadline, held, &caller).await?;
        let mut text = String::new();
        loop {
            match answer.next().await {
                Some(Ok(ResponseChunk::Text(more))) => text.push_str(&more),
                Some(Ok(ResponseChunk::End { reason, usage })) => {
                    break Json(voice.body(&text, reason, usage)).into_response();
                }
                Some(Err(refusal)) => return Err(refusal),
                None => {
                    return Err(GatewayError::new(
                        ErrorKind::Internal,
                        "the answer ended without a finish reason",
                    ));
                }
            }
        }
    };
    if let Ok(value) = HeaderValue::from_str(&ignored.join(","))
        && !ignored.is_empty()
    {
        response.headers_mut().insert(IGNORED, value);
    }
    Ok(response)
}

/// Answered from memory: clients block their user interface on it.
async fn models(State(core): State<Arc<Dispatcher>>, Extension(caller): Extension<Caller>) -> Response {
    let table = core.table();
    let models = table.models(caller.scope());
    let data: Vec<Value> = models.into_iter().map(|(id, deployments)| describe(&id, &deployments)).collect();
    Json(json!({"object": "list", "data": data})).into_response()
}

async fn model(
    State(core): State<Arc<Dispatcher>>,
    Extension(caller): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let Ok(Path(id)) = id else {
        return error_response(&GatewayError::field("model", "the model's name in the path is not UTF-8"));
    };
    let table: Arc<RoutingTable> = core.table();
    match table.resolve(&id, caller.scope()) {
        Resolved::Deployments(deployments) => Json(describe(&id, &deployments)).into_response(),
        _ => error_response(&core.unknown(&id, &caller)),
    }
}

fn describe(id: &str, deployments: &[&Deployment]) -> Value {
    let ready = deployments.iter().any(|deployment| !deployment.endpoints.is_empty());
    let message = match deployments.first().map(|deployment| &deployment.state) {
        Some(DeploymentState::Working(message) | DeploymentState::Halted(message)) if !ready => {
            message.as_str()
        }
        _ => "",
    };
    // The context length that every target has: a conversation of that length fits on any of them.
    let context = deployments.iter().map(|deployment| deployment.context_tokens).min().unwrap_or(0);
    json!({
        "id": id,
        "object": "model",
        "created": deployments.first().map_or(0, |deployment| deployment.created),
        "owned_by": "russet",
        // Three spellings, because clients read different ones.
        "context_length": context,
        "max_model_len": context,
        "max_input_tokens": context,
        "russet": {
            "deployments": deployments.iter().map(|deployment| deployment.full_name()).collect::<Vec<_>>(),
            "ready": ready,
            "message": message,
        },
    })
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// HTTP status and `type` of each error class; clients match on them and on `code`.
fn status_and_type(kind: ErrorKind) -> (StatusCode, &'static str) {
    const CALLER: &str = "invalid_request_error";
    const OURS: &str = "server_error";
    match kind {
        ErrorKind::InvalidRequest => (StatusCode::BAD_REQUEST, CALLER),
        ErrorKind::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, CALLER),
        ErrorKind::BodyTimeout => (StatusCode::REQUEST_TIMEOUT, CALLER),
        ErrorKind::Forbidden => (StatusCode::FORBIDDEN, "permission_error"),
        ErrorKind::InvalidApiKey => (StatusCode::UNAUTHORIZED, CALLER),
        ErrorKind::ModelForbidden => (StatusCode::FORBIDDEN, CALLER),
        // The exhausted resource: OpenAI says `requests` or `tokens`.
        ErrorKind::QuotaExceeded => (StatusCode::TOO_MANY_REQUESTS, "requests"),
        ErrorKind::UnknownPath | ErrorKind::ModelNotFound => (StatusCode::NOT_FOUND, CALLER),
        ErrorKind::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, CALLER),
        ErrorKind::Overloaded => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error"),
        ErrorKind::ModelNotReady
        | ErrorKind::GatewayFull
        | ErrorKind::EngineLost
        | ErrorKind::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, OURS),
        ErrorKind::EngineSilent | ErrorKind::DeadlineExceeded => (StatusCode::GATEWAY_TIMEOUT, OURS),
        ErrorKind::Internal => (StatusCode::INTERNAL_SERVER_ERROR, OURS),
    }
}

/// `{"error": {…}}` in OpenAI's format.
fn error_body(refusal: &GatewayError) -> Value {
    let GatewayError { kind, message, param, retry_after: _ } = refusal;
    let code = match kind {
        // OpenAI leaves the code empty when `param` is enough.
        ErrorKind::InvalidRequest => None,
        // OpenAI's codes for models a key may not use, and for all quotas.
        ErrorKind::ModelForbidden => Some(ErrorKind::ModelNotFound.as_str()),
        ErrorKind::QuotaExceeded => Some(ErrorKind::Overloaded.as_str()),
        kind => Some(kind.as_str()),
    };
    json!({"error": {"message": message, "type": status_and_type(*kind).1, "param": param, "code": code}})
}

fn error_response(refusal: &GatewayError) -> Response {
    let (status, _) = status_and_type(refusal.kind);
    let mut response = (status, Json(error_body(refusal))).into_response();
    let headers = response.headers_mut();
    if refusal.kind == ErrorKind::InvalidApiKey {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    match refusal.retry_after {
        Some(wait) => {
            let ms = u64::try_from(wait.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(ms.div_ceil(1000).max(1)));
            // The SDKs prefer the header with milliseconds.
            headers.insert("retry-after-ms", HeaderValue::from(ms));
        }
        // The SDKs retry every 5xx unless told otherwise; here that would only delay the failure.
        None if status.is_server_error() => {
            headers.insert(HeaderName::from_static("x-should-retry"), HeaderValue::from_static("false"));
        }
        None => {}
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_as_openai_writes_them() {
        for (ms, expected) in [
            (0, "0ms"),
            (120, "120ms"),
            (1_000, "1s"),
            (8_640, "8.64s"),
            (59_999, "59.999s"),
            (60_000, "1m0s"),
            (61_500, "1m2s"),
            (119_500, "2m0s"),
        ] {
            assert_eq!(openai_duration(Duration::from_millis(ms)), expected);
        }
        assert_eq!(openai_duration(Duration::from_nanos(1)), "1ms");
    }
}
