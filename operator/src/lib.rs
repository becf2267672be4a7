//! The operator: it turns what people ask for into objects that agents carry out, and says in
//! conditions where everything stands. It runs no models and reads no model files; it only speaks
//! the Kubernetes API, so it cannot tell the embedded server from any other.
//!
//! ```text
//! observe ─▶ validate ─▶ plan ─▶ apply ─▶ report          one folder per kind; only the first and
//!  (caches)            (pure)            (conditions)     the last two touch the network
//! ```

mod context;
mod csr;
mod deployment;
mod group;
pub mod install;
mod metrics;
mod model;
mod node;
mod reconcile;
mod route;
mod ssa;
mod watch;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use thiserror::Error;

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

/// Runs every controller until `shutdown` completes. `ready` becomes true once all caches are full.
/// The kinds must be installed ([`install::apply`]); until they are, the watches retry.
pub async fn run(
    client: kube::Client,
    registry: prometheus::Registry,
    ready: Arc<AtomicBool>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let metrics = metrics::Metrics::register(&registry)?;
    let result = tokio::select! {
        () = shutdown => Ok(()),
        ended = watch::run(client, metrics, &ready) => Err(Error::Ended(ended)),
    };
    ready.store(false, Ordering::Release);
    result
}
