//! A gated delta net: linear attention whose state, a matrix for each head, every position decays and corrects; before it
//! a short convolution over queries, keys and values. With tensor parallelism, each rank computes some of the heads.

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    fast,
    ops::{concatenate, indexing::TryIndexOp, logaddexp, sigmoid, zeros_dtype},
};
use russet_model::description;

use super::{
    activation::scalar,
    causal_conv::{CausalConv, Convolved},
    delta_rule::{DeltaInput, delta_rule, spread},
    linear::Linear,
    norm::RmsNorm,
    packed_batch::{PackedBatch, SequenceSlice},
    tensor_parallel::TpGroup,
};
use crate::{
    cache::recurrent::RecurrentCache,
    weights::{Weights, WeightsError},
};

/// Added to the sum of squares of a query or key before its root.
const UNIT_EPSILON: f32 = 1e-6;

/// One layer of a gated delta net.
#[derive(Debug)]
pub struct DeltaNet {
    /// Heads computed here.
    key_heads: i32,
    value_heads: i32,
    key_dim: i32,
    value_dim: i32,
    projections: Projections,
    convolution: CausalConv,
    /// Logarithm of each head's rate of decay.
    decay: Array,
    step_bias: Array,
    norm: RmsNorm,
    output: Linear,
}

#[derive(Debug)]
enum Projections {
    /// Queries, keys, values and gate in one matrix, steps and decays in another, both ordered by key heads.
    Merged { qkvz: Linear, ba: Linear },
    /// Each by itself, but queries, keys and values.
    Apart { qkv: Linear, z: Linear, b: Linear, a: Linear },
}

/// What a position is projected to.
struct Projected {
    /// Queries, keys and values, `[1, positions, channels]`.
    qkv: Array,
    /// The gate of the output, `[1, positions, value heads, value]`.
    gate: Array,
    /// How far the state is corrected, `[1, positions, value heads]`.
    step: Array,
    /// How far it decays.
    decay: Array,
}

