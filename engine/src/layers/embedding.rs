//! Token embedding, and the same matrix as a tied head.

use mlx_rs::{Array, error::Exception};

use crate::weights::{Weight, Weights, WeightsError};

/// One row per token.
#[derive(Debug)]
pub struct Embedding(Weight);

impl Embedding {
    /// Loads `path.weight`.
    pub fn load(weights: &mut Weights<'_>, path: &str) -> Result<Self, WeightsError> {
        Ok(Self(weights.weight(path)?))
    }

    /// The rows of `tokens`.
    pub fn forward(&self, tokens: &Array) -> Result<Array, Exception> {
        self.0.rows(tokens)
    }

    /// Logits, if the output head is tied to the embedding.
    pub fn as_head(&self, x: &Array) -> Result<Array, Exception> {
        self.0.apply(x)
    }
}
