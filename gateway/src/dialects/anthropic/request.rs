//! Parses a request for a message into the dialect-free one. Every error names the field. An unsupported field that would
//! change the response is rejected; one that would not is ignored and reported.

mod billing_header;
mod content;
mod fields;
mod messages;
mod structured_output;
mod thinking;
mod tools;

use std::collections::BTreeSet;

use russet_wire::conversation::Message;
use russet_wire::request::{GenerationRequest, Sampling};
use serde_json::Value;

use super::response::MessageWriter;
use crate::dialects::field_table::{ignored, refuse_unsupported};
use crate::dialects::stop_strings::stop_strings;
use crate::dialects::values::{self, JsonObject, boolean, integer, invalid, number};
use crate::error::GatewayError;
use crate::json_body::JsonBody;
use crate::request_defaults::LeftOut;
use crate::request_limits::RequestLimits;
use crate::serving::{ParsedRequest, RequestContext};
use thinking::ThinkingOptions;
use tools::ToolSet;

/// Parses a request for a message within the caller's limits.
pub(super) fn parse(
    mut body: JsonBody<'_>,
    context: &RequestContext<'_>,
) -> Result<ParsedRequest<MessageWriter>, GatewayError> {
    let fields = values::fields(&mut body)?;
    let max_tokens = max_tokens(&fields, &context.limits);
    let mut parsed = parse_fields(fields, &body, context)?;
    let max_tokens = max_tokens?;
    parsed.requests.iter_mut().for_each(|request| request.max_tokens = Some(max_tokens));
    Ok(parsed)
}

/// Parses a request for the number of tokens of its prompt, which is one for a message without `max_tokens`.
pub(super) fn parse_token_count(
    mut body: JsonBody<'_>,
    context: &RequestContext<'_>,
) -> Result<ParsedRequest<MessageWriter>, GatewayError> {
    let fields = values::fields(&mut body)?;
    parse_fields(fields, &body, context)
}

fn parse_fields(
    mut fields: JsonObject,
    body: &JsonBody<'_>,
    context: &RequestContext<'_>,
) -> Result<ParsedRequest<MessageWriter>, GatewayError> {
    let model = values::model(&fields)?;
    let mut left_out = BTreeSet::new();
    let request = request_for_prompt(&mut fields, body, context, &mut left_out)?;
    let streamed = boolean(&fields, "stream")?.unwrap_or(false);
    let writer = MessageWriter::new(context.id, model.clone(), request.stop.clone());
    Ok(ParsedRequest {
        fallback_models: Vec::new(),
        keep_alive: None,
        model,
        prompt_field: "messages",
        requests: vec![request],
        left_out: LeftOut {
            temperature: !fields.contains_key("temperature"),
            top_p: !fields.contains_key("top_p"),
            top_k: !fields.contains_key("top_k"),
            min_p: true,
            repetition_penalty: true,
        },
        choices: 1,
        streamed,
        ignored: ignored(&fields, fields::group_of, left_out),
        writer,
    })
}

/// All of a request but how long the response may be. Adds
/// the names of fields that are left out to `left_out`.
fn request_for_prompt(
    fields: &mut JsonObject,
    body: &JsonBody<'_>,
    context: &RequestContext<'_>,
    left_out: &mut BTreeSet<String>,
) -> Result<GenerationRequest, GatewayError> {
    refuse_unsupported(fields, fields::group_of)?;
    check_service_tier(fields.get("service_tier"))?;
    let ToolSet { tools, choice, single_call } = tools::parse(fields, body, left_out)?;
    let ThinkingOptions { template_arguments, budget } = thinking::parse(fields)?;
    let structured_output = structured_output::parse(fields, body)?;
    // Taken, not copied: they are most of the body.
    let messages = messages::parse(fields.remove("system"), fields.remove("messages"), left_out)?;
    Ok(GenerationRequest {
        id: context.id.unique.to_string(),
        continue_final_message: messages.last().is_some_and(is_begun),
        messages,
        tools,
        tool_choice: choice,
        single_tool_call: single_call,
        structured_output,
        thinking_budget: budget,
        template_arguments,
        sampling: sampling(fields)?,
        stop: stop_strings(fields, "stop_sequences")?,
        priority: context.limits.priority,
        ..GenerationRequest::default()
    })
}

/// Whether the response continues this message, the last one: it is the beginning of an assistant's text.
fn is_begun(last: &Message) -> bool {
    last.role == "assistant" && last.tool_calls.is_empty() && !last.content.is_empty()
}

fn max_tokens(fields: &JsonObject, limits: &RequestLimits) -> Result<u32, GatewayError> {
    const FIELD: &str = "max_tokens";
    let tokens =
        integer(fields, FIELD, 1, i64::from(u32::MAX))?.and_then(|tokens| u32::try_from(tokens).ok());
    let Some(tokens) = tokens else {
        let message = "`max_tokens` is missing; send the most tokens that the response may have";
        return Err(GatewayError::field(FIELD, message));
    };
    limits.max_tokens(Some(tokens), FIELD)?;
    Ok(tokens)
}

