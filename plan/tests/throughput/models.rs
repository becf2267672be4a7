//! The models of the published measurements, with the values of their configs. From memory of their
//! config.json and model cards; those marked "guessed" are too new or too little known for that. A model that
//! is not listed is estimated from its parameters by the planner itself.

use russet_plan::performance_model::{Experts, ModelProfile, WeightFormat, Window};

/// What a config says.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Name in the measurements.
    pub name: &'static str,
    /// All parameters, billions.
    pub total: f64,
    pub layers: u32,
    pub hidden: u32,
    pub vocabulary: u32,
    /// Billions of parameters multiplied per token, with the head, without the embedding.
    pub read: f64,
    /// Billions of them in experts.
    pub routed: f64,
    /// Experts of a layer, and active ones.
    pub experts: (u32, u32),
    /// Columns of an expert.
    pub expert_width: u32,
    /// Cached values per token in layers with full attention.
    pub cached: u32,
    /// Window of the other layers, and cached values per token there.
    pub window: (u32, u32),
    /// Query heads × (key + value width), over the layers with full attention.
    pub attention: f64,
    /// Layers at the end that share the caches of earlier ones.
    pub sharing: u32,
    /// Published quantised: experts in 4 bits with a scale for 32, the rest in BF16, according to the size of
    /// the published files (594 GB).
    pub native: bool,
}

impl Facts {
    /// The model with its experts in one format and the rest in another.
    pub fn model(&self, routed: WeightFormat, rest: WeightFormat) -> ModelProfile {
        let rest_read = self.read - self.routed;
        let (count, used) = self.experts;
        let expert_bytes = routed.bytes(self.routed * 1e9);
        ModelProfile {
            layers: self.layers,
            hidden: self.hidden,
            per_layer_input: 0,
            active: self.read * 1e9,
            head: f64::from(self.vocabulary) * f64::from(self.hidden),
            cache_layers: self.layers - self.sharing,
            bytes: expert_bytes + rest.bytes(rest_read * 1e9),
            head_bytes: rest.bytes(f64::from(self.vocabulary) * f64::from(self.hidden)),
            experts: (count > 0).then_some(Experts {
                count,
                used,
                active: self.routed * 1e9,
                bytes: expert_bytes,
            }),
            kv_bytes: 2.0 * f64::from(self.cached),
            window: (self.window.0 > 0)
                .then(|| Window { tokens: self.window.0, kv_bytes: 2 * self.window.1 }),
            attention: self.attention,
            quantised: routed != WeightFormat::Half || rest != WeightFormat::Half,
            bfloat16: true,
        }
    }
}

/// Heads of an attention: query heads, KV heads, width.
type Heads = (u32, u32, u32);

/// A model without experts.
fn dense(
    name: &'static str,
    total: f64,
    (layers, hidden, vocabulary): (u32, u32, u32),
    tied: bool,
    (queries, kv, width): Heads,
) -> Facts {
    let embedding = f64::from(vocabulary) * f64::from(hidden) / 1e9;
    Facts {
        name,
        total,
        layers,
        hidden,
        vocabulary,
        read: if tied { total } else { total - embedding },
        routed: 0.0,
        experts: (0, 0),
        expert_width: 0,
        cached: layers * 2 * kv * width,
        window: (0, 0),
        attention: f64::from(layers * queries * 2 * width),
        sharing: 0,
        native: false,
    }
}

/// The same with `full` layers of full attention; the others have a window of `window` tokens, or only a
/// state.
fn windowed(mut facts: Facts, full: u32, window: u32) -> Facts {
    let all = facts.cached;
    facts.cached = all / facts.layers * full;
    facts.window = if window > 0 { (window, all - facts.cached) } else { (0, 0) };
    facts.attention *= f64::from(full) / f64::from(facts.layers);
    facts
}

/// Experts of a model: per layer, active, width of one, width of the shared one.
type ExpertSizes = (u32, u32, u32, u32);

