//! A mixture of experts: each position passes a few gated blocks of many, and in some families one more that all pass.
//! With tensor parallelism, each rank computes a share of every expert, and the shares are summed once.

use mlx_rs::{
    Array,
    error::Exception,
    ops::{argsort, indexing::take_axis, sigmoid},
};
use russet_model::description::{self, Dense, ExpertNorms};

use super::{
    activation::GatedActivation,
    linear::Linear,
    mlp::FeedForward,
    norm::RmsNorm,
    router::{Router, Routing},
    tensor_parallel::TpGroup,
};
use crate::{
    adapters::Adapted,
    weights::{Weight, Weights, WeightsError},
};

/// From so many choices on they are sorted, so that each expert is read once.
const SORTED_FROM: usize = 64;

/// A mixture of experts.
#[derive(Debug)]
pub struct MixtureOfExperts {
    router: Router,
    latent: Option<LatentProjections>,
    gate: Option<ExpertLinear>,
    up: ExpertLinear,
    down: ExpertLinear,
    gated: GatedActivation,
    used: i32,
    shared: Option<SharedExpert>,
    norms: Option<Norms>,
}

/// Projections of the hidden state into what experts read, and of what they give back.
#[derive(Debug)]
struct LatentProjections {
    into: Linear,
    back: Linear,
}

/// Norms of their own, where the layer has none before them.
#[derive(Debug)]
struct Norms {
    before_shared: RmsNorm,
    after_shared: RmsNorm,
    before: RmsNorm,
    after: RmsNorm,
}

/// The expert that every position passes.
#[derive(Debug)]
struct SharedExpert {
    mlp: FeedForward,
    /// What weighs it.
    gate: Option<Linear>,
}

/// One projection of all experts.
#[derive(Debug)]
struct ExpertLinear {
    weight: Weight,
    bias: Option<Array>,
    adapted: Adapted,
}

impl ExpertLinear {
    fn load(weights: &mut Weights<'_>, path: &str) -> Result<Self, WeightsError> {
        let weight = weights.weight(path)?;
        let bias = format!("{path}.bias");
        let bias = if weights.has(&bias) { Some(weights.tensor(&bias)?) } else { None };
        let adapted = weights.adapted(path, &weight)?;
        Ok(Self { weight, bias, adapted })
    }

    /// `x`, `[…, 1, 1, inputs]`, through the expert that each of `indices` names; where these are sorted, `positions` are
    /// those of the rows.
    fn forward(&self, x: &Array, indices: &Array, positions: Option<&Array>) -> Result<Array, Exception> {
        let product = self.weight.gather(x, indices, positions.is_some())?;
        let product = self.adapted.apply_to_experts(x, indices, positions, product)?;
        match &self.bias {
            None => Ok(product),
            Some(bias) => product.add(take_axis(bias, indices, 0)?.expand_dims(-2)?),
        }
    }
}

impl MixtureOfExperts {
    /// Loads router, experts and shared expert under the module `path`.
    pub fn load(
        weights: &mut Weights<'_>,
        path: &str,
        description: &description::Experts,
    ) -> Result<Self, WeightsError> {
        let latent = match description.latent {
            None => None,
            Some(_) => Some(LatentProjections {
                into: Linear::load(weights, &format!("{path}.fc1_latent_proj"))?,
                back: Linear::load(weights, &format!("{path}.fc2_latent_proj"))?,
            }),
        };
        let (gate, [up, down]) = description.projections();
        let mut linear =
            |name| ExpertLinear::load(weights, &format!("{path}.{}.{name}", description.experts));
        let gate = gate.map(&mut linear).transpose()?;
        let (up, mut down) = (linear(up)?, linear(down)?);
        // Added to a sum over ranks, it must be added once.
        if weights.shard().index > 0 {
            down.bias = None;
        }
        let shared = match description.shared {
            None => None,
            Some(shared) => {
                let dense = Dense { activation: description.activation, ..Dense::new(shared.intermediate) };
                let mlp = FeedForward::load(weights, &format!("{path}.{}", shared.module), dense.activation)?;
                let gate = shared.gate.map(|gate| Linear::load(weights, &format!("{path}.{gate}")));
                Some(SharedExpert { mlp, gate: gate.transpose()? })
            }
        };
        let norms = match description.norms {
            None => None,
            Some(ExpertNorms { epsilon, before_shared, after_shared, before, after }) => {
                let mut norm = |name| RmsNorm::load(weights, &format!("{path}.{name}"), epsilon);
                Some(Norms {
                    before_shared: norm(before_shared)?,
                    after_shared: norm(after_shared)?,
                    before: norm(before)?,
                    after: norm(after)?,
                })
            }
        };
        Ok(Self {
            router: Router::load(weights, path, description)?,
            latent,
            gate,
            up,
            down,
            gated: GatedActivation::new(description.activation),
            used: description.used as i32,
            shared,
            norms,
        })
    }

