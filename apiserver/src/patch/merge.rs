//! JSON Merge Patch (RFC 7386): maps merge, `null` removes, everything else replaces.
//!
//! Not here: merging lists, which requires keys; see [`super::strategic`] and [`super::apply`].

use serde_json::Value;

/// Merges `patch` into `live` and returns the result.
pub fn merge_patch(live: &Value, patch: &Value) -> Value {
    let mut merged = live.clone();
    json_patch::merge(&mut merged, patch);
    merged
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::merge_patch;

    #[test]
    fn maps_merge_nulls_remove_and_the_rest_replaces() {
        for (live, patch, expected) in [
            (json!({"a": "b"}), json!({"a": "c"}), json!({"a": "c"})),
            (json!({"a": "b"}), json!({"b": "c"}), json!({"a": "b", "b": "c"})),
            (json!({"a": "b", "b": "c"}), json!({"a": null}), json!({"b": "c"})),
            (json!({"a": ["b"]}), json!({"a": ["c"]}), json!({"a": ["c"]})),
            (json!({"a": {"b": "c"}}), json!({"a": {"b": "d", "c": null}}), json!({"a": {"b": "d"}})),
            (json!({}), json!({"a": {"bb": {"ccc": null}}}), json!({"a": {"bb": {}}})),
            (json!({"a": 1}), json!([1]), json!([1])),
            (json!({"a": 1}), json!(null), json!(null)),
            (json!([1]), json!({"a": null, "b": {"c": null}}), json!({"b": {}})),
            (json!({"a": 1}), json!({"a": {"b": null, "c": 1}}), json!({"a": {"c": 1}})),
            (json!({"a": [{"b": 1}]}), json!({"a": [{"b": null}]}), json!({"a": [{"b": null}]})),
        ] {
            assert_eq!(merge_patch(&live, &patch), expected, "{live} + {patch}");
        }
    }
}
