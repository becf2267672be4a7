//! The steps all writes share: decoding the body, normalizing an object into its stored form, and the
//! read-modify-write loop with optimistic concurrency.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use http::header;
use serde_json::{Value, json};

use super::{list, metadata};
use crate::admission;
use crate::admission::attempt::{AdmissionRequest, Operation};
use crate::call::Call;
use crate::kinds::resource::Resource;
use crate::kinds::{builtin, definition, rules};
use crate::object;
use crate::object_limit;
use crate::patch::apply;
use crate::protobuf::{self, ProtobufError};
use crate::request::FieldValidation;
use crate::schema::{bounds, builtin as builtin_schemas, canonical, strict};
use crate::state::ServerState;
use crate::status::{ApiError, Cause, Result};
use crate::store::{Expect, Txn, TxnChange, TxnOutcome};

/// Conflicts after which the client gets the conflict error.
const MAX_ATTEMPTS: usize = 16;

/// How field ownership is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOrigin {
    /// A create, update or patch: changed fields are recorded here.
    Write,
    /// Server-side apply, which records its own.
    Apply,
}

/// Supported media types of bodies.
pub const MEDIA: &str = "application/json, application/yaml, application/vnd.kubernetes.protobuf";

/// Decodes a body; also returns warnings about duplicate fields.
pub fn decode(call: &Call) -> Result<(Value, Vec<String>)> {
    let media = call.header(header::CONTENT_TYPE).split(';').next().unwrap_or_default().trim();
    let (value, duplicates) = match media {
        "" | "application/json" => {
            strict::json(&call.body).map_err(|error| ApiError::bad_request(error.to_string()))?
        }
        "application/yaml" => {
            strict::yaml(&call.body).map_err(|error| ApiError::bad_request(error.to_string()))?
        }
        "application/vnd.kubernetes.protobuf" => {
            let value = protobuf::to_json(&call.body).map_err(|error| match error {
                ProtobufError::Malformed(_) => ApiError::bad_request(error.to_string()),
                ProtobufError::UnknownKind { .. } => {
                    ApiError::unsupported_media_type(media, &error.to_string())
                }
            })?;
            (value, Vec::new())
        }
        other => return Err(ApiError::unsupported_media_type(other, MEDIA)),
    };
    if !value.is_object() {
        return Err(ApiError::bad_request("the body is not an object"));
    }
    Ok((value, duplicates.into_iter().map(|path| format!("duplicate field \"{path}\"")).collect()))
}

/// Checks that a patch which merges is a map.
pub fn check_merge_patch(patch: &Value) -> Result<()> {
    if patch.is_object() {
        return Ok(());
    }
    Err(ApiError::bad_request(format!(
        "error decoding patch: json: cannot unmarshal {} into Go value of type map[string]interface {{}}",
        json_type(patch)
    )))
}

/// Checks that a body has the resource's type; built-in types may omit it.
pub fn check_type(call: &Call, body: &mut Value) -> Result<()> {
    let resource = &call.resource;
    check_maps(body, &resource.kind)?;
    for (field, expected) in [("apiVersion", resource.api_version()), ("kind", resource.kind.clone())] {
        match body[field].as_str() {
            Some(given) if given == expected => {}
            None | Some("") if resource.custom.is_none() => body[field] = Value::String(expected),
            given => {
                return Err(ApiError::bad_request(format!(
                    "the {field} in the data ({}) does not match the expected {field} ({expected})",
                    given.unwrap_or("none")
                )));
            }
        }
    }
    Ok(())
}

/// Checks that an object is a map, and its metadata too: what follows reads and sets fields of both.
pub fn check_maps(object: &Value, kind: &str) -> Result<()> {
    let metadata = &object["metadata"];
    if object.is_object() && (metadata.is_null() || metadata.is_object()) {
        return Ok(());
    }
    let what = if object.is_object() { metadata } else { object };
    Err(ApiError::bad_request(format!(
        "json: cannot unmarshal {} into Go value of type {kind}: an object and its metadata are maps",
        json_type(what)
    )))
}