    /// The output for `x`, `[1, positions, width]`.
    pub fn forward(&self, x: &Array, stage: &TpGroup) -> Result<Array, Exception> {
        let routing = self.router.forward(x)?.shared_by(stage)?;
        if let (Some(norms), Some(SharedExpert { mlp, .. })) = (&self.norms, &self.shared) {
            let shared = mlp.forward(&norms.before_shared.forward(x)?, stage)?;
            let chosen = stage.all_sum(self.chosen(&norms.before.forward(x)?, &routing)?)?;
            return norms.after_shared.forward(&shared)?.add(norms.after.forward(&chosen)?);
        }
        let mut sum = self.chosen(x, &routing)?;
        if let Some(SharedExpert { mlp, gate }) = &self.shared {
            let shared = mlp.forward_partial(x)?;
            sum = match gate {
                None => sum.add(shared)?,
                Some(gate) => sum.add(sigmoid(gate.forward(x)?)?.multiply(shared)?)?,
            };
        }
        stage.all_sum(sum)
    }

    /// What the chosen experts give together.
    fn chosen(&self, x: &Array, routing: &Routing) -> Result<Array, Exception> {
        let each = match &self.latent {
            None => self.each(x, &routing.experts)?,
            Some(latent) => self.each(&latent.into.forward(x)?, &routing.experts)?,
        };
        let weights = routing.weights.expand_dims(-1)?;
        let sum = each.multiply(weights)?.sum_axis(-2, false)?.as_dtype(each.dtype())?;
        // Of the sum over ranks, each projects its part.
        match &self.latent {
            None => Ok(sum),
            Some(latent) => latent.back.forward(&sum),
        }
    }

    /// What each chosen expert gives, `[1, positions, used, width]`.
    fn each(&self, x: &Array, experts: &Array) -> Result<Array, Exception> {
        let (positions, width) = (x.dim(1), x.dim(2));
        if experts.size() < SORTED_FROM {
            let x = x.reshape(&[1, positions, 1, 1, width])?;
            return self.pass(&x, experts, None)?.squeeze_axes(&[-2]);
        }
        let experts = experts.reshape(&[-1])?;
        let order = argsort(&experts)?;
        let back = argsort(&order)?;
        let used = Array::from_int(self.used).as_dtype(order.dtype())?;
        let places = order.floor_divide(used)?;
        let rows = x.reshape(&[positions, 1, width])?.take_axis(&places, 0)?;
        let each = self.pass(&rows, &experts.take_axis(&order, 0)?, Some(&places))?;
        each.take_axis(back, 0)?.reshape(&[1, positions, self.used, width])
    }

    fn pass(&self, x: &Array, experts: &Array, positions: Option<&Array>) -> Result<Array, Exception> {
        let up = self.up.forward(x, experts, positions)?;
        let gate = self.gate.as_ref().map(|gate| gate.forward(x, experts, positions)).transpose()?;
        self.down.forward(&self.gated.apply(gate.as_ref(), &up)?, experts, positions)
    }
}
