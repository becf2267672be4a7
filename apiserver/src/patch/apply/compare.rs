//! Compares two values field by field.
//!
//! Not here: the effect of a difference on managers.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::path::{Element, Path, same};
use super::set::FieldSet;
use super::shape::{Atom, Fields, List, Shape};

/// The fields in which two values differ; no field is in two of the sets.
#[derive(Debug, Default)]
pub struct Comparison {
    /// Only in the first.
    pub removed: FieldSet,
    /// In both, with different values.
    pub modified: FieldSet,
    /// Only in the second.
    pub added: FieldSet,
}

/// Compares `old` with `new`.
pub fn compare(shape: Shape<'_>, old: &Value, new: &Value) -> Comparison {
    let mut comparison = Comparison::default();
    comparison.walk(shape, Some(old), Some(new), &mut Vec::new());
    comparison
}

/// The elements of a list; empty for other values.
pub fn elements(value: Option<&Value>) -> &[Value] {
    value.and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

impl Comparison {
    fn walk(&mut self, shape: Shape<'_>, old: Option<&Value>, new: Option<&Value>, path: &mut Path) {
        let (before, after) = (shape.atom(old), shape.atom(new));
        let leaf = match (old, new) {
            (_, None) => self.visit(before, old, new, path),
            (None, _) => self.visit(after, old, new, path),
            _ if before.is_like(&after) => self.visit(after, old, new, path),
            // The value has changed its type: it loses its old fields and gains the new ones.
            _ => {
                self.visit(before, old, new, path);
                self.visit(after, old, new, path)
            }
        };
        match (old, new) {
            (None, Some(_)) if !leaf => self.added.insert(path),
            (Some(_), None) if !leaf => self.removed.insert(path),
            _ => {}
        }
    }

    /// Compares values as `atom`; returns whether it is one field.
    fn visit(&mut self, atom: Atom<'_>, old: Option<&Value>, new: Option<&Value>, path: &mut Path) -> bool {
        match atom {
            Atom::Scalar => self.leaf(old, new, path),
            Atom::List(list) => {
                let (before, after) = (elements(old), elements(new));
                if list.is_atomic() || (before.is_empty() && after.is_empty()) {
                    return self.leaf(old, new, path);
                }
                self.items(list, before, after, path);
                false
            }
            Atom::Map(fields) => {
                let (before, after) = (old.and_then(Value::as_object), new.and_then(Value::as_object));
                let hollow = |map: Option<&Map<String, Value>>| map.is_none_or(Map::is_empty);
                if fields.is_atomic() || (hollow(before) && hollow(after)) {
                    return self.leaf(old, new, path);
                }
                self.fields(fields, before, after, path);
                false
            }
        }
    }

    fn leaf(&mut self, old: Option<&Value>, new: Option<&Value>, path: &Path) -> bool {
        match (old, new) {
            (None, None) => {}
            (None, Some(_)) => self.added.insert(path),
            (Some(_), None) => self.removed.insert(path),
            (Some(old), Some(new)) => {
                if !same(old, new) {
                    self.modified.insert(path);
                }
            }
        }
        true
    }

    fn fields(
        &mut self,
        fields: Fields<'_>,
        old: Option<&Map<String, Value>>,
        new: Option<&Map<String, Value>>,
        path: &mut Path,
    ) {
        let names: BTreeSet<&String> = old.into_iter().chain(new).flat_map(Map::keys).collect();
        for name in names {
            path.push(Element::Field(name.clone()));
            let (before, after) = (old.and_then(|map| map.get(name)), new.and_then(|map| map.get(name)));
            self.walk(fields.field(name).0, before, after, path);
            path.pop();
        }
    }

    fn items(&mut self, list: List<'_>, old: &[Value], new: &[Value], path: &mut Path) {
        let mut pairs: BTreeMap<Element, (Vec<&Value>, Vec<&Value>)> = BTreeMap::new();
        for item in old {
            if let Ok(element) = list.element(item) {
                pairs.entry(element).or_default().0.push(item);
            }
        }
        for item in new {
            if let Ok(element) = list.element(item) {
                pairs.entry(element).or_default().1.push(item);
            }
        }
        for (element, (before, after)) in pairs {
            path.push(element);
            match (before.as_slice(), after.as_slice()) {
                // Elements with a duplicate key are one field together.
                ([_, _, ..], [_, _, ..]) => {
                    if before.len() != after.len() || !before.iter().zip(&after).all(|(a, b)| same(a, b)) {
                        self.modified.insert(path);
                    }
                }
                ([_, _, ..], rest) => {
                    if let Some(only) = rest.first() {
                        self.walk(list.item, None, Some(only), path);
                    }
                    self.removed.insert(path);
                }
                (rest, [_, _, ..]) => {
                    if let Some(only) = rest.first() {
                        self.walk(list.item, Some(only), None, path);
                    }
                    self.added.insert(path);
                }
                (before, after) => {
                    self.walk(list.item, before.first().copied(), after.first().copied(), path)
                }
            }
            path.pop();
        }
    }
}
