//! What the text of a response has to be: OpenAI's `response_format`, and the fields by which vLLM, llama.cpp and SGLang
//! ask for the same. Schemas reach the engine as the client wrote them: a model writes the keys in their order.

use russet_wire::request::StructuredOutput;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::dialects::field_table::is_nothing;
use crate::dialects::json_schema::{check_bytes, schema};
use crate::dialects::values::{JsonObject, field, invalid};
use crate::error::GatewayError;
use crate::json_body::JsonBody;

/// Longest name of a field that an error repeats.
const MAX_NAME_BYTES: usize = 64;
/// Maximum choices.
const MAX_CHOICES: usize = 10_000;

/// What a request asks for; `None` for free text.
pub(super) fn parse(
    fields: &JsonObject,
    body: &JsonBody<'_>,
) -> Result<Option<StructuredOutput>, GatewayError> {
    let raw: RawFields<'_> = body.read().unwrap_or_default();
    let mut asked: Vec<(String, StructuredOutput)> = Vec::new();
    if let Some(format) = field(fields, "response_format")
        && let Some(output) = response_format(format, raw.response_format.as_ref())?
    {
        asked.push(("response_format".to_owned(), output));
    }
    let inner = match field(fields, "structured_outputs") {
        None => None,
        Some(Value::Object(inner)) => Some(inner),
        Some(_) => return Err(invalid("structured_outputs", "an object")),
    };
    let raw_inner = raw.structured_outputs.unwrap_or_default();
    for (prefix, of, raws) in [
        ("structured_outputs.", inner, [("json", raw_inner.json)]),
        ("", Some(fields), [("guided_json", raw.guided_json)]),
        ("", Some(fields), [("json_schema", raw.json_schema)]),
    ] {
        for (name, raw) in raws {
            let Some(value) = of.and_then(|of| of.get(name)).filter(|value| !value.is_null()) else {
                continue;
            };
            if !is_nothing(value) || value.is_object() {
                let field = format!("{prefix}{name}");
                asked.push((field.clone(), schema(&field, value, raw)?));
            }
        }
    }
    for (name, make) in [
        ("regex", StructuredOutput::Regex as fn(String) -> StructuredOutput),
        ("guided_regex", StructuredOutput::Regex),
        ("guided_grammar", StructuredOutput::Grammar),
    ] {
        if let Some(text) = text(name, field(fields, name))? {
            asked.push((name.to_owned(), make(text)));
        }
    }
    if let Some(texts) = choices("guided_choice", field(fields, "guided_choice"))? {
        asked.push(("guided_choice".to_owned(), texts));
    }
    if let Some(inner) = inner {
        asked.extend(structured_outputs(inner)?);
    }
    match asked.len() {
        0 => Ok(None),
        1 => {
            let (field, output) = asked.remove(0);
            check_bytes(&field, output).map(Some)
        }
        _ => {
            let names: Vec<String> = asked.iter().map(|(name, _)| format!("`{name}`")).collect();
            let message = format!("{} exclude each other; send one of them", names.join(" and "));
            Err(GatewayError::field(&asked[1].0, message))
        }
    }
}

/// vLLM's fields besides `json`.
fn structured_outputs(inner: &JsonObject) -> Result<Vec<(String, StructuredOutput)>, GatewayError> {
    let mut asked = Vec::new();
    for (name, value) in inner {
        let field = format!("structured_outputs.{name}");
        let output = match (name.as_str(), value) {
            // The backend is llguidance, and its white space is bounded.
            ("json" | "_backend" | "_backend_was_auto", _) => None,
            ("disable_fallback" | "disable_any_whitespace" | "disable_additional_properties", _)
                if is_nothing(value) =>
            {
                None
            }
            (_, Value::Null) => None,
            ("json_object", Value::Bool(asked)) => asked.then_some(StructuredOutput::JsonObject),
            ("regex", value) => text(&field, Some(value))?.map(StructuredOutput::Regex),
            ("grammar", value) => text(&field, Some(value))?.map(StructuredOutput::Grammar),
            ("choice", value) => choices(&field, Some(value))?,
            _ => {
                // An error does not repeat a name of any length.
                let field = if name.len() > MAX_NAME_BYTES { "structured_outputs" } else { &field };
                return Err(invalid(
                    field,
                    "left out: this release knows json, json_object, regex, choice and grammar",
                ));
            }
        };
        asked.extend(output.map(|output| (field, output)));
    }
    Ok(asked)
}

/// OpenAI's `response_format`; llama.cpp's `json_object` may have a schema.
fn response_format(
    format: &Value,
    raw: Option<&RawFormat<'_>>,
) -> Result<Option<StructuredOutput>, GatewayError> {
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => match format.get("schema").filter(|schema| !schema.is_null()) {
            None => Ok(Some(StructuredOutput::JsonObject)),
            Some(value) => schema("response_format.schema", value, raw.and_then(|raw| raw.schema)).map(Some),
        },
        Some("json_schema") => {
            let field = "response_format.json_schema.schema";
            let of = format.get("json_schema").unwrap_or(format);
            let raw = raw.and_then(|raw| raw.json_schema.as_ref().map_or(raw.schema, |raw| raw.schema));
            match of.get("schema").filter(|schema| !schema.is_null()) {
                Some(value) => schema(field, value, raw).map(Some),
                None => Err(GatewayError::field(field, format!("`{field}` is missing"))),
            }
        }
        _ => Err(invalid("response_format", "{\"type\": \"text\"}, \"json_object\" or \"json_schema\"")),
    }
}

