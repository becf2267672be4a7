//! Ways to cut one replica over free nodes. A way answers with the candidates it found and notes on
//! what it could not use; which candidate wins is decided in `place`.

pub mod pipeline;
pub mod single;

use russet_crds::{Backend, GroupMember, GroupPlan};

use crate::fit::{Fit, Need};

/// A node that may take a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seat<'a> {
    /// Name of the node.
    pub node: &'a str,
    /// Bytes free.
    pub free: u64,
    /// Bytes models may take there in all.
    pub limit: u64,
    /// Ranks of the same deployment it already has; replicas spread where they can.
    pub siblings: usize,
}

/// One rank of a candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Name of the node.
    pub node: String,
    /// Layers held.
    pub layers: u32,
    /// Memory taken.
    pub need: Need,
    /// Bytes that stay free on the node.
    pub left: u64,
}

/// A split that fits; index = rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The ranks.
    pub ranks: Vec<Rank>,
    /// Ranks of the same deployment on the nodes chosen.
    pub siblings: usize,
}

impl Candidate {
    /// Split and nodes in one line.
    pub fn show(&self) -> String {
        match self.ranks.as_slice() {
            [rank] => format!("1 rank on {}", rank.node),
            ranks => {
                let list = |item: fn(&Rank) -> String| ranks.iter().map(item).collect::<Vec<_>>();
                format!(
                    "{} ranks on {}: layers {}",
                    ranks.len(),
                    list(|rank| rank.node.clone()).join(", "),
                    list(|rank| rank.layers.to_string()).join(" + "),
                )
            }
        }
    }

    /// The least memory that stays free on any of its nodes.
    pub fn left(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.left).min().unwrap_or(0)
    }

    /// The plan of a group, its hash still empty.
    pub fn plan(&self, fit: &Fit<'_>) -> GroupPlan {
        let members = self.ranks.iter().enumerate().map(|(index, rank)| GroupMember {
            rank: index as u32,
            node_name: rank.node.clone(),
            layers: rank.layers,
            weight_bytes: rank.need.weights,
            kv_bytes: rank.need.kv,
            overhead_bytes: rank.need.overhead,
            rdma_devices: Vec::new(),
        });
        GroupPlan {
            hash: String::new(),
            backend: if self.ranks.len() == 1 { Backend::None } else { Backend::Ring },
            tensor_size: 1,
            members: members.collect(),
            context_tokens: fit.room().context_tokens,
            max_sequences: fit.room().max_sequences,
        }
    }
}
