//! The loop of a controller that brings objects on: each is looked at once at the beginning and whenever something about it
//! happens, and again and again while something holds it up.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;

use crate::api::Api;
use crate::status::Result;
use crate::store::Event;

/// How soon an object that something holds up is looked at again.
const AGAIN: Duration = Duration::from_millis(100);
/// How soon the objects are read anew after the watch broke.
const ANEW: Duration = Duration::from_millis(200);

/// What is tended, and how.
pub struct Tending {
    /// What the objects are, for the log.
    pub what: &'static str,
    /// The prefix of their keys.
    pub prefix: String,
    /// The prefix of everything that may concern them.
    pub watched: String,
    /// The key of the object that an event is about.
    pub concerns: fn(&Event) -> Option<String>,
    /// Brings the object of a key on; tells whether nothing is left to do.
    pub tend: for<'a> fn(&'a Arc<Api>, &'a str) -> BoxFuture<'a, Result<bool>>,
}

/// Tends for ever.
pub async fn run(api: Arc<Api>, tending: Tending) {
    loop {
        if let Err(error) = follow(&api, &tending).await {
            tracing::debug!(error, what = tending.what, "they are read again");
        }
        tokio::time::sleep(ANEW).await;
    }
}

async fn follow(api: &Arc<Api>, tending: &Tending) -> std::result::Result<(), String> {
    let snapshot = api.store.range(&tending.prefix, None, None).map_err(|error| error.to_string())?;
    let mut watch =
        api.store.watch(&tending.watched, snapshot.revision).map_err(|error| error.to_string())?;
    let mut look: BTreeSet<String> = snapshot.records.iter().map(|record| record.key.to_string()).collect();
    loop {
        let mut again = BTreeSet::new();
        for key in std::mem::take(&mut look) {
            match (tending.tend)(api, &key).await {
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
            match tokio::time::timeout(AGAIN, watch.next()).await {
                Ok(events) => events,
                Err(_) => continue,
            }
        };
        let events = events.map_err(|error| error.to_string())?;
        look.extend(events.iter().filter_map(|event| (tending.concerns)(event)));
    }
}
