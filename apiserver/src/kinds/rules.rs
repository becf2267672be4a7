//! Special rules of single built-in kinds on writes: defaults that depend on the request, fields that the
//! server sets, and validation beyond schemas. Custom resources have none of this.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use super::checks::{self, Causes};
use super::definition;
use super::resource::Resource;
use crate::admission::validation;
use crate::call::Call;
use crate::object;
use crate::object_limit::quota;
use crate::schema::canonical::decode_base64;
use crate::schema::values::shown;
use crate::status::Cause;

/// Completes an object before it is validated.
pub fn prepare(call: &Call, new: &mut Value, old: Option<&Value>, now: &str) {
    if call.resource.custom.is_some() {
        return;
    }
    match call.resource.kind.as_str() {
        "Namespace" => namespace(call, new, old),
        "Secret" => secret(new),
        "CustomResourceDefinition" => {
            definition::default(new);
            if old.is_none() {
                let mut finalizers: Vec<String> =
                    object::finalizers(new).into_iter().map(str::to_string).collect();
                if !finalizers.iter().any(|finalizer| finalizer == definition::CLEANUP) {
                    finalizers.push(definition::CLEANUP.into());
                }
                object::set_finalizers(new, finalizers);
            }
        }
        "CertificateSigningRequest" => signing_request(call, new, old, now),
        "RoleBinding" | "ClusterRoleBinding" => binding(new),
        "ResourceQuota" => quota_numbers(new),
        "ValidatingAdmissionPolicy" => validation::fill_defaults(&mut new["spec"], "matchConstraints"),
        "ValidatingAdmissionPolicyBinding" => validation::fill_defaults(&mut new["spec"], "matchResources"),
        "ClusterRole" | "Role" if new["rules"].is_null() => new["rules"] = json!([]),
        _ => {}
    }
}

/// The finalizer in `spec.finalizers` that keeps a namespace until its contents are deleted.
pub const NAMESPACE_CONTENTS: &str = "kubernetes";

fn namespace(call: &Call, new: &mut Value, old: Option<&Value>) {
    let name = object::name(new).to_string();
    new["metadata"]["labels"]["kubernetes.io/metadata.name"] = json!(name);
    match old {
        None => {
            let mut finalizers: Vec<Value> =
                new["spec"]["finalizers"].as_array().cloned().unwrap_or_default();
            if !finalizers.iter().any(|finalizer| finalizer == NAMESPACE_CONTENTS) {
                finalizers.push(json!(NAMESPACE_CONTENTS));
            }
            new["spec"] = json!({"finalizers": finalizers});
            new["status"] = json!({"phase": "Active"});
        }
        // Only /finalize writes them: a manifest has none, and without them a deletion leaves everything behind.
        Some(old) if call.subresource != "finalize" => object::copy_field(new, old, "spec"),
        Some(_) => {}
    }
}

/// Moves a Secret's `stringData` to `data`. Applied configurations are folded before they are compared, so
/// that field ownership refers to `data`.
pub fn fold_string_data(secret: &mut Value) {
    if !matches!(secret["data"], Value::Null | Value::Object(_)) {
        return;
    }
    let plain = secret.as_object_mut().and_then(|fields| fields.remove("stringData"));
    for (key, value) in plain.iter().filter_map(Value::as_object).flatten() {
        if let Some(text) = value.as_str() {
            secret["data"][key] = json!(STANDARD.encode(text));
        }
    }
}

fn secret(new: &mut Value) {
    fold_string_data(new);
    if new["type"].as_str().is_none_or(str::is_empty) {
        new["type"] = json!("Opaque");
    }
}

fn signing_request(call: &Call, new: &mut Value, old: Option<&Value>, now: &str) {
    match old {
        None => {
            // Signers must not trust these fields from the body: the server sets them.
            let user = call.user.to_value();
            for field in ["username", "groups", "uid", "extra"] {
                object::copy_field(&mut new["spec"], &user, field);
            }
            new["status"] = json!({});
            if new["spec"]["usages"].is_null() {
                new["spec"]["usages"] = json!(["digital signature", "key encipherment"]);
            }
        }
        Some(old) => object::copy_field(new, old, "spec"),
    }
    for condition in new["status"]["conditions"].as_array_mut().into_iter().flatten() {
        for field in ["lastUpdateTime", "lastTransitionTime"] {
            if condition.is_object() && condition[field].is_null() {
                condition[field] = json!(now);
            }
        }
    }
}

