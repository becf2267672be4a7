//! Custom resource definitions: their defaults, validation and conditions when written, and the resources
//! they serve. Names and conditions are decided within the write, so a new kind is served at once.

use serde_json::{Map, Value, json};

use super::builtin;
use super::resource::{Backing, CustomResource, Resource, Scale};
use super::table::Table;
use crate::object;
use crate::schema::Schema;
use crate::status::Cause;

/// The finalizer that keeps a definition until its objects are deleted.
pub const CLEANUP: &str = "customresourcecleanup.apiextensions.k8s.io";

const VERBS: &[&str] = &["delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"];

fn strings(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_string).collect()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_string()
}

fn condition(definition: &Value, kind: &str) -> bool {
    definition["status"]["conditions"]
        .as_array()
        .into_iter()
        .flatten()
        .any(|condition| condition["type"] == kind && condition["status"] == "True")
}

/// The resources that a definition stored at `revision` serves: one per served version, preferred first.
pub fn resources(definition: &Value, revision: u64) -> Vec<Resource> {
    if !condition(definition, "Established") {
        return Vec::new();
    }
    let spec = &definition["spec"];
    let names = &definition["status"]["acceptedNames"];
    let (group, plural) = (text(&spec["group"]), text(&names["plural"]));
    let mut versions: Vec<&Value> = spec["versions"].as_array().into_iter().flatten().collect();
    versions.sort_by_key(|version| std::cmp::Reverse(priority(version["name"].as_str().unwrap_or_default())));
    let stored_as = versions
        .iter()
        .find(|version| version["storage"] == true)
        .map(|version| format!("{group}/{}", version["name"].as_str().unwrap_or_default()))
        .unwrap_or_default();
    let served = versions.into_iter().filter(|version| version["served"] == true);
    served
        .map(|version| {
            let mut subresources = Vec::new();
            if version["subresources"].get("status").is_some() {
                subresources.push("status");
            }
            let scale = version["subresources"].get("scale").map(|scale| Scale {
                spec_replicas: text(&scale["specReplicasPath"]),
                status_replicas: text(&scale["statusReplicasPath"]),
                selector: scale["labelSelectorPath"].as_str().map(str::to_string),
            });
            if scale.is_some() {
                subresources.push("scale");
            }
            let openapi = version["schema"]["openAPIV3Schema"].clone();
            let selectable = version["selectableFields"].as_array().into_iter().flatten();
            Resource {
                group: group.clone(),
                version: text(&version["name"]),
                plural: plural.clone(),
                singular: text(&names["singular"]),
                kind: text(&names["kind"]),
                list_kind: text(&names["listKind"]),
                short_names: strings(&names["shortNames"]),
                categories: strings(&names["categories"]),
                namespaced: spec["scope"] == "Namespaced",
                verbs: VERBS,
                subresources,
                backing: Backing::Stored,
                prefix: builtin::prefix(&group, &plural),
                columns: crate::table::custom_columns(version),
                custom: Some(CustomResource {
                    definition: object::name(definition).to_string(),
                    // It was validated when it was written; with a schema that this build no longer accepts,
                    // objects are not validated.
                    schema: Schema::from_openapi(&openapi).unwrap_or_default(),
                    openapi,
                    stored_as: stored_as.clone(),
                    scale,
                    selectable: selectable.map(|field| text(&field["jsonPath"])).collect(),
                    terminating: object::is_terminating(definition),
                    revision,
                }),
            }
        })
        .collect()
}

/// Kubernetes' order of versions: stable before beta before alpha, higher numbers first, anything else last.
pub fn priority(version: &str) -> (u8, u64, u64) {
    let parse = || {
        let rest = version.strip_prefix('v')?;
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let major: u64 = rest[..digits].parse().ok()?;
        let tail = &rest[digits..];
        if tail.is_empty() {
            return Some((3, major, 0));
        }
        for (word, rank) in [("beta", 2), ("alpha", 1)] {
            if let Some(minor) = tail.strip_prefix(word) {
                return Some((rank, major, minor.parse().ok()?));
            }
        }
        None
    };
    parse().unwrap_or((0, 0, 0))
}

