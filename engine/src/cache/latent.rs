//! Latent cache of one layer and one sequence (MLA): the latent and the rotated part of every position, instead of keys and
//! values, the same for all heads. Each is an array of its own: a product with some columns of an array copies them first.

use mlx_rs::{Array, error::Exception};

use super::positions::PositionCache;

/// One latent of every position.
#[derive(Clone, Debug, Default)]
pub struct LatentCache {
    pub(super) positions: PositionCache,
}

/// Arrays that a latent cache has.
pub const LATENT_TENSORS: usize = 2;

impl LatentCache {
    /// Appends latents and rotated parts, `[batch, 1, positions, width]` each; returns those of all positions.
    pub fn append(&mut self, latents: &Array, rotated: &Array) -> Result<[Array; LATENT_TENSORS], Exception> {
        self.positions.append(vec![latents.clone(), rotated.clone()])?;
        let whole = self.positions.tensors()?.try_into();
        whole.map_err(|_| Exception::custom("a latent cache is empty after an append"))
    }
}
