//! Shortage: why a node does not get files, with the numbers and the remedy.

use std::fmt;

use russet_crds::conditions::Reason;

use crate::quantity::show;

/// Why a node does not get files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// Too little space, whatever else is evicted.
    Space {
        /// The node.
        node: String,
        /// Bytes still to fetch.
        needed: u64,
        /// Bytes free beyond the reserve and all reservations.
        free: u64,
        /// Evictable bytes.
        evictable: u64,
        /// Bytes that all models together may take there.
        limit: u64,
    },
    /// Its agent has not measured its disk.
    Unmeasured {
        /// The node.
        node: String,
    },
    /// More nodes are wanted than exist.
    Nodes {
        /// Number of nodes wanted.
        desired: u32,
        /// Nodes that hold the files or may fetch them.
        available: u32,
    },
}

impl Shortage {
    /// The condition reason for it.
    pub fn reason(&self) -> Reason {
        match self {
            Shortage::Space { .. } => Reason::DiskPressure,
            Shortage::Unmeasured { .. } => Reason::WaitingForAgent,
            Shortage::Nodes { .. } => Reason::NoNodes,
        }
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shortage::Space { node, needed, free, evictable: spare, limit } => write!(
                out,
                "node {node}: {} more are needed, {} are free beyond the reserve and {} could go, of {} that models may take; free some disk there, lower the node's spec.disk.reserve, or delete or unpin a Model",
                show(*needed),
                show(*free),
                show(*spare),
                show(*limit)
            ),
            Shortage::Unmeasured { node } => {
                write!(out, "node {node}: its agent has not reported its disk yet")
            }
            Shortage::Nodes { desired, available: there } => write!(
                out,
                "{desired} nodes are wanted, and {there} of the pool take work; add nodes to it or lower spec.preload.copies"
            ),
        }
    }
}
