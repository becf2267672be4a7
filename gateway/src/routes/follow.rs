//! Watches the kinds of a [`RoutingTable`] and publishes a new table on every change. While the API server is
//! unavailable the last table stays in use: losing it stops no request (invariant 6).

use std::sync::Arc;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Namespace;
use kube::Client;
use kube::runtime::watcher::Event;
use russet_crds::{Model, ModelDeployment, ModelProvider, ModelRoute, ShardGroup};
use russet_rpc::cache_status::CacheStatus;
use russet_rpc::list_item::ListItem;
use tokio::sync::watch;

use super::RoutingTable;
use crate::watch::{Reflected, changes};

/// Publishes tables to `publish` until the future is dropped.
pub async fn follow(client: Client, caches: CacheStatus, publish: watch::Sender<Arc<RoutingTable>>) {
    let mut changes = futures::stream::select_all([
        changes::<ModelDeployment, _>(&client, &caches, |event| RouteEvent::Deployment(Box::new(event))),
        changes::<ShardGroup, _>(&client, &caches, |event| RouteEvent::Group(Box::new(event))),
        changes::<ModelRoute, _>(&client, &caches, |event| RouteEvent::Route(Box::new(event))),
        changes::<Model, _>(&client, &caches, |event| RouteEvent::Model(Box::new(event))),
        changes::<ModelProvider, _>(&client, &caches, |event| RouteEvent::Provider(Box::new(event))),
        changes::<Namespace, _>(&client, &caches, |event| RouteEvent::Namespace(Box::new(event))),
    ]);
    let (mut deployments, mut groups, mut routes) =
        (Reflected::default(), Reflected::default(), Reflected::default());
    let (mut models, mut providers, mut namespaces) =
        (Reflected::default(), Reflected::default(), Reflected::default());
    // The streams never end: a watcher reconnects forever.
    while let Some(change) = changes.next().await {
        match change {
            RouteEvent::Deployment(event) => deployments.apply(*event),
            RouteEvent::Group(event) => groups.apply(*event),
            RouteEvent::Route(event) => routes.apply(*event),
            RouteEvent::Model(event) => models.apply(*event),
            RouteEvent::Provider(event) => providers.apply(*event),
            RouteEvent::Namespace(event) => namespaces.apply(*event),
        }
        // Models are only shown, so no request waits for their list. Until providers and namespaces are listed, no request
        // leaves the cluster.
        if !(deployments.listed && groups.listed && routes.listed) {
            continue;
        }
        let table = RoutingTable::from_objects(deployments.iter(), groups.iter(), routes.iter())
            .with_models(models.iter())
            .with_providers(providers.iter());
        let table = if namespaces.listed { table.with_namespaces(namespaces.iter()) } else { table };
        publish.send_if_modified(|current| {
            let changed = **current != table;
            if changed {
                *current = Arc::new(table);
            }
            changed
        });
    }
}

enum RouteEvent {
    Deployment(Box<Event<ListItem<ModelDeployment>>>),
    Group(Box<Event<ListItem<ShardGroup>>>),
    Route(Box<Event<ListItem<ModelRoute>>>),
    Model(Box<Event<ListItem<Model>>>),
    Provider(Box<Event<ListItem<ModelProvider>>>),
    Namespace(Box<Event<ListItem<Namespace>>>),
}
