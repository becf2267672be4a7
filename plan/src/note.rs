//! Notes: the explanation of a decision. Every note names the object and the numbers, and the last one of a
//! refusal names the remedy. Notes are shown in conditions, in the placement report and by `russet plan`. Not
//! here: logs; the sentences (`words`).

mod display;

use jiff::Timestamp;
use russet_crds::Backend;
use russet_crds::conditions::Reason;

use crate::link_demand::LinkDemand;
use crate::memory_model::{AdapterOverhead, DraftOverhead, MemoryEstimate};
use crate::node_info::Availability;
use crate::shortage::Shortage;

/// One note of the planner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// The named Model does not exist, or its headers are not read yet.
    ModelUnknown {
        /// The Model.
        model: String,
    },
    /// The engine does not support the architecture.
    Architecture {
        /// The Model.
        model: String,
        /// Its architecture.
        architecture: String,
    },
    /// The engine knows the architecture, and lacks something that the model uses.
    Unsupported {
        /// The Model.
        model: String,
        /// What, where and what to do.
        why: String,
    },
    /// The headers contradict themselves.
    Headers {
        /// The Model.
        model: String,
        /// The contradiction.
        why: String,
    },
    /// The spec contradicts itself or the model.
    Invalid {
        /// The field, as a path.
        field: String,
        /// What is wrong, and the remedy.
        why: String,
    },
    /// The spec uses a value from a newer release.
    Newer {
        /// The field, as a path.
        field: String,
    },
    /// The named ShardingStrategy does not exist.
    StrategyUnknown {
        /// The ShardingStrategy.
        strategy: String,
        /// Existing ones.
        known: Vec<String>,
    },
    /// The named Tier does not exist.
    TierUnknown {
        /// The Tier.
        tier: String,
        /// Existing ones.
        known: Vec<String>,
    },
    /// The named Tier is not for this namespace.
    TierNotAllowed {
        /// The Tier.
        tier: String,
        /// The deployment's namespace.
        namespace: String,
    },
    /// A workload group has no node yet that takes work.
    NoDedicatedNodes {
        /// The Tier.
        tier: String,
        /// The workload group.
        group: String,
    },
    /// A named NodePool does not exist.
    PoolUnknown {
        /// The NodePool.
        pool: String,
        /// Existing ones.
        known: Vec<String>,
    },
    /// A NodePool is invalid.
    PoolInvalid {
        /// The NodePool.
        pool: String,
        /// Why.
        why: Box<Note>,
    },
    /// No node of the NodePools can take work.
    NoNodesInPools {
        /// The NodePools.
        pools: Vec<String>,
        /// How many nodes they have together.
        nodes: usize,
    },
    /// Nodes are not linked as required for a group.
    NotLinked {
        /// The object with the requirement.
        demanded_by: String,
        /// The requirement.
        demand: LinkDemand,
        /// Which pairs lack what.
        why: String,
    },
    /// A replica stays outside its deployment's NodePools, because its nodes left them.
    OutsidePools {
        /// The ShardGroup.
        group: String,
        /// Its nodes that are in none of them, or all if no pool has all.
        nodes: Vec<String>,
        /// The NodePools.
        pools: Vec<String>,
    },
    /// A replica is not ready, and cables that it uses are gone.
    CableLost {
        /// The ShardGroup.
        group: String,
        /// Which cable.
        why: String,
    },
    /// A node cannot take new work.
    NodeUnavailable {
        /// The node.
        node: String,
        /// Why.
        availability: Availability,
    },
    /// The model's files do not fit on a node.
    Disk {
        /// Why.
        shortage: Shortage,
    },
    /// A node lacks the backend that groups of several ranks need.
    NoRing {
        /// The node.
        node: String,
    },
    /// The engine of a node lacks a requested option.
    NoEngineOption {
        /// The node.
        node: String,
        /// Its build.
        build: Option<String>,
        /// The option, named as in `InferenceNode.status.engineOptions`.
        option: &'static str,
    },
    /// The engine of a node does not support tensor parallelism.
    NoTensorParallelism {
        /// The node.
        node: String,
        /// Its build.
        build: Option<String>,
    },
    /// Nodes have different engine builds and cannot share a group.
    MixedBuilds {
        /// Each build and its nodes.
        builds: Vec<(String, Vec<String>)>,
    },
    /// The cables between nodes do not support the requested backend.
    MissingCables {
        /// The backend.
        backend: Backend,
        /// Which pair lacks what.
        why: String,
    },
    /// The cables exist, but are in use for a while.
    PortsBusy {
        /// The backend, for display.
        backend: &'static str,
        /// Which port, and its user.
        why: String,
    },
    /// A node has too little memory for one rank of the split that was tried.
    TooSmall {
        /// The node.
        node: String,
        /// The part of the model.
        what: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
        /// Bytes that models may take there in all.
        limit: u64,
    },
    /// Several nodes together have too little memory.
    TooSmallTogether {
        /// The nodes.
        nodes: Vec<String>,
        /// Bytes all ranks need together.
        needed: u64,
        /// Bytes free on all of them.
        free: u64,
    },
    /// The search for a balanced split took too many steps.
    SearchGivenUp {
        /// Layers of the model.
        layers: u32,
        /// Stages.
        stages: usize,
        /// Steps that were taken.
        steps: u64,
    },
    /// The cables exist, but are in use by groups that stay.
    PortsTaken {
        /// The backend, for display.
        backend: &'static str,
        /// Which port, and its user.
        why: String,
    },
    /// More ranks are wanted than nodes take work.
    TooFewNodes {
        /// Ranks wanted.
        ranks: u32,
        /// Nodes with equal engines that take work.
        nodes: usize,
    },
    /// No node takes work.
    NoNodes,
    /// The conclusion of a refusal.
    NothingFits {
        /// Index of the replica.
        replica: i32,
        /// Memory of the whole model on one node.
        needed: MemoryEstimate,
        /// The draft model's part of it.
        draft: Option<Box<DraftOverhead>>,
        /// The adapters' part of it.
        adapters: AdapterOverhead,
        /// Nodes with enough memory that take no work.
        closed: Vec<String>,
        /// Nodes whose disks cannot hold the files.
        full: Vec<String>,
        /// Whether RDMA ports in use are what is missing, and not memory.
        ports: bool,
    },
    /// A replica waits although it fits, because other pending replicas score higher.
    Outweighed {
        /// Index of the replica.
        replica: i32,
        /// The deployments that get the memory.
        by: Vec<String>,
    },
    /// Replicas of lower priority are preempted for one that fits nowhere.
    Preempts {
        /// Index of the replica.
        replica: i32,
        /// Their deployments.
        deployments: Vec<String>,
        /// Bytes they hold.
        frees: u64,
    },
    /// They will be preempted, once they have run for their minimum residency.
    Resident {
        /// Index of the replica.
        replica: i32,
        /// Their deployments.
        deployments: Vec<String>,
        /// Bytes they hold.
        frees: u64,
        /// When they have.
        until: Timestamp,
    },
    /// They could be preempted, if the tier of the waiting replica allowed it.
    CouldPreempt {
        /// Index of the replica.
        replica: i32,
        /// Their deployments.
        deployments: Vec<String>,
        /// Bytes they hold.
        frees: u64,
        /// The tier of the waiting replica.
        tier: Option<String>,
    },
    /// An Approval is needed first.
    AwaitsApproval {
        /// Index of the replica.
        replica: i32,
        /// Hash of the plan to approve.
        hash: String,
        /// Deployments whose replicas would be stopped; none if the replica itself is to be replaced.
        deployments: Vec<String>,
        /// Bytes they hold.
        frees: u64,
        /// Whether some are of other namespaces, which the deployment's own `spec.approvedPlan` cannot speak
        /// for.
        foreign: bool,
    },
    /// A person denied it.
    Denied {
        /// Index of the replica.
        replica: i32,
        /// Hash of the denied plan.
        hash: String,
    },
    /// A running replica stays although the spec changed, because its replacement fits nowhere.
    OutdatedStays {
        /// The ShardGroup.
        group: String,
    },
    /// A replica stays as it is until another one has been replaced.
    WaitsForRollout {
        /// Index of the replica.
        replica: i32,
    },
    /// Files are fetched first, before anything stops for a replica.
    FetchFirst {
        /// Index of the replica.
        replica: i32,
        /// Nodes that lack them.
        nodes: Vec<String>,
    },
    /// A replica must stop before its replacement can start.
    DrainFirst {
        /// The ShardGroup.
        group: String,
        /// Why they cannot run side by side.
        why: DrainReason,
    },
    /// A replica will fit once agents release the memory of deleted groups.
    WaitingForRelease {
        /// Index of the replica.
        replica: i32,
        /// The holders of the memory, with the bytes.
        holders: Vec<String>,
    },
    /// A replica is placed in a failure domain of other replicas of its deployment.
    SharedFailureDomain {
        /// Index of the replica.
        replica: i32,
        /// The label of the failure domains.
        key: String,
        /// Its values there.
        domains: Vec<String>,
        /// The others.
        with: Vec<i32>,
        /// The best candidate that shares its domains with fewer of them; `None` if none fits.
        apart: Option<String>,
    },
    /// A replica was placed.
    Placed {
        /// Index of the replica.
        replica: i32,
        /// Split and nodes.
        decision: String,
    },
}

