//! Tools of a request, and which of them the model may call. A custom tool, whose input is free text, is a function with
//! that text as its argument; a tool of a namespace is one with the namespace in its name. Tools that OpenAI runs itself
//! are left out, because Codex sends them unasked.

use std::collections::BTreeSet;
use std::fmt::Arguments;

use russet_wire::conversation::{Tool, ToolChoice};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use super::client_tools::{ClientTool, ClientTools, model_name};
use crate::dialects::tools::{at_most, choose, function, list, signature};
use crate::dialects::values::JsonObject;
use crate::error::GatewayError;
use crate::json_body::JsonBody;

/// The only argument of a custom tool.
pub(super) const CUSTOM_INPUT: &str = "input";
/// Its schema.
const CUSTOM_PARAMETERS: &str = r#"{"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"], "additionalProperties": false}"#;
/// Largest tools, and largest choice of them, that a response repeats: it is sent three times in a stream. More than the
/// tools of an agent have.
const MAX_REPEATED_BYTES: usize = 256 << 10;

/// The tools of a request.
#[derive(Debug)]
pub(super) struct ParsedTools {
    /// Those that the model may call.
    pub(super) tools: Vec<Tool>,
    pub(super) choice: ToolChoice,
    /// What the client calls them.
    pub(super) client_tools: ClientTools,
    /// The tools as the response repeats them.
    pub(super) repeated: Box<RawValue>,
    /// The choice as the response repeats it.
    pub(super) repeated_choice: Value,
}

/// A tool as a response repeats it.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ToolBody {
    Function { name: String, description: Option<String>, parameters: Option<Box<RawValue>>, strict: bool },
    Custom { name: String, description: Option<String>, format: Value },
    Namespace { name: String, description: Option<String>, tools: Vec<ToolBody> },
}

/// The tools so far.
#[derive(Default)]
struct Listed {
    tools: Vec<Tool>,
    client_tools: ClientTools,
}

/// Which tools the model may or has to call.
enum Choice {
    None,
    Auto,
    Required,
    Named(String),
    /// One of these, if it likes or not.
    Allowed {
        is_required: bool,
        names: BTreeSet<String>,
    },
}

/// Reads tools and choice; adds the names of what has no effect to `ignored`.
pub(super) fn parse(
    fields: &JsonObject,
    body: &JsonBody<'_>,
    ignored: &mut BTreeSet<String>,
) -> Result<ParsedTools, GatewayError> {
    let choice = fields.get("tool_choice");
    let mut repeated_choice = match choice {
        Some(Value::Object(choice)) if choice.contains_key("function") => {
            json!({"type": "function", "name": choice.get("function").and_then(|function| function.get("name"))})
        }
        Some(choice) => choice.clone(),
        None => json!("auto"),
    };
    let choice = tool_choice(choice)?;
    let listed = list(fields)?;
    let raw: Option<RawBody<'_>> = if listed.is_empty() { None } else { body.read() };
    let raw = raw.map(|raw| raw.tools).unwrap_or_default();
    let (mut all, mut repeated) = (Listed::default(), Vec::new());
    for (index, value) in listed.iter().enumerate() {
        let (at, raw) = (format_args!("tools[{index}]"), raw.get(index).copied().unwrap_or_default());
        let tool = object(at, value)?;
        match tool.get("type").and_then(Value::as_str) {
            Some("namespace") => repeated.push(all.namespace(at, tool, raw, ignored)?),
            _ => repeated.extend(all.tool(at, tool, None, raw, ignored)?),
        }
    }
    let Listed { tools, client_tools } = all;
    at_most(tools.len())?;
    let (tools, choice) = allowed(tools, choice)?;
    let mut repeated = to_raw_value(&repeated).unwrap_or_default();
    if repeated.get().len() > MAX_REPEATED_BYTES {
        repeated = to_raw_value(&json!([])).unwrap_or_default();
    }
    if repeated_choice.to_string().len() > MAX_REPEATED_BYTES {
        repeated_choice = json!("auto");
    }
    Ok(ParsedTools { tools, choice, client_tools, repeated, repeated_choice })
}

