//! Which rank holds which part of a model. A group is a pipeline of stages, and each stage is held by
//! `tensor_size` ranks, its members, which share every layer of it. Rank `r` is member `r % tensor_size`
//! of stage `r / tensor_size`. Stage 0 owns the **last** layers, and rank 0 the head and sampling; the
//! highest stage owns the embedding and the first layers, so activations flow from high ranks to low
//! ones (the order MLX's own pipelines use).
//!
//! ```text
//! 5 layers over [2, 2, 1]:         rank 2: embed, layer 0 ──▶ rank 1: layers 1-2 ──▶ rank 0: layers 3-4, norm, head, sample
//! 5 layers over [3, 3, 2, 2] by 2: ranks 2, 3: embed, layers 0-1 ──▶ ranks 0, 1: layers 2-4; rank 0: norm, head, sample
//! ```

use std::ops::Range;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Layers per rank of a group; index = rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    layers_per_rank: Vec<u32>,
    tensor_size: u32,
}

/// What one rank loads and runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankPart {
    /// The rank, 0 samples.
    pub rank: u32,
    /// Ranks in the group.
    pub size: u32,
    /// Its stage, 0 owns the last layers.
    pub stage: u32,
    /// Stages of the group.
    pub stages: u32,
    /// Which member of its stage it is: the shard it holds of every matrix that is split.
    pub tensor_index: u32,
    /// Members of every stage; 1 means that nothing is split.
    pub tensor_size: u32,
    /// Layers held, as indices into the model.
    pub layers: Range<u32>,
    /// Whether the rank embeds tokens.
    pub embedding: bool,
    /// Whether the rank holds the final norm and the head: rank 0 alone, which samples.
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
        /// Sum of the split over the stages.
        split: u32,
        /// Layers of the model.
        model: u32,
    },
    /// A stage lacks members.
    #[error(
        "{ranks} ranks do not make stages of {tensor_size}; use a multiple of {tensor_size} ranks or another tensor size"
    )]
    Members {
        /// Ranks in the group.
        ranks: u32,
        /// Members of a stage.
        tensor_size: u32,
    },
    /// Members of one stage hold slices of the same layers.
    #[error(
        "rank {rank} would hold {layers} layers and the first rank of its stage {first}; members of a stage hold the same layers"
    )]
    UnequalMembers {
        /// The rank.
        rank: u32,
        /// Its layers.
        layers: u32,
        /// Those of the first member of its stage.
        first: u32,
    },
    /// Layers that read the keys and values of others are on another stage than these.
    #[error(
        "layers {first} to {last} share keys and values, so one stage must hold them all, but the split begins a stage with layer {cut}; give layers {first} to {last} to one stage"
    )]
    SharedCache {
        /// The first layer of those that stay together.
        first: u32,
        /// The last one.
        last: u32,
        /// The layer that a stage begins with.
        cut: u32,
    },
}

/// Runs of layers that one stage has to hold, given each layer that reads the cache of an earlier one, and that one:
/// disjoint and in order.
pub fn kept_together(shared: impl IntoIterator<Item = (u32, u32)>) -> Vec<Range<u32>> {
    let runs = shared.into_iter().map(|(layer, owner)| owner..layer.saturating_add(1));
    let mut runs: Vec<Range<u32>> = runs.filter(|run| run.len() > 1).collect();
    runs.sort_by_key(|run| run.start);
    let mut merged: Vec<Range<u32>> = Vec::new();
    for run in runs {
        match merged.last_mut().filter(|last| run.start < last.end) {
            Some(last) => last.end = last.end.max(run.end),
            None => merged.push(run),
        }
    }
    merged
}

impl Partition {
    /// A pipeline for a model of `layers` layers; `layers_per_rank[r]` is what rank `r` holds.
    pub fn new(layers_per_rank: Vec<u32>, layers: u32) -> Result<Self, PartitionError> {
        Self::with_tensor(layers_per_rank, 1, layers)
    }

    /// A pipeline of stages with `tensor_size` members each. There is one entry per rank still, so
    /// the members of a stage repeat each other.
    pub fn with_tensor(
        layers_per_rank: Vec<u32>,
        tensor_size: u32,
        layers: u32,
    ) -> Result<Self, PartitionError> {
        let ranks = layers_per_rank.len() as u32;
        if ranks == 0 {
            return Err(PartitionError::Empty);
        }
        if tensor_size == 0 || !ranks.is_multiple_of(tensor_size) {
            return Err(PartitionError::Members { ranks, tensor_size });
        }
        if let Some(rank) = layers_per_rank.iter().position(|&count| count == 0) {
            return Err(PartitionError::EmptyRank(rank as u32));
        }
        let mut split: u32 = 0;
        for (stage, members) in layers_per_rank.chunks(tensor_size as usize).enumerate() {
            let first = members[0];
            split = split.saturating_add(first);
            if let Some(index) = members.iter().position(|&count| count != first) {
                let rank = stage as u32 * tensor_size + index as u32;
                return Err(PartitionError::UnequalMembers { rank, layers: members[index], first });
            }
        }
        if split != layers {
            return Err(PartitionError::WrongSum { split, model: layers });
        }
        Ok(Self { layers_per_rank, tensor_size })
    }

