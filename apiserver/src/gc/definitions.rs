//! Deletion of a custom resource definition: deletes its objects first, then removes its finalizer.

use std::sync::Arc;

use futures::FutureExt as _;

use super::controller::{self, Controller};
use super::edit::{edit, release, remove};
use super::remaining::Remaining;
use crate::kinds::DEFINITIONS;
use crate::kinds::{builtin, definition};
use crate::object;
use crate::state::ServerState;
use crate::status::Result;

/// Runs the controller.
pub async fn run(api: Arc<ServerState>) {
    let tending = Controller {
        what: "definitions",
        prefix: DEFINITIONS.into(),
        watched: DEFINITIONS.into(),
        map_event: |event| Some(event.record.key.to_string()),
        reconcile: |api, key| reconcile(api, key).boxed(),
    };
    controller::run(api, tending).await;
}

/// Deletes the objects of a terminating definition; returns whether it is done.
async fn reconcile(api: &Arc<ServerState>, key: &str) -> Result<bool> {
    let Some(record) = api.store.get(key) else { return Ok(true) };
    let definition = record.object();
    if !object::is_terminating(definition) || !object::finalizers(definition).contains(&definition::CLEANUP) {
        return Ok(true);
    }
    let spec = &definition["spec"];
    let (group, plural) =
        (spec["group"].as_str().unwrap_or_default(), spec["names"]["plural"].as_str().unwrap_or_default());
    let prefix = builtin::prefix(group, plural);
    let snapshot = api.store.range(&prefix, None, None).map_err(crate::verbs::list::storage_error)?;
    let mut remaining = Remaining::default();
    for record in &snapshot.records {
        if !object::is_terminating(record.object()) {
            remove(api, record, "Background").await?;
        }
        if let Some(left) = api.store.get(&record.key) {
            remaining.add(group, plural, left.object());
        }
    }
    if !remaining.is_empty() {
        let now = object::timestamp(jiff::Timestamp::now());
        let message = remaining.of_definition();
        edit(api, key, |definition| {
            definition::set_terminating(definition, "InstanceDeletionInProgress", &message, &now)
        })
        .await?;
        return Ok(false);
    }
    release(api, key, definition::CLEANUP).await?;
    Ok(true)
}
