//! Parses requests for chats and texts into the dialect-free one. Every error names the field. Streaming is the default
//! here, and a conversation that is too long loses its oldest turns unless `truncate` is false.

pub(super) mod fields;
mod messages;
mod options;

use std::collections::BTreeSet;
use std::time::Duration;

use russet_wire::conversation::Message;
use russet_wire::request::{ContextOverflow, GenerationRequest, RawPrompt, StructuredOutput};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::clock::ResponseClock;
use super::keep_alive::keep_alive;
use super::response::{AnswerForm, OllamaWriter};
use crate::dialects::field_table::{GroupOf, ignored, refuse_unsupported};
use crate::dialects::json_schema::{check_bytes, schema};
use crate::dialects::thinking::{set_effort, set_thinking};
use crate::dialects::values::{self, JsonObject, boolean, shown};
use crate::dialects::{sampling, tools};
use crate::error::GatewayError;
use crate::json_body::JsonBody;
use crate::request_defaults::LeftOut;
use crate::serving::{ParsedRequest, RequestContext};
use fields::{chat_group_of, generate_group_of};
use options::OllamaOptions;

/// Parses a request to `/api/chat`.
pub(super) fn parse_chat(
    body: JsonBody<'_>,
    context: &RequestContext<'_>,
) -> Result<ParsedRequest<OllamaWriter>, GatewayError> {
    let mut parts = RequestParts::read(body, chat_group_of)?;
    let messages = parts.fields.remove("messages");
    let messages = messages::parse(messages, &parts.body, &mut parts.ignored)?;
    if messages.is_empty() {
        return parts.load(AnswerForm::Chat);
    }
    let (base, left_out) = parts.request(context)?;
    let (tools, tool_choice) = tools::parse(&parts.fields, &parts.body)?;
    let request = GenerationRequest {
        messages,
        tools,
        tool_choice,
        template_arguments: template_arguments(parts.fields.get("think"))?,
        context_overflow: if parts.truncates()? { ContextOverflow::Shift } else { ContextOverflow::Refuse },
        ..base
    };
    parts.generate(AnswerForm::Chat, request, left_out)
}

/// Parses a request to `/api/generate`: a conversation of one turn, or with `raw` a prompt without a template.
pub(super) fn parse_generate(
    body: JsonBody<'_>,
    context: &RequestContext<'_>,
) -> Result<ParsedRequest<OllamaWriter>, GatewayError> {
    let mut parts = RequestParts::read(body, generate_group_of)?;
    let (prompt, system) = (parts.text("prompt")?, parts.text("system")?);
    if prompt.is_empty() {
        return parts.load(AnswerForm::Text);
    }
    let truncates = parts.truncates()?;
    let (base, left_out) = parts.request(context)?;
    let thinking = template_arguments(parts.fields.get("think"))?;
    let request = if boolean(&parts.fields, "raw")? == Some(true) {
        if !system.is_empty() {
            let message = "`system` is written by a template, and `raw` asks for none; leave out one of them";
            return Err(GatewayError::field("system", message));
        }
        if !thinking.is_empty() {
            parts.ignored.insert("think".into());
        }
        // As many of its last tokens as the context holds.
        let truncate_prompt_tokens = truncates.then_some(u32::MAX);
        GenerationRequest { raw_prompt: Some(RawPrompt::Text(prompt)), truncate_prompt_tokens, ..base }
    } else {
        let system = (!system.is_empty()).then(|| Message::new("system", system));
        GenerationRequest {
            messages: system.into_iter().chain([Message::new("user", prompt)]).collect(),
            template_arguments: thinking,
            context_overflow: if truncates { ContextOverflow::Shift } else { ContextOverflow::Refuse },
            ..base
        }
    };
    parts.generate(AnswerForm::Text, request, left_out)
}

/// A request that is being read.
struct RequestParts<'a> {
    body: JsonBody<'a>,
    fields: JsonObject,
    group_of: GroupOf,
    model: String,
    ignored: BTreeSet<String>,
    clock: ResponseClock,
}