/// The type of a JSON value, in the words of Go's decoder.
fn json_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Checks that a body's name and namespace match the request's, and fills in missing ones.
pub fn check_identity(call: &Call, body: &mut Value) -> Result<()> {
    let namespace = if call.resource.namespaced { call.namespace.as_str() } else { "" };
    let given = object::namespace(body).to_string();
    if !given.is_empty() && given != namespace {
        return Err(ApiError::bad_request(format!(
            "the namespace of the provided object does not match the namespace sent on the request ({given} and {namespace:?})"
        )));
    }
    object::set_meta(body, "namespace", if namespace.is_empty() { Value::Null } else { json!(namespace) });
    let name = object::name(body).to_string();
    if !call.name.is_empty() {
        if !name.is_empty() && name != call.name {
            return Err(ApiError::bad_request(format!(
                "the name of the object ({name}) does not match the name on the URL ({})",
                call.name
            )));
        }
        object::set_meta(body, "name", json!(call.name));
    }
    Ok(())
}

/// Whether objects differ at most in the times of their managedFields. A manifest without the defaulted
/// fields looks like a change until they are filled in, and is recorded as one.
fn equal_except_times(a: &Value, b: &Value) -> bool {
    /// Compares two maps with `how` for one key and by equality for all others.
    fn but_for(key: &str, a: &Value, b: &Value, how: fn(&Value, &Value) -> bool) -> bool {
        let (Some(a), Some(b)) = (a.as_object(), b.as_object()) else { return a == b };
        a.len() == b.len()
            && a.iter()
                .all(|(name, a)| b.get(name).is_some_and(|b| if name == key { how(a, b) } else { a == b }))
    }
    fn entries(a: &Value, b: &Value) -> bool {
        let (Some(a), Some(b)) = (a.as_array(), b.as_array()) else { return a == b };
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| but_for("time", a, b, |_, _| true))
    }
    but_for("metadata", a, b, |a, b| but_for("managedFields", a, b, entries))
}

/// Replaces an object with the result of `make`, retrying after conflicts.
pub async fn modify(
    api: &Arc<ServerState>,
    call: &Call,
    origin: WriteOrigin,
    make: impl Fn(&Value) -> Result<(Value, Vec<String>)>,
) -> Result<(Arc<Value>, Vec<String>)> {
    let resource = &call.resource;
    for _ in 0..MAX_ATTEMPTS {
        let record = api.store.get(&call.key()).ok_or_else(|| call.not_found())?;
        let current = resource.view(&record);
        let (mut new, mut unknown) = make(&current)?;
        let asked = object::resource_version(&new).to_string();
        // As in Kubernetes, zero is no condition.
        let conditional = !matches!(asked.as_str(), "" | "0");
        if conditional && asked != object::resource_version(&current) {
            return Err(ApiError::modified(&resource.group, &resource.plural, &call.name));
        }
        let uid = object::uid(&new);
        if !uid.is_empty() && uid != object::uid(&current) {
            let why = format!(
                "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
                object::uid(&current)
            );
            return Err(ApiError::conflict(&resource.group, &resource.plural, &call.name, &why));
        }
        normalize(api, call, Some(&current), &mut new, &mut unknown, origin)?;
        object::copy_meta(&mut new, &current, "resourceVersion");
        unknown.extend(admission::admit(
            api,
            &AdmissionRequest {
                call,
                operation: Operation::Update,
                new: Some(&new),
                old: Some(&current),
                dry_run: call.query.dry_run,
            },
        )?);
        let finished =
            object::is_terminating(&new) && object::finalizers(&new).is_empty() && spec_finalized(&new);
        if !finished && equal_except_times(&new, &current) {
            return Ok((current, unknown));
        }
        if call.query.dry_run {
            return Ok((Arc::new(new), unknown));
        }
        let change = if finished {
            TxnChange::Delete
        } else {
            object_limit::count_event(api, call, &new)?;
            let mut stored = resource.to_stored(new.clone());
            object::set_meta(&mut stored, "resourceVersion", Value::Null);
            TxnChange::Put(object::encoded(stored))
        };
        let txn = Txn { key: call.key(), expect: Expect::Revision(record.revision), change };
        match api.store.txn_by(txn, call.deadline).await.map_err(list::storage_error)? {
            TxnOutcome::Committed(written) => {
                after_commit(api, resource, written.revision)?;
                let shown = if finished { Arc::new(new) } else { resource.view(&written) };
                return Ok((shown, unknown));
            }
            TxnOutcome::Conflict(None) => return Err(call.not_found()),
            TxnOutcome::Conflict(Some(_)) if conditional => {
                return Err(ApiError::modified(&resource.group, &resource.plural, &call.name));
            }
            TxnOutcome::Conflict(Some(_)) => {}
        }
    }
    Err(ApiError::modified(&resource.group, &resource.plural, &call.name))
}

