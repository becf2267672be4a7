//! Conversations between the protos and [`russet_wire::conversation`]. Destructured whole, so that no field is lost.

use russet_wire::conversation::{Message, Tool, ToolCall, ToolChoice};

use crate::engine as pb;

/// Converts each of a list.
pub(super) fn all<From, To: std::convert::From<From>>(items: Vec<From>) -> Vec<To> {
    items.into_iter().map(To::from).collect()
}

impl From<Message> for pb::Message {
    fn from(message: Message) -> Self {
        let Message { role, content, reasoning, tool_calls, tool_call_id, name } = message;
        Self { role, content, reasoning, tool_calls: all(tool_calls), tool_call_id, name }
    }
}

impl From<pb::Message> for Message {
    fn from(message: pb::Message) -> Self {
        let pb::Message { role, content, reasoning, tool_calls, tool_call_id, name } = message;
        Self { role, content, reasoning, tool_calls: all(tool_calls), tool_call_id, name }
    }
}

impl From<ToolCall> for pb::ToolCall {
    fn from(call: ToolCall) -> Self {
        let ToolCall { id, name, arguments } = call;
        Self { id, name, arguments }
    }
}

impl From<pb::ToolCall> for ToolCall {
    fn from(call: pb::ToolCall) -> Self {
        let pb::ToolCall { id, name, arguments } = call;
        Self { id, name, arguments }
    }
}

impl From<Tool> for pb::Tool {
    fn from(tool: Tool) -> Self {
        let Tool { name, description, parameters, strict } = tool;
        Self { name, description, parameters, strict }
    }
}

impl From<pb::Tool> for Tool {
    fn from(tool: pb::Tool) -> Self {
        let pb::Tool { name, description, parameters, strict } = tool;
        Self { name, description, parameters, strict }
    }
}

impl From<ToolChoice> for pb::ToolChoice {
    fn from(choice: ToolChoice) -> Self {
        use pb::tool_choice::Choice;
        let choice = match choice {
            ToolChoice::Auto => None,
            ToolChoice::Required => Some(Choice::Required(true)),
            ToolChoice::Named(name) => Some(Choice::Named(name)),
        };
        Self { choice }
    }
}

impl From<pb::ToolChoice> for ToolChoice {
    fn from(choice: pb::ToolChoice) -> Self {
        use pb::tool_choice::Choice;
        match choice.choice {
            None | Some(Choice::Required(false)) => Self::Auto,
            Some(Choice::Required(true)) => Self::Required,
            Some(Choice::Named(name)) => Self::Named(name),
        }
    }
}
