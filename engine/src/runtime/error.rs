//! Runtime errors of a rank.

use russet_model::{kv_quantization::KV_GROUPS, partition::PartitionError};
use thiserror::Error;

use crate::{
    decoder::DecoderError,
    executor::{Addresses, ExecutorError},
    weights::WeightsError,
};

/// A runtime error of a rank.
#[derive(Debug, Error)]
pub enum RuntimeError {
    /// A tensor size that the layers are not divisible by.
    #[error("the model's layers cannot be shared by {size} ranks: {reason}; use a tensor size of {sizes:?}")]
    TensorSize {
        /// Ranks of a stage.
        size: u32,
        /// What is not divisible.
        reason: String,
        /// Sizes that are possible.
        sizes: Vec<u32>,
    },
    /// Heads whose keys and values cannot be quantised.
    #[error(
        "config.json: head_dim is {head_dim}, which groups of {} do not divide, so its keys and values cannot be quantised; use options.kvCache AsComputed (spec.engine.kvCache of a deployment)",
        KV_GROUPS.map(|group| group.to_string()).join(" or ")
    )]
    KvFormat {
        /// Width of a head.
        head_dim: u32,
    },
    /// Invalid split over ranks.
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
    /// Loading the weights or building the model failed.
    #[error(transparent)]
    Model(#[from] DecoderError),
    /// Joining the group failed.
    #[error("rank {rank} cannot join its group at {addresses:?}: {reason}; the group has to be formed again")]
    Join {
        /// The rank.
        rank: u32,
        /// Addresses of the rings.
        addresses: Addresses,
        /// Why.
        reason: String,
    },
    /// A command before [`Executor::load`] or [`Executor::join`].
    #[error("rank {rank} was asked to {asked} before it could; load, then join, then step")]
    NotReady {
        /// The rank.
        rank: u32,
        /// The command.
        asked: &'static str,
    },
    /// Ranks disagree about the length of a sequence.
    #[error(
        "slot {slot} holds {have} tokens, but the step starts at {offset}; ranks are out of step, the group has to be formed again"
    )]
    OffsetMismatch {
        /// Its slot.
        slot: u32,
        /// Tokens in the KV cache.
        have: u32,
        /// Offset of the step.
        offset: u32,
    },
    /// A sequence that a layer cannot rewind.
    #[error(
        "slot {slot} holds {have} tokens and cannot go back to {length}: a layer of this model keeps no earlier state; report this as a bug, and meanwhile set spec.engine.speculation: Off"
    )]
    Rewind {
        /// Its slot.
        slot: u32,
        /// Tokens in its caches.
        have: u32,
        /// Tokens that were to stay.
        length: u32,
    },
    /// A slot that has no snapshot.
    #[error("slot {slot} was to go back to a snapshot that it has not; report this as a bug")]
    Restore {
        /// The slot.
        slot: u32,
    },
    /// A step without tokens, or with tokens outside the vocabulary.
    #[error(
        "a step needs at least one token below {vocabulary}, but holds {tokens} tokens, the largest {largest:?}"
    )]
    Tokens {
        /// Tokens in the step.
        tokens: usize,
        /// Largest token id.
        largest: Option<u32>,
        /// Size of the vocabulary.
        vocabulary: u32,
    },
    /// A batch after one in which the connection to another rank failed: MLX waits forever once it has failed
    /// twice.
    #[error("rank {rank} of {size} takes no batch any more: the one before it lost another rank")]
    LeavingGroup {
        /// The rank.
        rank: u32,
        /// Ranks in the group.
        size: u32,
    },
    /// MLX failed in a step; in a group, usually because a neighbour is lost.
    #[error("MLX failed on rank {rank} of {size}: {reason}")]
    Mlx {
        /// The rank.
        rank: u32,
        /// Ranks in the group.
        size: u32,
        /// MLX's message.
        reason: String,
    },
}

impl From<WeightsError> for RuntimeError {
    fn from(error: WeightsError) -> Self {
        Self::Model(error.into())
    }
}

impl RuntimeError {
    /// Whether the connection to another rank failed. MLX's messages about its rings start like this.
    pub(super) fn is_group_failure(&self) -> bool {
        match self {
            Self::Join { .. } | Self::LeavingGroup { .. } => true,
            Self::Mlx { size, reason, .. } => *size > 1 && reason.contains("[ring]"),
            _ => false,
        }
    }
}

impl RuntimeError {
    /// Whether the same files and the same split are refused again whenever they are tried.
    fn is_refusal(&self) -> bool {
        match self {
            Self::TensorSize { .. } | Self::KvFormat { .. } | Self::Partition(_) => true,
            Self::Model(error) => match error {
                DecoderError::Weights(error) => error.is_refusal(),
                DecoderError::Rope(_) => true,
                DecoderError::Mlx(_) | DecoderError::NotOnThisRank(_) => false,
            },
            _ => false,
        }
    }
}

impl From<RuntimeError> for ExecutorError {
    fn from(error: RuntimeError) -> Self {
        let reason = error.to_string();
        match (error.is_group_failure(), error.is_refusal()) {
            (true, _) => Self::Group(reason),
            (false, true) => Self::Refused(reason),
            (false, false) => Self::Local(reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use russet_model::error::{FileError, Unsupported};

    use super::*;

    #[test]
    fn unusable_splits_and_formats_say_what_to_use_instead() {
        let size = RuntimeError::TensorSize {
            size: 3,
            reason: "4 heads are not divisible".into(),
            sizes: vec![1, 2],
        };
        let format = RuntimeError::KvFormat { head_dim: 48 };
        for (error, expected) in [
            (
                size,
                "the model's layers cannot be shared by 3 ranks: 4 heads are not divisible; use a tensor size of [1, 2]",
            ),
            (
                format,
                "config.json: head_dim is 48, which groups of 64 or 32 do not divide, so its keys and values cannot be quantised; use options.kvCache AsComputed (spec.engine.kvCache of a deployment)",
            ),
        ] {
            assert_eq!(error.to_string(), expected);
            // Another rank is no part of it: the group need not be formed again.
            assert!(matches!(ExecutorError::from(error), ExecutorError::Refused(_)));
        }
    }

    #[test]
    fn only_what_fails_again_is_a_refusal() {
        let weights = |error: WeightsError| RuntimeError::from(error);
        let missing = FileError::Missing { file: "model.safetensors".into() };
        let io = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        for (error, refused) in [
            (weights(WeightsError::File { folder: "/m".into(), source: missing }), true),
            (weights(Unsupported::field("hidden_act", "gelu", "use another").into()), true),
            (weights(WeightsError::Io { path: "/m".into(), source: io }), false),
            (weights(WeightsError::Mlx { tensor: "t".into(), reason: "no memory".into() }), false),
            (RuntimeError::Mlx { rank: 0, size: 1, reason: "no memory".into() }, false),
        ] {
            let text = error.to_string();
            assert_eq!(matches!(ExecutorError::from(error), ExecutorError::Refused(_)), refused, "{text}");
        }
    }
}