/// Whether `spec.finalizers` (which namespaces have) is empty.
pub fn spec_finalized(object: &Value) -> bool {
    object["kind"] != "Namespace" || object["spec"]["finalizers"].as_array().is_none_or(Vec::is_empty)
}

/// Runs after a write is durable, at this revision, and before it is acknowledged: what this server decides by is then
/// as the write made it. 504 if it cannot be, because the cache does not see the write.
pub fn after_commit(api: &ServerState, resource: &Resource, revision: u64) -> Result<()> {
    let decides = resource.prefix == crate::kinds::DEFINITIONS
        || resource.group == crate::auth::rbac::GROUP
        || resource.group == builtin::ADMISSION_GROUP;
    // The store has waited for its cache already.
    let cached = api.store.revision();
    if decides && cached < revision {
        let problem = format!(
            "the change is stored at revision {revision}, and this server still decides by revision {cached}; it follows once its watch of etcd does"
        );
        return Err(ApiError::new(http::StatusCode::GATEWAY_TIMEOUT, "Timeout", problem));
    }
    refresh_caches(api, resource);
    Ok(())
}

/// Computes anew what this server derives from objects of this kind.
pub fn refresh_caches(api: &ServerState, resource: &Resource) {
    if resource.prefix == crate::kinds::DEFINITIONS {
        api.kinds.refresh(&*api.store);
    }
    if resource.group == crate::auth::rbac::GROUP {
        api.policies.refresh(&*api.store);
    }
    if resource.group == builtin::ADMISSION_GROUP {
        api.admission.refresh(&*api.store);
    }
}

/// Normalizes a new state into its stored form: keeps identity, drops unknown fields, fills in defaults,
/// takes the fields that this request may not write from the old state, runs rules and schema validation, and
/// updates generation and field ownership.
pub fn normalize(
    api: &ServerState,
    call: &Call,
    old: Option<&Value>,
    new: &mut Value,
    unknown: &mut Vec<String>,
    origin: WriteOrigin,
) -> Result<()> {
    let resource = &call.resource;
    let now = jiff::Timestamp::now();
    let schema = resource.schema();
    bounds::check(new).map_err(|error| ApiError::bad_request(format!("the object is refused: {error}")))?;
    unknown.extend(schema.prune(new).into_iter().map(|path| format!("unknown field \"{path}\"")));
    apply::check_owned_fields(schema, new, old)
        .map_err(|error| ApiError::bad_request(format!("the object is refused: {error}")))?;
    match call.query.field_validation {
        FieldValidation::Strict if !unknown.is_empty() => {
            return Err(ApiError::bad_request(format!(
                "{} in version \"{}\" cannot be handled as a {}: strict decoding error: {}",
                resource.kind,
                resource.version,
                resource.kind,
                unknown.join(", ")
            )));
        }
        FieldValidation::Ignore => unknown.clear(),
        FieldValidation::Strict | FieldValidation::Warn => {}
    }
    canonicalize(call, new, old)?;
    if let Some(old) = old {
        preserve_unwritable_fields(call, old, new);
    } else if resource.has_subresource("status") {
        // Status is written by controllers, never on creation.
        object::remove(new, "status");
    }
    metadata::check_shapes(call, new)?;
    rules::prepare(call, new, old, &object::timestamp(now));
    schema.default(new);
    let mut causes = metadata::check(call, new, old);
    causes.extend(rules::validate(resource, new, old));
    let errors = schema.validate(new, old).into_iter();
    // This server computes the status of a definition; as in Kubernetes, other status fields are not
    // validated.
    let of_definition = resource.prefix == crate::kinds::DEFINITIONS;
    let errors = errors.filter(|error| !(of_definition && error.field.starts_with("status.")));
    causes.extend(errors.map(|error| Cause {
        reason: error.reason.into(),
        message: error.message,
        field: error.field,
    }));
    if !causes.is_empty() {
        return Err(call.invalid(causes));
    }
    crate::auth::check_escalation(api, call, new, old)?;
    update_generation(resource, old, new);
    if resource.prefix == crate::kinds::DEFINITIONS && call.subresource.is_empty() {
        definition::establish(new, &api.kinds.current(), &object::timestamp(now));
    }
    if resource.group == builtin::ADMISSION_GROUP
        && resource.has_subresource("status")
        && call.subresource.is_empty()
    {
        admission::validation::with_status(new, &api.kinds.current());
    }
    if origin == WriteOrigin::Write {
        // The status of a new object is the server's, not the client's.
        let initial = match old {
            None if resource.has_subresource("status") => {
                new.as_object_mut().and_then(|it| it.remove("status"))
            }
            _ => None,
        };
        apply::track_update(old, new, &call.manager(), &call.subresource, now, schema);
        if let Some(status) = initial {
            new["status"] = status;
        }
    }
    Ok(())
}

