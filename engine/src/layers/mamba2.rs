//! A Mamba-2 mixer: a state space whose state, a matrix for each head, every position decays and adds to; before it a
//! short convolution, behind it a gate and a norm. With tensor parallelism, each rank computes some of the groups.

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    fast,
    ops::{concatenate, indexing::TryIndexOp, logaddexp, maximum, minimum, sigmoid, zeros_dtype},
};
use russet_model::description::{self, Activation};

use super::{
    activation::GatedActivation,
    causal_conv::{CausalConv, Convolved},
    linear::Linear,
    packed_batch::{PackedBatch, SequenceSlice},
    ssm::{SsmInput, ssm},
    tensor_parallel::TpGroup,
};
use crate::{
    cache::recurrent::RecurrentCache,
    weights::{Weights, WeightsError},
};

/// One Mamba-2 layer.
#[derive(Debug)]
pub struct Mamba2 {
    /// Groups computed here.
    groups: i32,
    /// Heads computed here.
    heads: i32,
    head_dim: i32,
    state_dim: i32,
    step_limits: [f32; 2],
    input: Linear,
    convolution: CausalConv,
    /// Logarithm of each head's rate of decay.
    decay: Array,
    /// How much of its input each head passes on.
    skip: Array,
    step_bias: Array,
    gated: GatedActivation,
    norm: Array,
    epsilon: f32,
    output: Linear,
}

impl Mamba2 {
    /// Loads the weights under `path`.
    pub fn load(
        weights: &mut Weights<'_>,
        path: &str,
        description: &description::Mamba2,
    ) -> Result<Self, WeightsError> {
        let shard = weights.shard();
        Ok(Self {
            groups: shard.heads(description.groups),
            heads: shard.heads(description.heads),
            head_dim: description.head_dim as i32,
            state_dim: description.state_dim as i32,
            step_limits: description.step_limits,
            input: Linear::load(weights, &format!("{path}.in_proj"))?,
            convolution: CausalConv::load(weights, &format!("{path}.conv1d"), description.conv_kernel)?,
            decay: weights.tensor(&format!("{path}.A_log"))?,
            skip: weights.tensor(&format!("{path}.D"))?,
            step_bias: weights.tensor(&format!("{path}.dt_bias"))?,
            gated: GatedActivation::new(Activation::Silu),
            norm: weights.tensor(&format!("{path}.norm.weight"))?,
            epsilon: description.epsilon,
            output: Linear::load(weights, &format!("{path}.out_proj"))?,
        })
    }

    /// Every position of `x`, `[1, positions, width]`, within its sequence; `layer` selects this layer's state among the
    /// caches of `batch`.
    pub fn forward(
        &self,
        x: &Array,
        batch: &mut PackedBatch<'_>,
        layer: usize,
        stage: &TpGroup,
    ) -> Result<Array, Exception> {
        let (positions, inner) = (x.dim(1), self.heads * self.head_dim);
        let projected = self.input.forward(x)?;
        let steps = projected.dim(2) - self.heads;
        let gate = projected.try_index((.., .., ..inner))?;
        let mixed = projected.try_index((.., .., inner..steps))?;
        let steps = self.steps(&projected.try_index((.., .., steps..))?)?;
        let mut rows = Vec::new();
        for (positions, SequenceSlice { caches, .. }) in batch.sequences() {
            let own = |all: &Array| all.try_index((.., positions.clone(), ..));
            rows.push(self.pass(&own(&mixed)?, &own(&steps)?, caches[layer].recurrent()?)?);
        }
        let gated = self.gated.apply(Some(&gate), &concatenate(&rows, 1)?)?;
        let by_group = gated.reshape(&[1, positions, self.groups, -1])?;
        let normed = fast::rms_norm(&by_group, None, self.epsilon)?.reshape(&[1, positions, inner])?;
        self.output.forward_summed(&self.norm.multiply(normed)?, stage)
    }

    /// Time steps of each head, `[1, positions, heads]` in 32 bits.
    fn steps(&self, projected: &Array) -> Result<Array, Exception> {
        let shifted = projected.as_dtype(Dtype::Float32)?.add(&self.step_bias)?;
        let [shortest, longest] = self.step_limits.map(Array::from_f32);
        minimum(maximum(logaddexp(shifted, Array::from_f32(0.0))?, shortest)?, longest)
    }

    /// The positions of one sequence, `[1, positions, heads × head]`.
    fn pass(&self, mixed: &Array, steps: &Array, cache: &mut RecurrentCache) -> Result<Array, Exception> {
        let (positions, each) = (mixed.dim(1), self.heads / self.groups);
        let (before, state) = match cache.state() {
            [before, state] => (Some(before), state.clone()),
            _ => {
                let shape = [self.groups, each, self.head_dim, self.state_dim];
                (None, zeros_dtype(&shape, Dtype::Float32)?)
            }
        };
        let Convolved { output: mixed, tail: last } = self.convolution.forward(mixed, before)?;
        let mixed = mixed.multiply(sigmoid(&mixed)?)?;
        let (inner, width) = (self.heads * self.head_dim, self.groups * self.state_dim);
        let values = mixed.try_index((.., .., ..inner))?.reshape(&[positions, self.heads, self.head_dim])?;
        let by_group = |from: i32| {
            let own = mixed.try_index((.., .., from..from + width))?;
            own.reshape(&[positions, self.groups, 1, self.state_dim])?.transpose_axes(&[1, 2, 0, 3])
        };
        let rate = self.decay.as_dtype(Dtype::Float32)?.exp()?.negative()?;
        let steps = steps.reshape(&[positions, self.heads])?;
        let written = values.multiply(steps.expand_dims(-1)?)?;
        let input = SsmInput {
            values: written
                .reshape(&[positions, self.groups, each, self.head_dim])?
                .transpose_axes(&[1, 2, 0, 3])?,
            decay: steps
                .multiply(rate)?
                .reshape(&[positions, self.groups, each])?
                .transpose_axes(&[1, 2, 0])?,
            writes: by_group(inner)?,
            reads: by_group(inner + width)?,
        };
        let (read, state) = ssm(&input, state)?;
        cache.advance(vec![last, state], positions);
        let read = read.transpose_axes(&[2, 0, 1, 3])?.reshape(values.shape())?.as_dtype(values.dtype())?;
        let skipped = values.multiply(self.skip.as_dtype(values.dtype())?.expand_dims(-1)?)?;
        read.add(skipped)?.reshape(&[1, positions, inner])
    }
}
