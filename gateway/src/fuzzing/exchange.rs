//! A stranger's body, and the answer to it: what has to hold of both in every dialect.

use std::fmt::Debug;

use axum::http::HeaderValue;
use axum::response::Response;
use bytes::Bytes;
use futures::FutureExt as _;
use russet_rpc::engine as pb;
use russet_wire::conversation::ToolCall;
use russet_wire::event::{Delta, FinishReason, Logprobs, PromptLogprobs, PromptToken, TokenLogprob, Usage};
use russet_wire::request::GenerationRequest;
use serde_json::Value;

use super::client::{Client, ReadStream, json};
use crate::dispatch::{PoolingReply, PoolingRequest, PromptDigest};
use crate::error::{ErrorKind, GatewayError};
use crate::json_body::{JsonBody, JsonBounds, JsonScan};
use crate::keys::Caller;
use crate::request_id::RequestId;
use crate::request_limits::RequestLimits;
use crate::serving::{Dialect, ParseRequest, ParsedPooling, ParsedRequest, RequestContext, ResponseWriter};

/// Longest body of an error: one that repeats what it refuses would cost more memory than the request.
const MAX_ERROR_BYTES: usize = 4096;
/// Most responses to one request.
const MAX_RESPONSES: usize = 128;

const USAGE: Usage = Usage { prompt_tokens: 7, completion_tokens: 5, cached_tokens: 2 };

/// Parses a body that bounds and decoder accept.
type Parse<T> = fn(JsonBody<'_>, &RequestContext<'_>) -> Result<T, GatewayError>;

/// A request for text, and its answer: whole, streamed, and as a stream that fails. Whether it is accepted.
pub(crate) fn generation<W: ResponseWriter>(
    body: &[u8],
    dialect: &Dialect,
    parse: ParseRequest<W>,
    client: &impl Client,
) -> bool {
    let Some(parsed) = checked(body, dialect, parse, client) else { return false };
    let again = || read(body, parse).unwrap_or_else(|error| panic!("refused the second time: {error}"));
    let answers = parsed.requests.len() * parsed.choices;
    let deltas = parsed.requests.first().map(deltas).unwrap_or_default();
    let prompt = parsed.requests.first().map(prompt).unwrap_or_default();
    let whole = {
        let mut writer = parsed.writer;
        (0..answers).for_each(|choice| writer.observe_prompt(choice, prompt.clone()));
        for delta in &deltas {
            (0..answers).for_each(|choice| writer.observe(choice, delta));
        }
        let mut all = Delta::default();
        deltas.iter().for_each(|delta| all.append(delta.clone()));
        let response = writer.whole(&vec![(all, FinishReason::Stop); answers], USAGE);
        assert_eq!(response.status(), 200);
        client.whole(&json(&bytes_of(response)))
    };
    // What asks no engine is never streamed.
    if answers == 0 {
        return true;
    }
    let mut writer = again().writer;
    let mut stream = writer.start(None).to_vec();
    for choice in 0..answers {
        writer.observe_prompt(choice, prompt.clone());
        stream.extend(writer.prompt(choice));
    }
    for delta in &deltas {
        (0..answers).for_each(|choice| stream.extend(writer.delta(choice, delta)));
        stream.extend(writer.keep_alive());
    }
    for choice in 0..answers {
        stream.extend(writer.finish(choice, FinishReason::Stop, (choice + 1 == answers).then_some(USAGE)));
    }
    assert_eq!(client.stream(&stream), ReadStream::Complete(whole), "streamed and whole");
    let mut writer = again().writer;
    let mut stream = writer.start(None).to_vec();
    stream.extend(deltas.first().map(|delta| writer.delta(0, delta)).unwrap_or_default());
    stream.extend(writer.error(&GatewayError::new(ErrorKind::Internal, "a rank\n\ndiverged")));
    assert_eq!(client.stream(&stream), ReadStream::Failed);
    true
}

