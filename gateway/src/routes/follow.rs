//! Follows the kinds a [`Table`] is made of and publishes a new table on every change, for ever.
//! While the API server is away the last table stands: losing it stops no request (invariant 6).

use std::sync::Arc;

use futures::StreamExt as _;
use kube::Client;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::Event;
use russet_crds::{ModelDeployment, ModelRoute, ShardGroup};
use tokio::sync::watch;

use super::Table;
use crate::watch::{Kept, changes};

/// Publishes tables into `publish` until the future is dropped.
pub async fn follow(client: Client, publish: watch::Sender<Arc<Table>>) {
    let mut changes = futures::stream::select_all([
        changes::<ModelDeployment, _>(&client, |event| Change::Deployment(Box::new(event))),
        changes::<ShardGroup, _>(&client, |event| Change::Group(Box::new(event))),
        changes::<ModelRoute, _>(&client, |event| Change::Route(Box::new(event))),
    ]);
    let (mut deployments, mut groups, mut routes) = (Kept::default(), Kept::default(), Kept::default());
    // The streams never end: a watcher reconnects for ever.
    while let Some(change) = changes.next().await {
        match change {
            Change::Deployment(event) => deployments.apply(*event),
            Change::Group(event) => groups.apply(*event),
            Change::Route(event) => routes.apply(*event),
        }
        if !(deployments.listed && groups.listed && routes.listed) {
            continue;
        }
        let table = Table::from_objects(deployments.iter(), groups.iter(), routes.iter());
        publish.send_if_modified(|current| {
            let changed = **current != table;
            if changed {
                *current = Arc::new(table);
            }
            changed
        });
    }
}

enum Change {
    Deployment(Box<Event<DeserializeGuard<ModelDeployment>>>),
    Group(Box<Event<DeserializeGuard<ShardGroup>>>),
    Route(Box<Event<DeserializeGuard<ModelRoute>>>),
}
