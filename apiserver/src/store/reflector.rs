//! A value that is computed from the objects under one storage prefix and cached: the table of kinds, the RBAC policy,
//! the admission policies. Not here: when it is computed again; see `gc/cache_refresh.rs` and `verbs/write.rs`.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::{Store, StoredObject};

/// A value that the objects under one prefix determine.
pub trait FromObjects: Default {
    /// The storage prefix of those objects.
    const PREFIX: &'static str;
    /// What is stored there, in the plural, for the log.
    const OBJECTS: &'static str;

    /// The value of these objects. What objects unchanged since `before` compiled to may be reused.
    fn from_objects(objects: &[Arc<StoredObject>], before: &Self) -> Self;
}

/// The newest value; replaced as a whole when an object changes.
#[derive(Debug, Default)]
pub struct Reflector<T> {
    current: RwLock<Arc<T>>,
    /// Serialises refreshes: of two, the one that reads later also publishes later. Readers wait for neither.
    refreshing: Mutex<()>,
}

impl<T: FromObjects> Reflector<T> {
    /// The value of the objects in the store.
    pub fn load(store: &dyn Store) -> Self {
        let reflector = Self::default();
        reflector.refresh(store);
        reflector
    }

    /// The current value.
    pub fn current(&self) -> Arc<T> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the objects again. If the store cannot be read, the value stays.
    pub fn refresh(&self, store: &dyn Store) {
        let refreshing = self.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
        match store.range(T::PREFIX, None, None) {
            Ok(snapshot) => {
                let value = Arc::new(T::from_objects(&snapshot.records, &self.current()));
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = value;
            }
            Err(error) => tracing::error!(%error, "the {} could not be read", T::OBJECTS),
        }
        drop(refreshing);
    }
}
