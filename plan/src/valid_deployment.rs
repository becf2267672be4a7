//! A deployment whose spec is valid for its model: what placement and rollout plan with. `validate` makes it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use jiff::Timestamp;
use russet_crds::{ADAPTERS, BackendChoice, DRAFT_MODEL, GroupPlan, Sharding};
use russet_model::shape::ModelShape;

use crate::group_info::{GroupInfo, ObjectKey};
use crate::memory_model::{DeployedAdapter, DraftModelShape, MemoryModel, ServingCapacity};
use crate::pool::EligibleNodes;

/// A deployment that is valid for its model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidDeployment {
    /// Namespace of the ModelDeployment.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Name of the Model.
    pub model: String,
    /// Sizes of the model.
    pub shape: ModelShape,
    /// The draft model.
    pub draft: Option<DraftModelShape>,
    /// The adapters, by name.
    pub adapters: Vec<DeployedAdapter>,
    /// The requested split, as written.
    pub sharding: Sharding,
    /// Source of the split, for display: `spec.sharding`, or the object whose spec it is.
    pub split_source: String,
    /// The requested split.
    pub split: Split,
    /// The requested backend of tensor groups.
    pub backend: BackendChoice,
    /// KV-cache capacity.
    pub capacity: ServingCapacity,
    /// Eligible nodes; each replica is in one of these sets. Never empty.
    pub eligible_nodes: Vec<EligibleNodes>,
    /// Digest of the requested spec.
    pub spec_digest: String,
    /// Why the last known good spec is planned instead of the requested one.
    pub rollback_reason: Option<String>,
    /// Whether a running replica always stops before its replacement starts.
    pub drain_first: bool,
    /// Its Tier.
    pub tier: Option<String>,
    /// Its tier's priority.
    pub priority: i32,
    /// Whether it may preempt replicas of lower priority.
    pub preempts: bool,
    /// Whether that holds for replicas of other namespaces without an Approval.
    pub preempts_everywhere: bool,
    /// Plans that an Approval allows, each with the deployments that it names.
    pub approved: BTreeMap<String, BTreeSet<String>>,
    /// The plan that its own spec allows. Its author answers for its own namespace alone.
    pub approved_plan: Option<String>,
    /// Denied plans.
    pub denied: BTreeSet<String>,
    /// Why none of its replicas should run, although some are requested.
    pub idle_reason: Option<IdleReason>,
    /// How many of its replicas ran before: a replica that is replaced gets its memory back, an additional
    /// one does not.
    pub ran_before: i32,
    /// The Dedicated tier and the workload group whose nodes it shares.
    pub dedicated_group: Option<(String, String)>,
    /// Replicas; 0 stops the deployment.
    pub replicas: i32,
    /// The label of nodes whose values are the failure domains of its replicas.
    pub topology_key: String,
}

impl ValidDeployment {
    /// Its namespace and name.
    pub fn key(&self) -> ObjectKey {
        (self.namespace.clone(), self.name.clone())
    }

    /// Its memory model.
    pub fn memory_model(&self) -> MemoryModel<'_> {
        MemoryModel::new(&self.shape, self.capacity)
            .with_draft(self.draft.as_ref())
            .with_adapters(&self.adapters)
    }

    /// Options that engines must support to run it, named as in `InferenceNode.status.engineOptions`.
    pub fn engine_options(&self) -> impl Iterator<Item = &'static str> {
        let draft = self.draft.as_ref().map(|_| DRAFT_MODEL);
        let adapters = (!self.adapters.is_empty()).then_some(ADAPTERS);
        self.capacity.engine.non_default().chain(draft).chain(adapters)
    }

    /// Names of the Models of its adapters, each once.
    pub fn adapter_models(&self) -> impl Iterator<Item = &str> {
        let models = self.adapters.iter().map(|deployed| deployed.adapter.model_ref.name.as_str());
        models.collect::<BTreeSet<_>>().into_iter()
    }

    /// A replica of it that is planned and not ready yet.
    pub fn new_group(&self, replica: i32, plan: GroupPlan) -> GroupInfo {
        GroupInfo {
            deployment: self.name.clone(),
            model: self.model.clone(),
            replica,
            pools: self.pools(),
            tier: self.tier.clone(),
            resident_until: None,
            plan,
            measured: None,
            ready: false,
            deleting: false,
        }
    }

    /// The requested NodePools.
    pub fn pools(&self) -> Vec<String> {
        self.eligible_nodes.iter().filter_map(|area| area.pool.clone()).collect()
    }

    /// Whether ranks on these nodes may form one replica.
    pub fn allows<'a>(&self, nodes: impl Iterator<Item = &'a str> + Clone) -> bool {
        self.eligible_nodes.iter().any(|area| nodes.clone().all(|node| area.contains(node)))
    }
}

/// The requested split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Split {
    /// One node if the model fits one, else as few as hold it.
    Auto,
    /// One node.
    Single,
    /// A pipeline over as few nodes as hold it, two at least.
    Pipeline,
    /// A pipeline over this many nodes.
    Ranks(u32),
    /// A pipeline with exactly these layers on each rank.
    Layers(Vec<u32>),
    /// Tensor parallelism over all ranks: this many, or as few as hold it.
    Tensor(Option<u32>),
    /// A pipeline of tensor groups.
    Hybrid(HybridConstraints),
}

/// Constraints of a pipeline of tensor groups; the planner chooses the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HybridConstraints {
    /// Stages.
    pub stages: Option<u32>,
    /// Ranks of every stage.
    pub size: Option<u32>,
    /// Ranks in all.
    pub ranks: Option<u32>,
    /// Layers of every stage, the last stage first.
    pub layers: Option<Vec<u32>>,
}

impl HybridConstraints {
    /// Whether these layers per stage and members per stage satisfy the constraints.
    pub fn allows(&self, layers: &[u32], size: u32) -> bool {
        let stages = layers.len() as u32;
        self.stages.is_none_or(|required| required == stages)
            && self.size.is_none_or(|required| required == size)
            && self.ranks.is_none_or(|required| required == stages * size)
            && self.layers.as_ref().is_none_or(|required| required == layers)
    }
}

/// Why a deployment's replicas should not run for now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdleReason {
    /// It is outside its tier's schedules.
    Schedule {
        /// The tier.
        tier: String,
        /// When the next active hours start.
        opens: Option<Timestamp>,
    },
    /// There are no requests.
    Idle {
        /// The tier.
        tier: String,
    },
}

impl fmt::Display for IdleReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IdleReason::Schedule { tier, opens: Some(opens) } => {
                write!(out, "stopped by the schedules of Tier {tier} until {opens}")
            }
            IdleReason::Schedule { tier, opens: None } => write!(
                out,
                "stopped by the schedules of Tier {tier}, which have no time within a week; edit its spec.schedules"
            ),
            IdleReason::Idle { tier } => {
                write!(
                    out,
                    "it has no requests, so Tier {tier} (OnDemand) reserves no memory for it; it starts with the next request"
                )
            }
        }
    }
}
