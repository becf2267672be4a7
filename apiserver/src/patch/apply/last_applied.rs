//! The last-applied annotation of client-side apply: lets `kubectl apply --server-side` take over fields that
//! `kubectl apply` wrote.
//!
//! Not here: client-side apply itself; kubectl computes its patches.

use serde_json::{Map, Value};

use super::compare::compare;
use super::fields;
use super::set::FieldSet;
use super::shape::Shape;

/// The only manager with this behaviour.
pub const MANAGER: &str = "kubectl";

const ANNOTATION: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Kubernetes' limit on all annotations of an object, in bytes.
const MAX_ANNOTATION_BYTES: usize = 256 * 1024;

fn annotation(object: &Value) -> Option<&str> {
    object["metadata"]["annotations"][ANNOTATION].as_str().filter(|text| !text.is_empty())
}

/// The fields that client-side apply wrote and that no other manager has changed since.
pub fn owned(shape: Shape<'_>, live: &Value, api_version: &str) -> FieldSet {
    let last = annotation(live).and_then(|text| serde_json::from_str::<Value>(text).ok());
    let Some(last) = last.filter(|last| last["apiVersion"] == api_version) else {
        return FieldSet::default();
    };
    let comparison = compare(shape, &last, live);
    fields::from_value(shape, &last)
        .difference(&comparison.modified)
        .difference(&comparison.added)
        .difference(&comparison.removed)
}

/// Updates the annotation, if there is one, with a configuration applied on the server.
pub fn refresh(object: &mut Value, config: &Value) {
    if annotation(object).is_none() {
        return;
    }
    let mut config = config.clone();
    if let Some(annotations) = config.pointer_mut("/metadata/annotations").and_then(Value::as_object_mut) {
        annotations.remove(ANNOTATION);
    }
    let text = format!("{config}\n");
    let Some(annotations) = object.pointer_mut("/metadata/annotations").and_then(Value::as_object_mut) else {
        return;
    };
    let others: usize = annotations
        .iter()
        .filter(|(name, _)| *name != ANNOTATION)
        .map(|(name, value)| name.len() + value.as_str().map_or(0, str::len))
        .sum();
    if others + ANNOTATION.len() + text.len() > MAX_ANNOTATION_BYTES {
        annotations.remove(ANNOTATION);
    } else {
        annotations.insert(ANNOTATION.into(), text.into());
    }
    if annotations.is_empty()
        && let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut)
    {
        Map::remove(metadata, "annotations");
    }
}
