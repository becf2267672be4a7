//! The content of a message: a text, or blocks.

use std::collections::BTreeSet;
use std::fmt::Arguments;

use russet_wire::conversation::ToolCall;
use serde_json::Value;

use crate::dialects::tool_calls::MAX_NAME_BYTES;
use crate::dialects::values::{JsonObject, invalid, is_empty, shown};
use crate::error::GatewayError;

/// One block.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ContentBlock {
    /// A text.
    Text(String),
    /// What an assistant thought. That of Anthropic's own models may be encrypted, which is no text.
    Thinking(String),
    /// A call of a tool by an assistant.
    ToolUse(ToolCall),
    /// The result of such a call.
    ToolResult(ToolResult),
}

/// The result of a call.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ToolResult {
    /// The id of the call.
    pub(super) tool_use_id: String,
    /// Its text.
    pub(super) text: String,
}

/// The blocks of a content, of which a text is one; adds the names of fields that are left out to `ignored`.
pub(super) fn blocks(
    at: Arguments<'_>,
    content: Option<Value>,
    ignored: &mut BTreeSet<String>,
) -> Result<Vec<ContentBlock>, GatewayError> {
    match content {
        Some(Value::String(text)) => Ok(vec![ContentBlock::Text(text)]),
        Some(Value::Array(blocks)) => {
            let blocks = blocks.into_iter().enumerate();
            blocks.map(|(index, value)| block(format_args!("{at}[{index}]"), value, ignored)).collect()
        }
        _ => Err(invalid(at, "a string or a list of content blocks")),
    }
}

/// The texts of a content of texts alone, which are paragraphs.
pub(super) fn texts(
    at: Arguments<'_>,
    content: Option<Value>,
    ignored: &mut BTreeSet<String>,
) -> Result<Vec<String>, GatewayError> {
    let blocks = blocks(at, content, ignored)?.into_iter().enumerate();
    let text = |(index, block)| match block {
        ContentBlock::Text(text) => Ok(text),
        _ => Err(invalid(format_args!("{at}[{index}].type"), "\"text\"")),
    };
    blocks.map(text).collect()
}

/// Adds a paragraph to a text.
pub(super) fn add_paragraph(text: &mut String, paragraph: &str) {
    if !text.is_empty() && !paragraph.is_empty() {
        text.push_str("\n\n");
    }
    text.push_str(paragraph);
}

fn paragraphs(texts: &[String]) -> String {
    let mut all = String::new();
    texts.iter().for_each(|text| add_paragraph(&mut all, text));
    all
}

fn block(
    at: Arguments<'_>,
    value: Value,
    ignored: &mut BTreeSet<String>,
) -> Result<ContentBlock, GatewayError> {
    let Value::Object(mut fields) = value else { return Err(invalid(at, "a content block with a type")) };
    fields.retain(|_, value| !value.is_null());
    let kind = fields.remove("type");
    let block = match kind.as_ref().and_then(Value::as_str) {
        Some("text") => ContentBlock::Text(text_field(at, &mut fields, "text")?),
        Some("thinking") => {
            // Whoever signed it: a template takes the text as it is.
            fields.remove("signature");
            ContentBlock::Thinking(text_field(at, &mut fields, "thinking")?)
        }
        Some("redacted_thinking") => {
            fields.remove("data");
            ContentBlock::Thinking(String::new())
        }
        Some("tool_use") => ContentBlock::ToolUse(tool_use(at, &mut fields)?),
        Some("tool_result") => ContentBlock::ToolResult(tool_result(at, &mut fields, ignored)?),
        Some(kind) => {
            let kind = shown(&Value::from(kind));
            let field = format!("{at}.type");
            let message = format!(
                "`{field}` is {kind}, a block that this release does not support; send text, thinking, tool_use or tool_result"
            );
            return Err(GatewayError::field(field, message));
        }
        None => {
            return Err(invalid(format_args!("{at}.type"), "the type of a content block, such as \"text\""));
        }
    };
    // Prefixes are cached without it.
    let left_out = fields.iter().filter(|(name, value)| *name != "cache_control" && !is_empty(value));
    ignored.extend(left_out.map(|(name, _)| format!("messages.content.{name}")));
    Ok(block)
}

fn text_field(at: Arguments<'_>, fields: &mut JsonObject, name: &str) -> Result<String, GatewayError> {
    match fields.remove(name) {
        Some(Value::String(text)) => Ok(text),
        _ => Err(invalid(format_args!("{at}.{name}"), "a string")),
    }
}

fn tool_use(at: Arguments<'_>, fields: &mut JsonObject) -> Result<ToolCall, GatewayError> {
    let id = text_field(at, fields, "id")?;
    let name = text_field(at, fields, "name")?;
    if name.is_empty() || name.len() > MAX_NAME_BYTES {
        return Err(invalid(format_args!("{at}.name"), &format!("a name of at most {MAX_NAME_BYTES} bytes")));
    }
    let arguments = match fields.remove("input") {
        // Its keys are in the client's order.
        Some(input @ Value::Object(_)) => input.to_string(),
        None => "{}".to_owned(),
        Some(_) => return Err(invalid(format_args!("{at}.input"), "an object")),
    };
    Ok(ToolCall { id, name, arguments })
}