/// Restores the decisions of a CertificateSigningRequest: only `/approval` may make them.
pub fn keep_decisions(new: &mut Value, old: &Value) {
    let decides = |condition: &Value| matches!(condition["type"].as_str(), Some("Approved" | "Denied"));
    let made = old["status"]["conditions"].as_array().into_iter().flatten().filter(|it| decides(it));
    let Some(status) = new["status"].as_object_mut() else { return };
    let given = match status.get("conditions") {
        None | Some(Value::Null) => &[][..],
        Some(Value::Array(given)) => given.as_slice(),
        // Not a list: validation says so.
        Some(_) => return,
    };
    let kept: Vec<Value> = made.chain(given.iter().filter(|it| !decides(it))).cloned().collect();
    if status.contains_key("conditions") || !kept.is_empty() {
        status.insert("conditions".into(), Value::Array(kept));
    }
}

/// Keys of ConfigMaps and Secrets become file names.
fn is_data_key(key: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !key.is_empty() && key.len() <= 253 && key.chars().all(plain) && key != "." && !key.starts_with("..")
}

fn data_keys(new: &Value, blame: &mut impl FnMut(&str, &str, String)) {
    for field in ["data", "binaryData"] {
        for key in new[field].as_object().into_iter().flatten().map(|(key, _)| key) {
            if !is_data_key(key) {
                let problem = "a valid config key must consist of alphanumeric characters, '-', '_' or '.'";
                blame(
                    "FieldValueInvalid",
                    &format!("{field}[{key}]"),
                    format!("Invalid value: \"{key}\": {problem}"),
                );
            }
        }
    }
}

/// Quantities may be written as numbers.
fn quota_numbers(new: &mut Value) {
    let hard = new.pointer_mut("/spec/hard").and_then(Value::as_object_mut);
    for hard in hard.into_iter().flat_map(Map::values_mut) {
        if hard.is_number() {
            *hard = json!(hard.to_string());
        }
    }
}

fn binding(new: &mut Value) {
    const RBAC: &str = "rbac.authorization.k8s.io";
    if new["roleRef"].is_object() && new["roleRef"]["apiGroup"].as_str().is_none_or(str::is_empty) {
        new["roleRef"]["apiGroup"] = json!(RBAC);
    }
    for subject in new["subjects"].as_array_mut().into_iter().flatten() {
        let named = matches!(subject["kind"].as_str(), Some("User" | "Group"));
        if named && matches!(subject["apiGroup"].as_str(), None | Some("")) {
            subject["apiGroup"] = json!(RBAC);
        }
    }
}

