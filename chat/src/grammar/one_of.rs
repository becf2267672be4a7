//! `oneOf` in JSON Schemas. A grammar is a union: exactly one of several schemas is any one of them where no two have an
//! instance in common, as generated schemas of tagged unions do. Where that cannot be shown, the schema is refused.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::forms::json_type;

/// References followed for one schema.
const MAX_REFERENCES: usize = 8;

/// The schema with `anyOf` in place of each `oneOf` whose schemas exclude each other.
pub(super) fn as_unions(schema: Value) -> Value {
    let root = schema.clone();
    let mut schema = schema;
    rewrite(&mut schema, &root);
    schema
}

fn rewrite(schema: &mut Value, root: &Value) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(|item| rewrite(item, root)),
        Value::Object(fields) => {
            let excludes =
                |schemas: &Value| schemas.as_array().is_some_and(|all| exclude_each_other(all, root));
            if !fields.contains_key("anyOf") && fields.get("oneOf").is_some_and(excludes) {
                // In the place where it was: keywords have no order.
                let schemas = fields.remove("oneOf").unwrap_or_default();
                fields.insert("anyOf".to_owned(), schemas);
            }
            fields.values_mut().for_each(|value| rewrite(value, root));
        }
        _ => {}
    }
}

fn exclude_each_other(schemas: &[Value], root: &Value) -> bool {
    let all: Vec<&Map<String, Value>> = schemas.iter().filter_map(|schema| resolved(schema, root)).collect();
    all.len() == schemas.len()
        && all.iter().enumerate().all(|(at, one)| all[..at].iter().all(|other| exclude(one, other, root)))
}

/// Whether no instance is of both.
fn exclude(one: &Map<String, Value>, other: &Map<String, Value>, root: &Value) -> bool {
    if let (Some(one), Some(other)) = (values(one), values(other)) {
        return one.iter().all(|value| !other.contains(value));
    }
    let (kinds, others) = (types(one), types(other));
    if kinds.is_disjoint(&others) {
        return true;
    }
    // Two objects that need a property of the same name, with other values.
    let object = BTreeSet::from(["object"]);
    kinds == object
        && others == object
        && required(one).intersection(&required(other)).any(|key| {
            let of = |schema: &Map<String, Value>| {
                let property = schema.get("properties").and_then(|properties| properties.get(*key));
                property.and_then(|property| resolved(property, root)).cloned()
            };
            match (of(one), of(other)) {
                (Some(one), Some(other)) => match (values(&one), values(&other)) {
                    (Some(one), Some(other)) => one.iter().all(|value| !other.contains(value)),
                    _ => types(&one).is_disjoint(&types(&other)),
                },
                _ => false,
            }
        })
}

/// The schema that a reference in the document names; `None` where it is none, or has more than the reference.
fn resolved<'a>(schema: &'a Value, root: &'a Value) -> Option<&'a Map<String, Value>> {
    let mut schema = schema;
    for _ in 0..MAX_REFERENCES {
        let fields = schema.as_object()?;
        let Some(reference) = fields.get("$ref") else { return Some(fields) };
        schema = root.pointer(reference.as_str()?.strip_prefix('#')?)?;
    }
    None
}

/// All values of an `enum` or `const`.
fn values(schema: &Map<String, Value>) -> Option<Vec<&Value>> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => Some(vec![value]),
        (None, Some(Value::Array(values))) => Some(values.iter().collect()),
        _ => None,
    }
}

/// The types of its instances, of which an integer is a number.
fn types(schema: &Map<String, Value>) -> BTreeSet<&str> {
    const ALL: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];
    let name = |kind: &'_ str| {
        ALL.into_iter().find(|name| *name == kind || (kind == "integer" && *name == "number"))
    };
    let named = |value: &Value| value.as_str().and_then(name);
    if let Some(values) = values(schema) {
        return values.into_iter().map(json_type).collect();
    }
    match schema.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().filter_map(named).collect(),
        Some(kind) => named(kind).into_iter().collect(),
        None => ALL.into(),
    }
}

fn required(schema: &Map<String, Value>) -> BTreeSet<&str> {
    let keys = schema.get("required").and_then(Value::as_array).into_iter().flatten();
    keys.filter_map(Value::as_str).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn schemas_that_exclude_each_other_are_a_union() {
        let tagged = |tag: &str| json!({"type": "object", "required": ["kind"], "properties": {"kind": {"const": tag}}});
        let loose = json!({"type": "object", "properties": {"kind": {"const": "c"}}});
        for (schemas, is_union) in [
            (json!([{"type": "string"}, {"type": "null"}]), true),
            (json!([{"type": "integer"}, {"type": "number"}]), false),
            (json!([{"type": ["string", "null"]}, {"type": "null"}]), false),
            (json!([{"const": 1}, {"const": 2}, {"enum": ["a", "b"]}]), true),
            (json!([{"enum": ["a"]}, {"enum": ["b", "a"]}]), false),
            (json!([{"const": "a"}, {"type": "integer"}]), true),
            (json!([{"const": "a"}, {"type": "string"}]), false),
            (json!([tagged("a"), tagged("b")]), true),
            (json!([tagged("a"), tagged("a")]), false),
            (json!([tagged("a"), loose]), false),
            (json!([{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]), true),
            (json!([{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}]), false),
            (json!([{"$ref": "#/$defs/loop"}, {"type": "null"}]), false),
            (json!([{}, {"type": "null"}]), false),
            (json!([true, {"type": "null"}]), false),
        ] {
            let of = |name: &str| {
                json!({"type": "array", "items": {name: schemas, "title": "t"},
                       "$defs": {"x": tagged("x"), "y": tagged("y"), "loop": {"$ref": "#/$defs/loop"}}})
            };
            let expected = if is_union { of("anyOf") } else { of("oneOf") };
            assert_eq!(as_unions(of("oneOf")), expected, "{schemas}");
        }
    }
}
