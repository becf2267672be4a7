//! Parses a chat request into the dialect-free one. Every error names the field. An unsupported field that
//! would change the response is rejected; one that would not is ignored and reported.

pub(super) mod completion;
pub(super) mod fields;
pub(super) mod messages;
pub(super) mod parameters;
pub(super) mod structured_output;
pub(super) mod template_arguments;

use std::collections::BTreeSet;

use russet_wire::request::GenerationRequest;

use super::response::ChatWriter;
use crate::dialects::field_table::{ignored, refuse_unsupported};
use crate::dialects::values::{self, boolean, field};
use crate::dialects::{sampling, tools};
use crate::error::GatewayError;
use crate::json_body::JsonBody;
use crate::routes::BYTES_PER_TOKEN;
use crate::serving::{ParsedRequest, RequestContext};

/// Parses a chat request within the caller's limits.
pub(super) fn parse(
    mut body: JsonBody<'_>,
    context: &RequestContext<'_>,
) -> Result<ParsedRequest<ChatWriter>, GatewayError> {
    let mut fields = values::fields(&mut body)?;
    let (model, fallback_models) = values::models(&fields)?;
    refuse_unsupported(&fields, fields::group_of)?;
    let choices = parameters::choices(&fields)?;
    let service_tier = parameters::service_tier(field(&fields, "service_tier"))?;
    let mut left_out = BTreeSet::new();
    let (tools, tool_choice) = tools::parse(&fields, &body)?;
    let prompt_logprobs = sampling::prompt_logprobs(&fields)?;
    let request = GenerationRequest {
        // Taken, not copied: they are most of the body.
        messages: messages::parse(fields.remove("messages"), &mut left_out)?,
        tools,
        tool_choice,
        single_tool_call: boolean(&fields, "parallel_tool_calls")? == Some(false),
        template_arguments: template_arguments::parse(&fields, &body)?,
        thinking_budget: sampling::thinking_budget(&fields)?,
        logprobs: sampling::logprobs(&fields)?,
        prompt_logprobs,
        continue_final_message: boolean(&fields, "continue_final_message")?.unwrap_or(false),
        context_overflow: parameters::context_overflow(field(&fields, "context_overflow"))?,
        ..parameters::request(&fields, &body, context, service_tier)?
    };
    if prompt_logprobs.is_some() {
        sampling::check_scored_choices(choices)?;
        let bytes: usize = request.messages.iter().flat_map(|message| message.texts()).map(str::len).sum();
        sampling::check_prompt_logprobs("prompt_logprobs", bytes / BYTES_PER_TOKEN, prompt_logprobs)?;
    }
    let streamed = boolean(&fields, "stream")?.unwrap_or(false);
    let writer = ChatWriter {
        id: format!("chatcmpl-{}", context.id.unique),
        created: context.unix_seconds,
        model: model.clone(),
        include_usage: parameters::include_usage(field(&fields, "stream_options"))?,
        service_tier,
        tool_calls: vec![0; choices],
        prompt: None,
    };
    let ignored = ignored(&fields, fields::group_of, left_out);
    Ok(ParsedRequest {
        keep_alive: None,
        model,
        fallback_models,
        prompt_field: "messages",
        requests: vec![request],
        left_out: sampling::left_out(&fields),
        choices,
        streamed,
        ignored,
        writer,
    })
}

#[cfg(test)]
mod tests {
    use russet_wire::conversation::{Message, Tool, ToolChoice};
    use russet_wire::request::{DrySampling, Sampling};
    use serde_json::{Value, json};

    use super::*;
    use crate::error::ErrorKind;
    use crate::json_body::JsonScan;
    use crate::request_defaults::LeftOut;
    use crate::request_id::RequestId;
    use crate::request_limits::RequestLimits;

    type ParsedChat = ParsedRequest<ChatWriter>;

