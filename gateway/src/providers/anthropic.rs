//! Anthropic's Messages, as a client of it.

use russet_wire::conversation::{Message, Tool, ToolCall, ToolChoice};
use russet_wire::event::{Delta, FinishReason, GenerationEvent, Usage};
use serde_json::{Value, json};

use super::openai::{bounded, error_message, json_or_text, number};
use super::provider_stream::{EventParser, ParseError};
use super::request::ProviderRequest;

/// What is sent behind the endpoint.
pub(super) const PATH: &str = "/messages";
/// The version of the API that is spoken.
pub(super) const VERSION: &str = "2023-06-01";
/// Tokens of an answer where its client names no limit; the API wants one.
const DEFAULT_MAX_TOKENS: u32 = 8192;
/// The smallest budget of thinking that the API takes.
const MIN_THINKING_TOKENS: u32 = 1024;

/// The body of a request.
pub(super) fn body(wanted: &ProviderRequest) -> Value {
    let ProviderRequest { model, request, sampling, left_out, .. } = wanted;
    let is_system = |message: &&Message| ["system", "developer"].contains(&message.role.as_str());
    let system: Vec<&str> =
        request.messages.iter().filter(is_system).map(|one| one.content.as_str()).collect();
    let others = request.messages.iter().filter(|message| !is_system(message));
    let mut body = json!({
        "model": model,
        "messages": turns(others),
        "max_tokens": request.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS),
        "stream": true,
    });
    let Some(fields) = body.as_object_mut() else { return body };
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            fields.insert(name.to_owned(), value);
        }
    };
    set("system", (!system.is_empty()).then(|| system.join("\n\n").into()));
    let thinking = thinking(wanted);
    // With thinking the API takes no other sampling than its own.
    if thinking.is_none() {
        set("temperature", (!left_out.temperature).then(|| number(sampling.temperature)));
        // Newer models refuse both at once.
        set("top_p", (left_out.temperature && !left_out.top_p).then(|| number(sampling.top_p)));
        set("top_k", (!left_out.top_k && sampling.top_k > 0).then(|| sampling.top_k.into()));
    }
    set("thinking", thinking);
    set("stop_sequences", (!request.stop.is_empty()).then(|| request.stop.clone().into()));
    if !request.tools.is_empty() {
        set("tools", Some(request.tools.iter().map(tool).collect::<Vec<_>>().into()));
        set("tool_choice", tool_choice(&request.tool_choice, request.single_tool_call));
    }
    body
}

/// A budget of thinking. Thinking of earlier turns is not sent, as it is not signed, and within calls of tools the API wants
/// it; so there is none there.
fn thinking(wanted: &ProviderRequest) -> Option<Value> {
    let budget = wanted.request.thinking_budget.filter(|budget| *budget >= MIN_THINKING_TOKENS)?;
    let fits = wanted.request.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS) > budget;
    let in_calls = wanted.request.messages.last().is_some_and(|last| last.role == "tool");
    let is_forced = wanted.request.tool_choice != ToolChoice::Auto;
    (fits && !in_calls && !is_forced).then(|| json!({"type": "enabled", "budget_tokens": budget}))
}

/// Messages as turns of user and assistant: results of tools are a part of the user's.
fn turns<'a>(messages: impl Iterator<Item = &'a Message>) -> Vec<Value> {
    let mut turns: Vec<(&str, Vec<Value>)> = Vec::new();
    for message in messages {
        let role = if message.role == "assistant" { "assistant" } else { "user" };
        let blocks = blocks(message);
        match turns.last_mut() {
            Some((last, so_far)) if *last == role => so_far.extend(blocks),
            _ => turns.push((role, blocks)),
        }
    }
    let turn = |(role, content): (&str, Vec<Value>)| json!({"role": role, "content": content});
    turns.into_iter().filter(|(_, content)| !content.is_empty()).map(turn).collect()
}

fn blocks(message: &Message) -> Vec<Value> {
    if message.role == "tool" {
        return vec![json!({
            "type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.content,
        })];
    }
    let text = (!message.content.is_empty()).then(|| json!({"type": "text", "text": message.content}));
    let call = |call: &ToolCall| json!({"type": "tool_use", "id": call.id, "name": call.name, "input": json_or_text(&call.arguments)});
    text.into_iter().chain(message.tool_calls.iter().map(call)).collect()
}

fn tool(tool: &Tool) -> Value {
    let schema = tool.parameters.as_deref().map_or_else(|| json!({"type": "object"}), json_or_text);
    let mut out = json!({"name": tool.name, "input_schema": schema});
    if let (Some(fields), Some(description)) = (out.as_object_mut(), &tool.description) {
        fields.insert("description".into(), description.clone().into());
    }
    out
}