    /// That no stage begins within one of these runs of layers, as [`kept_together`] makes them.
    pub fn keeps_together(&self, runs: &[Range<u32>]) -> Result<(), PartitionError> {
        let stages = self.layers_per_rank.iter().step_by(self.tensor_size as usize).rev();
        let mut cut = 0_u32;
        for count in stages {
            if let Some(run) = runs.iter().find(|run| run.start < cut && cut < run.end) {
                return Err(PartitionError::SharedCache { first: run.start, last: run.end - 1, cut });
            }
            cut = cut.saturating_add(*count);
        }
        Ok(())
    }

    /// Ranks in the group.
    pub fn size(&self) -> u32 {
        self.layers_per_rank.len() as u32
    }

    /// The part of `rank`; `None` for a rank outside the group.
    pub fn part(&self, rank: u32) -> Option<RankPart> {
        let count = *self.layers_per_rank.get(rank as usize)?;
        let (stage, tensor_index) = (rank / self.tensor_size, rank % self.tensor_size);
        let stages = self.size() / self.tensor_size;
        let start: u32 =
            self.layers_per_rank.iter().step_by(self.tensor_size as usize).skip(stage as usize + 1).sum();
        Some(RankPart {
            rank,
            size: self.size(),
            stage,
            stages,
            tensor_index,
            tensor_size: self.tensor_size,
            layers: start..start + count,
            embedding: stage + 1 == stages,
            head: rank == 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stage, member, first layer, layer after the last, embedding, head.
    fn parts(
        layers_per_rank: &[u32],
        tensor_size: u32,
        layers: u32,
    ) -> Vec<(u32, u32, u32, u32, bool, bool)> {
        let partition = Partition::with_tensor(layers_per_rank.to_vec(), tensor_size, layers).unwrap();
        assert_eq!(partition.part(partition.size()), None);
        (0..partition.size())
            .map(|rank| {
                let part = partition.part(rank).unwrap();
                assert_eq!((part.rank, part.size), (rank, partition.size()));
                assert_eq!((part.stages, part.tensor_size), (partition.size() / tensor_size, tensor_size));
                let Range { start, end } = part.layers;
                (part.stage, part.tensor_index, start, end, part.embedding, part.head)
            })
            .collect()
    }

    #[test]
    fn rank_0_owns_the_head_and_the_highest_rank_the_embedding() {
        let expected = [(0, 0, 3, 5, false, true), (1, 0, 1, 3, false, false), (2, 0, 0, 1, true, false)];
        assert_eq!(parts(&[2, 2, 1], 1, 5), expected);
    }

    #[test]
    fn tensor_ranks_share_layers_and_rank_0_alone_has_the_head() {
        assert_eq!(parts(&[5, 5], 2, 5), [(0, 0, 0, 5, true, true), (0, 1, 0, 5, true, false)]);
        let expected = [
            (0, 0, 2, 5, false, true),
            (0, 1, 2, 5, false, false),
            (1, 0, 0, 2, true, false),
            (1, 1, 0, 2, true, false),
        ];
        assert_eq!(parts(&[3, 3, 2, 2], 2, 5), expected);
    }

    #[test]
    fn layers_that_share_a_cache_stay_on_one_stage() {
        // Two kinds that overlap, a run of its own, and owners that no model has.
        let shared = [(4, 2), (5, 3), (6, 2), (9, 8), (1, 1), (0, 7)];
        let runs = kept_together(shared);
        assert_eq!(runs, [2..7, 8..10]);
        let error = |cut, first, last| Err(PartitionError::SharedCache { first, last, cut });
        for (layers_per_rank, tensor_size, expected) in [
            (vec![10], 1, Ok(())),
            (vec![8, 2], 1, Ok(())),
            (vec![2, 1, 5, 1, 1], 1, Ok(())),
            (vec![8, 8, 2, 2], 2, Ok(())),
            (vec![7, 3], 1, error(3, 2, 6)),
            (vec![4, 4, 6, 6], 2, error(6, 2, 6)),
            (vec![1, 7, 2], 1, error(9, 8, 9)),
        ] {
            let partition = Partition::with_tensor(layers_per_rank, tensor_size, 10).unwrap();
            assert_eq!(partition.keeps_together(&runs), expected, "{partition:?}");
        }
        let said = error(3, 2, 6).unwrap_err().to_string();
        assert!(said.starts_with("layers 2 to 6 share keys and values"), "{said}");
    }

    #[test]
    fn impossible_splits_say_why() {
        use PartitionError::*;
        for (layers, tensor_size, error) in [
            (vec![], 1, Empty),
            (vec![4, 0], 1, EmptyRank(1)),
            (vec![2, 1], 1, WrongSum { split: 3, model: 4 }),
            (vec![2, 2], 2, WrongSum { split: 2, model: 4 }),
            (vec![2, 2, 2], 2, Members { ranks: 3, tensor_size: 2 }),
            (vec![4], 0, Members { ranks: 1, tensor_size: 0 }),
            (vec![2, 2, 2, 1], 2, UnequalMembers { rank: 3, layers: 1, first: 2 }),
        ] {
            assert_eq!(Partition::with_tensor(layers, tensor_size, 4), Err(error));
        }
    }
}
