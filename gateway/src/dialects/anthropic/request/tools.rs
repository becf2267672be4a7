//! Tools of a request, and which of them the model may call. Schemas reach the model as the client wrote them.

use std::collections::BTreeSet;
use std::fmt::Arguments;

use russet_wire::conversation::{Tool, ToolChoice};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::dialects::tools::signature;
use crate::dialects::values::{JsonObject, invalid, is_empty, shown};
use crate::error::GatewayError;
use crate::json_body::JsonBody;

/// Maximum tools of a request: an agent with many MCP servers sends some hundreds.
const MAX_TOOLS: usize = 512;
/// The types of tools that find other tools. Here the model sees all tools at once.
const TOOL_SEARCH: &str = "tool_search_tool";

/// The tools that a model may call.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ToolSet {
    /// The tools.
    pub(super) tools: Vec<Tool>,
    /// Whether it has to call one.
    pub(super) choice: ToolChoice,
    /// Whether the response ends with its first call.
    pub(super) single_call: bool,
}

/// Parses `tools` and `tool_choice`; adds the names of fields that are left out to `ignored`.
pub(super) fn parse(
    fields: &JsonObject,
    body: &JsonBody<'_>,
    ignored: &mut BTreeSet<String>,
) -> Result<ToolSet, GatewayError> {
    let tools = tools(fields, body, ignored)?;
    let Some(choice) = fields.get("tool_choice") else {
        return Ok(ToolSet { tools, ..ToolSet::default() });
    };
    let what = "{\"type\": \"auto\"}, \"any\", \"none\", or \"tool\" with a name";
    let Value::Object(choice) = choice else { return Err(invalid("tool_choice", what)) };
    let single_call = match choice.get("disable_parallel_tool_use") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(single)) => *single,
        Some(_) => return Err(invalid("tool_choice.disable_parallel_tool_use", "true or false")),
    };
    let name = choice.get("name").and_then(Value::as_str);
    let choice = match (choice.get("type").and_then(Value::as_str), name) {
        (Some("none"), _) => return Ok(ToolSet::default()),
        (Some("auto"), _) => ToolChoice::Auto,
        (Some("any"), _) => ToolChoice::Required,
        (Some("tool"), Some(name)) => ToolChoice::Named(name.to_owned()),
        _ => return Err(invalid("tool_choice", what)),
    };
    match &choice {
        ToolChoice::Required if tools.is_empty() => {
            let message = "`tool_choice` requires a call, but the request has no `tools`";
            Err(GatewayError::field("tool_choice", message))
        }
        ToolChoice::Named(name) if !tools.iter().any(|tool| tool.name == *name) => {
            let name = shown(&Value::from(name.as_str()));
            let message = format!("`tool_choice` names {name}, which none of the request's `tools` has");
            Err(GatewayError::field("tool_choice", message))
        }
        _ => Ok(ToolSet { tools, choice, single_call }),
    }
}

fn tools(
    fields: &JsonObject,
    body: &JsonBody<'_>,
    ignored: &mut BTreeSet<String>,
) -> Result<Vec<Tool>, GatewayError> {
    let tools = match fields.get("tools") {
        None => return Ok(Vec::new()),
        Some(Value::Array(tools)) if tools.len() <= MAX_TOOLS => tools,
        Some(_) => return Err(invalid("tools", &format!("a list of at most {MAX_TOOLS} tools"))),
    };
    let raw: Option<RawTools<'_>> = body.read();
    let raw = raw.map(|raw| raw.tools).unwrap_or_default();
    let mut parsed = Vec::with_capacity(tools.len());
    for (index, tool) in tools.iter().enumerate() {
        let schema = raw.get(index).and_then(|raw| raw.input_schema);
        parsed.extend(parse_tool(format_args!("tools[{index}]"), tool, schema, ignored)?);
    }
    Ok(parsed)
}

/// `None` for a tool that is left out.
fn parse_tool(
    at: Arguments<'_>,
    tool: &Value,
    schema: Option<&RawValue>,
    ignored: &mut BTreeSet<String>,
) -> Result<Option<Tool>, GatewayError> {
    let field = |name: &str| format!("{at}.{name}");
    let Value::Object(tool) = tool else {
        return Err(invalid(at, "an object with a name and an input_schema"));
    };
    let get = |name: &str| tool.get(name).filter(|value| !value.is_null());
    let parameters = match (get("input_schema"), get("type").map(Value::as_str)) {
        (Some(object @ Value::Object(_)), _) => {
            schema.map_or_else(|| object.to_string(), |raw| raw.get().to_owned())
        }
        (None, Some(Some(kind))) if kind.starts_with(TOOL_SEARCH) => {
            ignored.insert(format!("tools.{kind}"));
            return Ok(None);
        }
        (None, Some(Some(kind))) if kind != "custom" => {
            let kind = shown(&Value::from(kind));
            let field = field("type");
            let message = format!(
                "`{field}` is {kind}, a tool that Anthropic defines and this gateway does not have; leave it out, or send a tool of your own with a name and an input_schema"
            );
            return Err(GatewayError::field(field, message));
        }
        _ => return Err(invalid(field("input_schema"), "a JSON Schema of an object")),
    };
    let described = signature(at, tool)?;
    const KNOWN: [&str; 6] = ["type", "name", "description", "input_schema", "strict", "cache_control"];
    let left_out = tool.iter().filter(|(name, value)| {
        !KNOWN.contains(&name.as_str()) && !value.is_null() && !is_empty(value) && **value != false
    });
    ignored.extend(left_out.map(|(name, _)| format!("tools.{name}")));
    Ok(Some(Tool { parameters: Some(parameters), ..described }))
}

