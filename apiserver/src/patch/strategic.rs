//! Strategic merge patch: a merge patch with keyed lists, for the built-in kinds.
//!
//! Not here: custom resources, whose lists have no patch keys; for them this format is a 415.

use serde_json::{Map, Value};

/// Why a strategic merge patch failed.
#[derive(Debug, thiserror::Error)]
pub enum StrategicError {
    /// The patch contradicts itself or the list keys (400).
    #[error("{0}")]
    Malformed(String),
}

/// Merges `patch` into `live`, an object of the built-in `kind`.
///
/// Custom resources have no merge keys: the caller rejects them with 415.
pub fn strategic_merge(kind: &str, live: &Value, patch: &Value) -> Result<Value, StrategicError> {
    let Value::Object(changes) = patch else {
        return Err(StrategicError::Malformed("a strategic merge patch is an object".into()));
    };
    let live = live.as_object().cloned().unwrap_or_default();
    merge_maps(kind, "", live, changes).map(Value::Object)
}

/// How the elements of a list merge.
#[derive(Clone, Copy)]
enum ListMerge {
    Replace,
    Scalars,
    Keyed(&'static str),
}

/// Kind (empty for all), path and merge type: the lists with merge markers in Kubernetes' published types,
/// for the kinds served here.
const LISTS: &[(&str, &str, ListMerge)] = &[
    ("", "metadata.finalizers", ListMerge::Scalars),
    ("", "metadata.ownerReferences", ListMerge::Keyed("uid")),
    ("Namespace", "status.conditions", ListMerge::Keyed("type")),
    ("ServiceAccount", "secrets", ListMerge::Keyed("name")),
    ("ValidatingAdmissionPolicy", "spec.matchConditions", ListMerge::Keyed("name")),
    ("ValidatingAdmissionPolicy", "spec.variables", ListMerge::Keyed("name")),
];

fn list_merge(kind: &str, path: &str) -> ListMerge {
    LISTS
        .iter()
        .find(|(of, at, _)| (of.is_empty() || *of == kind) && *at == path)
        .map_or(ListMerge::Replace, |(_, _, merge)| *merge)
}

const DELETE_FROM: &str = "$deleteFromPrimitiveList/";
const ORDER: &str = "$setElementOrder/";

fn merge_maps(
    kind: &str,
    path: &str,
    mut live: Map<String, Value>,
    changes: &Map<String, Value>,
) -> Result<Map<String, Value>, StrategicError> {
    match changes.get("$patch").map(|directive| directive.as_str().unwrap_or_default()) {
        None | Some("merge") => {}
        Some("replace") => return Ok(without_directives(changes)),
        Some("delete") => return Ok(Map::new()),
        Some(other) => {
            return Err(StrategicError::Malformed(format!(
                "unknown patch directive {other:?} at {path:?}; known are replace, merge and delete"
            )));
        }
    }
    if let Some(retained) = changes.get("$retainKeys") {
        let keys = strings("$retainKeys", retained)?;
        live.retain(|name, _| keys.contains(name));
    }
    for (name, change) in changes {
        if let Some(field) = name.strip_prefix(DELETE_FROM) {
            let removed = list(name, change)?;
            if let Some(Value::Array(items)) = live.get_mut(field) {
                items.retain(|item| !removed.contains(item));
            }
            continue;
        }
        if name.starts_with('$') {
            continue;
        }
        let place = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let merged = match (live.remove(name), change) {
            (_, Value::Null) => continue,
            (current, Value::Object(change)) => {
                let current = match current {
                    Some(Value::Object(current)) => current,
                    _ => Map::new(),
                };
                let deleted = change.get("$patch").is_some_and(|directive| directive == "delete");
                let merged = merge_maps(kind, &place, current, change)?;
                if deleted {
                    continue;
                }
                Value::Object(merged)
            }
            (current, Value::Array(change)) => {
                let current = match current {
                    Some(Value::Array(current)) => current,
                    _ => Vec::new(),
                };
                let order = changes.get(&format!("{ORDER}{name}"));
                merge_lists(kind, &place, current, change, order)?
            }
            (_, scalar) => scalar.clone(),
        };
        live.insert(name.clone(), merged);
    }
    reorder_untouched(kind, path, &mut live, changes)?;
    Ok(live)
}

/// Applies an order directive without changes to the list it orders.
fn reorder_untouched(
    kind: &str,
    path: &str,
    live: &mut Map<String, Value>,
    changes: &Map<String, Value>,
) -> Result<(), StrategicError> {
    for (name, order) in changes {
        let Some(field) = name.strip_prefix(ORDER).filter(|field| !changes.contains_key(*field)) else {
            continue;
        };
        let place = if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") };
        if let Some(Value::Array(items)) = live.get_mut(field) {
            set_order(list_merge(kind, &place), items, list(name, order)?);
        }
    }
    Ok(())
}

fn merge_lists(
    kind: &str,
    path: &str,
    mut live: Vec<Value>,
    changes: &[Value],
    order: Option<&Value>,
) -> Result<Value, StrategicError> {
    let merge = list_merge(kind, path);
    match merge {
        ListMerge::Replace => {
            return Ok(changes.iter().filter(|item| item.get("$patch").is_none()).cloned().collect());
        }
        ListMerge::Scalars => {
            for item in changes {
                if !live.contains(item) {
                    live.push(item.clone());
                }
            }
        }
        ListMerge::Keyed(key) => {
            if changes.iter().any(|item| item.get("$patch").is_some_and(|directive| directive == "replace")) {
                let replacement = changes.iter().filter(|item| item.get("$patch").is_none());
                return Ok(replacement.cloned().collect());
            }
            for item in changes {
                let Some(change) = item.as_object() else {
                    return Err(StrategicError::Malformed(format!("{path} holds objects, got {item}")));
                };
                let Some(value) = change.get(key) else {
                    return Err(StrategicError::Malformed(format!(
                        "map: {item} does not contain declared merge key: {key}"
                    )));
                };
                let position = live.iter().position(|item| item.get(key) == Some(value));
                if change.get("$patch").is_some_and(|directive| directive == "delete") {
                    live.retain(|item| item.get(key) != Some(value));
                    continue;
                }
                let current = position.and_then(|at| live[at].as_object().cloned()).unwrap_or_default();
                let merged = Value::Object(merge_maps(kind, path, current, change)?);
                match position {
                    Some(at) => live[at] = merged,
                    None => live.push(merged),
                }
            }
        }
    }
    if let Some(order) = order {
        set_order(merge, &mut live, list(path, order)?);
    }
    Ok(live.into())
}

/// Sorts the listed elements into the listed order; elements that are not in the patch keep their neighbours.
fn set_order(merge: ListMerge, items: &mut [Value], order: &[Value]) {
    let rank = |item: &Value| {
        order.iter().position(|element| match merge {
            ListMerge::Keyed(key) => item.get(key) == element.get(key),
            ListMerge::Scalars | ListMerge::Replace => item == element,
        })
    };
    let mut known: Vec<Value> = items.iter().filter(|item| rank(item).is_some()).cloned().collect();
    known.sort_by_key(|item| rank(item));
    let mut known = known.into_iter();
    for item in items.iter_mut() {
        if rank(item).is_some()
            && let Some(next) = known.next()
        {
            *item = next;
        }
    }
}

fn without_directives(changes: &Map<String, Value>) -> Map<String, Value> {
    changes
        .iter()
        .filter(|(name, _)| !name.starts_with('$'))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

fn list<'a>(name: &str, value: &'a Value) -> Result<&'a [Value], StrategicError> {
    value
        .as_array()
        .map(Vec::as_slice)
        .ok_or_else(|| StrategicError::Malformed(format!("{name} must be a list, got {value}")))
}

