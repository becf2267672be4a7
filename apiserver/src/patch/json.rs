//! JSON Patch (RFC 6902): a list of operations, applied atomically.
//!
//! Not here: which objects accept it, and what happens to the result.

use json_patch::jsonptr::{Pointer, PointerBuf};
use json_patch::{
    AddOperation, CopyOperation, MoveOperation, PatchErrorKind, PatchOperation, RemoveOperation,
    ReplaceOperation, TestOperation,
};
use serde_json::Value;

use crate::schema::bounds::MAX_DEPTH;

/// Maximum operations of one patch, as Kubernetes documents it.
pub const MAX_OPERATIONS: usize = 10_000;

/// Maximum bytes that `copy` operations may add: the size of a request body; without it a short patch could
/// fill the memory.
const MAX_COPIED: usize = 3 * 1024 * 1024;

/// Maximum bytes that `move` operations may nest deeper, as for `copy`: their depth is counted each time.
const MAX_MOVED_DEEPER: usize = MAX_COPIED;

/// Maximum elements of lists that inserting and removing others may shift: 10,000 inserts at the front of a list of
/// 200,000 would shift two thousand million.
const MAX_SHIFTED: usize = 50_000_000;

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
///
/// `json_patch` applies the operations, one at a time, because it bounds nothing, its errors do not name the
/// operation, and its `test` differs from Kubernetes' (a missing field is null, and `1` is `1.0`).
pub fn json_patch(live: &Value, patch: &Value) -> Result<Value, JsonPatchError> {
    let operations = patch
        .as_array()
        .ok_or_else(|| JsonPatchError::Malformed("a JSON patch is a list of operations".into()))?;
    if operations.len() > MAX_OPERATIONS {
        return Err(JsonPatchError::TooMany(operations.len()));
    }
    let mut document = live.clone();
    let (mut copied, mut moved, mut shifted) = (0, 0, 0);
    for (index, operation) in operations.iter().enumerate() {
        let operation = read(index, operation)?;
        let placed = match &operation {
            PatchOperation::Test(test) => {
                check(&document, test)?;
                continue;
            }
            PatchOperation::Add(add) => Some(&add.value),
            PatchOperation::Replace(replace) => Some(&replace.value),
            PatchOperation::Copy(copy) => {
                let value =
                    document.pointer(copy.from.as_str()).ok_or_else(|| missing("copy", &copy.from))?;
                copied += value.to_string().len();
                if copied > MAX_COPIED {
                    return Err(JsonPatchError::Refused(format!(
                        "copy operations would add {copied} bytes, more than the {MAX_COPIED} allowed"
                    )));
                }
                Some(value)
            }
            PatchOperation::Move(operation) if operation.path.count() > operation.from.count() => {
                let value = document
                    .pointer(operation.from.as_str())
                    .ok_or_else(|| missing("move", &operation.from))?;
                moved += value.to_string().len();
                if moved > MAX_MOVED_DEEPER {
                    return Err(JsonPatchError::Refused(format!(
                        "move operations would nest {moved} bytes deeper, more than the {MAX_MOVED_DEEPER} allowed"
                    )));
                }
                Some(value)
            }
            // Nothing gets deeper.
            PatchOperation::Move(_) | PatchOperation::Remove(_) => None,
        };
        let levels = MAX_DEPTH.checked_sub(operation.path().count());
        // A path may lead below the bound: managedFields nest deeper.
        let too_deep = |value| levels.is_none_or(|levels| is_deeper(value, levels));
        if placed.is_some_and(too_deep) {
            return Err(JsonPatchError::Refused(format!(
                "the patched object would nest deeper than the {MAX_DEPTH} levels allowed"
            )));
        }
        shifted += shifts(&document, &operation);
        if shifted > MAX_SHIFTED {
            return Err(JsonPatchError::Refused(format!(
                "its inserts and removals would shift {shifted} list elements, more than the {MAX_SHIFTED} allowed; replace the list instead"
            )));
        }
        json_patch::patch_unsafe(&mut document, std::slice::from_ref(&operation))
            .map_err(|error| refused(&document, &operation, &error.kind))?;
    }
    Ok(document)
}

