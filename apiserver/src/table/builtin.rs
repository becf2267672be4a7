//! The columns of the built-in kinds.
//!
//! Not here: custom resources, whose CRDs define their columns.

use jiff::Timestamp;
use serde_json::Value;

use super::{Column, ColumnSource, age, age_column, human_duration, name_column};

/// The columns of a built-in kind (`""`, `Secret`); Name and Age for kinds without columns of their own.
pub fn builtin_columns(group: &str, kind: &str) -> Vec<Column> {
    let (name, age_of_it) = (name_column(), age_column());
    match (group, kind) {
        ("", "Namespace") => vec![
            name,
            column("Status", "string", 0, |object, _| object["status"]["phase"].clone()),
            age_of_it,
        ],
        ("", "Secret") => vec![
            name,
            column("Type", "string", 0, |object, _| object["type"].clone()),
            column("Data", "string", 0, |object, _| size(&object["data"]).into()),
            age_of_it,
        ],
        ("", "ConfigMap") => vec![
            name,
            column("Data", "string", 0, |object, _| {
                (size(&object["data"]) + size(&object["binaryData"])).into()
            }),
            age_of_it,
        ],
        ("", "ServiceAccount") => {
            vec![name, column("Secrets", "string", 0, |object, _| size(&object["secrets"]).into()), age_of_it]
        }
        ("", "Event") | ("events.k8s.io", "Event") => event_columns(),
        ("", "ResourceQuota") => {
            vec![name, column("Request", "string", 0, |object, _| used_of_hard(object).into()), age_of_it]
        }
        ("coordination.k8s.io", "Lease") => vec![
            name,
            column("Holder", "string", 0, |object, _| text(&object["spec"]["holderIdentity"])),
            age_of_it,
        ],
        ("rbac.authorization.k8s.io", "Role" | "ClusterRole")
        | ("apiextensions.k8s.io", "CustomResourceDefinition") => vec![
            name,
            column("Created At", "date", 0, |object, _| object["metadata"]["creationTimestamp"].clone()),
        ],
        ("rbac.authorization.k8s.io", "RoleBinding" | "ClusterRoleBinding") => vec![
            name,
            column("Role", "string", 0, |object, _| {
                format!("{}/{}", string(&object["roleRef"]["kind"]), string(&object["roleRef"]["name"]))
                    .into()
            }),
            age_of_it,
            column("Users", "string", 1, |object, _| subjects(object, "User")),
            column("Groups", "string", 1, |object, _| subjects(object, "Group")),
            column("ServiceAccounts", "string", 1, |object, _| subjects(object, "ServiceAccount")),
        ],
        ("certificates.k8s.io", "CertificateSigningRequest") => vec![
            name,
            age_of_it,
            column("SignerName", "string", 0, |object, _| text(&object["spec"]["signerName"])),
            column("Requestor", "string", 0, |object, _| text(&object["spec"]["username"])),
            column("RequestedDuration", "string", 0, |object, _| {
                object["spec"]["expirationSeconds"]
                    .as_i64()
                    .map_or("<none>".into(), |seconds| human_duration(seconds).into())
            }),
            column("Condition", "string", 0, |object, _| signing_state(object)),
        ],
        _ => vec![name, age_of_it],
    }
}

/// `count/secrets: 3/10, …`
fn used_of_hard(quota: &Value) -> String {
    let hard = quota["status"]["hard"].as_object().into_iter().flatten();
    let each =
        hard.map(|(key, hard)| format!("{key}: {}/{}", string(&quota["status"]["used"][key]), string(hard)));
    each.collect::<Vec<_>>().join(", ")
}

fn event_columns() -> Vec<Column> {
    vec![
        column("Last Seen", "string", 0, |object, now| {
            let stamps = [
                &object["series"]["lastObservedTime"],
                &object["lastTimestamp"],
                &object["deprecatedLastTimestamp"],
                &object["eventTime"],
            ];
            since(stamps, object, now)
        }),
        column("Type", "string", 0, |object, _| text(&object["type"])),
        column("Reason", "string", 0, |object, _| text(&object["reason"])),
        column("Object", "string", 0, |object, _| {
            let about = if object["involvedObject"].is_object() {
                &object["involvedObject"]
            } else {
                &object["regarding"]
            };
            format!("{}/{}", string(&about["kind"]).to_lowercase(), string(&about["name"])).into()
        }),
        column("Subobject", "string", 1, |object, _| text(&object["involvedObject"]["fieldPath"])),
        column("Source", "string", 1, |object, _| {
            let parts: Vec<&str> = [&object["source"]["component"], &object["source"]["host"]]
                .into_iter()
                .filter_map(Value::as_str)
                .filter(|part| !part.is_empty())
                .collect();
            if parts.is_empty() { text(&object["reportingController"]) } else { parts.join(", ").into() }
        }),
        column("Message", "string", 0, |object, _| {
            let message = if object["message"].is_string() { &object["message"] } else { &object["note"] };
            string(message).trim().into()
        }),
        column("First Seen", "string", 1, |object, now| {
            since(
                [
                    &object["firstTimestamp"],
                    &object["deprecatedFirstTimestamp"],
                    &object["eventTime"],
                    &Value::Null,
                ],
                object,
                now,
            )
        }),
        column("Count", "string", 1, |object, _| {
            object["series"]["count"].as_i64().or(object["count"].as_i64()).unwrap_or(1).into()
        }),
        // Users rarely address Events by name, so their random name comes last.
        Column { priority: 1, ..name_column() },
    ]
}

fn since(stamps: [&Value; 4], object: &Value, now: Timestamp) -> Value {
    let found = stamps.into_iter().find(|stamp| stamp.is_string());
    age(found.unwrap_or(&object["metadata"]["creationTimestamp"]), now)
}

fn column(name: &str, kind: &str, priority: i64, code: fn(&Value, Timestamp) -> Value) -> Column {
    Column {
        name: name.into(),
        kind: kind.into(),
        format: String::new(),
        description: format!("{name} of the object."),
        priority,
        source: ColumnSource::Code(code),
    }
}

fn size(value: &Value) -> usize {
    match value {
        Value::Object(map) => map.len(),
        Value::Array(items) => items.len(),
        _ => 0,
    }
}

fn string(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn text(value: &Value) -> Value {
    string(value).into()
}

fn subjects(object: &Value, kind: &str) -> Value {
    let names: Vec<String> = object["subjects"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|subject| subject["kind"] == kind)
        .map(|subject| match subject["namespace"].as_str() {
            Some(namespace) => format!("{namespace}/{}", string(&subject["name"])),
            None => string(&subject["name"]).to_owned(),
        })
        .collect();
    names.join(", ").into()
}

fn signing_state(object: &Value) -> Value {
    let mut states: Vec<&str> = object["status"]["conditions"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|condition| condition["type"].as_str())
        .collect();
    if states.is_empty() {
        states.push("Pending");
    }
    if !string(&object["status"]["certificate"]).is_empty() {
        states.push("Issued");
    }
    states.join(",").into()
}
