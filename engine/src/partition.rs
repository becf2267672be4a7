//! Shards of a model: applies `model::partition` to its tensors: which tensors a rank loads, and which shard
//! of them. The layers that a rank *runs* follow from the same [`RankPart`]. Not here: the choice of the split.

use russet_model::{partition::RankPart, tensors::Role};

/// Whether the rank of `part` loads tensors of `role`. A tied head is the embedding, so then the first and
/// the last stage hold it.
pub fn rank_holds(part: &RankPart, tied: bool, role: Role) -> bool {
    match role {
        Role::Embedding => part.embedding || (tied && part.head),
        Role::PerLayerInputs => part.embedding,
        Role::Head => part.head,
        Role::Layer(index) => part.layers.contains(&index),
    }
}

/// Tensor parallel shard of the sharded matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TpShard {
    /// Tensor rank, from 0.
    pub index: usize,
    /// Number of shards; 1 is the whole matrix.
    pub count: usize,
}

impl TpShard {
    /// The whole matrix.
    pub const WHOLE: Self = Self { index: 0, count: 1 };

    /// The shard of the rank of `part`.
    pub fn for_part(part: &RankPart) -> Self {
        Self { index: part.tensor_index as usize, count: part.tensor_size as usize }
    }

    /// The shard of so many heads, of which every rank has one at least.
    pub fn of_heads(self, heads: u32) -> Self {
        let count = self.count.min(heads.max(1) as usize);
        Self { index: self.index * count / self.count, count }
    }

    /// How many of so many heads this shard has.
    pub fn heads(self, all: u32) -> i32 {
        (all as usize / self.of_heads(all).count) as i32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use russet_model::partition::Partition;

    #[test]
    fn heads_that_are_fewer_than_ranks_are_repeated() {
        let shard = |index, count| TpShard { index, count };
        for (count, heads, shards, each) in [
            (4, 2, [(0, 2), (0, 2), (1, 2), (1, 2)], 1),
            (4, 1, [(0, 1); 4], 1),
            (4, 4, [(0, 4), (1, 4), (2, 4), (3, 4)], 1),
            (4, 8, [(0, 4), (1, 4), (2, 4), (3, 4)], 2),
        ] {
            let found: Vec<TpShard> = (0..4).map(|index| shard(index, count).of_heads(heads)).collect();
            assert_eq!(found, shards.map(|(index, count)| shard(index, count)), "{heads} heads");
            assert_eq!(shard(0, count).heads(heads), each, "{heads} heads");
        }
    }

    #[test]
    fn each_tensor_is_held_once_except_a_tied_embedding() {
        let partition = Partition::new(vec![2, 2, 1], 5).unwrap();
        let holders = |tied, role| -> Vec<u32> {
            (0..3).filter(|&rank| rank_holds(&partition.part(rank).unwrap(), tied, role)).collect()
        };
        assert_eq!(holders(false, Role::Embedding), [2]);
        assert_eq!(holders(true, Role::Embedding), [0, 2]);
        assert_eq!(holders(true, Role::PerLayerInputs), [2]);
        assert_eq!(holders(true, Role::Head), [0]);
        assert_eq!(holders(false, Role::Layer(0)), [2]);
        assert_eq!(holders(false, Role::Layer(2)), [1]);
        assert_eq!(holders(false, Role::Layer(4)), [0]);
        assert!(holders(false, Role::Layer(5)).is_empty());
    }

    #[test]
    fn members_hold_their_stage_and_rank_zero_alone_the_head() {
        let partition = Partition::with_tensor(vec![3, 3, 2, 2], 2, 5).unwrap();
        let holders = |role| -> Vec<u32> {
            (0..4).filter(|&rank| rank_holds(&partition.part(rank).unwrap(), true, role)).collect()
        };
        assert_eq!(holders(Role::Embedding), [0, 2, 3]);
        assert_eq!(holders(Role::Head), [0]);
        assert_eq!(holders(Role::Layer(1)), [2, 3]);
        assert_eq!(holders(Role::Layer(4)), [0, 1]);
        assert_eq!(TpShard::for_part(&partition.part(3).unwrap()), TpShard { index: 1, count: 2 });
    }
}
