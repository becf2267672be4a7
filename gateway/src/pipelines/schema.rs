//! The schema of a step's output. A model of this cluster can write nothing else; providers and endpoints can, so every output is
//! looked at. Pure.

use std::sync::Arc;

use jsonschema::{PatternOptions, Validator};
use russet_crds::PipelineStep;
use serde_json::Value;

use super::calls::ReplyText;
use crate::error::shown;

/// Bytes that a pattern may take.
const MAX_PATTERN_BYTES: usize = 1 << 20;
/// Parts of a schema with what it refers to in the place of each reference: each looks at a part of the output once, so that the
/// time is bounded by their product.
const MAX_SCHEMA_PARTS: usize = 10_000;
/// Depth of a schema, counted so, and of an output.
const MAX_DEPTH: usize = 64;

/// What an output must be.
#[derive(Clone)]
pub(super) struct OutputSchema(Option<Arc<Validator>>);

impl OutputSchema {
    /// One that takes anything.
    pub(super) fn none() -> Self {
        Self(None)
    }

    /// That of a step; an error says why it is none. Nothing is fetched for it, and patterns take linear time.
    pub(super) fn of(step: &PipelineStep) -> Result<Self, String> {
        if step.schema.is_empty() {
            return Ok(Self(None));
        }
        let schema = Value::Object(step.schema.clone());
        if !unfolds(&schema, &schema, 0, &mut MAX_SCHEMA_PARTS.clone()) {
            return Err(format!(
                "it refers to itself, to another document, or unfolds to more than {MAX_SCHEMA_PARTS} parts"
            ));
        }
        let patterns =
            PatternOptions::regex().size_limit(MAX_PATTERN_BYTES).dfa_size_limit(MAX_PATTERN_BYTES);
        let built = jsonschema::options().with_pattern_options(patterns).build(&schema);
        built.map(|validator| Self(Some(Arc::new(validator)))).map_err(|error| shown(&error.to_string()))
    }

    /// The output that a text or a value is; an error says why it is none. It does not quote the output: statuses are not for
    /// what models write.
    pub(super) async fn read(&self, reply: ReplyText) -> Result<Value, String> {
        let Self(validator) = self;
        let value = match (reply, validator) {
            (ReplyText::Text(text), None) => return Ok(Value::String(text)),
            (ReplyText::Text(text), Some(_)) => serde_json::from_str(&text)
                .map_err(|_| "the output is no JSON, as its schema wants".to_owned())?,
            (ReplyText::Json(value), _) => value,
        };
        if depth(&value) > MAX_DEPTH {
            return Err(format!("the output nests more than {MAX_DEPTH} deep"));
        }
        let Some(validator) = validator.clone() else { return Ok(value) };
        // A large output takes seconds.
        let checked = tokio::task::spawn_blocking(move || validator.is_valid(&value).then_some(value)).await;
        match checked {
            Ok(Some(value)) => Ok(value),
            Ok(None) => Err("the output is not what its schema wants".to_owned()),
            Err(_) => Err("the output could not be compared with its schema".to_owned()),
        }
    }
}

/// Whether a schema has a bounded number of parts with what it refers to in the place of each reference, none of which leads
/// out of it.
fn unfolds(part: &Value, root: &Value, depth: usize, left: &mut usize) -> bool {
    if depth > MAX_DEPTH || *left == 0 {
        return false;
    }
    *left -= 1;
    match part {
        Value::Object(fields) => fields.iter().all(|(name, value)| match (name.as_str(), value) {
            ("$ref", Value::String(reference)) => {
                let target = reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
                target.is_some_and(|target| unfolds(target, root, depth + 1, left))
            }
            ("$dynamicRef" | "$recursiveRef" | "$id" | "$anchor" | "$dynamicAnchor", _) => false,
            // They count where they are referred to.
            ("$defs" | "definitions", _) => true,
            (_, value) => unfolds(value, root, depth + 1, left),
        }),
        Value::Array(items) => items.iter().all(|item| unfolds(item, root, depth + 1, left)),
        _ => true,
    }
}

/// How deep a value nests.
fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn schema(schema: Value) -> Result<OutputSchema, String> {
        OutputSchema::of(&PipelineStep {
            schema: schema.as_object().cloned().unwrap_or_default(),
            ..PipelineStep::default()
        })
    }

    fn text(text: &str) -> ReplyText {
        ReplyText::Text(text.to_owned())
    }

    #[tokio::test]
    async fn outputs_have_their_schema() {
        assert_eq!(schema(json!({})).unwrap().read(text("{")).await, Ok(json!("{")));
        let score = json!({"$ref": "#/$defs/score"});
        let scored = schema(json!({
            "type": "object", "properties": {"score": score}, "required": ["score"],
            "$defs": {"score": {"type": "integer"}},
        }))
        .unwrap();
        assert_eq!(scored.read(text(r#" {"score": 7} "#)).await, Ok(json!({"score": 7})));
        assert_eq!(scored.read(ReplyText::Json(json!({"score": 8}))).await, Ok(json!({"score": 8})));
        for (wrong, expected) in [
            ("7 of 10", "the output is no JSON, as its schema wants"),
            (r#"{"score": "7"}"#, "the output is not what its schema wants"),
            ("{}", "the output is not what its schema wants"),
        ] {
            assert_eq!(scored.read(text(wrong)).await, Err(expected.to_owned()));
        }
        let deep = (0..65).fold(json!(1), |inner, _| json!([inner]));
        let error = OutputSchema::none().read(ReplyText::Json(deep)).await.unwrap_err();
        assert_eq!(error, "the output nests more than 64 deep");
    }

    #[tokio::test]
    async fn schemas_are_local_and_bounded_and_patterns_linear() {
        let doubling = |levels: usize| {
            let level = |at: usize| {
                let next = json!({"$ref": format!("#/$defs/{}", at + 1)});
                json!({"anyOf": [{"properties": {"a": next}}, {"properties": {"b": next}}]})
            };
            let mut definitions: serde_json::Map<String, Value> =
                (0..levels).map(|at| (at.to_string(), level(at))).collect();
            definitions.insert(levels.to_string(), json!({"type": "string"}));
            json!({"$ref": "#/$defs/0", "$defs": definitions})
        };
        assert!(schema(doubling(5)).is_ok());
        for refused in [
            json!({"$ref": "https://example.com/schema"}),
            json!({"$ref": "file:///etc/passwd"}),
            json!({"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}),
            json!({"$ref": "#"}),
            doubling(30),
        ] {
            let error = schema(refused).err().unwrap();
            assert!(error.starts_with("it refers to itself"), "{error}");
        }
        let slow = schema(json!({"type": "string", "pattern": "^(a+)+$"})).unwrap();
        assert!(slow.read(text(&format!("\"{}b\"", "a".repeat(100_000)))).await.is_err());
    }
}
