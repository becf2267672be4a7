//! Messages of a chat. Ollama's clients name the tool of a result and leave out which call it is of; templates of some
//! families write ids, so calls and results get them.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::fmt::Arguments;

use russet_wire::conversation::Message;
use serde::Deserialize;
use serde_json::Value;

use crate::dialects::tool_calls::{self, RawCall};
use crate::dialects::values::{JsonObject, is_empty};
use crate::error::GatewayError;
use crate::json_body::JsonBody;

/// Parses `messages`, of which there may be none; adds the names of fields that are left out to `ignored`.
pub(super) fn parse(
    value: Option<Value>,
    body: &JsonBody<'_>,
    ignored: &mut BTreeSet<String>,
) -> Result<Vec<Message>, GatewayError> {
    let items = match value {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items,
        Some(_) => return Err(GatewayError::field("messages", "`messages` must be a list of messages")),
    };
    // The body is read again only for the keys of arguments.
    let has_calls = items.iter().any(|item| item.get("tool_calls").is_some());
    let raw: RawMessages<'_> =
        if has_calls { body.read().unwrap_or_default() } else { RawMessages::default() };
    let messages = items.into_iter().enumerate().map(|(index, item)| {
        let calls = raw.messages.get(index).and_then(|raw| raw.tool_calls.as_deref()).unwrap_or_default();
        message(format_args!("messages[{index}]"), item, calls, ignored)
    });
    let mut messages: Vec<Message> = messages.collect::<Result<_, _>>()?;
    pair_results(&mut messages);
    Ok(messages)
}

fn message(
    at: Arguments<'_>,
    value: Value,
    calls: &[RawCall<'_>],
    ignored: &mut BTreeSet<String>,
) -> Result<Message, GatewayError> {
    let Value::Object(mut fields) = value else {
        return Err(GatewayError::field(
            at.to_string(),
            format!("`{at}` must be an object with a role and a content"),
        ));
    };
    let role = match fields.remove("role") {
        Some(Value::String(role)) if ["system", "user", "assistant", "tool"].contains(&role.as_str()) => role,
        _ => {
            let field = format!("{at}.role");
            let message = format!("`{field}` must be system, user, assistant or tool");
            return Err(GatewayError::field(field, message));
        }
    };
    fields.retain(|_, value| !value.is_null() && !is_empty(value));
    if fields.contains_key("images") {
        let field = format!("{at}.images");
        let message = format!("`{field}` is not supported by this release: models see no images yet");
        return Err(GatewayError::field(field, message));
    }
    let mut message = Message::new(role, text(at, &mut fields, "content")?);
    match message.role.as_str() {
        "assistant" => {
            message.reasoning = text(at, &mut fields, "thinking")?;
            message.tool_calls =
                tool_calls::parse(format_args!("{at}.tool_calls"), fields.remove("tool_calls"), calls)?;
        }
        "tool" => {
            message.tool_call_id = text(at, &mut fields, "tool_call_id")?;
            message.name = text(at, &mut fields, "tool_name")?;
        }
        _ => {}
    }
    ignored.extend(fields.keys().map(|name| format!("messages.{name}")));
    Ok(message)
}

/// A text that may be left out.
fn text(at: Arguments<'_>, fields: &mut JsonObject, name: &str) -> Result<String, GatewayError> {
    match fields.remove(name) {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text),
        Some(_) => {
            let field = format!("{at}.{name}");
            let message = format!("`{field}` must be a string");
            Err(GatewayError::field(field, message))
        }
    }
}

/// Gives calls without an id one, and each result the id and the name of its call: the one that it names, else the first
/// call of its tool without a result, else the first call without one.
fn pair_results(messages: &mut [Message]) {
    let mut calls: VecDeque<String> = VecDeque::new();
    let mut of_tool: HashMap<String, VecDeque<String>> = HashMap::new();
    let mut tools: HashMap<String, String> = HashMap::new();
    let mut answered: HashSet<String> = HashSet::new();
    for message in messages {
        for call in &mut message.tool_calls {
            if call.id.is_empty() {
                // Nine letters and digits, as Mistral's templates want them.
                call.id = format!("call{:05}", tools.len());
            }
            calls.push_back(call.id.clone());
            of_tool.entry(call.name.clone()).or_default().push_back(call.id.clone());
            tools.insert(call.id.clone(), call.name.clone());
        }
        if message.role != "tool" {
            continue;
        }
        if message.tool_call_id.is_empty() {
            let open =
                if message.name.is_empty() { Some(&mut calls) } else { of_tool.get_mut(&message.name) };
            let mut open = open.into_iter().flat_map(|open| std::iter::from_fn(|| open.pop_front()));
            message.tool_call_id = open.find(|id| !answered.contains(id)).unwrap_or_default();
        }
        if let Some(tool) = tools.get(&message.tool_call_id) {
            answered.insert(message.tool_call_id.clone());
            if message.name.is_empty() {
                message.name.clone_from(tool);
            }
        }
    }
}

