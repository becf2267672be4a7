//! The JSON of a response and its items, in progress or ended.

use russet_wire::event::{FinishReason, Logprobs, Usage};
use serde::Serialize;

use super::output::{Item, ItemContent, ItemStatus, Output};
use super::settings::Settings;
use crate::dialects::openai::error::INSUFFICIENT_QUOTA;
use crate::dialects::token_logprobs::TokenBody;
use crate::error::{ErrorKind, GatewayError};

/// How far a response is.
#[derive(Clone, Copy, Debug)]
pub(super) enum ResponseState<'a> {
    /// It runs in the background, and no engine generates it yet.
    Queued,
    InProgress,
    /// When, in seconds since 1970, why, and the tokens it took.
    Finished(u64, FinishReason, Usage),
    Failed(&'a GatewayError),
}

/// A response.
#[derive(Serialize)]
pub(super) struct ResponseBody<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    completed_at: Option<u64>,
    status: &'static str,
    incomplete_details: Option<IncompleteBody>,
    error: Option<ErrorBody>,
    output: Vec<ItemBody<'a>>,
    usage: Option<UsageBody>,
    #[serde(flatten)]
    settings: &'a Settings,
}

#[derive(Serialize)]
struct IncompleteBody {
    reason: &'static str,
}

#[derive(Serialize)]
struct ErrorBody {
    code: &'static str,
    message: String,
}

/// The tokens of a response.
#[derive(Serialize)]
pub(super) struct UsageBody {
    input_tokens: u32,
    input_tokens_details: InputDetails,
    output_tokens: u32,
    output_tokens_details: OutputDetails,
    total_tokens: u64,
}

#[derive(Serialize)]
struct InputDetails {
    cached_tokens: u32,
    /// Tokens of which OpenAI bills the caching; here none is billed.
    cache_write_tokens: u32,
}

#[derive(Serialize)]
struct OutputDetails {
    reasoning_tokens: u32,
}

/// An item.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ItemBody<'a> {
    Reasoning {
        id: &'a str,
        status: &'static str,
        summary: Vec<PartBody<'a>>,
    },
    Message {
        id: &'a str,
        status: &'static str,
        role: &'static str,
        content: Vec<PartBody<'a>>,
    },
    FunctionCall {
        id: &'a str,
        status: &'static str,
        call_id: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<&'a str>,
        name: &'a str,
        arguments: &'a str,
    },
    CustomToolCall {
        id: &'a str,
        status: &'static str,
        call_id: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<&'a str>,
        name: &'a str,
        input: &'a str,
    },
}

/// A part of an item.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum PartBody<'a> {
    SummaryText { text: &'a str },
    OutputText { text: &'a str, annotations: [(); 0], logprobs: Vec<TokenBody> },
}

/// Log-probabilities of tokens.
pub(super) fn logprobs_body(logprobs: &[Logprobs]) -> Vec<TokenBody> {
    TokenBody::list(logprobs)
}

impl<'a> PartBody<'a> {
    /// The only part of thinking or of a message.
    pub(super) fn new(content: &'a ItemContent) -> Option<Self> {
        match content {
            // Clients of other servers read summaries, and not all of them read thinking itself.
            ItemContent::Reasoning { text } => Some(Self::SummaryText { text }),
            ItemContent::Message { text, logprobs } => {
                Some(Self::OutputText { text, annotations: [], logprobs: logprobs_body(logprobs) })
            }
            ItemContent::FunctionCall { .. } | ItemContent::CustomCall { .. } => None,
        }
    }
}

impl<'a> From<&'a Item> for ItemBody<'a> {
    fn from(item: &'a Item) -> Self {
        let Item { id, status, content } = item;
        // An item that has just begun has no part yet.
        let parts = || -> Vec<PartBody<'a>> {
            let part = PartBody::new(content).filter(|_| *status != ItemStatus::InProgress);
            part.into_iter().collect()
        };
        let status = match status {
            ItemStatus::InProgress => "in_progress",
            ItemStatus::Completed => "completed",
            ItemStatus::Incomplete => "incomplete",
        };
        match content {
            ItemContent::Reasoning { .. } => Self::Reasoning { id, status, summary: parts() },
            ItemContent::Message { .. } => Self::Message { id, status, role: "assistant", content: parts() },
            ItemContent::FunctionCall { call_id, namespace, name, arguments } => {
                Self::FunctionCall { id, status, call_id, namespace: namespace.as_deref(), name, arguments }
            }
            ItemContent::CustomCall { call_id, namespace, name, input } => {
                Self::CustomToolCall { id, status, call_id, namespace: namespace.as_deref(), name, input }
            }
        }
    }
}