impl<'a> RequestParts<'a> {
    fn read(mut body: JsonBody<'a>, group_of: GroupOf) -> Result<Self, GatewayError> {
        let fields = values::fields(&mut body)?;
        let model = values::model(&fields)?;
        refuse_unsupported(&fields, group_of)?;
        let clock = ResponseClock::new(Instant::now());
        Ok(Self { body, fields, group_of, model, ignored: BTreeSet::new(), clock })
    }

    /// A text, which may be left out.
    fn text(&mut self, name: &str) -> Result<String, GatewayError> {
        match self.fields.remove(name) {
            None => Ok(String::new()),
            Some(Value::String(text)) => Ok(text),
            Some(_) => Err(GatewayError::field(name, format!("`{name}` must be a string"))),
        }
    }

    /// Whether a prompt that is too long is cut.
    fn truncates(&self) -> Result<bool, GatewayError> {
        Ok(boolean(&self.fields, "truncate")?.unwrap_or(true))
    }

    /// The request without its prompt, and what it leaves to the deployment.
    fn request(
        &mut self,
        context: &RequestContext<'_>,
    ) -> Result<(GenerationRequest, LeftOut), GatewayError> {
        let RequestContext { id, unix_seconds: _, limits, kept: _ } = context;
        let options = OllamaOptions::read(self.fields.remove("options"), &mut self.ignored)?;
        let request = GenerationRequest {
            id: id.unique.to_string(),
            structured_output: format(self.fields.get("format"), &self.body)?,
            logprobs: sampling::logprobs(&self.fields)?,
            max_tokens: options.max_tokens(limits)?,
            sampling: options.sampling()?,
            stop: options.stop()?,
            priority: limits.priority_below(0),
            ..GenerationRequest::default()
        };
        Ok((request, options.left_out()))
    }

    /// The request as it is served.
    fn generate(
        self,
        form: AnswerForm,
        request: GenerationRequest,
        left_out: LeftOut,
    ) -> Result<ParsedRequest<OllamaWriter>, GatewayError> {
        let Self { body: _, fields, group_of, model, ignored: names, clock } = self;
        Ok(ParsedRequest {
            fallback_models: Vec::new(),
            keep_alive: keep_alive(&fields)?,
            prompt_field: form.prompt_field(),
            requests: vec![request],
            left_out,
            choices: 1,
            streamed: boolean(&fields, "stream")?.unwrap_or(true),
            ignored: ignored(&fields, group_of, names),
            writer: OllamaWriter::new(form, model.clone(), clock),
            model,
        })
    }

    /// A request without a prompt: in Ollama it loads the model, or unloads it.
    fn load(self, form: AnswerForm) -> Result<ParsedRequest<OllamaWriter>, GatewayError> {
        let Self { body: _, fields, group_of, model, ignored: names, clock } = self;
        let writer = OllamaWriter::new(form, model.clone(), clock);
        let keep_alive = keep_alive(&fields)?;
        Ok(ParsedRequest {
            fallback_models: Vec::new(),
            keep_alive,
            prompt_field: form.prompt_field(),
            requests: Vec::new(),
            left_out: LeftOut::default(),
            choices: 1,
            streamed: false,
            ignored: ignored(&fields, group_of, names),
            writer: if keep_alive == Some(Duration::ZERO) { writer.unloads() } else { writer },
            model,
        })
    }
}

/// The switch of thinking, or how much of it, as variables of the chat template.
fn template_arguments(think: Option<&Value>) -> Result<String, GatewayError> {
    let mut variables = JsonObject::new();
    match think {
        None => return Ok(String::new()),
        Some(Value::Bool(thinks)) => set_thinking(&mut variables, *thinks),
        Some(Value::String(effort)) if ["low", "medium", "high", "max"].contains(&effort.as_str()) => {
            set_thinking(&mut variables, true);
            set_effort(&mut variables, effort);
        }
        Some(other) => {
            let message =
                format!("`think` must be true, false, low, medium, high or max, not {}", shown(other));
            return Err(GatewayError::field("think", message));
        }
    }
    Ok(json!(variables).to_string())
}

