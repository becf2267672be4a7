//! Decodes request bodies and reports duplicate keys. What a body decodes to is bounded while it is decoded: a few
//! kilobytes of YAML aliases may stand for gigabytes.
//!
//! Not here: unknown fields; pruning finds those.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::bounds::{BoundsError, MAX_BODY_DEPTH, MAX_VALUES};
use super::prune::{push_field, push_index};
use super::values::cut;

/// Maximum duplicate keys that are reported.
const MAX_DUPLICATES: usize = 100;
/// Maximum bytes of a reported path.
const MAX_PATH_BYTES: usize = 1024;
/// Maximum events of a YAML text, which are its keys, values and the ends of its maps and lists. The decoder holds some
/// 210 bytes for each.
const MAX_YAML_EVENTS: usize = MAX_VALUES;
/// How many bytes of text a byte of a body may stand for: no escape makes more, only aliases do.
const MAX_EXPANSION: usize = 2;

/// Why a body is not an object.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Neither JSON nor YAML, or beyond the bounds of a body (400).
    #[error("{0}")]
    Malformed(String),
}

/// Decodes JSON; also returns the paths of duplicate keys (`spec.model`), of which the last value wins.
pub fn json(body: &[u8]) -> Result<(Value, Vec<String>), DecodeError> {
    let mut state = DecodeState::new(body.len());
    let mut decoder = serde_json::Deserializer::from_slice(body);
    let value = root(&mut state)
        .deserialize(&mut decoder)
        .and_then(|value| decoder.end().map(|()| value))
        .map_err(|error| DecodeError::Malformed(error.to_string()))?;
    Ok((value, state.duplicates))
}

/// Decodes YAML (one document), which includes JSON; duplicates as in [`json`].
pub fn yaml(body: &[u8]) -> Result<(Value, Vec<String>), DecodeError> {
    // kubectl sends JSON under either media type, and the JSON decoder is faster.
    if body.trim_ascii_start().starts_with(b"{") {
        return json(body);
    }
    let text = std::str::from_utf8(body).map_err(|error| DecodeError::Malformed(error.to_string()))?;
    count_events(text)?;
    let mut state = DecodeState::new(body.len());
    let value = root(&mut state)
        .deserialize(serde_norway::Deserializer::from_str(text))
        .map_err(|error| DecodeError::Malformed(format!("error converting YAML to JSON: {error}")))?;
    Ok((value, state.duplicates))
}

/// Refuses a text of more than [`MAX_YAML_EVENTS`]. The decoder reads all of a document before it gives the first value,
/// so they are counted by another parser, which reads one after the other and bounds how deep they nest.
fn count_events(text: &str) -> Result<(), DecodeError> {
    let mut events = 0;
    for event in granit_parser::Parser::new_from_str(text) {
        event.map_err(|error| DecodeError::Malformed(format!("error converting YAML to JSON: {error}")))?;
        events += 1;
        if events > MAX_YAML_EVENTS {
            return Err(DecodeError::Malformed(BoundsError::Values.to_string()));
        }
    }
    Ok(())
}

/// What is left of the bounds of a body, and the duplicates so far.
struct DecodeState {
    duplicates: Vec<String>,
    values: usize,
    text_bytes: usize,
}

impl DecodeState {
    fn new(body_bytes: usize) -> Self {
        let text_bytes = body_bytes.saturating_mul(MAX_EXPANSION);
        Self { duplicates: Vec::new(), values: MAX_VALUES, text_bytes }
    }

    fn take_value<E: Error>(&mut self) -> Result<(), E> {
        self.values = self.values.checked_sub(1).ok_or_else(|| E::custom(BoundsError::Values))?;
        Ok(())
    }

    fn take_text<E: Error>(&mut self, text: &str) -> Result<(), E> {
        let left = self.text_bytes.checked_sub(text.len());
        self.text_bytes = left.ok_or_else(|| {
            E::custom(format!(
                "its aliases expand it to more than {MAX_EXPANSION} times its text; write it without aliases"
            ))
        })?;
        Ok(())
    }

    fn report_duplicate(&mut self, path: &Path<'_>) {
        if self.duplicates.len() < MAX_DUPLICATES {
            self.duplicates.push(path.to_text());
        }
    }
}

