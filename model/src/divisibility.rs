//! Among how many ranks a tensor group can share a model, and why not: the one statement of it. Each rank has as many
//! heads as another, and of the MLP as many columns or groups of quantised columns, or one more. KV heads that are fewer
//! than the ranks are repeated.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    description::{Description, Mixer},
    tensors::{Role, ShardAxis, Stored, Tensor},
};

/// Most ranks of a tensor group: as many as the planner gives a group at all.
pub const MAX_TENSOR_SIZE: u32 = 64;

/// Something that the ranks of a tensor group share.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShardUnit {
    /// How many there are.
    pub count: u32,
    /// What they are, such as `KV heads`.
    pub unit: String,
    /// How they are shared.
    #[serde(default, skip_serializing_if = "Sharing::is_equal")]
    pub sharing: Sharing,
}

/// How the ranks of a tensor group share what there is so many of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum Sharing {
    /// Each gets an equal number.
    #[default]
    Equal,
    /// Each gets an equal number, or one that others have, too, where there are fewer than ranks.
    Repeated,
    /// Each gets one at least, and some get one more than others.
    Uneven,
    /// A value from a newer release; its engine knows more ways than this planner uses.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

impl Sharing {
    fn is_equal(&self) -> bool {
        *self == Self::Equal
    }
}

impl ShardUnit {
    /// `count` of `unit`.
    pub fn new(count: u32, unit: impl Into<String>) -> Self {
        Self { count, unit: unit.into(), sharing: Sharing::Equal }
    }

    /// Key/value heads, which ranks can repeat.
    pub fn kv_heads(count: u32) -> Self {
        Self { sharing: Sharing::Repeated, ..Self::new(count, "KV heads") }
    }

    /// What of the MLP is shared: columns, or groups of quantised ones.
    fn mlp(count: u32, group: u64) -> Self {
        let unit = match group {
            0 | 1 => "columns of the MLP".to_owned(),
            group => format!("groups of {group} quantised MLP columns"),
        };
        Self { sharing: Sharing::Uneven, ..Self::new(count, unit) }
    }

    /// Whether `size` ranks can share them.
    fn divides(&self, size: u32) -> bool {
        let count = self.count;
        size > 0
            && count > 0
            && match self.sharing {
                Sharing::Equal | Sharing::Unknown => count.is_multiple_of(size),
                Sharing::Repeated => count.is_multiple_of(size) || size.is_multiple_of(count),
                Sharing::Uneven => count >= size,
            }
    }
}

/// Why these cannot be divided among `size` ranks; `None` when they can.
pub fn why_indivisible(units: &[ShardUnit], size: u32) -> Option<String> {
    if size == 1 {
        return None;
    }
    let ShardUnit { count, unit, .. } = units.iter().find(|unit| !unit.divides(size))?;
    Some(format!("{count} {unit} cannot be cut into {size}"))
}

/// Every number of ranks that can share these, in order; 1 always can.
pub fn tensor_sizes(units: &[ShardUnit]) -> Vec<u32> {
    let least = units
        .iter()
        .filter(|unit| unit.sharing != Sharing::Repeated)
        .map(|unit| unit.count)
        .min()
        .unwrap_or(1);
    (1..=least.clamp(1, MAX_TENSOR_SIZE)).filter(|&size| why_indivisible(units, size).is_none()).collect()
}

/// What the ranks of a tensor group share of a model whose tensors are stored so.
pub fn shard_units(description: &Description, tensors: &[(Tensor, Stored)]) -> Vec<ShardUnit> {
    if !description.task().is_generate() {
        return vec![ShardUnit::new(1, "model that does not generate")];
    }
    let mut units = Vec::new();
    let mut add = |unit: ShardUnit| {
        if !units.contains(&unit) {
            units.push(unit);
        }
    };
    for mixer in description.mixers() {
        match mixer {
            Mixer::Attention(attention) => {
                add(ShardUnit::kv_heads(attention.kv_heads));
                add(ShardUnit::new(attention.heads, "attention heads"));
            }
            Mixer::Latent(latent) => add(ShardUnit::new(latent.heads, "attention heads")),
            Mixer::DeltaNet(delta) => {
                add(ShardUnit::new(delta.key_heads, "key heads of the delta net"));
                add(ShardUnit::new(delta.value_heads, "value heads of the delta net"));
            }
            Mixer::ShortConv(conv) => {
                add(ShardUnit::new(conv.channels, "channels of the short convolution"));
            }
            Mixer::Mamba2(mamba) => add(ShardUnit::new(mamba.groups, "groups of the state space")),
        }
    }
    for (tensor, _) in tensors {
        if let ShardAxis::Parts { dim, parts } = tensor.axis {
            let width = tensor.shape.get(dim).copied().unwrap_or(0);
            let count = u32::try_from(parts).unwrap_or(u32::MAX);
            add(ShardUnit::mlp(count, width.checked_div(parts).unwrap_or(0)));
        }
    }
    units.extend(quantised_groups(tensors));
    units
}

/// Groups of quantised values along a dimension that is shared equally.
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
        for columns in segments {
            let count = u32::try_from(columns / u64::from(packing.group_size)).unwrap_or(u32::MAX);
            units.insert(ShardUnit::new(
                count,
                format!("groups of {} quantised attention columns", packing.group_size),
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
            ShardUnit::mlp(90, 32),
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
        let repeated = [ShardUnit::kv_heads(2), ShardUnit::new(24, "attention heads")];
        assert_eq!(tensor_sizes(&repeated), [1, 2, 4, 6, 8, 12, 24]);
        for (size, why) in [
            (4, None),
            (3, Some("2 KV heads cannot be cut into 3")),
            (16, Some("24 attention heads cannot be cut into 16")),
        ] {
            assert_eq!(why_indivisible(&repeated, size).as_deref(), why, "{size}");
        }
        let uneven = [ShardUnit::new(64, "attention heads"), ShardUnit::mlp(45, 64)];
        assert_eq!(tensor_sizes(&uneven), [1, 2, 4, 8, 16, 32]);
        let why = "45 groups of 64 quantised MLP columns cannot be cut into 64";
        assert_eq!(why_indivisible(&uneven, 64).as_deref(), Some(why));
        assert_eq!(tensor_sizes(&[]), [1]);
        assert_eq!(tensor_sizes(&[ShardUnit::new(0, "KV heads")]), [1]);
    }

    #[test]
    fn numbers_that_no_model_has_take_no_time() {
        let units = [ShardUnit::new(1 << 29, "KV heads"), ShardUnit::new(1 << 29, "columns of the MLP")];
        assert_eq!(tensor_sizes(&units), [1, 2, 4, 8, 16, 32, 64]);
    }
}