/// What the text has to be; an empty text is none.
fn format(format: Option<&Value>, body: &JsonBody<'_>) -> Result<Option<StructuredOutput>, GatewayError> {
    match format {
        None => Ok(None),
        Some(Value::String(word)) if word.is_empty() => Ok(None),
        Some(Value::String(word)) if word == "json" => Ok(Some(StructuredOutput::JsonObject)),
        Some(object @ Value::Object(_)) => {
            let raw: Option<RawFormat<'_>> = body.read();
            let output = schema("format", object, raw.and_then(|raw| raw.format))?;
            check_bytes("format", output).map(Some)
        }
        Some(other) => {
            let message = format!("`format` must be \"json\" or a JSON Schema, not {}", shown(other));
            Err(GatewayError::field("format", message))
        }
    }
}

#[derive(Deserialize)]
struct RawFormat<'a> {
    #[serde(borrow, default)]
    format: Option<&'a RawValue>,
}

#[cfg(test)]
mod tests {
    use russet_wire::conversation::Tool;
    use russet_wire::request::Sampling;

    use super::*;
    use crate::error::ErrorKind;
    use crate::json_body::JsonScan;
    use crate::request_id::RequestId;
    use crate::request_limits::RequestLimits;
    use crate::serving::ParseRequest;

    type ParsedText = ParsedRequest<OllamaWriter>;

    fn parse_text(parse: ParseRequest<OllamaWriter>, text: &str) -> Result<ParsedText, GatewayError> {
        let id = RequestId { unique: "id".into(), shown: "req_id".into() };
        let context =
            RequestContext { id: &id, unix_seconds: 17, limits: RequestLimits::default(), kept: None };
        parse(JsonScan::new(text.as_bytes())?.decode(text.as_bytes())?, &context)
    }

    fn with(base: Value, extra: &Value) -> String {
        let mut body = base;
        for (name, value) in extra.as_object().unwrap() {
            body[name] = value.clone();
        }
        body.to_string()
    }

    fn chat(extra: &Value) -> Result<ParsedText, GatewayError> {
        let base = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        parse_text(parse_chat, &with(base, extra))
    }

    fn generate(extra: &Value) -> Result<ParsedText, GatewayError> {
        parse_text(parse_generate, &with(json!({"model": "m", "prompt": "hi"}), extra))
    }

    #[test]
    fn a_plain_chat_is_streamed_and_left_to_the_deployment() {
        let parsed = chat(&json!({"options": null, "tools": [], "format": "", "think": null})).unwrap();
        assert_eq!((parsed.model.as_str(), parsed.streamed, parsed.choices), ("m", true, 1));
        assert_eq!((parsed.left_out, parsed.ignored), (LeftOut::ALL, vec![]));
        let expected = GenerationRequest {
            id: "id".into(),
            messages: vec![Message::new("user", "hi")],
            context_overflow: ContextOverflow::Shift,
            sampling: Sampling { temperature: 1.0, ..Sampling::default() },
            ..GenerationRequest::default()
        };
        assert_eq!(parsed.requests, [expected]);
    }

