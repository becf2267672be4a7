//! The cached RBAC policy of the store's roles and bindings. Not here: what a policy allows; see [`super::rbac`].

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use serde_json::Value;

use super::rbac::{self, Policy};
use crate::store::Store;

/// The RBAC policy in force; replaced as a whole when a role or binding changes.
#[derive(Debug)]
pub struct Policies {
    current: RwLock<Arc<Policy>>,
    /// Serialises refreshes: of two, the one that reads later also publishes later. Readers wait for neither.
    refreshing: Mutex<()>,
}

impl Policies {
    /// The policy from the roles and bindings in the store.
    pub fn load(store: &dyn Store) -> Self {
        let policies = Self { current: RwLock::new(Arc::new(Policy::default())), refreshing: Mutex::new(()) };
        policies.refresh(store);
        policies
    }

    /// The current policy.
    pub fn policy(&self) -> Arc<Policy> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads roles and bindings again.
    pub fn refresh(&self, store: &dyn Store) {
        let refreshing = self.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
        match store.range(rbac::PREFIX, None, None) {
            Ok(snapshot) => {
                let policy = Policy::new(snapshot.records.iter().map(|record| Value::clone(record.object())));
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(policy);
            }
            Err(error) => tracing::error!(%error, "roles and bindings could not be read"),
        }
        drop(refreshing);
    }
}
