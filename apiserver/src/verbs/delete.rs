//! `delete`: removes an object at once when it has no finalizers, otherwise marks it as terminating.

use std::sync::Arc;

use http::{Response, StatusCode};
use serde_json::{Value, json};

use super::list;
use super::response::respond;
use super::write;
use crate::admission;
use crate::admission::attempt::{AdmissionRequest, Operation};
use crate::call::Call;
use crate::kinds::definition;
use crate::object;
use crate::output::{self, Body};
use crate::state::ServerState;
use crate::status::{self, ApiError, Cause, Result};
use crate::store::{Expect, Txn, TxnChange, TxnOutcome};

/// The finalizer that keeps an owner until its dependents are deleted.
pub const FOREGROUND: &str = "foregroundDeletion";
/// The finalizer that keeps an owner until its dependents no longer refer to it.
pub const ORPHAN: &str = "orphan";

/// Deletion options.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// `Background`, `Foreground`, `Orphan`, or empty for the default.
    pub propagation: String,
    /// Precondition on the uid.
    pub uid: Option<String>,
    /// Precondition on the revision.
    pub resource_version: Option<String>,
    /// Validates only.
    pub dry_run: bool,
}

impl Options {
    /// Reads the options from the body, and missing ones from the query.
    pub fn read(call: &Call) -> Result<Self> {
        let body = if call.body.is_empty() { json!({}) } else { write::decode(call)?.0 };
        let text = |value: &Value| value.as_str().map(str::to_string);
        let mut propagation =
            text(&body["propagationPolicy"]).unwrap_or_else(|| call.query.propagation.clone());
        if body["orphanDependents"] == true {
            propagation = "Orphan".into();
        }
        let unsupported = |field: &str, value: &str, supported: &str| {
            let message = format!("Unsupported value: {value}: supported values: {supported}");
            let cause = Cause { reason: "FieldValueNotSupported".into(), message, field: field.into() };
            Err(ApiError::invalid("meta.k8s.io", "DeleteOptions", "", vec![cause]))
        };
        if !matches!(propagation.as_str(), "" | "Background" | "Foreground" | "Orphan") {
            let supported = r#""Background", "Foreground", "Orphan""#;
            return unsupported("propagationPolicy", &format!("\"{propagation}\""), supported);
        }
        let wrong = |value: &&Value| **value != "All";
        if let Some(wrong) = body["dryRun"].as_array().into_iter().flatten().find(wrong) {
            return unsupported("dryRun", &wrong.to_string(), r#""All""#);
        }
        let dry_run =
            body["dryRun"].as_array().is_some_and(|values| values.iter().any(|value| value == "All"));
        Ok(Self {
            propagation,
            uid: text(&body["preconditions"]["uid"]),
            resource_version: text(&body["preconditions"]["resourceVersion"]),
            dry_run: dry_run || call.query.dry_run,
        })
    }
}

/// Handles a delete.
pub async fn handle(api: &Arc<ServerState>, call: &Call) -> Result<Response<Body>> {
    call.shape()?;
    let options = Options::read(call)?;
    let (object, gone, warnings) = delete(api, call, &options).await?;
    if gone && call.resource.kind != "Namespace" {
        let resource = &call.resource;
        let status = status::deleted(&resource.group, &resource.plural, &call.name, object::uid(&object));
        let mut response = output::value(StatusCode::OK, &status);
        output::warn(&mut response, &warnings);
        return Ok(response);
    }
    respond(call, StatusCode::OK, &object, &warnings)
}

/// Deletes an object or marks it as terminating; returns its last state, whether it is removed, and policy
/// warnings.
pub async fn delete(
    api: &Arc<ServerState>,
    call: &Call,
    options: &Options,
) -> Result<(Value, bool, Vec<String>)> {
    let resource = &call.resource;
    if resource.kind == "Namespace" && matches!(call.name.as_str(), "default" | "kube-system" | "kube-public")
    {
        return Err(call.forbidden("this namespace may not be deleted"));
    }
    loop {
        let record = api.store.get(&call.key()).ok_or_else(|| call.not_found())?;
        let current = resource.view(&record);
        let precondition = |what: &str, expected: &Option<String>, is: &str| match expected {
            Some(expected) if expected != is => {
                let why = format!(
                    "Precondition failed: {what} in precondition: {expected}, {what} in object meta: {is}"
                );
                Err(ApiError::conflict(&resource.group, &resource.plural, &call.name, &why))
            }
            _ => Ok(()),
        };
        precondition("UID", &options.uid, object::uid(&current))?;
        precondition("ResourceVersion", &options.resource_version, object::resource_version(&current))?;
        let warnings = admission::admit(
            api,
            &AdmissionRequest {
                call,
                operation: Operation::Delete,
                new: None,
                old: Some(&current),
                dry_run: options.dry_run,
            },
        )?;
        let marked = mark_terminating(call, &current, options);
        let gone = object::finalizers(&marked).is_empty() && write::spec_finalized(&marked);
        if options.dry_run {
            return Ok((marked, gone, warnings));
        }
        if !gone && marked == *current {
            // Already terminating.
            return Ok((marked, false, warnings));
        }
        let change = if gone {
            TxnChange::Delete
        } else {
            let mut stored = resource.to_stored(marked.clone());
            object::set_meta(&mut stored, "resourceVersion", Value::Null);
            TxnChange::Put(object::encoded(stored))
        };
        let txn = Txn { key: call.key(), expect: Expect::Revision(record.revision), change };
        match api.store.txn_by(txn, call.deadline).await.map_err(list::storage_error)? {
            TxnOutcome::Committed(written) => {
                write::after_commit(api, resource, written.revision)?;
                return Ok((Value::clone(&resource.view(&written)), gone, warnings));
            }
            TxnOutcome::Conflict(None) => return Err(call.not_found()),
            TxnOutcome::Conflict(Some(_)) => {}
        }
    }
}

/// The object in its terminating state, while it waits for its finalizers.
fn mark_terminating(call: &Call, current: &Value, options: &Options) -> Value {
    let mut marked = current.clone();
    let mut finalizers: Vec<String> = object::finalizers(current).into_iter().map(str::to_string).collect();
    if !options.propagation.is_empty() {
        // The last deletion with a propagation policy decides, as in Kubernetes.
        finalizers.retain(|finalizer| finalizer != FOREGROUND && finalizer != ORPHAN);
        match options.propagation.as_str() {
            "Foreground" => finalizers.push(FOREGROUND.into()),
            "Orphan" => finalizers.push(ORPHAN.into()),
            _ => {}
        }
    }
    object::set_finalizers(&mut marked, finalizers);
    if !object::is_terminating(current) {
        let now = object::timestamp(jiff::Timestamp::now());
        object::set_meta(&mut marked, "deletionTimestamp", json!(now));
        if let Some(generation) = current["metadata"]["generation"].as_i64() {
            object::set_meta(&mut marked, "generation", json!(generation + 1));
        }
        if call.resource.kind != "Namespace" {
            object::set_meta(&mut marked, "deletionGracePeriodSeconds", json!(0));
        }
        match call.resource.kind.as_str() {
            "Namespace" => marked["status"]["phase"] = json!("Terminating"),
            "CustomResourceDefinition" => definition::terminate(&mut marked, &now),
            _ => {}
        }
    }
    marked
}
