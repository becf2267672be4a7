//! What an object may hold at most. Decoding, validation and every client's reader do work for each value and a stack
//! frame for each level, so both are bounded before anything else looks at a body, and again once it is patched.

use serde_json::Value;

/// Maximum levels of maps and lists of an object. Clients read 128, and a list or a watch event puts two around it.
pub const MAX_DEPTH: usize = 64;
/// Maximum levels of a request body: `metadata.managedFields` nest as deep as the fields they name.
pub const MAX_BODY_DEPTH: usize = 96;
/// Maximum values (maps, lists and what is in them) of a body or an object.
pub const MAX_VALUES: usize = 200_000;

/// Which bound an object exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BoundsError {
    /// Too many levels.
    #[error("it nests deeper than the {0} levels allowed; flatten it")]
    Depth(usize),
    /// Too many values.
    #[error("it has more than the {MAX_VALUES} values allowed; split it into several objects")]
    Values,
}

/// The number of values of an object.
pub fn values(value: &Value) -> usize {
    1 + match value {
        Value::Object(map) => map.values().map(values).sum(),
        Value::Array(items) => items.iter().map(values).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
    }
}

/// Checks an object. Its `metadata.managedFields`, which the server writes, nest as the fields they name, and their
/// values are counted apart.
pub fn check(object: &Value) -> Result<(), BoundsError> {
    let (mut left, mut managed) = (MAX_VALUES, MAX_VALUES);
    let Some(fields) = object.as_object() else { return walk(object, MAX_DEPTH, &mut left) };
    for (name, field) in fields {
        match (name.as_str(), field.as_object()) {
            ("metadata", Some(metadata)) => {
                for (name, value) in metadata {
                    if name == "managedFields" {
                        walk(value, MAX_BODY_DEPTH - 2, &mut managed)?;
                    } else {
                        walk(value, MAX_DEPTH - 2, &mut left)?;
                    }
                }
            }
            _ => walk(field, MAX_DEPTH - 1, &mut left)?,
        }
    }
    Ok(())
}

/// Checks a value below which `levels` may nest, and takes its values from those `left`.
fn walk(value: &Value, levels: usize, left: &mut usize) -> Result<(), BoundsError> {
    *left = left.checked_sub(1).ok_or(BoundsError::Values)?;
    let below = |levels: usize| levels.checked_sub(1).ok_or(BoundsError::Depth(MAX_DEPTH));
    match value {
        Value::Object(map) => {
            let levels = below(levels)?;
            map.values().try_for_each(|child| walk(child, levels, left))
        }
        Value::Array(items) => {
            let levels = below(levels)?;
            items.iter().try_for_each(|child| walk(child, levels, left))
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn nested(levels: usize) -> Value {
        (1..levels).fold(json!({}), |inner, _| json!({ "x": inner }))
    }

    #[test]
    fn objects_are_bounded_in_depth_and_values() {
        for (what, object, expected) in [
            ("as deep as allowed", nested(MAX_DEPTH), Ok(())),
            ("a level deeper", nested(MAX_DEPTH + 1), Err(BoundsError::Depth(MAX_DEPTH))),
            (
                "deep metadata",
                json!({"metadata": {"x": nested(MAX_DEPTH - 1)}}),
                Err(BoundsError::Depth(MAX_DEPTH)),
            ),
            ("deep managedFields", json!({"metadata": {"managedFields": nested(90)}}), Ok(())),
            (
                "many managedFields",
                json!({"metadata": {"managedFields": vec![1; MAX_VALUES]}}),
                Err(BoundsError::Values),
            ),
            ("as many values as allowed", json!({"x": vec![1; MAX_VALUES - 1]}), Ok(())),
            ("one more", json!({"x": vec![1; MAX_VALUES]}), Err(BoundsError::Values)),
            ("lists of nothing", json!({"x": vec![json!([]); MAX_VALUES]}), Err(BoundsError::Values)),
        ] {
            assert_eq!(check(&object), expected, "{what}");
        }
    }
}
