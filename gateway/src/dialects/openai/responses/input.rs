//! The conversation of a request: `instructions` and `input`, a text or a list of items. What an assistant thought, said and
//! called are items of their own there, and one turn for a chat template.

use std::collections::BTreeSet;
use std::fmt::Arguments;

use russet_wire::conversation::{Message, ToolCall};
use serde_json::{Value, json};

use super::client_tools::model_name;
use super::compact;
use super::tools::CUSTOM_INPUT;
use crate::dialects::openai::request::messages::{content, name_results};
use crate::dialects::tool_calls::{MAX_NAME_BYTES, arguments};
use crate::dialects::values::{JsonObject, invalid, is_empty, shown};
use crate::error::GatewayError;

/// Parses the conversation: `earlier` items are those of the responses that this one continues. Adds the names of fields
/// that are left out to `ignored`.
pub(super) fn parse(
    instructions: Option<&str>,
    earlier: impl IntoIterator<Item = Result<Value, GatewayError>>,
    input: Option<Value>,
    ignored: &mut BTreeSet<String>,
) -> Result<Vec<Message>, GatewayError> {
    let mut turns = Turns::default();
    if let Some(instructions) = instructions.filter(|text| !text.is_empty()) {
        turns.message("system", instructions.to_owned());
    }
    for item in earlier {
        // What was left out of them was said when they came.
        turns.item(format_args!("previous_response_id"), item?, &mut BTreeSet::new())?;
    }
    match input {
        Some(Value::String(text)) => turns.message("user", text),
        Some(Value::Array(items)) if !items.is_empty() => {
            for (index, item) in items.into_iter().enumerate() {
                turns.item(format_args!("input[{index}]"), item, ignored)?;
            }
        }
        None => return Err(GatewayError::field("input", "`input` is missing")),
        Some(_) => return Err(invalid("input", "a string, or a list with at least one item")),
    }
    Ok(turns.finish())
}

/// The turns so far.
#[derive(Default)]
struct Turns {
    messages: Vec<Message>,
    /// What the assistant thought before the item that follows.
    reasoning: String,
}

impl Turns {
    fn item(
        &mut self,
        at: Arguments<'_>,
        item: Value,
        ignored: &mut BTreeSet<String>,
    ) -> Result<(), GatewayError> {
        let Value::Object(mut fields) = item else {
            return Err(invalid(at, "an item, an object with a type"));
        };
        fields.retain(|_, value| !value.is_null());
        let kind = match fields.remove("type") {
            Some(Value::String(kind)) => kind,
            // A message may leave it out.
            None if fields.contains_key("role") => "message".to_owned(),
            _ => return Err(invalid(format_args!("{at}.type"), "the type of an item, such as \"message\"")),
        };
        match kind.as_str() {
            "message" => {
                let role = role(at, fields.remove("role"))?;
                let is_assistant = role == "assistant";
                let content_at = format_args!("{at}.content");
                let text =
                    content(content_at, fields.remove("content"), is_assistant, "input.content", ignored)?;
                self.message(role, text.unwrap_or_default());
            }
            "reasoning" => {
                let summary = parts(format_args!("{at}.summary"), fields.remove("summary"), "summary_text")?;
                let thought =
                    parts(format_args!("{at}.content"), fields.remove("content"), "reasoning_text")?;
                // Only OpenAI can read it, and its own response has a summary beside it.
                fields.remove("encrypted_content");
                // A summary of what is there in full says nothing more.
                let parts = if thought.is_empty() { summary.join("\n\n") } else { thought.concat() };
                append(&mut self.reasoning, &parts);
            }
            "function_call" => {
                let name = tool_name(at, &mut fields)?;
                let arguments = arguments(format_args!("{at}.arguments"), fields.remove("arguments"), None)?;
                self.call(ToolCall { id: text(at, &mut fields, "call_id")?, name, arguments });
            }
            "custom_tool_call" => {
                let name = tool_name(at, &mut fields)?;
                let arguments = json!({CUSTOM_INPUT: text(at, &mut fields, "input")?}).to_string();
                self.call(ToolCall { id: text(at, &mut fields, "call_id")?, name, arguments });
            }
            "function_call_output" | "custom_tool_call_output" => {
                let output_at = format_args!("{at}.output");
                let output = content(output_at, fields.remove("output"), false, "input.output", ignored)?;
                let tool_call_id = text(at, &mut fields, "call_id")?;
                self.end_assistant();
                let message = Message::new("tool", output.unwrap_or_default());
                self.messages.push(Message { tool_call_id, ..message });
            }
            "compaction" | "compaction_summary" => {
                let content = text(at, &mut fields, "encrypted_content")?;
                let field = format!("{at}.encrypted_content");
                let summary = compact::summary(&content)
                    .ok_or_else(|| invalid(&field, "that of a compaction by this gateway"))?;
                self.message("assistant", summary);
            }
            "item_reference" => {
                let message = format!(
                    "`{at}` is an item_reference, but items are not looked up here; send the item itself, or continue its response by `previous_response_id`"
                );
                return Err(GatewayError::field(format!("{at}.type"), message));
            }
            kind => {
                let message = format!(
                    "`{at}.type` is {}, which is not supported by this release; items are message, reasoning, function_call, function_call_output, custom_tool_call, custom_tool_call_output and compaction",
                    shown(&kind.into())
                );
                return Err(GatewayError::field(format!("{at}.type"), message));
            }
        }
        let left_out = fields.iter().filter(|(name, value)| {
            !["id", "status", "phase", "namespace"].contains(&name.as_str()) && !is_empty(value)
        });
        ignored.extend(left_out.map(|(name, _)| format!("input.{name}")));
        Ok(())
    }

