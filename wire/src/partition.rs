//! Which rank holds which part of a model. Rank 0 owns the **last** stage, the head, and samples;
//! the highest rank owns the embedding and the first layers, so activations flow from high ranks
//! to low ones (the order MLX's own pipelines use).
//!
//! ```text
//! 5 layers over [2, 2, 1]:   rank 2: embed, layer 0 ──▶ rank 1: layers 1-2 ──▶ rank 0: layers 3-4, norm, head, sample
//! ```

use std::ops::Range;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Layers per rank of a pipeline; index = rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    layers_per_rank: Vec<u32>,
}

/// What one rank loads and runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The rank, 0 samples.
    pub rank: u32,
    /// Ranks in the group.
    pub size: u32,
    /// Layers held, as indices into the model.
    pub layers: Range<u32>,
    /// Whether the rank embeds tokens.
    pub embedding: bool,
    /// Whether the rank holds the final norm and the head.
    pub head: bool,
}

/// A partition that cannot be.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum PartitionError {
    /// No ranks at all.
    #[error("a partition needs at least one rank")]
    Empty,
    /// A rank without work would only add a hop.
    #[error("rank {0} would hold no layers; use fewer ranks or give it at least one layer")]
    EmptyRank(u32),
    /// The split does not cover the model.
    #[error("the split adds up to {split} layers, but the model has {model}; make the two equal")]
    WrongSum {
        /// Sum of the split.
        split: u32,
        /// Layers of the model.
        model: u32,
    },
}

impl Partition {
    /// A split for a model of `layers` layers; `layers_per_rank[r]` is what rank `r` holds.
    pub fn new(layers_per_rank: Vec<u32>, layers: u32) -> Result<Self, PartitionError> {
        if layers_per_rank.is_empty() {
            return Err(PartitionError::Empty);
        }
        if let Some(rank) = layers_per_rank.iter().position(|&count| count == 0) {
            return Err(PartitionError::EmptyRank(rank as u32));
        }
        let split: u32 = layers_per_rank.iter().fold(0, |sum, &count| sum.saturating_add(count));
        if split != layers {
            return Err(PartitionError::WrongSum { split, model: layers });
        }
        Ok(Self { layers_per_rank })
    }

    /// Ranks in the group.
    pub fn size(&self) -> u32 {
        self.layers_per_rank.len() as u32
    }

    /// The part of `rank`; `None` for a rank outside the group.
    pub fn part(&self, rank: u32) -> Option<Part> {
        let index = rank as usize;
        let count = *self.layers_per_rank.get(index)?;
        let start: u32 = self.layers_per_rank[index + 1..].iter().sum();
        Some(Part {
            rank,
            size: self.size(),
            layers: start..start + count,
            embedding: rank + 1 == self.size(),
            head: rank == 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_zero_owns_the_last_stage_and_the_highest_rank_the_embedding() {
        let partition = Partition::new(vec![2, 2, 1], 5).unwrap();
        let parts: Vec<Part> = (0..3).map(|rank| partition.part(rank).unwrap()).collect();
        assert_eq!(parts[0], Part { rank: 0, size: 3, layers: 3..5, embedding: false, head: true });
        assert_eq!(parts[1], Part { rank: 1, size: 3, layers: 1..3, embedding: false, head: false });
        assert_eq!(parts[2], Part { rank: 2, size: 3, layers: 0..1, embedding: true, head: false });
        assert_eq!(partition.part(3), None);
    }

    #[test]
    fn impossible_splits_say_why() {
        assert_eq!(Partition::new(vec![], 4), Err(PartitionError::Empty));
        assert_eq!(Partition::new(vec![4, 0], 4), Err(PartitionError::EmptyRank(1)));
        assert_eq!(Partition::new(vec![2, 1], 4), Err(PartitionError::WrongSum { split: 3, model: 4 }));
    }
}
