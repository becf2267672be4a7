//! Messages and tools as a template reads them. Templates agree on texts, but not on calls of tools: most want arguments
//! as an object, some as JSON text, and some write a call only where the message has no text at all. Which form a
//! template reads is found out when it is loaded, from what it makes of a call.

use jiff::Zoned;
use minijinja::Value;
use russet_wire::conversation::{Message, Tool, ToolCall};

use super::{Prompt, Template};

/// How calls of tools are given to a template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallForm {
    /// Arguments are JSON text, not an object.
    pub arguments_as_text: bool,
    /// A message that has calls and no text has `none` as its content, not an empty text.
    pub content_as_none: bool,
}

impl CallForm {
    /// All forms, the most usual first.
    pub const ALL: [Self; 4] = [
        Self { arguments_as_text: false, content_as_none: false },
        Self { arguments_as_text: false, content_as_none: true },
        Self { arguments_as_text: true, content_as_none: false },
        Self { arguments_as_text: true, content_as_none: true },
    ];

    /// The first form of which a template writes the call whole; the most usual one where it writes none.
    pub(super) fn of(template: &mut Template) -> Self {
        let (name, key, value) = (PROBE, "probe_key", "probe_value");
        let tool = probe_tool(key);
        let call = ToolCall {
            // Templates that check ids want nine letters and digits.
            id: "abcdef123".to_owned(),
            name: name.to_owned(),
            arguments: format!(r#"{{"{key}":"{value}"}}"#),
        };
        let messages = [
            Message::new("user", "Hello"),
            Message { role: "assistant".to_owned(), tool_calls: vec![call.clone()], ..Message::default() },
            Message {
                role: "tool".to_owned(),
                content: "A result.".to_owned(),
                tool_call_id: call.id,
                name: name.to_owned(),
                ..Message::default()
            },
        ];
        let now = Zoned::default();
        let prompt = Prompt { tools: &[tool], ..Prompt::new(&messages, &now) };
        // As an object it is written as JSON or XML; its Python notation is no format of any model.
        let is_whole = |text: &str| {
            let python = format!("'{key}'");
            // Once in the tool, once in the call.
            text.matches(key).count() > 2
                && text.contains(value)
                && !text.contains(&python)
                && !text.contains("None")
                && !text.contains("\\\"")
        };
        let found = Self::ALL.into_iter().find(|form| {
            template.call_form = *form;
            template.render(&prompt).is_ok_and(|text| is_whole(&text))
        });
        found.unwrap_or_default()
    }

    /// A message. What is not there has no key, as in Transformers.
    pub(super) fn message(self, message: &Message) -> Value {
        let Message { role, content, reasoning, tool_calls, tool_call_id, name } = message;
        let mut fields: Vec<(&str, Value)> = Vec::with_capacity(8);
        // Under both names by which templates ask for it.
        if !reasoning.is_empty() {
            fields.push(("thinking", Value::from(reasoning.as_str())));
        }
        fields.push(("role", Value::from(role.as_str())));
        let is_none = self.content_as_none && content.is_empty() && !tool_calls.is_empty();
        fields.push(("content", if is_none { Value::from(()) } else { Value::from(content.as_str()) }));
        for (key, text) in [("name", name), ("tool_call_id", tool_call_id)] {
            if !text.is_empty() {
                fields.push((key, Value::from(text.as_str())));
            }
        }
        if !tool_calls.is_empty() {
            fields.push(("tool_calls", tool_calls.iter().map(|call| self.call(call)).collect()));
        }
        if !reasoning.is_empty() {
            fields.push(("reasoning_content", Value::from(reasoning.as_str())));
        }
        Value::from_pairs(fields)
    }

    fn call(self, call: &ToolCall) -> Value {
        let ToolCall { id, name, arguments } = call;
        let text = || Value::from(arguments.as_str());
        // What is no JSON is given as it is: the template decides.
        let arguments = if self.arguments_as_text { text() } else { json(arguments).unwrap_or_else(text) };
        let function = Value::from_pairs([("name", Value::from(name.as_str())), ("arguments", arguments)]);
        let mut fields = Vec::with_capacity(3);
        if !id.is_empty() {
            fields.push(("id", Value::from(id.as_str())));
        }
        fields.extend([("type", Value::from("function")), ("function", function)]);
        Value::from_pairs(fields)
    }
}

/// Name of a tool that no client has.
const PROBE: &str = "probe_tool";

fn probe_tool(key: &str) -> Tool {
    Tool {
        name: PROBE.to_owned(),
        description: Some("A probe.".to_owned()),
        parameters: Some(format!(
            r#"{{"type":"object","properties":{{"{key}":{{"type":"string"}}}},"required":["{key}"]}}"#
        )),
        strict: false,
    }
}

/// Whether a template tells the model of tools. What cannot be rendered is asked when it is needed.
pub(super) fn shows_tools(template: &Template) -> bool {
    let (tools, now) = ([probe_tool("key")], Zoned::default());
    let messages = [Message::new("system", "Be brief."), Message::new("user", "Hello")];
    [&messages[..], &messages[1..]].into_iter().any(|messages| {
        let prompt = Prompt { tools: &tools, ..Prompt::new(messages, &now) };
        template.render(&prompt).map_or(true, |text| text.contains(PROBE))
    })
}

/// The tools; `none` without any, as templates ask.
pub(super) fn tools(tools: &[Tool]) -> Value {
    if tools.is_empty() {
        return Value::from(());
    }
    let as_value = |tool: &Tool| {
        let Tool { name, description, parameters, strict: _ } = tool;
        let mut function = vec![("name", Value::from(name.as_str()))];
        if let Some(description) = description {
            function.push(("description", Value::from(description.as_str())));
        }
        if let Some(parameters) = parameters.as_deref().and_then(json) {
            function.push(("parameters", parameters));
        }
        Value::from_pairs([("type", Value::from("function")), ("function", Value::from_pairs(function))])
    };
    tools.iter().map(as_value).collect()
}

/// A JSON text, its keys in their order.
fn json(text: &str) -> Option<Value> {
    serde_json::from_str(text).ok()
}
