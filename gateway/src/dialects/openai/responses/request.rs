//! Parses a request for a response. Sampling, scheduling, thinking and structured output are those of chats, where their
//! fields have the same names.

use std::collections::BTreeSet;

use russet_wire::request::{ContextOverflow, GenerationRequest, StructuredOutput};
use serde_json::Value;

use super::event::EventSequence;
use super::fields::group_of;
use super::output::Output;
use super::settings::{self, Settings};
use super::stored::{Conversation, StorageFields};
use super::writer::ResponsesWriter;
use super::{input, text_format, tools};
use crate::dialects::field_table::{ignored, refuse_unsupported};
use crate::dialects::openai::request::{parameters, template_arguments};
use crate::dialects::sampling::{self, MAX_TOP_LOGPROBS};
use crate::dialects::values::{self, JsonObject, boolean, field, integer, number};
use crate::error::GatewayError;
use crate::json_body::JsonBody;
use crate::serving::{ParsedRequest, RequestContext, unix_seconds};

/// Parses a request within the caller's limits.
pub(in crate::dialects::openai) fn parse(
    mut body: JsonBody<'_>,
    context: &RequestContext<'_>,
) -> Result<ParsedRequest<ResponsesWriter>, GatewayError> {
    let mut fields = values::fields(&mut body)?;
    let model = values::model(&fields)?;
    refuse_unsupported(&fields, group_of)?;
    let mut left_out = BTreeSet::new();
    let service_tier = parameters::service_tier(field(&fields, "service_tier"))?;
    let instructions = instructions(fields.remove("instructions"))?;
    let tools::ParsedTools { tools, choice, client_tools, repeated, repeated_choice } =
        tools::parse(&fields, &body, &mut left_out)?;
    let (format, text) = text_format::parse(&fields, &body, &mut left_out)?;
    let logprobs = logprobs(&fields, &mut left_out)?;
    let parallel_tool_calls = boolean(&fields, "parallel_tool_calls")?.unwrap_or(true);
    let context_overflow = context_overflow(&fields)?;
    let shared = parameters::request(&fields, &body, context, service_tier)?;
    let storage = StorageFields::parse(&fields, context.kept, &mut left_out)?;
    let streamed = boolean(&fields, "stream")?.unwrap_or(false);
    let conversation = storage.conversation()?;
    let earlier = conversation.as_ref().map(Conversation::items).into_iter().flatten();
    let record = storage.record(context, field(&fields, "input"), streamed)?;
    let request = GenerationRequest {
        // Taken, not copied: it is most of the body.
        messages: input::parse(instructions.as_deref(), earlier, fields.remove("input"), &mut left_out)?,
        tools,
        tool_choice: choice,
        single_tool_call: !parallel_tool_calls,
        template_arguments: template_arguments::parse(&fields, &body)?,
        thinking_budget: sampling::thinking_budget(&fields)?,
        logprobs,
        continue_final_message: boolean(&fields, "continue_final_message")?.unwrap_or(false),
        context_overflow,
        max_tokens: context.limits.max_tokens(
            integer(&fields, "max_output_tokens", 1, i64::from(u32::MAX))?.map(|tokens| tokens as u32),
            "max_output_tokens",
        )?,
        structured_output: either(format, shared.structured_output)?,
        ..shared
    };
    let settings = Settings {
        model: model.clone(),
        instructions: settings::instructions(instructions),
        max_output_tokens: request.max_tokens,
        max_tool_calls: field(&fields, "max_tool_calls").and_then(values::whole),
        metadata: settings::metadata(field(&fields, "metadata"))?,
        parallel_tool_calls,
        previous_response_id: storage.previous.clone(),
        store: record.is_some(),
        background: storage.background,
        prompt_cache_key: settings::name(&fields, "prompt_cache_key"),
        safety_identifier: settings::name(&fields, "safety_identifier"),
        user: settings::name(&fields, "user"),
        reasoning: settings::reasoning(&fields, &mut left_out),
        service_tier: service_tier.unwrap_or("default"),
        temperature: request.sampling.temperature,
        top_p: number(&fields, "top_p", 0.0, 1.0)?.unwrap_or(1.0),
        presence_penalty: request.sampling.presence_penalty,
        frequency_penalty: request.sampling.frequency_penalty,
        top_logprobs: logprobs.unwrap_or(0),
        text,
        tool_choice: repeated_choice,
        tools: repeated,
        truncation: if context_overflow == ContextOverflow::Shift { "auto" } else { "disabled" },
    };
    let writer = ResponsesWriter {
        id: format!("resp_{}", context.id.unique),
        created_at: context.unix_seconds,
        settings,
        output: Output::new(context.id.unique.to_string(), client_tools),
        events: EventSequence::default(),
        clock: unix_seconds,
        record,
        _inherited: conversation.map(Conversation::into_permit),
        ending: None,
    };
    Ok(ParsedRequest {
        fallback_models: Vec::new(),
        keep_alive: None,
        model,
        prompt_field: "input",
        requests: vec![request],
        left_out: sampling::left_out(&fields),
        choices: 1,
        streamed,
        ignored: ignored(&fields, group_of, left_out),
        writer,
    })
}

