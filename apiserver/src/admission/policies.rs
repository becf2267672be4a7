//! The cached admission policies of the store, each with its bindings. Not here: evaluating them.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::policy::{Binding, Policy};
use crate::store::StoredObject;
use crate::store::reflector::FromObjects;

/// The policies in force, each with its bindings, sorted by name.
#[derive(Debug, Default)]
pub struct PolicySet {
    /// Sorted by name.
    pub policies: Vec<(Arc<Policy>, Vec<Binding>)>,
    /// The compiled policies by key and revision, reused by the next refresh.
    read: BTreeMap<(Arc<str>, u64), Arc<Policy>>,
}

impl FromObjects for PolicySet {
    const PREFIX: &'static str = "/registry/admissionregistration.k8s.io/";
    const OBJECTS: &'static str = "admission policies";

    /// Reuses the compiled expressions of unchanged policies.
    fn from_objects(objects: &[Arc<StoredObject>], before: &Self) -> Self {
        let mut bindings: BTreeMap<String, Vec<Binding>> = BTreeMap::new();
        let mut read = BTreeMap::new();
        for record in objects {
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
