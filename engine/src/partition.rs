//! Applies `wire::partition` to a model: which tensors a rank loads, and which slice of them. What a rank
//! *runs* follows from the same [`Part`]; the split itself is decided elsewhere.

use russet_wire::{partition::Part, shape::Role};

/// Whether the rank of `part` loads tensors of `role`. A tied head is the embedding, so then both
/// ends of the pipeline hold it.
pub fn holds(part: &Part, tied: bool, role: Role) -> bool {
    match role {
        Role::Embedding => part.embedding || (tied && part.head),
        Role::Head => part.head,
        Role::Layer(index) => part.layers.contains(&index),
    }
}

/// Which equal slice of the matrices that are cut a rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// From 0.
    pub index: usize,
    /// Slices there are; 1 is everything.
    pub of: usize,
}

impl Slice {
    /// Everything.
    pub const WHOLE: Self = Self { index: 0, of: 1 };

    /// The slice of the rank of `part`.
    pub fn of_part(part: &Part) -> Self {
        Self { index: part.tensor_index as usize, of: part.tensor_size as usize }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use russet_wire::partition::Partition;

    #[test]
    fn each_tensor_is_held_once_except_a_tied_embedding() {
        let partition = Partition::new(vec![2, 2, 1], 5).unwrap();
        let holders = |tied, role| -> Vec<u32> {
            (0..3).filter(|&rank| holds(&partition.part(rank).unwrap(), tied, role)).collect()
        };
        assert_eq!(holders(false, Role::Embedding), [2]);
        assert_eq!(holders(true, Role::Embedding), [0, 2]);
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
            (0..4).filter(|&rank| holds(&partition.part(rank).unwrap(), true, role)).collect()
        };
        assert_eq!(holders(Role::Embedding), [0, 2, 3]);
        assert_eq!(holders(Role::Head), [0]);
        assert_eq!(holders(Role::Layer(1)), [2, 3]);
        assert_eq!(holders(Role::Layer(4)), [0, 1]);
        assert_eq!(Slice::of_part(&partition.part(3).unwrap()), Slice { index: 1, of: 2 });
    }
}
