//! Qwen2 and Qwen2.5: Llama's blocks with biases of queries, keys and values.

use super::{
    Family,
    shared::{dense, give_late_windows},
};
use crate::{config::Config, description::Description, error::Error};

pub(super) const FAMILY: Family =
    Family { model_types: &["qwen2"], fields: &[], defaults: &[("rope_theta", 1e6)], describe };

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    let mut description = dense(config, has_head)?;
    for attention in description.attentions_mut() {
        (attention.qkv_bias, attention.output_bias) = (true, false);
    }
    give_late_windows(config, &mut description)?;
    Ok(description)
}