    fn parse_bytes(body: &[u8], limits: RequestLimits) -> Result<ParsedChat, GatewayError> {
        let id = RequestId { unique: "id".into(), shown: "req_id".into() };
        let body = JsonScan::new(body)?.decode(body)?;
        super::parse(body, &RequestContext { id: &id, unix_seconds: 17, limits, kept: None })
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
            writer,
        } = parse(&with(json!({}))).unwrap();
        let request = requests.remove(0);
        assert_eq!((choices, left_out), (1, LeftOut::ALL));
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
                prompt: None,
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
        let roles: Vec<&str> =
            chat.requests[0].messages.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["system", "assistant", "user"]);
        assert_eq!(chat.requests[0].messages[1].content, "ab");
        assert!(chat.streamed && chat.writer.include_usage && chat.requests[0].ignore_eos);
        assert_eq!(chat.requests[0].max_tokens, Some(5));
        assert_eq!(
            chat.requests[0].sampling,
            Sampling { top_p: 1e-6, min_p: 0.25, seed: Some(u64::MAX), ..Sampling::default() }
        );
        assert_eq!(chat.requests[0].stop, ["\n", "END"]);
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
            (json!({"options": {"num_ctx": 65_536, "temperature": 0}}), "options"),
            (json!({"chat_template": "{{ x }}"}), "chat_template"),
            (json!({"echo": true}), "echo"),
            (json!({"truncate_prompt_tokens": 0}), "truncate_prompt_tokens"),
            (json!({"context_overflow": "middle"}), "context_overflow"),
            (json!({"modalities": ["text", "audio"]}), "modalities"),
            (json!({"prompt_logprobs": 1, "n": 2}), "n"),
            (json!({"prompt_logprobs": 21}), "prompt_logprobs"),
            (json!({"prompt_logprobs": -1}), "prompt_logprobs"),
            (json!({"prompt_logprobs": true}), "prompt_logprobs"),
            (json!({"prompt_logprobs": 0, "stream": true}), "prompt_logprobs"),
            (
                json!({"prompt_logprobs": 20, "messages": [{"role": "user", "content": "x".repeat(60_000)}]}),
                "prompt_logprobs",
            ),
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
        let request = parse_bytes(body, RequestLimits::default()).unwrap().requests.remove(0);
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
        assert_eq!(parse(&off).unwrap().requests[0].tools, []);
    }

    #[test]
    fn a_number_without_fraction_is_an_integer() {
        let chat = parse(&with(json!({
            "max_tokens": 64.0, "max_completion_tokens": 1e3, "top_k": 40.0, "seed": 7.0, "n": 1.0, "priority": 3.0,
        })))
        .unwrap();
        let GenerationRequest { max_tokens, sampling, priority, .. } = &chat.requests[0];
        assert_eq!((*max_tokens, sampling.top_k, sampling.seed, *priority), (Some(1000), 40, Some(7), -3));
        let chat = parse(&with(json!({"top_k": -1.0, "seed": -1.0, "priority": 0.0}))).unwrap();
        assert_eq!((chat.requests[0].sampling.top_k, chat.requests[0].sampling.seed), (0, Some(u64::MAX)));
    }

    #[test]
    fn penalties_biases_and_ends_arrive() {
        let sampled = |extra: Value| {
            let request = parse(&with(extra)).unwrap().requests.remove(0);
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
            "skip_special_tokens": true, "options": {"num_ctx": 65_536}, "guided_json": null, "bad_words": [], "prompt": "", "repetition_penalty": 1,
        });
        assert_eq!(sampled(nothing), (plain, vec![]));
    }

    #[test]
    fn choices_of_tools_limits_of_thinking_and_logprobs_arrive() {
        let of = |extra: Value| {
            let mut body = with(extra);
            body["tools"] = json!([{"function": {"name": "f", "strict": true}}]);
            parse(&body).unwrap().requests.remove(0)
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
            (json!({"prompt_logprobs": false}), None),
            (json!({"prompt_logprobs": 0}), Some(0)),
            (json!({"prompt_logprobs": 20.0, "stream": false}), Some(20)),
        ] {
            assert_eq!(of(extra.clone()).prompt_logprobs, expected, "{extra}");
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
        assert_eq!(sampling.dry, Some(expected));
        assert_eq!(of(json!({"dry_base": 2})).sampling.dry, None, "nothing is penalised");
    }

    #[test]
    fn as_many_stop_texts_as_the_engine_takes_are_read() {
        let stops =
            |value: Value| parse(&with(json!({"stop": value}))).map(|mut chat| chat.requests.remove(0).stop);
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
                    assert_eq!(
                        (chat.requests[0].priority, chat.writer.service_tier),
                        expected,
                        "{key} {extra}"
                    );
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
            let got = got.map(|chat| chat.requests[0].max_tokens).map_err(|error| error.param.unwrap());
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
