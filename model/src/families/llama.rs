//! Llama 2 and 3 and everything that calls itself one: pre-norm blocks of grouped-query attention and a gated MLP.

use super::{Family, dense};
use crate::tensors;

pub(super) const FAMILY: Family = Family {
    model_type: "llama",
    describe: |config, has_head| dense("llama", config, has_head),
    tensors: tensors::hugging_face,
};
