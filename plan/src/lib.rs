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
pub mod described;
mod digest;
pub mod fabric;
pub mod fit;
pub mod forecast;
pub mod nodes;
pub mod note;
pub mod obstacle;
pub mod place;
pub mod pool;
pub mod proposal;
pub mod quantity;
pub mod rollout;
pub mod scale;
pub mod schedule;
#[cfg(test)]
mod seeded;
pub mod shard;
pub mod shared;
pub mod snapshot;
pub mod solve;
pub mod speed;
pub mod tier;
pub mod validate;

pub use cluster::Cluster;
pub use note::Note;
pub use place::{Placement, place};
pub use snapshot::Snapshot;
pub use validate::{ValidDeployment, validate};
