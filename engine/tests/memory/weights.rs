//! Models of any size with random weights, written to disk in chunks.

use russet_crds::KvCacheType;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::model::END;
use crate::random_weights::{self, Numbers};

/// Sizes of a model.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub model_type: &'static str,
    pub numbers: Numbers,
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub layers: usize,
    pub vocabulary: usize,
    pub tied: bool,
    /// Fields of its family's own, as JSON.
    pub own: &'static str,
}

const GROUPED: Sizes = Sizes {
    model_type: "llama",
    numbers: Numbers::F32,
    hidden: 1024,
    intermediate: 1024,
    heads: 16,
    kv_heads: 8,
    head_dim: 128,
    layers: 4,
    vocabulary: 128_256,
    tied: false,
    own: "{}",
};

/// Models of more than a gigabyte, with their context, number of sequences and KV format. A CPU computes
/// 16-bit and packed values slowly, so most of those models is embedding and head, which cost nothing during
/// prefill.
pub const LARGE: [(&str, Sizes, u32, u32, KvCacheType); 8] = [
    ("Llama, float32, grouped heads", GROUPED, 1024, 4, KvCacheType::AsComputed),
    ("Llama, float32, grouped heads, KV in 8 bits", GROUPED, 1024, 4, KvCacheType::Int8),
    (
        "Llama, 4-bit",
        Sizes {
            model_type: "llama",
            numbers: Numbers::Affine4,
            hidden: 2048,
            intermediate: 512,
            heads: 8,
            kv_heads: 8,
            head_dim: 64,
            layers: 2,
            vocabulary: 512_000,
            tied: false,
            own: "{}",
        },
        512,
        4,
        KvCacheType::AsComputed,
    ),
    (
        "Qwen3, bfloat16, tied",
        Sizes {
            model_type: "qwen3",
            numbers: Numbers::Bf16,
            hidden: 1024,
            intermediate: 1024,
            heads: 16,
            kv_heads: 8,
            head_dim: 128,
            layers: 2,
            vocabulary: 560_000,
            tied: true,
            own: "{}",
        },
        512,
        4,
        KvCacheType::AsComputed,
    ),
    (
        "Qwen3 with experts, float32",
        Sizes { intermediate: 512, vocabulary: 64_000, own: EXPERTS, ..GROUPED_EXPERTS },
        1024,
        4,
        KvCacheType::AsComputed,
    ),
    (
        "DeepSeek, latent attention, float32",
        Sizes { model_type: "deepseek_v3", vocabulary: 100_000, own: LATENT, ..GROUPED },
        1024,
        4,
        KvCacheType::AsComputed,
    ),
    (
        "gpt-oss, windows, float32",
        Sizes { model_type: "gpt_oss", intermediate: 512, vocabulary: 100_000, own: WINDOWS, ..GROUPED },
        1024,
        4,
        KvCacheType::AsComputed,
    ),
    (
        "Qwen3.5, delta nets, float32",
        Sizes { model_type: "qwen3_next", own: DELTA_NETS, ..GROUPED },
        1024,
        4,
        KvCacheType::AsComputed,
    ),
];

const GROUPED_EXPERTS: Sizes = Sizes { model_type: "qwen3_moe", ..GROUPED };

/// Fields of families with experts, latents, windows, delta nets and short convolutions.
pub const EXPERTS: &str = r#"{"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
    "norm_topk_prob": true}"#;
/// The same with latent attention.
pub const LATENT: &str = r#"{"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "kv_lora_rank": 128,
    "q_lora_rank": 192, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, "head_dim": null,
    "num_key_value_heads": 4, "num_attention_heads": 4}"#;
/// Sinks, windows and experts with biases.
pub const WINDOWS: &str =
    r#"{"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128, "hidden_act": "silu"}"#;
/// Gated delta nets.
pub const DELTA_NETS: &str = r#"{"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "full_attention_interval": 2}"#;
/// State spaces, an attention and a dense block.
pub const STATE_SPACES: &str = r#"{"hybrid_override_pattern": "M-*M", "mamba_num_heads": 8, "mamba_head_dim": 64,
    "n_groups": 4, "ssm_state_size": 64, "conv_kernel": 4, "use_conv_bias": true}"#;

/// Short convolutions, wider than all else.
pub const SHORT_CONVS: &str = r#"{"conv_L_cache": 3, "conv_bias": true, "full_attn_idxs": [1, 3], "block_ff_dim": 96,
    "block_multiple_of": 32}"#;

impl Sizes {
    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        let tensors = random_weights::tensors(&self.config(), self.numbers);
        tensors.iter().map(|(_, dtype, shape)| random_weights::bytes_of(dtype, shape) as u64).sum()
    }

    fn config(&self) -> serde_json::Value {
        let mut config = json!({
            "model_type": self.model_type, "hidden_size": self.hidden,
            "intermediate_size": self.intermediate, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "vocab_size": self.vocabulary, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
            "tie_word_embeddings": self.tied, "eos_token_id": END,
        });
        if self.numbers == Numbers::Affine4 {
            config["quantization"] = json!({"group_size": 64, "bits": 4});
        }
        let own: Map<String, Value> = serde_json::from_str(self.own).unwrap();
        config.as_object_mut().unwrap().extend(own);
        config
    }
}

/// A folder with such a model.
pub fn write(sizes: &Sizes) -> TempDir {
    random_weights::write(&sizes.config(), sizes.numbers, 0.03)
}
