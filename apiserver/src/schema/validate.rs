//! Validates an object against its schema, with Kubernetes' messages.
//!
//! Not here: rules about names and metadata that are in no schema, admission.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::prune::{push_field, push_index};
use super::values::{Counterparts, key, shown};
use super::{Additional, FieldError, ListKind, Schema, SchemaType, SizeRange, cel, format};

/// Floats below this are exact integers: 2^53.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;
/// Maximum errors that are reported of one object.
pub(super) const MAX_ERRORS: usize = 1000;

/// Validates `new`; with `old`, errors below unchanged values are ignored and transition rules run.
pub fn validate_object(schema: &Schema, new: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut walk = Validation { errors: Vec::new() };
    let mut path = String::new();
    walk.check(schema, new, old, &mut path);
    walk.unique(schema, new, &mut path);
    let blocking = [
        "FieldValueNotSupported",
        "FieldValueRequired",
        "FieldValueTooLong",
        "FieldValueTooMany",
        "FieldValueTypeInvalid",
    ];
    if !cel::any_rules(schema) {
        return walk.errors;
    }
    // Rules may rely on the types of the schema, so they do not run on an object that violates it.
    if walk.errors.iter().any(|error| blocking.contains(&error.reason)) {
        walk.errors.push(FieldError {
            reason: "FieldValueInvalid",
            field: "<nil>".into(),
            message: "Invalid value: null: some validation rules were not checked because the object was invalid; correct the existing errors to complete validation".into(),
        });
    } else {
        cel::evaluate(schema, new, old, &mut path, &mut walk.errors);
    }
    walk.errors
}

struct Validation {
    errors: Vec<FieldError>,
}

impl Validation {
    /// Adds an error; of very many the first are enough.
    fn report(&mut self, reason: &'static str, path: &str, message: String) {
        if self.errors.len() >= MAX_ERRORS {
            return;
        }
        self.errors.push(FieldError { reason, field: path.to_owned(), message });
    }

    /// `Invalid value: VALUE: PATH in body DETAIL`
    fn invalid(&mut self, path: &str, value: &Value, detail: String) {
        self.report(
            "FieldValueInvalid",
            path,
            format!("Invalid value: {}: {path} in body {detail}", shown(value)),
        );
    }