impl Listed {
    /// Adds the tools of a namespace. What it is for is told with the first of them.
    fn namespace(
        &mut self,
        at: Arguments<'_>,
        value: &JsonObject,
        raw: RawTool<'_>,
        ignored: &mut BTreeSet<String>,
    ) -> Result<ToolBody, GatewayError> {
        let Tool { name, description, .. } = signature(at, value)?;
        let tools_at = format_args!("{at}.tools");
        let Some(Value::Array(tools)) = value.get("tools") else {
            return Err(GatewayError::field(
                tools_at.to_string(),
                format!("`{tools_at}` must be a list of tools"),
            ));
        };
        let raw: Vec<RawTool<'_>> =
            raw.tools.and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or_default();
        let first = self.tools.len();
        let mut repeated = Vec::new();
        for (index, tool) in tools.iter().enumerate() {
            let (at, raw) =
                (format_args!("{tools_at}[{index}]"), raw.get(index).copied().unwrap_or_default());
            repeated.extend(self.tool(at, object(at, tool)?, Some(&name), raw, ignored)?);
        }
        if let (Some(first), Some(about)) = (self.tools.get_mut(first), &description) {
            first.description = Some(match first.description.take() {
                Some(own) => format!("{about}\n\n{own}"),
                None => about.clone(),
            });
        }
        Ok(ToolBody::Namespace { name, description, tools: repeated })
    }

    /// Adds a tool, of a namespace or of none; nothing of a type that the client does not run.
    fn tool(
        &mut self,
        at: Arguments<'_>,
        value: &JsonObject,
        namespace: Option<&str>,
        raw: RawTool<'_>,
        ignored: &mut BTreeSet<String>,
    ) -> Result<Option<ToolBody>, GatewayError> {
        let (tool, body, is_custom) = match value.get("type").and_then(Value::as_str) {
            Some("function") => {
                let tool = function(at, value, raw.parameters)?;
                let body = ToolBody::from(&tool);
                (tool, body, false)
            }
            Some("custom") => {
                let tool = function(at, &without_schema(value), None)?;
                let format = value.get("format").filter(|format| !format.is_null());
                let body = ToolBody::Custom {
                    name: tool.name.clone(),
                    description: tool.description.clone(),
                    format: format.cloned().unwrap_or_else(|| json!({"type": "text"})),
                };
                (custom_tool(tool, format, ignored), body, true)
            }
            Some(kind) => {
                ignored.insert(format!("tools.{kind}"));
                return Ok(None);
            }
            None => {
                let field = format!("{at}.type");
                let message = format!("`{field}` must be \"function\", \"custom\" or \"namespace\"");
                return Err(GatewayError::field(&field, message));
            }
        };
        let namespace = namespace.map(str::to_owned);
        let name = self.client_tools.add(ClientTool { is_custom, namespace, name: tool.name });
        self.tools.push(Tool { name, ..tool });
        Ok(Some(body))
    }
}

fn object<'a>(at: Arguments<'_>, value: &'a Value) -> Result<&'a JsonObject, GatewayError> {
    let message = || format!("`{at}` must be an object with a type and a name");
    value.as_object().ok_or_else(|| GatewayError::field(at.to_string(), message()))
}

impl From<&Tool> for ToolBody {
    fn from(tool: &Tool) -> Self {
        let Tool { name, description, parameters, strict } = tool;
        let parameters = parameters.clone().and_then(|text| RawValue::from_string(text).ok());
        Self::Function { name: name.clone(), description: description.clone(), parameters, strict: *strict }
    }
}

