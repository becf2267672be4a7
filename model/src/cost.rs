//! What a model takes: the bytes of its layers, of what they remember, and of what is computed at the same time. The
//! constants are the engine's own, which uses them from here.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    description::{Description, Mixer, Mlp},
    kv_quantization::kv_group,
    state::LayerState,
};

/// Tokens of a prompt that one rank computes at once; it bounds the activations.
pub const PREFILL_TOKENS: u32 = 2048;
/// The same in a pipeline: the first stage starts the next chunk while this one is in a later stage. With chunks as long
/// as the whole prompt, only one stage would work.
pub const PIPELINE_PREFILL_TOKENS: u32 = 512;
/// Positions by which a KV cache grows: the last of them may be all but empty.
pub const CACHE_STEP: u32 = 256;
/// Most bytes of attention scores at once. No smaller than it needs to be: smaller products are slower. A GPU writes
/// none, but an estimate that is smaller for some nodes would have to know them.
pub const SCORE_BUDGET_BYTES: u64 = 64 << 20;

// What is alive at the same time was measured on MLX's CPU backend, with models in which one of these widths
// outweighs all others (docs/planner-memory.md). MLX makes room for results about a layer ahead of the one it
// computes, so everything a layer makes counts, and what several layers make does not.
/// Hidden states: nine in and between the norms, which compute in 32 bits whatever the model's type, and one each that
/// came from and goes to another rank.
const HIDDEN_STATES: u64 = 11;
/// Values as wide as the MLP: gate, its sigmoid, up and their product.
const MLP_STATES: u64 = 4;
/// Hidden states of each expert that a token passes: sorted by expert, given, in order again, and weighed.
const ROUTED_STATES: u64 = 4;
/// Values as wide as all query heads: projected, rotated, scaled, attended, joined, and the same in pieces.
const QUERY_STATES: u64 = 7;
/// Values as wide as all key heads: keys and values, projected and on their way into the cache.
const KEY_STATES: u64 = 4;
/// Values as wide as the per-layer inputs of all layers: looked up, projected and their sum, each of which becomes the
/// next in place, and the whole with the hidden state as it came, and as it goes to another rank.
const PER_LAYER_STATES: u64 = 5;
/// Positions of a delta net or a state space that are computed together, each scored against all.
pub const RECURRENT_CHUNK: u64 = 64;
/// Layers whose cache is held twice while that of one sequence grows, being copied: as far as MLX is ahead.
const GROWING_LAYERS: u64 = 2;
/// Bytes of one word's logits of one sequence: as computed, normalised and widened, and what sampling makes of them
/// (without banned words, sorted, their places, masses and sums, noise, and what is kept), four bytes each.
const LOGIT_BYTES: u64 = 64;

/// Widths of what a model computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Widths {
    /// The hidden state.
    pub hidden: u64,
    /// Query heads.
    pub heads: u64,
    /// All query heads together.
    pub queries: u64,
    /// All key heads together.
    pub keys: u64,
    /// What one token passes of MLPs in a layer.
    pub mlp: u64,
    /// What one token's experts read and give, the hidden state of each; 0 without experts.
    #[serde(default)]
    pub routed: u64,
    /// Keys and values that a layer makes of the latent of one position, of all heads; 0 where it caches them.
    #[serde(default)]
    pub expanded: u64,
    /// Per-layer inputs of all layers together; 0 without them.
    #[serde(default)]
    pub per_layer_inputs: u64,
    /// Tokens of the vocabulary.
    pub vocabulary: u64,
    /// Bytes of a value as the model computes it.
    pub value_bytes: u64,
    /// Whether a sequence is computed at once, and nothing kept of it: by models that do not generate.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub whole: bool,
}

/// What is computed on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Longest sequence, tokens.
    pub context: u64,
    /// Sequences at once.
    pub sequences: u64,
    /// Tokens of all sequences together.
    pub tokens: u64,
    /// Layers of the rank.
    pub layers: u64,
    /// Whether other stages of a pipeline have further layers.
    pub in_pipeline: bool,
    /// Whether it has the head.
    pub head: bool,
    /// Ranks that share its layers.
    pub tensor_size: u64,
    /// Of these, ranks that have keys and values of their own.
    pub kv_ranks: u64,
    /// Bytes that a layer keeps of a token, in the form in which it is kept; of the layer that keeps most.
    pub cached_bytes: u64,
}

