//! The conversation of a request: the system prompt, and messages of one speaker in a row as one, as Anthropic has them.
//! A user's results of tools become messages of their own; system prompts in the middle become a user's text.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Arguments;

use russet_wire::conversation::Message;
use serde_json::Value;

use super::billing_header::without_billing_header;
use super::content::{ContentBlock, ToolResult, add_paragraph, blocks, texts};
use crate::dialects::values::invalid;
use crate::error::GatewayError;

/// Parses `system` and `messages`; adds the names of fields that are left out to `ignored`.
pub(super) fn parse(
    system: Option<Value>,
    messages: Option<Value>,
    ignored: &mut BTreeSet<String>,
) -> Result<Vec<Message>, GatewayError> {
    let items = match messages {
        Some(Value::Array(items)) if !items.is_empty() => items,
        Some(_) => return Err(invalid("messages", "a list with at least one message")),
        None => return Err(GatewayError::field("messages", "`messages` is missing")),
    };
    let mut conversation = Conversation::default();
    if system.is_some() {
        conversation.system(format_args!("system"), system, ignored)?;
    }
    for (index, item) in items.into_iter().enumerate() {
        conversation.message(format_args!("messages[{index}]"), item, ignored)?;
    }
    Ok(conversation.messages)
}

#[derive(Default)]
struct Conversation {
    messages: Vec<Message>,
    /// The tool of each call, by the call's id.
    tools: HashMap<String, String>,
}

impl Conversation {
    fn message(
        &mut self,
        at: Arguments<'_>,
        value: Value,
        ignored: &mut BTreeSet<String>,
    ) -> Result<(), GatewayError> {
        let Value::Object(mut fields) = value else {
            return Err(invalid(at, "an object with a role and a content"));
        };
        let content_at = format_args!("{at}.content");
        let content = fields.remove("content");
        let role = fields.remove("role");
        match role.as_ref().and_then(Value::as_str) {
            Some("user") => self.user(content_at, content, ignored)?,
            Some("assistant") => self.assistant(content_at, content, ignored)?,
            Some("system") => self.system(content_at, content, ignored)?,
            _ => return Err(invalid(format_args!("{at}.role"), "user, assistant or system")),
        }
        let left_out = fields.iter().filter(|(name, value)| *name != "cache_control" && !value.is_null());
        ignored.extend(left_out.map(|(name, _)| format!("messages.{name}")));
        Ok(())
    }

    /// A system prompt, at the beginning or, as Claude Code has it, later on.
    fn system(
        &mut self,
        at: Arguments<'_>,
        content: Option<Value>,
        ignored: &mut BTreeSet<String>,
    ) -> Result<(), GatewayError> {
        let mut system = String::new();
        for text in texts(at, content, ignored)? {
            add_paragraph(&mut system, &without_billing_header(&text));
        }
        if system.is_empty() {
            return Ok(());
        }
        if self.messages.last().is_none_or(|last| last.role == "system") {
            self.add_text("system", &system);
        } else {
            // Most chat templates refuse a system message here. Claude Code marks such texts so where it has none.
            self.add_text("user", &format!("<system-reminder>\n{system}\n</system-reminder>"));
        }
        Ok(())
    }

    fn user(
        &mut self,
        at: Arguments<'_>,
        content: Option<Value>,
        ignored: &mut BTreeSet<String>,
    ) -> Result<(), GatewayError> {
        let mut text = None;
        let blocks = blocks(at, content, ignored)?;
        if blocks.is_empty() {
            return Err(invalid(at, "a string or a list of at least one content block"));
        }
        for (index, block) in blocks.into_iter().enumerate() {
            match block {
                ContentBlock::Text(paragraph) => {
                    add_paragraph(text.get_or_insert_with(String::new), &paragraph);
                }
                ContentBlock::ToolResult(ToolResult { tool_use_id, text }) => {
                    let name = self.tools.get(&tool_use_id).cloned().unwrap_or_default();
                    let result = Message { tool_call_id: tool_use_id, name, ..Message::new("tool", text) };
                    self.messages.push(result);
                }
                ContentBlock::Thinking(_) | ContentBlock::ToolUse(_) => {
                    let what = "\"text\" or \"tool_result\": the message is a user's";
                    return Err(invalid(format_args!("{at}[{index}].type"), what));
                }
            }
        }
        if let Some(text) = text {
            self.add_text("user", &text);
        }
        Ok(())
    }

    fn assistant(
        &mut self,
        at: Arguments<'_>,
        content: Option<Value>,
        ignored: &mut BTreeSet<String>,
    ) -> Result<(), GatewayError> {
        let mut message = match self.messages.pop_if(|last| last.role == "assistant") {
            Some(last) => last,
            None => Message::new("assistant", ""),
        };
        for (index, block) in blocks(at, content, ignored)?.into_iter().enumerate() {
            match block {
                // A model wrote these texts one after the other, so nothing is between them.
                ContentBlock::Text(text) => message.content.push_str(&text),
                ContentBlock::Thinking(text) => message.reasoning.push_str(&text),
                ContentBlock::ToolUse(call) => {
                    self.tools.insert(call.id.clone(), call.name.clone());
                    message.tool_calls.push(call);
                }
                ContentBlock::ToolResult(_) => {
                    let what = "\"text\", \"thinking\" or \"tool_use\": the message is an assistant's";
                    return Err(invalid(format_args!("{at}[{index}].type"), what));
                }
            }
        }
        self.messages.push(message);
        Ok(())
    }

    /// Adds a text to the last message where it has the same role, else a message.
    fn add_text(&mut self, role: &str, text: &str) {
        match self.messages.last_mut() {
            Some(last) if last.role == role => add_paragraph(&mut last.content, text),
            _ => self.messages.push(Message::new(role, text)),
        }
    }
}

