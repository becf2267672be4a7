//! One rank of a group that answers requests: the serving half (tokens, scheduling, gRPC) over
//! the half that owns MLX, with [`compute`] between them. Without the feature `mlx` only the
//! serving half is built, which is how it is tested without MLX.
//!
//! The MLX half from the arrays upwards: [`weights`] reads a rank's own tensors, [`layers`] and
//! [`models`] compute with them, [`cache`] remembers a sequence, [`sample`] chooses the next token,
//! and [`runtime`] is the one thread on which all of that happens.
//!
//! The serving half: [`serve`] is the life of a process, [`server`] and [`control`] answer gateways
//! and the agent, [`schedule`] gives [`sequence`]s their steps, [`guess`] says what may come next in them, [`tokens`]
//! turns text into tokens and back, [`follow`] keeps the ranks of a group together, [`rings`] and [`tunnel`] let MLX's ranks meet,
//! [`life`] says when it is over, and [`again`] whether the process is of use to the group that comes after. [`pulse`] and [`forecast`] tell a rank that hangs from one that has much to do.

pub mod reform;
pub mod args;
pub mod executor;
pub mod control_service;
pub mod group;
pub mod batch_time;
pub mod speculative;
pub mod jaccl;
pub mod prefix_cache;
pub mod lifecycle;
pub mod step_profiler;
pub mod metrics;
pub mod batch_monitor;
pub mod throughput;
pub mod rings;
pub mod scheduler;
pub mod sequence;
pub mod process;
pub mod engine_service;
pub mod tokenizer;
pub mod tunnel;

#[cfg(test)]
mod fixture;
#[cfg(test)]
#[path = "../tests/support/identities.rs"]
mod identities;
#[cfg(test)]
#[path = "../tests/support/model.rs"]
mod model;

#[cfg(feature = "mlx")]
pub mod cache;
#[cfg(feature = "mlx")]
pub mod layers;
#[cfg(feature = "mlx")]
pub mod models;
#[cfg(feature = "mlx")]
pub mod partition;
#[cfg(feature = "mlx")]
pub mod runtime;
#[cfg(feature = "mlx")]
pub mod sample;
#[cfg(feature = "mlx")]
pub mod weights;
