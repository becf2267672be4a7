//! Parses a chat request into the dialect-free one. Every error names the field. An unsupported field that
//! would change the response is rejected; one that would not is ignored and reported.

mod fields;
mod messages;
mod sampling;
mod structured_output;
mod template_arguments;
mod tools;

use std::collections::BTreeSet;

use russet_wire::request::GenerationRequest;
use serde_json::{Map, Value};

pub(super) use fields::is_nothing;
use fields::{FieldGroup, Treatment};

use super::response::ChatWriter;
use crate::error::{ErrorKind, GatewayError};
use crate::json_body::JsonBody;
use crate::request_limits::{FLEX_LEVELS, RequestLimits};
use crate::serving::{ParsedRequest, RequestContext};

type JsonObject = Map<String, Value>;

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// The engine's limit. OpenAI's is 4, but other servers take any number, and role play needs some fifteen.
const MAX_STOPS: usize = 32;
/// Longest stop string in bytes: an engine withholds up to this much of every response.
const MAX_STOP_BYTES: usize = 1024;
/// Most responses to one request, each of which takes a place in an engine; OpenAI's limit is 128.
const MAX_CHOICES: i64 = 16;
/// Longest salt in bytes: more than any secret of a user or a session needs. With the namespace before it, it stays below
/// the engine's limit of 1,024.
const MAX_SALT_BYTES: usize = 512;
/// Clients of other servers send many fields; this limit keeps the header that lists them short.
const MAX_IGNORED_FIELDS: usize = 16;

/// Parses a chat request within the caller's limits.
pub(super) fn parse(
    mut body: JsonBody<'_>,
    context: &RequestContext<'_>,
) -> Result<ParsedRequest<ChatWriter>, GatewayError> {
    let RequestContext { id, unix_seconds, limits } = context;
    let (mut fields, model) = fields_and_model(&mut body)?;
    for (field, value) in &fields {
        if let Some(FieldGroup { about, treatment: Treatment::Refused(is_harmless), .. }) =
            fields::group_of(field)
            && !is_harmless(value)
        {
            return Err(GatewayError::field(
                field,
                format!(
                    "`{field}` is not supported by this release and would change the response; leave it out ({about})"
                ),
            ));
        }
    }
    let choices = integer(&fields, "n", 1, MAX_CHOICES)?.unwrap_or(1) as usize;
    let service_tier = service_tier(fields.get("service_tier"))?;
    let mut ignored = BTreeSet::new();
    let (tools, tool_choice) = tools::parse(&fields, &body)?;
    let request = GenerationRequest {
        id: id.unique.clone(),
        // Taken, not copied: they are most of the body.
        messages: messages::parse(fields.remove("messages"), &mut ignored)?,
        tools,
        tool_choice,
        single_tool_call: boolean(&fields, "parallel_tool_calls")? == Some(false),
        template_arguments: template_arguments::parse(&fields, &body)?,
        structured_output: structured_output::parse(&fields, &body)?,
        thinking_budget: sampling::thinking_budget(&fields)?,
        logprobs: sampling::logprobs(&fields)?,
        continue_final_message: boolean(&fields, "continue_final_message")?.unwrap_or(false),
        max_tokens: max_tokens(&fields, limits)?,
        sampling: sampling::parse(&fields)?,
        stop: stop(fields.get("stop"))?,
        stop_token_ids: sampling::stop_token_ids(fields.get("stop_token_ids"))?,
        ignore_eos: boolean(&fields, "ignore_eos")?.unwrap_or(false),
        emitted: Vec::new(),
        priority: priority(&fields, service_tier, limits)?,
        deadline_milliseconds: None,
        cache_salt: cache_salt(fields.get("cache_salt"))?,
    };
    let streamed = boolean(&fields, "stream")?.unwrap_or(false);
    let writer = ChatWriter {
        id: format!("chatcmpl-{}", id.unique),
        created: *unix_seconds,
        model: model.clone(),
        include_usage: include_usage(fields.get("stream_options"))?,
        service_tier,
        tool_calls: vec![0; choices],
    };
    ignored.extend(unknown_fields(&fields));
    Ok(ParsedRequest { model, request, choices, streamed, ignored: listed(ignored), writer })
}

