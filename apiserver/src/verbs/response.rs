//! The response to a verb that returns one object.

use http::{Response, StatusCode};
use serde_json::Value;

use crate::call::Call;
use crate::output::{self, Body};
use crate::status::Result;

/// A response with one object in the requested format.
pub fn respond(call: &Call, code: StatusCode, object: &Value, warnings: &[String]) -> Result<Response<Body>> {
    let shape = call.shape()?;
    let shown = output::to_shape(&call.resource, object, shape, &call.query.include_object, true);
    let mut response = output::value(code, &shown);
    output::warn(&mut response, warnings);
    Ok(response)
}