/// A model with experts: `attention` counts the parameters of one layer's attention, `first` the layers
/// without experts and the width of their MLP.
fn sparse(
    name: &'static str,
    total: f64,
    (layers, hidden, vocabulary): (u32, u32, u32),
    attention: f64,
    (count, used, width, shared): ExpertSizes,
    (first, first_width): (u32, u32),
) -> Facts {
    let [l, h, v, f] = [layers, hidden, vocabulary, first].map(f64::from);
    let routed = (l - f) * f64::from(used) * 3.0 * h * f64::from(width);
    let rest = l * attention
        + (l - f) * (3.0 * h * f64::from(shared) + h * f64::from(count))
        + f * 3.0 * h * f64::from(first_width)
        + h * v;
    Facts {
        name,
        total,
        layers,
        hidden,
        vocabulary,
        read: (routed + rest) / 1e9,
        routed: routed / 1e9,
        experts: (count, used),
        expert_width: width,
        cached: 0,
        window: (0, 0),
        attention: 0.0,
        sharing: 0,
        native: false,
    }
}

/// Cache and computation of `layers` of grouped-query attention.
fn cache(mut facts: Facts, layers: u32, (queries, kv, width): Heads) -> Facts {
    facts.cached = layers * 2 * kv * width;
    facts.attention = f64::from(layers * queries * 2 * width);
    facts
}

/// Multi-head latent attention: 512 + 64 values per token and layer, read by every query head.
fn latent(mut facts: Facts, queries: u32) -> Facts {
    facts.cached = facts.layers * 576;
    facts.attention = f64::from(facts.layers * queries * 1088);
    facts
}

/// Parameters of one layer's grouped-query attention.
fn gqa(hidden: u32, (queries, kv, width): Heads) -> f64 {
    f64::from(hidden) * f64::from(2 * queries * width + 2 * kv * width)
}

/// Parameters of one layer's latent attention: query heads, rank of the queries (0: none), widths.
fn mla(hidden: u32, queries: u32, query_rank: u32, (nope, rope, value): (u32, u32, u32)) -> f64 {
    let [h, q, r, n, p, v] = [hidden, queries, query_rank, nope, rope, value].map(f64::from);
    let query = if r > 0.0 { h * r + r * q * (n + p) } else { h * q * (n + p) };
    query + h * (512.0 + p) + 512.0 * q * (n + v) + q * v * h
}

/// Qwen's mixture of three gated delta nets and one gated attention of width 256; mean of one layer.
fn delta(hidden: u32, (keys, values): (u32, u32), (queries, kv): (u32, u32)) -> f64 {
    let full = f64::from(hidden) * f64::from(3 * queries * 256 + 2 * kv * 256);
    let net = f64::from(hidden) * f64::from(2 * keys + 3 * values);
    (full + 3.0 * net) / 4.0
}