#[derive(Deserialize)]
struct RawTools<'a> {
    #[serde(borrow, default)]
    tools: Vec<RawTool<'a>>,
}

#[derive(Deserialize)]
struct RawTool<'a> {
    #[serde(borrow)]
    input_schema: Option<&'a RawValue>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json_body::JsonScan;

    fn check(text: &str) -> Result<(ToolSet, Vec<String>), GatewayError> {
        let body = JsonScan::new(text.as_bytes()).unwrap().decode(text.as_bytes()).unwrap();
        let mut ignored = BTreeSet::new();
        let parsed = parse(body.value.as_object().unwrap(), &body, &mut ignored)?;
        Ok((parsed, ignored.into_iter().collect()))
    }

    #[test]
    fn schemas_arrive_as_they_are_written() {
        const SCHEMA: &str =
            r#"{ "type": "object", "properties": {"z": {"type": "string"}, "a": {"enum": [1.0]}}}"#;
        let (tools, ignored) = check(&format!(
            r#"{{"tools": [
                {{"name": "f", "description": "F.", "input_schema": {SCHEMA}, "cache_control": {{"type": "ephemeral"}}}},
                {{"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}},
                {{"type": "custom", "name": "g", "input_schema": {{}}, "strict": true, "defer_loading": true,
                  "input_examples": [], "eager_input_streaming": false}}]}}"#
        ))
        .unwrap();
        let tool = |name: &str, parameters: &str, strict: bool| Tool {
            name: name.into(),
            description: None,
            parameters: Some(parameters.into()),
            strict,
        };
        let first = Tool { description: Some("F.".into()), ..tool("f", SCHEMA, false) };
        let expected = ToolSet { tools: vec![first, tool("g", "{}", true)], ..ToolSet::default() };
        assert_eq!(tools, expected);
        assert_eq!(ignored, ["tools.defer_loading", "tools.tool_search_tool_regex_20251119"]);
    }

    #[test]
    fn choices_of_tools_arrive() {
        for (choice, expected, single_call) in [
            (r#"{"type": "auto"}"#, Some(ToolChoice::Auto), false),
            (r#"{"type": "any"}"#, Some(ToolChoice::Required), false),
            (r#"{"type": "auto", "disable_parallel_tool_use": true}"#, Some(ToolChoice::Auto), true),
            (
                r#"{"type": "tool", "name": "f", "disable_parallel_tool_use": false}"#,
                Some(ToolChoice::Named("f".into())),
                false,
            ),
            (r#"{"type": "none"}"#, None, false),
        ] {
            let body =
                format!(r#"{{"tools": [{{"name": "f", "input_schema": {{}}}}], "tool_choice": {choice}}}"#);
            let (tools, _) = check(&body).unwrap();
            assert_eq!(tools.tools.len(), usize::from(expected.is_some()), "{choice}");
            assert_eq!((tools.choice, tools.single_call), (expected.unwrap_or_default(), single_call));
        }
        for none in ["{}", r#"{"tools": []}"#, r#"{"tools": [], "tool_choice": {"type": "auto"}}"#] {
            assert_eq!(check(none), Ok((ToolSet::default(), vec![])), "{none}");
        }
    }

    #[test]
    fn tools_that_cannot_be_called_are_named() {
        let many = format!(r#"{{"tools": [{}1]}}"#, "1,".repeat(MAX_TOOLS));
        for (body, param, words) in [
            (r#"{"tools": "all"}"#, "tools", "at most 512"),
            (&many, "tools", "at most 512"),
            (r#"{"tools": [7]}"#, "tools[0]", "an object"),
            (r#"{"tools": [{"name": "f"}]}"#, "tools[0].input_schema", "a JSON Schema"),
            (
                r#"{"tools": [{"name": "f", "type": "custom", "input_schema": []}]}"#,
                "tools[0].input_schema",
                "a JSON Schema",
            ),
            (r#"{"tools": [{"input_schema": {}}]}"#, "tools[0].name", "a string"),
            (
                r#"{"tools": [{"name": "f", "input_schema": {}, "description": 7}]}"#,
                "tools[0].description",
                "a string",
            ),
            (
                r#"{"tools": [{"name": "f", "input_schema": {}, "strict": 1}]}"#,
                "tools[0].strict",
                "true or false",
            ),
            (
                r#"{"tools": [{"type": "web_search_20250305", "name": "web_search"}]}"#,
                "tools[0].type",
                "\"web_search_20250305\"",
            ),
            (
                r#"{"tools": [{"type": "bash_20250124", "name": "bash"}]}"#,
                "tools[0].type",
                "\"bash_20250124\"",
            ),
            (r#"{"tool_choice": "auto"}"#, "tool_choice", "\"tool\" with a name"),
            (r#"{"tool_choice": {"type": "some"}}"#, "tool_choice", "\"tool\" with a name"),
            (r#"{"tool_choice": {"type": "tool"}}"#, "tool_choice", "\"tool\" with a name"),
            (r#"{"tool_choice": {"type": "any"}}"#, "tool_choice", "no `tools`"),
            (r#"{"tool_choice": {"type": "tool", "name": "g"}}"#, "tool_choice", "\"g\""),
            (
                r#"{"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}"#,
                "tool_choice.disable_parallel_tool_use",
                "true or false",
            ),
        ] {
            let GatewayError { param: found, message, .. } = check(body).unwrap_err();
            assert_eq!(found.as_deref(), Some(param), "{body}");
            assert!(message.contains(words), "{message}");
        }
    }
}
