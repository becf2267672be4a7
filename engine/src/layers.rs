//! The pieces that architectures are made of. Each computes exactly what its mlx-lm counterpart
//! does, operation by operation, sharded or whole; none knows which rank it runs on.

mod attend;
pub mod attention;
pub mod batch;
pub mod embedding;
pub mod linear;
pub mod mlp;
pub mod norm;
pub mod rope;
pub mod stage;
