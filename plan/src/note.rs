//! Why: everything a decision has to say to a person. Every note names the object and the numbers,
//! and the last one of a refusal names the remedy. Not a log; notes are shown in conditions, in the
//! placement report and by `russet plan`. The sentences are in `words`.

mod display;

use jiff::Timestamp;
use russet_crds::Backend;
use russet_crds::conditions::Reason;

use crate::copies::Shortage;
use crate::memory_model::{DraftOverhead, MemoryEstimate};
use crate::pool::LinkDemand;
use crate::snapshot::Availability;

/// One remark of the planner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// The named Model does not exist, or its headers are not read yet.
    ModelUnknown {
        /// The Model.
        model: String,
    },
    /// The engine does not know the architecture.
    Architecture {
        /// The Model.
        model: String,
        /// Its architecture.
        architecture: String,
    },
    /// The headers contradict themselves.
    Headers {
        /// The Model.
        model: String,
        /// How.
        why: String,
    },
    /// The spec contradicts itself or the model.
    Invalid {
        /// The field, as a path.
        field: String,
        /// What is wrong and what to do.
        why: String,
    },
    /// The spec uses a word of a newer release.
    Newer {
        /// The field, as a path.
        field: String,
    },
    /// The named ShardingStrategy does not exist.
    StrategyUnknown {
        /// The ShardingStrategy.
        strategy: String,
        /// Those there are.
        known: Vec<String>,
    },
    /// The named Tier does not exist.
    TierUnknown {
        /// The Tier.
        tier: String,
        /// Those there are.
        known: Vec<String>,
    },
    /// A workload group has no node yet that could take work.
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
        /// Those there are.
        known: Vec<String>,
    },
    /// A NodePool makes no sense.
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
    /// Nodes are not joined as is asked of those that share a group.
    NotLinked {
        /// Who asks.
        demanded_by: String,
        /// What is asked.
        demand: LinkDemand,
        /// Which pairs lack what.
        why: String,
    },
    /// A replica stays outside its deployment's NodePools, because its nodes left them.
    OutsidePools {
        /// The ShardGroup.
        group: String,
        /// Its nodes that are in none of them, or all when no pool has all.
        nodes: Vec<String>,
        /// The NodePools.
        pools: Vec<String>,
    },
    /// A replica does not answer, and cables that it runs over are not there any more.
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
    /// The model's files cannot come to a node.
    Disk {
        /// Why.
        shortage: Shortage,
    },
    /// A node lacks the backend groups of several ranks need.
    NoRing {
        /// The node.
        node: String,
    },
    /// The engine of a node has not an option that is asked for.
    NoEngineOption {
        /// The node.
        node: String,
        /// Its build.
        build: Option<String>,
        /// The option, in the words of `InferenceNode.status.engineOptions`.
        option: &'static str,
    },
    /// The engine of a node cannot hold parts of layers.
    NoTensorParallelism {
        /// The node.
        node: String,
        /// Its build.
        build: Option<String>,
    },
    /// Nodes have different engines and cannot share a group.
    MixedBuilds {
        /// Build and nodes, of every build.
        builds: Vec<(String, Vec<String>)>,
    },
    /// The cables between nodes do not carry the backend asked for.
    MissingCables {
        /// The backend.
        backend: Backend,
        /// Which pair lacks what.
        why: String,
    },
    /// Cables are there, and in use for a while.
    PortsBusy {
        /// The backend, for people.
        backend: &'static str,
        /// Which port, and by whom.
        why: String,
    },
    /// A node has too little memory for one rank of the kind that was tried.
    TooSmall {
        /// The node.
        node: String,
        /// What was to be put there.
        what: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
        /// Bytes models may take there in all.
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
    /// Cables are there, and in use by what stays.
    PortsTaken {
        /// The backend, for people.
        backend: &'static str,
        /// Which port, and by whom.
        why: String,
    },
    /// More ranks are wanted than nodes can take work.
    TooFewNodes {
        /// Ranks wanted.
        ranks: u32,
        /// Nodes with equal engines that can take work.
        nodes: usize,
    },
    /// No node at all can take work.
    NoNodes,
    /// The last word of a refusal.
    NothingFits {
        /// Index of the replica.
        replica: i32,
        /// What the whole model needs on one node.
        needed: MemoryEstimate,
        /// What of that is the draft model's.
        draft: Option<Box<DraftOverhead>>,
        /// Nodes that would hold it and take no work.
        closed: Vec<String>,
        /// Nodes to which the files cannot come.
        full: Vec<String>,
        /// Whether it is RDMA ports in use that lack, and not memory.
        ports: bool,
    },
    /// A replica waits although it fits, because what else waits is worth more.
    Outweighed {
        /// Index of the replica.
        replica: i32,
        /// The deployments that get the room.
        by: Vec<String>,
    },
    /// Replicas of lower priority make room for one that fits nowhere.
    Preempts {
        /// Index of the replica.
        replica: i32,
        /// Their deployments.
        deployments: Vec<String>,
        /// Bytes they hold.
        frees: u64,
    },
    /// They will, once they have run for long enough.
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
    /// They could, if the tier of the one that waits said so.
    CouldPreempt {
        /// Index of the replica.
        replica: i32,
        /// Their deployments.
        deployments: Vec<String>,
        /// Bytes they hold.
        frees: u64,
        /// The tier of the one that waits.
        tier: Option<String>,
    },
    /// A person is asked first.
    AwaitsApproval {
        /// Index of the replica.
        replica: i32,
        /// What for.
        hash: String,
        /// Deployments of which replicas would be stopped; none where the replica itself is to be replaced.
        deployments: Vec<String>,
        /// Bytes they hold.
        frees: u64,
    },
    /// A person said no.
    Denied {
        /// Index of the replica.
        replica: i32,
        /// To what.
        hash: String,
    },
    /// A running replica stays although the spec changed, because its successor fits nowhere.
    OutdatedStays {
        /// The ShardGroup.
        group: String,
    },
    /// A replica goes on as it is until another one has its successor.
    WaitsForRollout {
        /// Index of the replica.
        replica: i32,
    },
    /// Files come first, before anything stops for a replica.
    FetchFirst {
        /// Index of the replica.
        replica: i32,
        /// Nodes that lack them.
        nodes: Vec<String>,
    },
    /// A replica must go before its successor can come.
    DrainFirst {
        /// The ShardGroup.
        group: String,
        /// Why not side by side.
        why: DrainReason,
    },
    /// A replica will fit once agents release what deleted groups held.
    WaitingForRelease {
        /// Index of the replica.
        replica: i32,
        /// What still holds memory, with the bytes.
        holders: Vec<String>,
    },
    /// A replica is placed where others of its deployment fail together with it.
    SharedFailureDomain {
        /// Index of the replica.
        replica: i32,
        /// The label that tells domains apart.
        key: String,
        /// Its values there.
        domains: Vec<String>,
        /// The others.
        with: Vec<i32>,
        /// The best way apart from more of them; nothing where none fits.
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

/// Why a replica goes before its successor comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainReason {
    /// Nodes do not hold both.
    Memory,
    /// RDMA ports carry one group.
    Ports,
    /// Its deployment asks for it.
    Requested,
    /// It has lost a node for good, and what it holds on others makes its successor need more of them.
    NodeLost,
}

impl Note {
    /// The condition reason this note stands for.
    pub fn reason(&self) -> Reason {
        match self {
            Note::ModelUnknown { .. } => Reason::ModelNotFound,
            Note::Architecture { .. } => Reason::UnsupportedArchitecture,
            Note::Headers { .. } => Reason::CorruptModel,
            Note::Invalid { .. } => Reason::InvalidSpec,
            Note::Newer { .. } => Reason::NewerRelease,
            Note::NodeUnavailable { .. } => Reason::Unschedulable,
            Note::NoNodes | Note::NoNodesInPools { .. } => Reason::NoNodes,
            Note::StrategyUnknown { .. } => Reason::StrategyNotFound,
            Note::TierUnknown { .. } => Reason::TierNotFound,
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
/// What of a need is a draft model's, to be said after it.
pub fn draft_share(draft: Option<&DraftOverhead>) -> String {
    draft.map(|draft| format!(", of it {draft}")).unwrap_or_default()
}

/// Notes as one text for a condition, bounded because conditions are.
pub fn join(notes: &[Note]) -> String {
    // The Kubernetes limit for a condition's message is 32768; a screenful serves people better.
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
