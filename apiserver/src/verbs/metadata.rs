//! Validation of `metadata` for all kinds: names, labels, annotations, owners, finalizers. The kind matters
//! only for allowed names.

use serde_json::Value;

use crate::call::Call;
use crate::object;
use crate::status::{ApiError, Cause, Result};

/// Checks the types of the fields that the rules of all kinds access, before the rules run.
pub fn check_shapes(call: &Call, new: &Value) -> Result<()> {
    let maps =
        ["metadata", "spec", "status", "data", "stringData", "roleRef"].map(|field| (field, &new[field]));
    let nested = ["labels", "annotations"].map(|field| (field, &new["metadata"][field]));
    for (field, value) in maps.into_iter().chain(nested) {
        let known = call.resource.custom.is_none() || matches!(field, "metadata" | "labels" | "annotations");
        if known && !value.is_null() && !value.is_object() {
            return Err(ApiError::bad_request(format!("{field} must be an object, and it is {value}")));
        }
    }
    let subjects = new["subjects"].as_array().into_iter().flatten();
    if call.resource.custom.is_none() && subjects.into_iter().any(|subject| !subject.is_object()) {
        return Err(ApiError::bad_request("subjects must be objects"));
    }
    Ok(())
}

/// Maximum bytes of all annotations together, as in Kubernetes.
const MAX_ANNOTATION_BYTES: usize = 256 * 1024;

/// Validates what a new owner reference may say: one controller, and no Event as an owner.
fn owners(new: &Value, old: Option<&Value>, causes: &mut Vec<Cause>) {
    let owners = object::owners(new);
    if old.is_some_and(|old| object::owners(old) == owners) {
        return;
    }
    let mut invalid = |field: String, message: String| {
        causes.push(Cause { reason: "FieldValueInvalid".into(), message, field });
    };
    let controllers: Vec<&str> = owners
        .iter()
        .filter(|owner| owner["controller"] == true)
        .map(|owner| owner["name"].as_str().unwrap_or_default())
        .collect();
    if let [first, second, ..] = controllers.as_slice() {
        let found = format!("Found \"true\" in references for {first} and {second}");
        let message = format!("Invalid value: only one reference can have Controller set to true. {found}");
        invalid("metadata.ownerReferences".into(), message);
    }
    for (index, owner) in owners.iter().enumerate() {
        if owner["apiVersion"] == "v1" && owner["kind"] == "Event" {
            let field = format!("metadata.ownerReferences[{index}]");
            invalid(field, "Invalid value: v1, Kind=Event is disallowed from being an owner".into());
        }
    }
}

/// Validates the names of new finalizers, and leaves each of the finalizers once: a set has no repetitions.
fn finalizers(call: &Call, new: &mut Value, old: Option<&Value>, causes: &mut Vec<Cause>) {
    let Some(given) = new["metadata"]["finalizers"].as_array() else { return };
    if given.iter().any(|finalizer| !finalizer.is_string()) {
        // The schema says so.
        return;
    }
    let mut seen = std::collections::BTreeSet::new();
    let distinct: Vec<String> = object::finalizers(new)
        .into_iter()
        .filter(|finalizer| seen.insert(*finalizer))
        .map(str::to_owned)
        .collect();
    // Groups whose types kube-apiserver checks with the rules of its core; the others take every label key.
    let qualified = call.resource.custom.is_none()
        && matches!(call.resource.group.as_str(), "" | "rbac.authorization.k8s.io" | "certificates.k8s.io");
    let before: std::collections::BTreeSet<&str> =
        old.map(object::finalizers).unwrap_or_default().into_iter().collect();
    for finalizer in distinct.iter().filter(|finalizer| !before.contains(finalizer.as_str())) {
        let problem = if !object::is_label_key(finalizer) {
            "name part must consist of alphanumeric characters, '-', '_' or '.', and a prefix must be a DNS subdomain"
        } else if qualified && !object::is_finalizer_of_builtin(finalizer) {
            "name is neither a standard finalizer name nor is it fully qualified"
        } else {
            continue;
        };
        causes.push(Cause {
            reason: "FieldValueInvalid".into(),
            message: format!("Invalid value: {finalizer:?}: {problem}"),
            field: "metadata.finalizers".into(),
        });
    }
    object::set_finalizers(new, distinct);
}