fn strings(name: &str, value: &Value) -> Result<Vec<String>, StrategicError> {
    Ok(list(name, value)?.iter().filter_map(|item| item.as_str().map(str::to_owned)).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::strategic_merge;

    #[test]
    fn lists_merge_by_key_and_directives_apply() {
        let account = json!({"metadata": {"name": "a", "finalizers": ["x", "y"], "labels": {"l": "1"}},
            "secrets": [{"name": "s1", "namespace": "n"}, {"name": "s2"}]});
        let with = |path: &str, value: Value| {
            let mut changed = account.clone();
            *changed.pointer_mut(path).expect("a path of the account") = value;
            changed
        };
        for (name, patch, expected) in [
            ("nothing", json!({}), account.clone()),
            (
                "a map",
                json!({"metadata": {"labels": {"m": "2", "l": null}}}),
                with("/metadata/labels", json!({"m": "2"})),
            ),
            (
                "an element",
                json!({"secrets": [{"name": "s1", "kind": "Secret"}, {"name": "s3"}]}),
                with(
                    "/secrets",
                    json!([{"name": "s1", "namespace": "n", "kind": "Secret"}, {"name": "s2"}, {"name": "s3"}]),
                ),
            ),
            (
                "delete an element",
                json!({"secrets": [{"$patch": "delete", "name": "s1"}]}),
                with("/secrets", json!([{"name": "s2"}])),
            ),
            (
                "replace a list",
                json!({"secrets": [{"$patch": "replace"}, {"name": "s9"}]}),
                with("/secrets", json!([{"name": "s9"}])),
            ),
            (
                "scalars unite",
                json!({"metadata": {"finalizers": ["y", "z"]}}),
                with("/metadata/finalizers", json!(["x", "y", "z"])),
            ),
            (
                "delete scalars",
                json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["x"], "finalizers": ["z"]}}),
                with("/metadata/finalizers", json!(["y", "z"])),
            ),
            (
                "order",
                json!({"$setElementOrder/secrets": [{"name": "s3"}, {"name": "s2"}, {"name": "s1"}], "secrets": [{"name": "s3"}]}),
                with("/secrets", json!([{"name": "s3"}, {"name": "s2"}, {"name": "s1", "namespace": "n"}])),
            ),
            (
                "order alone",
                json!({"metadata": {"$setElementOrder/finalizers": ["y", "x"]}}),
                with("/metadata/finalizers", json!(["y", "x"])),
            ),
            (
                "replace a map",
                json!({"metadata": {"labels": {"$patch": "replace", "n": "3"}}}),
                with("/metadata/labels", json!({"n": "3"})),
            ),
            (
                "retain keys",
                json!({"metadata": {"$retainKeys": ["name"], "name": "a"}}),
                with("/metadata", json!({"name": "a"})),
            ),
            (
                "delete a map",
                json!({"metadata": {"labels": {"$patch": "delete"}}}),
                with("/metadata", json!({"name": "a", "finalizers": ["x", "y"]})),
            ),
        ] {
            assert_eq!(strategic_merge("ServiceAccount", &account, &patch).expect(name), expected, "{name}");
        }
    }

    #[test]
    fn a_list_without_a_key_is_replaced() {
        let role = json!({"rules": [{"verbs": ["get"]}]});
        let merged =
            strategic_merge("Role", &role, &json!({"rules": [{"verbs": ["list"]}]})).expect("a patch");
        assert_eq!(merged, json!({"rules": [{"verbs": ["list"]}]}));
    }

    #[test]
    fn contradictory_strategic_patches_are_errors() {
        for patch in [
            json!([]),
            json!({"secrets": [{"kind": "Secret"}]}),
            json!({"metadata": {"$patch": "frob"}}),
            json!({"metadata": {"$retainKeys": "name"}}),
        ] {
            assert!(strategic_merge("ServiceAccount", &json!({}), &patch).is_err(), "{patch}");
        }
    }
}
