//! The operator: it turns users' objects into objects that agents carry out, and reports progress in
//! conditions. It runs no models and reads no model files; it only uses the Kubernetes API, so it works on
//! the embedded server and on any other.
//!
//! ```text
//! observe ─▶ validate ─▶ plan ─▶ apply ─▶ report          one folder per kind; only the first and
//!  (caches)            (pure)            (conditions)     the last two touch the network
//! ```

mod approval;
mod autoscaling;
mod ca;
mod context;
mod csr;
mod decommission;
mod deployment;
mod group;
pub mod install;
pub mod join_tokens;
pub mod leader;
mod leader_caches;
mod memory;
mod metrics;
mod model;
mod node;
pub mod node_accounts;
mod pipeline_run;
mod planner;
mod pool;
mod reconcile;
mod route;
mod snapshot;
mod ssa;
mod stores;
mod strategy;
mod tier;
mod watch;
mod work_queue;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use thiserror::Error;

pub use leader_caches::LeaderCaches;

/// Why the operator stopped.
#[derive(Debug, Error)]
pub enum Error {
    /// The metrics could not be registered; two operators share one registry.
    #[error("the operator's metrics are registered twice in one process: {0}")]
    Metrics(#[from] prometheus::Error),
    /// A task that should run for ever ended.
    #[error("the operator's {0} ended unexpectedly; restart the operator")]
    Ended(&'static str),
}

/// Runs every controller until `shutdown` completes, whenever this process leads ([`leader`]). `identity`
/// names it among its peers and stays the same over restarts; `credential` is how the API server
/// authenticates nodes. While it leads, `watched` gives access to its caches. `ready` is true once all caches
/// are synced, and while standing by. The kinds must be installed ([`install::apply`]); until they are, the
/// watches retry.
pub async fn run(
    client: kube::Client,
    identity: &str,
    credential: node_accounts::Credential,
    registry: prometheus::Registry,
    leader_caches: LeaderCaches,
    ready: Arc<AtomicBool>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let metrics = metrics::OperatorMetrics::register(&registry, leader_caches)?;
    let act = || watch::run(client.clone(), metrics.clone(), credential, &ready);
    match leader::run_as_leader(client.clone(), identity, leader::DEFAULT_TIMING, &ready, shutdown, act).await
    {
        None => Ok(()),
        Some(ended) => Err(Error::Ended(ended)),
    }
}