/// The list that a path leads into.
fn list_around<'a>(document: &'a Value, path: &Pointer) -> Option<&'a Vec<Value>> {
    document.pointer(path.parent()?.as_str())?.as_array()
}

/// How many elements of lists move to another place.
fn shifts(document: &Value, operation: &PatchOperation) -> usize {
    let behind = |path: &Pointer| {
        let index = path.last().and_then(|token| token.encoded().parse::<usize>().ok());
        list_around(document, path).zip(index).map_or(0, |(list, index)| list.len().saturating_sub(index))
    };
    match operation {
        PatchOperation::Add(AddOperation { path, .. }) | PatchOperation::Remove(RemoveOperation { path }) => {
            behind(path)
        }
        PatchOperation::Copy(CopyOperation { path, .. }) => behind(path),
        PatchOperation::Move(MoveOperation { from, path }) => behind(from) + behind(path),
        PatchOperation::Replace(_) | PatchOperation::Test(_) => 0,
    }
}

/// Whether maps and lists nest deeper than `levels`.
fn is_deeper(value: &Value, levels: usize) -> bool {
    let below = |child: &Value| is_deeper(child, levels - 1);
    match value {
        Value::Object(_) | Value::Array(_) if levels == 0 => true,
        Value::Object(map) => map.values().any(below),
        Value::Array(items) => items.iter().any(below),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// The operation at `index` of a patch.
fn read(index: usize, operation: &Value) -> Result<PatchOperation, JsonPatchError> {
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
    let path = pointer(text("path")?)?;
    Ok(match text("op")? {
        "add" => PatchOperation::Add(AddOperation { path, value: value()? }),
        "remove" => PatchOperation::Remove(RemoveOperation { path }),
        "replace" => PatchOperation::Replace(ReplaceOperation { path, value: value()? }),
        "move" => PatchOperation::Move(MoveOperation { from: pointer(text("from")?)?, path }),
        "copy" => PatchOperation::Copy(CopyOperation { from: pointer(text("from")?)?, path }),
        "test" => PatchOperation::Test(TestOperation { path, value: value()? }),
        other => {
            return Err(JsonPatchError::Malformed(format!(
                "operation {index} has the unknown op {other:?}; known are add, remove, replace, move, copy and test"
            )));
        }
    })
}

/// A JSON pointer. As in Kubernetes, a tilde before neither 0 nor 1 stands for itself; `jsonptr` refuses it.
fn pointer(path: &str) -> Result<PointerBuf, JsonPatchError> {
    if path.is_empty() {
        return Ok(PointerBuf::new());
    }
    let tokens = path
        .strip_prefix('/')
        .ok_or_else(|| JsonPatchError::Refused(format!("path {path:?} does not begin with a slash")))?;
    let unescaped = |token: &str| token.replace("~1", "/").replace("~0", "~");
    Ok(PointerBuf::from_tokens(tokens.split('/').map(unescaped)))
}

/// Executes a `test`. A test for null also succeeds on a missing field.
fn check(document: &Value, TestOperation { path, value }: &TestOperation) -> Result<(), JsonPatchError> {
    let found = document.pointer(path.as_str()).unwrap_or(&Value::Null);
    if same(found, value) {
        return Ok(());
    }
    Err(JsonPatchError::Refused(format!("testing value {path} failed: test failed")))
}

/// Equality by value: `1` and `1.0` are equal.
fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| a == b)
}

