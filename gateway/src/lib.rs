//! The gateway: an OpenAI-compatible HTTP server in front of the engines, which it calls over gRPC with
//! mutual TLS. It makes no placement decisions and keeps no conversation. To the cluster it writes only
//! demand (which models are requested), the status of AccessKeys and the status of Benchmarks. It watches the
//! cluster and keeps routing by the last known state while the API server is away.
//!
//! ```text
//! HTTP ─▶ listen ─▶ middleware ─▶ dialects/* ─▶ dispatch (hold, route, retry) ─▶ backends ─gRPC─▶ rank 0
//!                     ▲                        ▲               └─▶ demand ─▶ ModelDeployment.status.demand
//!             keys: AccessKeys      routes: ModelDeployments, ShardGroups, ModelRoutes
//!                                                benchmarks ─▶ backends ─gRPC─▶ rank 0
//! ```

mod api_timeout;
pub mod backends;
mod benchmarks;
pub mod body_budget;
pub mod demand;
pub mod dialects;
pub mod dispatch;
pub mod error;
pub mod keys;
pub mod listen;
pub mod metrics;
mod middleware;
pub mod request_limits;
pub mod routes;
pub mod server;
mod watch;

pub use server::{Error, GatewayConfig, run};
