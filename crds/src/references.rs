//! References between objects, always by name, never by a free-form URL.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An object of the same namespace, or of a cluster-scoped kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LocalReference {
    /// Name of the object.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

impl LocalReference {
    /// A reference to `name`.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into() }
    }
}

/// An object of a named namespace; used by cluster-scoped kinds.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NamespacedReference {
    /// Namespace of the object.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// Name of the object.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}