fn sampling(fields: &JsonObject) -> Result<Sampling, GatewayError> {
    Ok(Sampling {
        // Anthropic allows at most 1.
        temperature: number(fields, "temperature", 0.0, 2.0)?.unwrap_or(1.0),
        // 0 means greedy sampling.
        top_p: number(fields, "top_p", 0.0, 1.0)?.unwrap_or(1.0).max(1e-6),
        top_k: integer(fields, "top_k", 0, i64::from(u32::MAX))?.unwrap_or(0) as u32,
        ..Sampling::default()
    })
}

/// Both tiers are the same here.
fn check_service_tier(tier: Option<&Value>) -> Result<(), GatewayError> {
    match tier.map(Value::as_str) {
        None | Some(Some("auto" | "standard_only")) => Ok(()),
        Some(_) => Err(invalid("service_tier", "auto or standard_only")),
    }
}

#[cfg(test)]
mod tests {
    use russet_wire::conversation::{Tool, ToolChoice};
    use russet_wire::request::StructuredOutput;
    use serde_json::json;

    use super::*;
    use crate::error::ErrorKind;
    use crate::json_body::JsonScan;
    use crate::request_id::RequestId;

    fn parse_bytes(body: &[u8], limits: RequestLimits) -> Result<ParsedRequest<MessageWriter>, GatewayError> {
        let id = RequestId { unique: "id".into(), shown: "req_id".into() };
        let body = JsonScan::new(body)?.decode(body)?;
        super::parse(body, &RequestContext { id: &id, unix_seconds: 17, limits, kept: None })
    }