/// The request that a body is; `None` where it is refused, and in every case what has to hold of it.
pub(crate) fn checked<W: Send + 'static>(
    body: &[u8],
    dialect: &Dialect,
    parse: ParseRequest<W>,
    client: &impl Client,
) -> Option<ParsedRequest<W>> {
    check_bounds(body);
    let parsed = accepted(body, dialect, parse, client)?;
    let facts = |parsed: &ParsedRequest<W>| {
        let ParsedRequest {
            model,
            fallback_models,
            requests,
            prompt_field,
            left_out,
            choices,
            streamed,
            ignored,
            keep_alive,
            writer: _,
        } = parsed;
        let model = (model.clone(), fallback_models.clone());
        let (requests, ignored) = (requests.clone(), ignored.clone());
        (model, requests, *prompt_field, *left_out, *choices, *streamed, ignored, *keep_alive)
    };
    check_same(&facts(&parsed), &read(body, parse).map(|again| facts(&again)));
    assert!(parsed.choices > 0 && parsed.requests.len() * parsed.choices <= MAX_RESPONSES);
    assert!(HeaderValue::from_str(&parsed.ignored.join(",")).is_ok(), "{:?}", parsed.ignored);
    for request in &parsed.requests {
        let _ = PromptDigest::new(&Caller::Anonymous, &parsed.model, request);
        let received = GenerationRequest::from(pb::GenerateRequest::from(request.clone()));
        assert_eq!(&received, request, "the engine gets what was parsed");
    }
    Some(parsed)
}

/// A request for vectors or scores, and its answer. Whether it is accepted.
pub(crate) fn pooling(
    body: &[u8],
    dialect: &Dialect,
    parse: Parse<ParsedPooling>,
    client: &impl Client,
) -> bool {
    check_bounds(body);
    let Some(parsed) = accepted(body, dialect, parse, client) else { return false };
    let again = || read(body, parse).unwrap_or_else(|error| panic!("refused the second time: {error}"));
    let facts = |ParsedPooling { model, request, ignored, keep_alive, respond: _ }: &ParsedPooling| {
        (model.clone(), request.clone(), ignored.clone(), *keep_alive)
    };
    check_same(&facts(&parsed), &Ok(facts(&again())));
    let reply = reply(&parsed.request);
    let response = (parsed.respond)(reply).unwrap_or_else(|error| panic!("no answer: {error}"));
    client.whole(&json(&bytes_of(response)));
    let empty = match again().request {
        PoolingRequest::Embed(_) => PoolingReply::Embed(pb::EmbedReply::default()),
        PoolingRequest::Rerank(_) => {
            PoolingReply::Rerank(pb::RerankReply { scores: vec![0.5], ..pb::RerankReply::default() })
        }
    };
    let Err(error) = (again().respond)(empty) else { panic!("an answer that contradicts itself is written") };
    assert_eq!(error.kind, ErrorKind::Internal);
    true
}

/// What a body is, unless it is refused, which is the client's fault and said in the dialect's form.
fn accepted<T>(body: &[u8], dialect: &Dialect, parse: Parse<T>, client: &impl Client) -> Option<T> {
    let error = match read(body, parse) {
        Ok(parsed) => return Some(parsed),
        Err(error) => error,
    };
    let response = (dialect.error_response)(&error, &id());
    assert!(response.status().is_client_error(), "{error}");
    let bytes = bytes_of(response);
    assert!(bytes.len() <= MAX_ERROR_BYTES, "{} bytes: {error}", bytes.len());
    client.check_error(&json(&bytes));
    None
}

fn read<T>(body: &[u8], parse: Parse<T>) -> Result<T, GatewayError> {
    let (id, limits) = (id(), RequestLimits::default());
    let context = RequestContext { id: &id, unix_seconds: 17, limits, kept: None };
    parse(scan([body], body)?.decode(body)?, &context)
}

/// Counts a body that arrives in these parts.
fn scan<'a>(parts: impl IntoIterator<Item = &'a [u8]>, body: &[u8]) -> Result<JsonScan, GatewayError> {
    let mut bounds = JsonBounds::default();
    parts.into_iter().try_for_each(|part| bounds.feed(part))?;
    bounds.finish(body)
}

