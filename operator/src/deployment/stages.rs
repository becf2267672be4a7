//! The stages of a deployment's reconciliation: what was observed, what is planned, what was applied. Not here:
//! how one becomes the next (`observe`, `decide`, `apply`).

use std::sync::Arc;

use jiff::Timestamp;
use russet_crds::{Model, ModelCopySpec, ModelDeployment, ShardGroup};
use russet_plan::precondition::UnmetPrecondition;
use russet_plan::{Note, Placement, Snapshot, ValidDeployment};

/// A deployment at a stage of its reconciliation.
#[derive(Clone, Debug)]
pub struct Resources<Stage> {
    /// The deployment.
    pub deployment: Arc<ModelDeployment>,
    /// The state of this stage.
    pub stage: Stage,
}

/// A deployment and everything that its plan depends on.
#[derive(Clone, Debug)]
pub struct ObservedDeployment {
    /// The time of the snapshot.
    pub now: Timestamp,
    /// The existing Models that it names, and those of its last known good spec, which is planned if the
    /// requested one never becomes ready.
    pub models: Vec<Arc<Model>>,
    /// The cluster.
    pub view: Arc<Snapshot>,
    /// The other deployments, each with its Models; only if something is about to be placed.
    pub competitors: Vec<Competitor>,
    /// The deployment's own groups, including those being deleted.
    pub groups: Vec<Arc<ShardGroup>>,
}

/// Another deployment, with its Models.
pub type Competitor = (Arc<ModelDeployment>, Vec<Arc<Model>>);

/// The writes for a deployment.
#[derive(Clone, Debug)]
pub struct PlannedDeployment {
    /// The observed state.
    pub observed: ObservedDeployment,
    /// The deployment, if valid.
    pub valid: Option<ValidDeployment>,
    /// Why it cannot be planned, if it cannot.
    pub unmet_precondition: Option<UnmetPrecondition>,
    /// Which groups stay, are created and are deleted.
    pub placement: Placement,
    /// Why.
    pub notes: Vec<Note>,
    /// Files wanted on nodes.
    pub copies: Vec<ModelCopySpec>,
}

/// The state after the writes.
#[derive(Clone, Debug)]
pub struct AppliedDeployment {
    /// The applied plan.
    pub planned: PlannedDeployment,
    /// The deployment's groups that stay, including new ones.
    pub groups: Vec<Arc<ShardGroup>>,
    /// Number of groups that are being deleted.
    pub leaving: usize,
}