/// Fills in the defaults of a definition.
pub fn default(definition: &mut Value) {
    let names = &mut definition["spec"]["names"];
    if let Some(names) = names.as_object_mut() {
        let kind = names.get("kind").and_then(Value::as_str).unwrap_or_default().to_string();
        let missing = |names: &Map<String, Value>, field: &str| {
            names.get(field).and_then(Value::as_str).unwrap_or_default().is_empty()
        };
        if missing(names, "singular") {
            names.insert("singular".into(), json!(kind.to_lowercase()));
        }
        if missing(names, "listKind") {
            names.insert("listKind".into(), json!(format!("{kind}List")));
        }
    }
    if definition["spec"]["conversion"].is_null() && definition["spec"].is_object() {
        definition["spec"]["conversion"] = json!({"strategy": "None"});
    }
}

/// Validates a definition.
pub fn validate(definition: &Value, old: Option<&Value>) -> Vec<Cause> {
    let spec = &definition["spec"];
    let mut causes = Vec::new();
    let mut blame = |reason: &str, field: &str, message: String| {
        causes.push(Cause { reason: reason.into(), message, field: field.into() });
    };
    let (group, plural) = (text(&spec["group"]), text(&spec["names"]["plural"]));
    for (field, value) in [
        ("spec.group", &spec["group"]),
        ("spec.names.plural", &spec["names"]["plural"]),
        ("spec.names.kind", &spec["names"]["kind"]),
    ] {
        if value.as_str().is_none_or(str::is_empty) {
            blame("FieldValueRequired", field, "Required value".into());
        }
    }
    let name = object::name(definition);
    if !plural.is_empty() && name != format!("{plural}.{group}") {
        blame(
            "FieldValueInvalid",
            "metadata.name",
            format!("Invalid value: \"{name}\": must be spec.names.plural+\".\"+spec.group"),
        );
    }
    if !matches!(spec["scope"].as_str(), Some("Namespaced" | "Cluster")) {
        let given = spec["scope"].as_str().unwrap_or_default();
        blame(
            "FieldValueNotSupported",
            "spec.scope",
            format!("Unsupported value: \"{given}\": supported values: \"Cluster\", \"Namespaced\""),
        );
    }
    let versions = spec["versions"].as_array().map_or(&[][..], Vec::as_slice);
    if versions.iter().filter(|version| version["storage"] == true).count() != 1 {
        let problem = "must have exactly one version marked as storage version";
        blame(
            "FieldValueInvalid",
            "spec.versions",
            format!("Invalid value: {}: {problem}", spec["versions"]),
        );
    }
    if spec["conversion"]["strategy"].as_str().is_some_and(|strategy| strategy != "None") {
        let problem = "conversion webhooks are not supported by this server; use strategy None";
        blame("FieldValueNotSupported", "spec.conversion.strategy", problem.into());
    }
    for (index, version) in versions.iter().enumerate() {
        let at = format!("spec.versions[{index}].schema.openAPIV3Schema");
        let schema = &version["schema"]["openAPIV3Schema"];
        if schema.is_null() {
            blame("FieldValueRequired", &at, "Required value: schemas are required".into());
            continue;
        }
        // An unchanged schema was accepted before; newer validation rules must not block updates.
        let unchanged = old.is_some_and(|old| {
            let mut before = old["spec"]["versions"].as_array().into_iter().flatten();
            before.any(|before| {
                before["name"] == version["name"] && before["schema"]["openAPIV3Schema"] == *schema
            })
        });
        if unchanged {
            continue;
        }
        if let Err(issues) = Schema::from_openapi(schema) {
            for issue in issues {
                let field = if issue.path.is_empty() { at.clone() } else { format!("{at}.{}", issue.path) };
                blame("FieldValueInvalid", &field, issue.message);
            }
        }
    }
    if let Some(old) = old {
        for field in ["group", "scope"] {
            if condition(old, "Established") && old["spec"][field] != spec[field] {
                let problem = format!("Invalid value: {}: field is immutable", spec[field]);
                blame("FieldValueInvalid", &format!("spec.{field}"), problem);
            }
        }
    }
    causes
}

