//! A write as admission sees it: the request, the operation, the state before and after. No logic.

use serde_json::Value;

use crate::call::Call;
use crate::kinds::resource::Resource;

/// The operation on an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Creates it.
    Create,
    /// Updates it, by update, patch or apply.
    Update,
    /// Deletes it.
    Delete,
}

impl Operation {
    /// The name in rules and requests.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "CREATE",
            Self::Update => "UPDATE",
            Self::Delete => "DELETE",
        }
    }
}

/// A write that is about to be stored.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionRequest<'a> {
    /// The request with its user and resource.
    pub call: &'a Call,
    /// The operation.
    pub operation: Operation,
    /// The requested state; `None` for a deletion.
    pub new: Option<&'a Value>,
    /// The state before; `None` for a creation.
    pub old: Option<&'a Value>,
    /// Whether nothing will be stored.
    pub dry_run: bool,
}

impl AdmissionRequest<'_> {
    /// Whether the request uses this version of its resource.
    pub fn is_of(&self, resource: &Resource) -> bool {
        let own = &self.call.resource;
        own.group == resource.group && own.version == resource.version && own.plural == resource.plural
    }
}
