//! A conversation, independent of any client dialect: messages, tools that the model may call, and its calls. Texts of
//! JSON stay texts, with the keys in the order of whoever wrote them, because a model reads them in that order.

use serde::{Deserialize, Serialize};

/// One message of a conversation. An empty text is none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`; the chat template decides which it supports.
    pub role: String,
    /// Text of the message; dialects join text parts before.
    pub content: String,
    /// What an assistant thought before it answered.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reasoning: String,
    /// Tools that an assistant called.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call of which a `tool` message is the result.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tool_call_id: String,
    /// Name of the speaker, or of the tool.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
}

impl Message {
    /// A message that is text alone.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), ..Self::default() }
    }

    /// All its texts.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let Self { role, content, reasoning, tool_calls, tool_call_id, name } = self;
        let calls = tool_calls.iter().flat_map(|ToolCall { id, name, arguments }| [id, name, arguments]);
        [role, content, reasoning, tool_call_id, name].into_iter().chain(calls).map(String::as_str)
    }
}

/// A call of a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Names the call, for its result.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// JSON text of an object.
    pub arguments: String,
}

/// A tool that the model may call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tool {
    /// Name of the tool.
    pub name: String,
    /// What it does, for the model.
    pub description: Option<String>,
    /// JSON text of the JSON Schema of its arguments.
    pub parameters: Option<String>,
    /// Whether arguments have to meet the schema.
    #[serde(default)]
    pub strict: bool,
}

/// Whether a model calls tools.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToolChoice {
    /// As it likes.
    #[default]
    Auto,
    /// It calls at least one.
    Required,
    /// It calls the tool of this name.
    Named(String),
}

impl Tool {
    /// All its texts.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let Self { name, description, parameters, strict: _ } = self;
        [Some(name), description.as_ref(), parameters.as_ref()].into_iter().flatten().map(String::as_str)
    }
}
