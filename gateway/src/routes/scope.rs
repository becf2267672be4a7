//! Which names of models a caller may use. Who the caller is, is `keys`' business.

use super::matches_pattern;

/// The names a caller may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelScope {
    /// The only namespace the caller sees; `None` is every one.
    namespace: Option<String>,
    /// Patterns of names as the caller writes them; empty is every name.
    models: Vec<String>,
}

impl ModelScope {
    /// Everything.
    pub const ALL: Self = Self { namespace: None, models: Vec::new() };

    /// Names of one namespace that one of `models` matches; all of them when there is none.
    pub fn new(namespace: &str, models: &[String]) -> Self {
        Self { namespace: Some(namespace.to_owned()), models: models.to_vec() }
    }

    /// Whether the caller sees a namespace.
    pub(super) fn sees_namespace(&self, namespace: &str) -> bool {
        self.namespace.as_deref().is_none_or(|own| own == namespace)
    }

    /// Whether the caller may use this name, wherever it leads.
    pub(super) fn allows(&self, model: &str) -> bool {
        self.models.is_empty() || self.models.iter().any(|pattern| matches_pattern(pattern, model))
    }

    /// The patterns, for a message.
    pub fn models(&self) -> &[String] {
        &self.models
    }
}
