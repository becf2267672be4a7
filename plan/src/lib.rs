//! The planner: which nodes run which layers, and why. Pure: no clock, no chance, no client. The
//! operator, `russet plan` and the tests call the same functions.
//!
//! ```text
//! Snapshot + spec ──validate──▶ ValidDeployment ──place──▶ Placement + notes      (check judges every one)
//! ```

pub mod check;
pub mod chips;
pub mod cluster;
pub mod copies;
pub mod demand;
pub mod manifests;
mod digest;
pub mod fabric;
pub mod memory_model;
pub mod prediction;
pub mod nodes;
pub mod note;
pub mod precondition;
pub mod placement;
pub mod pool;
pub mod proposal;
pub mod quantity;
pub mod auto_revert;
pub mod autoscaling;
pub mod active_hours;
#[cfg(test)]
mod test_rng;
pub mod shard;
pub mod cow;
pub mod snapshot;
pub mod joint_placement;
pub mod performance_model;
pub mod tier;
pub mod validate;

pub use cluster::ClusterObjects;
pub use note::Note;
pub use placement::{Placement, place};
pub use snapshot::Snapshot;
pub use validate::{ValidDeployment, validate};
