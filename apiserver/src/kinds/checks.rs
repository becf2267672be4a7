//! Validation of single built-in kinds beyond their schemas: sizes, required keys, rules and subjects of RBAC, numbers.
//! Each check is of a field that changed: what an older release let in may stay.
//!
//! Not here: validation of definitions and policies; what the server fills in.

use serde_json::Value;

use crate::auth::rbac;
use crate::object;
use crate::schema::canonical::decode_base64;
use crate::status::Cause;

/// Maximum bytes of the values of a ConfigMap or a Secret together, as in Kubernetes.
const MAX_DATA_BYTES: usize = 1024 * 1024;

/// The causes found so far.
#[derive(Debug, Default)]
pub struct Causes(pub Vec<Cause>);

impl Causes {
    fn add(&mut self, reason: &str, field: impl Into<String>, message: impl Into<String>) {
        self.0.push(Cause { reason: reason.into(), message: message.into(), field: field.into() });
    }

    fn invalid(&mut self, field: impl Into<String>, value: &Value, problem: &str) {
        self.add("FieldValueInvalid", field, format!("Invalid value: {value}: {problem}"));
    }

    fn required(&mut self, field: impl Into<String>, problem: &str) {
        let message = if problem.is_empty() {
            "Required value".to_owned()
        } else {
            format!("Required value: {problem}")
        };
        self.add("FieldValueRequired", field, message);
    }

    fn unsupported(&mut self, field: impl Into<String>, value: &Value, supported: &str) {
        let message = format!("Unsupported value: {value}: supported values: {supported}");
        self.add("FieldValueNotSupported", field, message);
    }
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

fn list<'a>(value: &'a Value, field: &str) -> &'a [Value] {
    value[field].as_array().map_or(&[], Vec::as_slice)
}

fn changed(new: &Value, old: Option<&Value>, field: &str) -> bool {
    old.is_none_or(|old| old[field] != new[field])
}

/// Validates a ConfigMap's or a Secret's size.
pub fn data_size(new: &Value, old: Option<&Value>, is_secret: bool, causes: &mut Causes) {
    if !["data", "binaryData"].iter().any(|field| changed(new, old, field)) {
        return;
    }
    let size = |field: &str, encoded: bool| -> usize {
        let values = new[field].as_object().into_iter().flatten().filter_map(|(_, value)| value.as_str());
        values
            .map(|value| if encoded { value.trim_end_matches('=').len() * 3 / 4 } else { value.len() })
            .sum()
    };
    if size("data", is_secret) + size("binaryData", true) > MAX_DATA_BYTES {
        let message = format!("Too long: may not be more than {MAX_DATA_BYTES} bytes");
        causes.add("FieldValueTooLong", "data", message);
    }
}

/// Validates the keys that a Secret's type requires.
pub fn secret_type(new: &Value, old: Option<&Value>, causes: &mut Causes) {
    if !changed(new, old, "data") && !changed(new, old, "type") {
        return;
    }
    let data = &new["data"];
    let is_there = |key: &str| data.get(key).is_some();
    let mut require = |key: &str| {
        if !is_there(key) {
            causes.required(format!("data[{key}]"), "");
        }
    };
    let account = "kubernetes.io/service-account.name";
    match text(new, "type") {
        "kubernetes.io/service-account-token"
            if text(&new["metadata"]["annotations"], account).is_empty() =>
        {
            causes.required(format!("metadata.annotations[{account}]"), "");
        }
        kind @ ("kubernetes.io/dockercfg" | "kubernetes.io/dockerconfigjson") => {
            let key = if kind.ends_with("json") { ".dockerconfigjson" } else { ".dockercfg" };
            require(key);
            let is_json = |bytes: Vec<u8>| serde_json::from_slice::<serde::de::IgnoredAny>(&bytes).is_ok();
            if is_there(key) && !decode_base64(text(data, key)).is_some_and(is_json) {
                let message = "Invalid value: \"<secret contents redacted>\": it is not JSON";
                causes.add("FieldValueInvalid", format!("data[{key}]"), message);
            }
        }
        "kubernetes.io/basic-auth" if !is_there("username") && !is_there("password") => {
            require("username");
            require("password");
        }
        "kubernetes.io/ssh-auth" if text(data, "ssh-privatekey").is_empty() => {
            causes.required("data[ssh-privatekey]", "");
        }
        "kubernetes.io/tls" => {
            require("tls.crt");
            require("tls.key");
        }
        _ => {}
    }
}

