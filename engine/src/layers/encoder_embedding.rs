//! What an encoder adds to the embedding of its tokens: that of their positions and of their segments, normalised together.

use mlx_rs::{Array, error::Exception};

use super::norm::LayerNorm;
use crate::weights::{Weights, WeightsError};

/// Absolute positions and segments.
#[derive(Debug)]
pub struct EncoderEmbedding {
    positions: Array,
    token_types: Array,
    norm: LayerNorm,
    /// The row of the first position.
    first_position: i32,
}

impl EncoderEmbedding {
    /// Loads `embed_positions`, `embed_token_types` and `embed_norm` under `path`.
    pub fn load(
        weights: &mut Weights<'_>,
        path: &str,
        first_position: u32,
        epsilon: f32,
    ) -> Result<Self, WeightsError> {
        Ok(Self {
            positions: weights.tensor(&format!("{path}.embed_positions.weight"))?,
            token_types: weights.tensor(&format!("{path}.embed_token_types.weight"))?,
            norm: LayerNorm::load(weights, &format!("{path}.embed_norm"), epsilon)?,
            first_position: first_position as i32,
        })
    }

    /// Hidden states, `[1, positions, width]`, of embedded tokens with the position of each in its text, from 0, and its
    /// segment, `[positions]` each.
    pub fn forward(
        &self,
        tokens: &Array,
        positions: &Array,
        token_types: &Array,
    ) -> Result<Array, Exception> {
        let places = positions.add(Array::from_int(self.first_position))?;
        let placed = tokens.add(self.positions.take_axis(places, 0)?)?;
        self.norm.forward(&placed.add(self.token_types.take_axis(token_types, 0)?)?)
    }
}
