//! A machine as the planner sees it. Not its disk (`copies`) and not its cables (`fabric`).

use std::collections::BTreeMap;

use russet_crds::Link;

use crate::performance_model::GpuProfile;

/// A machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeInfo {
    /// Bytes models may take in all.
    pub serving_limit: u64,
    /// Bytes that the agent still grants to Shards whose group is gone. They are not free until the agent
    /// reports their release, however long that takes.
    pub unreleased: u64,
    /// Whether the node takes new work.
    pub availability: Availability,
    /// Its operating system and build, as reported.
    pub os: Option<String>,
    /// Build of the engine; all ranks of a group need the same.
    pub engine_build: Option<String>,
    /// Distributed backends of the engine; empty if the agent reports none.
    pub backends: Vec<String>,
    /// Whether its engine supports tensor parallelism; that of an older release does not.
    pub supports_tensor: bool,
    /// Options that its engine supports, by their field in `spec.engine`.
    pub engine_options: Vec<String>,
    /// Links to other nodes, as this node reports them.
    pub links: Vec<Link>,
    /// Profile of its GPU, if its chip is in the catalogue.
    pub gpu: Option<GpuProfile>,
    /// Its labels, which determine failure domains.
    pub labels: BTreeMap<String, String>,
}

/// Whether a node takes new work, and what happens to its replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Availability {
    /// It takes new work.
    #[default]
    Open,
    /// Running replicas stay, nothing new is placed.
    Cordoned,
    /// Running replicas move away.
    Draining,
    /// The agent does not renew its Lease; the state of its ranks is unknown.
    Unreachable,
    /// Unreachable for so long that engines without an agent have exited: its replicas move away, and its
    /// memory stays reserved until its agent is back and reports otherwise.
    Lost,
    /// The agent has not measured its memory yet.
    Unmeasured,
}
