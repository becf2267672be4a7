//! Rollout of a deployment's edits: strategy, auto-revert, and the history of plans that were tried.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Adapter, EngineOptions, LocalReference, Sharding};

/// How an edit is rolled out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Rollout {
    /// Whether the old and the new replica may run side by side.
    #[serde(default)]
    pub strategy: RolloutStrategy,
    /// What happens to a plan that never becomes ready.
    #[serde(default)]
    pub auto_revert: AutoRevert,
}

/// Whether the old and the new replica may run side by side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RolloutStrategy {
    /// The new replica starts first if both fit; else the old one stops first, once the new one's files are
    /// there.
    #[default]
    SurgeIfFits,
    /// The old replica always stops first, once the new one's files are there.
    DrainThenReplace,
    /// A value from a newer release; treated like SurgeIfFits.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// What happens to a plan that never becomes ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AutoRevert {
    /// The last known good spec replaces it, until the spec is edited.
    #[default]
    Enabled,
    /// The plan is retried forever.
    Disabled,
    /// A value from a newer release; treated like Disabled.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// History of plans that were tried.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStatus {
    /// Last known good: the last spec with which all replicas became ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proven: Option<LastKnownGood>,
    /// The requested spec that never became ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<FailedRollout>,
}

/// A spec that became ready.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastKnownGood {
    /// Digest of the spec.
    pub intent: String,
    /// Its Model.
    pub model_ref: LocalReference,
    /// Its draft model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_model_ref: Option<LocalReference>,
    /// Its adapters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub adapters: Vec<Adapter>,
    /// Its split.
    pub sharding: Sharding,
    /// Its engine options.
    #[serde(default, skip_serializing_if = "EngineOptions::is_default")]
    pub engine: EngineOptions,
}

/// A spec that never became ready.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FailedRollout {
    /// Digest of the spec.
    pub intent: String,
    /// Why it failed.
    #[schemars(length(max = 2048))]
    pub message: String,
}
