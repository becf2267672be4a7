//! `update`: replaces an object or one of its subresources.

use std::sync::Arc;

use http::{Response, StatusCode};

use super::response::respond;
use super::write::{self, WriteOrigin};
use crate::call::Call;
use crate::object;
use crate::output::Body;
use crate::state::ServerState;
use crate::status::{Cause, Result};

/// Handles an update.
pub async fn handle(api: &Arc<ServerState>, call: &Call) -> Result<Response<Body>> {
    call.shape()?;
    let (mut body, duplicates) = write::decode(call)?;
    write::check_type(call, &mut body)?;
    write::check_identity(call, &mut body)?;
    if call.resource.custom.is_some() && object::resource_version(&body).is_empty() {
        // An unconditional update of a custom resource would overwrite concurrent changes.
        return Err(call.invalid(vec![Cause {
            reason: "FieldValueInvalid".into(),
            message: "Invalid value: 0: must be specified for an update".into(),
            field: "metadata.resourceVersion".into(),
        }]));
    }
    let (updated, unknown) =
        write::modify(api, call, WriteOrigin::Write, |_| Ok((body.clone(), duplicates.clone()))).await?;
    respond(call, StatusCode::OK, &updated, &unknown)
}
