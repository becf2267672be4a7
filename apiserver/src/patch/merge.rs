//! JSON Merge Patch (RFC 7386): maps merge, `null` removes, everything else replaces.

use serde_json::{Map, Value};

/// Merges `patch` into `live` and returns the outcome.
pub fn merge_patch(live: &Value, patch: &Value) -> Value {
    let Value::Object(changes) = patch else {
        return patch.clone();
    };
    let mut merged = match live {
        Value::Object(map) => map.clone(),
        _ => Map::new(),
    };
    for (key, change) in changes {
        if change.is_null() {
            merged.remove(key);
        } else {
            let next = merge_patch(merged.get(key).unwrap_or(&Value::Null), change);
            merged.insert(key.clone(), next);
        }
    }
    Value::Object(merged)
}
