//! Requests to the helper and its replies, a line of JSON each. A closed set: other requests do not exist,
//! and an unknown field is an error.

use serde::{Deserialize, Serialize};

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "camelCase", deny_unknown_fields)]
pub enum HelperRequest {
    /// Put the machine into this state, and undo earlier changes that are not part of it.
    Apply(MachineRequest),
    /// Return the changes that are held.
    Read {},
    /// Undo all changes, whichever node requested them.
    Revert {},
}

/// Desired state of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MachineRequest {
    /// The requesting node: changes for one node are not undone by another.
    pub node: String,
    /// The network; absent means unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    /// MiB that the GPU may keep wired; the system's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wired_limit_mebibytes: Option<u64>,
    /// Parts that stay unchanged, whatever the fields above contain.
    #[serde(default, skip_serializing_if = "UnchangedParts::is_empty")]
    pub leave: UnchangedParts,
}

/// Parts of a machine that a request leaves unchanged.
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
    /// Ports with an address of their own, outside any bridge.
    pub ports: Vec<Port>,
    /// Whether services of cables come last when the system looks for a route to the internet; only macOS has
    /// an order.
    #[serde(default)]
    pub cables_last: bool,
    /// What happens to it when the machine restarts.
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

/// What happens to a network when its machine restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RestartPolicy {
    /// It is dropped.
    #[default]
    Drop,
    /// It is applied again.
    Keep,
}

/// A reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "camelCase")]
pub enum HelperReply {
    /// The machine is in the requested state.
    Done {
        /// Changes made for this request; empty if the machine was in that state before.
        changed: Vec<String>,
        /// All changes that a revert would undo.
        held: Vec<String>,
    },
    /// The request is outside the helper's bounds, and nothing was changed.
    Refused {
        /// Reason and remedy.
        why: String,
    },
    /// A tool failed; changes made so far can be undone.
    Failed {
        /// The tool and its output.
        why: String,
    },
}