    fn check(&mut self, schema: &Schema, value: &Value, old: Option<&Value>, path: &mut String) {
        // An unchanged value may stay even if a newer schema forbids it.
        if !path.is_empty() && old == Some(value) {
            return;
        }
        if value.is_null() && (schema.nullable || schema.kind == SchemaType::Any) {
            // An enum applies to null, too: it has to list it.
            self.allowed(schema, value, path);
            return;
        }
        if let Some(expected) = wrong_type(schema.kind, value) {
            let found = type_name(value);
            self.report(
                "FieldValueTypeInvalid",
                path,
                format!("Invalid value: {found:?}: {path} in body must be of type {expected}: {found:?}"),
            );
            self.allowed(schema, value, path);
            return;
        }
        self.restrictions(schema, value, path);
        self.junctors(schema, value, path);
        let length = path.len();
        match value {
            Value::Object(map) => {
                for (name, child) in map {
                    let field = match (schema.properties.get(name), &schema.additional) {
                        (Some(field), _) => field,
                        (None, Additional::Typed(field)) => field,
                        (None, Additional::Anything | Additional::Denied) => continue,
                    };
                    push_field(path, name);
                    self.check(field, child, old.and_then(|old| old.get(name)), path);
                    path.truncate(length);
                }
            }
            Value::Array(items) => {
                let Some(field) = &schema.items else { return };
                let before = Counterparts::new(schema, old);
                for (index, item) in items.iter().enumerate() {
                    push_index(path, index);
                    self.check(field, item, before.of(item), path);
                    path.truncate(length);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }

    fn allowed(&mut self, schema: &Schema, value: &Value, path: &str) {
        if let Some(allowed) = &schema.checks.one_value_of
            && !allowed.iter().any(|allowed| equal(allowed, value))
        {
            let listed: Vec<String> = allowed
                .iter()
                .map(|value| format!("{:?}", value.as_str().map_or_else(|| value.to_string(), str::to_owned)))
                .collect();
            self.report(
                "FieldValueNotSupported",
                path,
                format!("Unsupported value: {}: supported values: {}", shown(value), listed.join(", ")),
            );
        }
    }

    fn restrictions(&mut self, schema: &Schema, value: &Value, path: &str) {
        self.allowed(schema, value, path);
        let checks = &schema.checks;
        match value {
            Value::String(text) => self.string(schema, value, text, path),
            Value::Number(_) => self.number(schema, value, path),
            Value::Array(items) => {
                let SizeRange { min: least, most } = checks.items;
                let size = items.len() as u64;
                if let Some(most) = most.filter(|most| size > *most) {
                    self.report("FieldValueTooMany", path, too_many(size, most));
                }
                if let Some(least) = least.filter(|least| size < *least) {
                    self.invalid(path, &Value::from(size), format!("should have at least {least} items"));
                }
            }
            Value::Object(map) => self.object(schema, map, path),
            Value::Null | Value::Bool(_) => {}
        }
    }

    fn string(&mut self, schema: &Schema, value: &Value, text: &str, path: &str) {
        let checks = &schema.checks;
        let SizeRange { min: least, most } = checks.length;
        let size = if least.is_some() || most.is_some() { text.chars().count() as u64 } else { 0 };
        // Only the first error is reported: for a value that is too long the pattern rarely matters.
        if let Some(most) = most.filter(|most| size > *most) {
            let bytes = if most == 1 { "byte" } else { "bytes" };
            self.report("FieldValueTooLong", path, format!("Too long: may not be more than {most} {bytes}"));
        } else if let Some(least) = least.filter(|least| size < *least) {
            self.invalid(path, value, format!("should be at least {least} chars long"));
        } else if let Some(pattern) = checks.pattern.as_ref().filter(|pattern| !pattern.is_match(text)) {
            self.invalid(path, value, format!("should match '{pattern}'"));
        }
        if !format::holds(&checks.format, text) {
            let name = &checks.format;
            let message = format!("Invalid value: {text:?}: {path} in body must be of type {name}: {text:?}");
            self.report("FieldValueTypeInvalid", path, message);
        }
    }

    fn number(&mut self, schema: &Schema, value: &Value, path: &str) {
        let checks = &schema.checks;
        let Some(number) = value.as_f64() else { return };
        if let Some((bound, exclusive)) = checks.maximum {
            if exclusive && number >= bound {
                self.invalid(path, value, format!("should be less than {}", plain(bound)));
            } else if number > bound {
                self.invalid(path, value, format!("should be less than or equal to {}", plain(bound)));
            }
        }
        if let Some((bound, exclusive)) = checks.minimum {
            if exclusive && number <= bound {
                self.invalid(path, value, format!("should be greater than {}", plain(bound)));
            } else if number < bound {
                self.invalid(path, value, format!("should be greater than or equal to {}", plain(bound)));
            }
        }
        if let Some(factor) = checks.multiple_of.filter(|factor| *factor > 0.0) {
            let ratio = number / factor;
            if (ratio - ratio.round()).abs() > 1e-9 {
                self.invalid(path, value, format!("should be a multiple of {}", plain(factor)));
            }
        }
        let fits = match checks.format.as_str() {
            "int32" => number >= f64::from(i32::MIN) && number <= f64::from(i32::MAX),
            _ => true,
        };
        if !fits && schema.kind == SchemaType::Integer {
            self.invalid(path, value, format!("must be of type {}: {value}", checks.format));
        }
    }

    fn object(&mut self, schema: &Schema, map: &Map<String, Value>, path: &str) {
        let checks = &schema.checks;
        let SizeRange { min: least, most } = checks.properties;
        let size = map.len() as u64;
        if let Some(most) = most.filter(|most| size > *most) {
            self.report("FieldValueTooMany", path, too_many(size, most));
        }
        if let Some(least) = least.filter(|least| size < *least) {
            self.invalid(path, &Value::from(size), format!("should have at least {least} properties"));
        }
        for name in &checks.required {
            if !map.contains_key(name) {
                let mut place = path.to_owned();
                push_field(&mut place, name);
                self.report("FieldValueRequired", &place, "Required value".into());
            }
        }
    }

    fn junctors(&mut self, schema: &Schema, value: &Value, path: &mut String) {
        let checks = &schema.checks;
        let fail = |branch: &Schema, path: &mut String| {
            let mut inner = Validation { errors: Vec::new() };
            inner.check(branch, value, None, path);
            inner.errors
        };
        let outcomes: Vec<Vec<FieldError>> = checks.all_of.iter().map(|branch| fail(branch, path)).collect();
        let held = outcomes.iter().filter(|errors| errors.is_empty()).count();
        if held < outcomes.len() {
            let none = if held == 0 { ". None validated" } else { "" };
            let detail = format!("{path:?} must validate all the schemas (allOf){none}");
            self.report("FieldValueInvalid", path, format!("Invalid value: \"\": {detail}"));
        }
        self.errors.extend(outcomes.into_iter().flatten());
        self.errors.truncate(MAX_ERRORS);
        for (branches, exactly_one) in [(&checks.any_of, false), (&checks.one_of, true)] {
            if branches.is_empty() {
                continue;
            }
            let outcomes: Vec<Vec<FieldError>> = branches.iter().map(|branch| fail(branch, path)).collect();
            let held = outcomes.iter().filter(|errors| errors.is_empty()).count();
            let detail = match (held, exactly_one) {
                (1, _) | (2.., false) => continue,
                (0, false) => "must validate at least one schema (anyOf)".to_owned(),
                (0, true) => "must validate one and only one schema (oneOf). Found none valid".to_owned(),
                (2.., true) => {
                    format!("must validate one and only one schema (oneOf). Found {held} valid alternatives")
                }
            };
            self.report("FieldValueInvalid", path, format!("Invalid value: \"\": {path:?} {detail}"));
            if held == 0
                && let Some(closest) = outcomes.into_iter().min_by_key(Vec::len)
            {
                self.errors.extend(closest);
                self.errors.truncate(MAX_ERRORS);
            }
        }
        if let Some(not) = &checks.not
            && fail(not, path).is_empty()
        {
            self.report(
                "FieldValueInvalid",
                path,
                format!("Invalid value: \"\": {path:?} must not validate the schema (not)"),
            );
        }
    }

    /// Validates that the elements of sets and keyed lists are unique.
    fn unique(&mut self, schema: &Schema, value: &Value, path: &mut String) {
        let length = path.len();
        match value {
            Value::Object(map) => {
                for (name, child) in map {
                    let Some(field) = schema.field(name) else { continue };
                    match schema.properties.contains_key(name) {
                        true => push_field(path, name),
                        false => path.push_str(&format!("[{name}]")),
                    }
                    self.unique(field, child, path);
                    path.truncate(length);
                }
            }
            Value::Array(items) => {
                let stray = items.iter().position(|item| !item.is_object() && !item.is_null());
                if let (ListKind::Map(_), Some(index)) = (&schema.list, stray) {
                    push_index(path, index);
                    let shown = shown(&items[index]);
                    self.report(
                        "FieldValueInvalid",
                        path,
                        format!("Invalid value: {shown}: must be an object for an array of list-type map"),
                    );
                    path.truncate(length);
                    return;
                }
                let identity = |item: &Value| match &schema.list {
                    ListKind::Atomic => None,
                    ListKind::Set => Some(item.clone()),
                    ListKind::Map(names) => Some(key(names, item)),
                };
                let mut seen: HashMap<Value, usize> = HashMap::new();
                for (index, item) in items.iter().enumerate() {
                    let Some(key) = identity(item) else { break };
                    let count = seen.entry(key).or_default();
                    *count += 1;
                    // Reported once, at the second occurrence.
                    if *count == 2 {
                        push_index(path, index);
                        let shown = identity(item).as_ref().map(shown).unwrap_or_default();
                        self.report("FieldValueDuplicate", path, format!("Duplicate value: {shown}"));
                        path.truncate(length);
                    }
                }
                if let Some(field) = &schema.items {
                    for (index, item) in items.iter().enumerate() {
                        push_index(path, index);
                        self.unique(field, item, path);
                        path.truncate(length);
                    }
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
}

/// Equality by value: `1` and `1.0` are equal.
fn equal(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| a == b)
}

fn too_many(size: u64, most: u64) -> String {
    let items = if most == 1 { "item" } else { "items" };
    format!("Too many: {size}: must have at most {most} {items}")
}

/// A number without the `.0` that Rust adds.
fn plain(number: f64) -> String {
    number.to_string()
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// The expected type, if `value` does not have it.
fn wrong_type(kind: SchemaType, value: &Value) -> Option<&'static str> {
    // As for kube-apiserver, an integer beyond 64 bits is a float, and one beyond 2^53 is not exact.
    let whole = |value: &Value| {
        value.is_i64()
            || value.as_f64().is_some_and(|number| number.fract() == 0.0 && number.abs() < MAX_EXACT)
    };
    let (fits, name) = match kind {
        SchemaType::Any => (true, ""),
        SchemaType::Object => (value.is_object(), "object"),
        SchemaType::Array => (value.is_array(), "array"),
        SchemaType::String => (value.is_string(), "string"),
        SchemaType::Integer => (whole(value), "integer"),
        SchemaType::Number => (value.is_number(), "number"),
        SchemaType::Boolean => (value.is_boolean(), "boolean"),
        SchemaType::IntOrString => (value.is_string() || whole(value), "integer,string"),
    };
    (!fits).then_some(name)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::schema::Schema;

    fn schema(spec: Value) -> Schema {
        Schema::from_openapi(&json!({"type": "object", "properties": {"spec": spec}})).expect("structural")
    }

    #[test]
    fn violation_names_field_value_and_reason() {
        let spec = json!({"type": "object", "required": ["model"], "properties": {
            "model": {"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^[a-z]+$"},
            "replicas": {"type": "integer", "format": "int32", "minimum": 1, "maximum": 8},
            "share": {"type": "number", "minimum": 0, "exclusiveMinimum": true, "multipleOf": 0.5},
            "mode": {"type": "string", "enum": ["Auto", "Off"]},
            "port": {"x-kubernetes-int-or-string": true},
            "since": {"type": "string", "format": "date-time"},
            "tags": {"type": "array", "x-kubernetes-list-type": "set", "maxItems": 2, "items": {"type": "string"}},
            "nodes": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
                      "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}},
            "labels": {"type": "object", "maxProperties": 1, "additionalProperties": {"type": "string"}},
            "source": {"type": "object", "properties": {"file": {"type": "string"}, "url": {"type": "string"}},
                       "oneOf": [{"required": ["file"]}, {"required": ["url"]}]},
            "maybe": {"type": "string", "nullable": true},
            "level": {"type": "integer", "nullable": true, "enum": [1, 2]},
        }});
        let schema = schema(spec);
        for (name, spec, expected) in [
            (
                "fine",
                json!({"model": "ab", "replicas": 1, "port": "http", "maybe": null, "share": 1.5}),
                vec![],
            ),
            ("missing", json!({}), vec!["spec.model: Required value"]),
            (
                "wrong type",
                json!({"model": "ab", "replicas": "two"}),
                vec![
                    r#"spec.replicas: Invalid value: "string": spec.replicas in body must be of type integer: "string""#,
                ],
            ),
            (
                "too small",
                json!({"model": "ab", "replicas": 0}),
                vec![
                    "spec.replicas: Invalid value: 0: spec.replicas in body should be greater than or equal to 1",
                ],
            ),
            (
                "too large",
                json!({"model": "ab", "replicas": 9}),
                vec![
                    "spec.replicas: Invalid value: 9: spec.replicas in body should be less than or equal to 8",
                ],
            ),
            (
                "zero excluded",
                json!({"model": "ab", "share": 0}),
                vec!["spec.share: Invalid value: 0: spec.share in body should be greater than 0"],
            ),
            (
                "no multiple",
                json!({"model": "ab", "share": 0.7}),
                vec!["spec.share: Invalid value: 0.7: spec.share in body should be a multiple of 0.5"],
            ),
            (
                "too short",
                json!({"model": "a"}),
                vec![r#"spec.model: Invalid value: "a": spec.model in body should be at least 2 chars long"#],
            ),
            (
                "too long",
                json!({"model": "abcde"}),
                vec!["spec.model: Too long: may not be more than 4 bytes"],
            ),
            (
                "pattern",
                json!({"model": "A1"}),
                vec![r#"spec.model: Invalid value: "A1": spec.model in body should match '^[a-z]+$'"#],
            ),
            (
                "enum",
                json!({"model": "ab", "mode": "On"}),
                vec![r#"spec.mode: Unsupported value: "On": supported values: "Auto", "Off""#],
            ),
            (
                "int or string",
                json!({"model": "ab", "port": true}),
                vec![
                    r#"spec.port: Invalid value: "boolean": spec.port in body must be of type integer,string: "boolean""#,
                ],
            ),
            (
                "format",
                json!({"model": "ab", "since": "noon"}),
                vec![
                    r#"spec.since: Invalid value: "noon": spec.since in body must be of type date-time: "noon""#,
                ],
            ),
            (
                "a number where an object with a key belongs",
                json!({"model": "ab", "nodes": [1]}),
                vec![
                    r#"spec.nodes[0]: Invalid value: "integer": spec.nodes[0] in body must be of type object: "integer""#,
                    "spec.nodes[0]: Invalid value: 1: must be an object for an array of list-type map",
                ],
            ),
            (
                "an enum that does not list null",
                json!({"model": "ab", "level": null}),
                vec![r#"spec.level: Unsupported value: null: supported values: "1", "2""#],
            ),
            (
                "too many",
                json!({"model": "ab", "tags": ["a", "b", "c"]}),
                vec!["spec.tags: Too many: 3: must have at most 2 items"],
            ),
            (
                "set",
                json!({"model": "ab", "tags": ["a", "a"]}),
                vec![r#"spec.tags[1]: Duplicate value: "a""#],
            ),
            (
                "keyed list",
                json!({"model": "ab", "nodes": [{"name": "n"}, {"name": "n"}]}),
                vec![r#"spec.nodes[1]: Duplicate value: {"name":"n"}"#],
            ),
            (
                "one of neither",
                json!({"model": "ab", "source": {}}),
                vec![
                    r#"spec.source: Invalid value: "": "spec.source" must validate one and only one schema (oneOf). Found none valid"#,
                    "spec.source.file: Required value",
                ],
            ),
            (
                "one of both",
                json!({"model": "ab", "source": {"file": "a", "url": "b"}}),
                vec![
                    r#"spec.source: Invalid value: "": "spec.source" must validate one and only one schema (oneOf). Found 2 valid alternatives"#,
                ],
            ),
            (
                "map size",
                json!({"model": "ab", "labels": {"a": "1", "b": "2"}}),
                vec!["spec.labels: Too many: 2: must have at most 1 item"],
            ),
            (
                "null",
                json!({"model": null}),
                vec![
                    r#"spec.model: Invalid value: "null": spec.model in body must be of type string: "null""#,
                ],
            ),
        ] {
            let found: Vec<String> =
                schema.validate(&json!({ "spec": spec }), None).iter().map(ToString::to_string).collect();
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn unchanged_invalid_value_is_ratcheted_and_changed_one_fails() {
        let schema = schema(json!({"type": "object", "properties": {
            "a": {"type": "string", "maxLength": 1}, "b": {"type": "string", "maxLength": 1}}}));
        let old = json!({"spec": {"a": "long", "b": "x"}});
        let touched_elsewhere = json!({"spec": {"a": "long", "b": "y"}});
        let touched = json!({"spec": {"a": "longer", "b": "x"}});
        assert_eq!(schema.validate(&touched_elsewhere, Some(&old)), []);
        assert_eq!(schema.validate(&touched, Some(&old)).len(), 1);
        assert_eq!(schema.validate(&touched_elsewhere, None).len(), 1);
    }

    #[test]
    fn metadata_is_checked_whatever_the_schema_says() {
        let schema = schema(json!({"type": "object"}));
        let found = schema.validate(&json!({"metadata": {"name": "n", "labels": {"a": 1}}}), None);
        assert_eq!(
            found.iter().map(ToString::to_string).collect::<Vec<_>>(),
            [
                r#"metadata.labels.a: Invalid value: "integer": metadata.labels.a in body must be of type string: "integer""#
            ]
        );
    }
}
