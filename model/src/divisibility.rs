//! Into how many equal parts a tensor group can split a model, and why not: the one statement of it. Parts are whole
//! heads, equal shares of the MLP and whole groups of quantised values.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    description::{Description, Mixer, Mlp},
    tensors::{Role, ShardAxis, Stored, Tensor},
};

/// Most ranks of a tensor group: as many as the planner gives a group at all.
pub const MAX_TENSOR_SIZE: u32 = 64;

/// Something of which every rank of a tensor group gets an equal number.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShardUnit {
    /// How many there are.
    pub count: u32,
    /// What they are, such as `KV heads`.
    pub unit: String,
}

impl ShardUnit {
    /// `count` of `unit`.
    pub fn new(count: u32, unit: impl Into<String>) -> Self {
        Self { count, unit: unit.into() }
    }
}

/// Why these cannot be divided among `size` ranks; `None` when they can.
pub fn why_indivisible(units: &[ShardUnit], size: u32) -> Option<String> {
    if size == 1 {
        return None;
    }
    let ShardUnit { count, unit } =
        units.iter().find(|unit| size == 0 || unit.count == 0 || !unit.count.is_multiple_of(size))?;
    Some(format!("{count} {unit} cannot be cut into {size}"))
}

/// Every number of ranks that can share these, in order; 1 always can.
pub fn tensor_sizes(units: &[ShardUnit]) -> Vec<u32> {
    let least = units.iter().map(|unit| unit.count).min().unwrap_or(1);
    (1..=least.clamp(1, MAX_TENSOR_SIZE)).filter(|&size| why_indivisible(units, size).is_none()).collect()
}

/// What every rank of a tensor group gets an equal number of, of a model whose tensors are stored so.
pub fn shard_units(description: &Description, tensors: &[(Tensor, Stored)]) -> Vec<ShardUnit> {
    let mut units = Vec::new();
    let mut add = |count: u32, unit: &str| {
        if !units.iter().any(|known: &ShardUnit| known.count == count && known.unit == unit) {
            units.push(ShardUnit::new(count, unit));
        }
    };
    for mixer in description.mixers() {
        match mixer {
            Mixer::Attention(attention) => {
                add(attention.kv_heads, "KV heads");
                add(attention.heads, "attention heads");
            }
            Mixer::Latent(latent) => add(latent.heads, "attention heads"),
            Mixer::DeltaNet(delta) => {
                add(delta.key_heads, "key heads of the delta net");
                add(delta.value_heads, "value heads of the delta net");
            }
            Mixer::Mamba2(mamba) => add(mamba.groups, "groups of the state space"),
        }
    }
    for mlp in description.mlps() {
        match mlp {
            Mlp::Dense(dense) => add(dense.intermediate, "columns of the MLP"),
            Mlp::Experts(experts) => {
                add(experts.intermediate, "columns of each expert");
                if let Some(shared) = experts.shared {
                    add(shared.intermediate, "columns of the shared expert");
                }
            }
        }
    }
    units.extend(quantised_groups(tensors));
    units
}

/// Groups of quantised values along a dimension that is shared: those of attention first.
fn quantised_groups(tensors: &[(Tensor, Stored)]) -> BTreeSet<ShardUnit> {
    let mut units = BTreeSet::new();
    for (tensor, stored) in tensors {
        let (Some(packing), ShardAxis::Axis { dim, segments }, Role::Layer(_)) =
            (stored.packing, &tensor.axis, tensor.role)
        else {
            continue;
        };
        if dim + 1 != tensor.shape.len() {
            continue;
        }
        let what = if tensor.name.contains(".self_attn.") { "attention" } else { "MLP" };
        for columns in segments {
            let count = u32::try_from(columns / u64::from(packing.group_size)).unwrap_or(u32::MAX);
            units.insert(ShardUnit::new(
                count,
                format!("groups of {} quantised {what} columns", packing.group_size),
            ));
        }
    }
    units
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_divide_or_say_which_does_not() {
        let units = [
            ShardUnit::new(8, "KV heads"),
            ShardUnit::new(32, "attention heads"),
            ShardUnit::new(12, "groups"),
        ];
        assert_eq!(tensor_sizes(&units), [1, 2, 4]);
        for (size, why) in [
            (1, None),
            (4, None),
            (3, Some("8 KV heads cannot be cut into 3")),
            (8, Some("12 groups cannot be cut into 8")),
            (0, Some("8 KV heads cannot be cut into 0")),
        ] {
            assert_eq!(why_indivisible(&units, size).as_deref(), why, "{size}");
        }
        assert_eq!(tensor_sizes(&[]), [1]);
        assert_eq!(tensor_sizes(&[ShardUnit::new(0, "KV heads")]), [1]);
    }

    #[test]
    fn numbers_that_no_model_has_take_no_time() {
        let units = [ShardUnit::new(1 << 29, "KV heads"), ShardUnit::new(1 << 29, "columns of the MLP")];
        assert_eq!(tensor_sizes(&units), [1, 2, 4, 8, 16, 32, 64]);
    }
}