/// The fields of a body that are set, and the name of the model.
pub(super) fn fields_and_model(body: &mut JsonBody<'_>) -> Result<(JsonObject, String), GatewayError> {
    let Value::Object(mut fields) = std::mem::take(&mut body.value) else {
        return Err(GatewayError::new(ErrorKind::InvalidRequest, "the body must be a JSON object"));
    };
    // OpenAI's SDKs send null for unset fields.
    fields.retain(|_, value| !value.is_null());
    let model = match fields.get("model") {
        Some(Value::String(model)) if !model.is_empty() => model.clone(),
        Some(_) => return Err(GatewayError::field("model", "`model` must be the name of a model")),
        None => {
            return Err(GatewayError::field("model", "`model` is missing; GET /v1/models lists the names"));
        }
    };
    Ok((fields, model))
}

fn max_tokens(fields: &JsonObject, limits: &RequestLimits) -> Result<Option<u32>, GatewayError> {
    let max_tokens = integer(fields, "max_tokens", 1, i64::from(u32::MAX))?;
    let max_completion_tokens = integer(fields, "max_completion_tokens", 1, i64::from(u32::MAX))?;
    let field = if max_completion_tokens.is_some() { "max_completion_tokens" } else { "max_tokens" };
    limits
        .max_tokens(max_completion_tokens.or(max_tokens).and_then(|tokens| u32::try_from(tokens).ok()), field)
}

/// OpenAI's `flex`: served when there is spare capacity.
const FLEX: &str = "flex";

/// The service tier of a response, in the word reported to the client. As with OpenAI, a request for a higher
/// tier than the key allows gets the key's: no tier has a higher priority than the key.
fn service_tier(value: Option<&Value>) -> Result<Option<&'static str>, GatewayError> {
    match value.map(Value::as_str) {
        None => Ok(None),
        Some(Some("auto" | "default" | "priority" | "scale")) => Ok(Some("default")),
        Some(Some(FLEX)) => Ok(Some(FLEX)),
        Some(_) => Err(GatewayError::field(
            "service_tier",
            "`service_tier` must be auto, default, flex or priority; flex has a lower priority, the others are the same here",
        )),
    }
}

/// The scheduling priority. `priority` is vLLM's: a larger number runs later. It counts from the key's
/// priority, so that 0 means what it means in vLLM.
fn priority(
    fields: &JsonObject,
    service_tier: Option<&str>,
    limits: &RequestLimits,
) -> Result<i32, GatewayError> {
    let max_levels = limits.max_levels();
    let levels = match fields.get("priority") {
        None => 0,
        Some(value) => {
            let levels = whole(value).and_then(|levels| u32::try_from(levels).ok());
            levels.filter(|levels| *levels <= max_levels).ok_or_else(|| {
                GatewayError::field(
                    "priority",
                    format!(
                        "`priority` must be an integer from 0 to {max_levels}, not {}: 0 is this key's own priority ({}), and each higher number is one level lower, as in vLLM; no request has a higher priority than its key",
                        shown(value),
                        limits.priority
                    ),
                )
            })?
        }
    };
    Ok(limits.priority_below(if service_tier == Some(FLEX) { levels.max(FLEX_LEVELS) } else { levels }))
}

fn include_usage(value: Option<&Value>) -> Result<bool, GatewayError> {
    match value {
        None => Ok(false),
        Some(Value::Object(options)) => match options.get("include_usage") {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(include)) => Ok(*include),
            Some(_) => Err(GatewayError::field(
                "stream_options.include_usage",
                "`stream_options.include_usage` must be true or false",
            )),
        },
        Some(_) => Err(GatewayError::field("stream_options", "`stream_options` must be an object")),
    }
}