/// Where a value is: the way back to the root, written out only for a message.
enum Path<'a> {
    Root,
    Field(&'a Path<'a>, &'a str),
    Index(&'a Path<'a>, usize),
}

impl Path<'_> {
    fn to_text(&self) -> String {
        let mut text = String::new();
        self.write(&mut text);
        cut(&mut text, MAX_PATH_BYTES);
        text
    }

    fn write(&self, text: &mut String) {
        match self {
            Self::Root => {}
            Self::Field(parent, name) => {
                parent.write(text);
                push_field(text, name);
            }
            Self::Index(parent, index) => {
                parent.write(text);
                push_index(text, *index);
            }
        }
    }
}

fn root(state: &mut DecodeState) -> StrictValue<'_, '_> {
    StrictValue { path: &Path::Root, levels: MAX_BODY_DEPTH, state }
}

/// Decodes the value at `path`, below which `levels` may nest.
struct StrictValue<'p, 's> {
    path: &'p Path<'p>,
    levels: usize,
    state: &'s mut DecodeState,
}

impl StrictValue<'_, '_> {
    fn levels_below<E: Error>(&self) -> Result<usize, E> {
        self.levels.checked_sub(1).ok_or_else(|| E::custom(BoundsError::Depth(MAX_BODY_DEPTH)))
    }
}

impl<'de> DeserializeSeed<'de> for StrictValue<'_, '_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.state.take_value()?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for StrictValue<'_, '_> {
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

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(match whole(value) {
            Some(whole) => whole.into(),
            None => Value::Number(number(value)?),
        })
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        self.state.take_text(value)?;
        Ok(value.into())
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Value, E> {
        self.state.take_text(&value)?;
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
        let levels = self.levels_below()?;
        let mut list = Vec::new();
        loop {
            let path = Path::Index(self.path, list.len());
            match items.next_element_seed(StrictValue { path: &path, levels, state: &mut *self.state })? {
                Some(item) => list.push(item),
                None => return Ok(Value::Array(list)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let levels = self.levels_below()?;
        let mut map = Map::new();
        while let Some(name) = entries.next_key_seed(StrictKey(&mut *self.state))? {
            let path = Path::Field(self.path, &name);
            if map.contains_key(&name) {
                self.state.report_duplicate(&path);
            }
            let value =
                entries.next_value_seed(StrictValue { path: &path, levels, state: &mut *self.state })?;
            map.insert(name, value);
        }
        Ok(Value::Object(map))
    }
}

/// A float that is a whole number, as `1.0`, `1e3` and `-0` are: Go writes it without a fraction, and a typed client reads
/// no fraction into an integer. Above 2^53 a float has no exact neighbours.
fn whole(value: f64) -> Option<i64> {
    const MAX: f64 = 9_007_199_254_740_992.0;
    (value.fract() == 0.0 && value.abs() < MAX).then_some(value as i64)
}

/// Decodes a key of a map: in YAML also a number or a boolean, never a map or a list.
struct StrictKey<'s>(&'s mut DecodeState);

impl<'de> DeserializeSeed<'de> for StrictKey<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Visitor<'_> for StrictKey<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string as the key of a map")
    }

