//! Tools of a request, and which of them the model may call. A custom tool, whose input is free text, is a function with
//! that text as its argument. Tools that OpenAI runs itself are left out, because Codex sends them unasked.

use std::collections::BTreeSet;

use russet_wire::conversation::{Tool, ToolChoice};
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use crate::dialects::tools::{choose, function, list};
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
    /// Names of custom tools.
    pub(super) custom: BTreeSet<String>,
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
    let (mut tools, mut repeated, mut custom) = (Vec::new(), Vec::new(), BTreeSet::new());
    for (index, value) in listed.iter().enumerate() {
        let at = format!("tools[{index}]");
        let Value::Object(value) = value else {
            return Err(GatewayError::field(&at, format!("`{at}` must be an object with a type and a name")));
        };
        match value.get("type").and_then(Value::as_str) {
            Some("function") => {
                let schema = raw.get(index).and_then(|raw| raw.parameters);
                let tool = function(&at, value, schema)?;
                repeated.push(ToolBody::from(&tool));
                tools.push(tool);
            }
            Some("custom") => {
                let tool = function(&at, &without_schema(value), None)?;
                let format = value.get("format").filter(|format| !format.is_null());
                custom.insert(tool.name.clone());
                repeated.push(ToolBody::Custom {
                    name: tool.name.clone(),
                    description: tool.description.clone(),
                    format: format.cloned().unwrap_or_else(|| json!({"type": "text"})),
                });
                tools.push(custom_tool(tool, format, ignored));
            }
            Some(kind) => {
                ignored.insert(format!("tools.{kind}"));
            }
            None => {
                let field = format!("{at}.type");
                let message = format!("`{field}` must be \"function\" or \"custom\"");
                return Err(GatewayError::field(&field, message));
            }
        }
    }
    let (tools, choice) = allowed(tools, choice)?;
    let mut repeated = to_raw_value(&repeated).unwrap_or_default();
    if repeated.get().len() > MAX_REPEATED_BYTES {
        repeated = to_raw_value(&json!([])).unwrap_or_default();
    }
    if repeated_choice.to_string().len() > MAX_REPEATED_BYTES {
        repeated_choice = json!("auto");
    }
    Ok(ParsedTools { tools, choice, custom, repeated, repeated_choice })
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
        Some(Value::Object(choice)) => match choice.get("type").and_then(Value::as_str) {
            Some("function" | "custom") => {
                // Chats have the name within the function, and clients mix them up.
                let name = choice.get("name").or_else(|| choice.get("function")?.get("name"));
                let name = name.and_then(Value::as_str).filter(|name| !name.is_empty());
                name.map(|name| Choice::Named(name.to_owned())).ok_or_else(invalid)
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
                let name = |tool: &Value| tool.get("name")?.as_str().map(str::to_owned);
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

#[derive(Deserialize)]
struct RawTool<'a> {
    #[serde(borrow, default)]
    parameters: Option<&'a RawValue>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json_body::JsonScan;

    fn parsed(text: &str) -> Result<(ParsedTools, Vec<String>), GatewayError> {
        let body = JsonScan::new(text.as_bytes()).unwrap().decode(text.as_bytes()).unwrap();
        let mut fields = body.value.as_object().unwrap().clone();
        fields.retain(|_, value| !value.is_null());
        let mut ignored = BTreeSet::new();
        let tools = parse(&fields, &body, &mut ignored)?;
        Ok((tools, ignored.into_iter().collect()))
    }

    #[test]
    fn functions_and_custom_tools_arrive_and_others_are_listed() {
        const SCHEMA: &str = r#"{"type": "object", "properties": {"z": {}, "a": {"enum": [1.0]}}}"#;
        let body = format!(
            r#"{{"tools": [
                {{"type": "web_search", "parameters": 7}}, {{"type": "local_shell"}},
                {{"type": "function", "name": "f", "description": "F.", "parameters": {SCHEMA}, "strict": true}},
                {{"type": "namespace", "name": "mcp", "tools": [{{"type": "function", "name": "g"}}]}},
                {{"type": "custom", "name": "patch", "description": "Edits.",
                  "format": {{"type": "grammar", "syntax": "lark", "definition": "start: \"a\""}}}},
                {{"type": "function", "name": "h"}}]}}"#
        );
        let (tools, ignored) = parsed(&body).unwrap();
        let ParsedTools { tools, choice, custom, repeated, repeated_choice } = tools;
        assert_eq!(ignored, ["tools.format", "tools.local_shell", "tools.namespace", "tools.web_search"]);
        let described = "Edits.\n\nThe input follows this lark grammar:\nstart: \"a\"";
        let expected = [
            Tool {
                name: "f".into(),
                description: Some("F.".into()),
                parameters: Some(SCHEMA.into()),
                strict: true,
            },
            Tool {
                name: "patch".into(),
                description: Some(described.into()),
                parameters: Some(CUSTOM_PARAMETERS.into()),
                strict: false,
            },
            Tool { name: "h".into(), ..Tool::default() },
        ];
        assert_eq!((tools.as_slice(), choice), (expected.as_slice(), ToolChoice::Auto));
        assert_eq!((custom, repeated_choice), (["patch".to_owned()].into(), json!("auto")));
        assert!(repeated.get().contains(SCHEMA), "{repeated}");
        assert_eq!(
            serde_json::from_str::<Value>(repeated.get()).unwrap()[1],
            json!({
                "type": "custom", "name": "patch", "description": "Edits.",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"a\""},
            })
        );
    }

    #[test]
    fn choices_of_tools_say_which_may_be_called() {
        let tools = json!([
            {"type": "function", "name": "f"}, {"type": "custom", "name": "c"}, {"type": "web_search"},
        ]);
        let of = |choice: &Value| parsed(&json!({"tools": tools, "tool_choice": choice}).to_string());
        let function = |name: &str| json!({"type": "function", "name": name});
        let allowed =
            |mode: &str, tools: Value| json!({"type": "allowed_tools", "mode": mode, "tools": tools});
        for (choice, names, expected) in [
            (json!("auto"), vec!["f", "c"], ToolChoice::Auto),
            (json!(null), vec!["f", "c"], ToolChoice::Auto),
            (json!("none"), vec![], ToolChoice::Auto),
            (json!("required"), vec!["f", "c"], ToolChoice::Required),
            (function("f"), vec!["f", "c"], ToolChoice::Named("f".into())),
            (json!({"type": "custom", "name": "c"}), vec!["f", "c"], ToolChoice::Named("c".into())),
            (
                json!({"type": "function", "function": {"name": "f"}}),
                vec!["f", "c"],
                ToolChoice::Named("f".into()),
            ),
            (
                allowed("required", json!([function("f"), {"type": "web_search"}])),
                vec!["f"],
                ToolChoice::Required,
            ),
            (allowed("auto", json!([{"type": "custom", "name": "c"}])), vec!["c"], ToolChoice::Auto),
        ] {
            let (parsed, _) = of(&choice).unwrap();
            let got: Vec<&str> = parsed.tools.iter().map(|tool| tool.name.as_str()).collect();
            assert_eq!((got, parsed.choice), (names, expected), "{choice}");
        }
        for choice in [
            json!("any"),
            json!(7),
            json!({"type": "web_search"}),
            json!({"type": "function"}),
            function("g"),
            allowed("auto", json!([function("g")])),
            allowed("auto", json!([{"type": "function"}])),
            allowed("some", json!([])),
            allowed("required", json!([])),
        ] {
            assert_eq!(of(&choice).unwrap_err().param.as_deref(), Some("tool_choice"), "{choice}");
        }
    }

    #[test]
    fn invalid_tools_are_refused_by_name() {
        let function = |more: Value| {
            let mut tool = json!({"type": "function", "name": "f"});
            tool.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({"tools": [tool]})
        };
        for (body, param) in [
            (json!({"tools": "all"}), "tools"),
            (json!({"tools": vec![json!({"type": "x"}); 129]}), "tools"),
            (json!({"tools": [7]}), "tools[0]"),
            (json!({"tools": [{"name": "f"}]}), "tools[0].type"),
            (json!({"tools": [{"type": "custom"}]}), "tools[0].name"),
            (function(json!({"name": ""})), "tools[0].name"),
            (function(json!({"parameters": 7})), "tools[0].parameters"),
            (function(json!({"description": 7})), "tools[0].description"),
            (function(json!({"strict": 7})), "tools[0].strict"),
            (json!({"tools": [{"type": "web_search"}], "tool_choice": "required"}), "tool_choice"),
        ] {
            let error = parsed(&body.to_string()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{body}");
            assert!(error.message.contains(param), "{error}");
        }
    }

    #[test]
    fn large_tools_are_not_repeated() {
        let description = "x".repeat(MAX_REPEATED_BYTES);
        let body = json!({"tools": [{"type": "function", "name": "f", "description": description}]});
        let (parsed, _) = parsed(&body.to_string()).unwrap();
        assert_eq!((parsed.tools.len(), parsed.repeated.get()), (1, "[]"));
        let allowed = vec![json!({"type": "function", "name": "f"}); 10_000];
        let body = json!({
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": allowed},
        });
        let (parsed, _) = self::parsed(&body.to_string()).unwrap();
        assert_eq!((parsed.choice, parsed.repeated_choice), (ToolChoice::Required, json!("auto")));
    }
}