/// Validates the metadata of a new state, and removes its empty maps and lists.
pub fn check(call: &Call, new: &mut Value, old: Option<&Value>) -> Vec<Cause> {
    let mut causes = Vec::new();
    let mut blame = |field: &str, message: String| {
        causes.push(Cause { reason: "FieldValueInvalid".into(), message, field: field.into() });
    };
    let name = object::name(new).to_string();
    let free_names = call.resource.group == "rbac.authorization.k8s.io";
    let fits = if free_names {
        !name.contains('/') && !name.contains('%') && name != "." && name != ".."
    } else if call.resource.kind == "Namespace" {
        object::is_dns_label(&name)
    } else {
        object::is_subdomain(&name)
    };
    if old.is_none() && !fits {
        let problem = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character";
        blame("metadata.name", format!("Invalid value: \"{name}\": {problem}"));
    }
    for field in ["labels", "annotations"] {
        let at = format!("metadata.{field}");
        match &new["metadata"][field] {
            Value::Null => {}
            Value::Object(entries) => {
                for (key, value) in entries {
                    // As in Kubernetes, an annotation's domain may have capitals and a label's may not.
                    let lower = if field == "annotations" { key.to_lowercase() } else { key.clone() };
                    let before = old.is_some_and(|old| old["metadata"][field].get(key).is_some());
                    if !before && !object::is_label_key(&lower) {
                        blame(
                            &at,
                            format!(
                                "Invalid value: \"{key}\": name part must consist of alphanumeric characters, '-', '_' or '.'"
                            ),
                        );
                    }
                    match value.as_str() {
                        None => {
                            blame(&at, format!("Invalid value: {value}: the value of {key} must be a string"))
                        }
                        Some(text) if field == "labels" && !object::is_label_value(text) => {
                            blame(
                                &at,
                                format!(
                                    "Invalid value: \"{text}\": a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must be at most 63 characters"
                                ),
                            );
                        }
                        Some(_) => {}
                    }
                }
            }
            other => blame(&at, format!("Invalid value: {other}: must be a map of strings")),
        }
    }
    for (index, owner) in object::owners(new).iter().enumerate() {
        for field in ["apiVersion", "kind", "name", "uid"] {
            if owner[field].as_str().is_none_or(str::is_empty) {
                blame(
                    &format!("metadata.ownerReferences[{index}].{field}"),
                    "Required value: must not be empty".into(),
                );
            }
        }
    }
    let annotations = &new["metadata"]["annotations"];
    let bytes: usize = annotations
        .as_object()
        .into_iter()
        .flatten()
        .map(|(key, value)| key.len() + value.as_str().map_or(0, str::len))
        .sum();
    if bytes > MAX_ANNOTATION_BYTES && old.is_none_or(|old| old["metadata"]["annotations"] != *annotations) {
        causes.push(Cause {
            reason: "FieldValueTooLong".into(),
            message: format!("Too long: may not be more than {MAX_ANNOTATION_BYTES} bytes"),
            field: "metadata.annotations".into(),
        });
    }
    owners(new, old, &mut causes);
    finalizers(call, new, old, &mut causes);
    let metadata = object::metadata_mut(new);
    for field in ["labels", "annotations", "finalizers", "ownerReferences"] {
        // Empty and absent are equivalent; storing only one of them keeps no-op writes no-ops.
        let empty = match metadata.get(field) {
            Some(Value::Null) => true,
            Some(Value::Object(entries)) => entries.is_empty(),
            Some(Value::Array(entries)) => entries.is_empty(),
            _ => false,
        };
        if empty {
            metadata.remove(field);
        }
    }
    if let Some(old) = old
        && object::is_terminating(old)
    {
        let before = object::finalizers(old);
        let added: Vec<&str> =
            object::finalizers(new).into_iter().filter(|finalizer| !before.contains(finalizer)).collect();
        if !added.is_empty() {
            causes.push(Cause {
                reason: "FieldValueForbidden".into(),
                message: format!("Forbidden: no new finalizers can be added if the object is being deleted, found new finalizers {added:?}"),
                field: "metadata.finalizers".into(),
            });
        }
    }
    causes
}
