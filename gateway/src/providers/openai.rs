//! OpenAI's Chat Completions, as a client of it. llama.cpp, LM Studio, Ollama, OpenRouter, vLLM and another Russet answer it
//! too, each with its own variants: where thinking is (`reasoning_content`, `reasoning`), whether usage comes with the last
//! chunk or after it, and errors in the middle of a stream.

use russet_crds::Money;
use russet_wire::conversation::{Message, Tool, ToolCall, ToolChoice};
use russet_wire::event::{Delta, FinishReason, GenerationEvent, Usage};
use russet_wire::request::StructuredOutput;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::provider_stream::{EventParser, ParseError};
use super::request::ProviderRequest;

/// What is sent behind the endpoint.
pub(super) const PATH: &str = "/chat/completions";

/// The body of a request.
pub(super) fn body(wanted: &ProviderRequest) -> Value {
    let ProviderRequest { provider, model, request, sampling, left_out, key: _ } = wanted;
    let mut body = json!({
        "model": model,
        "messages": request.messages.iter().map(message).collect::<Vec<_>>(),
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    let Some(fields) = body.as_object_mut() else { return body };
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            fields.insert(name.to_owned(), value);
        }
    };
    // OpenAI itself refuses the old name for its newer models; most others know no new one.
    let is_openai = provider.spec.endpoint.starts_with("https://api.openai.com/");
    let max_tokens = if is_openai { "max_completion_tokens" } else { "max_tokens" };
    set(max_tokens, request.max_tokens.map(Value::from));
    set("temperature", (!left_out.temperature).then(|| number(sampling.temperature)));
    set("top_p", (!left_out.top_p).then(|| number(sampling.top_p)));
    set("top_k", (!left_out.top_k && sampling.top_k > 0).then(|| sampling.top_k.into()));
    set("min_p", (!left_out.min_p && sampling.min_p > 0.0).then(|| number(sampling.min_p)));
    let repetition = sampling.repetition_penalty;
    set(
        "repetition_penalty",
        (!left_out.repetition_penalty && repetition != 1.0).then(|| number(repetition)),
    );
    set("presence_penalty", (sampling.presence_penalty != 0.0).then(|| number(sampling.presence_penalty)));
    set("frequency_penalty", (sampling.frequency_penalty != 0.0).then(|| number(sampling.frequency_penalty)));
    set("stop", (!request.stop.is_empty()).then(|| request.stop.clone().into()));
    if !request.tools.is_empty() {
        set("tools", Some(request.tools.iter().map(tool).collect::<Vec<_>>().into()));
        set("tool_choice", tool_choice(&request.tool_choice));
        set("parallel_tool_calls", request.single_tool_call.then_some(Value::Bool(false)));
    }
    set("response_format", request.structured_output.as_ref().and_then(response_format));
    body
}

/// A number as its client wrote it: the nearest short decimal.
pub(super) fn number(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// JSON text, or the text itself where it is none.
pub(super) fn json_or_text(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

fn message(message: &Message) -> Value {
    let Message { role, content, reasoning: _, tool_calls, tool_call_id, name } = message;
    let mut fields = Map::new();
    fields.insert("role".into(), role.clone().into());
    let content =
        if content.is_empty() && !tool_calls.is_empty() { Value::Null } else { content.clone().into() };
    fields.insert("content".into(), content);
    if !tool_calls.is_empty() {
        let call = |call: &ToolCall| json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}});
        fields.insert("tool_calls".into(), tool_calls.iter().map(call).collect::<Vec<_>>().into());
    }
    if !tool_call_id.is_empty() {
        fields.insert("tool_call_id".into(), tool_call_id.clone().into());
    }
    if !name.is_empty() && role != "tool" {
        fields.insert("name".into(), name.clone().into());
    }
    Value::Object(fields)
}

fn tool(tool: &Tool) -> Value {
    let mut function = json!({"name": tool.name});
    if let Some(fields) = function.as_object_mut() {
        if let Some(description) = &tool.description {
            fields.insert("description".into(), description.clone().into());
        }
        if let Some(parameters) = &tool.parameters {
            fields.insert("parameters".into(), json_or_text(parameters));
        }
        if tool.strict {
            fields.insert("strict".into(), true.into());
        }
    }
    json!({"type": "function", "function": function})
}

fn tool_choice(choice: &ToolChoice) -> Option<Value> {
    match choice {
        ToolChoice::Auto => None,
        ToolChoice::Required => Some("required".into()),
        ToolChoice::Named(name) => Some(json!({"type": "function", "function": {"name": name}})),
    }
}