impl DeltaNet {
    /// Loads the weights under `path`.
    pub fn load(
        weights: &mut Weights<'_>,
        path: &str,
        description: &description::DeltaNet,
    ) -> Result<Self, WeightsError> {
        let mut linear = |name| Linear::load(weights, &format!("{path}.{name}"));
        let projections = match description.merged_projections {
            true => Projections::Merged { qkvz: linear("in_proj_qkvz")?, ba: linear("in_proj_ba")? },
            false => Projections::Apart {
                qkv: linear("in_proj_qkv")?,
                z: linear("in_proj_z")?,
                b: linear("in_proj_b")?,
                a: linear("in_proj_a")?,
            },
        };
        let output = linear("out_proj")?;
        let shard = weights.shard();
        Ok(Self {
            key_heads: shard.heads(description.key_heads),
            value_heads: shard.heads(description.value_heads),
            key_dim: description.key_dim as i32,
            value_dim: description.value_dim as i32,
            projections,
            convolution: CausalConv::load(weights, &format!("{path}.conv1d"), description.conv_kernel)?,
            decay: weights.tensor(&format!("{path}.A_log"))?,
            step_bias: weights.tensor(&format!("{path}.dt_bias"))?,
            norm: RmsNorm::load(weights, &format!("{path}.norm"), description.epsilon)?,
            output,
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
        let Projected { qkv, gate, step, decay } = self.project(x)?;
        let mut rows = Vec::new();
        for (positions, SequenceSlice { caches, .. }) in batch.sequences() {
            let own = |all: &Array| all.try_index((.., positions.clone(), ..));
            rows.push(self.pass(&own(&qkv)?, &own(&step)?, &own(&decay)?, caches[layer].recurrent()?)?);
        }
        let passed = concatenate(&rows, 1)?;
        let normed = self.norm.forward(&passed)?.as_dtype(Dtype::Float32)?;
        let gate = gate.as_dtype(Dtype::Float32)?;
        let gated = gate.multiply(sigmoid(&gate)?)?.multiply(normed)?.as_dtype(passed.dtype())?;
        self.output.forward_summed(&gated.reshape(&[1, x.dim(1), -1])?, stage)
    }

    fn project(&self, x: &Array) -> Result<Projected, Exception> {
        let (positions, heads) = (x.dim(1), self.value_heads);
        match &self.projections {
            Projections::Apart { qkv, z, b, a } => Ok(Projected {
                qkv: qkv.forward(x)?,
                gate: z.forward(x)?.reshape(&[1, positions, heads, self.value_dim])?,
                step: b.forward(x)?,
                decay: a.forward(x)?,
            }),
            Projections::Merged { qkvz, ba } => {
                let each = heads / self.key_heads;
                let (key, value) = (self.key_dim, each * self.value_dim);
                let mixed = qkvz.forward(x)?.reshape(&[1, positions, self.key_heads, -1])?;
                let part = |from: i32, to: i32| {
                    mixed.try_index((.., .., .., from..to))?.reshape(&[1, positions, -1])
                };
                let [queries, keys] = [part(0, key)?, part(key, 2 * key)?];
                let [values, gate] =
                    [part(2 * key, 2 * key + value)?, part(2 * key + value, 2 * (key + value))?];
                let mixed = ba.forward(x)?.reshape(&[1, positions, self.key_heads, -1])?;
                let [step, decay] =
                    [mixed.try_index((.., .., .., ..each))?, mixed.try_index((.., .., .., each..))?];
                Ok(Projected {
                    qkv: concatenate(&[queries, keys, values], -1)?,
                    gate: gate.reshape(&[1, positions, heads, self.value_dim])?,
                    step: step.reshape(&[1, positions, heads])?,
                    decay: decay.reshape(&[1, positions, heads])?,
                })
            }
        }
    }

    /// The positions of one sequence, `[1, positions, value heads, value]`.
    fn pass(
        &self,
        qkv: &Array,
        step: &Array,
        decay: &Array,
        cache: &mut RecurrentCache,
    ) -> Result<Array, Exception> {
        let (positions, channels) = (qkv.dim(1), qkv.dim(2));
        let (tail, state) = match cache.state() {
            [tail, state] => (Some(tail), state.clone()),
            _ => {
                let shape = [1, self.value_heads, self.value_dim, self.key_dim];
                (None, zeros_dtype(&shape, Dtype::Float32)?)
            }
        };
        let Convolved { output: mixed, tail } = self.convolution.forward(qkv, tail)?;
        let mixed = mixed.multiply(sigmoid(&mixed)?)?;
        let keys = self.key_heads * self.key_dim;
        let heads = |from: i32, to: i32, count: i32, width: i32| {
            mixed.try_index((.., .., from..to))?.reshape(&[1, positions, count, width])
        };
        let queries = heads(0, keys, self.key_heads, self.key_dim)?;
        let own_keys = heads(keys, 2 * keys, self.key_heads, self.key_dim)?;
        let values = heads(2 * keys, channels, self.value_heads, self.value_dim)?;
        let root = (self.key_dim as f32).powf(-0.5);
        let unit = |all: &Array, scale: f32| {
            let normed = fast::rms_norm(all, None, UNIT_EPSILON * root * root)?;
            normed.multiply(scalar(scale, &normed)?)
        };
        let (queries, keys) = (unit(&queries, root * root)?, unit(&own_keys, root)?);
        let step = sigmoid(step)?;
        // -exp(A) · softplus(a + bias), in 32 bits.
        let rate = self.decay.as_dtype(Dtype::Float32)?.exp()?.negative()?;
        let shifted = decay.add(&self.step_bias)?;
        let softplus = logaddexp(&shifted, scalar(0.0, &shifted)?)?;
        let log_decay = rate.multiply(softplus)?;
        let spread = |all: Array| spread(&all, self.value_heads);
        let projected = DeltaInput {
            queries: spread(queries)?,
            keys: spread(keys)?,
            values: values.transpose_axes(&[0, 2, 1, 3])?,
            step: step.transpose_axes(&[0, 2, 1])?,
            decay: log_decay.transpose_axes(&[0, 2, 1])?,
        };
        let (passed, state) = delta_rule(&projected, state)?;
        let passed = passed.transpose_axes(&[0, 2, 1, 3])?.as_dtype(qkv.dtype())?;
        cache.advance(vec![tail, state], positions);
        Ok(passed)
    }
}
