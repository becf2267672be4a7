//! Conversations between the protos and [`russet_wire::conversation`]. Destructured whole, so that no field is lost.

use russet_wire::conversation::{Message, Tool, ToolCall};

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
        let Tool { name, description, parameters } = tool;
        Self { name, description, parameters }
    }
}

impl From<pb::Tool> for Tool {
    fn from(tool: pb::Tool) -> Self {
        let pb::Tool { name, description, parameters } = tool;
        Self { name, description, parameters }
    }
}
