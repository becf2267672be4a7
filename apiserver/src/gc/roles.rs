//! Aggregated cluster roles: writes the rules that the policy collects for them into the objects, where users
//! read them.

use std::sync::Arc;
use std::time::Duration;

use super::edit::edit;
use crate::auth::rbac;
use crate::kinds::builtin;
use crate::state::ServerState;
use crate::store::reflector::FromObjects;

/// Runs the controller.
pub async fn run(api: Arc<ServerState>) {
    loop {
        if let Err(error) = follow(&api).await {
            tracing::debug!(error, "the watch of roles ended; they are listed again");
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn follow(api: &Arc<ServerState>) -> Result<(), String> {
    let mut watch =
        api.store.watch(rbac::Policy::PREFIX, api.store.revision()).map_err(|error| error.to_string())?;
    loop {
        // The policy is refreshed before a write is acknowledged, but possibly after this watch sees it:
        // refresh now.
        api.policies.refresh(&*api.store);
        for (name, rules) in api.policies.current().aggregated() {
            let key = format!("{}{name}", builtin::prefix(rbac::GROUP, "clusterroles"));
            let written = edit(api, &key, |role| {
                let differs = role["rules"] != rules;
                role["rules"] = rules.clone();
                differs
            });
            written.await.map_err(|error| error.to_string())?;
        }
        watch.next().await.map_err(|error| error.to_string())?;
    }
}