    fn with(extra: Value) -> Value {
        let mut body =
            json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]});
        for (name, value) in extra.as_object().unwrap() {
            body[name] = value.clone();
        }
        body
    }

    fn parse(extra: Value) -> Result<ParsedRequest<MessageWriter>, GatewayError> {
        parse_bytes(with(extra).to_string().as_bytes(), RequestLimits::default())
    }

    #[test]
    fn a_plain_request_leaves_the_rest_to_the_deployment() {
        let ParsedRequest {
            fallback_models: _,
            model,
            mut requests,
            left_out,
            choices,
            streamed,
            ignored,
            prompt_field: _,
            keep_alive: _,
            writer: _,
        } = parse(json!({})).unwrap();
        assert_eq!((model.as_str(), streamed, choices), ("m", false, 1));
        assert_eq!((ignored, left_out), (vec![], LeftOut::ALL));
        let expected = GenerationRequest {
            id: "id".into(),
            messages: vec![Message::new("user", "hi")],
            max_tokens: Some(9),
            sampling: Sampling { temperature: 1.0, ..Sampling::default() },
            ..GenerationRequest::default()
        };
        assert_eq!(requests.remove(0), expected);
    }

    #[test]
    fn every_field_of_a_message_that_is_honoured_arrives() {
        let mut parsed = parse(json!({
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "stream": true, "stop_sequences": ["END", ""], "temperature": 0.5, "top_p": 0, "top_k": 40.0,
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "service_tier": "standard_only", "metadata": {"user_id": "u"}, "container": null, "mcp_servers": [],
            "cache_control": {"type": "ephemeral"}, "context_management": {"edits": []}, "new_one": 1, "n": 1,
        }))
        .unwrap();
        assert!(parsed.streamed);
        assert_eq!(parsed.ignored, ["context_management", "metadata", "new_one"]);
        assert_eq!(parsed.left_out, LeftOut { min_p: true, repetition_penalty: true, ..LeftOut::default() });
        let tool =
            Tool { name: "f".into(), parameters: Some(r#"{"type":"object"}"#.into()), ..Tool::default() };
        let expected = GenerationRequest {
            id: "id".into(),
            messages: vec![Message::new("system", "Be brief."), Message::new("user", "hi")],
            tools: vec![tool],
            tool_choice: ToolChoice::Required,
            single_tool_call: true,
            structured_output: Some(StructuredOutput::JsonSchema("{}".into())),
            thinking_budget: Some(1024),
            template_arguments: r#"{"enable_thinking":true,"thinking":true}"#.into(),
            max_tokens: Some(9),
            sampling: Sampling { temperature: 0.5, top_p: 1e-6, top_k: 40, ..Sampling::default() },
            stop: vec!["END".into()],
            ..GenerationRequest::default()
        };
        assert_eq!(parsed.requests.remove(0), expected);
    }

    #[test]
    fn the_beginning_of_an_answer_is_continued() {
        let say = |role: &str, content: Value| json!({"role": role, "content": content});
        for (last, continues) in [
            (say("user", json!("hi")), false),
            (say("assistant", json!("{")), true),
            (say("assistant", json!([{"type": "text", "text": "{"}])), true),
            (say("assistant", json!("")), false),
            (say("assistant", json!([{"type": "tool_use", "id": "c", "name": "f"}])), false),
        ] {
            let parsed = parse(json!({"messages": [say("user", json!("hi")), last]})).unwrap();
            assert_eq!(parsed.requests[0].continue_final_message, continues, "{last}");
        }
    }

    #[test]
    fn fields_of_a_message_that_are_refused_are_named() {
        for (extra, param) in [
            (json!({"model": null}), "model"),
            (json!({"max_tokens": null}), "max_tokens"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"max_tokens": "many"}), "max_tokens"),
            (json!({"messages": null}), "messages"),
            (json!({"system": 7}), "system"),
            (json!({"stream": "yes"}), "stream"),
            (json!({"stop_sequences": [1]}), "stop_sequences"),
            (json!({"stop_sequences": vec!["x"; 33]}), "stop_sequences"),
            (json!({"temperature": 2.5}), "temperature"),
            (json!({"top_p": 2}), "top_p"),
            (json!({"top_k": -1}), "top_k"),
            (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "tools[0].type"),
            (json!({"tool_choice": {"type": "some"}}), "tool_choice"),
            (json!({"thinking": {"type": "some"}}), "thinking.type"),
            (json!({"output_format": {"type": "xml"}}), "output_format"),
            (json!({"service_tier": "priority"}), "service_tier"),
            (json!({"container": "c"}), "container"),
            (json!({"mcp_servers": [{"url": "x"}]}), "mcp_servers"),
            (json!({"response_format": {"type": "json_object"}}), "response_format"),
            (json!({"stop": ["x"]}), "stop"),
            (json!({"n": 2}), "n"),
            (json!({"max_tokens_to_sample": 5}), "max_tokens_to_sample"),
        ] {
            let Err(error) = parse(extra.clone()) else { panic!("{extra} is accepted") };
            assert_eq!(error.kind, ErrorKind::InvalidRequest, "{extra}");
            assert_eq!(error.param.as_deref(), Some(param), "{extra}");
            assert!(error.message.contains(param), "{extra}: {error}");
        }
        for body in [&b""[..], b"{", b"null", b"[]", b"{}", &b"[".repeat(100_000)] {
            let error = parse_bytes(body, RequestLimits::default()).err().unwrap();
            assert_eq!(error.kind, ErrorKind::InvalidRequest);
        }
    }

    #[test]
    fn limits_of_the_key_bound_a_message() {
        let limits = RequestLimits { max_tokens: Some(9), priority: 7, ..RequestLimits::default() };
        let parsed = |extra: Value| parse_bytes(with(extra).to_string().as_bytes(), limits);
        let request = parsed(json!({})).unwrap().requests.remove(0);
        assert_eq!((request.max_tokens, request.priority), (Some(9), 7));
        let error = parsed(json!({"max_tokens": 10})).err().unwrap();
        assert_eq!(error.param.as_deref(), Some("max_tokens"));
        assert!(error.message.contains("is 10, but this key allows at most 9"), "{error}");
    }

    /// Puts a value in the place of each value of a request in turn, and says where.
    fn replaced(value: &Value, new: &Value) -> Vec<Value> {
        let inner: Vec<Value> = match value {
            Value::Array(items) => (0..items.len())
                .flat_map(|index| {
                    replaced(&items[index], new).into_iter().map(move |item| {
                        let mut items = items.clone();
                        items[index] = item;
                        Value::Array(items)
                    })
                })
                .collect(),
            Value::Object(fields) => fields
                .iter()
                .flat_map(|(name, value)| {
                    replaced(value, new).into_iter().map(move |value| {
                        let mut fields = fields.clone();
                        fields.insert(name.clone(), value);
                        Value::Object(fields)
                    })
                })
                .collect(),
            _ => vec![],
        };
        inner.into_iter().chain([new.clone()]).collect()
    }

    #[test]
    fn a_wrong_value_anywhere_is_an_error_with_its_field_or_none() {
        let whole = with(json!({
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "tools": [{"type": "custom", "name": "f", "description": "F.", "input_schema": {"a": 1}, "strict": true}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true},
            "thinking": {"type": "enabled", "budget_tokens": 9}, "stop_sequences": ["x"], "temperature": 1,
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "d"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1]}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c", "is_error": true, "content": [{"type": "text", "text": "r"}]}]},
            ],
        }));
        let mut errors = 0;
        for new in [json!(null), json!(-1.5), json!("x"), json!([]), json!([[{}]]), json!({}), json!(true)] {
            for body in replaced(&whole, &new) {
                if let Err(error) = parse_bytes(body.to_string().as_bytes(), RequestLimits::default()) {
                    assert_eq!(error.kind, ErrorKind::InvalidRequest, "{body}");
                    let param = error.param.as_deref().unwrap_or("the body");
                    assert!(error.message.contains(param), "{error}: {body}");
                    errors += 1;
                }
            }
        }
        assert!(errors > 150, "{errors}");
    }
}