/// Why a replica stops before its replacement starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainReason {
    /// The nodes have no memory for both.
    Memory,
    /// An RDMA port serves one group only.
    Ports,
    /// Its deployment requests it.
    Requested,
    /// It has lost a node permanently, and its memory on other nodes would make its replacement need more of
    /// them.
    NodeLost,
}

impl Note {
    /// The condition reason of this note.
    pub fn reason(&self) -> Reason {
        match self {
            Note::ModelUnknown { .. } => Reason::ModelNotFound,
            Note::Architecture { .. } => Reason::UnsupportedArchitecture,
            Note::Unsupported { .. } => Reason::UnsupportedModel,
            Note::Headers { .. } => Reason::CorruptModel,
            Note::Invalid { .. } => Reason::InvalidSpec,
            Note::Newer { .. } => Reason::NewerRelease,
            Note::NodeUnavailable { .. } => Reason::Unschedulable,
            Note::NoNodes | Note::NoNodesInPools { .. } => Reason::NoNodes,
            Note::StrategyUnknown { .. } => Reason::StrategyNotFound,
            Note::TierUnknown { .. } => Reason::TierNotFound,
            Note::TierNotAllowed { .. } => Reason::TierNotAllowed,
            Note::NoDedicatedNodes { .. } => Reason::NoNodes,
            Note::PoolUnknown { .. } => Reason::PoolNotFound,
            Note::PoolInvalid { why, .. } => why.reason(),
            Note::OutsidePools { .. } => Reason::OutsidePools,
            Note::CableLost { .. } => Reason::CableLost,
            Note::NoRing { .. }
            | Note::NoEngineOption { .. }
            | Note::NoTensorParallelism { .. }
            | Note::TooSmall { .. }
            | Note::TooSmallTogether { .. }
            | Note::SearchGivenUp { .. }
            | Note::MixedBuilds { .. }
            | Note::NotLinked { .. }
            | Note::MissingCables { .. }
            | Note::PortsBusy { .. }
            | Note::PortsTaken { .. }
            | Note::TooFewNodes { .. }
            | Note::NothingFits { .. }
            | Note::CouldPreempt { .. }
            | Note::OutdatedStays { .. } => Reason::NothingFits,
            Note::Disk { shortage: lack } => lack.reason(),
            Note::Outweighed { .. } => Reason::Outweighed,
            Note::Preempts { .. } => Reason::Preempting,
            Note::Resident { .. } => Reason::Resident,
            Note::AwaitsApproval { .. } => Reason::AwaitingApproval,
            Note::Denied { .. } => Reason::Denied,
            Note::WaitsForRollout { .. } | Note::DrainFirst { .. } => Reason::InProgress,
            Note::FetchFirst { .. } => Reason::WaitingForCopies,
            Note::WaitingForRelease { .. } => Reason::WaitingForAgent,
            Note::Placed { .. } | Note::SharedFailureDomain { .. } => Reason::PlanFound,
        }
    }
}
/// The draft model's share of a memory need, as text after it.
pub fn draft_share(draft: Option<&DraftOverhead>) -> String {
    draft.map(|draft| format!(", of it {draft}")).unwrap_or_default()
}

/// Notes as one text for a condition, with a limited length.
pub fn join(notes: &[Note]) -> String {
    // The Kubernetes limit for a condition's message is 32768; a screenful is easier to read.
    const LIMIT: usize = 2000;
    let mut text = String::new();
    for (index, note) in notes.iter().enumerate() {
        let next = note.to_string();
        if text.len() + next.len() > LIMIT {
            text.push_str(&format!("; and {} more", notes.len() - index));
            break;
        }
        if index > 0 {
            text.push_str("; ");
        }
        text.push_str(&next);
    }
    text
}
