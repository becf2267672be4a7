//! Field paths: their elements, the order of elements, and their form in fieldsV1 and in conflict messages.
//!
//! Not here: sets of paths.

use std::cmp::Ordering;
use std::fmt;

use serde_json::{Map, Value};

/// One step from a container to its content. The order of variants is the order of fieldsV1.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Element {
    /// `f:`, a field of a map.
    Field(String),
    /// `k:`, an element of a keyed list, by its keys in alphabetical order.
    Key(Vec<(String, Ordered)>),
    /// `v:`, an element of a set.
    Value(Ordered),
    /// `i:`, an element by its position.
    Index(i64),
}

/// A JSON value with a total order, in which `1` and `1.0` are equal.
#[derive(Debug, Clone)]
pub struct Ordered(pub Value);

impl PartialEq for Ordered {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Ordered {}

impl PartialOrd for Ordered {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ordered {
    fn cmp(&self, other: &Self) -> Ordering {
        order(&self.0, &other.0)
    }
}

/// Numbers, strings, booleans, lists, maps, null; within a type by content.
fn order(a: &Value, b: &Value) -> Ordering {
    let rank = |value: &Value| match value {
        Value::Number(_) => 0,
        Value::String(_) => 1,
        Value::Bool(_) => 2,
        Value::Array(_) => 3,
        Value::Object(_) => 4,
        Value::Null => 5,
    };
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => match (a.as_i64(), b.as_i64()) {
            (Some(a), Some(b)) => a.cmp(&b),
            _ => a.as_f64().unwrap_or_default().total_cmp(&b.as_f64().unwrap_or_default()),
        },
        (Value::String(a), Value::String(b)) => a.cmp(b),
        (Value::Bool(a), Value::Bool(b)) => a.cmp(b),
        (Value::Array(a), Value::Array(b)) => {
            let unequal = a.iter().zip(b).map(|(a, b)| order(a, b)).find(|order| order.is_ne());
            unequal.unwrap_or_else(|| a.len().cmp(&b.len()))
        }
        (Value::Object(a), Value::Object(b)) => {
            let sorted = |map: &Map<String, Value>| {
                let mut fields: Vec<_> =
                    map.iter().map(|(name, value)| (name.clone(), Ordered(value.clone()))).collect();
                fields.sort();
                fields
            };
            sorted(a).cmp(&sorted(b))
        }
        _ => rank(a).cmp(&rank(b)),
    }
}

/// Whether two values are equal when numbers are compared by value.
pub fn same(a: &Value, b: &Value) -> bool {
    a == b || order(a, b).is_eq()
}

impl Element {
    /// The fieldsV1 key, such as `k:{"name":"a"}`.
    pub fn encode(&self) -> String {
        match self {
            Element::Field(name) => format!("f:{name}"),
            Element::Key(fields) => {
                let fields: Vec<String> = fields
                    .iter()
                    .map(|(name, value)| format!("{}:{}", json(&name.as_str().into()), json(&value.0)))
                    .collect();
                format!("k:{{{}}}", fields.join(","))
            }
            Element::Value(value) => format!("v:{}", json(&value.0)),
            Element::Index(index) => format!("i:{index}"),
        }
    }

    /// Decodes a fieldsV1 key; `Ok(None)` for an unknown kind of element.
    pub fn decode(source: &str) -> Result<Option<Element>, String> {
        let Some((kind, rest)) = source.split_once(':') else {
            return Err(format!("missing colon: {source}"));
        };
        let value = || serde_json::from_str::<Value>(rest).map_err(|error| format!("{source}: {error}"));
        Ok(match kind {
            "f" => Some(Element::Field(rest.to_owned())),
            "v" => Some(Element::Value(Ordered(value()?))),
            "i" => Some(Element::Index(rest.parse().map_err(|_| format!("{source}: no index"))?)),
            "k" => match value()? {
                Value::Object(map) => Some(Element::key(map)),
                _ => return Err(format!("{source}: the key is not an object")),
            },
            _ => None,
        })
    }

    /// The element with these key fields.
    pub fn key(fields: Map<String, Value>) -> Element {
        let mut fields: Vec<_> = fields.into_iter().map(|(name, value)| (name, Ordered(value))).collect();
        fields.sort_by(|a, b| a.0.cmp(&b.0));
        Element::Key(fields)
    }
}

/// JSON as Go's encoder writes it, which escapes characters that could end an HTML script.
fn json(value: &Value) -> String {
    value
        .to_string()
        .replace('&', "\\u0026")
        .replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029")
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Element::Field(name) => write!(f, ".{name}"),
            Element::Key(fields) => {
                let fields: Vec<String> =
                    fields.iter().map(|(name, value)| format!("{name}={}", value.0)).collect();
                write!(f, "[{}]", fields.join(","))
            }
            Element::Value(value) => write!(f, "[={}]", value.0),
            Element::Index(index) => write!(f, "[{index}]"),
        }
    }
}

/// A path from the root.
pub type Path = Vec<Element>;

/// `.spec.list[name="a"].field`
pub fn display(path: &[Element]) -> String {
    path.iter().map(Element::to_string).collect()
}
