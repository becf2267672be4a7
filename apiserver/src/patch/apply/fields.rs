//! Conversion between values and sets of fields: the fields of a value, and a value without the fields of a
//! set.
//!
//! Not here: comparing and merging two values.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::path::{Element, Path, display};
use super::set::FieldSet;
use super::shape::{Atom, Shape};

/// All fields of `value`: leaves, elements of lists, and entries of maps that the schema does not name.
pub fn from_value(shape: Shape<'_>, value: &Value) -> FieldSet {
    let mut set = FieldSet::default();
    collect(shape, value, &mut Vec::new(), &mut set);
    set
}

/// The number of those fields; those of elements with the same key are counted one by one.
pub fn count(shape: Shape<'_>, value: &Value) -> usize {
    count_below(shape, value).unwrap_or(1)
}

/// The number of fields in a map or list that is no field itself; `None` of a leaf.
fn count_below(shape: Shape<'_>, value: &Value) -> Option<usize> {
    match (shape.atom(Some(value)), value) {
        (Atom::Map(fields), Value::Object(map)) if !fields.is_atomic() => {
            let field = |(name, child): (&String, &Value)| {
                let (shape, named, _) = fields.field(name);
                count_below(shape, child).map_or(1, |below| below + usize::from(!named))
            };
            Some(map.iter().map(field).sum())
        }
        (Atom::List(list), Value::Array(items)) if !list.is_atomic() => {
            Some(items.iter().map(|item| 1 + count_below(list.item, item).unwrap_or(0)).sum())
        }
        _ => None,
    }
}

fn collect(shape: Shape<'_>, value: &Value, path: &mut Path, set: &mut FieldSet) {
    match (shape.atom(Some(value)), value) {
        (Atom::Map(fields), Value::Object(map)) if !fields.is_atomic() => {
            for (name, child) in map {
                let (shape, named, _) = fields.field(name);
                path.push(Element::Field(name.clone()));
                collect(shape, child, path, set);
                let hollow = child.is_null() || child.as_object().is_some_and(Map::is_empty);
                if hollow || !named {
                    set.insert(path);
                }
                path.pop();
            }
        }
        (Atom::List(list), Value::Array(items)) if !list.is_atomic() => {
            let mut counts: BTreeMap<Element, usize> = BTreeMap::new();
            let elements: Vec<Option<Element>> = items.iter().map(|item| list.element(item).ok()).collect();
            for element in elements.iter().flatten() {
                *counts.entry(element.clone()).or_default() += 1;
            }
            for (item, element) in items.iter().zip(elements) {
                let Some(element) = element else { continue };
                // Elements with a duplicate key cannot be distinguished, so they are owned together.
                let unique = counts.get(&element) == Some(&1);
                path.push(element);
                if unique {
                    collect(list.item, item, path, set);
                }
                set.insert(path);
                path.pop();
            }
        }
        (Atom::Map(fields), Value::Null) if !fields.is_atomic() => {}
        (Atom::List(list), Value::Null) if !list.is_atomic() => {}
        // A scalar, an atomic container, or a value that does not match its schema.
        _ => set.insert(path),
    }
}

/// Violations of the shape in `value`: undeclared fields, wrong types, elements with missing or duplicate
/// keys.
pub fn problems(shape: Shape<'_>, value: &Value) -> Vec<String> {
    let mut found = Vec::new();
    examine(shape, value, &mut Vec::new(), &mut found);
    found
}

fn examine(shape: Shape<'_>, value: &Value, path: &mut Path, found: &mut Vec<String>) {
    if value.is_null() {
        return;
    }
    match (shape.atom(Some(value)), value) {
        (Atom::Map(fields), Value::Object(map)) => {
            for (name, child) in map {
                let (shape, _, allowed) = fields.field(name);
                path.push(Element::Field(name.clone()));
                if allowed {
                    examine(shape, child, path, found);
                } else {
                    found.push(format!("{}: field not declared in schema", display(path)));
                }
                path.pop();
            }
        }
        (Atom::List(list), Value::Array(items)) => {
            let mut seen = FieldSet::default();
            for (index, item) in items.iter().enumerate() {
                let element =
                    if list.is_atomic() { Ok(Element::Index(index as i64)) } else { list.element(item) };
                let element = match element {
                    Ok(element) => element,
                    Err(error) => {
                        found.push(format!("{}: element {index}: {error}", display(path)));
                        continue;
                    }
                };
                if !seen.members.insert(element.clone()) {
                    found.push(format!("{}: duplicate entries for key {element}", display(path)));
                }
                path.push(element);
                examine(list.item, item, path, found);
                path.pop();
            }
        }
        (Atom::Map(_), other) => found.push(format!("{}: expected map, got {other}", display(path))),
        (Atom::List(_), other) => found.push(format!("{}: expected list, got {other}", display(path))),
        (Atom::Scalar, _) => {
            let Shape::Typed(schema) = shape else { return };
            use crate::schema::SchemaType;
            let (fits, expected) = match schema.kind {
                SchemaType::String => (value.is_string(), "string"),
                SchemaType::Boolean => (value.is_boolean(), "boolean"),
                SchemaType::Integer | SchemaType::Number => (value.is_number(), "numeric (int or float)"),
                _ => (!value.is_object() && !value.is_array(), "any scalar"),
            };
            if !fits {
                let got = match value {
                    Value::String(_) => "string",
                    Value::Bool(_) => "bool",
                    Value::Number(_) => "number",
                    Value::Array(_) => "list",
                    Value::Object(_) | Value::Null => "map",
                };
                found.push(format!("{}: expected {expected}, got {got}", display(path)));
            }
        }
    }
}

