//! The router of a mixture of experts: which experts each position passes, and how what they give is weighed.

use mlx_rs::{
    Array, Dtype,
    error::Exception,
    fast,
    ops::{
        argpartition_axis, concatenate,
        indexing::{IndexOp as _, TryIndexOp as _, take_axis},
        sigmoid, softmax_axis, sort_axis, zeros_dtype,
    },
};
use russet_model::description::{Experts, Router as Description, RouterNorm, Scoring};

use super::{activation::scalar, linear::Linear, tensor_parallel::TpGroup};
use crate::weights::{Weights, WeightsError};

/// A router.
#[derive(Debug)]
pub struct Router {
    gate: Linear,
    /// Added to scores for the choice alone.
    correction: Option<Array>,
    norm: Option<Norm>,
    description: Description,
    experts: i32,
    used: i32,
}

/// What is normalised and scaled.
#[derive(Debug)]
struct Norm {
    epsilon: f32,
    /// Weights of the norm of what the router reads, to be divided by the root of their number.
    scale: Array,
    /// What the weight of each expert is multiplied by.
    expert_scale: Array,
}

/// The experts of each position.
#[derive(Debug)]
pub struct Routing {
    /// Which, `[…, used]`.
    pub experts: Array,
    /// What each one's result is multiplied by.
    pub weights: Array,
}

impl Routing {
    /// The first rank's where it chooses for all: ranks whose chips round differently would add up shares of different
    /// experts.
    pub fn shared_by(self, stage: &TpGroup) -> Result<Self, Exception> {
        if !stage.broadcasts_routing() {
            return Ok(self);
        }
        // One sum for both; 32 bits hold the number of any expert.
        let wide = |all: &Array| all.as_dtype(Dtype::Float32);
        let both = stage.broadcast(concatenate(&[wide(&self.experts)?, wide(&self.weights)?], -1)?)?;
        let halves = both.split_equal(2, -1)?;
        let [experts, weights] = halves.as_slice() else {
            return Err(Exception::custom("experts and their weights are not two halves"));
        };
        Ok(Self {
            experts: experts.as_dtype(self.experts.dtype())?,
            weights: weights.as_dtype(self.weights.dtype())?,
        })
    }
}

impl Router {
    /// Loads the gate under the module `path`, and its correction where the family has one.
    pub fn load(weights: &mut Weights<'_>, path: &str, experts: &Experts) -> Result<Self, WeightsError> {
        let gate = Linear::load(weights, &format!("{path}.{}", experts.gate))?;
        let correction = experts.router.correction;
        let mut tensor = |field: &str| weights.tensor(&format!("{path}.{field}"));
        let norm = match experts.router.norm {
            None => None,
            Some(RouterNorm { epsilon, scale, expert_scale }) => {
                Some(Norm { epsilon, scale: tensor(scale)?, expert_scale: tensor(expert_scale)? })
            }
        };
        Ok(Self {
            gate,
            correction: correction.map(tensor).transpose()?,
            norm,
            description: experts.router,
            experts: experts.count as i32,
            used: experts.used as i32,
        })
    }

    /// Chooses for every position of `x`, `[1, positions, width]`.
    pub fn forward(&self, x: &Array) -> Result<Routing, Exception> {
        let x = match &self.norm {
            Some(Norm { epsilon, scale, .. }) => {
                let root = scalar((scale.size() as f32).powf(-0.5), scale)?;
                &fast::rms_norm(x, Some(&scale.multiply(root)?), *epsilon)?
            }
            None => x,
        };
        let logits = match self.description.wide {
            true => self.gate.forward(&x.as_dtype(Dtype::Float32)?)?,
            false => self.gate.forward(x)?,
        };
        match self.description.scoring {
            Scoring::Softmax => self.by_scores(&softmax_axis(logits, -1, true)?),
            Scoring::NarrowSigmoid => self.by_scores(&sigmoid(logits)?),
            Scoring::SoftmaxOfChosen => {
                let experts = self.best(&logits)?;
                let mut weights = softmax_axis(logits.take_along_axis(&experts, -1)?, -1, true)?;
                if let Some(Norm { expert_scale, .. }) = &self.norm {
                    weights = weights.multiply(take_axis(expert_scale, &experts, 0)?)?;
                }
                Ok(Routing { experts, weights })
            }
            Scoring::Sigmoid => self.by_groups(&sigmoid(logits.as_dtype(Dtype::Float32)?)?, x.dtype()),
            Scoring::GroupedSoftmax => {
                self.by_groups(&softmax_axis(logits.as_dtype(Dtype::Float32)?, -1, None)?, x.dtype())
            }
        }
    }

