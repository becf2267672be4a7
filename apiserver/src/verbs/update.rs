//! `update`: an object or one of its subresources, replaced.

use std::sync::Arc;

use http::{Response, StatusCode};

use super::write::{self, Origin};
use super::{Call, respond};
use crate::api::Api;
use crate::object;
use crate::output::Body;
use crate::status::{Cause, Result};

/// Answers an update.
pub async fn handle(api: &Arc<Api>, call: &Call) -> Result<Response<Body>> {
    call.shape()?;
    let (mut body, duplicates) = write::decode(call)?;
    write::check_type(call, &mut body)?;
    write::check_place(call, &mut body)?;
    if call.resource.custom.is_some() && object::resource_version(&body).is_empty() {
        // A blind replacement of a custom resource would undo what somebody else just wrote.
        return Err(call.invalid(vec![Cause {
            reason: "FieldValueInvalid".into(),
            message: "Invalid value: 0: must be specified for an update".into(),
            field: "metadata.resourceVersion".into(),
        }]));
    }
    let (updated, unknown) =
        write::modify(api, call, Origin::Write, |_| Ok((body.clone(), duplicates.clone()))).await?;
    respond(call, StatusCode::OK, &updated, &unknown)
}
