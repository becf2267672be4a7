//! Merges an applied configuration into a live value: maps and keyed lists are merged, everything else is
//! replaced.
//!
//! Not here: removal of fields that the configuration no longer contains.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde_json::{Map, Value};

use super::compare::elements;
use super::path::Element;
use super::shape::{Atom, Fields, List, Shape};

/// `live` with everything in `config`.
pub fn merge(shape: Shape<'_>, live: Option<&Value>, config: Option<&Value>) -> Option<Value> {
    let atom = if config.is_none() { shape.atom(live) } else { shape.atom(config) };
    let whole = || config.or(live).cloned();
    match atom {
        Atom::Scalar => whole(),
        Atom::Map(fields) => {
            let (live, config) = (live.and_then(Value::as_object), config.and_then(Value::as_object));
            let hollow = |map: Option<&Map<String, Value>>| map.is_none_or(Map::is_empty);
            if fields.is_atomic() || (hollow(live) && hollow(config)) {
                return whole();
            }
            Some(merge_fields(fields, live, config))
        }
        Atom::List(list) => {
            let (before, after) = (elements(live), elements(config));
            if list.is_atomic() || (before.is_empty() && after.is_empty()) {
                return whole();
            }
            Some(Value::Array(merge_items(list, before, after)))
        }
    }
}

fn merge_fields(
    fields: Fields<'_>,
    live: Option<&Map<String, Value>>,
    config: Option<&Map<String, Value>>,
) -> Value {
    let names: BTreeSet<&String> = live.into_iter().chain(config).flat_map(Map::keys).collect();
    let merged: Map<String, Value> = names
        .into_iter()
        .filter_map(|name| {
            let (before, after) = (live.and_then(|map| map.get(name)), config.and_then(|map| map.get(name)));
            let value = merge(fields.field(name).0, before, after)?;
            Some((name.clone(), value))
        })
        .collect();
    Value::Object(merged)
}

fn keyed<'a>(list: List<'_>, items: &'a [Value]) -> Vec<(Element, &'a Value)> {
    items.iter().filter_map(|item| Some((list.element(item).ok()?, item))).collect()
}

/// Elements in the order of the configuration, each followed by the live-only elements that followed it
/// before.
fn merge_items(list: List<'_>, live: &[Value], config: &[Value]) -> Vec<Value> {
    let (live, config) = (keyed(list, live), keyed(list, config));
    let configured: BTreeMap<&Element, &Value> =
        config.iter().map(|(element, item)| (element, *item)).collect();
    let mut known: BTreeMap<&Element, Option<&Value>> = BTreeMap::new();
    for (element, item) in &live {
        // Live elements with a duplicate key are not merged with a configured one; it replaces them.
        known.entry(element).and_modify(|item| *item = None).or_insert(Some(item));
    }
    let mut shared: VecDeque<&Element> =
        config.iter().map(|(element, _)| element).filter(|element| known.contains_key(element)).collect();
    let mut taken: BTreeSet<&Element> = BTreeSet::new();
    let mut merged = Vec::new();
    let join = |element: &Element| {
        let live = known.get(element).copied().flatten();
        merge(list.item, live, configured.get(element).copied())
    };
    let (mut left, mut right) = (live.iter().peekable(), config.iter().peekable());
    loop {
        match (left.peek(), right.peek()) {
            (None, None) => return merged,
            (Some((ours, _)), Some((theirs, _))) if ours == theirs => {
                merged.extend(join(theirs));
                taken.insert(theirs);
                shared.pop_front();
                left.next();
                right.next();
                continue;
            }
            // A shared element that comes later in the configuration's order.
            (Some((ours, _)), Some(_))
                if configured.contains_key(ours) && shared.front().is_some_and(|next| *next != ours) =>
            {
                left.next();
                continue;
            }
            _ => {}
        }
        if let Some((ours, item)) = left.peek() {
            if !configured.contains_key(ours) {
                merged.extend(merge(list.item, Some(item), None));
                left.next();
                continue;
            }
            if taken.contains(ours) {
                left.next();
            }
        }
        if let Some((theirs, _)) = right.next() {
            merged.extend(join(theirs));
            taken.insert(theirs);
            if shared.front() == Some(&theirs) {
                shared.pop_front();
            }
        }
    }
}
