//! `create`: a new object, with a generated name for `generateName`.

use std::sync::Arc;

use http::{Response, StatusCode};
use serde_json::{Value, json};

use super::list;
use super::response::respond;
use super::write::{self, WriteOrigin};
use crate::admission;
use crate::admission::attempt::{AdmissionRequest, Operation};
use crate::call::Call;
use crate::kinds;
use crate::object;
use crate::object_limit;
use crate::output::Body;
use crate::state::ServerState;
use crate::status::{ApiError, Cause, Result};
use crate::store::{Expect, Txn, TxnChange, TxnOutcome};

/// Attempts to generate a free name: with 27^5 suffixes even one collision is unlikely.
const NAME_ATTEMPTS: usize = 8;

/// Handles a create.
pub async fn handle(api: &Arc<ServerState>, call: &Call) -> Result<Response<Body>> {
    call.shape()?;
    let (body, mut unknown) = write::decode(call)?;
    let created = create(api, call, body, &mut unknown, WriteOrigin::Write).await?;
    respond(call, StatusCode::CREATED, &created, &unknown)
}

/// Creates an object; `unknown` collects the fields that were dropped.
pub async fn create(
    api: &Arc<ServerState>,
    call: &Call,
    body: Value,
    unknown: &mut Vec<String>,
    origin: WriteOrigin,
) -> Result<Arc<Value>> {
    let mut call = call.clone();
    let resource = call.resource.clone();
    let mut new = body;
    write::check_type(&call, &mut new)?;
    write::check_identity(&call, &mut new)?;
    check_namespace(api, &call)?;
    if resource.custom.as_ref().is_some_and(|custom| custom.terminating) {
        let mut refused = ApiError::method_not_allowed();
        refused.message = "create not allowed while custom resource definition is terminating".into();
        return Err(refused.about(&resource.group, &resource.plural, &call.name));
    }
    if !object::resource_version(&new).is_empty() {
        return Err(ApiError::bad_request("resourceVersion should not be set on objects to be created"));
    }
    let made_up = object::name(&new).is_empty() && !object::meta(&new, "generateName").is_empty();
    let now = jiff::Timestamp::now();
    let metadata = object::metadata_mut(&mut new);
    for field in ["uid", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "generation"] {
        metadata.remove(field);
    }
    metadata.insert("uid".into(), json!(object::new_uid()));
    metadata.insert("creationTimestamp".into(), json!(object::timestamp(now)));
    let prefix = object::meta(&new, "generateName").to_string();
    let given = unknown.len();
    for _ in 0..NAME_ATTEMPTS {
        let mut attempt = new.clone();
        if made_up {
            let room = 63 - 5;
            let stem: String = prefix.chars().take(room).collect();
            object::set_meta(&mut attempt, "name", json!(format!("{stem}{}", object::name_suffix())));
        }
        call.name = object::name(&attempt).to_string();
        if call.name.is_empty() {
            return Err(call.invalid(vec![Cause {
                reason: "FieldValueRequired".into(),
                message: "Required value: name or generateName is required".into(),
                field: "metadata.name".into(),
            }]));
        }
        // An existing name is reported before validation errors, as clients expect of `create`.
        if api.store.get(&call.key()).is_some() {
            if made_up {
                continue;
            }
            return Err(ApiError::already_exists(&resource.group, &resource.plural, &call.name));
        }
        unknown.truncate(given);
        write::normalize(api, &call, None, &mut attempt, unknown, origin)?;
        unknown.extend(admission::admit(
            api,
            &AdmissionRequest {
                call: &call,
                operation: Operation::Create,
                new: Some(&attempt),
                old: None,
                dry_run: call.query.dry_run,
            },
        )?);
        if call.query.dry_run {
            return Ok(Arc::new(attempt));
        }
        let reservation = object_limit::reserve(api, &call, &attempt).await?;
        let stored = resource.to_stored(attempt);
        let change = TxnChange::Put(object::encoded(stored));
        let txn = Txn { key: call.key(), expect: Expect::Absent, change };
        let outcome = api.store.txn_by(txn, call.deadline).await.map_err(list::storage_error)?;
        drop(reservation);
        match outcome {
            TxnOutcome::Committed(record) => {
                write::after_commit(api, &resource, record.revision)?;
                return Ok(resource.view(&record));
            }
            TxnOutcome::Conflict(_) if made_up => {}
            TxnOutcome::Conflict(_) => {
                return Err(ApiError::already_exists(&resource.group, &resource.plural, &call.name));
            }
        }
    }
    Err(ApiError::already_exists(&resource.group, &resource.plural, &prefix))
}

/// Rejects a write in a namespace that accepts no new objects.
fn check_namespace(api: &ServerState, call: &Call) -> Result<()> {
    if !call.resource.namespaced {
        return Ok(());
    }
    if call.namespace.is_empty() {
        return Err(ApiError::bad_request("an empty namespace may not be set during creation"));
    }
    match api.store.get(&kinds::builtin_namespace_key(&call.namespace)) {
        None => Err(ApiError::not_found("", "namespaces", &call.namespace)),
        Some(record) if object::is_terminating(record.object()) => Err(call
            .forbidden(format!(
                "unable to create new content in namespace {} because it is being terminated",
                call.namespace
            ))
            .with_causes(vec![Cause {
                reason: "NamespaceTerminating".into(),
                message: format!("namespace {} is being terminated", call.namespace),
                field: "metadata.namespace".into(),
            }])),
        Some(_) => Ok(()),
    }
}
