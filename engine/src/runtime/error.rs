//! Why a rank cannot do what it was asked for.

use russet_wire::partition::PartitionError;
use thiserror::Error;

use crate::{
    executor::{Addresses, ExecutorError},
    models::{ConfigError, ModelError},
    weights::WeightsError,
};

/// A rank that cannot do what was asked.
#[derive(Debug, Error)]
pub enum RuntimeError {
    /// The configuration of the model.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The split over ranks.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// A rank outside the group.
    #[error("rank {rank} is not in a group of {size}; ranks count from 0")]
    Rank {
        /// The rank.
        rank: u32,
        /// Ranks in the group.
        size: u32,
    },
    /// Loading weights or building the model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Joining the group.
    #[error("rank {rank} cannot join its group at {addresses:?}: {reason}; the group has to be formed again")]
    Join {
        /// The rank.
        rank: u32,
        /// Where MLX was to meet the others.
        addresses: Addresses,
        /// Why.
        reason: String,
    },
    /// Something before [`Compute::load`] or [`Compute::join`].
    #[error("rank {rank} was asked to {asked} before it could; load, then join, then step")]
    NotReady {
        /// The rank.
        rank: u32,
        /// What was asked.
        asked: &'static str,
    },
    /// Ranks disagree about a sequence.
    #[error(
        "slot {slot} holds {have} tokens, but the step starts at {wanted}; ranks are out of step, the group has to be formed again"
    )]
    OffsetMismatch {
        /// The sequence.
        slot: u32,
        /// Tokens in the cache.
        have: u32,
        /// Offset of the step.
        wanted: u32,
    },
    /// A step without tokens, or with tokens the model does not have.
    #[error(
        "a step needs at least one token below {vocabulary}, but holds {tokens} tokens, the largest {largest:?}"
    )]
    Tokens {
        /// Tokens in the step.
        tokens: usize,
        /// Largest id.
        largest: Option<u32>,
        /// Tokens of the vocabulary.
        vocabulary: u32,
    },
    /// A batch that came after one in which the way to another rank broke: MLX waits for ever where it has failed twice.
    #[error("rank {rank} of {size} takes no batch any more: the one before it lost another rank")]
    LeavingGroup {
        /// The rank.
        rank: u32,
        /// Ranks in the group.
        size: u32,
    },
    /// MLX failed in a step; in a group, mostly because a neighbour is lost.
    #[error("MLX failed on rank {rank} of {size}: {reason}")]
    Mlx {
        /// The rank.
        rank: u32,
        /// Ranks in the group.
        size: u32,
        /// MLX's words.
        reason: String,
    },
}

impl From<WeightsError> for RuntimeError {
    fn from(error: WeightsError) -> Self {
        Self::Model(error.into())
    }
}

impl RuntimeError {
    /// Whether the way to another rank is what broke. MLX begins what it says of its rings so.
    pub(super) fn is_group_failure(&self) -> bool {
        match self {
            Self::Join { .. } | Self::LeavingGroup { .. } => true,
            Self::Mlx { size, reason, .. } => *size > 1 && reason.contains("[ring]"),
            _ => false,
        }
    }
}

impl From<RuntimeError> for ExecutorError {
    fn from(error: RuntimeError) -> Self {
        let reason = error.to_string();
        if error.is_group_failure() { Self::Group(reason) } else { Self::Local(reason) }
    }
}
