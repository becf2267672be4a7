//! `patch`: four formats, of which apply may also create. This module decides which format a resource
//! accepts. Not here: the formats themselves, see [`crate::patch`].

use std::sync::Arc;

use http::{Response, StatusCode, header};
use serde_json::{Value, json};

use super::create;
use super::response::respond;
use super::write::{self, WriteOrigin};
use crate::call::Call;
use crate::kinds::rules;
use crate::object;
use crate::output::Body;
use crate::patch::apply::{self, ApplyError, ApplyRequest};
use crate::patch::json::{self as json_patch, JsonPatchError};
use crate::patch::{merge, strategic};
use crate::request::FieldValidation;
use crate::schema::strict;
use crate::state::ServerState;
use crate::status::{ApiError, Cause, Result};

const APPLY: &str = "application/apply-patch+yaml";
const JSON: &str = "application/json-patch+json";
const MERGE: &str = "application/merge-patch+json";
const STRATEGIC: &str = "application/strategic-merge-patch+json";

/// Handles a patch.
pub async fn handle(api: &Arc<ServerState>, call: &Call) -> Result<Response<Body>> {
    call.shape()?;
    let media = call.header(header::CONTENT_TYPE).split(';').next().unwrap_or_default().trim();
    if media == APPLY {
        return handle_apply(api, call).await;
    }
    if call.query.force {
        return Err(ApiError::invalid_field(
            "meta.k8s.io",
            "PatchOptions",
            "",
            "force",
            "Forbidden: may not be specified for non-apply patch",
        ));
    }
    let custom = call.resource.custom.is_some();
    let taken = matches!(media, JSON | MERGE) || (media == STRATEGIC && !custom);
    if !taken {
        let supported = if custom {
            format!("{JSON}, {MERGE}, {APPLY}")
        } else {
            format!("{JSON}, {MERGE}, {STRATEGIC}, {APPLY}")
        };
        return Err(ApiError::unsupported_media_type(media, &supported));
    }
    let (body, duplicates) =
        strict::json(&call.body).map_err(|error| ApiError::bad_request(error.to_string()))?;
    let warnings: Vec<String> =
        duplicates.into_iter().map(|path| format!("duplicate field \"{path}\"")).collect();
    if matches!(media, MERGE | STRATEGIC) {
        write::check_merge_patch(&body)?;
    }
    let make = |current: &Value| {
        let patched = match media {
            JSON => json_patch::json_patch(current, &body).map_err(|error| patch_error(call, &error))?,
            MERGE => merge::merge_patch(current, &body),
            _ => strategic::strategic_merge(&call.resource.kind, current, &body)
                .map_err(|error| ApiError::bad_request(error.to_string()))?,
        };
        let mut patched = patched;
        write::check_type(call, &mut patched)?;
        write::check_identity(call, &mut patched)?;
        // A resourceVersion is a precondition only if the patch sets it; otherwise it is the current
        // object's.
        if patched["metadata"]["resourceVersion"] == current["metadata"]["resourceVersion"]
            && !demands_version(&body)
        {
            object::set_meta(&mut patched, "resourceVersion", Value::Null);
        }
        Ok((patched, warnings.clone()))
    };
    let (patched, unknown) = write::modify(api, call, WriteOrigin::Write, make).await?;
    respond(call, StatusCode::OK, &patched, &unknown)
}

fn demands_version(patch: &Value) -> bool {
    match patch {
        Value::Array(operations) => {
            operations.iter().any(|operation| operation["path"] == "/metadata/resourceVersion")
        }
        other => !object::resource_version(other).is_empty(),
    }
}

fn patch_error(call: &Call, error: &JsonPatchError) -> ApiError {
    match error {
        JsonPatchError::Malformed(_) => ApiError::bad_request(error.to_string()),
        JsonPatchError::TooMany(_) => {
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "RequestEntityTooLarge", error.to_string())
        }
        JsonPatchError::Refused(why) => {
            let mut refused = ApiError::new(
                StatusCode::UNPROCESSABLE_ENTITY,
                "Invalid",
                format!("the server rejected our request due to an error in our request: {why}"),
            );
            refused.name.clone_from(&call.name);
            refused
        }
    }
}