/// Fields that are left out.
fn unknown_fields(fields: &JsonObject) -> impl Iterator<Item = String> {
    let is_left_out = |name: &&String| {
        fields::group_of(name).is_none_or(|group| matches!(group.treatment, Treatment::Ignored))
    };
    fields.keys().filter(is_left_out).cloned()
}

/// The names that a header can list.
pub(super) fn listed(names: BTreeSet<String>) -> Vec<String> {
    let is_printable = |name: &String| {
        name.len() <= 64 && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'))
    };
    names.into_iter().filter(is_printable).take(MAX_IGNORED_FIELDS).collect()
}

/// vLLM's `cache_salt`: requests share cached prefixes only with those of the same salt.
fn cache_salt(value: Option<&Value>) -> Result<String, GatewayError> {
    match value {
        None => Ok(String::new()),
        Some(Value::String(salt)) if salt.len() <= MAX_SALT_BYTES => Ok(salt.clone()),
        Some(_) => Err(GatewayError::field(
            "cache_salt",
            format!("`cache_salt` must be a string of at most {MAX_SALT_BYTES} bytes"),
        )),
    }
}

pub(super) fn boolean(fields: &JsonObject, name: &str) -> Result<Option<bool>, GatewayError> {
    match fields.get(name) {
        None => Ok(None),
        Some(Value::Bool(value)) => Ok(Some(*value)),
        Some(_) => Err(GatewayError::field(name, format!("`{name}` must be true or false"))),
    }
}

fn number(fields: &JsonObject, name: &str, min: f64, max: f64) -> Result<Option<f32>, GatewayError> {
    match fields.get(name).map(Value::as_f64) {
        None => Ok(None),
        Some(Some(value)) if (min..=max).contains(&value) => Ok(Some(value as f32)),
        Some(_) => Err(GatewayError::field(
            name,
            format!("`{name}` must be a number from {min} to {max}, not {}", shown(&fields[name])),
        )),
    }
}

/// A number without a fraction: `64.0` and `1e3` too, which languages with one kind of number write.
fn whole(value: &Value) -> Option<i64> {
    /// Up to here a 64-bit float holds every integer.
    const MAX_EXACT: f64 = 9_007_199_254_740_992.0;
    let float = || value.as_f64().filter(|float| float.fract() == 0.0 && float.abs() <= MAX_EXACT);
    value.as_i64().or_else(|| float().map(|float| float as i64))
}

pub(super) fn integer(
    fields: &JsonObject,
    name: &str,
    min: i64,
    max: i64,
) -> Result<Option<i64>, GatewayError> {
    match fields.get(name).map(whole) {
        None => Ok(None),
        Some(Some(value)) if (min..=max).contains(&value) => Ok(Some(value)),
        Some(_) => Err(GatewayError::field(
            name,
            format!("`{name}` must be an integer of at least {min}, not {}", shown(&fields[name])),
        )),
    }
}

fn seed(fields: &JsonObject) -> Result<Option<u64>, GatewayError> {
    match fields.get("seed") {
        None => Ok(None),
        // A negative seed is as good as another: seeds are only compared for equality.
        Some(value) => match value.as_u64().or_else(|| whole(value).map(i64::cast_unsigned)) {
            Some(seed) => Ok(Some(seed)),
            None => Err(GatewayError::field(
                "seed",
                format!("`seed` must be an integer of 64 bits, not {}", shown(value)),
            )),
        },
    }
}

fn stop(value: Option<&Value>) -> Result<Vec<String>, GatewayError> {
    let invalid = || {
        GatewayError::field(
            "stop",
            format!("`stop` must be a string or a list of at most {MAX_STOPS} strings"),
        )
    };
    let mut strings: Vec<String> = match value {
        None => vec![],
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(items)) => items
            .iter()
            .map(|item| item.as_str().map(str::to_owned))
            .collect::<Option<_>>()
            .ok_or_else(invalid)?,
        Some(_) => return Err(invalid()),
    };
    // Some clients send an empty text for none.
    strings.retain(|text| !text.is_empty());
    if strings.len() > MAX_STOPS {
        return Err(invalid());
    }
    if let Some(long) = strings.iter().find(|text| text.len() > MAX_STOP_BYTES) {
        let length = long.len();
        return Err(GatewayError::field(
            "stop",
            format!("`stop` must be strings of at most {MAX_STOP_BYTES} bytes; one has {length}"),
        ));
    }
    Ok(strings)
}

