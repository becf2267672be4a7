//! A model's reads and computation per token, from its headers, or estimated from its parameters if its
//! config is unknown. Not here: its memory (`fit`), which is computed from the real tensors.

use russet_model::shape::{ExpertGroup, LayerGroup, ModelShape};

/// A model as the performance model sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelProfile {
    /// Layers, each with one attention (or its replacement) and one MLP.
    pub layers: u32,
    /// Width of the hidden state.
    pub hidden: u32,
    /// Width of a layer's own input; those of the layers ahead travel with the hidden state. 0 without them.
    pub per_layer_input: u32,
    /// Active parameters per token: including the head, without the embedding, which is a look-up.
    pub active: f64,
    /// Parameters of the head among them.
    pub head: f64,
    /// Layers until the last one that keeps a cache of its own; all, if every layer does.
    pub cache_layers: u32,
    /// Bytes of these parameters.
    pub bytes: f64,
    /// Bytes of the head among them, which a tensor group does not shard.
    pub head_bytes: f64,
    /// Experts, if the model has any.
    pub experts: Option<Experts>,
    /// Bytes of KV cache that one stream reads per token of its context.
    pub kv_bytes: f64,
    /// Layers with a sliding window.
    pub window: Option<Window>,
    /// Query heads × (width of keys + width of values), summed over the layers with full attention.
    pub attention: f64,
    /// Whether the weights are unpacked before they are multiplied.
    pub quantised: bool,
    /// Whether activations and scales are BF16, as in models since 2025, and not F16.
    pub bfloat16: bool,
}

/// Experts of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// Per layer.
    pub count: u32,
    /// Active per token in each layer.
    pub used: u32,
    /// Parameters of a token's active experts, in all layers.
    pub active: f64,
    /// Bytes of these.
    pub bytes: f64,
}

/// Layers with a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Window length, tokens.
    pub tokens: u32,
    /// Bytes of their KV cache per token of the window.
    pub kv_bytes: u32,
}

impl Experts {
    /// Number of distinct experts that `tokens` independent tokens read, relative to one token.
    pub fn read_factor(&self, tokens: f64) -> f64 {
        let share = f64::from(self.used) / f64::from(self.count.max(1));
        if share <= 0.0 || share >= 1.0 { 1.0 } else { (1.0 - (1.0 - share).powf(tokens)) / share }
    }
}

/// Formats of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    /// F16 or BF16.
    Half,
    /// MLX's affine groups: a scale and a bias of 16 bits for every group.
    Affine {
        /// Bits per value.
        bits: u32,
        /// Values per group.
        group: u32,
    },
    /// Four bits, a scale of 8 bits for 32 values.
    Mxfp4,
    /// Eight bits, a scale of 8 bits for 32 values.
    Mxfp8,
    /// GGUF's Q3_K_M.
    Q3KM,
    /// GGUF's Q4_0.
    Q4_0,
    /// GGUF's Q4_K.
    Q4K,
    /// GGUF's Q4_K_M: Q4_K with a few tensors in Q6_K.
    Q4KM,
    /// GGUF's Q5_K_M.
    Q5KM,
    /// GGUF's Q6_K.
    Q6K,
    /// GGUF's Q8_0.
    Q8_0,
    /// GGUF's mixture of IQ2_XXS and Q2_K, as used for experts.
    Q2,
}

impl WeightFormat {
    /// Bits per weight, its share of scales included.
    pub fn bits(self) -> f64 {
        match self {
            WeightFormat::Half => 16.0,
            WeightFormat::Affine { bits, group } => f64::from(bits) + 32.0 / f64::from(group.max(1)),
            WeightFormat::Mxfp4 => 4.25,
            WeightFormat::Mxfp8 => 8.25,
            WeightFormat::Q3KM => 3.91,
            WeightFormat::Q4_0 | WeightFormat::Q4K => 4.5,
            WeightFormat::Q4KM => 4.85,
            WeightFormat::Q5KM => 5.69,
            WeightFormat::Q6K => 6.56,
            WeightFormat::Q8_0 => 8.5,
            WeightFormat::Q2 => 2.4,
        }
    }

    /// Bytes of `parameters`.
    pub fn bytes(self, parameters: f64) -> f64 {
        parameters * self.bits() / 8.0
    }
}

/// Parameter counts of a model, for an estimate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParameterCounts {
    /// All of them.
    pub total: f64,
    /// Active parameters per token; equal to `total` without experts.
    pub active: f64,
}

/// Bytes per value in the cache.
const KV_VALUE_BYTES: f64 = 2.0;

