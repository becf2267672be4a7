//! Watches AccessKeys and publishes a new keyring on every change. While the API server is away the last
//! keyring stays in use.

use std::sync::Arc;

use futures::StreamExt as _;
use kube::Client;
use russet_crds::AccessKey;
use tokio::sync::watch;

use super::Keyring;
use crate::watch::{Reflected, changes};

/// Publishes keyrings to `publish` until the future is dropped.
pub async fn follow(client: Client, publish: watch::Sender<Arc<Keyring>>) {
    let mut changes = changes::<AccessKey, _>(&client, |event| event);
    let mut kept = Reflected::default();
    // The stream never ends: a watcher reconnects for ever.
    while let Some(event) = changes.next().await {
        kept.apply(event);
        if kept.listed {
            let next = publish.borrow().updated(kept.iter(), kept.count());
            publish.send_replace(Arc::new(next));
        }
    }
}
