//! The planner: which nodes run which layers, and why. Pure: no clock, no randomness, no client. The
//! operator, `russet plan` and the tests call the same functions.
//!
//! ```text
//! Snapshot + spec ──validate──▶ ValidDeployment ──place──▶ Placement + notes      (check verifies every one)
//! ```

pub mod auto_revert;
pub mod autoscaling;
pub mod check;
pub mod chips;
pub mod cluster;
pub mod copies;
pub mod cow;
pub mod demand;
pub mod demand_history;
mod digest;
mod disk_state;
pub mod fabric;
pub mod group_info;
pub mod in_memory;
pub mod joint_placement;
pub mod joint_plan;
pub mod link_demand;
pub mod manifests;
pub mod memory_model;
pub mod node_info;
pub mod nodes;
pub mod note;
pub mod performance_model;
pub mod placement;
pub mod pool;
pub mod precondition;
pub mod prediction;
pub mod proposal;
pub mod quantity;
pub mod search_budget;
pub mod shard;
pub mod shortage;
pub mod snapshot;
#[cfg(test)]
mod test_rng;
pub mod tier;
pub mod tier_info;
pub mod valid_deployment;
pub mod validate;

pub use cluster::ClusterObjects;
pub use note::Note;
pub use placement::{Placement, place};
pub use snapshot::Snapshot;
pub use validate::{ValidDeployment, validate};