fn response_format(output: &StructuredOutput) -> Option<Value> {
    match output {
        StructuredOutput::JsonObject => Some(json!({"type": "json_object"})),
        StructuredOutput::JsonSchema(schema) => Some(json!({
            "type": "json_schema",
            "json_schema": {"name": "response", "schema": json_or_text(schema), "strict": true},
        })),
        StructuredOutput::Regex(_) | StructuredOutput::Choice(_) | StructuredOutput::Grammar(_) => None,
    }
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<ChunkUsage>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    delta: ChunkDelta,
    #[serde(default)]
    finish_reason: Option<String>,
}

#[derive(Default, Deserialize)]
struct ChunkDelta {
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    refusal: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
    #[serde(default)]
    reasoning: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<CallPart>>,
}

#[derive(Deserialize)]
struct CallPart {
    #[serde(default)]
    index: Option<usize>,
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    function: CallFunction,
}

#[derive(Default, Deserialize)]
struct CallFunction {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    arguments: Option<String>,
}

#[derive(Deserialize)]
struct ChunkUsage {
    #[serde(default)]
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
    #[serde(default)]
    prompt_tokens_details: Option<PromptDetails>,
    /// What the answer cost, as OpenRouter says; of any type, since others may mean something else by it.
    #[serde(default)]
    cost: Option<Value>,
}

#[derive(Deserialize)]
struct PromptDetails {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

/// Reads a stream of chunks.
#[derive(Default)]
pub(super) struct OpenAiParser {
    /// Calls that are not whole yet, by their index.
    calls: Vec<(usize, ToolCall)>,
    reason: Option<FinishReason>,
    usage: Option<Usage>,
    reported_cost: Option<Money>,
}

/// The most that an answer is believed to cost: dearer ones are a mistake of the provider, or a lie.
const MAX_REPORTED_COST: f64 = 1000.0;

/// Most calls of tools in one answer.
const MAX_CALLS: usize = 128;

impl EventParser for OpenAiParser {
    fn parse(&mut self, data: &str) -> Result<Vec<GenerationEvent>, ParseError> {
        if data.trim() == "[DONE]" {
            return Ok(self.finished().into_iter().collect());
        }
        let unreadable = |why: String| ParseError::Unreadable(why);
        // A list of values would do for an object otherwise.
        let object: Map<String, Value> =
            serde_json::from_str(data).map_err(|error| unreadable(error.to_string()))?;
        let chunk: Chunk =
            serde_json::from_value(Value::Object(object)).map_err(|error| unreadable(error.to_string()))?;
        if let Some(error) = chunk.error.filter(|error| !error.is_null()) {
            return Err(ParseError::Reported(error_message(&error)));
        }
        if let Some(usage) = chunk.usage {
            self.reported_cost = usage.cost.as_ref().and_then(reported_cost).or(self.reported_cost);
            let cached = usage.prompt_tokens_details.and_then(|details| details.cached_tokens);
            self.usage = Some(Usage {
                prompt_tokens: bounded(usage.prompt_tokens),
                completion_tokens: bounded(usage.completion_tokens),
                cached_tokens: bounded(cached.unwrap_or(0)).min(bounded(usage.prompt_tokens)),
            });
        }
        // One answer is asked for.
        let Some(Choice { delta, finish_reason }) = chunk.choices.into_iter().next() else {
            return Ok(Vec::new());
        };
        let mut out = Delta {
            reasoning: delta.reasoning_content.or(delta.reasoning).unwrap_or_default(),
            text: delta.content.unwrap_or_default() + &delta.refusal.unwrap_or_default(),
            ..Delta::default()
        };
        for part in delta.tool_calls.unwrap_or_default() {
            self.add(part)?;
        }
        if let Some(reason) = finish_reason {
            self.reason = Some(if reason == "length" { FinishReason::Length } else { FinishReason::Stop });
            out.tool_calls = std::mem::take(&mut self.calls).into_iter().map(|(_, call)| call).collect();
        }
        Ok(if out.is_empty() { Vec::new() } else { vec![GenerationEvent::Token { id: 0, delta: out }] })
    }

    fn end(&mut self) -> Option<GenerationEvent> {
        self.finished()
    }

