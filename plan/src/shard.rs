//! Splits of one replica over free nodes. Each kind of split returns its candidates, and notes on what it
//! could not use. Not here: the selection (`placement`).

mod balance;
pub mod hybrid;
pub mod pipeline;
pub mod single;
pub mod stages;
pub mod tensor;

use russet_crds::{Backend, GroupMember, GroupPlan, LocalReference};

use crate::memory_model::{MemoryEstimate, MemoryModel};
use crate::performance_model::GpuProfile;

/// A node that may run a rank.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeSlot<'a> {
    /// Name of the node.
    pub node: &'a str,
    /// Index of the node in the order of all names.
    pub index: usize,
    /// Bytes free.
    pub free: u64,
    /// Bytes that models may take there in all.
    pub limit: u64,
    /// Ranks of the same deployment already on it; replicas are spread if possible.
    pub siblings: usize,
    /// Replicas of the same deployment in its failure domain, as far as known.
    pub domain_siblings: usize,
    /// Whether its engine supports tensor parallelism.
    pub supports_tensor: bool,
    /// Profile of its GPU, if known.
    pub gpu: Option<GpuProfile>,
}

/// One rank of a candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankAssignment {
    /// Name of the node.
    pub node: String,
    /// Number of layers, all of which a tensor group shares.
    pub layers: u32,
    /// Memory of the rank.
    pub memory: MemoryEstimate,
    /// Free bytes that remain on the node.
    pub free_after: u64,
    /// RDMA devices towards every member of its stage; empty without RDMA.
    pub rdma_devices: Vec<Vec<String>>,
}

/// A split that fits; index = rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitCandidate {
    /// The ranks.
    pub ranks: Vec<RankAssignment>,
    /// Ranks of the same deployment on the nodes chosen.
    pub siblings: usize,
    /// Ranks per stage; 1 without tensor parallelism.
    pub tensor_size: u32,
    /// Backend between ranks.
    pub backend: Backend,
    /// Reason for the backend, for display; only if there was a choice.
    pub backend_reason: Option<String>,
}

impl SplitCandidate {
    /// Split and nodes in one line, with the backend if there was a choice.
    pub fn show(&self) -> String {
        let split = describe(&self.plan_members(), self.tensor_size);
        match &self.backend_reason {
            Some(why) => format!("{split}, {}: {why}", backend_label(self.backend)),
            None => split,
        }
    }

    /// Whether another candidate is the same split over the same nodes.
    pub fn is_same_split(&self, other: &SplitCandidate) -> bool {
        let ranks = |one: &SplitCandidate| {
            one.ranks.iter().map(|rank| (rank.node.clone(), rank.layers)).collect::<Vec<_>>()
        };
        (self.tensor_size, self.backend) == (other.tensor_size, other.backend) && ranks(self) == ranks(other)
    }

    /// The minimum of the remaining free memory over its nodes.
    pub fn min_free_after(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.free_after).min().unwrap_or(0)
    }

    /// The plan of a group, its hash still empty.
    pub fn plan(&self, fit: &MemoryModel<'_>) -> GroupPlan {
        GroupPlan {
            hash: String::new(),
            backend: self.backend,
            tensor_size: self.tensor_size,
            members: self.plan_members(),
            context_tokens: fit.capacity().context_tokens,
            max_sequences: fit.capacity().max_sequences,
            kv_tokens: fit.capacity().kv_tokens,
            engine: fit.capacity().engine,
            draft_model_ref: fit.draft().map(|draft| LocalReference::new(&draft.model)),
            adapters: fit.adapters().cloned().collect(),
        }
    }

    fn plan_members(&self) -> Vec<GroupMember> {
        let members = self.ranks.iter().enumerate().map(|(index, rank)| GroupMember {
            rank: index as u32,
            node_name: rank.node.clone(),
            layers: rank.layers,
            weight_bytes: rank.memory.weights,
            kv_bytes: rank.memory.kv,
            overhead_bytes: rank.memory.overhead,
            rdma_devices: rank.rdma_devices.clone(),
        });
        members.collect()
    }
}

/// The name of a backend, for display.
pub fn backend_label(backend: Backend) -> &'static str {
    match backend {
        Backend::None => "one rank",
        Backend::Ring => "TCP ring",
        Backend::Jaccl => "RDMA mesh (Jaccl)",
        Backend::JacclRing => "RDMA ring (JacclRing)",
        Backend::Unknown => "a backend of a newer release",
    }
}

/// A split and its nodes, for display.
pub fn describe(members: &[GroupMember], tensor_size: u32) -> String {
    let size = tensor_size.max(1) as usize;
    let teams = members.chunks(size).map(|team| {
        let names: Vec<&str> = team.iter().map(|member| member.node_name.as_str()).collect();
        (names.join(", "), team.first().map_or(0, |member| member.layers).to_string())
    });
    let (names, layers): (Vec<String>, Vec<String>) = teams.unzip();
    match (members.len(), size) {
        (1, _) => format!("1 rank on {}", names.concat()),
        (ranks, 1) => format!("{ranks} ranks on {}: layers {}", names.join(", "), layers.join(" + ")),
        (ranks, size) if ranks == size => format!("tensor over {ranks} nodes ({})", names.concat()),
        (_, size) => format!(
            "{} stages of {size} tensor ranks ({}): layers {}",
            names.len(),
            names.join(" | "),
            layers.join(" + ")
        ),
    }
}
