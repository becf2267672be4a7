//! The cached admission policies of the store, each with its bindings. Not here: evaluating them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::policy::{Binding, Policy};
use crate::store::{Store, StoredObject};

/// Storage prefix of policies and bindings.
pub const PREFIX: &str = "/registry/admissionregistration.k8s.io/";

/// The policies in force, each with its bindings, sorted by name.
#[derive(Debug, Default)]
pub struct PolicySet {
    /// Sorted by name.
    pub policies: Vec<(Arc<Policy>, Vec<Binding>)>,
    /// The compiled policies by key and revision, reused by the next refresh.
    read: BTreeMap<(Arc<str>, u64), Arc<Policy>>,
}

impl PolicySet {
    fn new(records: &[Arc<StoredObject>], before: &Self) -> Self {
        let mut bindings: BTreeMap<String, Vec<Binding>> = BTreeMap::new();
        let mut read = BTreeMap::new();
        for record in records {
            let object = record.object();
            match object["kind"].as_str() {
                Some("ValidatingAdmissionPolicy") => {
                    let key = (record.key.clone(), record.revision);
                    let known = before.read.get(&key).cloned();
                    let policy = known.unwrap_or_else(|| Arc::new(Policy::read(object, None).0));
                    read.insert(key, policy);
                }
                Some("ValidatingAdmissionPolicyBinding") => {
                    let binding = Binding::read(object);
                    bindings.entry(binding.policy.clone()).or_default().push(binding);
                }
                _ => {}
            }
        }
        let bound = read
            .values()
            .filter_map(|policy| bindings.remove(&policy.name).map(|bindings| (policy.clone(), bindings)));
        let policies = bound.collect();
        Self { policies, read }
    }
}

/// The policies in force; the whole set is replaced when one changes.
#[derive(Debug)]
pub struct Admission {
    current: RwLock<Arc<PolicySet>>,
    /// Serialises refreshes: of two, the one that reads later also publishes later. Readers wait for neither.
    refreshing: Mutex<()>,
}

impl Admission {
    /// The policies in the store.
    pub fn load(store: &dyn Store) -> Self {
        let admission = Self { current: RwLock::default(), refreshing: Mutex::new(()) };
        admission.refresh(store);
        admission
    }

    /// The current policies.
    pub fn policies(&self) -> Arc<PolicySet> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads policies and bindings again.
    pub fn refresh(&self, store: &dyn Store) {
        let refreshing = self.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
        match store.range(PREFIX, None, None) {
            Ok(snapshot) => {
                let book = PolicySet::new(&snapshot.records, &self.policies());
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(book);
            }
            Err(error) => tracing::error!(%error, "the admission policies could not be read"),
        }
        drop(refreshing);
    }
}