fn tool_result(
    at: Arguments<'_>,
    fields: &mut JsonObject,
    ignored: &mut BTreeSet<String>,
) -> Result<ToolResult, GatewayError> {
    let tool_use_id = text_field(at, fields, "tool_use_id")?;
    let is_error = match fields.remove("is_error") {
        None => false,
        Some(Value::Bool(is_error)) => is_error,
        Some(_) => return Err(invalid(format_args!("{at}.is_error"), "true or false")),
    };
    // Templates have no other place for it.
    let mut text = if is_error { "Error: ".to_owned() } else { String::new() };
    if let Some(content) = fields.remove("content") {
        text.push_str(&paragraphs(&texts(format_args!("{at}.content"), Some(content), ignored)?));
    }
    Ok(ToolResult { tool_use_id, text })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(content: Value) -> Result<(Vec<ContentBlock>, Vec<String>), GatewayError> {
        let mut ignored = BTreeSet::new();
        let blocks = blocks(format_args!("messages[0].content"), Some(content), &mut ignored)?;
        Ok((blocks, ignored.into_iter().collect()))
    }

    fn result(id: &str, text: &str) -> ContentBlock {
        ContentBlock::ToolResult(ToolResult { tool_use_id: id.into(), text: text.into() })
    }

    #[test]
    fn each_kind_of_block_is_read() {
        let text = |text: &str| ContentBlock::Text(text.into());
        let call = |arguments: &str| {
            ContentBlock::ToolUse(ToolCall { id: "c".into(), name: "f".into(), arguments: arguments.into() })
        };
        let cached = json!({"type": "ephemeral", "ttl": "1h"});
        for (content, expected) in [
            (json!("hi"), vec![text("hi")]),
            (json!([]), vec![]),
            (
                json!([{"type": "text", "text": "a", "cache_control": cached, "citations": null}]),
                vec![text("a")],
            ),
            (
                json!([{"type": "thinking", "thinking": "hm", "signature": "EuY"}, {"type": "redacted_thinking", "data": "Eu"}]),
                vec![ContentBlock::Thinking("hm".into()), ContentBlock::Thinking(String::new())],
            ),
            (
                json!([{"type": "tool_use", "id": "c", "name": "f", "input": {"z": 1.0, "a": [2]}, "cache_control": cached}]),
                vec![call(r#"{"z":1.0,"a":[2]}"#)],
            ),
            (json!([{"type": "tool_use", "id": "c", "name": "f"}]), vec![call("{}")]),
            (json!([{"type": "tool_result", "tool_use_id": "c"}]), vec![result("c", "")]),
            (
                json!([{"type": "tool_result", "tool_use_id": "c", "content": "42", "is_error": false}]),
                vec![result("c", "42")],
            ),
            (
                json!([{"type": "tool_result", "tool_use_id": "c", "is_error": true, "content": [
                    {"type": "text", "text": "no"}, {"type": "text", "text": "file", "cache_control": cached}]}]),
                vec![result("c", "Error: no\n\nfile")],
            ),
        ] {
            assert_eq!(check(content.clone()), Ok((expected, vec![])), "{content}");
        }
        let cited = json!([{"type": "text", "text": "a", "citations": [{"cited_text": "x"}], "odd": 1}]);
        let listed = ["messages.content.citations", "messages.content.odd"].map(str::to_owned).to_vec();
        assert_eq!(check(cited), Ok((vec![text("a")], listed)));
    }

    #[test]
    fn blocks_that_cannot_be_read_are_named() {
        let at = |rest: &str| format!("messages[0].content{rest}");
        for (content, param, words) in [
            (json!(7), at(""), "a string or a list of content blocks"),
            (json!(["hi"]), at("[0]"), "a content block with a type"),
            (json!([{"text": "hi"}]), at("[0].type"), "type of a content block"),
            (json!([{"type": "text"}]), at("[0].text"), "a string"),
            (
                json!([{"type": "text", "text": "a"}, {"type": "image", "source": {}}]),
                at("[1].type"),
                "\"image\"",
            ),
            (json!([{"type": "document"}]), at("[0].type"), "\"document\""),
            (json!([{"type": "x".repeat(100_000)}]), at("[0].type"), "…"),
            (json!([{"type": "thinking", "signature": "x"}]), at("[0].thinking"), "a string"),
            (json!([{"type": "tool_use", "name": "f"}]), at("[0].id"), "a string"),
            (json!([{"type": "tool_use", "id": "c"}]), at("[0].name"), "a string"),
            (json!([{"type": "tool_use", "id": "c", "name": ""}]), at("[0].name"), "at most 256 bytes"),
            (
                json!([{"type": "tool_use", "id": "c", "name": "f".repeat(257)}]),
                at("[0].name"),
                "at most 256 bytes",
            ),
            (
                json!([{"type": "tool_use", "id": "c", "name": "f", "input": "{}"}]),
                at("[0].input"),
                "an object",
            ),
            (json!([{"type": "tool_result", "content": "x"}]), at("[0].tool_use_id"), "a string"),
            (
                json!([{"type": "tool_result", "tool_use_id": "c", "is_error": 1}]),
                at("[0].is_error"),
                "true or false",
            ),
            (
                json!([{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}]),
                at("[0].content[0].type"),
                "\"image\"",
            ),
            (
                json!([{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "thinking", "thinking": "x"}]}]),
                at("[0].content[0].type"),
                "must be \"text\"",
            ),
        ] {
            let GatewayError { param: found, message, .. } = check(content.clone()).unwrap_err();
            assert_eq!(found.as_deref(), Some(param.as_str()), "{content}");
            assert!(message.contains(&param) && message.contains(words), "{message}");
            assert!(message.len() < 300, "{message}");
        }
    }
}
