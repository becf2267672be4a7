//! Applies `wire::partition` to a model: which tensors a rank loads. What a rank *runs* follows from
//! the same [`Part`]; the split itself is decided elsewhere.

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
}