    #[test]
    fn fields_of_a_chat_arrive_with_schemas_as_written() {
        let text = r#"{"model": "m", "stream": false, "messages": [{"role": "user", "content": "hi"}],
            "format": {"type": "object", "properties": {"z": {"const": 1.0}, "a": {}}},
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"z": {}, "a": 1.0}}}],
            "think": "max", "logprobs": true, "top_logprobs": 2, "truncate": false, "shift": true, "keep_alive": "5m",
            "options": {"num_predict": 3, "num_ctx": 4096}}"#;
        let mut parsed = parse_text(parse_chat, text).unwrap();
        let request = parsed.requests.remove(0);
        assert!(!parsed.streamed);
        assert_eq!(parsed.ignored, ["options.num_ctx", "shift"]);
        let schema = r#"{"type": "object", "properties": {"z": {"const": 1.0}, "a": {}}}"#;
        assert_eq!(request.structured_output, Some(StructuredOutput::JsonSchema(schema.into())));
        let parameters = Some(r#"{"z": {}, "a": 1.0}"#.to_owned());
        assert_eq!(request.tools, [Tool { name: "f".into(), parameters, ..Tool::default() }]);
        assert_eq!((request.logprobs, request.max_tokens), (Some(2), Some(3)));
        assert_eq!(request.context_overflow, ContextOverflow::Refuse);
        assert_eq!(
            request.template_arguments,
            r#"{"enable_thinking":true,"thinking":true,"reasoning_effort":"max"}"#
        );
        let off = chat(&json!({"think": false, "format": "json"})).unwrap().requests.remove(0);
        assert_eq!(off.template_arguments, r#"{"enable_thinking":false,"thinking":false}"#);
        assert_eq!(off.structured_output, Some(StructuredOutput::JsonObject));
    }

    #[test]
    fn a_prompt_is_a_turn_or_raw() {
        let turn =
            generate(&json!({"system": "Be brief.", "think": true, "context": [], "suffix": ""})).unwrap();
        let request = &turn.requests[0];
        assert_eq!(request.messages, [Message::new("system", "Be brief."), Message::new("user", "hi")]);
        assert_eq!(request.template_arguments, r#"{"enable_thinking":true,"thinking":true}"#);
        let raw = generate(&json!({"raw": true, "think": true})).unwrap();
        assert_eq!(raw.ignored, ["think"]);
        let request = &raw.requests[0];
        assert_eq!(request.raw_prompt, Some(RawPrompt::Text("hi".into())));
        assert!(request.messages.is_empty() && request.template_arguments.is_empty());
        assert_eq!(request.truncate_prompt_tokens, Some(u32::MAX));
        let whole = generate(&json!({"raw": true, "truncate": false})).unwrap();
        assert_eq!(whole.requests[0].truncate_prompt_tokens, None);
    }

    #[test]
    fn no_prompt_asks_no_engine() {
        for parsed in [
            chat(&json!({"messages": []})),
            chat(&json!({"messages": null, "keep_alive": -1})),
            generate(&json!({"prompt": "", "system": "Be brief."})),
            generate(&json!({"prompt": null, "keep_alive": "0s"})),
        ] {
            let parsed = parsed.unwrap();
            assert!(parsed.requests.is_empty() && !parsed.streamed, "{parsed:?}");
        }
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        for (parsed, param) in [
            (chat(&json!({"model": ""})), "model"),
            (chat(&json!({"messages": "hi"})), "messages"),
            (chat(&json!({"format": "xml"})), "format"),
            (chat(&json!({"format": 7})), "format"),
            (chat(&json!({"think": "some"})), "think"),
            (chat(&json!({"think": 1})), "think"),
            (chat(&json!({"stream": "yes"})), "stream"),
            (chat(&json!({"truncate": 1})), "truncate"),
            (chat(&json!({"keep_alive": "soon"})), "keep_alive"),
            (generate(&json!({"prompt": "", "keep_alive": true})), "keep_alive"),
            (chat(&json!({"options": "none"})), "options"),
            (chat(&json!({"options": {"mirostat": 2}})), "mirostat"),
            (chat(&json!({"options": {"temperature": -1}})), "temperature"),
            (chat(&json!({"tools": [{"type": "function"}]})), "tools[0].function"),
            (chat(&json!({"top_logprobs": 3})), "top_logprobs"),
            (generate(&json!({"prompt": ["hi"]})), "prompt"),
            (generate(&json!({"suffix": "end"})), "suffix"),
            (generate(&json!({"template": "{{ .Prompt }}"})), "template"),
            (generate(&json!({"images": ["aGk="]})), "images"),
            (generate(&json!({"context": [1, 2]})), "context"),
            (generate(&json!({"raw": true, "system": "Be brief."})), "system"),
            (generate(&json!({"width": 512})), "width"),
        ] {
            let Err(error) = parsed else { panic!("{param} is accepted") };
            assert_eq!((error.kind, error.param.as_deref()), (ErrorKind::InvalidRequest, Some(param)));
            assert!(error.message.contains(param), "{error}");
        }
    }
}
