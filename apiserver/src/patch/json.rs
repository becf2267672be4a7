//! JSON Patch (RFC 6902): a list of operations, applied atomically.
//!
//! Not here: which objects accept it, and what happens to the result.

use serde_json::Value;

/// Maximum operations of one patch, as Kubernetes documents it.
pub const MAX_OPERATIONS: usize = 10_000;

/// Maximum bytes that `copy` operations may add: the size of a request body; without it a short patch could
/// fill the memory.
const MAX_COPIED: usize = 3 * 1024 * 1024;

/// Why a JSON patch failed.
#[derive(Debug, thiserror::Error)]
pub enum JsonPatchError {
    /// The body is not a list of RFC 6902 operations (400).
    #[error("error decoding patch: {0}")]
    Malformed(String),
    /// More operations than [`MAX_OPERATIONS`] (413).
    #[error("The allowed maximum operations in a JSON patch is {MAX_OPERATIONS}, got {0}; split the patch")]
    TooMany(usize),
    /// An operation failed on the live object, including a failed `test` (422).
    #[error("{0}")]
    Refused(String),
}

/// Applies `patch` (a JSON list of operations) to `live` and returns the result.
pub fn json_patch(live: &Value, patch: &Value) -> Result<Value, JsonPatchError> {
    let operations = patch
        .as_array()
        .ok_or_else(|| JsonPatchError::Malformed("a JSON patch is a list of operations".into()))?;
    if operations.len() > MAX_OPERATIONS {
        return Err(JsonPatchError::TooMany(operations.len()));
    }
    let mut document = live.clone();
    let mut copied = 0;
    for (index, operation) in operations.iter().enumerate() {
        let text = |name: &str| {
            operation[name].as_str().ok_or_else(|| {
                JsonPatchError::Malformed(format!("operation {index} ({operation}) has no string {name:?}"))
            })
        };
        let value = || {
            operation.get("value").cloned().ok_or_else(|| {
                JsonPatchError::Malformed(format!("operation {index} ({operation}) has no \"value\""))
            })
        };
        let path = text("path")?;
        match text("op")? {
            "add" => add(&mut document, path, value()?)?,
            "remove" => drop(remove(&mut document, path)?),
            "replace" => {
                let value = value()?;
                let place = document.pointer_mut(path).ok_or_else(|| missing("replace", path))?;
                *place = value;
            }
            "move" => {
                let from = text("from")?;
                if path.strip_prefix(from).is_some_and(|rest| rest.starts_with('/')) {
                    return Err(JsonPatchError::Refused(format!(
                        "move operation cannot move {from:?} into itself at {path:?}"
                    )));
                }
                let value = remove(&mut document, from)?;
                add(&mut document, path, value)?;
            }
            "copy" => {
                let from = text("from")?;
                let value = document.pointer(from).cloned().ok_or_else(|| missing("copy", from))?;
                copied += value.to_string().len();
                if copied > MAX_COPIED {
                    return Err(JsonPatchError::Refused(format!(
                        "copy operations would add {copied} bytes, more than the {MAX_COPIED} allowed"
                    )));
                }
                add(&mut document, path, value)?;
            }
            "test" => {
                let wanted = value()?;
                // A test for null also succeeds on a missing field.
                let found = document.pointer(path).unwrap_or(&Value::Null);
                if !same(found, &wanted) {
                    return Err(JsonPatchError::Refused(format!("testing value {path} failed: test failed")));
                }
            }
            other => {
                return Err(JsonPatchError::Malformed(format!(
                    "operation {index} has the unknown op {other:?}; known are add, remove, replace, move, copy and test"
                )));
            }
        }
    }
    Ok(document)
}

/// Equality by value: `1` and `1.0` are equal.
fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| a == b)
}

fn missing(operation: &str, path: &str) -> JsonPatchError {
    JsonPatchError::Refused(format!("{operation} operation does not apply: doc is missing path: {path:?}"))
}

/// The parent's pointer and the last token, unescaped.
fn split(path: &str) -> Result<(&str, String), JsonPatchError> {
    match path.rsplit_once('/') {
        Some((parent, token)) => Ok((parent, token.replace("~1", "/").replace("~0", "~"))),
        None => Err(JsonPatchError::Refused(format!("path {path:?} does not begin with a slash"))),
    }
}

fn add(document: &mut Value, path: &str, value: Value) -> Result<(), JsonPatchError> {
    if path.is_empty() {
        *document = value;
        return Ok(());
    }
    let (parent, token) = split(path)?;
    match document.pointer_mut(parent) {
        Some(Value::Object(map)) => {
            map.insert(token, value);
            Ok(())
        }
        Some(Value::Array(items)) => {
            let index = if token == "-" { Some(items.len()) } else { index(&token) };
            match index.filter(|index| *index <= items.len()) {
                Some(index) => {
                    items.insert(index, value);
                    Ok(())
                }
                None => Err(JsonPatchError::Refused(format!(
                    "add operation does not apply: {path:?} is no place in a list of {}",
                    items.len()
                ))),
            }
        }
        _ => Err(missing("add", path)),
    }
}

