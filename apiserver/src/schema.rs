//! The schema of a kind: what a CRD's `openAPIV3Schema` says, read once, then used to prune, default and validate.
//!
//! Not here: CRD lifecycle (names, conditions), OpenAPI publishing.

pub mod cel;
pub mod default;
pub mod prune;
pub mod strict;
pub mod structural;
pub mod validate;

use serde_json::Value;

/// A structural schema; the root describes a whole object.
#[derive(Debug, Clone, Default)]
pub struct Schema {
    /// Free content below here is kept (`x-kubernetes-preserve-unknown-fields`).
    pub preserve_unknown: bool,
}

/// Why a schema is refused at CRD registration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issue {
    /// Path below `openAPIV3Schema`, such as `properties[spec].type`.
    pub path: String,
    /// `Required value: must not be empty for specified object fields`.
    pub message: String,
}

/// One validation failure, in the shape of a `StatusCause`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldError {
    /// `FieldValueInvalid`, `FieldValueRequired`, `FieldValueNotSupported`, `FieldValueDuplicate`, …
    pub reason: &'static str,
    /// `spec.replicas`.
    pub field: String,
    /// `Invalid value: "string": spec.replicas in body must be of type integer: "string"`.
    pub message: String,
}

impl Schema {
    /// Reads a CRD version's `openAPIV3Schema` and checks the structural rules.
    pub fn from_openapi(source: &Value) -> Result<Schema, Vec<Issue>> {
        let _ = source;
        Ok(Schema { preserve_unknown: true })
    }

    /// Removes unknown fields and returns their paths (`spec.foo`, `spec.list[0].bar`).
    pub fn prune(&self, object: &mut Value) -> Vec<String> {
        let _ = object;
        Vec::new()
    }

    /// Fills in defaults (and drops nulls that a default or a non-nullable field replaces).
    pub fn default(&self, object: &mut Value) {
        let _ = object;
    }

    /// Validates a whole object; with `old`, runs transition rules and forgives errors on unchanged values.
    pub fn validate(&self, new: &Value, old: Option<&Value>) -> Vec<FieldError> {
        let _ = (new, old);
        Vec::new()
    }
}
