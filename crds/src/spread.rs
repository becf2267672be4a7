//! Spread of a ModelDeployment's replicas over failure domains. Not here: the score of a candidate (`plan`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::names;

/// Spread of replicas over failure domains: a preference, never a requirement. No replica stays pending
/// because of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Spread {
    /// The label of InferenceNodes whose value names the failure domain, such as a zone, a rack or a UPS. A
    /// node without the label is a domain of its own.
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
