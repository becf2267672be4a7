//! The adapters that requests may name.

use std::sync::Arc;

use russet_wire::{
    engine_config::AdapterDir,
    event::{FailureKind, GenerationFailure},
};

use crate::prefix_cache::fingerprint::model_fingerprint;

/// An adapter of this engine; the default is none: the model itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServedAdapter {
    /// Its number, from 1 on in the order of the configuration; 0 for none.
    pub number: u32,
    /// What requests choose it by.
    pub name: Arc<str>,
    /// Identity of its files: what they make of a prefix is of no use to others.
    pub identity: Arc<str>,
}

/// All adapters of this engine.
#[derive(Clone, Debug, Default)]
pub struct ServedAdapters(Arc<[ServedAdapter]>);

impl ServedAdapters {
    /// Those of an engine's configuration.
    pub fn new(dirs: &[AdapterDir]) -> Self {
        let served = |(AdapterDir { name, dir }, number): (&AdapterDir, u32)| ServedAdapter {
            number,
            name: name.as_str().into(),
            identity: model_fingerprint(dir).into(),
        };
        Self(dirs.iter().zip(1..).map(served).collect())
    }

    /// The adapter of a name; none where the name is empty.
    pub fn find(&self, name: &str) -> Result<ServedAdapter, GenerationFailure> {
        if name.is_empty() {
            return Ok(ServedAdapter::default());
        }
        self.0.iter().find(|adapter| &*adapter.name == name).cloned().ok_or_else(|| {
            let names: Vec<&str> = self.0.iter().map(|adapter| &*adapter.name).collect();
            let has = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            GenerationFailure {
                kind: FailureKind::InvalidRequest,
                message: format!(
                    "this replica has no adapter {name:?}; it has {has}. Name one of them, or the model alone"
                ),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_are_found_by_name_and_numbered_from_one() {
        let dirs = ["pirate", "clerk"].map(|name| AdapterDir { name: name.to_owned(), dir: name.into() });
        let served = ServedAdapters::new(&dirs);
        let number = |name| served.find(name).map(|adapter| adapter.number);
        assert_eq!((number(""), number("pirate"), number("clerk")), (Ok(0), Ok(1), Ok(2)));
        let failure = number("sailor").unwrap_err();
        assert!(
            failure.message.contains("no adapter \"sailor\"; it has pirate, clerk"),
            "{}",
            failure.message
        );
    }
}
