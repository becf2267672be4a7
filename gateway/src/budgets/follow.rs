//! Watches Budgets, and tells the API server what was used.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use kube::Client;
use russet_crds::Budget;
use russet_rpc::cache_status::CacheStatus;
use tokio::time::MissedTickBehavior;

use super::Budgets;
use crate::watch::{Reflected, changes};

/// Time between two writes of what was used.
const INTERVAL: Duration = Duration::from_secs(2);

/// Keeps the Budgets until the future is dropped.
pub(crate) async fn follow(client: Client, caches: CacheStatus, budgets: Arc<Budgets>) {
    let mut changes = changes::<Budget, _>(&client, &caches, |event| event);
    let mut objects = Reflected::default();
    let mut interval = tokio::time::interval(INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut failing = false;
    loop {
        tokio::select! {
            // The stream never ends: a watcher reconnects forever.
            Some(event) = changes.next() => {
                objects.apply(event);
                if objects.listed {
                    budgets.apply(objects.iter(), objects.undecodable().cloned().collect());
                }
            }
            _ = interval.tick() => {
                let failed = budgets.give_back().await;
                if let Some(why) = failed.as_ref().filter(|_| !failing) {
                    tracing::warn!("{why}; it is tried again");
                }
                failing = failed.is_some();
            }
        }
    }
}