/// What a custom tool shares with a function.
fn without_schema(tool: &JsonObject) -> JsonObject {
    let shared = tool.iter().filter(|(name, _)| ["name", "description"].contains(&name.as_str()));
    shared.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// A custom tool as a function. A grammar is told to the model and not enforced.
fn custom_tool(tool: Tool, format: Option<&Value>, ignored: &mut BTreeSet<String>) -> Tool {
    let mut description = tool.description.unwrap_or_default();
    if let Some(format) = format.filter(|format| format.get("type").is_some_and(|kind| kind != "text")) {
        ignored.insert("tools.format".to_owned());
        let text = |name: &str| format.get(name).and_then(Value::as_str).unwrap_or_default();
        let (syntax, definition) = (text("syntax"), text("definition"));
        if !definition.is_empty() {
            description.push_str(&format!("\n\nThe input follows this {syntax} grammar:\n{definition}"));
        }
    }
    Tool {
        description: (!description.is_empty()).then_some(description),
        parameters: Some(CUSTOM_PARAMETERS.to_owned()),
        ..tool
    }
}

/// The tools that the model may call by this choice, and whether it has to.
fn allowed(tools: Vec<Tool>, choice: Choice) -> Result<(Vec<Tool>, ToolChoice), GatewayError> {
    match choice {
        Choice::None => choose(tools, None),
        Choice::Auto => choose(tools, Some(ToolChoice::Auto)),
        Choice::Required => choose(tools, Some(ToolChoice::Required)),
        Choice::Named(name) => choose(tools, Some(ToolChoice::Named(name))),
        Choice::Allowed { is_required, names } => {
            if let Some(name) = names.iter().find(|name| !tools.iter().any(|tool| tool.name == **name)) {
                let message = format!("`tool_choice` allows {name:?}, which is none of `tools`");
                return Err(GatewayError::field("tool_choice", message));
            }
            let tools = tools.into_iter().filter(|tool| names.contains(&tool.name)).collect();
            choose(tools, Some(if is_required { ToolChoice::Required } else { ToolChoice::Auto }))
        }
    }
}

/// The namespace of a tool that a choice names.
fn namespace(tool: &Value) -> Option<&str> {
    tool.get("namespace").and_then(Value::as_str)
}

fn tool_choice(value: Option<&Value>) -> Result<Choice, GatewayError> {
    let invalid = || {
        let message = "`tool_choice` must be none, auto, required, or an object: {\"type\": \"function\", \"name\": …}, {\"type\": \"custom\", \"name\": …} or {\"type\": \"allowed_tools\", \"mode\": …, \"tools\": […]}";
        GatewayError::field("tool_choice", message)
    };
    match value {
        None => Ok(Choice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Ok(Choice::Auto),
            "none" => Ok(Choice::None),
            "required" => Ok(Choice::Required),
            _ => Err(invalid()),
        },
        Some(value @ Value::Object(choice)) => match choice.get("type").and_then(Value::as_str) {
            Some("function" | "custom") => {
                // Chats have the name within the function, and clients mix them up.
                let name = choice.get("name").or_else(|| choice.get("function")?.get("name"));
                let name = name.and_then(Value::as_str).filter(|name| !name.is_empty());
                name.map(|name| Choice::Named(model_name(namespace(value), name))).ok_or_else(invalid)
            }
            Some("allowed_tools") => {
                let is_required = match choice.get("mode").and_then(Value::as_str) {
                    Some("auto") => false,
                    Some("required") => true,
                    _ => return Err(invalid()),
                };
                let tools = choice.get("tools").and_then(Value::as_array).ok_or_else(invalid)?;
                // Tools of other types are left out of `tools` too.
                let is_ours = |tool: &&Value| {
                    tool.get("type").is_some_and(|kind| kind == "function" || kind == "custom")
                };
                let name = |tool: &Value| Some(model_name(namespace(tool), tool.get("name")?.as_str()?));
                let names: Option<BTreeSet<String>> = tools.iter().filter(is_ours).map(name).collect();
                Ok(Choice::Allowed { is_required, names: names.ok_or_else(invalid)? })
            }
            _ => Err(invalid()),
        },
        Some(_) => Err(invalid()),
    }
}

#[derive(Deserialize)]
struct RawBody<'a> {
    #[serde(borrow, default)]
    tools: Vec<RawTool<'a>>,
}

#[derive(Clone, Copy, Default, Deserialize)]
struct RawTool<'a> {
    #[serde(borrow, default)]
    parameters: Option<&'a RawValue>,
    /// Of a namespace.
    #[serde(borrow, default)]
    tools: Option<&'a RawValue>,
}

#[cfg(test)]
mod tests;
