//! Gemma 4, dense, with experts, and the E models with inputs of each layer: the text part.

use serde_json::json;

use super::{Architecture, Names, Rotated, plain};
use crate::{
    error::Error,
    gguf::{fields::Fields, rope_factors},
};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    rotated: Rotated::ByLayer,
    modules: &[
        ("post_attention_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
        ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
        ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
        ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
        ("ffn_gate_inp", "router.proj"),
        ("ffn_gate_exps", "experts.switch_glu.gate_proj"),
        ("ffn_up_exps", "experts.switch_glu.up_proj"),
        ("ffn_down_exps", "experts.switch_glu.down_proj"),
        ("inp_gate", "per_layer_input_gate"),
        ("proj", "per_layer_projection"),
        ("post_norm", "post_per_layer_input_norm"),
    ],
    tensors: TENSORS,
    fields,
    ..plain("gemma4", "gemma4_text")
};

const TENSORS: Names = &[
    ("layer_output_scale.weight", "layer_scalar"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
];

fn fields(fields: &mut Fields<'_, '_>) -> Result<(), Error> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    fields.set("hidden_activation", "gelu_pytorch_tanh");
    let windowed = fields.flags(PATTERN)?.ok_or_else(|| fields.missing(PATTERN))?;
    let layers = windowed.len();
    fields.set_layer_types(windowed.iter().copied(), ["full_attention", "sliding_attention"]);
    fields.copy("sliding_window", "attention.sliding_window")?;
    heads(fields, &windowed)?;
    let shared = fields.optional("attention.shared_kv_layers")?.unwrap_or(0);
    fields.set("num_kv_shared_layers", shared);
    let is_shared: Vec<bool> =
        (0..layers as u64).map(|layer| layer >= (layers as u64).saturating_sub(shared)).collect();
    widths(fields, &is_shared)?;
    let width = fields.optional("embedding_length_per_layer_input")?.unwrap_or(0);
    fields.set("hidden_size_per_layer_input", width);
    if let Some(tokens) = fields.rows("per_layer_token_embd.weight") {
        fields.set("vocab_size_per_layer_input", tokens);
    }
    // None is no cap, whatever config.json says of that.
    let cap = fields.float("final_logit_softcapping")?.unwrap_or(0.0);
    fields.set("final_logit_softcapping", cap);
    if fields.optional("expert_count")?.is_some_and(|count| count > 0) {
        fields.set("enable_moe_block", true);
        fields.experts(["num_experts", "top_k_experts", "moe_intermediate_size"])?;
    }
    Ok(())
}

/// Widths, numbers and rotary embeddings of the heads of both kinds of layers.
fn heads(fields: &mut Fields<'_, '_>, windowed: &[bool]) -> Result<(), Error> {
    let mut width = |kind: &str| {
        let [key, value] = ["key", "value"].map(|own| format!("attention.{own}_length{kind}"));
        let (number, other) = (fields.number(&key)?, fields.number(&value)?);
        if other != number {
            let reason = format!("{other} is not supported for heads of {number}");
            return Err(Error::from(fields.refuse(&value, reason)));
        }
        Ok(number)
    };
    let (full, local) = (width("")?, width("_swa")?);
    fields.set("global_head_dim", full);
    fields.set("head_dim", local);
    let [of_full, of_local] = fields.of_kinds("attention.head_count_kv", windowed)?;
    if let Some(heads) = of_local.or(of_full) {
        fields.set("num_key_value_heads", heads);
    }
    // Values are the keys of layers that see everything where the file has keys alone.
    if let Some(layer) = windowed.iter().position(|is_local| !is_local)
        && !fields.has_tensor(&format!("blk.{layer}.attn_v.weight"))
    {
        fields.set("attention_k_eq_v", true);
        fields.set("num_global_key_value_heads", of_full);
    }
    let rotated = fields.optional("rope.dimension_count_swa")?.unwrap_or(local);
    if fields.number("rope.dimension_count")? != full {
        let reason = format!("it has to be the {full} of attention.key_length");
        return Err(fields.refuse("rope.dimension_count", reason).into());
    }
    let share = fields.factors.take().map_or(Ok(1.0), rope_factors::share)?;
    let base = fields.float("rope.freq_base")?.unwrap_or(1e6);
    let of_local = fields.float("rope.freq_base_swa")?.unwrap_or(1e4);
    let rope = json!({
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": base},
        "sliding_attention": {"rope_type": "default", "partial_rotary_factor": rotated as f64 / local.max(1) as f64,
                              "rope_theta": of_local},
    });
    fields.set("rope_parameters", rope);
    Ok(())
}

/// Width of the dense block: twice that where keys and values are those of an earlier layer, in some models.
fn widths(fields: &mut Fields<'_, '_>, is_shared: &[bool]) -> Result<(), Error> {
    const WIDTH: &str = "feed_forward_length";
    let [own, shared] = fields.of_kinds(WIDTH, is_shared)?;
    let width = own.ok_or_else(|| fields.missing(WIDTH))?;
    let doubles = shared.is_some_and(|shared| shared != width);
    if let Some(shared) = shared.filter(|shared| doubles && *shared != width.saturating_mul(2)) {
        let reason =
            format!("{shared} where others have {width} is not supported; supported is twice as many");
        return Err(fields.refuse(WIDTH, reason).into());
    }
    fields.set("intermediate_size", width);
    fields.set("use_double_wide_mlp", doubles);
    Ok(())
}