fn remove(document: &mut Value, path: &str) -> Result<Value, JsonPatchError> {
    let (parent, token) = split(path)?;
    let removed = match document.pointer_mut(parent) {
        Some(Value::Object(map)) => map.remove(&token),
        Some(Value::Array(items)) => {
            index(&token).filter(|index| *index < items.len()).map(|index| items.remove(index))
        }
        _ => None,
    };
    removed.ok_or_else(|| missing("remove", path))
}

/// A list index: digits without a leading zero.
fn index(token: &str) -> Option<usize> {
    (token == "0" || !token.starts_with(['0', '+'])).then(|| token.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{JsonPatchError, MAX_OPERATIONS, json_patch};

    #[test]
    fn operations_do_what_the_rfc_says() {
        let live = json!({"a": {"b": 1, "x/y": 2, "m~n": 3}, "list": [1, 2, 3]});
        for (name, patch, want) in [
            (
                "add a field",
                json!([{"op": "add", "path": "/a/c", "value": 9}]),
                json!({"a": {"b": 1, "x/y": 2, "m~n": 3, "c": 9}, "list": [1, 2, 3]}),
            ),
            (
                "insert",
                json!([{"op": "add", "path": "/list/1", "value": 9}]),
                json!({"a": {"b": 1, "x/y": 2, "m~n": 3}, "list": [1, 9, 2, 3]}),
            ),
            (
                "append",
                json!([{"op": "add", "path": "/list/-", "value": 9}]),
                json!({"a": {"b": 1, "x/y": 2, "m~n": 3}, "list": [1, 2, 3, 9]}),
            ),
            (
                "escapes",
                json!([{"op": "remove", "path": "/a/x~1y"}, {"op": "remove", "path": "/a/m~0n"}]),
                json!({"a": {"b": 1}, "list": [1, 2, 3]}),
            ),
            (
                "replace",
                json!([{"op": "replace", "path": "/list", "value": []}]),
                json!({"a": {"b": 1, "x/y": 2, "m~n": 3}, "list": []}),
            ),
            (
                "move",
                json!([{"op": "move", "from": "/list/0", "path": "/a"}]),
                json!({"a": 1, "list": [2, 3]}),
            ),
            (
                "copy",
                json!([{"op": "copy", "from": "/list/0", "path": "/c"}]),
                json!({"a": {"b": 1, "x/y": 2, "m~n": 3}, "list": [1, 2, 3], "c": 1}),
            ),
            (
                "a test that holds",
                json!([{"op": "test", "path": "/a/b", "value": 1.0}, {"op": "test", "path": "/no", "value": null}]),
                live.clone(),
            ),
            ("the root", json!([{"op": "replace", "path": "", "value": {"z": 1}}]), json!({"z": 1})),
        ] {
            assert_eq!(json_patch(&live, &patch).expect(name), want, "{name}");
        }
    }

    #[test]
    fn inapplicable_json_patch_is_refused_as_a_whole() {
        let live = json!({"a": {"b": 1}, "list": [1]});
        for (name, operation, malformed) in [
            ("a failed test", json!({"op": "test", "path": "/a/b", "value": 2}), false),
            ("nothing to remove", json!({"op": "remove", "path": "/a/c"}), false),
            ("nothing to replace", json!({"op": "replace", "path": "/a/c", "value": 1}), false),
            ("no parent", json!({"op": "add", "path": "/x/y", "value": 1}), false),
            ("beyond the list", json!({"op": "add", "path": "/list/2", "value": 1}), false),
            ("into itself", json!({"op": "move", "from": "/a", "path": "/a/b"}), false),
            ("no slash", json!({"op": "add", "path": "a", "value": 1}), false),
            ("unknown op", json!({"op": "frob", "path": "/a"}), true),
            ("no path", json!({"op": "remove"}), true),
            ("no value", json!({"op": "add", "path": "/a"}), true),
        ] {
            let error = json_patch(&live, &json!([operation])).expect_err(name);
            assert_eq!(matches!(error, JsonPatchError::Malformed(_)), malformed, "{name}: {error}");
        }
        assert!(json_patch(&live, &json!({})).is_err());
    }

    #[test]
    fn a_patch_has_limits() {
        let many = Value::from(vec![json!({"op": "test", "path": "/a", "value": 1}); MAX_OPERATIONS + 1]);
        assert!(matches!(json_patch(&json!({"a": 1}), &many), Err(JsonPatchError::TooMany(_))));
        let doubling: Vec<Value> =
            (0..40).map(|round| json!({"op": "copy", "from": "", "path": format!("/{round}")})).collect();
        assert!(matches!(json_patch(&json!({"a": "x"}), &doubling.into()), Err(JsonPatchError::Refused(_))));
    }
}
