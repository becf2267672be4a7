//! What is asked of the helper and what it answers, a line of JSON each. A closed set: what is not named here cannot be
//! asked for, and a word that is not known is an error.

use serde::{Deserialize, Serialize};

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "camelCase", deny_unknown_fields)]
pub enum HelperRequest {
    /// Make the machine be like this, and take back what was made before and is not in it.
    Apply(MachineRequest),
    /// Say what is held.
    Read {},
    /// Take back everything, whoever asked for it.
    Revert {},
}

/// How a machine should be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MachineRequest {
    /// The node that wants it: what one node asked for no other takes back.
    pub node: String,
    /// The network; nothing of it is changed where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    /// MiB that the GPU may keep wired; the system's own number where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wired_limit_mebibytes: Option<u64>,
    /// Parts that stay as they were made, whatever is said of them above.
    #[serde(default, skip_serializing_if = "UnchangedParts::is_empty")]
    pub leave: UnchangedParts,
}

/// Parts of a machine that a wish says nothing of: what was made of them stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct UnchangedParts {
    /// The network.
    pub network: bool,
    /// The limit of wired memory.
    pub wired_limit: bool,
}

impl UnchangedParts {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A machine's network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Network {
    /// Ports that have an address of their own and are in no bridge.
    pub ports: Vec<Port>,
    /// Whether services of cables come last when the system looks for a way to the internet; macOS alone has an order.
    #[serde(default)]
    pub cables_last: bool,
    /// What becomes of it when the machine starts anew.
    #[serde(default)]
    pub after_restart: RestartPolicy,
}

/// A port with its address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Port {
    /// `en4`.
    pub interface: String,
    /// `172.31.240.1/30`.
    pub address: String,
}

/// What becomes of a network when its machine starts anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RestartPolicy {
    /// It is as if it had never been.
    #[default]
    Drop,
    /// It is made again.
    Keep,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "camelCase")]
pub enum HelperReply {
    /// It is so.
    Done {
        /// What was done for it just now; nothing where it was so before.
        changed: Vec<String>,
        /// Everything that would be taken back.
        held: Vec<String>,
    },
    /// It is outside of what the helper does, and nothing was changed.
    Refused {
        /// Why, and what to do.
        why: String,
    },
    /// A tool failed on the way; what was done until then can be taken back.
    Failed {
        /// Which, and what it said.
        why: String,
    },
}