/// Validates the rules of a Role or a ClusterRole.
pub fn rules(new: &Value, old: Option<&Value>, namespaced: bool, causes: &mut Causes) {
    if !changed(new, old, "rules") {
        return;
    }
    for (index, rule) in list(new, "rules").iter().enumerate() {
        let at = |field: &str| format!("rules[{index}].{field}");
        if list(rule, "verbs").is_empty() {
            causes.required(at("verbs"), "verbs must contain at least one value");
        }
        if list(rule, "nonResourceURLs").is_empty() {
            if list(rule, "apiGroups").is_empty() {
                causes.required(at("apiGroups"), "resource rules must supply at least one api group");
            }
            if list(rule, "resources").is_empty() {
                causes.required(at("resources"), "resource rules must supply at least one resource");
            }
            continue;
        }
        let urls = &rule["nonResourceURLs"];
        if namespaced {
            causes.invalid(at("nonResourceURLs"), urls, "namespaced rules cannot apply to non-resource URLs");
        }
        if ["apiGroups", "resources", "resourceNames"].iter().any(|field| !list(rule, field).is_empty()) {
            let problem = "rules cannot apply to both regular resources and non-resource URLs";
            causes.invalid(at("nonResourceURLs"), urls, problem);
        }
    }
}

/// Validates the subjects and the role of a RoleBinding or a ClusterRoleBinding.
pub fn binding(new: &Value, old: Option<&Value>, namespaced: bool, causes: &mut Causes) {
    if changed(new, old, "roleRef") {
        let role = &new["roleRef"];
        if text(role, "apiGroup") != rbac::GROUP {
            causes.unsupported("roleRef.apiGroup", &role["apiGroup"], &format!("{:?}", rbac::GROUP));
        }
        match text(role, "kind") {
            "ClusterRole" => {}
            "Role" if namespaced => {}
            _ if namespaced => causes.unsupported("roleRef.kind", &role["kind"], r#""ClusterRole", "Role""#),
            _ => causes.unsupported("roleRef.kind", &role["kind"], r#""ClusterRole""#),
        }
    }
    if !changed(new, old, "subjects") {
        return;
    }
    for (index, subject) in list(new, "subjects").iter().enumerate() {
        let at = |field: &str| format!("subjects[{index}].{field}");
        if text(subject, "name").is_empty() {
            causes.required(at("name"), "");
        }
        let group = text(subject, "apiGroup");
        match text(subject, "kind") {
            "ServiceAccount" => {
                if !group.is_empty() {
                    causes.unsupported(at("apiGroup"), &subject["apiGroup"], r#""""#);
                }
                let name = text(subject, "name");
                if !name.is_empty() && !object::is_subdomain(name) {
                    causes.invalid(at("name"), &subject["name"], "it is no name of a ServiceAccount");
                }
                if !namespaced && text(subject, "namespace").is_empty() {
                    causes.required(at("namespace"), "");
                }
            }
            "User" | "Group" => {
                if group != rbac::GROUP {
                    causes.unsupported(at("apiGroup"), &subject["apiGroup"], &format!("{:?}", rbac::GROUP));
                }
            }
            _ => causes.unsupported(at("kind"), &subject["kind"], r#""Group", "ServiceAccount", "User""#),
        }
    }
}

/// Validates the numbers of a Lease.
pub fn lease(new: &Value, old: Option<&Value>, causes: &mut Causes) {
    let number = |field: &str| {
        let before = old.map_or(&Value::Null, |old| &old["spec"][field]);
        new["spec"][field].as_i64().filter(|_| *before != new["spec"][field])
    };
    for (field, least, problem) in [
        ("leaseDurationSeconds", 1, "must be greater than 0"),
        ("leaseTransitions", 0, "must be greater than or equal to 0"),
    ] {
        if let Some(given) = number(field).filter(|given| *given < least) {
            causes.invalid(format!("spec.{field}"), &given.into(), problem);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_kubernetes_refuses_names_the_field() {
        let big = "x".repeat(MAX_DATA_BYTES + 1);
        let base64 = "A".repeat((MAX_DATA_BYTES + 3) / 3 * 4);
        let secret = |kind: &str, data: Value| json!({"type": kind, "data": data});
        let rule = |rule: Value| json!({"rules": [rule]});
        let subject = |subject: Value| json!({"roleRef": {"apiGroup": rbac::GROUP, "kind": "ClusterRole", "name": "r"}, "subjects": [subject]});
        let user = json!({"kind": "User", "apiGroup": rbac::GROUP, "name": "u"});
        type Check = fn(&Value, Option<&Value>, &mut Causes);
        let config: Check = |new, old, causes| data_size(new, old, false, causes);
        let size: Check = |new, old, causes| data_size(new, old, true, causes);
        let role: Check = |new, old, causes| rules(new, old, true, causes);
        let cluster_role: Check = |new, old, causes| rules(new, old, false, causes);
        let bound: Check = |new, old, causes| binding(new, old, true, causes);
        let cluster_bound: Check = |new, old, causes| binding(new, old, false, causes);
        for (check, object, expected) in [
            (config, json!({"data": {"a": "b"}}), vec![]),
            (config, json!({"data": {"a": big}}), vec!["data"]),
            (config, json!({"binaryData": {"a": base64}, "data": {"b": "x"}}), vec!["data"]),
            (size, json!({"data": {"a": base64}}), vec!["data"]),
            (secret_type, secret("Opaque", json!({})), vec![]),
            (secret_type, secret("kubernetes.io/tls", json!({"tls.crt": ""})), vec!["data[tls.key]"]),
            (secret_type, secret("kubernetes.io/tls", json!({"tls.crt": "", "tls.key": ""})), vec![]),
            (
                secret_type,
                secret("kubernetes.io/dockerconfigjson", json!({})),
                vec!["data[.dockerconfigjson]"],
            ),
            (
                secret_type,
                secret("kubernetes.io/dockerconfigjson", json!({".dockerconfigjson": "eA=="})),
                vec!["data[.dockerconfigjson]"],
            ),
            (
                secret_type,
                secret("kubernetes.io/dockerconfigjson", json!({".dockerconfigjson": "e30="})),
                vec![],
            ),
            (secret_type, secret("kubernetes.io/dockercfg", json!({".dockercfg": "e30="})), vec![]),
            (
                secret_type,
                secret("kubernetes.io/basic-auth", json!({})),
                vec!["data[username]", "data[password]"],
            ),
            (secret_type, secret("kubernetes.io/basic-auth", json!({"password": "eA=="})), vec![]),
            (
                secret_type,
                secret("kubernetes.io/ssh-auth", json!({"ssh-privatekey": ""})),
                vec!["data[ssh-privatekey]"],
            ),
            (
                secret_type,
                secret("kubernetes.io/service-account-token", json!({})),
                vec!["metadata.annotations[kubernetes.io/service-account.name]"],
            ),
            (role, rule(json!({"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]})), vec![]),
            (role, rule(json!({})), vec!["rules[0].verbs", "rules[0].apiGroups", "rules[0].resources"]),
            (
                role,
                rule(json!({"nonResourceURLs": ["/x"], "verbs": ["get"]})),
                vec!["rules[0].nonResourceURLs"],
            ),
            (cluster_role, rule(json!({"nonResourceURLs": ["/x"], "verbs": ["get"]})), vec![]),
            (
                cluster_role,
                rule(json!({"nonResourceURLs": ["/x"], "resources": ["y"], "verbs": ["get"]})),
                vec!["rules[0].nonResourceURLs"],
            ),
            (bound, subject(user.clone()), vec![]),
            (bound, subject(json!({"kind": "User", "name": "u"})), vec!["subjects[0].apiGroup"]),
            (bound, subject(json!({"kind": "Robot", "name": "u"})), vec!["subjects[0].kind"]),
            (bound, subject(json!({"kind": "ServiceAccount"})), vec!["subjects[0].name"]),
            (bound, subject(json!({"kind": "ServiceAccount", "name": "s"})), vec![]),
            (
                cluster_bound,
                subject(json!({"kind": "ServiceAccount", "name": "s"})),
                vec!["subjects[0].namespace"],
            ),
            (
                cluster_bound,
                json!({"roleRef": {"apiGroup": "x", "kind": "Role", "name": "r"}, "subjects": [user]}),
                vec!["roleRef.apiGroup", "roleRef.kind"],
            ),
            (lease, json!({"spec": {"leaseDurationSeconds": 1, "leaseTransitions": 0}}), vec![]),
            (
                lease,
                json!({"spec": {"leaseDurationSeconds": 0, "leaseTransitions": -1}}),
                vec!["spec.leaseDurationSeconds", "spec.leaseTransitions"],
            ),
        ] {
            let fields = |old: Option<&Value>| -> Vec<String> {
                let mut causes = Causes::default();
                check(&object, old, &mut causes);
                causes.0.into_iter().map(|cause| cause.field).collect()
            };
            assert_eq!(fields(None), expected, "{object:.200}");
            assert_eq!(fields(Some(&object)), [""; 0], "unchanged: {object:.200}");
        }
    }
}
