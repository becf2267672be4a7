//! Latent cache of one layer and one sequence (MLA): one array instead of keys and values, the same for all heads. It has
//! the latent and the rotated part beside each other.

use mlx_rs::{Array, error::Exception};

use super::positions::PositionCache;

/// One latent of every position.
#[derive(Clone, Debug, Default)]
pub struct LatentCache {
    pub(super) positions: PositionCache,
}

impl LatentCache {
    /// Appends latents, `[batch, 1, positions, width]`; returns those of all positions.
    pub fn append(&mut self, latents: &Array) -> Result<Array, Exception> {
        self.positions.append(vec![latents.clone()])?;
        let whole = self.positions.tensors()?.pop();
        whole.ok_or_else(|| Exception::custom("a latent cache is empty after an append"))
    }
}