async fn handle_apply(api: &Arc<ServerState>, call: &Call) -> Result<Response<Body>> {
    if call.query.field_manager.is_empty() {
        return Err(ApiError::invalid(
            "meta.k8s.io",
            "PatchOptions",
            "",
            vec![Cause {
                reason: "FieldValueRequired".into(),
                message: "Required value: is required for apply patch".into(),
                field: "fieldManager".into(),
            }],
        ));
    }
    let (mut config, duplicates) = strict::yaml(&call.body)
        .map_err(|error| ApiError::bad_request(format!("error decoding YAML: {error}")))?;
    if !config.is_object() {
        return Err(ApiError::bad_request("the applied configuration is not an object"));
    }
    for field in ["kind", "apiVersion"] {
        if config[field].as_str().is_none_or(str::is_empty) {
            return Err(ApiError::bad_request(format!(
                "Object '{field}' is missing in the applied configuration"
            )));
        }
    }
    let named = !object::name(&config).is_empty();
    write::check_type(call, &mut config)?;
    write::check_identity(call, &mut config)?;
    let mut warnings: Vec<String> =
        duplicates.into_iter().map(|path| format!("duplicate field \"{path}\"")).collect();
    let unknown = call.resource.schema().prune(&mut config);
    apply::check_owned_fields(call.resource.schema(), &config, None)
        .map_err(|error| ApiError::bad_request(format!("the applied configuration is refused: {error}")))?;
    // Typed kinds have no place for them, whatever the client wants done about unknown fields.
    let strict = call.query.field_validation == FieldValidation::Strict || call.resource.custom.is_none();
    if strict && !unknown.is_empty() {
        let problem: Vec<String> =
            unknown.iter().map(|path| format!(".{path}: field not declared in schema")).collect();
        return Err(ApiError::bad_request(format!(
            "failed to create typed patch object ({}/{}; {}, Kind={}): {}",
            call.namespace,
            call.name,
            call.resource.api_version(),
            call.resource.kind,
            problem.join(", ")
        )));
    }
    warnings.extend(unknown.into_iter().map(|path| format!("unknown field \"{path}\"")));
    write::canonicalize(call, &mut config, None)?;
    reset_fields(call, &mut config);
    if call.resource.custom.is_none() && call.resource.kind == "Secret" {
        rules::fold_string_data(&mut config);
    }
    let uid = object::uid(&config).to_string();
    if call.subresource.is_empty() && api.store.get(&call.key()).is_none() {
        if !uid.is_empty() {
            return Err(ApiError::conflict(
                &call.resource.group,
                &call.resource.plural,
                &call.name,
                &format!(
                    "uid mismatch: the provided object specified uid {uid}, and no existing object was found"
                ),
            ));
        }
        if !named {
            return Err(call.invalid(vec![Cause {
                reason: "FieldValueRequired".into(),
                message: "Required value: name or generateName is required".into(),
                field: "metadata.name".into(),
            }]));
        }
        let mut applied = apply_config(call, None, &config)?;
        object::set_meta(&mut applied, "resourceVersion", Value::Null);
        let mut unknown = warnings.clone();
        match create::create(api, call, applied, &mut unknown, WriteOrigin::Apply).await {
            Ok(created) => return respond(call, StatusCode::CREATED, &created, &unknown),
            // Another client has created it in the meantime: apply to that object.
            Err(error) if error.reason == "AlreadyExists" => {}
            Err(error) => return Err(error),
        }
    }
    let make = |current: &Value| {
        let mut applied = apply_config(call, Some(current), &config)?;
        let asked = object::resource_version(&config);
        object::set_meta(
            &mut applied,
            "resourceVersion",
            if asked.is_empty() { Value::Null } else { json!(asked) },
        );
        Ok((applied, warnings.clone()))
    };
    let (applied, unknown) = write::modify(api, call, WriteOrigin::Apply, make).await?;
    respond(call, StatusCode::OK, &applied, &unknown)
}

/// Removes the fields of a configuration that this endpoint may not own.
fn reset_fields(call: &Call, config: &mut Value) {
    match call.subresource.as_str() {
        "" if call.resource.has_subresource("status") => object::remove(config, "status"),
        "status" => {
            if let Some(fields) = config.as_object_mut() {
                fields.retain(|field, _| {
                    matches!(field.as_str(), "apiVersion" | "kind" | "metadata" | "status")
                });
            }
            object::metadata_mut(config).retain(|field, _| {
                matches!(field.as_str(), "name" | "namespace" | "uid" | "resourceVersion" | "managedFields")
            });
        }
        _ => {}
    }
}

fn apply_config(call: &Call, live: Option<&Value>, config: &Value) -> Result<Value> {
    apply::apply(ApplyRequest {
        live,
        config,
        manager: &call.query.field_manager,
        force: call.query.force,
        subresource: &call.subresource,
        api_version: &call.resource.api_version(),
        now: jiff::Timestamp::now(),
        schema: call.resource.schema(),
    })
    .map_err(|error| match error {
        ApplyError::Conflict { message, conflicts } => {
            ApiError::new(StatusCode::CONFLICT, "Conflict", message).with_causes(
                conflicts
                    .into_iter()
                    .map(|conflict| Cause {
                        reason: "FieldManagerConflict".into(),
                        message: conflict.message,
                        field: conflict.field,
                    })
                    .collect(),
            )
        }
        ApplyError::BadRequest(_) | ApplyError::Typed(_) => ApiError::bad_request(error.to_string()),
    })
}
