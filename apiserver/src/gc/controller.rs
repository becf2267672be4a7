//! The loop of a controller: reconciles each object once at the start and after every event about it, and
//! retries while the object is not done.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;

use crate::state::ServerState;
use crate::status::Result;
use crate::store::StoreEvent;

/// Retry interval of an object that is not done.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Delay before the objects are listed again after the watch broke.
const RESYNC_INTERVAL: Duration = Duration::from_millis(200);

/// A controller.
pub struct Controller {
    /// The name of the objects in logs.
    pub what: &'static str,
    /// The storage prefix of the objects.
    pub prefix: String,
    /// The storage prefix of all objects to watch.
    pub watched: String,
    /// Maps an event to the key of the object to reconcile.
    pub map_event: fn(&StoreEvent) -> Option<String>,
    /// Reconciles the object of a key; returns whether it is done.
    pub reconcile: for<'a> fn(&'a Arc<ServerState>, &'a str) -> BoxFuture<'a, Result<bool>>,
}

/// Runs the controller until the server stops.
pub async fn run(api: Arc<ServerState>, tending: Controller) {
    loop {
        if let Err(error) = follow(&api, &tending).await {
            tracing::debug!(
                error,
                what = tending.what,
                "a controller's watch ended; its objects are listed again"
            );
        }
        tokio::time::sleep(RESYNC_INTERVAL).await;
    }
}

async fn follow(api: &Arc<ServerState>, tending: &Controller) -> std::result::Result<(), String> {
    let snapshot = api.store.range(&tending.prefix, None, None).map_err(|error| error.to_string())?;
    let mut watch =
        api.store.watch(&tending.watched, snapshot.revision).map_err(|error| error.to_string())?;
    let mut look: BTreeSet<String> = snapshot.records.iter().map(|record| record.key.to_string()).collect();
    loop {
        let mut again = BTreeSet::new();
        for key in std::mem::take(&mut look) {
            match (tending.reconcile)(api, &key).await {
                Ok(true) => {}
                Ok(false) => {
                    again.insert(key);
                }
                Err(error) => {
                    tracing::debug!(%error, key, "tried again");
                    again.insert(key);
                }
            }
        }
        look = again;
        let events = if look.is_empty() {
            watch.next().await
        } else {
            match tokio::time::timeout(RETRY_INTERVAL, watch.next()).await {
                Ok(events) => events,
                Err(_) => continue,
            }
        };
        let events = events.map_err(|error| error.to_string())?;
        look.extend(events.iter().filter_map(|event| (tending.map_event)(event)));
    }
}
