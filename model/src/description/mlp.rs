//! What each position of a layer passes by itself: one block, gated or not, or a few of many.

use crate::load_quantization::MatrixQuantization;

/// What each position passes by itself.
#[derive(Clone, Debug, PartialEq)]
pub enum Mlp {
    /// One block.
    Dense(Dense),
    /// A few blocks of many, chosen for each position.
    Experts(Box<Experts>),
}

/// A gated block, `down(activation(gate(x)) · up(x))`, or one without a gate, `down(activation(up(x)))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dense {
    /// Its width.
    pub intermediate: u32,
    /// Whether its projections have biases.
    pub bias: bool,
    /// What the gate passes, or what it has instead.
    pub activation: Activation,
    /// The module of a layer that holds it.
    pub module: &'static str,
    /// Names of gate, up and down in the original export.
    pub originals: [&'static str; 3],
}

/// What a gate passes, or what a block without one does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    #[default]
    Silu,
    /// The Gaussian error unit by its approximation with a hyperbolic tangent.
    GeluTanh,
    /// `x · sigmoid(alpha · x)` of a gate that is cut at `limit`, times one more than an input cut on both sides.
    ClippedSwiGlu {
        /// The factor within the sigmoid.
        alpha: f32,
        /// Where gate and input are cut.
        limit: f32,
    },
    /// The square of `max(x, 0)`, without a gate.
    SquaredRelu,
    /// The Gaussian error unit as it is, without a gate.
    Gelu,
}

/// Experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// How many there are.
    pub count: u32,
    /// How many a position passes.
    pub used: u32,
    /// Width of each.
    pub intermediate: u32,
    /// How they are chosen and weighed.
    pub router: Router,
    /// Whether their projections, and the router's, have biases.
    pub bias: bool,
    /// What the gate of each passes, or what each has instead.
    pub activation: Activation,
    /// Width of what they read and give, to which the hidden state is projected and back; `None` where that is the
    /// hidden state itself.
    pub latent: Option<u32>,
    /// The one that every position passes besides.
    pub shared: Option<SharedExpert>,
    /// Norms of its own for the shared expert and for the others, where the layer has none before them.
    pub norms: Option<ExpertNorms>,
    /// The module of a layer that holds all of it; empty where that is the layer.
    pub module: &'static str,
    /// The module within it that holds the experts of mlx-lm's layout.
    pub experts: &'static str,
    /// The module within it that holds the router.
    pub gate: &'static str,
    /// Names of gate, up and down of each expert in the original export.
    pub originals: [&'static str; 3],
}

/// The expert that every position passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpert {
    /// Its width.
    pub intermediate: u32,
    /// The module that holds it.
    pub module: &'static str,
    /// The module of the gate that weighs it, if there is one.
    pub gate: Option<&'static str>,
}

/// Norms of experts and of the shared one, each by the name of its weight under [`Experts::module`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertNorms {
    /// Epsilon of all.
    pub epsilon: f32,
    /// Of what the shared expert reads.
    pub before_shared: &'static str,
    /// Of what it gives.
    pub after_shared: &'static str,
    /// Of what the others read.
    pub before: &'static str,
    /// Of what they give together.
    pub after: &'static str,
}

/// What a router normalises and scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterNorm {
    /// Epsilon of the norm of what it reads.
    pub epsilon: f32,
    /// The norm's weight, which is divided by the root of the width.
    pub scale: &'static str,
    /// What the weight of each expert is multiplied by.
    pub expert_scale: &'static str,
}

/// How experts are chosen for a position, and how what they give is weighed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    /// What makes a score of a logit.
    pub scoring: Scoring,
    /// Whether a learned bias is added to the scores for the choice alone; where it is stored, if so.
    pub correction: Option<&'static str>,
    /// Groups of experts, of which only the best are chosen from; 1 is all.
    pub groups: u32,
    /// Groups that are chosen from.
    pub used_groups: u32,
    /// Whether the weights of the chosen are made to sum to one.
    pub renormalise: bool,
    /// What is added to that sum.
    pub epsilon: f32,
    /// What the weights are multiplied by.
    pub scale: f32,
    /// Whether logits are computed in 32 bits.
    pub wide: bool,
    /// How the matrix that makes logits is packed where matrices are.
    pub quantization: MatrixQuantization,
    /// What it normalises and scales, if it does.
    pub norm: Option<RouterNorm>,
}

/// What makes a score of a router's logit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// A softmax over all experts.
    Softmax,
    /// A sigmoid of each, in the type of the logits.
    NarrowSigmoid,
    /// A softmax over the chosen ones, by their logits.
    SoftmaxOfChosen,
    /// A sigmoid of each, in 32 bits.
    Sigmoid,
    /// A softmax over all experts, of which groups are chosen as they are by sigmoids.
    GroupedSoftmax,
}

/// Names of gate, up and down that most families have.
const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

impl Router {
    /// A router by this scoring that weighs by scores alone.
    pub fn new(scoring: Scoring) -> Self {
        Self {
            scoring,
            correction: None,
            groups: 1,
            used_groups: 1,
            renormalise: false,
            epsilon: 0.0,
            scale: 1.0,
            wide: false,
            quantization: MatrixQuantization::EightBits,
            norm: None,
        }
    }
}

impl Activation {
    /// Whether a gate passes it.
    pub fn has_gate(self) -> bool {
        match self {
            Self::Silu | Self::GeluTanh | Self::ClippedSwiGlu { .. } => true,
            Self::SquaredRelu | Self::Gelu => false,
        }
    }
}

impl Dense {
    /// A block without biases, gated by SiLU.
    pub fn new(intermediate: u32) -> Self {
        Self {
            intermediate,
            bias: false,
            activation: Activation::Silu,
            module: "mlp",
            originals: PROJECTIONS,
        }
    }
}

impl Experts {
    /// Experts without biases, gated by SiLU, with the names that most families have.
    pub fn new(count: u32, used: u32, intermediate: u32, router: Router) -> Self {
        Self {
            count,
            used,
            intermediate,
            router,
            bias: false,
            activation: Activation::Silu,
            latent: None,
            shared: None,
            norms: None,
            module: "mlp",
            experts: "switch_mlp",
            gate: "gate",
            originals: PROJECTIONS,
        }
    }

    /// Names of gate, up and down of all of them in mlx-lm's layout; without a gate, up and down have others.
    pub fn projections(&self) -> (Option<&'static str>, [&'static str; 2]) {
        match self.activation.has_gate() {
            true => (Some("gate_proj"), ["up_proj", "down_proj"]),
            false => (None, ["fc1", "fc2"]),
        }
    }

    /// Width of the one that every position passes; 0 where there is none.
    pub fn shared_width(&self) -> u32 {
        self.shared.map_or(0, |shared| shared.intermediate)
    }
}

impl Mlp {
    /// The path of its weights, given that of its layer.
    pub fn path(&self, layer: &str) -> String {
        match self {
            Self::Dense(dense) => format!("{layer}.{}", dense.module),
            Self::Experts(experts) if experts.module.is_empty() => layer.to_owned(),
            Self::Experts(experts) => format!("{layer}.{}", experts.module),
        }
    }

    /// Width of what one position passes.
    pub fn width(&self) -> u32 {
        match self {
            Self::Dense(dense) => dense.intermediate,
            Self::Experts(experts) => {
                experts.used.saturating_mul(experts.intermediate).saturating_add(experts.shared_width())
            }
        }
    }
}