    fn visit_bool<E>(self, value: bool) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_i64<E>(self, value: i64) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_u64<E>(self, value: u64) -> Result<String, E> {
        Ok(value.to_string())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<String, E> {
        Ok(number::<E>(value)?.to_string())
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<String, E> {
        self.0.take_text(value)?;
        Ok(value.to_owned())
    }
}

fn number<E: Error>(value: f64) -> Result<Number, E> {
    Number::from_f64(value).ok_or_else(|| E::custom(format!("{value} is not a JSON number")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::bounds::{MAX_BODY_DEPTH, MAX_VALUES};
    use super::{count_events, json, yaml};

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
    fn whole_floats_are_read_as_integers() {
        for (text, expected) in [
            ("1.0", json!(1)),
            ("1e3", json!(1000)),
            ("-0", json!(0)),
            ("-2.0", json!(-2)),
            ("1.5", json!(1.5)),
            ("900719925474099.0", json!(900_719_925_474_099_i64)),
            ("1e300", json!(1e300)),
            ("9223372036854775807", json!(i64::MAX)),
            ("18446744073709551615", json!(u64::MAX)),
        ] {
            assert_eq!(json(text.as_bytes()).expect(text).0.to_string(), expected.to_string(), "{text}");
        }
        assert_eq!(yaml(b"a: 2.0\nb: 1.25\n").expect("YAML").0.to_string(), r#"{"a":2,"b":1.25}"#);
    }

    #[test]
    fn malformed_text_is_an_error() {
        for body in [&b"{"[..], b"{} x", b"{\"a\":}"] {
            assert!(json(body).is_err());
        }
        assert!(yaml(b"a: [").is_err());
        assert!(yaml(&[0xff, 0xfe]).is_err());
        for key in ["? [a]\n: 1", "? {a: 1}\n: 1", "~: 1"] {
            assert!(yaml(key.as_bytes()).is_err(), "{key}");
        }
    }

    #[test]
    fn aliases_that_expand_beyond_the_bounds_are_refused() {
        let (value, _) = yaml(b"a: &x {k: 1}\nb: *x\n").expect("an alias as people write them");
        assert_eq!(value, json!({"a": {"k": 1}, "b": {"k": 1}}));
        let leaves = vec!["0"; 1000].join(",");
        let flat = format!("a: &a [{leaves}]\nb: [{}]\n", vec!["*a"; 1000].join(","));
        let mut nested = "a: &l0 [0,0,0,0,0,0,0,0,0,0]\n".to_owned();
        for level in 1..30 {
            let below = vec![format!("*l{}", level - 1); 10].join(",");
            nested.push_str(&format!("b{level}: &l{level} [{below}]\n"));
        }
        let text = format!("a: &a {}\nb: [{}]\n", "x".repeat(10_000), vec!["*a"; 1000].join(","));
        let key = format!("a: &a {}\nb: [{}]\n", "x".repeat(10_000), vec!["{*a : 1}"; 1000].join(","));
        for (body, expected) in [(flat, "values"), (nested, "values"), (text, "aliases"), (key, "aliases")] {
            let error = yaml(body.as_bytes()).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error} of {:.40}", body);
        }
    }

    #[test]
    fn bodies_are_bounded_in_depth_and_values() {
        let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        assert!(json(nested(MAX_BODY_DEPTH).as_bytes()).is_ok());
        for decode in [json, yaml] {
            let error = decode(nested(MAX_BODY_DEPTH + 1).as_bytes()).expect_err("too deep").to_string();
            assert!(error.contains("96 levels"), "{error}");
        }
        let deeper = [nested(1_000_000), "[".repeat(1_000_000), "- ".repeat(1_000_000)];
        for body in deeper {
            assert!(yaml(body.as_bytes()).is_err(), "{body:.20}");
        }
        let many = format!("[{}]", vec!["0"; MAX_VALUES].join(","));
        let error = json(many.as_bytes()).expect_err("too many").to_string();
        assert!(error.contains("200000 values"), "{error}");
        let (lists, empty) = (vec!["[]"; MAX_VALUES / 2].join(","), "a:\n".repeat(MAX_VALUES / 2));
        for many in [many, format!("[{lists}]"), empty] {
            let error = count_events(&many).expect_err("too many events").to_string();
            assert!(error.contains("200000 values"), "{error}");
        }
    }

    #[test]
    fn a_long_text_in_yaml_is_one_event() {
        let line = "  {\"a\": [1, 2, 3]}, - x: y\n";
        let (value, _) = yaml(format!("a: |\n{}", line.repeat(50_000)).as_bytes()).expect("a block of text");
        assert_eq!(value["a"].as_str().map(str::len), Some(50_000 * (line.len() - 2)));
    }

    #[test]
    fn reported_duplicates_are_bounded_in_number_and_length() {
        let pairs = vec![r#"{"a":1,"a":2}"#; 10_000].join(",");
        let body = format!(r#"{{"{}":[{pairs}]}}"#, "k".repeat(100_000));
        let (_, duplicates) = json(body.as_bytes()).expect("JSON");
        assert_eq!(duplicates.len(), 100);
        assert!(duplicates.iter().all(|path| path.len() < 1100));
    }
}
