//! Why a node does not get files that are wanted there, with the numbers and what to do.

use std::fmt;

use russet_crds::conditions::Reason;

use crate::quantity::show;

/// Why a node does not get files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shortage {
    /// Too little room, whatever else goes.
    Space {
        /// The node.
        node: String,
        /// Bytes that are still to come.
        needed: u64,
        /// Bytes free beyond the reserve and what others were promised.
        free: u64,
        /// Bytes that could go.
        evictable: u64,
        /// Bytes all models together may take there.
        limit: u64,
    },
    /// Its agent has not measured its disk.
    Unmeasured {
        /// The node.
        node: String,
    },
    /// More nodes are wanted than there are.
    Nodes {
        /// Nodes wanted.
        wanted: u32,
        /// Nodes that hold the files or may be asked to.
        available: u32,
    },
}

impl Shortage {
    /// The condition reason this stands for.
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
            Shortage::Unmeasured { node } => write!(out, "node {node}: its agent has not reported its disk yet"),
            Shortage::Nodes { wanted, available: there } => write!(
                out,
                "{wanted} nodes are wanted, and {there} of the pool take work; add nodes to it or lower spec.preload.copies"
            ),
        }
    }
}
