//! Messages of a chat request. What SDKs and agents keep of an earlier response is read back: an assistant's turn may
//! be empty, a refusal, or in the parts of OpenAI's other API, and it has what it thought and the tools that it called.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Arguments;

use russet_wire::conversation::Message;
use serde_json::Value;

use crate::dialects::tool_calls;
use crate::dialects::values::{JsonObject, is_empty, shown};
use crate::error::GatewayError;

/// Parses `messages`; adds the names of fields that are left out to `ignored`.
pub(super) fn parse(
    value: Option<Value>,
    ignored: &mut BTreeSet<String>,
) -> Result<Vec<Message>, GatewayError> {
    match value {
        None => Err(GatewayError::field("messages", "`messages` is missing")),
        Some(Value::Array(items)) if !items.is_empty() => {
            let messages = items.into_iter().enumerate();
            let messages =
                messages.map(|(index, item)| message(format_args!("messages[{index}]"), item, ignored));
            let mut messages: Vec<Message> = messages.collect::<Result<_, _>>()?;
            name_results(&mut messages);
            Ok(messages)
        }
        Some(_) => {
            Err(GatewayError::field("messages", "`messages` must be a list with at least one message"))
        }
    }
}

/// `at` is its place, which only errors write.
fn message(at: Arguments<'_>, value: Value, ignored: &mut BTreeSet<String>) -> Result<Message, GatewayError> {
    let Value::Object(mut fields) = value else {
        return Err(GatewayError::field(
            at.to_string(),
            format!("`{at}` must be an object with a role and a content"),
        ));
    };
    let role = match fields.get("role").and_then(Value::as_str) {
        // A newer name of the same role; chat templates know the older one.
        Some("developer") => "system",
        Some("system") => "system",
        Some("user") => "user",
        Some("assistant") => "assistant",
        Some("tool") => "tool",
        _ => {
            let message = format!("`{at}.role` must be system, developer, user, assistant or tool");
            return Err(GatewayError::field(format!("{at}.role"), message));
        }
    };
    fields.retain(|_, value| !value.is_null() && !is_empty(value));
    for name in ["function_call", "audio"] {
        if fields.contains_key(name) {
            let field = format!("{at}.{name}");
            return Err(GatewayError::field(&field, format!("`{field}` is not supported by this release")));
        }
    }
    let is_assistant = role == "assistant";
    let refusal = if is_assistant { fields.remove("refusal") } else { None };
    let content = content(
        format_args!("{at}.content"),
        fields.remove("content"),
        is_assistant,
        "messages.content",
        ignored,
    )?;
    let content = match (content, refusal) {
        (Some(content), _) => content,
        (None, Some(Value::String(refusal))) => refusal,
        // What an assistant said may be nothing: its turn was a call of a tool, or was cut off.
        (None, _) => String::new(),
    };
    let mut message = Message { role: role.to_owned(), content, ..Message::default() };
    message.name = text_field(at, &mut fields, "name")?;
    if is_assistant {
        // Servers and clients have three names for it.
        for name in ["reasoning_content", "reasoning", "thinking"] {
            let reasoning = text_field(at, &mut fields, name)?;
            if message.reasoning.is_empty() {
                message.reasoning = reasoning;
            }
        }
        message.tool_calls =
            tool_calls::parse(format_args!("{at}.tool_calls"), fields.remove("tool_calls"), &[])?;
    }
    if role == "tool" {
        message.tool_call_id = text_field(at, &mut fields, "tool_call_id")?;
    }
    let left_out = fields.keys().filter(|name| *name != "role");
    ignored.extend(left_out.map(|name| format!("messages.{name}")));
    Ok(message)
}

/// A text that may be left out.
fn text_field(at: Arguments<'_>, fields: &mut JsonObject, name: &str) -> Result<String, GatewayError> {
    match fields.remove(name) {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text),
        Some(_) => {
            let field = format!("{at}.{name}");
            Err(GatewayError::field(&field, format!("`{field}` must be a string")))
        }
    }
}