#[derive(Default, Deserialize)]
struct RawMessages<'a> {
    #[serde(borrow, default)]
    messages: Vec<RawMessage<'a>>,
}

#[derive(Deserialize)]
struct RawMessage<'a> {
    #[serde(borrow, default)]
    tool_calls: Option<Vec<RawCall<'a>>>,
}

#[cfg(test)]
mod tests {
    use russet_wire::conversation::ToolCall;
    use serde_json::json;

    use super::*;
    use crate::json_body::JsonScan;

    fn parse_text(text: &str) -> Result<(Vec<Message>, Vec<String>), Option<String>> {
        let mut body = JsonScan::new(text.as_bytes()).unwrap().decode(text.as_bytes()).unwrap();
        let (messages, mut ignored) = (body.value["messages"].take(), BTreeSet::new());
        let parsed = parse(Some(messages), &body, &mut ignored).map_err(|error| error.param)?;
        Ok((parsed, ignored.into_iter().collect()))
    }

    #[test]
    fn calls_keep_their_keys_and_results_find_their_calls() {
        let (messages, ignored) = parse_text(
            r#"{"messages": [
                {"role": "user", "content": "add", "images": [], "odd": 1},
                {"role": "assistant", "content": "", "thinking": "I add.", "tool_calls": [
                    {"function": {"name": "add", "arguments": {"b": 1.0, "a": {"z": 1, "y": 2}}}},
                    {"function": {"name": "mul", "arguments": {}}},
                    {"id": "mine", "function": {"name": "add", "arguments": "{\"c\":3}"}}]},
                {"role": "tool", "tool_name": "mul", "content": "0"},
                {"role": "tool", "tool_call_id": "mine", "content": "3"},
                {"role": "tool", "content": "4"},
                {"role": "tool", "tool_name": "add", "content": "too many"}]}"#,
        )
        .unwrap();
        let call = |id: &str, name: &str, arguments: &str| ToolCall {
            id: id.into(),
            name: name.into(),
            arguments: arguments.into(),
        };
        let result = |id: &str, name: &str, content: &str| Message {
            tool_call_id: id.into(),
            name: name.into(),
            ..Message::new("tool", content)
        };
        let assistant = Message {
            reasoning: "I add.".into(),
            tool_calls: vec![
                call("call00000", "add", r#"{"b": 1.0, "a": {"z": 1, "y": 2}}"#),
                call("call00001", "mul", "{}"),
                call("mine", "add", r#"{"c":3}"#),
            ],
            ..Message::new("assistant", "")
        };
        let expected = [
            Message::new("user", "add"),
            assistant,
            result("call00001", "mul", "0"),
            result("mine", "add", "3"),
            result("call00000", "add", "4"),
            result("", "add", "too many"),
        ];
        assert_eq!(
            (messages.as_slice(), ignored.as_slice()),
            (&expected[..], &["messages.odd".to_owned()][..])
        );
    }

    #[test]
    fn wrong_messages_are_refused_by_name() {
        for (message, param) in [
            (json!("hi"), "messages[0]"),
            (json!({"content": "hi"}), "messages[0].role"),
            (json!({"role": "wizard"}), "messages[0].role"),
            (json!({"role": "user", "content": [{"type": "text"}]}), "messages[0].content"),
            (json!({"role": "user", "content": "hi", "images": ["aGk="]}), "messages[0].images"),
            (json!({"role": "assistant", "thinking": true}), "messages[0].thinking"),
            (json!({"role": "assistant", "tool_calls": "x"}), "messages[0].tool_calls"),
            (json!({"role": "assistant", "tool_calls": [{}]}), "messages[0].tool_calls[0].function"),
            (json!({"role": "tool", "tool_name": 7}), "messages[0].tool_name"),
        ] {
            let body = json!({"messages": [message]}).to_string();
            assert_eq!(parse_text(&body).map(|_| ()), Err(Some(param.to_owned())), "{body}");
        }
        assert_eq!(parse_text(r#"{"messages": []}"#), Ok((vec![], vec![])));
        assert_eq!(parse_text(r#"{"messages": "hi"}"#), Err(Some("messages".to_owned())));
    }
}
