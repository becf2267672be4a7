//! Pruning: removes fields that the schema does not describe.
//!
//! Not here: whether an unknown field is an error or a warning; callers get the paths.

use serde_json::Value;

use super::{Additional, Schema};

/// Removes fields that `schema` does not describe and returns their paths, sorted.
pub fn prune(schema: &Schema, object: &mut Value) -> Vec<String> {
    let mut removed = Vec::new();
    walk(Some(schema), object, &mut String::new(), &mut removed);
    removed.sort();
    removed
}

fn walk(schema: Option<&Schema>, value: &mut Value, path: &mut String, removed: &mut Vec<String>) {
    let keep = schema.is_some_and(|schema| schema.preserve_unknown);
    let length = path.len();
    match value {
        Value::Object(map) => {
            let mut unknown = Vec::new();
            for (name, child) in map.iter_mut() {
                push_field(path, name);
                match schema.map(|schema| (schema.properties.get(name), &schema.additional)) {
                    Some((Some(field), _)) => walk(Some(field), child, path, removed),
                    Some((None, Additional::Typed(field))) => {
                        walk(Some(field), child, path, removed);
                    }
                    Some((None, Additional::Anything)) => {
                        if !keep {
                            walk(None, child, path, removed);
                        }
                    }
                    Some((None, Additional::Denied)) | None => {
                        if !keep {
                            unknown.push(name.clone());
                            removed.push(path.clone());
                        }
                    }
                }
                path.truncate(length);
            }
            for name in unknown {
                map.remove(&name);
            }
        }
        Value::Array(items) => {
            let field = schema.and_then(|schema| schema.items.as_deref());
            if keep && field.is_none() {
                return;
            }
            for (index, item) in items.iter_mut().enumerate() {
                push_index(path, index);
                walk(field, item, path, removed);
                path.truncate(length);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Appends `.name`, or `name` at the root.
pub fn push_field(path: &mut String, name: &str) {
    if !path.is_empty() {
        path.push('.');
    }
    path.push_str(name);
}

/// Appends `[index]`.
pub fn push_index(path: &mut String, index: usize) {
    path.push_str(&format!("[{index}]"));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::schema::Schema;

    #[test]
    fn undescribed_fields_are_pruned_and_named() {
        let schema = Schema::from_openapi(&json!({
            "type": "object",
            "properties": {"spec": {"type": "object", "properties": {
                "known": {"type": "string"},
                "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true,
                         "properties": {"strict": {"type": "object", "properties": {"a": {"type": "string"}}}}},
                "list": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}}},
                "map": {"type": "object", "additionalProperties": {"type": "object", "properties": {"a": {"type": "string"}}}},
            }}}
        }))
        .expect("structural");
        let mut object = json!({
            "apiVersion": "e/v1", "kind": "K", "metadata": {"name": "n", "oops": 1}, "extra": 1,
            "spec": {"known": "x", "unknown": {"deep": 1}, "free": {"anything": {"at": "all"}, "strict": {"a": "1", "b": 2}},
                     "list": [{"a": "1"}, {"a": "1", "b": 2}], "map": {"k": {"a": "1", "b": 2}}},
        });
        assert_eq!(
            schema.prune(&mut object),
            [
                "extra",
                "metadata.oops",
                "spec.free.strict.b",
                "spec.list[1].b",
                "spec.map.k.b",
                "spec.unknown"
            ]
        );
        assert_eq!(
            object,
            json!({
                "apiVersion": "e/v1", "kind": "K", "metadata": {"name": "n"},
                "spec": {"known": "x", "free": {"anything": {"at": "all"}, "strict": {"a": "1"}},
                         "list": [{"a": "1"}, {"a": "1"}], "map": {"k": {"a": "1"}}},
            })
        );
    }
}
