//! Values beside a schema: list elements of the same identity, and how a message shows a value.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::{ListKind, Schema};

/// The elements of a keyed list before a change, by identity.
pub struct Counterparts<'a>(HashMap<Value, &'a Value>);

impl<'a> Counterparts<'a> {
    /// Those of `old`, a list with this schema; of other lists no element has a counterpart.
    pub fn new(schema: &Schema, old: Option<&'a Value>) -> Self {
        let mut elements = HashMap::new();
        if let ListKind::Map(names) = &schema.list {
            for old in old.and_then(Value::as_array).into_iter().flatten() {
                elements.entry(key(names, old)).or_insert(old);
            }
        }
        Self(elements)
    }

    /// The element before with the same identity as `item`.
    pub fn of(&self, schema: &Schema, item: &Value) -> Option<&'a Value> {
        match &schema.list {
            ListKind::Map(names) if !self.0.is_empty() => self.0.get(&key(names, item)).copied(),
            _ => None,
        }
    }
}

/// The fields that identify an element of a list.
pub fn key(names: &[String], item: &Value) -> Value {
    names
        .iter()
        .filter_map(|name| item.get(name).map(|value| (name.clone(), value.clone())))
        .collect::<Map<_, _>>()
        .into()
}

/// Maximum bytes of a value in a message.
const MAX_SHOWN_BYTES: usize = 1024;

/// An invalid value in a message.
pub fn shown(value: &Value) -> String {
    let mut text = match value {
        Value::String(text) => format!("{text:?}"),
        other => other.to_string(),
    };
    if text.len() > MAX_SHOWN_BYTES {
        text.truncate(text.floor_char_boundary(MAX_SHOWN_BYTES));
        text.push('…');
    }
    text
}
