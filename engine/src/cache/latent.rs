//! Latent cache of one layer and one sequence (MLA): one array instead of keys and values, the same for all heads.

use std::ops::Range;

use mlx_rs::{Array, error::Exception};

use super::positions::PositionCache;

/// One latent of every position.
#[derive(Clone, Debug, Default)]
pub struct LatentCache(PositionCache);

impl LatentCache {
    /// Tokens in the cache.
    pub fn offset(&self) -> i32 {
        self.0.offset()
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Appends latents, `[batch, 1, positions, width]`; returns those of all positions.
    pub fn append(&mut self, latents: &Array) -> Result<Array, Exception> {
        self.0.append(vec![latents.clone()])?;
        self.0.tensors()?.pop().ok_or_else(|| Exception::custom("a latent cache is empty after an append"))
    }

    /// Appends positions as [`Self::slice`] returns them.
    pub fn append_raw(&mut self, new: Vec<Array>) -> Result<(), Exception> {
        self.0.append(new)
    }

    /// Truncates to the first `length` positions; the allocation stays.
    pub fn truncate(&mut self, length: i32) {
        self.0.truncate(length);
    }

    /// Copies of some positions; `None` if the cache is empty.
    pub fn slice(&self, positions: Range<i32>) -> Result<Option<Vec<Array>>, Exception> {
        self.0.slice(positions)
    }

    /// See [`PositionCache::readiness_probe`].
    pub fn readiness_probe(&self) -> Result<Vec<Array>, Exception> {
        self.0.readiness_probe()
    }
}