impl ModelProfile {
    /// A model with known headers: a sum over its layers, whatever their kinds.
    pub fn from_shape(shape: &ModelShape) -> Self {
        let embedding = f64::from(shape.vocabulary) * f64::from(shape.hidden_size);
        let inputs = shape.widths.map_or(0, |widths| widths.per_layer_inputs);
        // The table of per-layer inputs is a look-up, too.
        let looked_up = f64::from(shape.vocabulary) * inputs as f64;
        let (parameters, head_bytes) = if shape.tied {
            (
                shape.parameters as f64 - looked_up,
                shape.head_bytes.saturating_add(shape.embedding_bytes) as f64,
            )
        } else {
            (shape.parameters as f64 - looked_up - embedding, shape.head_bytes as f64)
        };
        let heads = f64::from(shape.attention_heads) * f64::from(shape.head_dim);
        let mut model = Self {
            layers: shape.layers,
            hidden: shape.hidden_size,
            per_layer_input: inputs.checked_div(u64::from(shape.layers)).unwrap_or(0) as u32,
            active: parameters.max(0.0),
            head: embedding.min(parameters.max(0.0)),
            cache_layers: shape.layers,
            bytes: head_bytes,
            head_bytes,
            experts: None,
            kv_bytes: 0.0,
            window: None,
            attention: 0.0,
            quantised: shape.quantization_group_size > 0,
            // The shape does not say it.
            bfloat16: true,
        };
        let mut idle = 0.0;
        let groups = shape.groups();
        let state_of = |owner: u32| {
            let mut end = 0;
            let held = groups.iter().find(|group| {
                end += u64::from(group.count);
                u64::from(owner) < end
            });
            held.map(|group| group.state).unwrap_or_default()
        };
        let mut passed = 0_u32;
        for group in &groups {
            let LayerGroup {
                count,
                weight_bytes,
                replicated_bytes: _,
                kv_bytes: _,
                state,
                experts,
                shares_cache_of,
            } = *group;
            passed = passed.saturating_add(count);
            // What it reads of another layer's cache, it reads again.
            let state = match shares_cache_of {
                Some(owner) => state_of(owner),
                None => {
                    model.cache_layers = passed;
                    state
                }
            };
            let layers = f64::from(count);
            model.bytes += layers * weight_bytes as f64;
            if let Some(ExpertGroup { count, used, weight_bytes }) = experts {
                let all = layers * weight_bytes as f64;
                let chosen = all * f64::from(used) / f64::from(count.max(1));
                idle += all - chosen;
                let bytes = model.experts.map_or(0.0, |experts| experts.bytes) + chosen;
                model.experts = Some(Experts { count, used, active: 0.0, bytes });
            }
            let per_token = layers * state.per_token_bytes as f64;
            match state.window_tokens {
                Some(tokens) => {
                    let known = model.window.map_or(0.0, |window| f64::from(window.kv_bytes));
                    model.window = Some(Window { tokens, kv_bytes: (known + per_token) as u32 });
                }
                None if state.per_token_bytes > 0 => {
                    model.kv_bytes += per_token;
                    model.attention += layers * heads * 2.0;
                }
                None => {}
            }
        }
        // Experts have as many parameters as their part of the bytes.
        let per_byte = model.active / model.bytes.max(1.0);
        model.active *= 1.0 - (idle / model.bytes.max(1.0)).clamp(0.0, 1.0);
        model.bytes -= idle;
        if let Some(experts) = &mut model.experts {
            experts.active = (per_byte * experts.bytes).min(model.active);
        }
        model
    }

    /// A model of which only the parameter counts are known. The exponents are fitted to about 50 published
    /// configs: layers are within 11 % (dense) and 18 % (experts) for half of them.
    pub fn estimate(size: ParameterCounts, weights: WeightFormat) -> Self {
        let ParameterCounts { total, active } = size;
        // Models with experts activate a fifth of their parameters; half is a dense one with embeddings in
        // every layer.
        let sparse = active < 0.35 * total;
        let billions = total / 1e9;
        let (layers, hidden) = if sparse {
            (18.2 * billions.powf(0.2), 950.0 * billions.powf(0.27))
        } else {
            (21.6 * billions.powf(0.28), 1600.0 * billions.powf(0.39))
        };
        let layers = layers.round().max(1.0);
        // A vocabulary of 150,000 is usual, and models below 5 billion parameters tie the head to the
        // embedding.
        let head = 150e3 * hidden;
        let active = if sparse || billions < 5.0 { active } else { active - head };
        Self {
            layers: layers as u32,
            hidden: hidden as u32,
            per_layer_input: 0,
            active,
            head: head.min(active / 2.0),
            cache_layers: layers as u32,
            bytes: weights.bytes(active),
            head_bytes: weights.bytes(head.min(active / 2.0)),
            // Half of a token's active parameters are experts, 8 of about 160.
            experts: sparse.then(|| {
                let active = active * 0.53;
                Experts { count: 160, used: 8, active, bytes: weights.bytes(active) }
            }),
            // Eight KV heads of 128, keys and values.
            kv_bytes: layers * 2048.0 * KV_VALUE_BYTES,
            window: None,
            attention: layers * hidden * 2.0,
            quantised: weights != WeightFormat::Half,
            bfloat16: true,
        }
    }

