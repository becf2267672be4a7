//! Watches AccessKeys and publishes a new keyring on every change. While the API server is
//! unavailable the last keyring stays in use.

use std::sync::Arc;

use futures::StreamExt as _;
use kube::Client;
use russet_crds::AccessKey;
use russet_rpc::cache_status::CacheStatus;
use tokio::sync::watch;

use super::Keyring;
use crate::watch::{Reflected, changes};

/// Publishes keyrings to `publish` until the future is dropped.
pub async fn follow(client: Client, caches: CacheStatus, publish: watch::Sender<Arc<Keyring>>) {
    let mut changes = changes::<AccessKey, _>(&client, &caches, |event| event);
    let mut keys = Reflected::default();
    // The stream never ends: a watcher reconnects forever.
    while let Some(event) = changes.next().await {
        keys.apply(event);
        if keys.listed {
            let next = publish.borrow().updated(keys.iter(), keys.count());
            publish.send_replace(Arc::new(next));
        }
    }
}
