//! One rank of a group that answers requests: the serving half (tokens, scheduling, gRPC) over
//! the half that owns MLX, with [`compute`] between them. Without the feature `mlx` only the
//! serving half is built, which is how it is tested without MLX.

pub mod compute;