    fn reported_cost(&self) -> Option<Money> {
        self.reported_cost
    }
}

/// The cost that a provider reports, at most [`MAX_REPORTED_COST`]; none where it is no amount of at least nothing.
fn reported_cost(cost: &Value) -> Option<Money> {
    cost.as_f64().and_then(|cost| amount(cost.min(MAX_REPORTED_COST)))
}

/// An amount of money that a provider writes as a number, to the billionth; none where it is less than nothing.
pub(super) fn amount(number: f64) -> Option<Money> {
    const NANOS: f64 = 1e9;
    (number.is_finite() && number >= 0.0).then(|| Money::of_nanos((number * NANOS).round() as u128))
}

impl OpenAiParser {
    fn add(&mut self, part: CallPart) -> Result<(), ParseError> {
        let index = part.index.unwrap_or(self.calls.len());
        let found = match self.calls.iter().position(|(other, _)| *other == index) {
            Some(found) => found,
            None if self.calls.len() < MAX_CALLS => {
                self.calls.push((index, ToolCall::default()));
                self.calls.len() - 1
            }
            None => return Err(ParseError::Unreadable(format!("more than {MAX_CALLS} calls of tools"))),
        };
        if let Some((_, call)) = self.calls.get_mut(found) {
            if let Some(id) = part.id.filter(|id| !id.is_empty()) {
                call.id = id;
            }
            call.name.push_str(&part.function.name.unwrap_or_default());
            call.arguments.push_str(&part.function.arguments.unwrap_or_default());
        }
        Ok(())
    }

