//! Tools of a chat request, and which of them the model may call. Schemas reach the model as the client wrote them, with
//! their keys in the client's order.

use russet_wire::conversation::Tool;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::{JsonObject, is_empty};
use crate::error::GatewayError;
use crate::json_body::JsonBody;

/// Maximum tools of a request, as many as OpenAI takes.
const MAX_TOOLS: usize = 128;

/// The tools that the model may call.
pub(super) fn parse(fields: &JsonObject, body: &JsonBody<'_>) -> Result<Vec<Tool>, GatewayError> {
    let is_off = match fields.get("tool_choice") {
        None => false,
        Some(Value::String(choice)) if choice == "auto" => false,
        Some(Value::String(choice)) if choice == "none" => true,
        Some(_) => {
            let message = "`tool_choice` must be auto or none; calls cannot be enforced by this release, so leave it out";
            return Err(GatewayError::field("tool_choice", message));
        }
    };
    let tools = match fields.get("tools") {
        None => return Ok(Vec::new()),
        Some(tools) if is_empty(tools) => return Ok(Vec::new()),
        Some(Value::Array(tools)) if tools.len() <= MAX_TOOLS => tools,
        Some(Value::Array(tools)) => {
            let message = format!("`tools` must be at most {MAX_TOOLS} tools, not {}", tools.len());
            return Err(GatewayError::field("tools", message));
        }
        Some(_) => return Err(GatewayError::field("tools", "`tools` must be a list of tools")),
    };
    let raw: Option<RawTools<'_>> = body.read();
    let raw = raw.map(|raw| raw.tools).unwrap_or_default();
    let parsed = tools.iter().enumerate().map(|(index, tool)| {
        let schema = raw.get(index).and_then(|raw| raw.function.as_ref()?.parameters);
        parse_tool(&format!("tools[{index}]"), tool, schema)
    });
    let parsed: Vec<Tool> = parsed.collect::<Result<_, _>>()?;
    Ok(if is_off { Vec::new() } else { parsed })
}

fn parse_tool(at: &str, tool: &Value, schema: Option<&RawValue>) -> Result<Tool, GatewayError> {
    let invalid = |name: &str, what: &str| {
        let field = format!("{at}.{name}");
        GatewayError::field(&field, format!("`{field}` must be {what}"))
    };
    if tool.get("type").is_some_and(|kind| kind != "function") {
        return Err(invalid("type", "\"function\"; other types of tools are not supported by this release"));
    }
    let Some(function) = tool.get("function").and_then(Value::as_object) else {
        return Err(invalid("function", "an object with a name"));
    };
    let Some(name) = function.get("name").and_then(Value::as_str).filter(|name| !name.is_empty()) else {
        return Err(invalid("function.name", "a string"));
    };
    let description = match function.get("description") {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) => Some(text.clone()),
        Some(_) => return Err(invalid("function.description", "a string")),
    };
    let parameters = match function.get("parameters") {
        None | Some(Value::Null) => None,
        Some(object @ Value::Object(_)) => {
            Some(schema.map_or_else(|| object.to_string(), |raw| raw.get().to_owned()))
        }
        Some(_) => return Err(invalid("function.parameters", "a JSON Schema")),
    };
    if function.get("strict") == Some(&Value::Bool(true)) {
        return Err(invalid("function.strict", "false: schemas cannot be enforced by this release"));
    }
    Ok(Tool { name: name.to_owned(), description, parameters })
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
