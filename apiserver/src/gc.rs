//! Controllers of the API server: garbage collection of dependents, deletion of namespaces and of custom
//! resources with their definitions, expiry of Events, the status of ResourceQuotas, and the default objects of new namespaces. One task
//! each, all driven by watches of the store.

pub mod cache_refresh;
mod controller;
pub mod definitions;
pub mod edit;
pub mod expiry;
pub mod namespaces;
pub mod owners;
pub mod quotas;
pub mod remaining;
pub mod roles;

use std::future::Future;
use std::sync::Arc;

use tokio::task::JoinHandle;

use crate::state::{self, ServerState};

/// Starts the controllers; they end when the server stops.
pub fn spawn(api: &Arc<ServerState>) -> Vec<JoinHandle<()>> {
    vec![
        until_stopped(api, owners::run(api.clone())),
        until_stopped(api, namespaces::run(api.clone())),
        until_stopped(api, definitions::run(api.clone())),
        until_stopped(api, expiry::run(api.clone())),
        until_stopped(api, quotas::run(api.clone())),
        until_stopped(api, roles::run(api.clone())),
    ]
}

pub(crate) fn until_stopped(
    api: &Arc<ServerState>,
    controller: impl Future<Output = ()> + Send + 'static,
) -> JoinHandle<()> {
    let stopping = api.stopping.clone();
    tokio::spawn(async move {
        tokio::select! {
            () = controller => {}
            () = state::stopped(stopping) => {}
        }
    })
}