fn text(field: &str, value: Option<&Value>) -> Result<Option<String>, GatewayError> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text.is_empty() => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(invalid(field, "a string")),
    }
}

fn choices(field: &str, value: Option<&Value>) -> Result<Option<StructuredOutput>, GatewayError> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(texts)) if texts.is_empty() => Ok(None),
        Some(Value::Array(texts)) if texts.len() <= MAX_CHOICES => {
            let texts =
                texts.iter().map(|text| text.as_str().filter(|text| !text.is_empty()).map(str::to_owned));
            let texts: Option<Vec<String>> = texts.collect();
            let texts = texts.ok_or_else(|| invalid(field, "a list of strings, none of them empty"))?;
            Ok(Some(StructuredOutput::Choice(texts)))
        }
        Some(_) => Err(invalid(field, &format!("a list of at most {MAX_CHOICES} strings"))),
    }
}

#[derive(Default, Deserialize)]
struct RawFields<'a> {
    #[serde(borrow, default)]
    response_format: Option<RawFormat<'a>>,
    #[serde(borrow, default)]
    structured_outputs: Option<RawStructured<'a>>,
    #[serde(borrow, default)]
    guided_json: Option<&'a RawValue>,
    #[serde(borrow, default)]
    json_schema: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct RawFormat<'a> {
    #[serde(borrow, default)]
    schema: Option<&'a RawValue>,
    #[serde(borrow, default)]
    json_schema: Option<RawSchema<'a>>,
}

#[derive(Deserialize)]
struct RawSchema<'a> {
    #[serde(borrow, default)]
    schema: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
struct RawStructured<'a> {
    #[serde(borrow, default)]
    json: Option<&'a RawValue>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialects::json_schema::MAX_BYTES;
    use crate::json_body::JsonScan;

    fn asked(text: &str) -> Result<Option<StructuredOutput>, Option<String>> {
        let body = JsonScan::new(text.as_bytes()).unwrap().decode(text.as_bytes()).unwrap();
        let mut fields = body.value.as_object().unwrap().clone();
        fields.retain(|_, value| !value.is_null());
        parse(&fields, &body).map_err(|error| error.param)
    }

    #[test]
    fn every_name_of_a_constraint_gives_it() {
        const SCHEMA: &str = r#"{"type": "object", "properties": {"z": {}, "a": {"const": 1.0}}}"#;
        let schema = || Some(StructuredOutput::JsonSchema(SCHEMA.to_owned()));
        for (body, expected) in [
            ("{}".to_owned(), None),
            (r#"{"response_format": {"type": "text"}, "guided_json": null, "regex": "", "guided_choice": []}"#.into(), None),
            (r#"{"response_format": {"type": "json_object"}}"#.into(), Some(StructuredOutput::JsonObject)),
            (format!(r#"{{"response_format": {{"type": "json_object", "schema": {SCHEMA}}}}}"#), schema()),
            (
                format!(
                    r#"{{"response_format": {{"type": "json_schema", "json_schema": {{"name": "n", "strict": true, "schema": {SCHEMA}}}}}}}"#
                ),
                schema(),
            ),
            (format!(r#"{{"guided_json": {SCHEMA}}}"#), schema()),
            (format!(r#"{{"guided_json": {}}}"#, Value::from(SCHEMA)), schema()),
            (format!(r#"{{"json_schema": {SCHEMA}}}"#), schema()),
            (format!(r#"{{"structured_outputs": {{"json": {SCHEMA}, "disable_any_whitespace": false}}}}"#), schema()),
            (r#"{"structured_outputs": {"json_object": true}}"#.into(), Some(StructuredOutput::JsonObject)),
            (r#"{"structured_outputs": {"regex": "a+"}}"#.into(), Some(StructuredOutput::Regex("a+".into()))),
            (r#"{"guided_regex": "a+"}"#.into(), Some(StructuredOutput::Regex("a+".into()))),
            (r#"{"guided_grammar": "start: \"a\""}"#.into(), Some(StructuredOutput::Grammar("start: \"a\"".into()))),
            (
                r#"{"guided_choice": ["a", "b"]}"#.into(),
                Some(StructuredOutput::Choice(vec!["a".into(), "b".into()])),
            ),
        ] {
            assert_eq!(asked(&body), Ok(expected), "{body}");
        }
        let long = format!(r#"{{"guided_regex": "{}"}}"#, "a".repeat(MAX_BYTES + 1));
        for (body, param) in [
            (r#"{"response_format": {"type": "xml"}}"#, "response_format"),
            (r#"{"response_format": "json"}"#, "response_format"),
            (r#"{"response_format": {"type": "json_schema"}}"#, "response_format.json_schema.schema"),
            (r#"{"guided_json": 3}"#, "guided_json"),
            (r#"{"guided_choice": [1]}"#, "guided_choice"),
            (r#"{"guided_choice": [""]}"#, "guided_choice"),
            (r#"{"structured_outputs": {"structural_tag": "x"}}"#, "structured_outputs.structural_tag"),
            (
                r#"{"structured_outputs": {"disable_any_whitespace": true}}"#,
                "structured_outputs.disable_any_whitespace",
            ),
            (r#"{"structured_outputs": []}"#, "structured_outputs"),
            (r#"{"guided_regex": "a", "response_format": {"type": "json_object"}}"#, "guided_regex"),
            (&long, "guided_regex"),
        ] {
            assert_eq!(asked(body), Err(Some(param.to_owned())), "{body}");
        }
    }
}
