//! What the text of a response has to be: `text`.

use std::collections::BTreeSet;

use russet_wire::request::StructuredOutput;
use serde::Deserialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use super::settings::TextSettings;
use crate::dialects::json_schema::{MAX_BYTES, schema};
use crate::dialects::values::{JsonObject, invalid};
use crate::error::GatewayError;
use crate::json_body::JsonBody;

/// What the text has to be, and what the response says of it; adds the names of fields without effect to `ignored`.
pub(super) fn parse(
    fields: &JsonObject,
    body: &JsonBody<'_>,
    ignored: &mut BTreeSet<String>,
) -> Result<(Option<StructuredOutput>, TextSettings), GatewayError> {
    let nothing = JsonObject::new();
    let text = match fields.get("text") {
        None => &nothing,
        Some(Value::Object(text)) => text,
        Some(_) => return Err(invalid("text", "an object with a format")),
    };
    let known = |name: &&String| name.as_str() == "format" || text[name.as_str()].is_null();
    ignored.extend(text.keys().filter(|name| !known(name)).map(|name| format!("text.{name}")));
    let verbosity = text.get("verbosity").and_then(Value::as_str);
    let verbosity = verbosity.filter(|word| ["low", "medium", "high"].contains(word)).map(str::to_owned);
    let raw: Option<RawBody<'_>> = body.read();
    let raw = raw.and_then(|raw| raw.text?.format);
    let plain = json!({"type": "text"});
    let format = text.get("format").filter(|format| !format.is_null());
    let echo = match (format, raw) {
        (Some(_), Some(raw)) => raw.to_owned(),
        (Some(format), None) => to_raw_value(format).unwrap_or_default(),
        (None, _) => to_raw_value(&plain).unwrap_or_default(),
    };
    if echo.get().len() > MAX_BYTES {
        return Err(invalid("text.format", &format!("at most {MAX_BYTES} bytes, not {}", echo.get().len())));
    }
    let output = output(format.unwrap_or(&plain), raw)?;
    Ok((output, TextSettings { format: echo, verbosity }))
}

fn output(format: &Value, raw: Option<&RawValue>) -> Result<Option<StructuredOutput>, GatewayError> {
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(StructuredOutput::JsonObject)),
        Some("json_schema") => {
            let field = "text.format.schema";
            let raw = raw.and_then(|raw| serde_json::from_str::<RawFormat<'_>>(raw.get()).ok());
            match format.get("schema").filter(|schema| !schema.is_null()) {
                Some(value) => schema(field, value, raw.and_then(|raw| raw.schema)).map(Some),
                None => Err(GatewayError::field(field, format!("`{field}` is missing"))),
            }
        }
        _ => Err(invalid("text.format", "{\"type\": \"text\"}, \"json_object\" or \"json_schema\"")),
    }
}

#[derive(Deserialize)]
struct RawBody<'a> {
    #[serde(borrow, default)]
    text: Option<RawText<'a>>,
}

#[derive(Deserialize)]
struct RawText<'a> {
    #[serde(borrow, default)]
    format: Option<&'a RawValue>,
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

    type Parsed = (Option<StructuredOutput>, String, Vec<String>);

    fn check(text: &str) -> Result<Parsed, Option<String>> {
        let body = format!(r#"{{"text": {text}}}"#);
        let body = JsonScan::new(body.as_bytes()).unwrap().decode(body.as_bytes()).unwrap();
        let mut fields = body.value.as_object().unwrap().clone();
        fields.retain(|_, value| !value.is_null());
        let mut ignored = BTreeSet::new();
        let (output, settings) = parse(&fields, &body, &mut ignored).map_err(|error| error.param)?;
        Ok((output, settings.format.get().to_owned(), ignored.into_iter().collect()))
    }

    #[test]
    fn a_format_of_text_says_what_it_has_to_be() {
        const SCHEMA: &str = r#"{"type": "object", "properties": {"z": {}, "a": {"const": 1.0}}}"#;
        const PLAIN: &str = r#"{"type":"text"}"#;
        let strict = format!(r#"{{"type": "json_schema", "name": "n", "strict": true, "schema": {SCHEMA}}}"#);
        let with = |format: &str| format!(r#"{{"format": {format}}}"#);
        let schema = Some(StructuredOutput::JsonSchema(SCHEMA.to_owned()));
        for (text, expected) in [
            ("null".to_owned(), (None, PLAIN, vec![])),
            ("{}".to_owned(), (None, PLAIN, vec![])),
            (r#"{"format": null, "verbosity": null}"#.to_owned(), (None, PLAIN, vec![])),
            (r#"{"verbosity": "low"}"#.to_owned(), (None, PLAIN, vec!["text.verbosity".to_owned()])),
            (with(r#"{"type": "text"}"#), (None, r#"{"type": "text"}"#, vec![])),
            (
                with(r#"{"type": "json_object"}"#),
                (Some(StructuredOutput::JsonObject), r#"{"type": "json_object"}"#, vec![]),
            ),
            (with(&strict), (schema, &strict, vec![])),
        ] {
            let (output, format, ignored) = expected;
            assert_eq!(check(&text), Ok((output, format.to_owned(), ignored)), "{text}");
        }
        let long = with(&format!(r#"{{"type": "text", "x": "{}"}}"#, "x".repeat(MAX_BYTES)));
        for (text, param) in [
            ("7", "text"),
            (r#"{"format": "json"}"#, "text.format"),
            (r#"{"format": {"type": "grammar"}}"#, "text.format"),
            (r#"{"format": {"type": "json_schema", "name": "n"}}"#, "text.format.schema"),
            (r#"{"format": {"type": "json_schema", "schema": 7}}"#, "text.format.schema"),
            (&long, "text.format"),
        ] {
            assert_eq!(check(text), Err(Some(param.to_owned())), "{text}");
        }
    }
}
