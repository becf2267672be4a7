//! Refreshes the caches that a server derives from stored objects (the table of kinds, RBAC policy, admission
//! policies) after writes of other servers. Its own writes refresh them before they are acknowledged.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::state::ServerState;
use crate::verbs::write;

/// Runs the controller.
pub async fn run(api: Arc<ServerState>) {
    loop {
        if let Err(error) = follow(&api).await {
            tracing::debug!(error, "the watch of kinds and policies ended; they are listed again");
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn follow(api: &Arc<ServerState>) -> Result<(), String> {
    let mut watch = api.store.watch("/registry/", api.store.revision()).map_err(|error| error.to_string())?;
    // Refreshes for events before this watch began, for example while it was broken.
    for resource in api.kinds.current().stored() {
        write::refresh_caches(api, &resource);
    }
    loop {
        let events = watch.next().await.map_err(|error| error.to_string())?;
        let table = api.kinds.current();
        let mut seen = BTreeSet::new();
        for resource in events.iter().filter_map(|event| table.of_key(&event.record.key)) {
            if seen.insert(resource.prefix.clone()) {
                write::refresh_caches(api, &resource);
            }
        }
    }
}
