//! Table test of server-side apply: `cases.yaml`, run through [`check`]; and the effect of a schema change.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use super::managers::{self, Operation};
use super::path::display;
use super::{ApplyError, ApplyRequest, apply, track_update};
use crate::schema::Schema;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    steps: Vec<ApplyStep>,
    object: Value,
    owners: BTreeMap<String, Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ApplyStep {
    apply: Option<Value>,
    update: Option<Value>,
    status: Option<Value>,
    adopt: Option<Value>,
    #[serde(rename = "as", default)]
    manager: String,
    #[serde(default)]
    force: bool,
    conflict: Option<String>,
    refused: Option<String>,
    #[serde(default)]
    same: bool,
}

fn schema() -> Schema {
    let text = json!({"type": "string"});
    Schema::from_openapi(&json!({"type": "object", "properties": {
        "spec": {"type": "object", "properties": {
            "replicas": {"type": "integer"},
            "model": text,
            "size": {"x-kubernetes-int-or-string": true},
            "nested": {"type": "object", "properties": {"a": text, "b": text,
                "inner": {"type": "object", "properties": {"x": text, "y": text}}}},
            "env": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"],
                "items": {"type": "object", "required": ["name"], "properties": {"name": text, "value": text, "note": text}}},
            "ports": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["port", "protocol"],
                "items": {"type": "object", "required": ["port"], "properties": {"port": {"type": "integer"},
                    "protocol": {"type": "string", "default": "TCP"}, "name": text}}},
            "tags": {"type": "array", "x-kubernetes-list-type": "set", "items": text},
            "args": {"type": "array", "items": text},
            "labels": {"type": "object", "additionalProperties": text},
            "table": {"type": "object", "additionalProperties": {"type": "object", "properties": {"x": text, "y": text}}},
            "selector": {"type": "object", "x-kubernetes-map-type": "atomic", "additionalProperties": text},
            "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
        }},
        "status": {"type": "object", "properties": {"phase": text,
            "conditions": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"],
                "items": {"type": "object", "required": ["type"], "properties": {"type": text, "status": text}}}}},
    }}))
    .expect("structural")
}

fn at(minute: usize) -> jiff::Timestamp {
    format!("2026-11-21T10:{minute:02}:00Z").parse().expect("a timestamp")
}

