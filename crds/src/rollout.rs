//! How a deployment gets from one plan to the next, and what is known of plans that were tried.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{EngineOptions, LocalReference, Sharding};

/// How an edit is carried out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Rollout {
    /// Whether old and new may run side by side.
    #[serde(default)]
    pub strategy: RolloutStrategy,
    /// What becomes of a plan that never comes to answer.
    #[serde(default)]
    pub auto_revert: AutoRevert,
}

/// Whether old and new may run side by side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RolloutStrategy {
    /// The new one comes first where both fit; else the old one makes room, once the files of the new one are there.
    #[default]
    SurgeIfFits,
    /// The old one always goes first, once the files of the new one are there.
    DrainThenReplace,
    /// A word of a newer release; as SurgeIfFits.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// What becomes of a plan that never comes to answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AutoRevert {
    /// What answered last takes its place, until the spec is edited.
    #[default]
    Enabled,
    /// It is tried again and again.
    Disabled,
    /// A word of a newer release; as Disabled.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// What is known of plans that were tried.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStatus {
    /// What answered last with all its replicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proven: Option<LastKnownGood>,
    /// What is asked for and never came to answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<FailedRollout>,
}

/// Something that answered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastKnownGood {
    /// Digest of what was asked for.
    pub intent: String,
    /// Its Model.
    pub model_ref: LocalReference,
    /// The Model that guessed for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_model_ref: Option<LocalReference>,
    /// Its split.
    pub sharding: Sharding,
    /// How its engines computed.
    #[serde(default, skip_serializing_if = "EngineOptions::is_default")]
    pub engine: EngineOptions,
}

/// Something that never came to answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FailedRollout {
    /// Digest of what was asked for.
    pub intent: String,
    /// Why.
    #[schemars(length(max = 2048))]
    pub message: String,
}
