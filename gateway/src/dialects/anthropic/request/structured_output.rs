//! What the text of a response has to be: the format of `output_config`, and `output_format`, its older name. Schemas
//! reach the engine as the client wrote them: a model writes the keys in their order.

use russet_wire::request::StructuredOutput;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::dialects::json_schema;
use crate::dialects::values::{JsonObject, invalid};
use crate::error::GatewayError;
use crate::json_body::JsonBody;

/// What a request asks for; `None` for free text.
pub(super) fn parse(
    fields: &JsonObject,
    body: &JsonBody<'_>,
) -> Result<Option<StructuredOutput>, GatewayError> {
    let raw: RawFields<'_> = body.read().unwrap_or_default();
    let nested = fields.get("output_config").and_then(|config| config.get("format"));
    let nested = nested.filter(|format| !format.is_null());
    let raw_nested = raw.output_config.and_then(|config| config.format);
    let (field, format, raw) = match (nested, fields.get("output_format")) {
        (Some(format), _) => ("output_config.format", format, raw_nested),
        (None, Some(format)) => ("output_format", format, raw.output_format),
        (None, None) => return Ok(None),
    };
    if format.get("type").and_then(Value::as_str) != Some("json_schema") {
        return Err(invalid(field, "{\"type\": \"json_schema\", \"schema\": …}"));
    }
    let field = format!("{field}.schema");
    let Some(schema @ Value::Object(_)) = format.get("schema") else {
        return Err(invalid(&field, "a JSON Schema"));
    };
    let output = json_schema::schema(&field, schema, raw.and_then(|raw| raw.schema))?;
    json_schema::check_bytes(&field, output).map(Some)
}

#[derive(Default, Deserialize)]
struct RawFields<'a> {
    #[serde(borrow, default)]
    output_format: Option<RawFormat<'a>>,
    #[serde(borrow, default)]
    output_config: Option<RawConfig<'a>>,
}

#[derive(Deserialize)]
struct RawConfig<'a> {
    #[serde(borrow, default)]
    format: Option<RawFormat<'a>>,
}

#[derive(Deserialize)]
struct RawFormat<'a> {
    #[serde(borrow, default)]
    schema: Option<&'a RawValue>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json_body::JsonScan;

    #[test]
    fn a_schema_arrives_under_both_names_as_it_is_written() {
        const SCHEMA: &str = r#"{"type": "object", "properties": {"z": {}, "a": {"const": 1.0}}}"#;
        let format = format!(r#"{{"type": "json_schema", "schema": {SCHEMA}}}"#);
        let long = "x".repeat(json_schema::MAX_BYTES);
        for (body, expected) in [
            ("{}".to_owned(), Ok(None)),
            (r#"{"output_config": {"effort": "low", "format": null}}"#.to_owned(), Ok(None)),
            (format!(r#"{{"output_config": {{"format": {format}}}}}"#), Ok(Some(SCHEMA))),
            (format!(r#"{{"output_format": {format}}}"#), Ok(Some(SCHEMA))),
            (
                format!(r#"{{"output_config": {{"format": {format}}}, "output_format": {{"type": "x"}}}}"#),
                Ok(Some(SCHEMA)),
            ),
            (r#"{"output_format": "json"}"#.to_owned(), Err("output_format")),
            (r#"{"output_config": {"format": {"type": "xml"}}}"#.to_owned(), Err("output_config.format")),
            (r#"{"output_format": {"type": "json_schema"}}"#.to_owned(), Err("output_format.schema")),
            (
                format!(r#"{{"output_format": {{"type": "json_schema", "schema": {{"title": "{long}"}}}}}}"#),
                Err("output_format.schema"),
            ),
        ] {
            let json = JsonScan::new(body.as_bytes()).unwrap().decode(body.as_bytes()).unwrap();
            let parsed = parse(json.value.as_object().unwrap(), &json);
            let parsed = parsed.map_err(|error| error.param.unwrap());
            let expected =
                expected.map(|schema| schema.map(|text| StructuredOutput::JsonSchema(text.into())));
            assert_eq!(parsed, expected.map_err(str::to_owned), "{}", &body[..body.len().min(200)]);
        }
    }
}
