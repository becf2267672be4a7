//! Values beside a schema: list elements of the same identity, and how a message shows a value.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::{ListKind, Schema};

/// The elements of a keyed list before a change, by identity.
pub struct Counterparts<'s, 'a> {
    /// The fields that identify an element.
    names: &'s [String],
    elements: HashMap<Value, &'a Value>,
}

impl<'s, 'a> Counterparts<'s, 'a> {
    /// Those of `old`, a list with this schema; of other lists no element has a counterpart.
    pub fn new(schema: &'s Schema, old: Option<&'a Value>) -> Self {
        let mut elements = HashMap::new();
        let ListKind::Map(names) = &schema.list else { return Self { names: &[], elements } };
        for old in old.and_then(Value::as_array).into_iter().flatten() {
            elements.entry(key(names, old)).or_insert(old);
        }
        Self { names, elements }
    }

    /// The element before with the same identity as `item`.
    pub fn of(&self, item: &Value) -> Option<&'a Value> {
        if self.elements.is_empty() { None } else { self.elements.get(&key(self.names, item)).copied() }
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
    cut(&mut text, MAX_SHOWN_BYTES);
    text
}

/// Cuts a text after this many bytes, less if a character would be cut in two.
pub fn cut(text: &mut String, max_bytes: usize) {
    if text.len() > max_bytes {
        let end = (0..=max_bytes).rev().find(|end| text.is_char_boundary(*end)).unwrap_or_default();
        text.truncate(end);
        text.push('…');
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn long_values_are_cut_between_characters() {
        assert_eq!(shown(&json!({"a": 1})), r#"{"a":1}"#);
        let mut text = "aé".repeat(3);
        cut(&mut text, 5);
        assert_eq!(text, "aéa…");
        assert!(shown(&json!("x".repeat(5000))).len() < 1100);
    }
}
