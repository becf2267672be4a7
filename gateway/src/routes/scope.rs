//! Which model names a caller may use. Not here: authentication of the caller, see `keys`.

use super::matches_pattern;

/// The names a caller may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelScope {
    /// The only namespace the caller sees; `None` means all.
    namespace: Option<String>,
    /// Patterns of names that the caller may send; empty means all.
    models: Vec<String>,
}

impl ModelScope {
    /// No restriction.
    pub const ALL: Self = Self { namespace: None, models: Vec::new() };

    /// The names of one namespace that match one of `models`; all of them when `models` is empty.
    pub fn new(namespace: &str, models: &[String]) -> Self {
        Self { namespace: Some(namespace.to_owned()), models: models.to_vec() }
    }

    /// Whether the caller sees the namespace.
    pub(super) fn sees_namespace(&self, namespace: &str) -> bool {
        self.namespace.as_deref().is_none_or(|own| own == namespace)
    }

    /// Whether the caller may use this name, whatever it resolves to.
    pub(crate) fn allows(&self, model: &str) -> bool {
        self.models.is_empty() || self.models.iter().any(|pattern| matches_pattern(pattern, model))
    }

    /// The patterns, for messages.
    pub fn models(&self) -> &[String] {
        &self.models
    }
}
