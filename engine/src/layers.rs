//! Layers of the model architectures. Each computes exactly what its mlx-lm counterpart does, operation by
//! operation, sharded or whole; none knows its rank.

pub mod activation;
pub mod attention;
mod causal_conv;
pub mod delta_net;
mod delta_rule;
pub mod embedding;
pub mod encoder_embedding;
pub mod experts;
pub mod latent;
pub mod linear;
pub mod mamba2;
pub mod mlp;
pub mod norm;
pub mod packed_batch;
pub mod per_layer_input;
pub mod pooler;
mod query_scale;
pub mod rope;
pub mod router;
mod sdpa;
pub mod short_conv;
mod ssm;
pub mod tensor_parallel;

use mlx_rs::{Device, DeviceType, error::Exception};

/// Whether MLX computes on a GPU.
pub fn on_gpu() -> Result<bool, Exception> {
    Ok(matches!(Device::try_default()?.get_type()?, DeviceType::Gpu))
}
