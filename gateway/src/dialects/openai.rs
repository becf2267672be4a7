//! OpenAI's chat completions and model list. What this release cannot do is refused by name, so that
//! no client believes it got it; what changes no answer is ignored and listed in a header.

mod answer;
mod request;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use futures::StreamExt as _;
use serde_json::{Value, json};

use super::{Dialect, read_body};
use crate::guard::RequestId;
use crate::refusal::{Kind, Refusal};
use crate::routes::{Deployment, Resolved, State as DeploymentState, Table};
use crate::stream::{Core, Piece};
use answer::Voice;
use request::Chat;

/// This dialect.
pub(super) const DIALECT: Dialect = Dialect {
    name: "openai",
    owns: |path| path.starts_with("/v1/"),
    routes: |core| {
        Router::new()
            .route("/v1/chat/completions", post(chat))
            .route("/v1/models", get(models))
            // Names may hold slashes: `namespace/name`, `meta-llama/Llama-3`.
            .route("/v1/models/{*id}", get(model))
            .with_state(core)
    },
    refuse,
};

/// Names of fields that were understood and change nothing here.
const IGNORED: HeaderName = HeaderName::from_static("x-russet-ignored-parameters");

async fn chat(
    State(core): State<Arc<Core>>,
    Extension(id): Extension<RequestId>,
    request: Request,
) -> Response {
    match answer_chat(core, &id, request).await {
        Ok(response) => response,
        Err(refusal) => refuse(&refusal),
    }
}

async fn answer_chat(core: Arc<Core>, id: &RequestId, request: Request) -> Result<Response, Refusal> {
    let (parts, body) = request.into_parts();
    let body = read_body(&parts.headers, body).await?;
    let Chat { model, request, streamed, include_usage, ignored } = Chat::parse(&body, id.unique.clone())?;
    drop(body);
    tracing::debug!(request_id = id.shown, engine_id = id.unique, model, streamed, "chat");
    let voice =
        Voice { id: format!("chatcmpl-{}", id.unique), created: now(), model: model.clone(), include_usage };
    let mut response = if streamed {
        let items = core.stream(model, request).await?;
        let bytes = items.map(move |item| Ok::<_, Infallible>(voice.say(item)));
        let headers = [
            (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
            (header::CACHE_CONTROL, "no-cache"),
            // Proxies that collect a stream before they pass it on would undo it.
            (HeaderName::from_static("x-accel-buffering"), "no"),
        ];
        (headers, Body::from_stream(bytes)).into_response()
    } else {
        let mut answer = core.answer(&model, request).await?;
        let mut text = String::new();
        loop {
            match answer.next().await {
                Some(Ok(Piece::Text(more))) => text.push_str(&more),
                Some(Ok(Piece::End { reason, usage })) => {
                    break Json(voice.whole(&text, reason, usage)).into_response();
                }
                Some(Err(refusal)) => return Err(refusal),
                None => return Err(Refusal::new(Kind::Internal, "the answer ended without a finish reason")),
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

/// Answered from memory: clients block their windows on it.
async fn models(State(core): State<Arc<Core>>) -> Response {
    let table = core.table();
    let data: Vec<Value> =
        table.models().into_iter().map(|(id, deployments)| describe(&id, &deployments)).collect();
    Json(json!({"object": "list", "data": data})).into_response()
}

async fn model(State(core): State<Arc<Core>>, id: Result<Path<String>, PathRejection>) -> Response {
    let Ok(Path(id)) = id else {
        return refuse(&Refusal::field("model", "the model's name in the path is not UTF-8"));
    };
    let table: Arc<Table> = core.table();
    match table.resolve(&id) {
        Resolved::Deployments(deployments) => Json(describe(&id, &deployments)).into_response(),
        _ => refuse(&core.unknown(&id)),
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
    // The room every target has: a conversation that long fits wherever it lands.
    let context = deployments.iter().map(|deployment| deployment.context_tokens).min().unwrap_or(0);
    json!({
        "id": id,
        "object": "model",
        "created": deployments.first().map_or(0, |deployment| deployment.created),
        "owned_by": "russet",
        // Three spellings, because clients look for different ones.
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

/// Status and `type` of each class; clients match on them and on `code`.
fn class(kind: Kind) -> (StatusCode, &'static str) {
    const CALLER: &str = "invalid_request_error";
    const OURS: &str = "server_error";
    match kind {
        Kind::InvalidRequest => (StatusCode::BAD_REQUEST, CALLER),
        Kind::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, CALLER),
        Kind::BodyTimeout => (StatusCode::REQUEST_TIMEOUT, CALLER),
        Kind::Forbidden => (StatusCode::FORBIDDEN, "permission_error"),
        Kind::UnknownPath | Kind::ModelNotFound => (StatusCode::NOT_FOUND, CALLER),
        Kind::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, CALLER),
        Kind::Overloaded => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error"),
        Kind::ModelNotReady | Kind::EngineLost | Kind::ShuttingDown => {
            (StatusCode::SERVICE_UNAVAILABLE, OURS)
        }
        Kind::EngineSilent => (StatusCode::GATEWAY_TIMEOUT, OURS),
        Kind::Internal => (StatusCode::INTERNAL_SERVER_ERROR, OURS),
    }
}

/// `{"error": {…}}` as OpenAI writes it.
fn error_body(refusal: &Refusal) -> Value {
    let Refusal { kind, message, param, retry_after: _ } = refusal;
    // OpenAI leaves the code empty when `param` says it all.
    let code = (*kind != Kind::InvalidRequest).then_some(kind.as_str());
    json!({"error": {"message": message, "type": class(*kind).1, "param": param, "code": code}})
}

fn refuse(refusal: &Refusal) -> Response {
    let (status, _) = class(refusal.kind);
    let mut response = (status, Json(error_body(refusal))).into_response();
    let headers = response.headers_mut();
    match refusal.retry_after {
        Some(wait) => {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(wait.as_secs().max(1)));
        }
        // The SDKs repeat every 5xx unless told otherwise; here it would only take longer to fail.
        None if status.is_server_error() => {
            headers.insert(HeaderName::from_static("x-should-retry"), HeaderValue::from_static("false"));
        }
        None => {}
    }
    response
}