/// Gives results of tools the name of their tool, which OpenAI's clients leave out and chat templates write.
pub(in crate::dialects::openai) fn name_results(messages: &mut [Message]) {
    let mut names: HashMap<String, String> = HashMap::new();
    for message in messages {
        names.extend(message.tool_calls.iter().map(|call| (call.id.clone(), call.name.clone())));
        if message.role == "tool"
            && message.name.is_empty()
            && let Some(name) = names.get(&message.tool_call_id)
        {
            message.name.clone_from(name);
        }
    }
}

/// The text of a content; `None` where an assistant has none. Fields of its parts that are left out are added to `ignored`
/// under this name.
pub(in crate::dialects::openai) fn content(
    at: Arguments<'_>,
    value: Option<Value>,
    is_assistant: bool,
    name: &str,
    ignored: &mut BTreeSet<String>,
) -> Result<Option<String>, GatewayError> {
    match value {
        Some(Value::String(text)) => Ok(Some(text)),
        Some(Value::Array(parts)) => {
            let mut content = String::new();
            for (index, part) in parts.into_iter().enumerate() {
                content.push_str(&part_text(
                    format_args!("{at}[{index}]"),
                    part,
                    is_assistant,
                    name,
                    ignored,
                )?);
            }
            Ok(Some(content))
        }
        None if is_assistant => Ok(None),
        _ => {
            let message = format!("`{at}` must be a string or a list of text parts");
            Err(GatewayError::field(at.to_string(), message))
        }
    }
}

fn part_text(
    at: Arguments<'_>,
    part: Value,
    is_assistant: bool,
    listed: &str,
    ignored: &mut BTreeSet<String>,
) -> Result<String, GatewayError> {
    let mut fields = match part {
        Value::String(text) => return Ok(text),
        Value::Object(fields) => fields,
        _ => {
            return Err(GatewayError::field(
                at.to_string(),
                format!("`{at}` must be a text part or a string"),
            ));
        }
    };
    let name = match fields.remove("type") {
        // The second and third are those of OpenAI's Responses API.
        Some(Value::String(kind)) if ["text", "input_text", "output_text"].contains(&kind.as_str()) => "text",
        Some(Value::String(kind)) if is_assistant && kind == "refusal" => "refusal",
        Some(other) => {
            let message =
                format!("`{at}.type` must be \"text\"; {} is not supported by this release", shown(&other));
            return Err(GatewayError::field(format!("{at}.type"), message));
        }
        None => {
            return Err(GatewayError::field(format!("{at}.type"), format!("`{at}.type` is missing")));
        }
    };
    let Some(Value::String(text)) = fields.remove(name) else {
        return Err(GatewayError::field(format!("{at}.{name}"), format!("`{at}.{name}` must be a string")));
    };
    let left_out = fields.iter().filter(|(_, value)| !value.is_null() && !is_empty(value));
    ignored.extend(left_out.map(|(name, _)| format!("{listed}.{name}")));
    Ok(text)
}

#[cfg(test)]
mod tests {
    use russet_wire::conversation::ToolCall;
    use serde_json::json;

    use super::*;

    fn check(message: Value) -> Result<(String, Vec<String>), GatewayError> {
        let mut ignored = BTreeSet::new();
        let parsed = parse(Some(json!([message])), &mut ignored)?;
        Ok((parsed[0].content.clone(), ignored.into_iter().collect()))
    }

