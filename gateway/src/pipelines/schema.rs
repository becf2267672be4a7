//! The schema of a step's output. A model of this cluster can write nothing else; providers and endpoints can, so every output is
//! looked at. Pure.

use std::sync::Arc;

use jsonschema::{Draft, PatternOptions, Validator};
use russet_crds::PipelineStep;
use serde_json::Value;

use super::calls::ReplyText;
use crate::error::shown;

/// Bytes that a pattern may take.
const MAX_PATTERN_BYTES: usize = 256 << 10;
/// Patterns of a schema.
const MAX_PATTERNS: usize = 64;
/// Parts of a schema with what it refers to in the place of each reference: each looks at a part of the output once, so that the
/// time is bounded by their product.
const MAX_SCHEMA_PARTS: usize = 10_000;
/// What a schema may say; the time that others take is not known.
const KEYWORDS: [&str; 49] = [
    "$comment",
    "$defs",
    "$ref",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "contains",
    "contentEncoding",
    "contentMediaType",
    "default",
    "definitions",
    "dependentRequired",
    "dependentSchemas",
    "deprecated",
    "description",
    "discriminator",
    "else",
    "enum",
    "examples",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "if",
    "items",
    "maxContains",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minContains",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "not",
    "nullable",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "required",
    "then",
    "title",
    "type",
    "uniqueItems",
];
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
        let mut fields = step.schema.clone();
        // In an older draft other words lead elsewhere.
        fields.remove("$schema");
        let schema = Value::Object(fields);
        if let Some(word) = leading_elsewhere(&schema) {
            return Err(format!("it has {word}, which steps do not know"));
        }
        let mut unfolding = Unfolding { root: &schema, left: MAX_SCHEMA_PARTS, patterns: MAX_PATTERNS };
        unfolding.schema(&schema, 0)?;
        let patterns =
            PatternOptions::regex().size_limit(MAX_PATTERN_BYTES).dfa_size_limit(MAX_PATTERN_BYTES);
        let options = jsonschema::options().with_draft(Draft::Draft202012).with_pattern_options(patterns);
        let built = options.build(&schema);
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

/// A word anywhere in a document by which a part of it may be meant that a pointer does not lead to.
fn leading_elsewhere(document: &Value) -> Option<&'static str> {
    const WORDS: [&str; 5] = ["$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveRef"];
    match document {
        Value::Array(items) => items.iter().find_map(leading_elsewhere),
        Value::Object(fields) => {
            let own = WORDS.into_iter().find(|word| fields.contains_key(*word));
            own.or_else(|| fields.values().find_map(leading_elsewhere))
        }
        _ => None,
    }
}

/// Counts the parts of a schema with what it refers to in the place of each reference.
struct Unfolding<'a> {
    root: &'a Value,
    left: usize,
    patterns: usize,
}

impl Unfolding<'_> {
    /// Counts a schema; an error where it has too many parts, refers to itself or to another document, or uses what takes more
    /// time than it has parts.
    fn schema(&mut self, schema: &Value, depth: usize) -> Result<(), String> {
        self.left = self.left.saturating_sub(1);
        if depth > MAX_DEPTH || self.left == 0 {
            return Err(format!("it refers to itself, or unfolds to more than {MAX_SCHEMA_PARTS} parts"));
        }
        let Value::Object(keywords) = schema else { return Ok(()) };
        for (keyword, value) in keywords {
            if !KEYWORDS.contains(&keyword.as_str()) {
                return Err(format!("it has {}, which steps do not know", shown(keyword)));
            }
            match (keyword.as_str(), value) {
                ("$ref", Value::String(reference)) => {
                    let pointer = reference.strip_prefix('#').filter(|pointer| !pointer.contains('%'));
                    let target = pointer.and_then(|pointer| self.root.pointer(pointer)).cloned();
                    let target = target.ok_or("a $ref leads to no part of it")?;
                    self.schema(&target, depth + 1)?;
                }
                // They count where they are referred to.
                ("$defs" | "definitions", _) if depth == 0 => {}
                ("pattern", _) => self.pattern(1)?,
                (
                    "$defs" | "definitions" | "properties" | "patternProperties" | "dependentSchemas",
                    Value::Object(named),
                ) => {
                    if keyword == "patternProperties" {
                        self.pattern(named.len())?;
                    }
                    named.values().try_for_each(|schema| self.schema(schema, depth + 1))?;
                }
                // Data, and no schemas.
                (
                    "const" | "default" | "dependentRequired" | "description" | "enum" | "examples"
                    | "required" | "title" | "type",
                    value,
                ) => {
                    self.left = self.left.saturating_sub(value.as_array().map_or(1, Vec::len));
                }
                ("discriminator", _) => {}
                (_, Value::Array(schemas)) => {
                    schemas.iter().try_for_each(|schema| self.schema(schema, depth + 1))?;
                }
                (_, schema) => self.schema(schema, depth + 1)?,
            }
        }
        Ok(())
    }

    fn pattern(&mut self, count: usize) -> Result<(), String> {
        let left =
            self.patterns.checked_sub(count).ok_or(format!("it has more than {MAX_PATTERNS} patterns"))?;
        self.patterns = left;
        Ok(())
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
        let unevaluated = (0..20).fold(
            json!({"unevaluatedProperties": false}),
            |inner, _| json!({"unevaluatedProperties": false, "allOf": [inner]}),
        );
        let patterns: Vec<Value> = (0..65).map(|_| json!({"pattern": "a"})).collect();
        for (refused, expected) in [
            (json!({"$ref": "https://example.com/schema"}), "a $ref leads to no part of it"),
            (json!({"$ref": "file:///etc/passwd"}), "a $ref leads to no part of it"),
            (json!({"$defs": {"ab": {}}, "$ref": "#/$defs/a%62"}), "a $ref leads to no part of it"),
            (
                json!({"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}),
                "it refers to itself",
            ),
            (json!({"properties": {"definitions": {"$ref": "#"}}}), "it refers to itself"),
            (doubling(30), "it refers to itself, or unfolds to more than 10000 parts"),
            (unevaluated, "it has unevaluatedProperties, which steps do not know"),
            (json!({"allOf": [{"$id": "urn:a"}]}), "it has $id, which steps do not know"),
            (json!({"$defs": {"a": {"$id": "urn:a"}}}), "it has $id, which steps do not know"),
            (
                json!({"dependencies": {"default": {"$ref": "#"}}}),
                "it has dependencies, which steps do not know",
            ),
            (json!({"allOf": patterns}), "it has more than 64 patterns"),
        ] {
            let error = schema(refused).err().unwrap();
            assert!(error.starts_with(expected), "{error}");
        }
        // A property may have any name.
        let named = json!({"$schema": "http://json-schema.org/draft-04/schema#", "dependentRequired": {"title": ["id"]}, "properties": {"unevaluatedItems": {"type": "string"}, "id": {"enum": [{"id": 1}]}}});
        assert_eq!(
            schema(named).unwrap().read(text(r#"{"id": {"id": 1}}"#)).await,
            Ok(json!({"id": {"id": 1}}))
        );
        let slow = schema(json!({"type": "string", "pattern": "^(a+)+$"})).unwrap();
        assert!(slow.read(text(&format!("\"{}b\"", "a".repeat(100_000)))).await.is_err());
    }
}
