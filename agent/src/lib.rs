//! The node agent: joins a machine to a cluster, reports it, keeps model files on it and runs one
//! engine process per Shard. It decides nothing about placement, and it never links MLX.

pub mod hardware;
pub mod quantity;
pub mod store;
pub mod token;