/// The instructions of a request.
pub(super) fn instructions(value: Option<Value>) -> Result<Option<String>, GatewayError> {
    match value {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(GatewayError::field("instructions", "`instructions` must be a string")),
    }
}

/// What becomes of a conversation that is too long: OpenAI's field for it, or ours.
fn context_overflow(fields: &JsonObject) -> Result<ContextOverflow, GatewayError> {
    match field(fields, "truncation").map(Value::as_str) {
        None => parameters::context_overflow(field(fields, "context_overflow")),
        Some(Some("disabled")) => Ok(ContextOverflow::Refuse),
        Some(Some("auto")) => Ok(ContextOverflow::Shift),
        Some(_) => Err(GatewayError::field(
            "truncation",
            "`truncation` must be disabled, or auto, which leaves out the oldest turns",
        )),
    }
}

/// How many of the most probable tokens are told besides the sampled one; `None` where nothing is. Names of `include` that
/// have no effect are added to `ignored`.
fn logprobs(fields: &JsonObject, ignored: &mut BTreeSet<String>) -> Result<Option<u32>, GatewayError> {
    let none = Value::Array(Vec::new());
    let invalid = || GatewayError::field("include", "`include` must be a list of strings");
    let included = field(fields, "include").unwrap_or(&none).as_array().ok_or_else(invalid)?;
    let mut are_included = false;
    for name in included {
        match name.as_str().ok_or_else(invalid)? {
            "message.output_text.logprobs" => are_included = true,
            other => {
                ignored.insert(format!("include.{other}"));
            }
        }
    }
    let top = integer(fields, "top_logprobs", 0, MAX_TOP_LOGPROBS)?.unwrap_or(0) as u32;
    Ok((are_included || top > 0).then_some(top))
}

/// What the text has to be, by OpenAI's field or by those of other servers.
fn either(
    format: Option<StructuredOutput>,
    other: Option<StructuredOutput>,
) -> Result<Option<StructuredOutput>, GatewayError> {
    match (format, other) {
        (Some(_), Some(_)) => Err(GatewayError::field(
            "text.format",
            "`text.format` and fields for structured output of other servers exclude each other; send one of them",
        )),
        (format, other) => Ok(format.or(other)),
    }
}

#[cfg(test)]
mod tests {
    use russet_wire::conversation::Message;
    use russet_wire::request::Sampling;
    use serde_json::json;

    use super::super::fields::FIELDS;
    use super::*;
    use crate::error::ErrorKind;
    use crate::json_body::JsonScan;
    use crate::request_defaults::LeftOut;
    use crate::request_id::RequestId;
    use crate::request_limits::RequestLimits;

    type Parsed = ParsedRequest<ResponsesWriter>;

