//! The loop of a controller that brings objects on: each is looked at once at the beginning and whenever something about it
//! happens, and again and again while something holds it up.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;

use crate::state::ServerState;
use crate::status::Result;
use crate::store::StoreEvent;

/// How soon an object that something holds up is looked at again.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// How soon the objects are read anew after the watch broke.
const RESYNC_INTERVAL: Duration = Duration::from_millis(200);

/// What is tended, and how.
pub struct Controller {
    /// What the objects are, for the log.
    pub what: &'static str,
    /// The prefix of their keys.
    pub prefix: String,
    /// The prefix of everything that may concern them.
    pub watched: String,
    /// The key of the object that an event is about.
    pub map_event: fn(&StoreEvent) -> Option<String>,
    /// Brings the object of a key on; tells whether nothing is left to do.
    pub reconcile: for<'a> fn(&'a Arc<ServerState>, &'a str) -> BoxFuture<'a, Result<bool>>,
}

/// Tends for ever.
pub async fn run(api: Arc<ServerState>, tending: Controller) {
    loop {
        if let Err(error) = follow(&api, &tending).await {
            tracing::debug!(error, what = tending.what, "they are read again");
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
