//! Why a request gets no answer, or no complete one, free of any dialect. Dialects give a refusal
//! their own shape and status; nothing internal (paths, stack traces) is ever put into the message.

use std::time::Duration;

use thiserror::Error;

/// The classes of refusals; the word of each is the metrics' label, and the `code` clients see unless
/// their dialect has a word of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request is wrong or asks for what this release cannot do.
    InvalidRequest,
    /// The body is larger than the gateway takes.
    TooLarge,
    /// The body did not arrive in time.
    BodyTimeout,
    /// A browser page of another origin, or a name that is not this machine's.
    Forbidden,
    /// No key where one is needed, or one that is not accepted.
    InvalidApiKey,
    /// The key does not open the model.
    ModelForbidden,
    /// The key's quota of requests is used up.
    QuotaExceeded,
    /// No such path.
    UnknownPath,
    /// The path takes other methods.
    MethodNotAllowed,
    /// Nothing answers to the model's name.
    ModelNotFound,
    /// The model exists and does not answer yet, or not without a person's help.
    ModelNotReady,
    /// Every group of the model is full.
    Overloaded,
    /// The gateway holds as many bytes of requests as it may.
    GatewayFull,
    /// The engine or its machine was lost.
    EngineLost,
    /// The engine is connected and has said nothing for too long.
    EngineSilent,
    /// The deadline of the request passed.
    DeadlineExceeded,
    /// A fault of ours.
    Internal,
    /// The gateway is going down.
    ShuttingDown,
}

impl ErrorKind {
    /// The stable word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::TooLarge => "request_too_large",
            Self::BodyTimeout => "request_timeout",
            Self::Forbidden => "forbidden",
            Self::InvalidApiKey => "invalid_api_key",
            Self::ModelForbidden => "model_forbidden",
            Self::QuotaExceeded => "quota_exceeded",
            Self::UnknownPath => "unknown_url",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::ModelNotFound => "model_not_found",
            Self::ModelNotReady => "model_not_ready",
            Self::Overloaded => "rate_limit_exceeded",
            Self::GatewayFull => "gateway_full",
            Self::EngineLost => "engine_lost",
            Self::EngineSilent => "engine_silent",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Internal => "internal_error",
            Self::ShuttingDown => "shutting_down",
        }
    }
}

/// One refusal.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct GatewayError {
    /// Its class.
    pub kind: ErrorKind,
    /// For a person: what, with the numbers, and what to do.
    pub message: String,
    /// The field of the request that is at fault.
    pub param: Option<String>,
    /// When to try again.
    pub retry_after: Option<Duration>,
}

impl GatewayError {
    /// A refusal that names no field and no time.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None, retry_after: None }
    }

    /// A field of the request that cannot be taken.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(ErrorKind::InvalidRequest, message) }
    }

    /// The same refusal, to be tried again after `wait`.
    pub fn retry_after(self, wait: Duration) -> Self {
        Self { retry_after: Some(wait), ..self }
    }
}