fn tool_choice(choice: &ToolChoice, single: bool) -> Option<Value> {
    let mut out = match choice {
        ToolChoice::Auto if !single => return None,
        ToolChoice::Auto => json!({"type": "auto"}),
        ToolChoice::Required => json!({"type": "any"}),
        ToolChoice::Named(name) => json!({"type": "tool", "name": name}),
    };
    if let Some(fields) = out.as_object_mut().filter(|_| single) {
        fields.insert("disable_parallel_tool_use".into(), true.into());
    }
    Some(out)
}

/// Reads a stream of events.
#[derive(Default)]
pub(super) struct AnthropicParser {
    /// The strings that may end the answer, as the request has them.
    stop: Vec<String>,
    /// The call whose arguments are coming.
    call: Option<ToolCall>,
    usage: Usage,
    reason: Option<FinishReason>,
}

impl EventParser for AnthropicParser {
    fn parse(&mut self, data: &str) -> Result<Vec<GenerationEvent>, ParseError> {
        let event: Value =
            serde_json::from_str(data).map_err(|error| ParseError::Unreadable(error.to_string()))?;
        let text = |pointer: &str| event.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let mut delta = Delta::default();
        match text("/type") {
            "message_start" => self.count(event.pointer("/message/usage")),
            "content_block_start" if text("/content_block/type") == "tool_use" => {
                let (id, name) =
                    (text("/content_block/id").to_owned(), text("/content_block/name").to_owned());
                self.call = Some(ToolCall { id, name, arguments: String::new() });
            }
            "content_block_start" => text("/content_block/text").clone_into(&mut delta.text),
            "content_block_delta" => match text("/delta/type") {
                "text_delta" => text("/delta/text").clone_into(&mut delta.text),
                "thinking_delta" => text("/delta/thinking").clone_into(&mut delta.reasoning),
                "input_json_delta" => {
                    if let Some(call) = &mut self.call {
                        call.arguments.push_str(text("/delta/partial_json"));
                    }
                }
                _ => {}
            },
            "content_block_stop" => {
                if let Some(mut call) = self.call.take() {
                    if call.arguments.is_empty() {
                        call.arguments.push_str("{}");
                    }
                    delta.tool_calls.push(call);
                }
            }
            "message_delta" => {
                self.count(event.get("usage"));
                let stopped_by = text("/delta/stop_sequence");
                self.reason = Some(match text("/delta/stop_reason") {
                    "max_tokens" | "model_context_window_exceeded" => FinishReason::Length,
                    "stop_sequence" => self.stop_string(stopped_by),
                    _ => FinishReason::Stop,
                });
            }
            "message_stop" => return Ok(self.end().into_iter().collect()),
            "error" => return Err(ParseError::Reported(error_message(&event))),
            "ping" => {}
            "" => return Err(ParseError::Unreadable("an event without a type".to_owned())),
            // The API may have more of them at any time.
            _ => {}
        }
        Ok(if delta.is_empty() { Vec::new() } else { vec![GenerationEvent::Token { id: 0, delta }] })
    }

    fn end(&mut self) -> Option<GenerationEvent> {
        let reason = self.reason.take()?;
        Some(GenerationEvent::Finished { reason, usage: self.usage })
    }
}

impl AnthropicParser {
    /// A reader of the answer to a request that has these stop strings.
    pub(super) fn new(stop: Vec<String>) -> Self {
        Self { stop, ..Self::default() }
    }

    fn count(&mut self, usage: Option<&Value>) {
        let Some(usage) = usage else { return };
        let count = |name: &str| usage.get(name).and_then(Value::as_u64).map(bounded);
        if let Some(read) = count("input_tokens") {
            let cached = count("cache_read_input_tokens").unwrap_or(0);
            let written = count("cache_creation_input_tokens").unwrap_or(0);
            self.usage.cached_tokens = cached;
            self.usage.prompt_tokens = read.saturating_add(cached).saturating_add(written);
        }
        if let Some(written) = count("output_tokens") {
            self.usage.completion_tokens = written;
        }
    }

    fn stop_string(&self, text: &str) -> FinishReason {
        let index =
            self.stop.iter().position(|stop| stop == text).and_then(|index| u32::try_from(index).ok());
        index.map_or(FinishReason::Stop, FinishReason::StopString)
    }
}

#[cfg(test)]
mod tests {
    use russet_wire::request::{GenerationRequest, Sampling};

    use super::*;
    use crate::providers::provider_stream::tests::{provider, read};
    use crate::request_defaults::LeftOut;