impl UsageBody {
    /// So many tokens, of which so many told thinking.
    pub(super) fn new(usage: Usage, reasoning_tokens: u32) -> Self {
        let Usage { prompt_tokens, completion_tokens, cached_tokens } = usage;
        Self {
            input_tokens: prompt_tokens,
            input_tokens_details: InputDetails { cached_tokens, cache_write_tokens: 0 },
            output_tokens: completion_tokens,
            output_tokens_details: OutputDetails {
                reasoning_tokens: reasoning_tokens.min(completion_tokens),
            },
            total_tokens: u64::from(prompt_tokens) + u64::from(completion_tokens),
        }
    }
}

/// The words of OpenAI for errors that are the server's.
pub(super) const SERVER_ERROR: &str = "server_error";

impl ErrorBody {
    /// An error in the words that OpenAI's SDKs and Codex know: Codex retries all but a prompt that is invalid or too long.
    fn new(error: &GatewayError) -> Self {
        let code = match error.kind {
            ErrorKind::ContextLengthExceeded => ErrorKind::ContextLengthExceeded.as_str(),
            ErrorKind::Overloaded | ErrorKind::QuotaExceeded => ErrorKind::Overloaded.as_str(),
            ErrorKind::InvalidRequest => "invalid_prompt",
            // Codex knows it too, and gives up.
            ErrorKind::BudgetExceeded => INSUFFICIENT_QUOTA,
            _ => SERVER_ERROR,
        };
        let mut message = error.message.clone();
        if let Some(wait) = error.retry_after {
            // Codex reads the time from the text.
            message.push_str(&format!("; try again in {:.3}s", wait.as_secs_f64()));
        }
        Self { code, message }
    }
}

impl<'a> ResponseBody<'a> {
    /// A response that is so far.
    pub(super) fn new(
        id: &'a str,
        created_at: u64,
        settings: &'a Settings,
        output: &'a Output,
        state: ResponseState<'a>,
    ) -> Self {
        let mut body = Self {
            id,
            object: "response",
            created_at,
            completed_at: None,
            status: "in_progress",
            incomplete_details: None,
            error: None,
            output: output.items().iter().map(ItemBody::from).collect(),
            usage: None,
            settings,
        };
        match state {
            ResponseState::Queued => body.status = "queued",
            ResponseState::InProgress => {}
            ResponseState::Finished(at, reason, usage) => {
                body.usage = Some(UsageBody::new(usage, output.reasoning_tokens()));
                match reason {
                    FinishReason::Stop | FinishReason::StopString(_) => {
                        body.status = "completed";
                        body.completed_at = Some(at);
                    }
                    FinishReason::Length => {
                        body.status = "incomplete";
                        body.incomplete_details = Some(IncompleteBody { reason: "max_output_tokens" });
                    }
                    FinishReason::Cancelled => body.status = "cancelled",
                }
            }
            ResponseState::Failed(error) => {
                body.status = "failed";
                body.error = Some(ErrorBody::new(error));
            }
        }
        body
    }

    /// How far it is, in OpenAI's word.
    pub(super) fn status(&self) -> &'static str {
        self.status
    }
}