/// Rewrites values of Kubernetes' own types to their canonical form; of a custom resource its metadata is one.
pub fn canonicalize(call: &Call, new: &mut Value, old: Option<&Value>) -> Result<()> {
    let resource = &call.resource;
    let outcome = match new.get_mut("metadata") {
        Some(metadata) if resource.custom.is_some() => {
            canonical::rewrite(builtin_schemas::object_meta(), metadata, old.map(|old| &old["metadata"]))
        }
        _ if resource.custom.is_some() => Ok(()),
        _ => canonical::rewrite(resource.schema(), new, old),
    };
    outcome.map_err(|error| {
        ApiError::bad_request(format!(
            "{} in version \"{}\" cannot be handled as a {}: {error}",
            resource.kind, resource.version, resource.kind
        ))
    })
}

/// Restores fields that no update may change, and those that this kind of update may not.
fn preserve_unwritable_fields(call: &Call, old: &Value, new: &mut Value) {
    let resource = &call.resource;
    if !call.subresource.is_empty() {
        let given = std::mem::replace(new, old.clone());
        match call.subresource.as_str() {
            "status" => {
                object::copy_field(new, &given, "status");
                if resource.kind == "CertificateSigningRequest" && resource.custom.is_none() {
                    rules::keep_decisions(new, old);
                }
            }
            "approval" => {
                let conditions = given["status"].get("conditions").cloned().unwrap_or_else(|| json!([]));
                new["status"]["conditions"] = conditions;
            }
            "finalize" if given["spec"].is_object() || given["spec"].is_null() => {
                new["spec"]["finalizers"] = given["spec"]["finalizers"].clone();
            }
            _ => {}
        }
        if resource.custom.is_some() || resource.prefix == crate::kinds::DEFINITIONS {
            object::copy_meta(new, &given, "managedFields");
        } else {
            // For the other built-in kinds labels and annotations are written, too.
            object::copy_field(new, &given, "metadata");
        }
    } else if resource.has_subresource("status") {
        object::copy_field(new, old, "status");
    }
    for field in [
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
        "generateName",
    ] {
        object::copy_meta(new, old, field);
    }
    object::set_meta(new, "selfLink", Value::Null);
}

/// Increments the generation when the desired state changes: all fields but metadata and, as a subresource,
/// status.
fn update_generation(resource: &Resource, old: Option<&Value>, new: &mut Value) {
    let counted = resource.custom.is_some()
        || resource.kind == "CustomResourceDefinition"
        || resource.group == builtin::ADMISSION_GROUP;
    if !counted {
        return;
    }
    let Some(old) = old else {
        object::set_meta(new, "generation", json!(1));
        return;
    };
    let separate = resource.has_subresource("status");
    let changed = |a: &Value, b: &Value| {
        let fields = a.as_object().into_iter().flatten();
        fields.into_iter().any(|(field, value)| {
            field != "metadata" && !(separate && field == "status") && b.get(field) != Some(value)
        })
    };
    if changed(old, new) || changed(new, old) {
        let generation = old["metadata"]["generation"].as_i64().unwrap_or(1) + 1;
        object::set_meta(new, "generation", json!(generation));
    }
}
