//! Linear layer: matrix product with optional bias.

use mlx_rs::{Array, error::Exception, ops::addmm};

use super::tensor_parallel::TpGroup;
use crate::{
    adapters::Adapted,
    weights::{Weight, Weights, WeightsError},
};

/// A linear layer.
#[derive(Debug)]
pub struct Linear {
    weight: Weight,
    bias: Option<Array>,
    adapted: Adapted,
}

impl Linear {
    /// Loads `path.weight`, and `path.bias` where the model has one: this rank's shards.
    pub fn load(weights: &mut Weights<'_>, path: &str) -> Result<Self, WeightsError> {
        let weight = weights.weight(path)?;
        let bias = format!("{path}.bias");
        let bias = if weights.has(&bias) { Some(weights.tensor(&bias)?) } else { None };
        let adapted = weights.adapted(path, &weight)?;
        Ok(Self { weight, bias, adapted })
    }

    /// The layer's output for `x`.
    pub fn forward(&self, x: &Array) -> Result<Array, Exception> {
        match (&self.weight, &self.bias) {
            (_, None) => self.product(x),
            (Weight::Plain(weight), Some(bias)) if self.adapted.is_never() => {
                addmm(bias, x, weight.transpose()?, None, None)
            }
            (_, Some(bias)) => self.product(x)?.add(bias),
        }
    }

    /// Without the bias, which adapters do not change.
    fn product(&self, x: &Array) -> Result<Array, Exception> {
        self.adapted.apply(x, self.weight.apply(x)?)
    }

    /// Row-parallel output: `x` is sharded over the tensor ranks. Sums the partial products of all ranks,
    /// then adds the bias once.
    pub fn forward_summed(&self, x: &Array, stage: &TpGroup) -> Result<Array, Exception> {
        if stage.is_single_rank() {
            return self.forward(x);
        }
        let sum = stage.all_sum(self.product(x)?)?;
        match &self.bias {
            Some(bias) => sum.add(bias),
            None => Ok(sum),
        }
    }
}