    #[test]
    fn an_assistants_turn_may_be_empty_or_a_refusal() {
        for (message, expected) in [
            (json!({"content": null}), ""),
            (json!({}), ""),
            (json!({"content": ""}), ""),
            (json!({"content": []}), ""),
            (json!({"content": null, "refusal": "no"}), "no"),
            (json!({"content": "yes", "refusal": null}), "yes"),
            (json!({"content": [{"type": "refusal", "refusal": "no"}]}), "no"),
            (json!({"content": [{"type": "output_text", "text": "yes", "annotations": []}]}), "yes"),
            (json!({"content": null, "tool_calls": [], "audio": null, "function_call": null}), ""),
        ] {
            let mut message = message;
            message["role"] = "assistant".into();
            assert_eq!(check(message.clone()), Ok((expected.to_owned(), vec![])), "{message}");
            if expected.is_empty() && message["content"] != "" {
                for role in ["user", "system"] {
                    message["role"] = role.into();
                    let error = check(message.clone()).unwrap_err();
                    assert_eq!(error.param.as_deref(), Some("messages[0].content"), "{message}");
                }
            }
        }
    }

    #[test]
    fn a_content_is_a_text_or_parts_of_text() {
        for (content, expected) in [
            (json!("hi"), "hi"),
            (json!(["hi", " you"]), "hi you"),
            (json!([{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]), "abc"),
            (json!([""]), ""),
            (json!(""), ""),
        ] {
            assert_eq!(check(json!({"role": "user", "content": content})), Ok((expected.into(), vec![])));
        }
        let refusal = json!([{"type": "refusal", "refusal": "no"}]);
        let error = check(json!({"role": "user", "content": refusal})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("messages[0].content[0].type"));
    }

    #[test]
    fn fields_of_messages_that_are_left_out_are_listed() {
        let message = json!({
            "role": "assistant", "prefix": true, "images": ["x"],
            "tool_calls": null, "annotations": [],
            "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "annotations": []}],
        });
        let listed = ["content.cache_control", "images", "prefix"];
        let listed = listed.map(|name| format!("messages.{name}")).to_vec();
        assert_eq!(check(message), Ok(("a".into(), listed)));
    }

    #[test]
    fn calls_and_results_of_tools_are_read_back() {
        let call = |id: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}});
        let history = json!([
            {"role": "user", "content": "17 + 25?", "name": "eve"},
            {
                "role": "assistant", "content": null, "reasoning_content": "I add.", "refusal": null,
                "tool_calls": [call("c1", json!("{\"b\": 1, \"a\": 2}")), call("c2", json!({"a": 1})), call("c3", json!(""))],
            },
            {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "42"}]},
            {"role": "tool", "tool_call_id": "c9", "content": "43", "name": "other"},
        ]);
        let mut ignored = BTreeSet::new();
        let messages = parse(Some(history), &mut ignored).unwrap();
        let made = |id: &str, arguments: &str| ToolCall {
            id: id.into(),
            name: "add".into(),
            arguments: arguments.into(),
        };
        let result = |id: &str, content: &str, name: &str| Message {
            tool_call_id: id.into(),
            name: name.into(),
            ..Message::new("tool", content)
        };
        assert_eq!(
            messages,
            [
                Message { name: "eve".into(), ..Message::new("user", "17 + 25?") },
                Message {
                    reasoning: "I add.".into(),
                    tool_calls: vec![
                        made("c1", r#"{"b": 1, "a": 2}"#),
                        made("c2", r#"{"a":1}"#),
                        made("c3", "{}"),
                    ],
                    ..Message::new("assistant", "")
                },
                result("c2", "42", "add"),
                result("c9", "43", "other"),
            ]
        );
        assert!(ignored.is_empty(), "{ignored:?}");
        for (calls, param) in [
            (json!("x"), "messages[0].tool_calls"),
            (json!(["x"]), "messages[0].tool_calls[0]"),
            (json!([{}]), "messages[0].tool_calls[0].function"),
            (json!([{"function": {}}]), "messages[0].tool_calls[0].function.name"),
            (
                json!([{"function": {"name": "f", "arguments": 7}}]),
                "messages[0].tool_calls[0].function.arguments",
            ),
            (json!([{"id": 7, "function": {"name": "f"}}]), "messages[0].tool_calls[0].id"),
        ] {
            let error = check(json!({"role": "assistant", "tool_calls": calls})).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param));
        }
    }
}
