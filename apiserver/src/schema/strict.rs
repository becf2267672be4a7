//! Decodes request bodies and reports duplicate keys.
//!
//! Not here: unknown fields; pruning finds those.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::prune::{push_field, push_index};

/// Why a body is not an object.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Neither JSON nor YAML (400).
    #[error("{0}")]
    Malformed(String),
}

/// Decodes JSON; also returns the paths of duplicate keys (`spec.model`), of which the last value wins.
pub fn json(body: &[u8]) -> Result<(Value, Vec<String>), DecodeError> {
    let mut duplicates = Vec::new();
    let mut decoder = serde_json::Deserializer::from_slice(body);
    let value = node(&mut duplicates)
        .deserialize(&mut decoder)
        .and_then(|value| decoder.end().map(|()| value))
        .map_err(|error| DecodeError::Malformed(error.to_string()))?;
    Ok((value, duplicates))
}

/// Decodes YAML (one document), which includes JSON; duplicates as in [`json`].
pub fn yaml(body: &[u8]) -> Result<(Value, Vec<String>), DecodeError> {
    // kubectl sends JSON under either media type, and the JSON decoder is faster.
    if body.trim_ascii_start().starts_with(b"{") {
        return json(body);
    }
    let text = std::str::from_utf8(body).map_err(|error| DecodeError::Malformed(error.to_string()))?;
    let mut duplicates = Vec::new();
    let value = node(&mut duplicates)
        .deserialize(serde_norway::Deserializer::from_str(text))
        .map_err(|error| DecodeError::Malformed(format!("error converting YAML to JSON: {error}")))?;
    Ok((value, duplicates))
}

fn node(duplicates: &mut Vec<String>) -> StrictValue<'_> {
    StrictValue { path: String::new(), duplicates }
}

/// Decodes the value at `path`.
struct StrictValue<'a> {
    path: String,
    duplicates: &'a mut Vec<String>,
}

impl<'de> DeserializeSeed<'de> for StrictValue<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for StrictValue<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value)
            .map(Value::Number)
            .ok_or_else(|| E::custom(format!("{value} is not a JSON number")))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        loop {
            let mut path = self.path.clone();
            push_index(&mut path, list.len());
            let seed = StrictValue { path, duplicates: &mut *self.duplicates };
            match items.next_element_seed(seed)? {
                Some(item) => list.push(item),
                None => return Ok(Value::Array(list)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<Value>()? {
            let name = match key {
                Value::String(name) => name,
                Value::Bool(value) => value.to_string(),
                Value::Number(value) => value.to_string(),
                other => return Err(A::Error::custom(format!("{other} cannot be a key"))),
            };
            let mut path = self.path.clone();
            push_field(&mut path, &name);
            if map.contains_key(&name) {
                self.duplicates.push(path.clone());
            }
            let value = entries.next_value_seed(StrictValue { path, duplicates: &mut *self.duplicates })?;
            map.insert(name, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{json, yaml};

    #[test]
    fn the_last_of_two_keys_wins_and_is_reported() {
        let body =
            br#"{"a": 1, "spec": {"model": "x", "list": [{"k": 1, "k": 2}], "model": "y"}, "a": null}"#;
        let (value, duplicates) = json(body).expect("JSON");
        assert_eq!(value, json!({"a": null, "spec": {"model": "y", "list": [{"k": 2}]}}));
        assert_eq!(duplicates, ["spec.list[0].k", "spec.model", "a"]);
    }

    #[test]
    fn yaml_reads_as_json_does() {
        let (value, duplicates) =
            yaml(b"a: 1\nb: [x, 2.5, true, null]\nc:\n  d: |\n    text\na: 2\n").expect("YAML");
        assert_eq!(value, json!({"a": 2, "b": ["x", 2.5, true, null], "c": {"d": "text\n"}}));
        assert_eq!(duplicates, ["a"]);
    }

    #[test]
    fn malformed_text_is_an_error() {
        for body in [&b"{"[..], b"{} x", b"{\"a\":}"] {
            assert!(json(body).is_err());
        }
        assert!(yaml(b"a: [").is_err());
        assert!(yaml(&[0xff, 0xfe]).is_err());
    }
}