/// Bytes that are alive beside weights and caches while a step is computed: activations of a piece of prompt,
/// attention scores, the last steps of caches, caches that grow, and logits.
pub fn activation_bytes(widths: &Widths, load: &Load) -> u64 {
    let Widths {
        hidden,
        heads,
        queries,
        keys,
        mlp,
        routed,
        expanded,
        per_layer_inputs,
        vocabulary,
        value_bytes,
        whole,
    } = *widths;
    let Load { context, sequences, tokens, layers, in_pipeline, head, tensor_size, kv_ranks, cached_bytes } =
        *load;
    let [size, kv_size] = [tensor_size, kv_ranks].map(|ranks| ranks.max(1));
    let piece = match whole {
        true => context.max(u64::from(PREFILL_TOKENS)),
        false => context.min(u64::from(if in_pipeline { PIPELINE_PREFILL_TOKENS } else { PREFILL_TOKENS })),
    };
    let shared = [(mlp, MLP_STATES, size), (queries, QUERY_STATES, size), (keys, KEY_STATES, kv_size)]
        .map(|(width, states, size)| width.saturating_mul(states).saturating_mul(value_bytes).div_ceil(size))
        .into_iter()
        .fold(0, u64::saturating_add);
    // Every rank has them whole: each computes a share of every expert.
    let routed = routed.saturating_mul(ROUTED_STATES).saturating_mul(value_bytes);
    let inputs = per_layer_inputs.saturating_mul(PER_LAYER_STATES).saturating_mul(value_bytes);
    let states = hidden
        .saturating_mul(HIDDEN_STATES * 4)
        .saturating_add(routed)
        .saturating_add(inputs)
        .saturating_add(shared)
        .saturating_mul(piece);
    // Keys and values of the whole context, and what a chunk of queries sees of them.
    let expanded =
        expanded.saturating_mul(value_bytes.saturating_mul(2)).saturating_mul(context).div_ceil(size);
    // One position attends to the whole context, whatever the bound.
    let row = heads.div_ceil(size).saturating_mul(context).saturating_mul(value_bytes);
    let scores = row.saturating_mul(piece).min(SCORE_BUDGET_BYTES.max(row));
    // So many can be as long as they may be at the same time; where that is fewer than all, another one's last step
    // may reach beyond the room.
    let step = u64::from(CACHE_STEP);
    let full = tokens.checked_div(context).unwrap_or(0);
    let last = if full < sequences { step - 1 } else { 0 };
    let past = context.checked_next_multiple_of(step).unwrap_or(context) - context;
    let unused = past.saturating_mul(full).saturating_add(last).saturating_mul(layers);
    let growing = context.saturating_mul(layers.min(GROWING_LAYERS));
    let caches = cached_bytes.saturating_mul(unused.saturating_add(growing)).div_ceil(kv_size);
    let words = vocabulary.saturating_mul(sequences);
    let logits = if head { words.saturating_mul(LOGIT_BYTES) } else { 0 };
    [states, expanded, scores, caches, logits].into_iter().fold(0, u64::saturating_add)
}

/// Bytes of a token's keys and values in one layer, quantised to `bits` bits: so many numbers, which take `value_bytes`
/// each as the model computes them. `None` where heads of this width have no groups.
pub fn quantised_kv_bytes(numbers: u64, value_bytes: u64, head_dim: u32, bits: u64) -> Option<u64> {
    let group = u64::from(kv_group(head_dim)?);
    let scale_and_bias = value_bytes.saturating_mul(2);
    let groups = (numbers / group).saturating_mul(scale_and_bias);
    Some(numbers.saturating_mul(bits).div_ceil(8).saturating_add(groups))
}

