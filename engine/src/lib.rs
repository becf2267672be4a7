//! One rank of a group that answers requests: the serving half (tokens, scheduling, gRPC) over
//! the half that owns MLX, with [`compute`] between them. Without the feature `mlx` only the
//! serving half is built, which is how it is tested without MLX.
//!
//! The MLX half from the arrays upwards: [`weights`] reads a rank's own tensors, [`layers`] and
//! [`models`] compute with them, [`cache`] remembers a sequence, [`sample`] chooses the next token,
//! and [`runtime`] is the one thread on which all of that happens.

pub mod compute;
pub mod sample;

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
pub mod weights;
