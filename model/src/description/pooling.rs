//! What makes one vector of a text, or one score of a pair of texts, of the hidden states of all its positions: the
//! modules of sentence-transformers behind the transformer, or the classifier of a cross-encoder.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a model is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Task {
    /// Text that goes on: chat.
    #[default]
    Generate,
    /// A vector of a text.
    Embed,
    /// A score of a query and a document.
    Rerank,
    /// A value from a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

impl Task {
    /// Whether it is the one of most models.
    pub fn is_generate(&self) -> bool {
        *self == Self::Generate
    }
}

/// What makes a vector of hidden states.
#[derive(Clone, Debug, PartialEq)]
pub struct Pooling {
    /// What makes one vector of many.
    pub mode: PoolingMode,
    /// Projections that the vector passes then, in order.
    pub dense: Vec<DenseModule>,
    /// Whether its length becomes one at the end.
    pub normalize: bool,
    /// Most tokens of a text, where the model has such a limit beside that of its positions.
    pub max_tokens: Option<u32>,
}

/// What makes one vector of the hidden states of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PoolingMode {
    /// The first one.
    Cls,
    /// Their mean.
    #[default]
    Mean,
    /// The largest value of each dimension.
    Max,
    /// The last one.
    LastToken,
}

/// A projection of a vector, in a folder of its own beside the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenseModule {
    /// The folder.
    pub folder: String,
    /// Width of what it reads.
    pub inputs: u32,
    /// Width of what it gives.
    pub outputs: u32,
    /// Whether it has a bias.
    pub bias: bool,
    /// Whether its result passes a hyperbolic tangent.
    pub tanh: bool,
}

/// Embeddings, positions and head of a BERT, which a decoder has not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoder {
    /// Rows of the table of absolute positions.
    pub positions: u32,
    /// The row of the first token: RoBERTa's first rows are those of padding.
    pub first_position: u32,
    /// Rows of the table of segments: a query is one, its document the next.
    pub token_types: u32,
    /// What scores the first position, in a cross-encoder.
    pub classifier: Option<Classifier>,
}

/// `out_proj(tanh(dense(x)))`, a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Classifier {
    /// Whether the score passes a sigmoid.
    pub sigmoid: bool,
}

impl Pooling {
    /// The mean of all positions as it is: what sentence-transformers makes of a model that comes without modules.
    pub fn mean() -> Self {
        Self { mode: PoolingMode::Mean, dense: Vec::new(), normalize: false, max_tokens: None }
    }

    /// Width of the vectors of a model whose hidden state is so wide.
    pub fn width(&self, hidden_size: u32) -> u32 {
        self.dense.last().map_or(hidden_size, |dense| dense.outputs)
    }

    /// Bytes of its projections, in 32 bits.
    pub fn bytes(&self) -> u64 {
        let one = |dense: &DenseModule| {
            let [inputs, outputs] = [dense.inputs, dense.outputs].map(u64::from);
            (inputs + u64::from(dense.bias)).saturating_mul(outputs).saturating_mul(4)
        };
        self.dense.iter().map(one).fold(0, u64::saturating_add)
    }
}
