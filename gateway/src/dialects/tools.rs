//! Tools of a chat request, and which of them the model may call. Schemas reach the model as the client wrote them, with
//! their keys in the client's order.

use std::fmt::Arguments;

use russet_wire::conversation::{Tool, ToolChoice};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::values::{JsonObject, field, invalid, is_empty};
use crate::error::GatewayError;
use crate::json_body::JsonBody;

/// Maximum tools of a request, as many as OpenAI takes.
const MAX_TOOLS: usize = 128;

/// The tools that the model may call, and whether it has to.
pub(super) fn parse(
    fields: &JsonObject,
    body: &JsonBody<'_>,
) -> Result<(Vec<Tool>, ToolChoice), GatewayError> {
    let choice = tool_choice(field(fields, "tool_choice"))?;
    choose(tools(fields, body)?, choice)
}

/// The tools with this choice, which has to be one of them; `None` leaves them out.
pub(super) fn choose(
    tools: Vec<Tool>,
    choice: Option<ToolChoice>,
) -> Result<(Vec<Tool>, ToolChoice), GatewayError> {
    match choice {
        None => Ok((Vec::new(), ToolChoice::Auto)),
        Some(choice) if choice != ToolChoice::Auto && tools.is_empty() => {
            let message = "`tool_choice` asks for a call, but the request has no `tools`";
            Err(GatewayError::field("tool_choice", message))
        }
        Some(ToolChoice::Named(name)) if !tools.iter().any(|tool| tool.name == name) => {
            let names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
            let message = format!("`tool_choice` names {name:?}, which is none of {}", names.join(", "));
            Err(GatewayError::field("tool_choice", message))
        }
        Some(choice) => Ok((tools, choice)),
    }
}

/// `None` where the model must not call any.
fn tool_choice(value: Option<&Value>) -> Result<Option<ToolChoice>, GatewayError> {
    let invalid = || {
        let message = "`tool_choice` must be none, auto, required, or {\"type\": \"function\", \"function\": {\"name\": …}}";
        GatewayError::field("tool_choice", message)
    };
    match value {
        None => Ok(Some(ToolChoice::Auto)),
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => Ok(Some(ToolChoice::Auto)),
            "none" => Ok(None),
            // Mistral's word for it.
            "required" | "any" => Ok(Some(ToolChoice::Required)),
            _ => Err(invalid()),
        },
        Some(Value::Object(choice)) => {
            let named = choice.get("function").and_then(|function| function.get("name"));
            let named = named.or_else(|| choice.get("name")).and_then(Value::as_str);
            let is_function = choice.get("type").is_none_or(|kind| kind == "function");
            let named = named.filter(|name| is_function && !name.is_empty()).ok_or_else(invalid)?;
            Ok(Some(ToolChoice::Named(named.to_owned())))
        }
        Some(_) => Err(invalid()),
    }
}

fn tools(fields: &JsonObject, body: &JsonBody<'_>) -> Result<Vec<Tool>, GatewayError> {
    let tools = list(fields)?;
    if tools.is_empty() {
        return Ok(Vec::new());
    }
    let raw: Option<RawTools<'_>> = body.read();
    let raw = raw.map(|raw| raw.tools).unwrap_or_default();
    let parsed = tools.iter().enumerate().map(|(index, tool)| {
        let schema = raw.get(index).and_then(|raw| raw.function.as_ref()?.parameters);
        parse_tool(format_args!("tools[{index}]"), tool, schema)
    });
    parsed.collect()
}

/// The list of tools.
pub(super) fn list(fields: &JsonObject) -> Result<&[Value], GatewayError> {
    match field(fields, "tools") {
        None => Ok(&[]),
        Some(tools) if is_empty(tools) => Ok(&[]),
        Some(Value::Array(tools)) => at_most(tools.len()).map(|()| tools.as_slice()),
        Some(_) => Err(GatewayError::field("tools", "`tools` must be a list of tools")),
    }
}

/// An error where a request has more tools than it may have.
pub(super) fn at_most(tools: usize) -> Result<(), GatewayError> {
    if tools <= MAX_TOOLS {
        return Ok(());
    }
    Err(GatewayError::field("tools", format!("`tools` must be at most {MAX_TOOLS} tools, not {tools}")))
}

fn parse_tool(at: Arguments<'_>, tool: &Value, schema: Option<&RawValue>) -> Result<Tool, GatewayError> {
    if tool.get("type").is_some_and(|kind| kind != "function") {
        return Err(invalid(
            format_args!("{at}.type"),
            "\"function\"; other types of tools are not supported by this release",
        ));
    }
    let Some(described) = tool.get("function").and_then(Value::as_object) else {
        return Err(invalid(format_args!("{at}.function"), "an object with a name"));
    };
    function(format_args!("{at}.function"), described, schema)
}

/// A function, with its schema as the client wrote it.
pub(super) fn function(
    at: Arguments<'_>,
    function: &JsonObject,
    schema: Option<&RawValue>,
) -> Result<Tool, GatewayError> {
    let tool = signature(at, function)?;
    let parameters = match function.get("parameters") {
        None | Some(Value::Null) => None,
        Some(object @ Value::Object(_)) => {
            Some(schema.map_or_else(|| object.to_string(), |raw| raw.get().to_owned()))
        }
        Some(_) => return Err(invalid(format_args!("{at}.parameters"), "a JSON Schema")),
    };
    Ok(Tool { parameters, ..tool })
}

/// What a tool is in every dialect: its name, what it does, and whether its schema is enforced.
pub(super) fn signature(at: Arguments<'_>, tool: &JsonObject) -> Result<Tool, GatewayError> {
    let Some(name) = tool.get("name").and_then(Value::as_str).filter(|name| !name.is_empty()) else {
        return Err(invalid(format_args!("{at}.name"), "a string"));
    };
    let description = match tool.get("description") {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) => Some(text.clone()),
        Some(_) => return Err(invalid(format_args!("{at}.description"), "a string")),
    };
    let strict = match tool.get("strict") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(strict)) => *strict,
        Some(_) => return Err(invalid(format_args!("{at}.strict"), "true or false")),
    };
    Ok(Tool { name: name.to_owned(), description, parameters: None, strict })
}

#[derive(Deserialize)]
struct RawTools<'a> {
    #[serde(borrow, default)]
    tools: Vec<RawTool<'a>>,
}

#[derive(Deserialize)]
struct RawTool<'a> {
    #[serde(borrow)]
    function: Option<RawFunction<'a>>,
}

#[derive(Deserialize)]
struct RawFunction<'a> {
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
}