/// `value` without the fields of `set`. A container that loses all its content becomes null, which [`settle`]
/// fixes.
pub fn remove(shape: Shape<'_>, value: &Value, set: &FieldSet) -> Value {
    match (shape.atom(Some(value)), value) {
        (Atom::Map(fields), Value::Object(map)) if !fields.is_atomic() => {
            let mut left = Map::new();
            for (name, child) in map {
                let element = Element::Field(name.clone());
                if set.members.contains(&element) {
                    continue;
                }
                let child = match set.children.get(&element) {
                    Some(below) => remove(fields.field(name).0, child, below),
                    None => child.clone(),
                };
                left.insert(name.clone(), child);
            }
            if left.is_empty() { Value::Null } else { Value::Object(left) }
        }
        (Atom::List(list), Value::Array(items)) if !list.is_atomic() => {
            let mut left = Vec::new();
            for item in items {
                let Ok(element) = list.element(item) else { continue };
                if set.members.contains(&element) {
                    continue;
                }
                left.push(match set.children.get(&element) {
                    Some(below) => remove(list.item, item, below),
                    None => item.clone(),
                });
            }
            if left.is_empty() { Value::Null } else { Value::Array(left) }
        }
        (Atom::Scalar, _) => value.clone(),
        // Fields below an atomic container stand for the container.
        _ => Value::Null,
    }
}

/// Replaces the nulls that [`remove`] left with empty containers where a manager owns one, and drops the
/// others.
///
/// `before` is the value before the removal; nulls that it already contained stay.
pub fn settle(shape: Shape<'_>, value: &mut Value, before: &Value, owned: &FieldSet) {
    let nothing = FieldSet::default();
    match (value, before) {
        (Value::Object(map), Value::Object(before)) => {
            map.retain(|name, child| {
                let element = Element::Field(name.clone());
                let was = before.get(name).unwrap_or(&Value::Null);
                if child.is_null() && !was.is_null() {
                    *child =
                        if was.is_array() { Value::Array(Vec::new()) } else { Value::Object(Map::new()) };
                    return owned.members.contains(&element);
                }
                let below = owned.children.get(&element).unwrap_or(&nothing);
                settle(shape.below(&element).0, child, was, below);
                true
            });
        }
        (Value::Array(items), Value::Array(before)) => {
            let Atom::List(list) = shape.atom(None) else { return };
            for item in items.iter_mut() {
                let Ok(element) = list.element(item) else { continue };
                let was = before.iter().find(|was| list.element(was).is_ok_and(|found| found == element));
                let below = owned.children.get(&element).unwrap_or(&nothing);
                settle(list.item, item, was.unwrap_or(&Value::Null), below);
            }
        }
        _ => {}
    }
}

/// The set, plus the schema-named fields on the paths to its members.
pub fn with_named_parents(shape: Shape<'_>, set: &FieldSet) -> FieldSet {
    let mut whole = FieldSet { members: set.members.clone(), children: BTreeMap::new() };
    for (element, child) in &set.children {
        let (below, named) = shape.below(element);
        if named {
            whole.members.insert(element.clone());
        }
        whole.children.insert(element.clone(), with_named_parents(below, child));
    }
    whole
}

/// The set for the current schema: fields below a container that is now atomic are replaced by the container.
pub fn reconciled(shape: Shape<'_>, set: &FieldSet) -> FieldSet {
    let mut today = FieldSet { members: set.members.clone(), children: BTreeMap::new() };
    for (element, child) in &set.children {
        let (below, _) = shape.below(element);
        if matches!(below, Shape::Typed(_)) && below.is_atomic_container() {
            today.members.insert(element.clone());
        } else {
            today.children.insert(element.clone(), reconciled(below, child));
        }
    }
    today
}
