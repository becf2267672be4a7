//! Nemotron-H, Nemotron Nano 2 and Nemotron 3, dense and with experts.

use super::{Architecture, Names, plain};
use crate::{
    error::Error,
    gguf::fields::{Fields, SIGMOID},
};

pub(super) const DENSE: Architecture = Architecture {
    modules: MODULES,
    tensors: TENSORS,
    fields: |fields| layers(fields, '-'),
    ..plain("nemotron_h", "nemotron_h")
};
pub(super) const SPARSE: Architecture = Architecture {
    name: "nemotron_h_moe",
    fields: |fields| {
        fields.grouped_experts(SIGMOID)?;
        fields.copy("moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length")?;
        fields.copy_optional("moe_latent_size", "moe_latent_size")?;
        layers(fields, 'E')
    },
    ..DENSE
};

const MODULES: Names = &[
    // The one block of a layer has the one norm.
    ("attn_norm", "norm"),
    ("ssm_in", "mamba.in_proj"),
    ("ssm_conv1d", "mamba.conv1d"),
    ("ssm_norm", "mamba.norm"),
    ("ssm_out", "mamba.out_proj"),
    ("ffn_up_exps", "mlp.switch_mlp.fc1"),
    ("ffn_down_exps", "mlp.switch_mlp.fc2"),
    ("ffn_latent_down", "mlp.fc1_latent_proj"),
    ("ffn_latent_up", "mlp.fc2_latent_proj"),
];
const TENSORS: Names = &[("ssm_a", "mamba.A_log"), ("ssm_d", "mamba.D"), ("ssm_dt.bias", "mamba.dt_bias")];

/// The kind of each layer, and the state spaces: a layer with KV heads is an attention, one with a width is of the kind
/// `mlp`, and others have a state.
fn layers(fields: &mut Fields<'_, '_>, mlp: char) -> Result<(), Error> {
    let heads = fields.by_layer("attention.head_count_kv")?;
    let widths = fields.by_layer("feed_forward_length")?;
    let count = fields.layers()? as usize;
    let kinds: Vec<char> = heads
        .iter()
        .zip(&widths)
        .take(count)
        .map(|kind| match kind {
            (0, 0) => 'M',
            (0, _) => mlp,
            _ => '*',
        })
        .collect();
    fields.set("hybrid_override_pattern", kinds.iter().collect::<String>());
    let first = |kind| kinds.iter().position(|own| *own == kind);
    for (field, kind, tensor) in [
        ("use_conv_bias", 'M', "ssm_conv1d.bias"),
        ("mamba_proj_bias", 'M', "ssm_in.bias"),
        ("attention_bias", '*', "attn_q.bias"),
        ("mlp_bias", '-', "ffn_up.bias"),
    ] {
        let is_there = first(kind).is_some_and(|layer| fields.has_tensor(&format!("blk.{layer}.{tensor}")));
        fields.set(field, is_there);
    }
    for (field, key) in [
        ("mamba_num_heads", "ssm.time_step_rank"),
        ("n_groups", "ssm.group_count"),
        ("ssm_state_size", "ssm.state_size"),
        ("conv_kernel", "ssm.conv_kernel"),
    ] {
        fields.copy(field, key)?;
    }
    let (width, heads) = (fields.number("ssm.inner_size")?, fields.number("ssm.time_step_rank")?);
    fields.set("mamba_head_dim", width.checked_div(heads).unwrap_or(0));
    // Norms are without a mean here, whichever of the two names their number has.
    let other = fields.float("attention.layer_norm_epsilon")?;
    if let Some(epsilon) = fields.float("attention.layer_norm_rms_epsilon")?.or(other) {
        fields.set("layer_norm_epsilon", epsilon);
        fields.set("rms_norm_eps", epsilon);
    }
    Ok(())
}