    /// By scores that weigh as they are, which a correction changes for the choice.
    fn by_scores(&self, scores: &Array) -> Result<Routing, Exception> {
        let experts = self.best(&self.corrected(scores)?)?;
        let weights = self.scaled(scores.take_along_axis(&experts, -1)?)?;
        Ok(Routing { experts, weights })
    }

    /// By scores in 32 bits, which a correction and groups change for the choice.
    fn by_groups(&self, scores: &Array, dtype: Dtype) -> Result<Routing, Exception> {
        let mut choosing = self.corrected(scores)?;
        if self.description.groups > 1 {
            choosing = self.of_best_groups(&choosing)?;
        }
        let order = argpartition_axis(choosing.negative()?, self.used - 1, -1)?;
        let experts = order.try_index((.., .., ..self.used))?;
        let weights = self.scaled(scores.take_along_axis(&experts, -1)?)?;
        // Where logits are computed in 32 bits, weights are not.
        let weights = if self.description.wide { weights.as_dtype(dtype)? } else { weights };
        Ok(Routing { experts, weights })
    }

    /// The scores with those of all but the best groups at zero. The best two of a group are its score.
    fn of_best_groups(&self, scores: &Array) -> Result<Array, Exception> {
        let Description { groups, used_groups, .. } = self.description;
        let (groups, dropped) = (groups as i32, (groups - used_groups) as i32);
        if dropped == 0 {
            return Ok(scores.clone());
        }
        let (batch, positions, each) = (scores.dim(0), scores.dim(1), self.experts / groups);
        let grouped = scores.reshape(&[batch, positions, groups, each])?;
        let best = sort_axis(&grouped, -1)?.try_index((.., .., .., each - 2..))?.sum_axis(-1, true)?;
        let worst = argpartition_axis(best, dropped - 1, -2)?.try_index((.., .., ..dropped, ..))?;
        let nothing = zeros_dtype(&[1], grouped.dtype())?;
        grouped.put_along_axis(worst, nothing, -2)?.reshape(scores.shape())
    }

    /// The experts with the highest scores.
    fn best(&self, scores: &Array) -> Result<Array, Exception> {
        let order = argpartition_axis(scores, -self.used, -1)?;
        Ok(order.index((.., .., -self.used..)))
    }

    /// The scores that experts are chosen by, in 32 bits where there is a correction.
    fn corrected(&self, scores: &Array) -> Result<Array, Exception> {
        match &self.correction {
            Some(correction) => scores.as_dtype(Dtype::Float32)?.add(correction),
            None => Ok(scores.clone()),
        }
    }

    /// The weights of the chosen by their scores.
    fn scaled(&self, mut weights: Array) -> Result<Array, Exception> {
        let Description { renormalise, epsilon, scale, .. } = self.description;
        if renormalise {
            let mut sum = weights.sum_axis(-1, true)?;
            if epsilon > 0.0 {
                sum = sum.add(scalar(epsilon, &sum)?)?;
            }
            weights = weights.divide(sum)?;
        }
        if scale != 1.0 {
            weights = weights.multiply(scalar(scale, &weights)?)?;
        }
        Ok(weights)
    }
}