    /// A message of this role.
    fn message(&mut self, role: &str, content: String) {
        if role == "assistant" {
            match self.messages.last_mut() {
                // A call that was told before the text is of the same turn.
                Some(last) if last.role == role && last.content.is_empty() => last.content = content,
                _ => self.messages.push(Message::new(role, content)),
            }
            self.attach_reasoning();
            return;
        }
        self.end_assistant();
        match self.messages.last_mut() {
            // Instructions and the messages after them are one: templates take a system message at the beginning alone.
            Some(first) if role == "system" && first.role == "system" => append(&mut first.content, &content),
            _ => self.messages.push(Message::new(role, content)),
        }
    }

    /// A call of the assistant's turn.
    fn call(&mut self, call: ToolCall) {
        if self.messages.last().is_none_or(|last| last.role != "assistant") {
            self.messages.push(Message::new("assistant", ""));
        }
        self.attach_reasoning();
        if let Some(last) = self.messages.last_mut() {
            last.tool_calls.push(call);
        }
    }

    /// Gives what was thought to the assistant's turn.
    fn attach_reasoning(&mut self) {
        if let Some(last) = self.messages.last_mut() {
            append(&mut last.reasoning, &std::mem::take(&mut self.reasoning));
        }
    }

    /// Another's turn begins. What the assistant thought last, before it was cut off, is its turn.
    fn end_assistant(&mut self) {
        if !self.reasoning.is_empty() {
            if self.messages.last().is_none_or(|last| last.role != "assistant") {
                self.messages.push(Message::new("assistant", ""));
            }
            self.attach_reasoning();
        }
    }

    fn finish(mut self) -> Vec<Message> {
        self.end_assistant();
        name_results(&mut self.messages);
        self.messages
    }
}

/// Appends a paragraph.
fn append(text: &mut String, next: &str) {
    if !text.is_empty() && !next.is_empty() {
        text.push_str("\n\n");
    }
    text.push_str(next);
}

