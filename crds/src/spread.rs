//! How the replicas of a ModelDeployment keep apart. What a place among others is worth is the planner's business.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::names;

/// What replicas keep apart by: a wish, never a condition. A replica waits for no other place because of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Spread {
    /// The label of InferenceNodes whose value names what fails together, such as a zone, a rack or a UPS. A node
    /// without it fails alone.
    #[serde(default = "topology_key")]
    #[schemars(
        length(min = 1, max = 317),
        regex(
            pattern = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
        )
    )]
    pub topology_key: String,
}

impl Default for Spread {
    fn default() -> Self {
        Self { topology_key: topology_key() }
    }
}

fn topology_key() -> String {
    names::LABEL_ZONE.to_owned()
}