/// Computes the status of a definition: accepted names, conditions, stored versions.
pub fn establish(definition: &mut Value, table: &Table, now: &str) {
    let spec = definition["spec"].clone();
    let name = object::name(definition).to_string();
    let taken = name_conflict(&spec, &name, table);
    let was_accepted = definition["status"]["acceptedNames"].clone();
    let accepted = if taken.is_none() { spec["names"].clone() } else { was_accepted };
    let storage =
        spec["versions"].as_array().into_iter().flatten().find(|version| version["storage"] == true);
    let mut stored = strings(&definition["status"]["storedVersions"]);
    if let Some(version) = storage.and_then(|version| version["name"].as_str())
        && !stored.iter().any(|known| known == version)
    {
        stored.push(version.into());
    }
    let established = condition(definition, "Established") || taken.is_none();
    let generation = definition["metadata"]["generation"].clone();
    let desired = [
        match &taken {
            None => ("NamesAccepted", true, "NoConflicts", "no conflicts found".to_string()),
            Some(why) => ("NamesAccepted", false, "NameConflict", why.clone()),
        },
        if established {
            ("Established", true, "InitialNamesAccepted", "the initial names have been accepted".to_string())
        } else {
            ("Established", false, "NotAccepted", "not all names are accepted".to_string())
        },
    ];
    let mut conditions: Vec<Value> =
        definition["status"]["conditions"].as_array().cloned().unwrap_or_default();
    for (kind, holds, reason, message) in desired {
        let status = if holds { "True" } else { "False" };
        let before = conditions.iter().position(|condition| condition["type"] == kind);
        let since = before
            .map(|index| &conditions[index])
            .filter(|condition| condition["status"] == status)
            .map_or(json!(now), |condition| condition["lastTransitionTime"].clone());
        let condition = json!({
            "type": kind, "status": status, "reason": reason, "message": message,
            "lastTransitionTime": since, "observedGeneration": generation,
        });
        match before {
            Some(index) => conditions[index] = condition,
            None => conditions.push(condition),
        }
    }
    definition["status"] =
        json!({"acceptedNames": accepted, "storedVersions": stored, "conditions": conditions});
}

/// Marks a definition as terminating, before its objects are deleted.
pub fn terminate(definition: &mut Value, now: &str) {
    let message = "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon";
    set_terminating(definition, "InstanceDeletionPending", message, now);
}

/// Sets the condition with what a deletion waits for; false if it says so already.
pub fn set_terminating(definition: &mut Value, reason: &str, message: &str, now: &str) -> bool {
    let generation = definition["metadata"]["generation"].clone();
    let Some(conditions) = definition["status"]["conditions"].as_array_mut() else { return false };
    let before = conditions.iter().position(|condition| condition["type"] == "Terminating");
    let since = before.map_or(json!(now), |index| conditions[index]["lastTransitionTime"].clone());
    let condition = json!({
        "type": "Terminating", "status": "True", "reason": reason, "message": message,
        "lastTransitionTime": since, "observedGeneration": generation,
    });
    match before {
        Some(index) if conditions[index] == condition => return false,
        Some(index) => conditions[index] = condition,
        None => conditions.push(condition),
    }
    true
}

fn name_conflict(spec: &Value, definition: &str, table: &Table) -> Option<String> {
    let group = spec["group"].as_str().unwrap_or_default();
    let names = &spec["names"];
    let mut mine = vec![text(&names["plural"]), text(&names["singular"])];
    mine.extend(strings(&names["shortNames"]));
    for other in table.all() {
        let theirs = other.custom.as_ref().map_or("", |custom| custom.definition.as_str());
        if other.group != group || theirs == definition {
            continue;
        }
        for name in &mine {
            if *name == other.plural || *name == other.singular || other.short_names.contains(name) {
                return Some(format!("{name:?} is already in use"));
            }
        }
        for field in ["kind", "listKind"] {
            if names[field] == other.kind || names[field] == other.list_kind {
                return Some(format!("{} is already in use", names[field]));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_preferred_as_kubernetes_orders_them() {
        let mut versions = ["v1alpha1", "v2", "foo", "v1beta2", "v1", "v1beta10"];
        versions.sort_by_key(|version| std::cmp::Reverse(priority(version)));
        assert_eq!(versions, ["v2", "v1", "v1beta10", "v1beta2", "v1alpha1", "foo"]);
    }

    #[test]
    fn a_definition_serves_once_it_is_established() {
        let mut definition = json!({
            "metadata": {"name": "things.example.com", "generation": 1},
            "spec": {"group": "example.com", "scope": "Namespaced", "names": {"plural": "things", "kind": "Thing"},
                "versions": [{"name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": {"type": "object"}}}]},
        });
        default(&mut definition);
        assert!(validate(&definition, None).is_empty(), "{:?}", validate(&definition, None));
        assert!(resources(&definition, 1).is_empty());
        establish(&mut definition, &Table::default(), "2026-01-01T00:00:00Z");
        let resources = resources(&definition, 1);
        assert_eq!(resources.len(), 1);
        assert_eq!(resources[0].list_kind, "ThingList");
        assert_eq!(resources[0].subresources, ["status"]);
    }
}