fn role(at: Arguments<'_>, value: Option<Value>) -> Result<&'static str, GatewayError> {
    match value.as_ref().and_then(Value::as_str) {
        // A newer name of the same role; chat templates know the older one.
        Some("system" | "developer") => Ok("system"),
        Some("user") => Ok("user"),
        Some("assistant") => Ok("assistant"),
        _ => Err(invalid(format_args!("{at}.role"), "user, assistant, system or developer")),
    }
}

/// A text that has to be there.
fn text(at: Arguments<'_>, fields: &mut JsonObject, name: &str) -> Result<String, GatewayError> {
    match fields.remove(name) {
        Some(Value::String(text)) => Ok(text),
        _ => Err(invalid(format_args!("{at}.{name}"), "a string")),
    }
}

/// The texts of a list of parts of this type.
fn parts(at: Arguments<'_>, value: Option<Value>, kind: &str) -> Result<Vec<String>, GatewayError> {
    let parts = match value {
        None => return Ok(Vec::new()),
        Some(Value::Array(parts)) => parts,
        Some(_) => return Err(invalid(at, &format!("a list of parts of type {kind:?}"))),
    };
    let texts = parts.into_iter().enumerate().map(|(index, part)| match part {
        // Codex calls one of them a text.
        Value::Object(mut part) if part.get("type").is_some_and(|is| is == kind || is == "text") => {
            text(format_args!("{at}[{index}]"), &mut part, "text")
        }
        _ => Err(invalid(format_args!("{at}[{index}].type"), &format!("{kind:?}"))),
    });
    texts.collect()
}

/// The name for the model of the tool that an item calls.
fn tool_name(at: Arguments<'_>, fields: &mut JsonObject) -> Result<String, GatewayError> {
    let namespace = match fields.remove("namespace") {
        None => None,
        Some(Value::String(namespace)) => Some(namespace),
        Some(_) => return Err(invalid(format_args!("{at}.namespace"), "a string")),
    };
    let name = model_name(namespace.as_deref(), &text(at, fields, "name")?);
    if name.len() > MAX_NAME_BYTES {
        let field = format!("{at}.name");
        let message = format!("`{field}` must be at most {MAX_NAME_BYTES} bytes, not {}", name.len());
        return Err(GatewayError::field(field, message));
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(input: Value) -> Result<(Vec<Message>, Vec<String>), GatewayError> {
        let mut ignored = BTreeSet::new();
        let messages = parse(Some("Be brief."), [], Some(input), &mut ignored)?;
        Ok((messages, ignored.into_iter().collect()))
    }

    /// Messages as `role: reasoning | content | calls | call and name`, without the instructions.
    fn shown_messages(messages: &[Message]) -> Vec<String> {
        let shown = |message: &Message| {
            let Message { role, content, reasoning, tool_calls, tool_call_id, name } = message;
            let calls: Vec<String> = tool_calls
                .iter()
                .map(|ToolCall { id, name, arguments }| format!("{id} {name}({arguments})"))
                .collect();
            format!("{role}: {reasoning} | {content} | {} | {tool_call_id} {name}", calls.join(", "))
        };
        messages.iter().map(shown).collect()
    }

    #[test]
    fn items_are_the_turns_of_a_conversation() {
        let message = |role: &str, text: &str| json!({"role": role, "content": text});
        let thought =
            |text: &str| json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]});
        let call = |id: &str| json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"});
        let output =
            |id: &str| json!({"type": "function_call_output", "call_id": id, "output": format!("o{id}")});
        const FIRST: &str = "system:  | Be brief. |  |  ";
        for (input, expected) in [
            (json!("hi"), vec![FIRST, "user:  | hi |  |  "]),
            (
                // One message of the system at the beginning, which is all that many templates take.
                json!([message("developer", "A."), message("user", "hi"), message("system", "B.")]),
                vec!["system:  | Be brief.\n\nA. |  |  ", "user:  | hi |  |  ", "system:  | B. |  |  "],
            ),
            (
                json!([
                    {"type": "message", "role": "user", "content": [
                        {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
                        {"type": "output_text", "text": "c", "annotations": [], "logprobs": []},
                        {"type": "refusal", "refusal": "d"}]},
                    message("assistant", "e"),
                ]),
                vec![FIRST, "user:  | ab |  |  ", "assistant:  | cd |  |  ", "assistant:  | e |  |  "],
            ),
            (
                json!([
                    message("user", "hi"),
                    thought("t"),
                    message("assistant", "I call."),
                    call("1"),
                    call("2"),
                    output("1"),
                    output("2"),
                    thought("u"),
                    call("3"),
                    output("3"),
                    thought("v"),
                    message("assistant", "done"),
                ]),
                vec![
                    FIRST,
                    "user:  | hi |  |  ",
                    "assistant: t | I call. | 1 f({}), 2 f({}) |  ",
                    "tool:  | o1 |  | 1 f",
                    "tool:  | o2 |  | 2 f",
                    "assistant: u |  | 3 f({}) |  ",
                    "tool:  | o3 |  | 3 f",
                    "assistant: v | done |  |  ",
                ],
            ),
            (
                json!([
                    {"type": "custom_tool_call", "namespace": null, "id": "ctc_1", "call_id": "1", "name": "patch", "input": "a\n"},
                    {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "ok"}]},
                ]),
                vec![FIRST, r#"assistant:  |  | 1 patch({"input":"a\n"}) |  "#, "tool:  | ok |  | 1 patch"],
            ),
            (
                json!([
                    {"type": "function_call", "namespace": "crm", "call_id": "1", "name": "find", "arguments": "{}"},
                    {"type": "function_call_output", "namespace": "crm", "call_id": "1", "output": "ok"},
                ]),
                vec![FIRST, "assistant:  |  | 1 crm__find({}) |  ", "tool:  | ok |  | 1 crm__find"],
            ),
            (
                // Cut off while it thought; what it thought in full comes before a summary.
                json!([
                    message("user", "hi"),
                    {"type": "reasoning", "id": "rs_1", "encrypted_content": "x", "content": [
                        {"type": "reasoning_text", "text": "a"}, {"type": "reasoning_text", "text": "b"}],
                     "summary": [{"type": "summary_text", "text": "c"}]},
                    message("user", "go on"),
                    thought("d"),
                ]),
                vec![
                    FIRST,
                    "user:  | hi |  |  ",
                    "assistant: ab |  |  |  ",
                    "user:  | go on |  |  ",
                    "assistant: d |  |  |  ",
                ],
            ),
        ] {
            let (messages, ignored) = check(input.clone()).unwrap();
            assert_eq!((shown_messages(&messages), ignored), (to_texts(&expected), vec![]), "{input}");
        }
    }

    fn to_texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn fields_of_items_that_are_left_out_are_listed() {
        let input = json!([
            {"role": "user", "name": "eve", "content": [{"type": "input_text", "text": "a", "detail": "low"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": {"a": 1}, "namespace": "n"},
        ]);
        let (messages, ignored) = check(input).unwrap();
        assert_eq!(ignored, ["input.content.detail", "input.name"]);
        assert_eq!(messages[2].tool_calls[0].arguments, r#"{"a":1}"#);
    }

    #[test]
    fn items_that_are_invalid_are_refused_by_name() {
        let user = |content: Value| json!([{"role": "user", "content": content}]);
        for (input, param) in [
            (json!(7), "input"),
            (json!([]), "input"),
            (json!({}), "input"),
            (json!(["hi"]), "input[0]"),
            (json!([{}]), "input[0].type"),
            (json!([{"type": 7}]), "input[0].type"),
            (json!([{"type": "item_reference", "id": "msg_1"}]), "input[0].type"),
            (json!([{"type": "web_search_call"}]), "input[0].type"),
            (json!([{"type": "compaction"}]), "input[0].encrypted_content"),
            (json!([{"type": "compaction", "encrypted_content": "gAAAAB_x"}]), "input[0].encrypted_content"),
            (json!([{"role": "tool", "content": "x"}]), "input[0].role"),
            (json!([{"type": "message", "content": "x"}]), "input[0].role"),
            (user(json!(7)), "input[0].content"),
            (json!([{"role": "user"}]), "input[0].content"),
            (user(json!([{"type": "input_image", "image_url": "x"}])), "input[0].content[0].type"),
            (user(json!([{"type": "input_file", "file_id": "x"}])), "input[0].content[0].type"),
            (
                user(json!([{"type": "input_text", "text": "a"}, {"type": "input_audio"}])),
                "input[0].content[1].type",
            ),
            (user(json!([{"type": "input_text"}])), "input[0].content[0].text"),
            (json!([{"type": "function_call", "call_id": "1"}]), "input[0].name"),
            (json!([{"type": "function_call", "call_id": "1", "name": "f".repeat(257)}]), "input[0].name"),
            (json!([{"type": "function_call", "name": "f"}]), "input[0].call_id"),
            (
                json!([{"type": "function_call", "call_id": "1", "name": "f", "arguments": 7}]),
                "input[0].arguments",
            ),
            (json!([{"type": "custom_tool_call", "call_id": "1", "name": "f"}]), "input[0].input"),
            (
                json!([{"type": "function_call", "namespace": 7, "call_id": "1", "name": "f"}]),
                "input[0].namespace",
            ),
            (json!([{"type": "function_call_output", "output": "x"}]), "input[0].call_id"),
            (json!([{"type": "function_call_output", "call_id": "1"}]), "input[0].output"),
            (
                json!([{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}]),
                "input[0].output[0].type",
            ),
            (json!([{"type": "reasoning", "summary": "x"}]), "input[0].summary"),
            (json!([{"type": "reasoning", "summary": [7]}]), "input[0].summary[0].type"),
            (json!([{"type": "reasoning", "content": [{"type": "text"}]}]), "input[0].content[0].text"),
        ] {
            let error = check(input.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{input}");
            assert!(error.message.contains(param.split(".type").next().unwrap()), "{error}");
        }
        let error = parse(None, [], None, &mut BTreeSet::new()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("input"));
    }
}