/// A value in a message, shortened.
fn shown(value: &Value) -> String {
    const MAX_SHOWN_CHARS: usize = 40;
    let text = value.to_string();
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use russet_wire::conversation::{Message, Tool, ToolChoice};
    use russet_wire::request::{DrySampling, Sampling};
    use serde_json::json;

    use super::*;
    use crate::json_body::JsonScan;
    use crate::request_id::RequestId;

    type ParsedChat = ParsedRequest<ChatWriter>;

    fn parse_bytes(body: &[u8], limits: RequestLimits) -> Result<ParsedChat, GatewayError> {
        let id = RequestId { unique: "id".into(), shown: "req_id".into() };
        let body = JsonScan::new(body)?.decode(body)?;
        super::parse(body, &RequestContext { id: &id, unix_seconds: 17, limits })
    }

    fn parse(body: &Value) -> Result<ParsedChat, GatewayError> {
        parse_with(body, RequestLimits::default())
    }

    fn parse_with(body: &Value, limits: RequestLimits) -> Result<ParsedChat, GatewayError> {
        parse_bytes(body.to_string().as_bytes(), limits)
    }

    fn with(extra: Value) -> Value {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        for (name, value) in extra.as_object().unwrap() {
            body[name] = value.clone();
        }
        body
    }

    #[test]
    fn a_plain_request_means_what_openai_says() {
        let ParsedRequest { model, request, choices, streamed, ignored, writer } =
            parse(&with(json!({}))).unwrap();
        assert_eq!(choices, 1);
        assert_eq!((model.as_str(), streamed, ignored), ("m", false, vec![]));
        assert_eq!(
            request,
            GenerationRequest {
                id: "id".into(),
                messages: vec![Message::new("user", "hi")],
                sampling: Sampling { temperature: 1.0, ..Sampling::default() },
                ..GenerationRequest::default()
            }
        );
        assert_eq!(
            writer,
            ChatWriter {
                id: "chatcmpl-id".into(),
                created: 17,
                model: "m".into(),
                include_usage: false,
                service_tier: None,
                tool_calls: vec![0],
            }
        );
    }

    #[test]
    fn every_field_that_is_honoured_arrives() {
        let chat = parse(&with(json!({
            "messages": [
                {"role": "developer", "content": "brief"},
                {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "tool_calls": []},
                {"role": "user", "content": "hi", "name": "eve"},
            ],
            "stream": true, "stream_options": {"include_usage": true},
            "max_tokens": 9, "max_completion_tokens": 5,
            "temperature": 0, "top_p": 0, "top_k": -1, "min_p": 0.25, "seed": -1,
            "stop": ["\n", "END"], "ignore_eos": true, "n": 1,
            "user": "eve", "store": false, "logprobs": false, "tools": [], "response_format": {"type": "text"},
            "presence_penalty": 0, "frequency_penalty": null, "odd name ü": 1,
        })))
        .unwrap();
        let roles: Vec<&str> = chat.request.messages.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["system", "assistant", "user"]);
        assert_eq!(chat.request.messages[1].content, "ab");
        assert!(chat.streamed && chat.writer.include_usage && chat.request.ignore_eos);
        assert_eq!(chat.request.max_tokens, Some(5));
        assert_eq!(
            chat.request.sampling,
            Sampling { top_p: 1e-6, min_p: 0.25, seed: Some(u64::MAX), ..Sampling::default() }
        );
        assert_eq!(chat.request.stop, ["\n", "END"]);
        assert_eq!(chat.ignored, ["store", "user"]);
    }

    #[test]
    fn unsupported_request_fields_are_refused_by_name() {
        let content = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
        for (extra, param) in [
            (json!({"model": 7}), "model"),
            (json!({"model": null}), "model"),
            (json!({"messages": null}), "messages"),
            (json!({"messages": []}), "messages"),
            (json!({"messages": "hello"}), "messages"),
            (json!({"messages": ["hello"]}), "messages[0]"),
            (json!({"messages": [{"role": "wizard", "content": "hi"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "function", "content": "hi"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "tool"}]}), "messages[0].content"),
            (json!({"messages": [{"role": "user", "content": "hi", "name": 7}]}), "messages[0].name"),
            (json!({"messages": [{"content": "hi"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
            (
                json!({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}),
                "messages[0].tool_calls[0].function",
            ),
            (content(json!(7)), "messages[0].content"),
            (content(json!([])), "messages[0].content"),
            (
                content(json!([{"type": "image_url", "image_url": {"url": "x"}}])),
                "messages[0].content[0].type",
            ),
            (content(json!([{"type": "text", "text": "a"}, 7])), "messages[0].content[1]"),
            (content(json!([{"text": "a"}])), "messages[0].content[0].type"),
            (content(json!([{"type": "text"}])), "messages[0].content[0].text"),
            (json!({"stream": "yes"}), "stream"),
            (json!({"stream_options": true}), "stream_options"),
            (json!({"stream_options": {"include_usage": 1}}), "stream_options.include_usage"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"max_tokens": -1}), "max_tokens"),
            (json!({"max_tokens": 1.5}), "max_tokens"),
            (json!({"max_completion_tokens": 99999999999u64}), "max_completion_tokens"),
            (json!({"temperature": 9}), "temperature"),
            (json!({"temperature": -1}), "temperature"),
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"top_p": 2}), "top_p"),
            (json!({"top_k": -2}), "top_k"),
            (json!({"min_p": 1.5}), "min_p"),
            (json!({"seed": 0.5}), "seed"),
            (json!({"stop": vec!["x"; 33]}), "stop"),
            (json!({"cache_salt": 7}), "cache_salt"),
            (json!({"cache_salt": "x".repeat(513)}), "cache_salt"),
            (json!({"top_k": 40.5}), "top_k"),
            (json!({"max_tokens": 64.5}), "max_tokens"),
            (json!({"max_tokens": 1e300}), "max_tokens"),
            (json!({"seed": 1e17}), "seed"),
            (json!({"n": 2.5}), "n"),
            (json!({"stop": [1]}), "stop"),
            (json!({"stop": 1}), "stop"),
            (json!({"ignore_eos": 1}), "ignore_eos"),
            (json!({"service_tier": "express"}), "service_tier"),
            (json!({"service_tier": 1}), "service_tier"),
            (json!({"priority": -1}), "priority"),
            (json!({"priority": 101}), "priority"),
            (json!({"priority": 0.5}), "priority"),
            (json!({"priority": "high"}), "priority"),
            (json!({"n": 17}), "n"),
            (json!({"n": 0}), "n"),
            (json!({"tools": "all"}), "tools"),
            (json!({"tools": vec![json!({"function": {"name": "f"}}); 129]}), "tools"),
            (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
            (json!({"tools": [{"type": "custom"}]}), "tools[0].type"),
            (json!({"tools": [{"function": {"name": ""}}]}), "tools[0].function.name"),
            (
                json!({"tools": [{"function": {"name": "f", "parameters": []}}]}),
                "tools[0].function.parameters",
            ),
            (
                json!({"tools": [{"function": {"name": "f", "description": 7}}]}),
                "tools[0].function.description",
            ),
            (json!({"tools": [{"function": {"name": "f", "strict": 1}}]}), "tools[0].function.strict"),
            (json!({"tools": [{"function": {"name": "f"}}], "tool_choice": {"name": "g"}}), "tool_choice"),
            (json!({"parallel_tool_calls": 1}), "parallel_tool_calls"),
            (json!({"continue_final_message": "yes"}), "continue_final_message"),
            (json!({"tool_choice": "required"}), "tool_choice"),
            (json!({"tool_choice": {"type": "function", "function": {"name": "f"}}}), "tool_choice"),
            (json!({"tool_choice": "some"}), "tool_choice"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema.schema"),
            (json!({"logprobs": 2}), "logprobs"),
            (json!({"top_logprobs": 2}), "top_logprobs"),
            (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
            (json!({"logit_bias": {"five": 1}}), "logit_bias"),
            (json!({"logit_bias": {"5": 101}}), "logit_bias"),
            (json!({"logit_bias": [1]}), "logit_bias"),
            (json!({"presence_penalty": 2.5}), "presence_penalty"),
            (json!({"frequency_penalty": "x"}), "frequency_penalty"),
            (json!({"repetition_penalty": 0}), "repetition_penalty"),
            (json!({"repeat_penalty": 11}), "repeat_penalty"),
            (json!({"min_tokens": -1}), "min_tokens"),
            (json!({"stop_token_ids": [1.5]}), "stop_token_ids"),
            (json!({"stop_token_ids": 7}), "stop_token_ids"),
            (json!({"guided_json": 1}), "guided_json"),
            (json!({"grammar": "root ::= \"a\""}), "grammar"),
            (json!({"max_new_tokens": 5}), "max_new_tokens"),
            (json!({"xtc_probability": 1.5}), "xtc_probability"),
            (json!({"typical_p": -0.5}), "typical_p"),
            (json!({"dry_multiplier": -1}), "dry_multiplier"),
            (json!({"dry_sequence_breakers": ["a", 3]}), "dry_sequence_breakers"),
            (json!({"thinking_budget": "much"}), "thinking_budget"),
            (json!({"mirostat": 2}), "mirostat"),
            (json!({"skip_special_tokens": false}), "skip_special_tokens"),
            (json!({"chat_template": "{{ x }}"}), "chat_template"),
            (json!({"echo": true}), "echo"),
            (json!({"modalities": ["text", "audio"]}), "modalities"),
        ] {
            let Err(error) = parse(&with(extra.clone())) else { panic!("{extra} is accepted") };
            assert_eq!(error.kind, ErrorKind::InvalidRequest, "{extra}");
            assert_eq!(error.param.as_deref(), Some(param), "{extra}");
            assert!(error.message.contains(param), "{extra}: {error}");
        }
    }

    #[test]
    fn tools_arrive_with_their_schemas_as_written() {
        let body = br#"{"model": "m", "messages": [{"role": "user", "content": "hi"}], "parallel_tool_calls": false, "tools": [
            {"type": "function", "function": {"name": "f", "description": "F.", "strict": false,
                "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"enum": [1.0, 2]}}}}},
            {"function": {"parameters": null, "name": "g"}}]}"#;
        let request = parse_bytes(body, RequestLimits::default()).unwrap().request;
        assert_eq!(
            request.tools,
            [
                Tool {
                    name: "f".into(),
                    description: Some("F.".into()),
                    parameters: Some(
                        r#"{"type": "object", "properties": {"z": {"type": "string"}, "a": {"enum": [1.0, 2]}}}"#
                            .into()
                    ),
                    strict: false,
                },
                Tool { name: "g".into(), ..Tool::default() },
            ]
        );
        assert!(request.single_tool_call);
        let off = with(json!({"tool_choice": "none", "tools": [{"function": {"name": "f"}}]}));
        assert_eq!(parse(&off).unwrap().request.tools, []);
    }

    #[test]
    fn a_number_without_fraction_is_an_integer() {
        let chat = parse(&with(json!({
            "max_tokens": 64.0, "max_completion_tokens": 1e3, "top_k": 40.0, "seed": 7.0, "n": 1.0, "priority": 3.0,
        })))
        .unwrap();
        let GenerationRequest { max_tokens, sampling, priority, .. } = chat.request;
        assert_eq!((max_tokens, sampling.top_k, sampling.seed, priority), (Some(1000), 40, Some(7), -3));
        let chat = parse(&with(json!({"top_k": -1.0, "seed": -1.0, "priority": 0.0}))).unwrap();
        assert_eq!((chat.request.sampling.top_k, chat.request.sampling.seed), (0, Some(u64::MAX)));
    }

    #[test]
    fn penalties_biases_and_ends_arrive() {
        let sampled = |extra: Value| {
            let request = parse(&with(extra)).unwrap().request;
            (request.sampling, request.stop_token_ids)
        };
        let (sampling, ids) = sampled(json!({
            "presence_penalty": 0.5, "frequency_penalty": -2, "repeat_penalty": 1.1, "min_tokens": 3.0,
            "logit_bias": {"5": -100, "70000": 1.5}, "stop_token_ids": [7, 8.0],
        }));
        let expected = Sampling {
            temperature: 1.0,
            repetition_penalty: 1.1,
            presence_penalty: 0.5,
            frequency_penalty: -2.0,
            logit_bias: [(5, -100.0), (70000, 1.5)].into(),
            min_tokens: 3,
            ..Sampling::default()
        };
        assert_eq!((sampling, ids), (expected, vec![7, 8]));
        // What changes nothing is no reason to refuse.
        let plain = Sampling { temperature: 1.0, ..Sampling::default() };
        let nothing = json!({
            "logprobs": false, "top_logprobs": 0.0, "xtc_probability": 0, "typical_p": 1, "best_of": 1, "echo": false,
            "skip_special_tokens": true, "guided_json": null, "bad_words": [], "prompt": "", "repetition_penalty": 1,
        });
        assert_eq!(sampled(nothing), (plain, vec![]));
    }

    #[test]
    fn choices_of_tools_limits_of_thinking_and_logprobs_arrive() {
        let of = |extra: Value| {
            let mut body = with(extra);
            body["tools"] = json!([{"function": {"name": "f", "strict": true}}]);
            parse(&body).unwrap().request
        };
        assert!(of(json!({})).tools[0].strict);
        for (choice, expected) in [
            (json!("auto"), ToolChoice::Auto),
            (json!("required"), ToolChoice::Required),
            (json!("any"), ToolChoice::Required),
            (json!({"type": "function", "function": {"name": "f"}}), ToolChoice::Named("f".into())),
            (json!({"type": "function", "name": "f"}), ToolChoice::Named("f".into())),
        ] {
            assert_eq!(of(json!({"tool_choice": choice})).tool_choice, expected);
        }
        for (extra, expected) in [
            (json!({}), None),
            (json!({"thinking_budget": -1}), None),
            (json!({"thinking_budget": 0}), Some(0)),
            (json!({"thinking_token_budget": 9.0}), Some(9)),
            (json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}), Some(1024)),
            (json!({"reasoning": {"max_tokens": 5}}), Some(5)),
        ] {
            assert_eq!(of(extra.clone()).thinking_budget, expected, "{extra}");
        }
        for (extra, expected) in [
            (json!({"logprobs": false}), None),
            (json!({"logprobs": true}), Some(0)),
            (json!({"logprobs": true, "top_logprobs": 20}), Some(20)),
        ] {
            assert_eq!(of(extra.clone()).logprobs, expected, "{extra}");
        }
        let dry = json!({"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": -1,
                         "dry_sequence_breakers": [";"], "xtc_probability": 0.5, "xtc_threshold": 0.2, "typical_p": 0.9});
        let sampling = of(dry).sampling;
        assert_eq!((sampling.xtc_probability, sampling.xtc_threshold, sampling.typical_p), (0.5, 0.2, 0.9));
        let expected = DrySampling {
            multiplier: 0.8,
            base: 2.0,
            allowed_length: 3,
            last_tokens: 0,
            sequence_breakers: vec![";".into()],
        };
        assert_eq!(sampling.dry, expected);
    }

    #[test]
    fn as_many_stop_texts_as_the_engine_takes_are_read() {
        let stops = |value: Value| parse(&with(json!({"stop": value}))).map(|chat| chat.request.stop);
        let many: Vec<String> = (0..32).map(|number| format!("<{number}>")).collect();
        assert_eq!(stops(json!(many)), Ok(many));
        for none in [json!(""), json!([""]), json!([]), json!(vec![""; 40])] {
            assert_eq!(stops(none.clone()), Ok(vec![]), "{none}");
        }
        assert_eq!(stops(json!(["", "END", ""])), Ok(vec!["END".to_owned()]));
    }

    #[test]
    fn request_priority_is_never_higher_than_that_of_its_key() {
        for (key, extra, expected) in [
            (0, json!({}), Ok((0, None))),
            (7, json!({}), Ok((7, None))),
            (7, json!({"priority": null, "service_tier": null}), Ok((7, None))),
            (7, json!({"priority": 0}), Ok((7, None))),
            (7, json!({"priority": 10}), Ok((-3, None))),
            (7, json!({"priority": 107}), Ok((-100, None))),
            (7, json!({"priority": 108}), Err("from 0 to 107, not 108: 0 is this key's own priority (7)")),
            (7, json!({"priority": -1}), Err("from 0 to 107, not -1")),
            (-100, json!({"priority": 1}), Err("from 0 to 0, not 1: 0 is this key's own priority (-100)")),
            (7, json!({"service_tier": "auto"}), Ok((7, Some("default")))),
            (7, json!({"service_tier": "default"}), Ok((7, Some("default")))),
            (7, json!({"service_tier": "priority"}), Ok((7, Some("default")))),
            (7, json!({"service_tier": "flex"}), Ok((-23, Some("flex")))),
            (-80, json!({"service_tier": "flex"}), Ok((-100, Some("flex")))),
            (7, json!({"service_tier": "flex", "priority": 10}), Ok((-23, Some("flex")))),
            (7, json!({"service_tier": "flex", "priority": 40}), Ok((-33, Some("flex")))),
            (7, json!({"service_tier": "express"}), Err("auto, default, flex or priority")),
        ] {
            let limits = RequestLimits { priority: key, ..RequestLimits::default() };
            match (parse_with(&with(extra.clone()), limits), expected) {
                (Ok(chat), Ok(expected)) => {
                    assert_eq!((chat.request.priority, chat.writer.service_tier), expected, "{key} {extra}");
                }
                (Err(error), Err(words)) => assert!(error.message.contains(words), "{error}"),
                (got, _) => panic!("{key} {extra}: {got:?}"),
            }
        }
    }

    #[test]
    fn max_tokens_are_capped_by_the_key() {
        let limits = RequestLimits { max_tokens: Some(5), ..RequestLimits::default() };
        for (extra, expected) in [
            (json!({}), Ok(Some(5))),
            (json!({"max_tokens": 4}), Ok(Some(4))),
            (json!({"max_tokens": 9, "max_completion_tokens": 5}), Ok(Some(5))),
            (json!({"max_tokens": 6}), Err("max_tokens")),
            (json!({"max_tokens": 4, "max_completion_tokens": 6}), Err("max_completion_tokens")),
        ] {
            let got = parse_with(&with(extra.clone()), limits);
            let got = got.map(|chat| chat.request.max_tokens).map_err(|error| error.param.unwrap());
            assert_eq!(got, expected.map_err(str::to_owned), "{extra}");
        }
    }

    #[test]
    fn bodies_that_are_no_chat_request_are_refused_and_never_panic() {
        let deep = [b"[".repeat(100_000), b"]".repeat(100_000)].concat();
        for body in
            [b"".as_slice(), b"{", b"null", b"[]", b"\"x\"", b"{}", b"{\"model\":\"\"}", b"NaN", &deep]
        {
            let error = parse_bytes(body, RequestLimits::default()).err().unwrap();
            assert_eq!(error.kind, ErrorKind::InvalidRequest);
        }
    }
}
