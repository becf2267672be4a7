//! Defaulting: writes the defaults of absent fields into the object.
//!
//! Not here: defaults of built-in kinds that depend on other fields; those are in the code of their kinds.

use serde_json::Value;

use super::{Additional, Issue, Schema, prune, validate};

/// Drops nulls that the schema does not allow and fills in its defaults, parents before children.
pub fn fill(schema: &Schema, value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|name, child| {
                let field = schema.field(name);
                !child.is_null() || field.is_none_or(|field| field.nullable || field.default.is_some())
            });
            for (name, field) in &schema.properties {
                let Some(default) = &field.default else { continue };
                let missing = match map.get(name) {
                    None => true,
                    Some(child) => child.is_null() && !field.nullable,
                };
                if missing {
                    map.insert(name.clone(), default.clone());
                }
            }
            for (name, child) in map.iter_mut() {
                if let Some(field) = schema.properties.get(name) {
                    fill(field, child);
                } else if let Additional::Typed(field) = &schema.additional {
                    replace_null(field, child);
                    fill(field, child);
                }
            }
        }
        Value::Array(items) => {
            let Some(field) = &schema.items else { return };
            for item in items {
                replace_null(field, item);
                fill(field, item);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn replace_null(schema: &Schema, value: &mut Value) {
    if value.is_null()
        && !schema.nullable
        && let Some(default) = &schema.default
    {
        *value = default.clone();
    }
}

/// Validates that every default is valid under its own schema and that pruning keeps all of it.
pub fn check(schema: &Schema) -> Vec<Issue> {
    let mut issues = Vec::new();
    visit(schema, "", &mut issues);
    issues
}

fn visit(schema: &Schema, path: &str, issues: &mut Vec<Issue>) {
    let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    if let Some(default) = &schema.default {
        let mut filled = default.clone();
        fill(schema, &mut filled);
        let unknown = prune::prune(schema, &mut filled);
        issues.extend(unknown.into_iter().map(|field| Issue {
            path: below(&format!("default.{field}")),
            message: "Invalid value: must not have unknown fields".into(),
        }));
        issues.extend(validate::validate_object(schema, &filled, None).into_iter().map(|error| Issue {
            path: below(&format!("default.{}", error.field)).trim_end_matches('.').to_owned(),
            message: error.message,
        }));
    }
    for (name, field) in &schema.properties {
        visit(field, &below(&format!("properties[{name}]")), issues);
    }
    if let Additional::Typed(field) = &schema.additional {
        visit(field, &below("additionalProperties"), issues);
    }
    if let Some(field) = &schema.items {
        visit(field, &below("items"), issues);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::schema::Schema;

    #[test]
    fn defaults_fill_parents_first_and_replace_forbidden_nulls() {
        let schema = Schema::from_openapi(&json!({
            "type": "object",
            "properties": {"spec": {"type": "object", "default": {}, "properties": {
                "replicas": {"type": "integer", "default": 1},
                "strategy": {"type": "object", "default": {}, "properties": {"mode": {"type": "string", "default": "Auto"}}},
                "optional": {"type": "object", "properties": {"x": {"type": "integer", "default": 7}}},
                "note": {"type": "string"},
                "maybe": {"type": "string", "nullable": true, "default": "d"},
                "list": {"type": "array", "items": {"type": "object", "properties": {"port": {"type": "integer", "default": 80}}}},
            }}}
        }))
        .expect("structural");
        for (name, before, after) in [
            (
                "nothing",
                json!({}),
                json!({"spec": {"replicas": 1, "strategy": {"mode": "Auto"}, "maybe": "d"}}),
            ),
            (
                "nulls",
                json!({"spec": {"replicas": null, "note": null, "maybe": null, "strategy": {"mode": "Off"}}}),
                json!({"spec": {"replicas": 1, "maybe": null, "strategy": {"mode": "Off"}}}),
            ),
            (
                "children of what is there",
                json!({"spec": {"optional": {}, "list": [{}, {"port": 1}], "maybe": "m"}}),
                json!({"spec": {"replicas": 1, "strategy": {"mode": "Auto"}, "maybe": "m", "optional": {"x": 7},
                                "list": [{"port": 80}, {"port": 1}]}}),
            ),
        ] {
            let mut object = before;
            schema.default(&mut object);
            assert_eq!(object, after, "{name}");
        }
    }

    #[test]
    fn a_default_that_its_schema_forbids_is_refused() {
        for (field, expected) in [
            (json!({"type": "integer", "default": "x"}), "must be of type integer"),
            (json!({"type": "integer", "minimum": 2, "default": 1}), "greater than or equal to 2"),
            (
                json!({"type": "object", "properties": {}, "default": {"a": 1}}),
                "must not have unknown fields",
            ),
        ] {
            let issues = Schema::from_openapi(
                &json!({"type": "object", "properties": {"spec": {"type": "object", "properties": {"f": field}}}}),
            )
            .expect_err(expected);
            assert_eq!(issues.len(), 1, "{issues:?}");
            assert!(issues[0].path.starts_with("properties[spec].properties[f].default"), "{}", issues[0]);
            assert!(issues[0].message.contains(expected), "{}", issues[0]);
        }
    }
}
