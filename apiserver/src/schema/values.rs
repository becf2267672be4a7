//! Values beside a schema: list elements of the same identity, and how a message shows a value.

use serde_json::{Map, Value};

use super::{ListKind, Schema};

/// The element of `old` with the same identity as `item`.
pub fn counterpart<'a>(schema: &Schema, item: &Value, old: Option<&'a Value>) -> Option<&'a Value> {
    let ListKind::Map(names) = &schema.list else { return None };
    let identity = key(names, item);
    old?.as_array()?.iter().find(|old| key(names, old) == identity)
}

/// The fields that identify an element of a list.
pub fn key(names: &[String], item: &Value) -> Value {
    names
        .iter()
        .filter_map(|name| item.get(name).map(|value| (name.clone(), value.clone())))
        .collect::<Map<_, _>>()
        .into()
}

/// An invalid value in a message.
pub fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => format!("{text:?}"),
        other => other.to_string(),
    }
}