    #[test]
    fn a_request_says_what_its_client_said() {
        let call = |id: &str| ToolCall { id: id.into(), name: "f".into(), arguments: "{\"x\":1}".into() };
        let result = |id: &str, text: &str| Message { tool_call_id: id.into(), ..Message::new("tool", text) };
        let request = GenerationRequest {
            messages: vec![
                Message::new("system", "Be brief."),
                Message::new("developer", "Be kind."),
                Message::new("user", "Go."),
                Message { tool_calls: vec![call("a"), call("b")], ..Message::new("assistant", "I do.") },
                result("a", "1"),
                result("b", "2"),
                Message::new("user", "And?"),
            ],
            tools: vec![Tool { name: "f".into(), ..Tool::default() }],
            tool_choice: ToolChoice::Required,
            single_tool_call: true,
            stop: vec!["END".into()],
            ..GenerationRequest::default()
        };
        let left_out = LeftOut { temperature: true, top_k: true, ..LeftOut::default() };
        let sampling = Sampling { top_p: 0.9, ..Sampling::default() };
        let provider = provider("https://api.anthropic.com/v1");
        let wanted =
            ProviderRequest { provider, model: "claude".into(), request, sampling, left_out, key: None };
        let expected = json!({
            "model": "claude",
            "system": "Be brief.\n\nBe kind.",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Go."}]},
                {"role": "assistant", "content": [
                    {"type": "text", "text": "I do."},
                    {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
                    {"type": "tool_use", "id": "b", "name": "f", "input": {"x": 1}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "1"},
                    {"type": "tool_result", "tool_use_id": "b", "content": "2"},
                    {"type": "text", "text": "And?"},
                ]},
            ],
            "max_tokens": 8192,
            "stream": true,
            "top_p": 0.9,
            "stop_sequences": ["END"],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
        });
        assert_eq!(body(&wanted), expected);
        let thinks = GenerationRequest {
            thinking_budget: Some(2000),
            tool_choice: ToolChoice::Auto,
            ..wanted.request.clone()
        };
        let thinking = body(&ProviderRequest { request: thinks, ..wanted });
        assert_eq!(thinking["thinking"], json!({"type": "enabled", "budget_tokens": 2000}));
        assert_eq!(thinking.get("top_p"), None);
    }

    #[test]
    fn a_stream_has_thinking_text_and_calls() {
        let events = [
            r#"{"type":"message_start","message":{"usage":{"input_tokens":5,"cache_read_input_tokens":7,"output_tokens":1}}}"#,
            r#"{"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":""}}"#,
            r#"{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"hm"}}"#,
            r#"{"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"s"}}"#,
            r#"{"type":"content_block_stop","index":0}"#,
            r#"{"type":"ping"}"#,
            r#"{"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}"#,
            r#"{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Hi"}}"#,
            r#"{"type":"content_block_stop","index":1}"#,
            r#"{"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"t","name":"f","input":{}}}"#,
            r#"{"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{\"x\""}}"#,
            r#"{"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":":1}"}}"#,
            r#"{"type":"content_block_stop","index":2}"#,
            r#"{"type":"message_delta","delta":{"stop_reason":"tool_use","stop_sequence":null},"usage":{"output_tokens":20}}"#,
            r#"{"type":"message_stop"}"#,
        ];
        let token = |delta| GenerationEvent::Token { id: 0, delta };
        let call = ToolCall { id: "t".into(), name: "f".into(), arguments: r#"{"x":1}"#.into() };
        let expected = [
            token(Delta { reasoning: "hm".into(), ..Delta::default() }),
            token(Delta::text("Hi")),
            token(Delta { tool_calls: vec![call], ..Delta::default() }),
            GenerationEvent::Finished {
                reason: FinishReason::Stop,
                usage: Usage { prompt_tokens: 12, completion_tokens: 20, cached_tokens: 7 },
            },
        ];
        assert_eq!(read(AnthropicParser::default(), &events).unwrap(), expected);
    }

    #[test]
    fn ends_and_errors_have_their_reasons() {
        let end = |reason: &str, by: &str| {
            format!(r#"{{"type":"message_delta","delta":{{"stop_reason":"{reason}","stop_sequence":{by}}}}}"#)
        };
        let reason = |end: String| {
            let parser = AnthropicParser::new(vec!["A".into(), "B".into()]);
            match read(parser, &[&end, r#"{"type":"message_stop"}"#]).unwrap().pop() {
                Some(GenerationEvent::Finished { reason, .. }) => reason,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(reason(end("max_tokens", "null")), FinishReason::Length);
        assert_eq!(reason(end("stop_sequence", r#""B""#)), FinishReason::StopString(1));
        assert_eq!(reason(end("refusal", "null")), FinishReason::Stop);
        let error = r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#;
        let reported = read(AnthropicParser::default(), &[error]).unwrap_err();
        assert_eq!(reported, ParseError::Reported("Overloaded".into()));
        for wrong in ["{", "7", "{}"] {
            assert!(
                matches!(read(AnthropicParser::default(), &[wrong]), Err(ParseError::Unreadable(_))),
                "{wrong}"
            );
        }
    }
}