    /// The last event, once, where a reason was told.
    fn finished(&mut self) -> Option<GenerationEvent> {
        let reason = self.reason.take()?;
        Some(GenerationEvent::Finished { reason, usage: self.usage.take().unwrap_or_default() })
    }
}

/// A count of a stranger as ours.
pub(super) fn bounded(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// The message in an error of the APIs: `{"message": …}`, `{"error": {"message": …}}`, or a text.
pub(super) fn error_message(error: &Value) -> String {
    let inner = error.get("error").unwrap_or(error);
    let message = inner.get("message").or_else(|| inner.get("detail")).unwrap_or(inner);
    message.as_str().map_or_else(|| message.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use russet_wire::request::{GenerationRequest, Sampling};

    use super::*;
    use crate::providers::provider_stream::tests::{provider, read};
    use crate::request_defaults::LeftOut;

    #[test]
    fn a_request_says_what_its_client_said() {
        let request = GenerationRequest {
            messages: vec![
                Message::new("system", "Be brief."),
                Message::new("user", "Weather?"),
                Message {
                    tool_calls: vec![ToolCall {
                        id: "c1".into(),
                        name: "weather".into(),
                        arguments: "{\"at\":1}".into(),
                    }],
                    reasoning: "hm".into(),
                    ..Message::new("assistant", "")
                },
                Message { tool_call_id: "c1".into(), name: "weather".into(), ..Message::new("tool", "sun") },
            ],
            tools: vec![Tool {
                name: "weather".into(),
                description: Some("Tells it.".into()),
                parameters: Some(r#"{"type":"object"}"#.into()),
                strict: true,
            }],
            tool_choice: ToolChoice::Named("weather".into()),
            single_tool_call: true,
            max_tokens: Some(50),
            stop: vec!["END".into()],
            structured_output: Some(StructuredOutput::JsonSchema(r#"{"type":"object"}"#.into())),
            ..GenerationRequest::default()
        };
        let sampling =
            Sampling { temperature: 0.7, top_p: 0.9, frequency_penalty: 0.5, ..Sampling::default() };
        let wanted = ProviderRequest {
            provider: provider("https://openrouter.ai/api/v1"),
            model: "qwen/qwen3".into(),
            request,
            sampling,
            left_out: LeftOut {
                top_p: true,
                top_k: true,
                min_p: true,
                repetition_penalty: true,
                temperature: false,
            },
            key: None,
        };
        let expected = json!({
            "model": "qwen/qwen3",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": null, "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"at\":1}"}},
                ]},
                {"role": "tool", "content": "sun", "tool_call_id": "c1"},
            ],
            "stream": true,
            "stream_options": {"include_usage": true},
            "max_tokens": 50,
            "temperature": 0.7,
            "frequency_penalty": 0.5,
            "stop": ["END"],
            "tools": [{"type": "function", "function": {
                "name": "weather", "description": "Tells it.", "parameters": {"type": "object"}, "strict": true,
            }}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "parallel_tool_calls": false,
            "response_format": {"type": "json_schema", "json_schema": {
                "name": "response", "schema": {"type": "object"}, "strict": true,
            }},
        });
        assert_eq!(body(&wanted), expected);
        let openai = ProviderRequest { provider: provider("https://api.openai.com/v1"), ..wanted };
        assert_eq!(body(&openai)["max_completion_tokens"], 50);
        assert_eq!(body(&openai).get("max_tokens"), None);
    }

    #[test]
    fn reported_costs_are_amounts_within_bounds() {
        let end = |usage: &str| {
            let mut parser = OpenAiParser::default();
            let data = format!(r#"{{"choices":[],"usage":{{"prompt_tokens":3,"cost":{usage}}}}}"#);
            parser.parse(&data).unwrap();
            parser.reported_cost().map(|cost| cost.nanos)
        };
        for (text, nanos) in [
            ("0.00014", Some(140_000)),
            ("1.4e-4", Some(140_000)),
            ("0", Some(0)),
            ("2", Some(2_000_000_000)),
            ("1e300", Some(1_000_000_000_000)),
            ("18446744073709551615", Some(1_000_000_000_000)),
            ("-0.5", None),
            ("null", None),
            (r#""0.5""#, None),
            ("{}", None),
        ] {
            assert_eq!(end(text), nanos, "{text}");
        }
    }

    #[test]
    fn variants_of_a_stream_are_read_alike() {
        let finished = |reason, prompt_tokens, completion_tokens, cached_tokens| GenerationEvent::Finished {
            reason,
            usage: Usage { prompt_tokens, completion_tokens, cached_tokens },
        };
        // Usage after the last chunk, as OpenAI sends it; with it, as others do.
        let after = [
            r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}"#,
            r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#,
            r#"{"choices":[{"delta":{"content":"Hi"},"finish_reason":null}],"usage":null}"#,
            r#"{"choices":[{"delta":{},"finish_reason":"length"}]}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}"#,
            "[DONE]",
        ];
        let thought =
            GenerationEvent::Token { id: 0, delta: Delta { reasoning: "hm".into(), ..Delta::default() } };
        let text = GenerationEvent::Token { id: 0, delta: Delta::text("Hi") };
        let expected = [thought, text.clone(), finished(FinishReason::Length, 9, 2, 4)];
        assert_eq!(read(OpenAiParser::default(), &after).unwrap(), expected);
        let with = [
            r#"{"choices":[{"delta":{"content":"Hi"}}]}"#,
            r#"{"choices":[{"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":99999999999,"completion_tokens":1}}"#,
        ];
        let expected = [text, finished(FinishReason::Stop, u32::MAX, 1, 0)];
        assert_eq!(read(OpenAiParser::default(), &with).unwrap(), expected, "without [DONE]");
    }

    #[test]
    fn calls_of_tools_come_whole() {
        let parts = [
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"a","type":"function","function":{"name":"f","arguments":""}}]}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"x\""}}]}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":1,"id":"b","function":{"name":"g","arguments":"{}"}}]}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]}}]}"#,
            r#"{"choices":[{"delta":{},"finish_reason":"tool_calls"}]}"#,
            "[DONE]",
        ];
        let events = read(OpenAiParser::default(), &parts).unwrap();
        let call = |id: &str, name: &str, arguments: &str| ToolCall {
            id: id.into(),
            name: name.into(),
            arguments: arguments.into(),
        };
        let delta = Delta {
            tool_calls: vec![call("a", "f", r#"{"x":1}"#), call("b", "g", "{}")],
            ..Delta::default()
        };
        assert_eq!(events.first(), Some(&GenerationEvent::Token { id: 0, delta }));
        assert!(matches!(events.last(), Some(GenerationEvent::Finished { reason: FinishReason::Stop, .. })));
    }

    #[test]
    fn an_error_or_an_end_in_the_middle_is_no_answer() {
        let cut = [r#"{"choices":[{"delta":{"content":"Hi"}}]}"#];
        assert_eq!(read(OpenAiParser::default(), &cut).unwrap().len(), 1, "no last event");
        let error = [r#"{"choices":[],"error":{"code":502,"message":"upstream is gone"}}"#];
        let reported = read(OpenAiParser::default(), &error).unwrap_err();
        assert_eq!(reported, ParseError::Reported("upstream is gone".into()));
        for wrong in ["{", "[]", "\"x\"", r#"{"choices":7}"#, r#"{"choices":[{"delta":{"content":[]}}]}"#] {
            assert!(
                matches!(read(OpenAiParser::default(), &[wrong]), Err(ParseError::Unreadable(_))),
                "{wrong}"
            );
        }
        let many: String = (0..=MAX_CALLS)
            .map(|index| format!(r#"{{"index":{index},"function":{{"name":"f"}}}}"#))
            .collect::<Vec<_>>()
            .join(",");
        let many = format!(r#"{{"choices":[{{"delta":{{"tool_calls":[{many}]}}}}]}}"#);
        assert!(matches!(read(OpenAiParser::default(), &[&many]), Err(ParseError::Unreadable(_))));
    }
}
