//! Seed-OSS.

use super::{Architecture, plain};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    modules: &[("post_attention_norm", "post_attention_layernorm")],
    fields: |fields| {
        fields.set_attention_bias();
        let has_bias = fields.has_tensor("blk.0.attn_output.bias");
        fields.set("attention_out_bias", has_bias);
        Ok(())
    },
    ..plain("seed_oss", "seed_oss")
};
