//! `update`: replaces an object or one of its subresources; of a few built-in kinds it also creates one.

use std::sync::Arc;

use http::{Response, StatusCode};
use serde_json::Value;

use super::create;
use super::response::respond;
use super::write::{self, WriteOrigin};
use crate::auth;
use crate::auth::rbac::{self, Attributes};
use crate::call::Call;
use crate::object;
use crate::output::Body;
use crate::state::ServerState;
use crate::status::{ApiError, Cause, Result};

/// Handles an update.
pub async fn handle(api: &Arc<ServerState>, call: &Call) -> Result<Response<Body>> {
    call.shape()?;
    let (mut body, duplicates) = write::decode(call)?;
    write::check_type(call, &mut body)?;
    write::check_identity(call, &mut body)?;
    if object::resource_version(&body) == "0" {
        // As in Kubernetes, zero is no condition.
        object::set_meta(&mut body, "resourceVersion", Value::Null);
    }
    if call.resource.custom.is_some() && object::resource_version(&body).is_empty() {
        // An unconditional update of a custom resource would overwrite concurrent changes.
        return Err(call.invalid(vec![Cause {
            reason: "FieldValueInvalid".into(),
            message: "Invalid value: 0: must be specified for an update".into(),
            field: "metadata.resourceVersion".into(),
        }]));
    }
    if creates(call) && api.store.get(&call.key()).is_none() {
        let asked = Attributes {
            verb: "create",
            group: &call.resource.group,
            resource: &call.resource.plural,
            namespace: &call.namespace,
            ..Attributes::default()
        };
        auth::authorize(api, &call.user, &asked)?;
        let uid = object::uid(&body);
        if !uid.is_empty() {
            // It means an object that was deleted.
            let why = format!("Precondition failed: UID in precondition: {uid}, UID in object meta: ");
            return Err(ApiError::conflict(&call.resource.group, &call.resource.plural, &call.name, &why));
        }
        let mut new = body.clone();
        object::set_meta(&mut new, "resourceVersion", Value::Null);
        let mut unknown = duplicates.clone();
        match create::create(api, call, new, &mut unknown, WriteOrigin::Write).await {
            Ok(created) => return respond(call, StatusCode::CREATED, &created, &unknown),
            // Another client has created it in the meantime: update that object.
            Err(error) if error.reason == "AlreadyExists" => {}
            Err(error) => return Err(error),
        }
    }
    let (updated, unknown) =
        write::modify(api, call, WriteOrigin::Write, |_| Ok((body.clone(), duplicates.clone()))).await?;
    respond(call, StatusCode::OK, &updated, &unknown)
}

/// Whether an update creates an object that is not there, as in Kubernetes for these kinds alone.
fn creates(call: &Call) -> bool {
    let resource = &call.resource;
    resource.custom.is_none()
        && call.subresource.is_empty()
        && (matches!(resource.kind.as_str(), "Lease" | "Event") || resource.group == rbac::GROUP)
}
