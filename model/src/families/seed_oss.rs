//! Seed-OSS: Llama's blocks with biases of queries, keys and values, and of the output where config.json says so.

use super::{
    Family,
    shared::{dense, require},
};
use crate::{config::Config, description::Description, error::Error};

pub(super) const FAMILY: Family =
    Family { model_types: &["seed_oss"], fields: &["attention_out_bias"], defaults: &[], describe };

fn describe(config: &Config, has_head: bool) -> Result<Description, Error> {
    require("head_dim", config.head_dim.is_some())?;
    let mut description = dense(config, has_head)?;
    let output_bias = config.document.flag("attention_out_bias")?;
    description.attentions_mut().for_each(|attention| attention.output_bias = output_bias);
    Ok(description)
}