/// Why an operation does not apply to the document.
fn refused(document: &Value, operation: &PatchOperation, kind: &PatchErrorKind) -> JsonPatchError {
    let (name, from) = match operation {
        PatchOperation::Add(_) => ("add", None),
        PatchOperation::Remove(_) => ("remove", None),
        PatchOperation::Replace(_) => ("replace", None),
        PatchOperation::Move(operation) => ("move", Some(&operation.from)),
        PatchOperation::Copy(operation) => ("copy", Some(&operation.from)),
        PatchOperation::Test(_) => ("test", None),
    };
    let path = operation.path();
    match (kind, from) {
        (PatchErrorKind::CannotMoveInsideItself, Some(from)) => {
            return JsonPatchError::Refused(format!(
                "move operation cannot move {:?} into itself at {:?}",
                from.as_str(),
                path.as_str()
            ));
        }
        (PatchErrorKind::InvalidFromPointer, Some(from)) => return missing(name, from),
        _ => {}
    }
    match list_around(document, path) {
        Some(list) => JsonPatchError::Refused(format!(
            "{name} operation does not apply: {:?} is no place in a list of {}",
            path.as_str(),
            list.len()
        )),
        None => missing(name, path),
    }
}

fn missing(operation: &str, path: &Pointer) -> JsonPatchError {
    JsonPatchError::Refused(format!(
        "{operation} operation does not apply: doc is missing path: {:?}",
        path.as_str()
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{JsonPatchError, MAX_DEPTH, MAX_OPERATIONS, json_patch};

    #[test]
    fn operations_do_what_the_rfc_says() {
        let live = json!({"a": {"b": 1, "x/y": 2, "m~n": 3}, "list": [1, 2, 3]});
        for (name, patch, expected) in [
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
            ("add the root", json!([{"op": "add", "path": "", "value": [1]}]), json!([1])),
            (
                "a tilde that escapes nothing",
                json!([{"op": "remove", "path": "/a"}, {"op": "add", "path": "/x~2~", "value": 1}]),
                json!({"x~2~": 1, "list": [1, 2, 3]}),
            ),
            (
                "an escaped tilde before a digit",
                json!([{"op": "remove", "path": "/a"}, {"op": "add", "path": "/~01", "value": 1}]),
                json!({"~1": 1, "list": [1, 2, 3]}),
            ),
            (
                "the empty name",
                json!([{"op": "remove", "path": "/a"}, {"op": "add", "path": "/", "value": 1}]),
                json!({"": 1, "list": [1, 2, 3]}),
            ),
            ("a move to the same place", json!([{"op": "move", "from": "/a", "path": "/a"}]), live.clone()),
            (
                "a move to a name with the same beginning",
                json!([{"op": "move", "from": "/a", "path": "/ab"}]),
                json!({"ab": {"b": 1, "x/y": 2, "m~n": 3}, "list": [1, 2, 3]}),
            ),
        ] {
            assert_eq!(json_patch(&live, &patch).expect(name), expected, "{name}");
        }
    }

    #[test]
    fn inapplicable_json_patch_is_refused_as_a_whole() {
        let live = json!({"a": {"b": 1}, "list": [1]});
        for (name, operation, malformed) in [
            ("testing value /a/b failed", json!({"op": "test", "path": "/a/b", "value": 2}), false),
            (
                "remove operation does not apply: doc is missing path: \"/a/c\"",
                json!({"op": "remove", "path": "/a/c"}),
                false,
            ),
            ("missing path: \"\"", json!({"op": "remove", "path": ""}), false),
            (
                "replace operation does not apply: doc is missing path: \"/a/c\"",
                json!({"op": "replace", "path": "/a/c", "value": 1}),
                false,
            ),
            (
                "add operation does not apply: doc is missing path: \"/x/y\"",
                json!({"op": "add", "path": "/x/y", "value": 1}),
                false,
            ),
            ("missing path: \"/a/b/c\"", json!({"op": "add", "path": "/a/b/c", "value": 1}), false),
            (
                "\"/list/2\" is no place in a list of 1",
                json!({"op": "add", "path": "/list/2", "value": 1}),
                false,
            ),
            ("\"/list/-\" is no place in a list of 1", json!({"op": "remove", "path": "/list/-"}), false),
            (
                "\"/list/-\" is no place in a list of 1",
                json!({"op": "replace", "path": "/list/-", "value": 1}),
                false,
            ),
            ("\"/list/00\" is no place in a list of 1", json!({"op": "remove", "path": "/list/00"}), false),
            ("\"/list/+0\" is no place in a list of 1", json!({"op": "remove", "path": "/list/+0"}), false),
            ("\"/list/-1\" is no place in a list of 1", json!({"op": "remove", "path": "/list/-1"}), false),
            (
                "cannot move \"/a\" into itself at \"/a/b\"",
                json!({"op": "move", "from": "/a", "path": "/a/b"}),
                false,
            ),
            (
                "move operation does not apply: doc is missing path: \"/c\"",
                json!({"op": "move", "from": "/c", "path": "/d"}),
                false,
            ),
            (
                "copy operation does not apply: doc is missing path: \"/c\"",
                json!({"op": "copy", "from": "/c", "path": "/d"}),
                false,
            ),
            ("path \"a\" does not begin with a slash", json!({"op": "add", "path": "a", "value": 1}), false),
            ("unknown op \"frob\"", json!({"op": "frob", "path": "/a"}), true),
            ("no string \"path\"", json!({"op": "remove"}), true),
            ("no \"value\"", json!({"op": "add", "path": "/a"}), true),
        ] {
            let error = json_patch(&live, &json!([operation])).expect_err(name);
            assert_eq!(matches!(error, JsonPatchError::Malformed(_)), malformed, "{name}: {error}");
            assert!(error.to_string().contains(name), "{error}, not {name}");
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
        // Each round puts the map into another one.
        let nested = |levels: usize| {
            let rounds = (1..levels).flat_map(|_| {
                [
                    json!({"op": "add", "path": "/b", "value": {}}),
                    json!({"op": "move", "from": "/a", "path": "/b/a"}),
                    json!({"op": "move", "from": "/b", "path": "/a"}),
                ]
            });
            json_patch(&json!({"a": 1}), &rounds.collect::<Vec<_>>().into())
        };
        let deepest = nested(MAX_DEPTH).expect("as deep as is read").to_string();
        assert!(serde_json::from_str::<Value>(&deepest).is_ok());
        let error = nested(MAX_DEPTH + 1).expect_err("deeper than is read");
        assert!(error.to_string().contains("64 levels"), "{error}");
        // Inserts at the front of a long list.
        let long = json!({"list": vec![0; 190_000]});
        let inserts = vec![json!({"op": "add", "path": "/list/0", "value": 0}); 9_000];
        let error = json_patch(&long, &inserts.into()).expect_err("quadratic").to_string();
        assert!(error.contains("shift"), "{error}");
        let appends = vec![json!({"op": "add", "path": "/list/-", "value": 0}); 9_000];
        assert!(json_patch(&long, &appends.into()).is_ok());
        // Below managedFields, which may be deeper than the bound.
        let inner = (0..80).fold(json!({}), |inner, _| json!({"x": inner}));
        let deeper = json!([{"op": "add", "path": "/x".repeat(70) + "/y", "value": {}}]);
        let error = json_patch(&inner, &deeper).expect_err("a path beyond the bound").to_string();
        assert!(error.contains("64 levels"), "{error}");
        // 300,000 levels of 3 MB, on a stack that is too small to free them.
        let chain = (0..100).fold(json!({}), |inner, _| json!({"x": inner}));
        let place = format!("/b{}", "/x".repeat(101));
        let round = [
            json!({"op": "add", "path": "/b", "value": chain}),
            json!({"op": "move", "from": "/a", "path": place}),
            json!({"op": "move", "from": "/b", "path": "/a"}),
        ];
        let rounds = Value::from(vec![round; 3_000].concat());
        let error = json_patch(&json!({"a": 1}), &rounds).expect_err("deep in the middle");
        assert!(error.to_string().contains("64 levels"), "{error}");
    }
}
