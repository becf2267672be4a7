//! Per-layer inputs: beside the hidden state, every layer reads a vector of its own of each position. It is made of the
//! token alone, so the first stage makes those of all layers and sends the others' on with the hidden state.

use super::Activation;

/// Per-layer inputs: `scale · (norm(projection_scale · projection(embedding)) + embedding_scale · table[token])`. A layer
/// adds `norm(projection(activation(gate(hidden)) · input))` to the hidden state after its MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PerLayerInputs {
    /// Width of the vector of one layer.
    pub width: u32,
    /// Tokens of the table.
    pub vocab_size: u32,
    /// What rows of the table are multiplied by.
    pub embedding_scale: f32,
    /// What the projection of the embedding is multiplied by.
    pub projection_scale: f32,
    /// What the sum of both is multiplied by.
    pub scale: f32,
    /// Epsilon of the norm of the projection.
    pub epsilon: f32,
    /// What the gate of a layer passes.
    pub activation: Activation,
}
