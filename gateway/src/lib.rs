//! The gateway: an OpenAI-compatible HTTP server in front of the engines, which it calls over gRPC with
//! mutual TLS. It makes no placement decisions, and keeps conversations only where a file for them is named, see
//! `response_store`. To the cluster it writes only demand (which models are requested), the status of AccessKeys,
//! Budgets, Benchmarks, ModelProviders and PipelineRuns, the Approvals that those ask for, and where its owner allows it the models that clients pull, see `managed_models`. It watches the cluster and keeps routing by the last known state while the API
//! server is unavailable.
//!
//! ```text
//! HTTP ─▶ listen ─▶ middleware ─▶ dialects/* ─▶ serving ─▶ dispatch (hold, route, retry) ─▶ backends ─gRPC─▶ rank 0
//!                     ▲                                        ▲   ├─▶ zones ─▶ providers ─HTTPS─▶ other servers
//!                     │                                        │   └─▶ demand ─▶ ModelDeployment.status.demand
//!             keys: AccessKeys        routes: ModelDeployments, ShardGroups, ModelRoutes, ModelProviders, Models
//!                                                                  benchmarks ─▶ backends ─gRPC─▶ rank 0
//! ```

mod api_timeout;
pub mod audit;
mod backends;
mod background;
mod batches;
mod benchmarks;
mod body_budget;
mod budgets;
mod claims;
pub mod demand;
mod dialects;
mod discard;
pub mod dispatch;
mod duration;
mod energy;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod inbox;
mod json_body;
pub mod keys;
pub mod listen;
pub mod managed_models;
mod metrics;
mod middleware;
mod model_copies;
pub mod mqtt;
mod offline;
pub mod origins;
mod pipelines;
mod prompt_marks;
mod providers;
mod rejection;
pub mod request_defaults;
mod request_id;
mod request_limits;
pub mod request_log;
pub mod response_store;
pub mod routes;
pub mod server;
mod serving;
pub mod strip_patterns;
mod watch;
mod workers;
mod zone_client;
pub mod zones;

pub use server::{Error, GatewayConfig, run};
