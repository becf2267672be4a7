//! The operator: it turns what people ask for into objects that agents carry out, and says in
//! conditions where everything stands. It runs no models and reads no model files; it only speaks
//! the Kubernetes API, so it cannot tell the embedded server from any other.
//!
//! ```text
//! observe ─▶ validate ─▶ plan ─▶ apply ─▶ report          one folder per kind; only the first and
//!  (caches)            (pure)            (conditions)     the last two touch the network
//! ```

pub mod node_accounts;
mod approval;
mod ca;
mod snapshot;
mod context;
mod csr;
mod deployment;
mod group;
pub mod install;
pub mod leader;
mod decommission;
mod metrics;
mod model;
mod node;
mod pool;
mod work_queue;
mod reconcile;
mod route;
mod autoscaling;
mod ssa;
mod strategy;
mod tier;
pub mod join_tokens;
mod watch;
mod leader_caches;

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
    /// A part that should run for ever ended.
    #[error("the operator's {0} ended although nobody asked it to; restart the operator")]
    Ended(&'static str),
}

/// Runs every controller until `shutdown` completes, whenever this process leads ([`leader`]); `identity`
/// names it among its peers and stays the same over restarts, `credential` is what the API server knows
/// nodes by. While it leads, `watched` shows its caches. `ready` is true once all caches are full, and while standing by. The kinds must be installed
/// ([`install::apply`]); until they are, the watches retry.
pub async fn run(
    client: kube::Client,
    identity: &str,
    credential: node_accounts::Credential,
    registry: prometheus::Registry,
    watched: LeaderCaches,
    ready: Arc<AtomicBool>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let metrics = metrics::OperatorMetrics::register(&registry, watched)?;
    let act = || watch::run(client.clone(), metrics.clone(), credential, &ready);
    match leader::run_as_leader(client.clone(), identity, leader::DEFAULT_TIMING, &ready, shutdown, act).await {
        None => Ok(()),
        Some(ended) => Err(Error::Ended(ended)),
    }
}
