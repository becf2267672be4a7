//! DeepSeek V3, V3.1 and R1, Kimi K2, and GLM-4.7-Flash, whose heads are made of a latent.

use super::{Architecture, Rotated, plain};
use crate::{
    error::Error,
    gguf::fields::{Fields, SIGMOID},
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    rotated: Rotated::OfLatent,
    modules: &[
        ("attn_q_a", "self_attn.q_a_proj"),
        ("attn_q_a_norm", "self_attn.q_a_layernorm"),
        ("attn_q_b", "self_attn.q_b_proj"),
        ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
        ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
        ("attn_k_b", "self_attn.embed_q"),
        ("attn_v_b", "self_attn.unembed_out"),
        // Of older files: both in one matrix.
        ("attn_kv_b", "self_attn.kv_b_proj"),
    ],
    fields,
    ..plain("deepseek2", "deepseek_v3")
};

fn fields(fields: &mut Fields<'_, '_>) -> Result<(), Error> {
    if fields.pre_tokenizer() == Some("glm4") {
        fields.set("model_type", "glm4_moe_lite");
    } else if fields.optional("expert_gating_func")?.is_none() {
        // As of DeepSeek V2, whose experts are chosen otherwise.
        let reason = "it is missing, as in files of DeepSeek V2, which is not supported".to_owned();
        return Err(fields.refuse("expert_gating_func", reason).into());
    }
    latent(fields)?;
    fields.grouped_experts_after_dense(SIGMOID)
}

/// Heads, and what they are made of.
pub(super) fn latent(fields: &mut Fields<'_, '_>) -> Result<(), Error> {
    // The file says of the cache what config.json says of heads: one of them, of the latent's width.
    fields.optional("attention.head_count_kv")?;
    let heads = fields.number("attention.head_count")?;
    fields.set("num_key_value_heads", heads);
    let (latent_key, latent_value) =
        (fields.optional("attention.key_length")?, fields.optional("attention.value_length")?);
    let [key, value] = [("key", latent_key), ("value", latent_value)].map(|(name, older)| {
        let name = format!("attention.{name}_length_mla");
        fields.optional(&name)?.or(older).ok_or_else(|| fields.missing(&name))
    });
    let (key, value, rotated) = (key?, value?, fields.number("rope.dimension_count")?);
    fields.set("qk_rope_head_dim", rotated);
    fields.set("qk_nope_head_dim", key.saturating_sub(rotated));
    fields.set("v_head_dim", value);
    fields.copy("kv_lora_rank", "attention.kv_lora_rank")?;
    fields.copy_optional("q_lora_rank", "attention.q_lora_rank")?;
    fields.set_yarn_growth(0.1)
}