/// Every model known here.
pub fn table() -> Vec<Facts> {
    let llama8 = |name| dense(name, 8.03, (32, 4096, 128_256), false, (32, 8, 128));
    let llama70 = |name| dense(name, 70.6, (80, 8192, 128_256), false, (64, 8, 128));
    let mistral24 = |name| dense(name, 23.6, (40, 5120, 131_072), false, (32, 8, 128));
    let qwen14 = |name| dense(name, 14.8, (48, 5120, 152_064), false, (40, 8, 128));
    let qwen27 = |name| windowed(dense(name, 27.0, (64, 5120, 248_320), false, (24, 4, 256)), 16, 0);
    let next = |name| {
        let attention = delta(2048, (2048, 4096), (16, 2));
        cache(
            sparse(name, 80.0, (48, 2048, 151_936), attention, (512, 10, 512, 512), (0, 0)),
            12,
            (16, 2, 256),
        )
    };
    let qwen35 = |name| {
        let attention = delta(2048, (2048, 4096), (16, 2));
        cache(
            sparse(name, 35.0, (40, 2048, 248_320), attention, (256, 8, 512, 512), (0, 0)),
            10,
            (16, 2, 256),
        )
    };
    let deepseek3 = |name| {
        let attention = mla(7168, 128, 1536, (128, 64, 128));
        let shape = (61, 7168, 129_280);
        latent(sparse(name, 671.0, shape, attention, (256, 8, 2048, 2048), (3, 18_432)), 128)
    };
    let kimi = |name| {
        let attention = mla(7168, 64, 1536, (128, 64, 128));
        let shape = (61, 7168, 163_840);
        let facts = latent(sparse(name, 1000.0, shape, attention, (384, 8, 2048, 2048), (1, 18_432)), 64);
        Facts { native: true, ..facts }
    };
    let minimax = |name| {
        let attention = gqa(3072, (48, 8, 128));
        let shape = (62, 3072, 200_064);
        cache(sparse(name, 230.0, shape, attention, (256, 8, 1536, 0), (0, 0)), 62, (48, 8, 128))
    };
    let gpt = |name, total, layers, count| {
        let attention = gqa(2880, (64, 8, 64));
        let facts = sparse(name, total, (layers, 2880, 201_088), attention, (count, 4, 2880, 0), (0, 0));
        windowed(cache(facts, layers, (64, 8, 64)), layers / 2, 128)
    };
    vec![
        dense("LLaMA-2-7B", 6.74, (32, 4096, 32_000), false, (32, 32, 128)),
        llama8("Llama-3-8B"),
        llama8("Llama-3.1-8B"),
        llama70("Llama-3-70B"),
        llama70("Llama-3.1-70B"),
        llama70("Llama-3.3-70B"),
        dense("Llama-3.1-405B", 405.9, (126, 16_384, 128_256), false, (128, 8, 128)),
        dense("Llama-3.2-1B", 1.24, (16, 2048, 128_256), true, (32, 8, 64)),
        dense("Llama-3.2-3B", 3.21, (28, 3072, 128_256), true, (24, 8, 128)),
        dense("TinyLlama-1.1B", 1.1, (22, 2048, 32_000), false, (32, 4, 64)),
        dense("Mistral-7B", 7.25, (32, 4096, 32_768), false, (32, 8, 128)),
        mistral24("Mistral-Small-24B"),
        mistral24("Devstral-24B"),
        dense("Codestral-22B", 22.2, (56, 6144, 32_768), false, (48, 8, 128)),
        dense("Ministral-3-14B", 14.0, (40, 5120, 131_072), false, (32, 8, 128)),
        dense("Qwen2.5-0.5B", 0.49, (24, 896, 151_936), true, (14, 2, 64)),
        dense("Qwen2.5-1.5B", 1.54, (28, 1536, 151_936), true, (12, 2, 128)),
        dense("Qwen2.5-3B", 3.09, (36, 2048, 151_936), true, (16, 2, 128)),
        dense("Qwen2.5-7B", 7.62, (28, 3584, 152_064), false, (28, 4, 128)),
        qwen14("Qwen2.5-14B"),
        qwen14("Qwen2.5-Coder-14B"),
        dense("Qwen2.5-32B", 32.8, (64, 5120, 152_064), false, (40, 8, 128)),
        dense("Qwen2.5-Coder-32B", 32.8, (64, 5120, 152_064), false, (40, 8, 128)),
        dense("Qwen2.5-72B", 72.7, (80, 8192, 152_064), false, (64, 8, 128)),
        dense("Qwen3-0.6B", 0.6, (28, 1024, 151_936), true, (16, 8, 128)),
        dense("Qwen3-1.7B", 1.72, (28, 2048, 151_936), true, (16, 8, 128)),
        dense("Qwen3-4B", 4.02, (36, 2560, 151_936), true, (32, 8, 128)),
        dense("Qwen3-8B", 8.19, (36, 4096, 151_936), false, (32, 8, 128)),
        dense("Qwen3-14B", 14.8, (40, 5120, 151_936), false, (40, 8, 128)),
        dense("Qwen3-32B", 32.8, (64, 5120, 151_936), false, (64, 8, 128)),
        windowed(dense("Qwen3.5-4B", 4.2, (32, 2560, 248_320), true, (16, 4, 256)), 8, 0),
        windowed(dense("Qwen3.5-9B", 9.1, (32, 4096, 248_320), false, (16, 4, 256)), 8, 0),
        qwen27("Qwen3.5-27B"),
        qwen27("Qwen3.6-27B"),
        qwen27("Qwen3.8-27B"), // guessed: as its predecessors
        windowed(dense("Gemma-3-1B", 1.0, (26, 1152, 262_144), true, (4, 1, 256)), 4, 512),
        windowed(dense("Gemma-3-4B", 3.88, (34, 2560, 262_144), true, (8, 4, 256)), 5, 1024),
        windowed(dense("Gemma-3-12B", 11.8, (48, 3840, 262_144), true, (16, 8, 256)), 8, 1024),
        windowed(dense("Gemma-3-27B", 27.0, (62, 5376, 262_144), true, (32, 16, 128)), 10, 1024),
        windowed(dense("Gemma-4-31B", 30.7, (60, 5376, 262_144), true, (32, 4, 512)), 10, 1024), // heads guessed
        // Its per-layer embeddings are look-ups: 2.3 of its 5.1 billion are multiplied. Heads guessed.
        Facts {
            total: 5.1,
            sharing: 20,
            ..windowed(dense("Gemma-4-E2B", 2.3, (35, 1536, 262_144), true, (8, 1, 512)), 7, 512)
        },
        cache(
            sparse(
                "Qwen3-30B-A3B",
                30.5,
                (48, 2048, 151_936),
                gqa(2048, (32, 4, 128)),
                (128, 8, 768, 0),
                (0, 0),
            ),
            48,
            (32, 4, 128),
        ),
        cache(
            sparse(
                "Qwen3-235B-A22B",
                235.0,
                (94, 4096, 151_936),
                gqa(4096, (64, 4, 128)),
                (128, 8, 1536, 0),
                (0, 0),
            ),
            94,
            (64, 4, 128),
        ),
        cache(
            sparse(
                "Qwen3-Coder-480B-A35B",
                480.0,
                (62, 6144, 151_936),
                gqa(6144, (96, 8, 128)),
                (160, 8, 2560, 0),
                (0, 0),
            ),
            62,
            (96, 8, 128),
        ),
        next("Qwen3-Next-80B-A3B"),
        next("Qwen3-Coder-Next-80B-A3B"),
        qwen35("Qwen3.5-35B-A3B"),
        qwen35("Qwen3.6-35B-A3B"),
        cache(
            sparse(
                "Qwen3.5-122B-A10B",
                122.0,
                (48, 3072, 248_320),
                delta(3072, (2048, 8192), (32, 2)),
                (256, 8, 1024, 1024),
                (0, 0),
            ),
            12,
            (32, 2, 256),
        ),
        cache(
            sparse(
                "Qwen3.5-397B-A17B",
                397.0,
                (60, 4096, 248_320),
                delta(4096, (2048, 8192), (32, 2)),
                (512, 10, 1024, 1024),
                (0, 0),
            ),
            15,
            (32, 2, 256),
        ),
        gpt("gpt-oss-20b", 20.9, 24, 32),
        gpt("gpt-oss-120b", 116.8, 36, 128),
        deepseek3("DeepSeek-V3.1"),
        deepseek3("DeepSeek-R1"),
        kimi("Kimi-K2-Thinking"),
        kimi("Kimi-K2.5"),
        kimi("Kimi-K2.7"), // guessed: as its predecessors
        latent(
            sparse(
                "DeepSeek-Coder-V2-Lite",
                15.7,
                (27, 2048, 102_400),
                mla(2048, 16, 0, (128, 64, 128)),
                (64, 6, 1408, 2816),
                (1, 10_944),
            ),
            16,
        ),
        latent(
            sparse(
                "GLM-4.7-Flash",
                30.0,
                (47, 2048, 154_880),
                mla(2048, 20, 768, (192, 64, 256)),
                (64, 4, 1536, 1536),
                (1, 10_240),
            ),
            20,
        ),
        cache(
            sparse(
                "GLM-4.5-Air",
                106.0,
                (46, 4096, 151_552),
                gqa(4096, (96, 8, 128)),
                (128, 8, 1408, 1408),
                (1, 10_944),
            ),
            46,
            (96, 8, 128),
        ),
        cache(
            sparse(
                "GLM-4.x-355B",
                355.0,
                (92, 5120, 151_552),
                gqa(5120, (96, 8, 128)),
                (160, 8, 1536, 1536),
                (3, 12_288),
            ),
            92,
            (96, 8, 128),
        ),
        // Sparse attention; that MLX's port computes all of it is guessed from its rates at 10,000 and 50,000
        // tokens, which no cheaper attention explains.
        latent(
            sparse(
                "GLM-5",
                744.0,
                (78, 6144, 154_880),
                mla(6144, 64, 2048, (192, 64, 256)),
                (256, 8, 2048, 2048),
                (3, 12_288),
            ),
            64,
        ),
        minimax("MiniMax-M2"),
        minimax("MiniMax-M2.5"),
        // Compressed caches of 4 and 128 tokens; on average an eighth is read (guessed), the last 128 tokens
        // whole.
        Facts {
            cached: 43 * 64,
            window: (128, 43 * 512),
            attention: f64::from(43 * 64 * 128),
            ..sparse("DeepSeek-V4-Flash", 284.0, (43, 4096, 129_280), 116.4e6, (256, 6, 2048, 2048), (0, 0))
        },
        Facts {
            cached: 61 * 64,
            window: (128, 61 * 512),
            attention: f64::from(61 * 128 * 128),
            ..sparse("DeepSeek-V4-Pro", 1600.0, (61, 7168, 129_280), 391.6e6, (384, 6, 3072, 3072), (0, 0))
        }, // guessed
        Facts {
            window: (1024, 25 * 2 * 8 * 256),
            ..cache(
                sparse(
                    "Gemma-4-26B-A4B",
                    25.2,
                    (30, 2816, 262_144),
                    gqa(2816, (16, 8, 256)),
                    (128, 8, 704, 2112),
                    (0, 0),
                ),
                5,
                (16, 2, 512),
            )
        },
        // 18 of 24 layers are short convolutions.
        cache(
            sparse(
                "LFM2-8B-A1B",
                8.3,
                (24, 2048, 65_536),
                3.4 * 2048.0 * 2048.0,
                (32, 4, 1792, 0),
                (2, 7168),
            ),
            6,
            (32, 8, 64),
        ),
        cache(
            sparse(
                "ERNIE-4.5-21B-A3B",
                21.8,
                (28, 2560, 103_424),
                gqa(2560, (20, 4, 128)),
                (64, 6, 1536, 3072),
                (1, 12_288),
            ),
            28,
            (20, 4, 128),
        ),
        // 52 blocks, each a state space, an attention or experts: half of a usual layer.
        Facts {
            read: 3.2,
            routed: 1.38,
            ..cache(
                sparse("Nemotron-3-Nano-30B-A3B", 31.6, (26, 2688, 131_072), 0.0, (128, 6, 1856, 0), (0, 0)),
                6,
                (32, 2, 128),
            )
        },
        // 36 of 40 layers are state spaces (guessed).
        cache(
            sparse("granite-4.0-tiny", 7.0, (40, 1536, 100_352), 15.6e6, (64, 6, 512, 1024), (0, 0)),
            4,
            (12, 4, 128),
        ),
    ]
}

/// The model that a measurement names; remarks in brackets are no part of the name.
pub fn find<'a>(table: &'a [Facts], name: &str) -> Option<&'a Facts> {
    let name = name.split(" (").next().unwrap_or(name).trim();
    table.iter().find(|facts| facts.name == name)
}
