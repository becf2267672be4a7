//! The typed error of a request, independent of any API dialect: why there is no response, or no complete one.
//! Dialects map it to their own format and status. Messages never contain internals (paths, stack traces).

use std::time::Duration;

use thiserror::Error;

/// When to retry after errors that have no better estimate.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(5);

/// What an error repeats of a stranger's text, such as a name or an id: its first 100 characters.
pub(crate) fn shown(text: &str) -> String {
    const MAX_SHOWN_CHARS: usize = 100;
    text.chars().take(MAX_SHOWN_CHARS).collect()
}

/// Classes of errors. The word of each is the metric label, and the `code` clients see unless their dialect
/// defines another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request is invalid or uses a feature this release does not have.
    InvalidRequest,
    /// The conversation is longer than the model's context.
    ContextLengthExceeded,
    /// The head of the request is larger than the limit.
    HeadTooLarge,
    /// The body is in an encoding that is not decoded.
    UnsupportedMediaType,
    /// The body is larger than the limit.
    TooLarge,
    /// The body did not arrive in time.
    BodyTimeout,
    /// A browser page of another origin, a name that is not this machine's, or a change of models that is not the caller's.
    Forbidden,
    /// No key where one is required, or an invalid one.
    InvalidApiKey,
    /// The key does not allow the model.
    ModelForbidden,
    /// The request may only be answered nearer to home than anything that could answer it.
    ZoneDenied,
    /// A provider outside of the cluster did not answer, or not to the end.
    ProviderFailed,
    /// The run of a Pipeline that answers the request failed.
    PipelineFailed,
    /// The key's request quota is used up, or a Budget's limit per minute.
    QuotaExceeded,
    /// A Budget has too little left for the request.
    BudgetExceeded,
    /// No such path.
    UnknownPath,
    /// The path does not support the method.
    MethodNotAllowed,
    /// No deployment or route has the model's name.
    ModelNotFound,
    /// The request log has no request with the id.
    RequestNotFound,
    /// The caller keeps no response with this id.
    ResponseNotFound,
    /// The caller keeps no file with this id.
    FileNotFound,
    /// No step of a run of the caller made this.
    ArtifactNotFound,
    /// The caller has no batch with this id.
    BatchNotFound,
    /// Another request of the caller has this idempotency key.
    IdempotencyKeyReused,
    /// The response that a request continues is not kept.
    PreviousResponseNotFound,
    /// The disk, or the store of responses, has no room for the response.
    StoreFull,
    /// The model exists but is not ready, or needs a person to become ready.
    ModelNotReady,
    /// All groups of the model are full.
    Overloaded,
    /// The memory budget of request bodies is used up.
    GatewayFull,
    /// The engine or its machine was lost.
    EngineLost,
    /// Engines are lost while they prepare the request.
    PoisonRequest,
    /// The engine is connected and has sent nothing for too long.
    EngineSilent,
    /// The deadline of the request passed.
    DeadlineExceeded,
    /// An internal error.
    Internal,
    /// The gateway is shutting down.
    ShuttingDown,
}

impl ErrorKind {
    /// The stable word of the class.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::ContextLengthExceeded => "context_length_exceeded",
            Self::HeadTooLarge => "headers_too_large",
            Self::UnsupportedMediaType => "unsupported_media_type",
            Self::TooLarge => "request_too_large",
            Self::BodyTimeout => "request_timeout",
            Self::Forbidden => "forbidden",
            Self::InvalidApiKey => "invalid_api_key",
            Self::ModelForbidden => "model_forbidden",
            Self::ZoneDenied => "zone_denied",
            Self::ProviderFailed => "provider_failed",
            Self::PipelineFailed => "pipeline_failed",
            Self::QuotaExceeded => "quota_exceeded",
            Self::BudgetExceeded => "budget_exceeded",
            Self::UnknownPath => "unknown_url",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::ModelNotFound => "model_not_found",
            Self::RequestNotFound => "request_not_found",
            Self::ResponseNotFound => "response_not_found",
            Self::FileNotFound => "file_not_found",
            Self::ArtifactNotFound => "artifact_not_found",
            Self::BatchNotFound => "batch_not_found",
            Self::IdempotencyKeyReused => "idempotency_key_reused",
            Self::PreviousResponseNotFound => "previous_response_not_found",
            Self::StoreFull => "store_full",
            Self::ModelNotReady => "model_not_ready",
            Self::Overloaded => "rate_limit_exceeded",
            Self::GatewayFull => "gateway_full",
            Self::EngineLost => "engine_lost",
            Self::PoisonRequest => "poison_request",
            Self::EngineSilent => "engine_silent",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Internal => "internal_error",
            Self::ShuttingDown => "shutting_down",
        }
    }
}

/// An error.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct GatewayError {
    /// Its class.
    pub kind: ErrorKind,
    /// Message for people: the cause, with the numbers, and the remedy.
    pub message: String,
    /// The field of the request that is wrong.
    pub param: Option<String>,
    /// When to retry.
    pub retry_after: Option<Duration>,
}

impl GatewayError {
    /// An error without a field and without a retry time.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None, retry_after: None }
    }

    /// An error about a field of the request.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(ErrorKind::InvalidRequest, message) }
    }

    /// The same error, to be retried after `wait`.
    pub fn retry_after(self, wait: Duration) -> Self {
        Self { retry_after: Some(wait), ..self }
    }
}
