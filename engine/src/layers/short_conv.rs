//! A short convolution between two gates of the input: what it remembers of a sequence is its last inputs. With tensor
//! parallelism, each rank computes some of the channels.

use mlx_rs::{
    Array,
    error::Exception,
    ops::{concatenate, indexing::TryIndexOp},
};
use russet_model::description;

use super::{
    causal_conv::{CausalConv, Convolved},
    linear::Linear,
    packed_batch::{PackedBatch, SequenceSlice},
    tensor_parallel::TpGroup,
};
use crate::{
    cache::LayerCache,
    weights::{Weights, WeightsError},
};

/// One layer of a short convolution.
#[derive(Debug)]
pub struct ShortConv {
    /// To the gate before, the gate after, and what is convolved.
    input: Linear,
    convolution: CausalConv,
    output: Linear,
}

impl ShortConv {
    /// Loads the weights under `path`.
    pub fn load(
        weights: &mut Weights<'_>,
        path: &str,
        description: &description::ShortConv,
    ) -> Result<Self, WeightsError> {
        Ok(Self {
            input: Linear::load(weights, &format!("{path}.in_proj"))?,
            convolution: CausalConv::load(weights, &format!("{path}.conv"), description.kernel)?,
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
        let parts = self.input.forward(x)?.split_equal(3, -1)?;
        let [before, after, x] = parts.as_slice() else {
            return Err(Exception::custom("the input of a short convolution is not three equal parts"));
        };
        let gated = before.multiply(x)?;
        let mut rows = Vec::new();
        for (positions, SequenceSlice { caches, .. }) in batch.sequences() {
            let LayerCache::Recurrent(state) = &mut caches[layer] else {
                return Err(Exception::custom(
                    "a short convolution was given the cache of another kind of layer",
                ));
            };
            let own = gated.try_index((.., positions.clone(), ..))?;
            let Convolved { output, tail } = self.convolution.forward(&own, state.state().first())?;
            state.advance(vec![tail], positions.end - positions.start);
            rows.push(output);
        }
        self.output.forward_summed(&after.multiply(concatenate(&rows, 1)?)?, stage)
    }
}
