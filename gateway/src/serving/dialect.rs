//! The seam between `serving` and an API dialect: what a dialect parses and formats, and nothing else.

use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::HeaderMap;
use axum::response::Response;
use bytes::Bytes;
use futures::Stream;
use russet_wire::event::{Delta, FinishReason, PromptToken, Usage};
use russet_wire::request::GenerationRequest;

use super::api_state::ApiState;
use super::kept_responses::OwnResponses;
use crate::background::EventLog;
use crate::batches::FormatResult;
use crate::error::GatewayError;
use crate::json_body::JsonBody;
use crate::keys::Quota;
use crate::request_defaults::LeftOut;
use crate::request_id::RequestId;
use crate::request_limits::RequestLimits;
use crate::response_store::FilePurpose;

/// One API dialect.
pub(crate) struct Dialect {
    /// Its name, for logs.
    pub(crate) name: &'static str,
    /// Paths that begin with one of these belong to it: errors on unknown ones have its format too.
    pub(crate) prefixes: &'static [&'static str],
    /// Its routes.
    pub(crate) routes: fn() -> Router<Arc<ApiState>>,
    /// Formats the error of the request with this id.
    pub(crate) error_response: fn(&GatewayError, &RequestId) -> Response,
    /// Sets the headers that report the caller's quota.
    pub(crate) set_quota_headers: fn(&Quota, &mut HeaderMap),
    /// Its batches, if it has any.
    pub(crate) batches: Option<BatchDialect>,
}

/// What a dialect makes of batches.
pub(crate) struct BatchDialect {
    /// Most requests of one.
    pub(crate) max_lines: u64,
    /// What the files of their results are for.
    pub(crate) result_purpose: FilePurpose,
    /// Writes what became of a request.
    pub(crate) format: FormatResult,
}

impl Dialect {
    /// The length of the longest prefix of `path` that belongs to it.
    pub(crate) fn longest_prefix(&self, path: &str) -> Option<usize> {
        let prefixes = self.prefixes.iter().filter(|prefix| path.starts_with(**prefix));
        prefixes.map(|prefix| prefix.len()).max()
    }
}

/// What a dialect knows about a request besides its body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestContext<'a> {
    /// Its id; the request for the engine gets the unique one.
    pub(crate) id: &'a RequestId,
    /// Now, in seconds since 1970.
    pub(crate) unix_seconds: u64,
    /// Limits on the caller's requests.
    pub(crate) limits: RequestLimits,
    /// What the caller keeps, where the gateway keeps responses of this dialect. Reading it may block.
    pub(crate) kept: Option<&'a OwnResponses>,
}

/// Parses a decoded body within the caller's limits.
pub(crate) type ParseRequest<W> =
    fn(body: JsonBody<'_>, context: &RequestContext<'_>) -> Result<ParsedRequest<W>, GatewayError>;

/// A parsed request.
#[derive(Debug)]
pub(crate) struct ParsedRequest<W> {
    /// The model name as the client sent it.
    pub(crate) model: String,
    /// Names of models that take the request where that one cannot, in order.
    pub(crate) fallback_models: Vec<String>,
    /// A request for the engines for each of its prompts. None where the client only wants the model to be ready, or
    /// unloaded with a `keep_alive` of 0: no engine is asked then, and the response is whole.
    pub(crate) requests: Vec<GenerationRequest>,
    /// How long its deployment stays loaded afterwards; `None` where the request does not say it.
    pub(crate) keep_alive: Option<Duration>,
    /// The field that has the prompts, for errors about their length.
    pub(crate) prompt_field: &'static str,
    /// Sampling parameters that it leaves to the deployment.
    pub(crate) left_out: LeftOut,
    /// How many responses to each prompt it asks for, at least one.
    pub(crate) choices: usize,
    /// Whether the response is streamed.
    pub(crate) streamed: bool,
    /// Ignored fields, which a header lists.
    pub(crate) ignored: Vec<String>,
    /// Formats the response.
    pub(crate) writer: W,
}

/// How a response ends: why and with which tokens, or with an error.
pub(crate) type ResponseEnd<'a> = Result<(FinishReason, Usage), &'a GatewayError>;

/// A response that goes on without its client.
pub(crate) struct DetachedResponse {
    /// Takes its events.
    pub(crate) log: EventLog,
    /// What the client gets at once.
    pub(crate) accepted: AcceptedResponse,
}

/// What the client of a response that goes on without it gets at once.
pub(crate) enum AcceptedResponse {
    Whole(Response),
    /// A stream, which has the writer's content type.
    Streamed(Pin<Box<dyn Stream<Item = Bytes> + Send>>),
}

/// Formats one response. Of a streamed one every method returns the next bytes of the body: `start`, any
/// number of `prompt`, `delta` and `keep_alive`, then `finish` or `error`.
pub(crate) trait ResponseWriter: Send + 'static {
    /// `Content-Type` of a streamed response.
    const STREAM_TYPE: &'static str;
    /// Whether the gateway may keep its responses: where it does, their requests are parsed on a thread that may block.
    const MAY_BE_KEPT: bool = false;

    /// The response goes on without its client, if the request says so; it is durable then that it runs.
    fn detach(&mut self) -> impl Future<Output = Result<Option<DetachedResponse>, GatewayError>> + Send {
        ready(Ok(None))
    }

    /// Keeps the response, if the request says so, before `finish`, `whole` or `error` tells its client how it ends. An
    /// error here is how it ends.
    fn keep(&mut self, _end: ResponseEnd<'_>) -> impl Future<Output = Result<(), GatewayError>> + Send {
        ready(Ok(()))
    }

    /// All tokens of the prompt of a choice, before anything is added to that; where its request asks for them.
    fn observe_prompt(&mut self, _choice: usize, _tokens: Vec<PromptToken>) {}

    /// What is added to a choice of a response that is not streamed: for formats that tell in which order thinking, texts
    /// and calls came, because `whole` has each of them together, or when the first one came.
    fn observe(&mut self, _choice: usize, _delta: &Delta) {}

    /// A complete response that is not streamed: the choices of the first prompt, then those of the next.
    fn whole(self, choices: &[(Delta, FinishReason)], usage: Usage) -> Response;

    /// The stream starts; with the tokens of all its prompts, unless it starts before they are counted.
    fn start(&mut self, prompt_tokens: Option<u32>) -> Bytes;

    /// A choice has its [prompt](Self::observe_prompt) now; nothing where that is no part of a stream.
    fn prompt(&mut self, _choice: usize) -> Bytes {
        Bytes::new()
    }

    /// What is added to a choice.
    fn delta(&mut self, choice: usize, delta: &Delta) -> Bytes;

    /// No new text; keeps the connection open.
    fn keep_alive(&mut self) -> Bytes;

    /// A choice is complete; with the usage of all of them where it is the last.
    fn finish(&mut self, choice: usize, reason: FinishReason, usage: Option<Usage>) -> Bytes;

    /// The response cannot be completed. The HTTP status was sent long ago.
    fn error(&mut self, error: &GatewayError) -> Bytes;
}
