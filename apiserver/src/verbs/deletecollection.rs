//! `deletecollection`: deletes all objects of a list one by one.

use std::sync::Arc;

use http::{Response, StatusCode};
use serde_json::{Map, json};
use tokio::time::Instant;

use super::{delete, list};
use crate::call::{Call, REQUEST_TIMEOUT};
use crate::object;
use crate::output::{self, Body};
use crate::state::ServerState;
use crate::status::Result;

/// Handles a deletecollection.
pub async fn handle(api: &Arc<ServerState>, call: &Call) -> Result<Response<Body>> {
    let options = delete::Options::read(call)?;
    let page = list::page(api, call).await?;
    let mut items = Vec::new();
    for record in &page.records {
        let mut one = call.clone();
        // There may be thousands; each deletion has the timeout of one request.
        one.deadline = Instant::now() + REQUEST_TIMEOUT;
        one.namespace = object::namespace(record.object()).to_string();
        one.name = object::name(record.object()).to_string();
        match delete::delete(api, &one, &options).await {
            Ok(_) => items.push(record.json().clone()),
            // Another client deleted it first; that is fine.
            Err(error) if error.code == StatusCode::NOT_FOUND => {}
            Err(error) => return Err(error),
        }
    }
    let mut metadata = Map::new();
    metadata.insert("resourceVersion".into(), json!(page.revision.to_string()));
    let resource = &call.resource;
    Ok(output::list(&resource.api_version(), &resource.list_kind, metadata, items.into_iter()))
}