/// Validates an object of a built-in kind.
pub fn validate(resource: &Resource, new: &Value, old: Option<&Value>) -> Vec<Cause> {
    if resource.custom.is_some() {
        return Vec::new();
    }
    let mut causes = Vec::new();
    let mut blame = |reason: &str, field: &str, message: String| {
        causes.push(Cause { reason: reason.into(), message, field: field.into() });
    };
    let unchanged = |field: &str| old.is_none_or(|old| old[field] == new[field]);
    let mut checked = Causes::default();
    match resource.kind.as_str() {
        "Secret" => {
            checks::secret_type(new, old, &mut checked);
            checks::data_size(new, old, true, &mut checked);
        }
        "ConfigMap" => checks::data_size(new, old, false, &mut checked),
        "Role" | "ClusterRole" => checks::rules(new, old, resource.namespaced, &mut checked),
        "RoleBinding" | "ClusterRoleBinding" => checks::binding(new, old, resource.namespaced, &mut checked),
        "Lease" => checks::lease(new, old, &mut checked),
        _ => {}
    }
    match resource.kind.as_str() {
        "Namespace" => {
            let held: Vec<&Value> = old.map(finalizers_of_spec).unwrap_or_default();
            for (index, finalizer) in finalizers_of_spec(new).into_iter().enumerate() {
                let fits = finalizer.as_str().is_some_and(object::is_finalizer_of_builtin);
                if !fits && !held.contains(&finalizer) {
                    blame(
                        "FieldValueInvalid",
                        &format!("spec.finalizers[{index}]"),
                        format!(
                            "Invalid value: {finalizer}: name is neither a standard finalizer name nor is it fully qualified"
                        ),
                    );
                }
            }
            // `edit` and `delete` change both at once.
            let expected = if object::is_terminating(new) { "Terminating" } else { "Active" };
            if !unchanged("status") && new["status"]["phase"].as_str().is_some_and(|phase| phase != expected)
            {
                blame(
                    "FieldValueInvalid",
                    "status.phase",
                    format!(
                        "Invalid value: {}: it is {expected} while metadata.deletionTimestamp says so",
                        new["status"]["phase"]
                    ),
                );
            }
        }
        "Secret" => {
            for (key, value) in new["data"].as_object().into_iter().flatten() {
                if value.as_str().is_none_or(|text| decode_base64(text).is_none()) {
                    blame(
                        "FieldValueInvalid",
                        &format!("data[{key}]"),
                        "Invalid value: must be base64".into(),
                    );
                }
            }
            if !unchanged("type") {
                blame(
                    "FieldValueInvalid",
                    "type",
                    format!("Invalid value: {}: field is immutable", new["type"]),
                );
            }
            data_keys(new, &mut blame);
            immutable(new, old, &["data"], &mut blame);
        }
        "ConfigMap" => {
            for (key, value) in new["data"].as_object().into_iter().flatten() {
                if !value.is_string() {
                    blame(
                        "FieldValueInvalid",
                        &format!("data[{key}]"),
                        format!("Invalid value: {value}: must be a string"),
                    );
                }
            }
            data_keys(new, &mut blame);
            immutable(new, old, &["data", "binaryData"], &mut blame);
        }
        "RoleBinding" | "ClusterRoleBinding" => {
            if new["roleRef"]["name"].as_str().is_none_or(str::is_empty) {
                blame("FieldValueRequired", "roleRef.name", "Required value".into());
            }
            if !unchanged("roleRef") {
                blame(
                    "FieldValueInvalid",
                    "roleRef",
                    format!("Invalid value: {}: cannot change roleRef", new["roleRef"]),
                );
            }
        }
        "CertificateSigningRequest" => {
            for field in ["request", "signerName"] {
                if new["spec"][field].as_str().is_none_or(str::is_empty) {
                    blame("FieldValueRequired", &format!("spec.{field}"), "Required value".into());
                }
            }
        }
        "ResourceQuota" => {
            for (key, hard) in new["spec"]["hard"].as_object().into_iter().flatten() {
                if hard.as_str().and_then(quota::quantity).is_none() {
                    let message = format!("Invalid value: {}: must be a quantity of at least 0", shown(hard));
                    blame("FieldValueInvalid", &format!("spec.hard[{key}]"), message);
                }
            }
        }
        "CustomResourceDefinition" => causes.extend(definition::validate(new, old)),
        "ValidatingAdmissionPolicy" => causes.extend(validation::policy(new)),
        "ValidatingAdmissionPolicyBinding" => causes.extend(validation::binding(new)),
        _ => {}
    }
    causes.extend(checked.0);
    causes
}

/// The finalizers in the spec of a namespace.
fn finalizers_of_spec(namespace: &Value) -> Vec<&Value> {
    namespace["spec"]["finalizers"].as_array().into_iter().flatten().collect()
}

fn immutable(new: &Value, old: Option<&Value>, fields: &[&str], blame: &mut impl FnMut(&str, &str, String)) {
    let Some(old) = old.filter(|old| old["immutable"] == true) else { return };
    if new["immutable"] != true {
        blame(
            "FieldValueForbidden",
            "immutable",
            "Forbidden: field is immutable when `immutable` is set".into(),
        );
    }
    for field in fields {
        if old[*field] != new[*field] {
            blame(
                "FieldValueForbidden",
                field,
                "Forbidden: field is immutable when `immutable` is set".into(),
            );
        }
    }
}
