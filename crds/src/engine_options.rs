//! What a deployment asks of its engines beyond the split: options that change how a replica computes, and not where.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the engines of a deployment compute. It travels with the plan, so that another option is another plan; what is
/// left at its default is left out everywhere, so that plans made before an option existed keep their digests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EngineOptions {
    /// In what form keys and values of conversations are kept; left out: AsComputed. Fewer bits are more context in
    /// the same memory, slower and a little less exact.
    #[serde(default, skip_serializing_if = "is_default")]
    pub kv_cache: KvCacheType,
}

impl EngineOptions {
    /// Whether nothing is asked for.
    pub fn is_default(&self) -> bool {
        is_default(self)
    }
}

/// In what form keys and values are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KvCacheType {
    /// As the model computes them, 16 or 32 bits each.
    #[default]
    AsComputed,
    /// 8 bits each, with a scale and a bias for every group of 64 of one head, or of 32 where heads are no
    /// multiple of 64 wide.
    Int8,
    /// 4 bits each, in the same groups.
    Int4,
    /// A word of a newer release.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
