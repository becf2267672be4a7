//! Llama 2 and 3 and everything that calls itself one: pre-norm blocks of grouped-query attention and a gated MLP.

use super::{Family, shared::dense};

pub(super) const FAMILY: Family =
    Family { model_types: &["llama"], fields: &[], defaults: &[], describe: dense };
