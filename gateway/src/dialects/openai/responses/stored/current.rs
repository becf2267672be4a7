//! A kept response as it is now. What ended is as it was stored; what runs says so; and what neither ended nor runs was
//! interrupted: its gateway ended, or could not keep it.

use serde::Deserialize;
use serde_json::{Value, json};

use super::{not_found, unreadable};
use crate::dialects::openai::responses::response::SERVER_ERROR;
use crate::dialects::values::JsonObject;
use crate::error::GatewayError;
use crate::serving::OwnResponses;

/// What becomes of a response that nobody generates any more.
const INTERRUPTED: &str =
    "the gateway ended before the response was complete, or could not keep it; send the request again";

/// The response as JSON.
pub(super) async fn current(own: &OwnResponses, id: &str) -> Result<Vec<u8>, GatewayError> {
    // First what runs: what is kept of a response that has ended says so before it runs no more.
    let (is_waiting, running) = (own.is_waiting(id), own.running(id));
    let stored = own.body(id).await?.ok_or_else(|| not_found(id))?;
    if stored.finished {
        return Ok(stored.body);
    }
    let mut body: JsonObject =
        serde_json::from_slice(&stored.body).map_err(|error| unreadable(id, &error))?;
    match running {
        Some(running) if running.is_generating() => {
            body.insert("status".to_owned(), "in_progress".into());
        }
        Some(_) => {}
        None if is_waiting => {}
        None => {
            body.insert("status".to_owned(), "failed".into());
            body.insert("error".to_owned(), json!({"code": SERVER_ERROR, "message": INTERRUPTED}));
        }
    }
    Ok(Value::from(body).to_string().into_bytes())
}

/// What of a response says how it is read.
#[derive(Debug, Deserialize)]
pub(super) struct ResponseHead {
    pub(super) status: String,
    pub(super) background: bool,
}

impl ResponseHead {
    /// That of the response with this id.
    pub(super) fn of(id: &str, body: &[u8]) -> Result<Self, GatewayError> {
        serde_json::from_slice(body).map_err(|error| unreadable(id, &error))
    }
}