#[cfg(test)]
mod tests {
    use russet_wire::conversation::ToolCall;
    use serde_json::json;

    use super::*;

    fn check(system: Value, messages: Value) -> Result<(Vec<Message>, Vec<String>), Option<String>> {
        let mut ignored = BTreeSet::new();
        let some = |value: Value| Some(value).filter(|value| !value.is_null());
        let messages = parse(some(system), some(messages), &mut ignored).map_err(|error| error.param)?;
        Ok((messages, ignored.into_iter().collect()))
    }

    #[test]
    fn system_prompts_come_first_and_in_between() {
        const BILLING: &str = "x-anthropic-billing-header: cc_version=2.1; cch=0;";
        let text = |text: &str| json!({"type": "text", "text": text});
        let say = |role: &str, content: Value| json!({"role": role, "content": content});
        for (system, messages, expected) in [
            (Value::Null, json!([say("user", json!("hi"))]), vec![("user", "hi")]),
            (
                json!("Be brief."),
                json!([say("user", json!("hi"))]),
                vec![("system", "Be brief."), ("user", "hi")],
            ),
            (
                json!([text(BILLING), text("You code."), {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]),
                json!([say("user", json!([text("a"), text("b")]))]),
                vec![("system", "You code.\n\nBe brief."), ("user", "a\n\nb")],
            ),
            (json!([text(BILLING)]), json!([say("user", json!("hi"))]), vec![("user", "hi")]),
            (json!(""), json!([say("user", json!("hi"))]), vec![("user", "hi")]),
            (json!([]), json!([say("user", json!(BILLING))]), vec![("user", BILLING)]),
            (
                json!("One."),
                json!([
                    say("system", json!("Two.")),
                    say("user", json!("a")),
                    say("user", json!("b")),
                    say("system", json!([text(BILLING), text("Three.")])),
                    say("assistant", json!([text("c"), text("d")])),
                    say("assistant", json!("e")),
                    say("system", json!("Four.")),
                    say("user", json!("f")),
                ]),
                vec![
                    ("system", "One.\n\nTwo."),
                    ("user", "a\n\nb\n\n<system-reminder>\nThree.\n</system-reminder>"),
                    ("assistant", "cde"),
                    ("user", "<system-reminder>\nFour.\n</system-reminder>\n\nf"),
                ],
            ),
        ] {
            let expected = expected.into_iter().map(|(role, text)| Message::new(role, text)).collect();
            assert_eq!(
                check(system.clone(), messages.clone()),
                Ok((expected, vec![])),
                "{system} {messages}"
            );
        }
    }

    #[test]
    fn calls_results_and_thoughts_of_a_history_are_read() {
        let history = json!([
            {"role": "user", "content": "17 + 25?"},
            {"role": "assistant", "id": "msg_1", "content": [
                {"type": "thinking", "thinking": "I add.", "signature": "s"},
                {"type": "text", "text": "Adding."},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"b": 1, "a": 2}},
                {"type": "tool_use", "id": "c2", "name": "sub", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c2", "content": "42"},
                {"type": "tool_result", "tool_use_id": "c9", "content": [{"type": "text", "text": "43"}]},
                {"type": "text", "text": "Go on."},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "3"}]},
        ]);
        let result = |id: &str, name: &str, text: &str| Message {
            tool_call_id: id.into(),
            name: name.into(),
            ..Message::new("tool", text)
        };
        let call = |id: &str, name: &str, arguments: &str| ToolCall {
            id: id.into(),
            name: name.into(),
            arguments: arguments.into(),
        };
        let expected = vec![
            Message::new("user", "17 + 25?"),
            Message {
                reasoning: "I add.".into(),
                tool_calls: vec![call("c1", "add", r#"{"b":1,"a":2}"#), call("c2", "sub", "{}")],
                ..Message::new("assistant", "Adding.")
            },
            result("c2", "sub", "42"),
            result("c9", "", "43"),
            Message::new("user", "Go on."),
            result("c1", "add", "3"),
        ];
        assert_eq!(check(Value::Null, history), Ok((expected, vec!["messages.id".to_owned()])));
    }

    #[test]
    fn messages_that_cannot_be_read_are_named() {
        let user = |content: Value| json!([{"role": "user", "content": content}]);
        let hi = || user(json!("hi"));
        for (system, messages, param) in [
            (Value::Null, Value::Null, "messages"),
            (Value::Null, json!([]), "messages"),
            (Value::Null, json!("hi"), "messages"),
            (Value::Null, json!(["hi"]), "messages[0]"),
            (Value::Null, json!([{"role": "tool", "content": "x"}]), "messages[0].role"),
            (Value::Null, json!([{"content": "x"}]), "messages[0].role"),
            (Value::Null, json!([{"role": "user"}]), "messages[0].content"),
            (Value::Null, user(json!([])), "messages[0].content"),
            (
                Value::Null,
                user(json!([{"type": "tool_use", "id": "c", "name": "f"}])),
                "messages[0].content[0].type",
            ),
            (
                Value::Null,
                json!([{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]),
                "messages[0].content[0].type",
            ),
            (
                Value::Null,
                json!([{"role": "system", "content": [{"type": "thinking", "thinking": "x"}]}]),
                "messages[0].content[0].type",
            ),
            (json!(7), hi(), "system"),
            (json!([{"type": "image"}]), hi(), "system[0].type"),
            (json!([{"type": "text"}]), hi(), "system[0].text"),
        ] {
            assert_eq!(check(system, messages.clone()), Err(Some(param.to_owned())), "{messages}");
        }
    }
}
