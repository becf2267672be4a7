//! JSON calls, which many formats hold: `{"name": …, "arguments": {…}}`. Arguments stay the model's own text:
//! nothing is parsed and written again, so that numbers and the order of keys survive.

use std::borrow::Cow;

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::{MAX_NESTING, offered};
use russet_wire::conversation::{Tool, ToolCall};

/// A call as models write it; other members are ignored.
#[derive(Deserialize)]
struct JsonCall<'a> {
    #[serde(borrow, alias = "tool_name")]
    name: Cow<'a, str>,
    #[serde(borrow, default, alias = "parameters", deserialize_with = "present")]
    arguments: Option<&'a RawValue>,
    #[serde(borrow, default)]
    id: Option<&'a RawValue>,
}

/// `null` is a value that is there, and no object.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    Deserialize::deserialize(deserializer).map(Some)
}

/// The calls of a JSON object, or of a list of them. A call without arguments has none; `null` is not such.
pub(super) fn calls(text: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let text = text.trim();
    if !text.starts_with('[') {
        return Some(vec![call(text, tools)?]);
    }
    let items: Vec<&RawValue> = serde_json::from_str(text).ok()?;
    items.into_iter().map(|item| call(item.get(), tools)).collect()
}

/// The calls of JSON objects that follow one another, as in a file of JSON lines.
pub(super) fn call_lines(text: &str, tools: &[Tool]) -> Option<Vec<ToolCall>> {
    let items = serde_json::Deserializer::from_str(text).into_iter::<&RawValue>();
    items.map(|item| call(item.ok()?.get(), tools)).collect()
}

fn call(text: &str, tools: &[Tool]) -> Option<ToolCall> {
    let JsonCall { name, arguments, id } = serde_json::from_str(text).ok()?;
    offered(tools, &name)?;
    let arguments = match arguments {
        Some(arguments) => object(arguments.get())?,
        None => "{}".to_owned(),
    };
    let id = id.and_then(|id| serde_json::from_str(id.get()).ok()).unwrap_or_default();
    Some(ToolCall { id, name: name.into_owned(), arguments })
}

/// The text of a JSON object, or of a JSON string that holds one.
pub(super) fn object(text: &str) -> Option<String> {
    let text = text.trim();
    if text.starts_with('"') {
        let held: String = serde_json::from_str(text).ok()?;
        return plain_object(held.trim());
    }
    plain_object(text)
}

fn plain_object(text: &str) -> Option<String> {
    (text.starts_with('{') && is_json(text)).then(|| text.to_owned())
}

/// Whether this is one JSON value that a reader with a limit of nesting can read.
pub(super) fn is_json(text: &str) -> bool {
    nesting(text) <= MAX_NESTING && serde_json::from_str::<&RawValue>(text).is_ok()
}

fn nesting(text: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let (mut in_string, mut escaped) = (false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_string,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

/// JSON text of a string.
pub(super) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Writes an object from members whose values are JSON text. A key that comes twice keeps its first place and
/// takes its last value, as in Python.
#[derive(Default)]
pub(super) struct ObjectText {
    members: Vec<(String, String)>,
    places: std::collections::HashMap<String, usize>,
}

impl ObjectText {
    pub(super) fn insert(&mut self, key: &str, value: String) {
        if let Some(place) = self.places.get(key) {
            self.members[*place].1 = value;
        } else {
            self.places.insert(key.to_owned(), self.members.len());
            self.members.push((key.to_owned(), value));
        }
    }

    pub(super) fn contains(&self, key: &str) -> bool {
        self.places.contains_key(key)
    }

    pub(super) fn into_text(self) -> String {
        let members: Vec<String> =
            self.members.iter().map(|(key, value)| format!("{}: {value}", quoted(key))).collect();
        format!("{{{}}}", members.join(", "))
    }
}
