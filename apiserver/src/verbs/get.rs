//! `get`: the current state of one object.

use http::{Response, StatusCode};

use super::response::respond;
use crate::call::Call;
use crate::output::{self, Body, Shape};
use crate::state::ServerState;
use crate::status::Result;

/// Handles a get.
pub fn handle(api: &ServerState, call: &Call) -> Result<Response<Body>> {
    let record = api.store.get(&call.key()).ok_or_else(|| call.not_found())?;
    if call.resource.serves_as_stored(&record) && call.shape()? == Shape::Object {
        return Ok(output::bytes(StatusCode::OK, record.json().clone()));
    }
    respond(call, StatusCode::OK, &call.resource.view(&record), &[])
}