    /// Bytes of KV cache that one stream reads for a token after a context of `context`.
    pub(super) fn kv_read(&self, context: u32) -> f64 {
        let window = self
            .window
            .map_or(0.0, |window| f64::from(window.tokens.min(context)) * f64::from(window.kv_bytes));
        self.kv_bytes * f64::from(context) + window
    }
}

#[cfg(test)]
mod tests {
    use russet_model::cost::Widths;
    use russet_model::state::LayerState;

    use super::*;

    #[test]
    fn scales_count() {
        for (weights, bits) in [
            (WeightFormat::Affine { bits: 4, group: 64 }, 4.5),
            (WeightFormat::Affine { bits: 4, group: 32 }, 5.0),
            (WeightFormat::Affine { bits: 8, group: 64 }, 8.5),
            (WeightFormat::Mxfp4, 4.25),
            (WeightFormat::Half, 16.0),
        ] {
            assert_eq!(weights.bits(), bits, "{weights:?}");
        }
        assert_eq!(WeightFormat::Mxfp8.bytes(800.0), 825.0);
    }

    #[test]
    fn tokens_that_choose_alone_spread_over_all_experts() {
        let experts = Experts { count: 128, used: 8, active: 1.0, bytes: 1.0 };
        assert_eq!(experts.read_factor(1.0), 1.0);
        assert!((experts.read_factor(4.0) - 3.65).abs() < 0.01);
        assert!((experts.read_factor(10_000.0) - 16.0).abs() < 1e-6, "all of them, and no more");
        assert_eq!(Experts { count: 0, used: 0, ..experts }.read_factor(9.0), 1.0);
    }

    #[test]
    fn headers_give_the_bytes_read_per_token() {
        let shape = ModelShape {
            layers: 2,
            hidden_size: 8,
            vocabulary: 100,
            parameters: 2000,
            attention_heads: 2,
            head_dim: 4,
            embedding_bytes: 1600,
            head_bytes: 16,
            tied: true,
            layer_bytes: vec![1200, 1200],
            kv_bytes_per_token_per_layer: 32,
            ..ModelShape::default()
        };
        let tied = ModelProfile::from_shape(&shape);
        assert_eq!((tied.active, tied.bytes, tied.head_bytes, tied.kv_bytes), (2000.0, 4016.0, 1616.0, 64.0));
        let own = ModelProfile::from_shape(&ModelShape {
            tied: false,
            head_bytes: 1616,
            parameters: 2800,
            ..shape
        });
        assert_eq!((own.active, own.bytes, own.head_bytes), (2000.0, 4016.0, 1616.0));
        assert_eq!(own.attention, 32.0);
        assert_eq!((own.head, own.cache_layers), (800.0, 2));
    }

    #[test]
    fn shared_caches_are_read_again_and_tables_are_not() {
        let full = LayerState { per_token_bytes: 32, ..LayerState::default() };
        let window = LayerState { window_tokens: Some(8), ..full };
        let group = |count, state, shares_cache_of| LayerGroup {
            count,
            weight_bytes: 100,
            state,
            shares_cache_of,
            ..LayerGroup::default()
        };
        let none = LayerState::default();
        let shape = ModelShape {
            layers: 6,
            hidden_size: 8,
            vocabulary: 100,
            parameters: 3000,
            embedding_bytes: 1600,
            per_layer_input_bytes: 2400,
            tied: true,
            layer_bytes: vec![100; 6],
            layer_groups: vec![
                group(2, window, None),
                group(1, full, None),
                group(2, none, Some(1)),
                group(1, none, Some(2)),
            ],
            widths: Some(Widths { per_layer_inputs: 12, value_bytes: 2, ..Widths::default() }),
            ..ModelShape::default()
        };
        let model = ModelProfile::from_shape(&shape);
        assert_eq!((model.active, model.bytes, model.per_layer_input), (1800.0, 2200.0, 2));
        assert_eq!((model.kv_bytes, model.window), (64.0, Some(Window { tokens: 8, kv_bytes: 128 })));
        assert_eq!(model.cache_layers, 3);
    }
}
