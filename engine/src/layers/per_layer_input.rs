//! Per-layer inputs: what makes those of all layers from the tokens, and what each layer does with its own. They travel
//! with the hidden state, in one array: `[hidden state, inputs of the layers ahead]` along the last axis.

use mlx_rs::{
    Array,
    error::Exception,
    ops::{concatenate, indexing::TryIndexOp},
};
use russet_model::description::PerLayerInputs;

use super::{
    activation::{GatedActivation, scalar},
    embedding::Embedding,
    linear::Linear,
    norm::RmsNorm,
};
use crate::weights::{Weights, WeightsError};

/// Makes the inputs of all layers.
#[derive(Debug)]
pub struct PerLayerEmbedding {
    table: Embedding,
    projection: Linear,
    norm: RmsNorm,
    description: PerLayerInputs,
}

impl PerLayerEmbedding {
    /// Loads the table, the projection and its norm.
    pub fn load(weights: &mut Weights<'_>, description: PerLayerInputs) -> Result<Self, WeightsError> {
        Ok(Self {
            table: Embedding::load(weights, "model.embed_tokens_per_layer")?,
            projection: Linear::load(weights, "model.per_layer_model_projection")?,
            norm: RmsNorm::load(weights, "model.per_layer_projection_norm", description.epsilon)?,
            description,
        })
    }

    /// Inputs of all layers, `[1, positions, layers · width]`, of `tokens` (`[1, positions]`) and their embeddings, the
    /// hidden state before the first layer.
    pub fn forward(&self, tokens: &Array, embedded: &Array) -> Result<Array, Exception> {
        let PerLayerInputs { width, embedding_scale, projection_scale, scale, .. } = self.description;
        let looked_up = self.table.forward(tokens)?;
        let looked_up = looked_up.multiply(scalar(embedding_scale, &looked_up)?)?;
        let projected = self.projection.forward(embedded)?;
        let projected = projected.multiply(scalar(projection_scale, &projected)?)?;
        // Each layer's are normalised by themselves.
        let each = projected.reshape(&[1, projected.dim(1), -1, width as i32])?;
        let normed = self.norm.forward(&each)?.reshape(projected.shape())?;
        let sum = normed.add(looked_up)?;
        sum.multiply(scalar(scale, &sum)?)
    }
}

/// The inputs of the layers ahead, one behind the other.
#[derive(Debug)]
pub struct InputsAhead {
    inputs: Array,
    width: i32,
}

impl InputsAhead {
    /// Takes what a stage receives apart into the hidden state, `hidden_size` wide, and the inputs, `width` each.
    pub fn split(received: &Array, hidden_size: i32, width: u32) -> Result<(Array, Self), Exception> {
        let hidden = received.try_index((.., .., ..hidden_size))?;
        let inputs = received.try_index((.., .., hidden_size..))?;
        Ok((hidden, Self { inputs, width: width as i32 }))
    }

    /// The input of a layer, counted from the first of the stage.
    pub fn of(&self, layer: i32) -> Result<Array, Exception> {
        self.inputs.try_index((.., .., layer * self.width..(layer + 1) * self.width))
    }

    /// The hidden state after so many layers together with the inputs of those behind them, if there are any.
    pub fn join(&self, hidden: Array, layers: i32) -> Result<Array, Exception> {
        let passed = layers * self.width;
        if passed >= self.inputs.dim(-1) {
            return Ok(hidden);
        }
        concatenate(&[hidden, self.inputs.try_index((.., .., passed..))?], -1)
    }
}

/// What a layer does with its input.
#[derive(Debug)]
pub struct PerLayerGate {
    gate: Linear,
    activation: GatedActivation,
    projection: Linear,
    norm: RmsNorm,
}

impl PerLayerGate {
    /// Loads gate, projection and norm of the layer at `path`.
    pub fn load(
        weights: &mut Weights<'_>,
        path: &str,
        description: &PerLayerInputs,
        epsilon: f32,
    ) -> Result<Self, WeightsError> {
        Ok(Self {
            gate: Linear::load(weights, &format!("{path}.per_layer_input_gate"))?,
            activation: GatedActivation::new(description.activation),
            projection: Linear::load(weights, &format!("{path}.per_layer_projection"))?,
            norm: RmsNorm::load(weights, &format!("{path}.post_per_layer_input_norm"), epsilon)?,
        })
    }

    /// What the layer adds to the hidden state `x`, given its input.
    pub fn forward(&self, x: &Array, input: &Array) -> Result<Array, Exception> {
        let gated = self.activation.apply(Some(&self.gate.forward(x)?), input)?;
        self.norm.forward(&self.projection.forward(&gated)?)
    }
}
