//! One rank of a group that answers requests: the serving half (tokenizer, scheduler, gRPC) over the half
//! that owns MLX, with [`executor`] between them. Without the feature `mlx` only the serving half is built,
//! which is how it is tested without MLX.
//!
//! The MLX half, bottom up: [`weights`] loads a rank's shard, [`layers`] and [`decoder`] compute with it,
//! [`cache`] is the KV cache of a sequence, [`sample`] samples the next token, and [`runtime`] is the one
//! thread that runs all of it.
//!
//! The serving half: [`process`] runs a rank from start to exit, [`engine_service`] and [`control_service`]
//! serve the gateways and the agent, [`scheduler`] composes batches of [`sequence`]s, [`prefix_cache`] reuses
//! KV blocks, [`speculative`] proposes draft tokens, [`tokenizer`] converts text and tokens, [`gguf_folder`] reads
//! the headers of GGUF files for tokenizer and weights, [`group`] is the control stream between ranks, [`rings`] and [`tunnel`] connect MLX's ranks, [`lifecycle`] is the state of
//! the process, and [`reform`] decides whether the process can join the next formation. [`batch_monitor`] and
//! [`batch_time`] tell a rank that hangs from a busy one.

#[cfg(feature = "mlx")]
pub mod adapters;
pub mod batch_monitor;
pub mod batch_time;
pub mod config;
pub mod control_service;
mod dry;
pub mod engine_service;
pub mod executor;
pub mod gguf_folder;
pub mod group;
pub mod jaccl;
pub mod lifecycle;
pub mod logit_edits;
pub mod metrics;
pub mod model_modules;
pub mod pooling;
pub mod prefix_cache;
pub mod process;
pub mod reform;
pub mod rings;
pub mod scheduler;
pub mod sequence;
pub mod served_adapters;
pub mod small_file;
pub mod speculative;
pub mod step_profiler;
pub mod throughput;
pub mod token_masks;
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
pub mod decoder;
#[cfg(feature = "mlx")]
pub mod layers;
#[cfg(feature = "mlx")]
pub mod partition;
#[cfg(feature = "mlx")]
pub mod runtime;
#[cfg(feature = "mlx")]
pub mod sample;
#[cfg(feature = "mlx")]
pub mod weights;