/// In which parts a body arrives changes nothing.
fn check_bounds(body: &[u8]) {
    let (whole, parts) = (scan([body], body), scan(body.chunks(3), body));
    assert_eq!(whole.as_ref().ok(), parts.as_ref().ok(), "{parts:?}");
}

fn check_same<T: Debug + PartialEq>(one: &T, other: &Result<T, GatewayError>) {
    assert_eq!(other.as_ref().ok(), Some(one), "parsed twice");
}

fn id() -> RequestId {
    RequestId { unique: "0123456789abcdef01234567".into(), shown: "req_0123456789abcdef01234567".into() }
}

/// The body of a response that is there.
fn bytes_of(response: Response) -> Bytes {
    let body = axum::body::to_bytes(response.into_body(), usize::MAX).now_or_never();
    body.expect("the body is in memory").expect("the body can be read")
}

/// What an engine might answer, with what would break a stream that is not escaped.
fn deltas(request: &GenerationRequest) -> Vec<Delta> {
    let text = |text: &str| Delta {
        logprobs: request.logprobs.map(|top| logprobs(text, top)).into_iter().collect(),
        ..Delta::text(text)
    };
    let mut deltas = vec![text("Zürich\n\ndata: [DONE]\n\n"), text(""), text("\r\u{2028}\"\\\u{0}")];
    // What a model writes without a template is text.
    if request.raw_prompt.is_some() {
        return deltas;
    }
    deltas.insert(0, Delta { reasoning: "hm\r\n".into(), ..Delta::default() });
    let name = request.tools.first().map_or("f", |tool| tool.name.as_str());
    let call = ToolCall { id: "c1".into(), name: name.into(), arguments: "{\r\n\"input\": \"x\"}".into() };
    let second = ToolCall { id: "c2".into(), arguments: "{}".into(), ..call.clone() };
    deltas.push(Delta { tool_calls: vec![call, second], ..Delta::default() });
    deltas.push(text("end"));
    deltas
}

/// What it might tell of the prompt.
fn prompt(request: &GenerationRequest) -> Vec<PromptToken> {
    if !request.tells_prompt() {
        return Vec::new();
    }
    let logprobs = request.prompt_logprobs.map(|most| {
        let Logprobs { sampled, top } = logprobs("\n\n", most);
        PromptLogprobs { logprob: sampled.logprob, rank: u32::MAX, top }
    });
    let first = PromptToken { id: 0, bytes: vec![0xC3], logprobs: None };
    vec![first, PromptToken { id: u32::MAX, bytes: b"\xA9\"\r\n".to_vec(), logprobs }]
}

fn logprobs(text: &str, top: u32) -> Logprobs {
    let token = |id: u32| TokenLogprob { id, bytes: text.into(), logprob: -f32::INFINITY };
    Logprobs { sampled: token(0), top: (0..top).map(token).collect() }
}

/// What an engine answers to a request for vectors or scores.
fn reply(request: &PoolingRequest) -> PoolingReply {
    match request {
        PoolingRequest::Embed(pb::EmbedRequest { inputs, .. }) => {
            let values = inputs.iter().flat_map(|_| [0.5_f32, -1.0]).flat_map(f32::to_le_bytes);
            PoolingReply::Embed(pb::EmbedReply {
                dimensions: 2,
                values: values.collect(),
                prompt_tokens: vec![u32::MAX; inputs.len()],
                ..pb::EmbedReply::default()
            })
        }
        PoolingRequest::Rerank(pb::RerankRequest { documents, .. }) => {
            PoolingReply::Rerank(pb::RerankReply {
                scores: (0..documents.len()).map(|index| index as f32).collect(),
                prompt_tokens: vec![u32::MAX; documents.len()],
                ..pb::RerankReply::default()
            })
        }
    }
}

/// Whether a value is an object with exactly these keys.
pub(crate) fn has_keys(value: &Value, keys: &[&str]) -> bool {
    let found = value.as_object().map(|fields| fields.keys().map(String::as_str).collect::<Vec<_>>());
    found.is_some_and(|mut found| {
        found.sort_unstable();
        found == keys
    })
}
