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
                    if !object::is_label_key(&key.to_lowercase()) {
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
