//! The gateway: speaks clients' dialects over HTTP and rank 0's gRPC over mutual TLS. It plans
//! nothing, writes to the cluster only who asked for what and what became of keys and Benchmarks, and keeps no
//! conversation; it follows the cluster through a watch and goes on with what it last knew while the API server
//! is away.
//!
//! ```text
//! HTTP ─▶ listen ─▶ guard ─▶ dialects/* ─▶ stream (wait, choose, retry) ─▶ backends ─gRPC─▶ rank 0
//!                     ▲                        ▲               └─▶ demand ─▶ ModelDeployment.status.demand
//!             keys: AccessKeys      routes: ModelDeployments, ShardGroups, ModelRoutes
//!                                                benchmarks ─▶ backends ─gRPC─▶ rank 0
//! ```

pub mod backends;
mod benchmarks;
pub mod body_budget;
pub mod demand;
pub mod dialects;
mod middleware;
pub mod keys;
pub mod listen;
pub mod metrics;
mod api_timeout;
pub mod error;
pub mod routes;
pub mod server;
pub mod dispatch;
pub mod request_limits;
mod watch;

pub use server::{Error, GatewayConfig, run};

/// An error and its causes in one line, for the log.
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Some errors repeat their cause in their own text.
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
