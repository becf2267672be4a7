//! The end of a custom resource definition: its objects are deleted first, then its finalizer lets it go.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::{release, remove};
use crate::api::Api;
use crate::kinds::DEFINITIONS;
use crate::kinds::{builtin, definition};
use crate::object;
use crate::status::Result;

/// How soon a definition whose objects are held by finalizers is looked at again.
const AGAIN: Duration = Duration::from_millis(100);

/// Runs the controller.
pub async fn run(api: Arc<Api>) {
    loop {
        if let Err(error) = follow(&api).await {
            tracing::debug!(error, "the definitions are read again");
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn follow(api: &Arc<Api>) -> std::result::Result<(), String> {
    let snapshot = api.store.range(DEFINITIONS, None, None).map_err(|error| error.to_string())?;
    let mut watch = api.store.watch(DEFINITIONS, snapshot.revision).map_err(|error| error.to_string())?;
    let mut look: BTreeSet<Arc<str>> = snapshot.records.iter().map(|record| record.key.clone()).collect();
    loop {
        let mut again = BTreeSet::new();
        for key in std::mem::take(&mut look) {
            match finish(api, &key).await {
                Ok(true) => {}
                Ok(false) => {
                    again.insert(key);
                }
                Err(error) => {
                    tracing::debug!(%error, key = key.as_ref(), "a definition is tried again");
                    again.insert(key);
                }
            }
        }
        look = again;
        let events = if look.is_empty() {
            watch.next().await
        } else {
            match tokio::time::timeout(AGAIN, watch.next()).await {
                Ok(events) => events,
                Err(_) => continue,
            }
        };
        look.extend(events.map_err(|error| error.to_string())?.iter().map(|event| event.record.key.clone()));
    }
}

/// Deletes what a terminating definition defines; tells whether nothing is left to do.
async fn finish(api: &Arc<Api>, key: &str) -> Result<bool> {
    let Some(record) = api.store.get(key) else { return Ok(true) };
    let definition = record.object();
    if !object::is_terminating(definition) || !object::finalizers(definition).contains(&definition::CLEANUP) {
        return Ok(true);
    }
    let spec = &definition["spec"];
    let prefix = builtin::prefix(
        spec["group"].as_str().unwrap_or_default(),
        spec["names"]["plural"].as_str().unwrap_or_default(),
    );
    let snapshot = api.store.range(&prefix, None, None).map_err(crate::verbs::list::storage_error)?;
    let mut left = 0;
    for record in &snapshot.records {
        if !object::is_terminating(record.object()) {
            remove(api, record, "Background").await?;
        }
        left += usize::from(api.store.get(&record.key).is_some());
    }
    if left > 0 {
        return Ok(false);
    }
    release(api, key, definition::CLEANUP).await?;
    Ok(true)
}
