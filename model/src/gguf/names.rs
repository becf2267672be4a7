//! Architectures by their GGUF names, and what their tensors are called in an MLX repository.

/// A kind of model by its name in GGUF.
#[derive(Debug)]
pub struct Architecture {
    /// `general.architecture`.
    pub name: &'static str,
    /// `model_type` of config.json.
    pub model_type: &'static str,
    /// Whether the rows of queries and keys are stored so that neighbours are rotated, not halves.
    pub traditional_rope: bool,
    /// Whether the MLP is experts.
    pub has_experts: bool,
    /// What the file adds to the weights of norms: MLX adds it when it computes.
    pub norm_offset: f32,
    /// Modules of a layer that are called otherwise than in [`LAYER`].
    layer: &'static [(&'static str, &'static str)],
}

/// Every architecture whose names are known. Whether its family is supported, `families` decides.
pub const ARCHITECTURES: &[Architecture] = &[
    // Mistral's dense models call themselves llama too.
    Architecture { traditional_rope: true, ..plain("llama", "llama") },
    plain("qwen2", "qwen2"),
    plain("qwen3", "qwen3"),
    Architecture { has_experts: true, ..plain("qwen3moe", "qwen3_moe") },
    Architecture {
        norm_offset: 1.0,
        layer: &[
            ("post_attention_norm", "post_attention_layernorm"),
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        ],
        ..plain("gemma3", "gemma3_text")
    },
];

/// An architecture without anything special.
const fn plain(name: &'static str, model_type: &'static str) -> Architecture {
    Architecture {
        name,
        model_type,
        traditional_rope: false,
        has_experts: false,
        norm_offset: 0.0,
        layer: &[],
    }
}

/// The tensor with the factors of a stretched rotary embedding: of the configuration rather than of the weights.
pub const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Modules outside the layers.
const MODEL: &[(&str, &str)] =
    &[("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];
/// Modules of a layer.
const LAYER: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.switch_mlp.gate_proj"),
    ("ffn_up_exps", "mlp.switch_mlp.up_proj"),
    ("ffn_down_exps", "mlp.switch_mlp.down_proj"),
];

/// What a tensor of an architecture is called in an MLX repository.
pub fn mlx_name(architecture: &Architecture, name: &str) -> Option<String> {
    let (module, field) = name.rsplit_once('.').filter(|(_, field)| matches!(*field, "weight" | "bias"))?;
    let find = |table: &[(&str, &'static str)], module: &str| {
        table.iter().find(|(own, _)| *own == module).map(|(_, theirs)| *theirs)
    };
    if let Some((layer, module)) = module.strip_prefix("blk.").and_then(|layer| layer.split_once('.')) {
        // One spelling of a number, so that no two tensors have one name.
        let index: u32 = layer.parse().ok().filter(|index: &u32| index.to_string() == layer)?;
        let own = find(architecture.layer, module).or_else(|| find(LAYER, module))?;
        return Some(format!("model.layers.{index}.{own}.{field}"));
    }
    Some(format!("{}.{field}", find(MODEL, module)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_an_mlx_repository_or_none() {
        for (name, expected) in [
            ("token_embd.weight", Some("model.embed_tokens.weight")),
            ("output.weight", Some("lm_head.weight")),
            ("blk.17.attn_q.bias", Some("model.layers.17.self_attn.q_proj.bias")),
            ("blk.0.ffn_down_exps.weight", Some("model.layers.0.mlp.switch_mlp.down_proj.weight")),
            ("blk.00.attn_q.weight", None),
            ("blk.+1.attn_q.weight", None),
            ("blk.0.ssm_in.weight", None),
            ("v.blk.0.attn_q.weight", None),
            ("output", None),
        ] {
            assert_eq!(mlx_name(&ARCHITECTURES[0], name).as_deref(), expected, "{name}");
        }
        let gemma = ARCHITECTURES.iter().find(|own| own.name == "gemma3").unwrap();
        let before = mlx_name(gemma, "blk.0.ffn_norm.weight");
        assert_eq!(before.as_deref(), Some("model.layers.0.pre_feedforward_layernorm.weight"));
    }
}
