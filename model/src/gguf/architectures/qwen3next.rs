//! Qwen3-Next, Qwen3.5 and 3.6, whose gated delta nets have their projections apart.

use super::{Architecture, Names, Rotated, plain};
use crate::{
    error::Error,
    gguf::{delta_net::HeadOrder, fields::Fields},
};

pub(super) const QWEN3_NEXT: Architecture =
    Architecture { name: "qwen3next", delta_net: Some(HeadOrder::Grouped), ..QWEN3_5_MOE };
pub(super) const QWEN3_5: Architecture = Architecture {
    rotated: Rotated::Share,
    modules: MODULES,
    tensors: TENSORS,
    delta_net: Some(HeadOrder::Tiled),
    fields: delta_nets,
    ..plain("qwen35", "qwen3_5_text")
};
pub(super) const QWEN3_5_MOE: Architecture = Architecture {
    name: "qwen35moe",
    model_type: "qwen3_5_moe_text",
    fields: |fields| {
        fields.experts(["num_experts", "num_experts_per_tok", "moe_intermediate_size"])?;
        fields.copy("shared_expert_intermediate_size", "expert_shared_feed_forward_length")?;
        // All published models of the family do.
        fields.set("norm_topk_prob", true);
        delta_nets(fields)
    },
    ..QWEN3_5
};

const MODULES: Names = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];
const TENSORS: Names = &[("ssm_a", "linear_attn.A_log"), ("ssm_dt.bias", "linear_attn.dt_bias")];

fn delta_nets(fields: &mut Fields<'_, '_>) -> Result<(), Error> {
    for (field, key) in [
        ("linear_num_key_heads", "ssm.group_count"),
        ("linear_num_value_heads", "ssm.time_step_rank"),
        ("linear_key_head_dim", "ssm.state_size"),
        ("linear_conv_kernel_dim", "ssm.conv_kernel"),
    ] {
        fields.copy(field, key)?;
    }
    let (width, heads) = (fields.number("ssm.inner_size")?, fields.number("ssm.time_step_rank")?);
    fields.set("linear_value_head_dim", width.checked_div(heads).unwrap_or(0));
    fields.copy_optional("full_attention_interval", "full_attention_interval")?;
    if let Some(recurrent) = fields.flags("attention.recurrent_layers")? {
        let layers = fields.layers()? as usize;
        fields.set_layer_types(recurrent.into_iter().take(layers), ["full_attention", "linear_attention"]);
    }
    Ok(())
}