/// Experts of a layer, for what is read of their weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertCounts {
    /// How many there are.
    pub count: u32,
    /// How many a token passes.
    pub used: u32,
}

impl Description {
    /// What a layer keeps of a sequence, where values take `value_bytes`.
    pub fn state(&self, layer: usize, value_bytes: u64) -> LayerState {
        let mixer = self.layers.get(layer).and_then(|layer| layer.mixer.as_ref());
        let mixer = mixer.filter(|_| self.task().is_generate());
        mixer.map_or_else(LayerState::default, |mixer| LayerState::of(mixer, value_bytes))
    }

    /// The widest of everything any layer computes.
    pub fn widths(&self, value_bytes: u64) -> Widths {
        let generates = self.task().is_generate();
        let mut widths = Widths {
            hidden: u64::from(self.hidden_size),
            vocabulary: if generates { u64::from(self.vocab_size) } else { 0 },
            whole: !generates,
            per_layer_inputs: u64::from(self.stage_width(0) - self.hidden_size),
            value_bytes,
            ..Widths::default()
        };
        for mixer in self.mixers() {
            let [heads, queries, keys] = match mixer {
                Mixer::Attention(attention) => {
                    let [heads, kv_heads, key, value] =
                        [attention.heads, attention.kv_heads, attention.key_dim, attention.value_dim]
                            .map(u64::from);
                    [heads, heads * key.max(value), kv_heads * key.max(value)]
                }
                // With absorbed projections every head's query is as wide as the latent.
                Mixer::Latent(latent) => {
                    let wide = u64::from(latent.rank) + u64::from(latent.rope_dim);
                    [u64::from(latent.heads), u64::from(latent.heads) * wide, wide]
                }
                Mixer::DeltaNet(delta) => {
                    let [key_heads, value_heads, key, value] =
                        [delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim].map(u64::from);
                    // In 32 bits whatever the model's type, and beside each the scores of a chunk.
                    let wide = value_heads * (key.max(value) + RECURRENT_CHUNK) * 4 / value_bytes.max(1);
                    [value_heads, wide, key_heads * key]
                }
                // As many states as of queries: three projected, gated, joined to the inputs before, convolved, gated.
                Mixer::ShortConv(conv) => [0, u64::from(conv.channels), 0],
                Mixer::Mamba2(mamba) => {
                    let [heads, head, state] = [mamba.heads, mamba.head_dim, mamba.state_dim].map(u64::from);
                    let wide = heads * (head.max(state) + RECURRENT_CHUNK) * 4 / value_bytes.max(1);
                    [heads, wide, mamba.group_width()]
                }
            };
            widths.heads = widths.heads.max(heads);
            widths.queries = widths.queries.max(queries);
            widths.keys = widths.keys.max(keys);
            if let Mixer::Latent(latent) = mixer {
                let each = u64::from(latent.nope_dim) + u64::from(latent.value_dim);
                widths.expanded = widths.expanded.max(u64::from(latent.heads) * each);
            }
        }
        for mlp in self.mlps() {
            widths.mlp = widths.mlp.max(u64::from(mlp.width()));
            if let Mlp::Experts(experts) = mlp {
                let each = experts.latent.map_or(widths.hidden, u64::from);
                widths.routed = widths.routed.max(u64::from(experts.used) * each);
            }
        }
        widths
    }

    /// The experts of a layer, where it has some.
    pub fn experts(&self, layer: usize) -> Option<ExpertCounts> {
        match self.layers.get(layer)?.mlp.as_ref()? {
            Mlp::Dense(_) => None,
            Mlp::Experts(experts) => Some(ExpertCounts { count: experts.count, used: experts.used }),
        }
    }
}

/// Bytes of experts that `tokens` tokens which choose independently read, of `bytes` that all of a layer's take.
pub fn active_expert_bytes(bytes: u64, experts: ExpertCounts, tokens: f64) -> f64 {
    let share = f64::from(experts.used) / f64::from(experts.count.max(1));
    let read = if share >= 1.0 { 1.0 } else { 1.0 - (1.0 - share).powf(tokens) };
    bytes as f64 * read.clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests;
