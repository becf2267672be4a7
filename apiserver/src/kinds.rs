//! The table of served resources: built in, or defined by the custom resource definitions in the store. The
//! rest of this crate looks kinds up in this table and hard-codes none.

pub mod builtin;
pub mod definition;
pub mod events;
pub mod resource;
pub mod rules;
pub mod table;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::object;
use crate::store::Store;
use resource::Resource;
use table::Table;

/// Storage prefix of the definitions.
pub const DEFINITIONS: &str = "/registry/apiextensions.k8s.io/customresourcedefinitions/";

/// The current table; replaced as a whole when a definition changes.
#[derive(Debug)]
pub struct Kinds {
    current: RwLock<Arc<Table>>,
    /// Serialises refreshes: of two, the one that reads later also publishes later. Readers wait for neither.
    refreshing: Mutex<()>,
}

impl Kinds {
    /// The table of the definitions in the store.
    pub fn load(store: &dyn Store) -> Self {
        let kinds = Self { current: RwLock::new(Arc::new(Table::default())), refreshing: Mutex::new(()) };
        kinds.refresh(store);
        kinds
    }

    /// The current table.
    pub fn table(&self) -> Arc<Table> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the definitions again; the compiled schemas of unchanged ones are reused.
    pub fn refresh(&self, store: &dyn Store) {
        let refreshing = self.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
        let snapshot = match store.range(DEFINITIONS, None, None) {
            Ok(snapshot) => snapshot,
            Err(error) => return tracing::error!(%error, "the custom resource definitions could not be read"),
        };
        let before = self.table();
        let mut known: BTreeMap<(&str, u64), Vec<Arc<Resource>>> = BTreeMap::new();
        for resource in before.all() {
            if let Some(custom) = &resource.custom {
                known.entry((&custom.definition, custom.revision)).or_default().push(resource.clone());
            }
        }
        let mut resources: Vec<Arc<Resource>> = builtin::resources().into_iter().map(Arc::new).collect();
        for record in &snapshot.records {
            match known.remove(&(object::name(record.object()), record.revision)) {
                Some(kept) => resources.extend(kept),
                None => {
                    let made = definition::resources(record.object(), record.revision);
                    resources.extend(made.into_iter().map(Arc::new));
                }
            }
        }
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(Table::new(resources));
        drop(refreshing);
    }
}

/// The storage key of a namespace.
pub fn builtin_namespace_key(name: &str) -> String {
    format!("{}{name}", builtin::prefix("", "namespaces"))
}