    fn parse_with(extra: &Value, limits: RequestLimits) -> Result<Parsed, GatewayError> {
        let mut body = json!({"model": "m", "input": "hi"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let body = body.to_string();
        let id = RequestId { unique: "id".into(), shown: "req_id".into() };
        let body = JsonScan::new(body.as_bytes())?.decode(body.as_bytes())?;
        super::parse(body, &RequestContext { id: &id, unix_seconds: 17, limits, kept: None })
    }

    fn parse(extra: Value) -> Result<Parsed, GatewayError> {
        parse_with(&extra, RequestLimits::default())
    }

    #[test]
    fn a_plain_request_means_what_openai_says() {
        let ParsedRequest {
            fallback_models: _,
            model,
            requests,
            left_out,
            choices,
            streamed,
            ignored,
            prompt_field: _,
            keep_alive: _,
            writer,
        } = parse(json!({})).unwrap();
        assert_eq!((model.as_str(), left_out, choices, streamed), ("m", LeftOut::ALL, 1, false));
        assert_eq!(ignored, Vec::<String>::new());
        let expected = GenerationRequest {
            id: "id".into(),
            messages: vec![Message::new("user", "hi")],
            sampling: Sampling { temperature: 1.0, ..Sampling::default() },
            ..GenerationRequest::default()
        };
        assert_eq!(requests, [expected]);
        assert_eq!((writer.id.as_str(), writer.created_at), ("resp_id", 17));
        assert_eq!(
            serde_json::to_value(&writer.settings).unwrap(),
            json!({
                "model": "m", "instructions": null, "max_output_tokens": null, "max_tool_calls": null,
                "metadata": {}, "parallel_tool_calls": true, "previous_response_id": null, "store": false,
                "background": false, "prompt_cache_key": null, "safety_identifier": null, "user": null,
                "reasoning": {"effort": null, "summary": null}, "service_tier": "default", "temperature": 1.0,
                "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "top_logprobs": 0,
                "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
                "truncation": "disabled",
            })
        );
    }

    #[test]
    fn every_field_that_is_honoured_arrives() {
        let parsed = parse(json!({
            "instructions": "Be brief.", "stream": true, "max_output_tokens": 9.0, "temperature": 0, "top_p": 0,
            "top_k": 40, "min_p": 0.25, "repetition_penalty": 1.5, "seed": 3, "stop": "END",
            "parallel_tool_calls": false, "truncation": "auto", "service_tier": "flex",
            "reasoning": {"effort": "none", "summary": "auto", "mode": "pro"}, "text": {"format": {"type": "json_object"}},
            "include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 2,
            "metadata": {"a": "b"}, "store": true, "user": "eve", "prompt_cache_key": "k",
            "safety_identifier": "s", "max_tool_calls": 3, "stream_options": {"include_obfuscation": false},
            "tools": [{"type": "function", "name": "f"}], "tool_choice": "required",
            "previous_response_id": null, "conversation": null, "background": false,
        }))
        .unwrap();
        let request = &parsed.requests[0];
        assert_eq!(request.messages, [Message::new("system", "Be brief."), Message::new("user", "hi")]);
        let sampling = Sampling {
            top_p: 1e-6,
            top_k: 40,
            min_p: 0.25,
            repetition_penalty: 1.5,
            seed: Some(3),
            ..Sampling::default()
        };
        assert_eq!((&request.sampling, request.max_tokens, request.priority), (&sampling, Some(9), -30));
        assert!(request.single_tool_call && parsed.streamed);
        assert_eq!(request.context_overflow, ContextOverflow::Shift);
        assert_eq!(request.logprobs, Some(2));
        assert_eq!(request.structured_output, Some(StructuredOutput::JsonObject));
        assert_eq!(
            request.template_arguments,
            r#"{"enable_thinking":false,"thinking":false,"reasoning_effort":"none"}"#
        );
        assert_eq!((request.tools.len(), request.stop.as_slice()), (1, ["END".to_owned()].as_slice()));
        let expected = [
            "include.reasoning.encrypted_content",
            "max_tool_calls",
            "prompt_cache_key",
            "reasoning.mode",
            "safety_identifier",
            "store",
            "stream_options",
            "user",
        ];
        assert_eq!(parsed.ignored, expected);
        let settings = serde_json::to_value(&parsed.writer.settings).unwrap();
        for (name, expected) in [
            ("instructions", json!("Be brief.")),
            ("max_output_tokens", json!(9)),
            ("max_tool_calls", json!(3)),
            ("metadata", json!({"a": "b"})),
            ("parallel_tool_calls", json!(false)),
            ("store", json!(false)),
            ("user", json!("eve")),
            ("prompt_cache_key", json!("k")),
            ("safety_identifier", json!("s")),
            ("reasoning", json!({"effort": "none", "summary": "auto"})),
            ("service_tier", json!("flex")),
            ("temperature", json!(0.0)),
            ("top_p", json!(0.0)),
            ("top_logprobs", json!(2)),
            ("text", json!({"format": {"type": "json_object"}})),
            ("tool_choice", json!("required")),
            (
                "tools",
                json!([{"type": "function", "name": "f", "description": null, "parameters": null, "strict": false}]),
            ),
            ("truncation", json!("auto")),
        ] {
            assert_eq!(settings[name], expected, "{name}");
        }
    }

    #[test]
    fn unsupported_request_fields_are_refused_by_name() {
        for (extra, param) in [
            (json!({"model": null}), "model"),
            (json!({"input": null}), "input"),
            (json!({"instructions": ["x"]}), "instructions"),
            (json!({"max_output_tokens": 0}), "max_output_tokens"),
            (json!({"max_output_tokens": 1.5}), "max_output_tokens"),
            (json!({"max_tokens": 5}), "max_tokens"),
            (json!({"max_completion_tokens": 5}), "max_completion_tokens"),
            (json!({"messages": [{}]}), "messages"),
            (json!({"response_format": {"type": "text"}}), "response_format"),
            (json!({"n": 2}), "n"),
            (json!({"logprobs": true}), "logprobs"),
            (json!({"top_logprobs": 21}), "top_logprobs"),
            (json!({"include": "all"}), "include"),
            (json!({"include": [7]}), "include"),
            (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
            (json!({"conversation": {"id": "conv_1"}}), "conversation"),
            (json!({"background": true}), "background"),
            (json!({"prompt": {"id": "pmpt_1"}}), "prompt"),
            (json!({"truncation": "middle"}), "truncation"),
            (json!({"reasoning": {"effort": "all"}}), "reasoning.effort"),
            (json!({"reasoning": 7}), "reasoning"),
            (json!({"text": {"format": {"type": "json_object"}}, "regex": "a"}), "text.format"),
            (json!({"metadata": 7}), "metadata"),
            (json!({"metadata": {"a": 7}}), "metadata"),
            (json!({"metadata": {"a": "x".repeat(513)}}), "metadata"),
            (json!({"metadata": {"x".repeat(65): "a"}}), "metadata"),
            (json!({"store": "yes"}), "store"),
            (json!({"stream": "yes"}), "stream"),
            (json!({"parallel_tool_calls": 1}), "parallel_tool_calls"),
            (json!({"service_tier": "express"}), "service_tier"),
            (json!({"temperature": 9}), "temperature"),
            (json!({"mirostat": 2}), "mirostat"),
        ] {
            let Err(error) = parse(extra.clone()) else { panic!("{extra} is accepted") };
            assert_eq!(error.kind, ErrorKind::InvalidRequest, "{extra}");
            assert_eq!(error.param.as_deref(), Some(param), "{extra}");
            assert!(error.message.contains(param), "{extra}: {error}");
        }
    }

    #[test]
    fn output_tokens_are_capped_by_the_key() {
        let limits = RequestLimits { max_tokens: Some(5), ..RequestLimits::default() };
        for (extra, expected) in [
            (json!({}), Ok(Some(5))),
            (json!({"max_output_tokens": 4}), Ok(Some(4))),
            (json!({"max_output_tokens": 6}), Err(Some("max_output_tokens".to_owned()))),
        ] {
            let got = parse_with(&extra, limits).map(|parsed| parsed.requests[0].max_tokens);
            assert_eq!(got.map_err(|error| error.param), expected, "{extra}");
        }
    }

    #[test]
    fn no_value_of_any_field_does_harm() {
        let values = [
            json!(true),
            json!(-1),
            json!(1e300),
            json!(""),
            json!("x"),
            json!([]),
            json!([7]),
            json!([[{}]]),
            json!([{"type": "message"}]),
            json!([{"type": "function"}]),
            json!({}),
            json!({"type": 7}),
            json!({"type": "function", "name": 7}),
            json!({"format": {"type": "json_schema", "schema": []}}),
            json!({"effort": {}, "summary": 7}),
        ];
        let names = FIELDS.iter().flat_map(|group| group.names).chain(&[
            "model",
            "tools",
            "tool_choice",
            "stream",
            "temperature",
            "top_logprobs",
            "user",
            "stop",
            "seed",
            "chat_template_kwargs",
            "structured_outputs",
            "logit_bias",
            "parallel_tool_calls",
            "service_tier",
        ]);
        for name in names {
            for value in &values {
                match parse(json!({*name: value})) {
                    Ok(parsed) => assert_eq!(parsed.requests.len(), 1, "{name}: {value}"),
                    Err(error) => {
                        assert_eq!(error.kind, ErrorKind::InvalidRequest, "{name}: {value}");
                        assert!(error.param.is_some(), "{name}: {value}: {error}");
                    }
                }
            }
        }
    }
}
