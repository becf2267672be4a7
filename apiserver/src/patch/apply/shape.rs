//! How a schema divides a value into fields: maps and lists that are owned field by field, and atomic ones.
//!
//! Not here: validation of values; a shape only defines the boundaries of fields.

use serde_json::{Map, Value};

use super::path::Element;
use crate::schema::{Additional, ListKind, Schema, SchemaType};

/// Type information about a value.
#[derive(Clone, Copy)]
pub enum Shape<'a> {
    /// A schema describes it.
    Typed(&'a Schema),
    /// No schema: maps are owned by their fields, lists as a whole.
    Deduced,
}

/// The kind of a value for field management.
#[derive(Clone, Copy)]
pub enum Atom<'a> {
    /// One field.
    Scalar,
    /// A list.
    List(List<'a>),
    /// A map.
    Map(Fields<'a>),
}

/// The shape of a list.
#[derive(Clone, Copy)]
pub struct List<'a> {
    kind: &'a ListKind,
    /// The shape of the elements.
    pub item: Shape<'a>,
}

/// The shape of a map.
#[derive(Clone, Copy)]
pub struct Fields<'a>(Option<&'a Schema>);

impl<'a> Shape<'a> {
    /// The kind of `value`; an absent or null value has the kind of its schema.
    pub fn atom(self, value: Option<&Value>) -> Atom<'a> {
        match self {
            Shape::Typed(schema) => match schema.kind {
                SchemaType::Object => Atom::Map(Fields(Some(schema))),
                SchemaType::Array => Atom::List(List {
                    kind: &schema.list,
                    item: schema.items.as_deref().map_or(Shape::Deduced, Shape::Typed),
                }),
                SchemaType::Any if schema.properties.is_empty() => Shape::Deduced.atom(value),
                SchemaType::Any => match value {
                    Some(Value::Array(_) | Value::String(_) | Value::Number(_) | Value::Bool(_)) => {
                        Shape::Deduced.atom(value)
                    }
                    _ => Atom::Map(Fields(Some(schema))),
                },
                SchemaType::String
                | SchemaType::Integer
                | SchemaType::Number
                | SchemaType::Boolean
                | SchemaType::IntOrString => Atom::Scalar,
            },
            Shape::Deduced => match value {
                Some(Value::Array(_)) => Atom::List(List { kind: &ListKind::Atomic, item: Shape::Deduced }),
                Some(Value::Object(_) | Value::Null) | None => Atom::Map(Fields(None)),
                Some(_) => Atom::Scalar,
            },
        }
    }

    /// The shape below `element`, and whether the schema names it.
    pub fn below(self, element: &Element) -> (Shape<'a>, bool) {
        let Shape::Typed(schema) = self else { return (Shape::Deduced, false) };
        match element {
            Element::Field(name) => {
                let (shape, named, _) = Fields(Some(schema)).field(name);
                (shape, named)
            }
            Element::Key(_) | Element::Value(_) | Element::Index(_) => {
                (schema.items.as_deref().map_or(Shape::Deduced, Shape::Typed), false)
            }
        }
    }

    /// Whether the schema makes this container one field.
    pub fn is_atomic_container(self) -> bool {
        match self.atom(None) {
            Atom::Scalar => false,
            Atom::List(list) => list.is_atomic(),
            Atom::Map(fields) => fields.is_atomic(),
        }
    }
}

impl Atom<'_> {
    /// Whether both have the same kind.
    pub fn is_like(&self, other: &Atom<'_>) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }
}

impl<'a> Fields<'a> {
    /// Whether the map is atomic.
    pub fn is_atomic(self) -> bool {
        self.0.is_some_and(|schema| schema.atomic_map)
    }

    /// The shape of a field, whether the schema names it, and whether it is allowed at all.
    pub fn field(self, name: &str) -> (Shape<'a>, bool, bool) {
        let Some(schema) = self.0 else { return (Shape::Deduced, false, true) };
        match (schema.properties.get(name), &schema.additional) {
            (Some(field), _) => (Shape::Typed(field), true, true),
            (None, Additional::Typed(field)) => (Shape::Typed(field), false, true),
            (None, Additional::Anything) => (Shape::Deduced, false, true),
            (None, Additional::Denied) => (Shape::Deduced, false, schema.preserve_unknown),
        }
    }
}

impl List<'_> {
    /// Whether the list is atomic.
    pub fn is_atomic(self) -> bool {
        *self.kind == ListKind::Atomic
    }

    /// The path element of `item`; an error if it has none.
    pub fn element(self, item: &Value) -> Result<Element, String> {
        match self.kind {
            ListKind::Atomic => Err("invalid indexing of non-associative list".into()),
            ListKind::Set => match item {
                Value::Object(_) => {
                    Err("associative list without keys has an element that's a map type".into())
                }
                Value::Array(_) => Err("not supported: associative list with lists as elements".into()),
                Value::Null => {
                    Err("associative list without keys has an element that's an explicit null".into())
                }
                scalar => Ok(Element::Value(super::path::Ordered(scalar.clone()))),
            },
            ListKind::Map(keys) => {
                let fields = match item {
                    Value::Object(fields) => fields,
                    Value::Null => {
                        return Err("associative list with keys may not have a null element".into());
                    }
                    _ => return Err("associative list with keys may not have non-map elements".into()),
                };
                let found: Map<String, Value> = keys
                    .iter()
                    .filter_map(|key| {
                        let value = fields.get(key).or_else(|| self.default_of(key))?;
                        Some((key.clone(), value.clone()))
                    })
                    .collect();
                if found.is_empty() {
                    return Err(format!(
                        "associative list with keys has an element that omits all key fields {keys:?} (and doesn't have default values for any key fields)"
                    ));
                }
                Ok(Element::key(found))
            }
        }
    }

    /// The default of an omitted key field.
    fn default_of(&self, key: &str) -> Option<&Value> {
        match self.item {
            Shape::Typed(schema) => schema.properties.get(key)?.default.as_ref(),
            Shape::Deduced => None,
        }
    }
}