/// The object with the fields that every case would repeat.
fn filled(object: &Value) -> Value {
    let mut filled = json!({"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "t"}});
    for (name, value) in object.as_object().into_iter().flatten() {
        match value.as_object().filter(|_| name == "metadata") {
            Some(metadata) => {
                for (name, value) in metadata {
                    filled["metadata"][name] = value.clone();
                }
            }
            None => filled[name] = value.clone(),
        }
    }
    filled
}

/// Runs one step on `live`.
fn run(schema: &Schema, live: Option<&Value>, step: &ApplyStep, minute: usize) -> Result<Value, ApplyError> {
    let applied = |config: &Value, subresource: &str| {
        apply(ApplyRequest {
            live,
            config: &filled(config),
            manager: &step.manager,
            force: step.force,
            subresource,
            api_version: "example.com/v1",
            now: at(minute),
            schema,
        })
    };
    match (&step.apply, &step.update, &step.status, &step.adopt) {
        (Some(config), None, None, None) => applied(config, ""),
        (None, None, Some(config), None) => applied(config, "status"),
        (None, Some(object), None, None) => {
            let mut new = filled(object);
            // As in the server: an update of the object does not change its status.
            if let Some(status) = live.and_then(|live| live.get("status")) {
                new["status"] = status.clone();
            }
            track_update(live, &mut new, &step.manager, "", at(minute), schema);
            Ok(new)
        }
        (None, None, None, Some(object)) => Ok(filled(object)),
        _ => panic!("a step is one of apply, update, status and adopt"),
    }
}

/// Runs a case; the error describes the difference.
fn check(schema: &Schema, case: &Case) -> Result<(), String> {
    let mut live: Option<Value> = None;
    for (minute, step) in case.steps.iter().enumerate() {
        let outcome = run(schema, live.as_ref(), step, minute);
        match (outcome, &step.conflict, &step.refused) {
            (Ok(new), None, None) => {
                if step.same && live.as_ref() != Some(&new) {
                    return Err(format!("step {minute} changed {live:#?} to {new:#?}"));
                }
                live = Some(new);
            }
            (Err(ApplyError::Conflict { message, .. }), Some(expected), None) if message == *expected => {}
            (Err(error @ (ApplyError::BadRequest(_) | ApplyError::Typed(_))), None, Some(expected))
                if error.to_string().contains(expected) => {}
            (outcome, ..) => return Err(format!("step {minute} ended in {outcome:#?}")),
        }
    }
    let mut object = live.unwrap_or_default();
    let entries = object["metadata"]["managedFields"].take();
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.remove("managedFields");
    }
    if object != filled(&case.object) {
        return Err(format!("the object is {object:#}"));
    }
    let managers = managers::decode(&entries)?;
    let owners: BTreeMap<String, Vec<String>> = managers
        .iter()
        .map(|(id, owned)| {
            let suffix = match (id.operation, id.subresource.as_str()) {
                (Operation::Apply, "") => String::new(),
                (Operation::Apply, subresource) => format!("/Apply/{subresource}"),
                (Operation::Update, "") => "/Update".into(),
                (Operation::Update, subresource) => format!("/Update/{subresource}"),
            };
            let mut fields: Vec<String> = owned.set.paths().iter().map(|path| display(path)).collect();
            fields.sort();
            (format!("{}{suffix}", id.name), fields)
        })
        .collect();
    let mut expected = case.owners.clone();
    expected.values_mut().for_each(|fields| fields.sort());
    if owners != expected {
        return Err(format!("the owners are {owners:#?}"));
    }
    Ok(())
}

#[test]
fn every_case_of_the_table_holds() {
    let cases: Vec<Case> = serde_norway::from_str(include_str!("cases.yaml")).expect("the table reads");
    assert!(cases.len() >= 40, "the table shrank to {}", cases.len());
    let schema = schema();
    let failures: Vec<String> = cases
        .iter()
        .filter_map(|case| check(&schema, case).err().map(|error| format!("{}: {error}", case.name)))
        .collect();
    assert!(
        failures.is_empty(),
        "{} of {} cases fail:\n{}",
        failures.len(),
        cases.len(),
        failures.join("\n\n")
    );
}

#[test]
fn entries_are_sorted_stamped_and_carry_their_subresource() {
    let schema = schema();
    let mut live = None;
    for (minute, step) in [
        json!({"apply": {"spec": {"replicas": 1}}, "as": "z"}),
        json!({"update": {"spec": {"replicas": 1, "model": "m"}}, "as": "u"}),
        json!({"status": {"status": {"phase": "P"}}, "as": "c"}),
    ]
    .into_iter()
    .enumerate()
    {
        let step: ApplyStep = serde_json::from_value(step).expect("a step");
        live = Some(run(&schema, live.as_ref(), &step, minute).expect("no conflict"));
    }
    let entry = |manager: &str, operation: &str, minute: usize, fields: Value| {
        json!({"manager": manager, "operation": operation, "apiVersion": "example.com/v1", "fieldsType": "FieldsV1",
               "time": at(minute).to_string(), "fieldsV1": fields})
    };
    let mut status = entry("c", "Apply", 2, json!({"f:status": {"f:phase": {}}}));
    status["subresource"] = "status".into();
    assert_eq!(
        live.expect("an object")["metadata"]["managedFields"],
        json!([
            entry("z", "Apply", 0, json!({"f:spec": {"f:replicas": {}}})),
            status,
            entry("u", "Update", 1, json!({"f:spec": {"f:model": {}}})),
        ])
    );
}

#[test]
fn a_conflict_has_a_cause_per_field() {
    let schema = schema();
    let step = |value: Value| serde_json::from_value::<ApplyStep>(value).expect("a step");
    let live = run(&schema, None, &step(json!({"update": {"spec": {"replicas": 1}}, "as": "u"})), 0)
        .expect("created");
    let refused = run(&schema, Some(&live), &step(json!({"apply": {"spec": {"replicas": 2}}, "as": "a"})), 1);
    let Err(ApplyError::Conflict { conflicts, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(conflicts.len(), 1);
    assert_eq!(conflicts[0].field, ".spec.replicas");
    assert_eq!(conflicts[0].message, "conflict with \"u\" using example.com/v1");
}

#[test]
fn a_list_that_became_atomic_is_owned_whole() {
    let list = |extra: Value| {
        let mut list = json!({"type": "array", "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}});
        for (name, value) in extra.as_object().into_iter().flatten() {
            list[name] = value.clone();
        }
        Schema::from_openapi(
            &json!({"type": "object", "properties": {"spec": {"type": "object", "properties": {"l": list}}}}),
        )
        .expect("structural")
    };
    let keyed = list(json!({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}));
    let atomic = list(json!({}));
    let step = |value: Value| serde_json::from_value::<ApplyStep>(value).expect("a step");
    let live = run(&keyed, None, &step(json!({"apply": {"spec": {"l": [{"name": "a"}]}}, "as": "a"})), 0)
        .expect("created");
    let refused =
        run(&atomic, Some(&live), &step(json!({"apply": {"spec": {"l": [{"name": "b"}]}}, "as": "b"})), 1);
    let Err(ApplyError::Conflict { message, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(message, "Apply failed with 1 conflict: conflict with \"a\": .spec.l");
}
