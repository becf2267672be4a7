//! The table of served resources at one moment, and its indexes.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::resource::{Backing, Resource};

/// Every served resource.
#[derive(Clone, Debug, Default)]
pub struct Table {
    resources: Vec<Arc<Resource>>,
    index: BTreeMap<(String, String, String), Arc<Resource>>,
}

impl Table {
    /// The table of these resources.
    pub fn new(resources: Vec<Arc<Resource>>) -> Self {
        let index = resources
            .iter()
            .map(|resource| {
                (
                    (resource.group.clone(), resource.version.clone(), resource.plural.clone()),
                    resource.clone(),
                )
            })
            .collect();
        Self { resources, index }
    }

    /// Every resource, built-in ones first, preferred versions before others.
    pub fn all(&self) -> &[Arc<Resource>] {
        &self.resources
    }

    /// The resource of a path.
    pub fn find(&self, group: &str, version: &str, plural: &str) -> Option<Arc<Resource>> {
        self.index.get(&(group.to_string(), version.to_string(), plural.to_string())).cloned()
    }

    /// The resource of an owner reference or of a manifest.
    pub fn of_kind(&self, api_version: &str, kind: &str) -> Option<Arc<Resource>> {
        self.resources
            .iter()
            .find(|resource| resource.kind == kind && resource.api_version() == api_version)
            .cloned()
    }

    /// The resource whose objects are stored under keys like this one.
    pub fn of_key(&self, key: &str) -> Option<Arc<Resource>> {
        self.resources
            .iter()
            .find(|resource| resource.backing == Backing::Stored && key.starts_with(&resource.prefix))
            .cloned()
    }

    /// Each stored resource once, whatever versions serve it.
    pub fn stored(&self) -> Vec<Arc<Resource>> {
        let mut seen = std::collections::BTreeSet::new();
        let stored = self.resources.iter().filter(|resource| resource.backing == Backing::Stored);
        stored.filter(|resource| seen.insert(resource.prefix.clone())).cloned().collect()
    }
}
