//! `update`: an object or one of its subresources, replaced.

use std::sync::Arc;

use http::{Response, StatusCode};

use super::write::{self, Origin};
use super::{Call, respond};
use crate::api::Api;
use crate::output::Body;
use crate::status::Result;

/// Answers an update.
pub async fn handle(api: &Arc<Api>, call: &Call) -> Result<Response<Body>> {
    call.shape()?;
    let (mut body, duplicates) = write::decode(call)?;
    write::check_type(call, &mut body)?;
    write::check_place(call, &mut body)?;
    let (updated, unknown) =
        write::modify(api, call, Origin::Write, |_| Ok((body.clone(), duplicates.clone()))).await?;
    respond(call, StatusCode::OK, &updated, &unknown)
}
