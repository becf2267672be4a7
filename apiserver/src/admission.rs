//! Admission: ValidatingAdmissionPolicies and their bindings, evaluated on every write before it is stored. A
//! policy is in force as soon as it is stored.
//!
//! Policies do not apply to policies, so that one that denies everything can still be deleted, and not to the
//! server's own writes. Not here: mutating policies and webhooks, which this server does not have.

pub mod authorizer;
pub mod check;
pub mod expression;
pub mod inputs;
pub mod matching;
pub mod parameters;
pub mod policy;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use http::StatusCode;
use serde_json::Value;

use crate::auth::User;
use crate::kinds::{self, Resource};
use crate::object;
use crate::state::ServerState;
use crate::status::{ApiError, Cause, Result};
use crate::store::{Store, StoredObject};
use crate::verbs::Call;
use inputs::Inputs;
use policy::{Binding, Denial, Policy, ValidationAction};

/// The API group of policies and bindings.
pub const GROUP: &str = "admissionregistration.k8s.io";
/// Storage prefix of policies and bindings.
pub const PREFIX: &str = "/registry/admissionregistration.k8s.io/";

/// The operation on an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Creates it.
    Create,
    /// Updates it, by update, patch or apply.
    Update,
    /// Deletes it.
    Delete,
}

impl Operation {
    /// The name in rules and requests.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "CREATE",
            Self::Update => "UPDATE",
            Self::Delete => "DELETE",
        }
    }
}

/// A write that is about to be stored.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionRequest<'a> {
    /// The request with its user and resource.
    pub call: &'a Call,
    /// The operation.
    pub operation: Operation,
    /// The requested state; `None` for a deletion.
    pub new: Option<&'a Value>,
    /// The state before; `None` for a creation.
    pub old: Option<&'a Value>,
    /// Whether nothing will be stored.
    pub dry_run: bool,
}

impl AdmissionRequest<'_> {
    /// Whether the request uses this version of its resource.
    fn is_of(&self, resource: &Resource) -> bool {
        let own = &self.call.resource;
        own.group == resource.group && own.version == resource.version && own.plural == resource.plural
    }
}

/// The policies in force, each with its bindings, sorted by name.
#[derive(Debug, Default)]
struct PolicySet {
    policies: Vec<(Arc<Policy>, Vec<Binding>)>,
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

    fn policies(&self) -> Arc<PolicySet> {
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

/// Evaluates every policy in force; returns the warnings of policies whose action is to warn.
pub fn admit(api: &ServerState, attempt: &AdmissionRequest<'_>) -> Result<Vec<String>> {
    let call = attempt.call;
    let book = api.admission.policies();
    if book.policies.is_empty() || call.resource.group == GROUP || call.user == User::server() {
        return Ok(Vec::new());
    }
    let mut warnings = Vec::new();
    for (policy, bindings) in &book.policies {
        let Some(seen_as) = policy.matching.covers(api, attempt) else { continue };
        if let Some(why) = parameters::param_kind_problem(api, policy) {
            if policy.fails {
                return Err(denial_error(attempt, policy, None, &misconfigured_denial("policy", &why)));
            }
            continue;
        }
        let mut inputs = None;
        for binding in bindings {
            if binding.matching.as_ref().is_some_and(|matching| matching.covers(api, attempt).is_none()) {
                continue;
            }
            let params = match parameters::find(api, policy, binding, &call.namespace) {
                Ok(params) => params,
                Err(why) if policy.fails => {
                    return Err(denial_error(
                        attempt,
                        policy,
                        Some(binding),
                        &misconfigured_denial("binding", &why),
                    ));
                }
                Err(_) => continue,
            };
            let inputs =
                inputs.get_or_insert_with(|| Inputs::new(attempt, &seen_as, namespace(api, attempt)));
            for params in params {
                let asked = || policy.evaluate(inputs, params.as_deref());
                let denials = authorizer::with_policy(api.policies.policy(), call.user.clone(), asked);
                for denial in &denials {
                    for action in &binding.actions {
                        match action {
                            ValidationAction::Deny => {
                                return Err(denial_error(attempt, policy, Some(binding), denial));
                            }
                            ValidationAction::Warn => warnings.push(format!(
                                "Validation failed for ValidatingAdmissionPolicy '{}' with binding '{}': {}",
                                policy.name, binding.name, denial.message
                            )),
                            ValidationAction::Audit => tracing::info!(
                                policy = policy.name,
                                binding = binding.name,
                                user = call.user.name,
                                resource = call.resource.plural,
                                namespace = call.namespace,
                                name = call.name,
                                message = denial.message,
                                "a policy would refuse what a user did"
                            ),
                        }
                    }
                }
            }
        }
    }
    Ok(warnings)
}

/// The namespace of the object as policies see it.
fn namespace(api: &ServerState, attempt: &AdmissionRequest<'_>) -> Option<Value> {
    let call = attempt.call;
    if !call.resource.namespaced {
        return None;
    }
    let record = api.store.get(&kinds::builtin_namespace_key(&call.namespace))?;
    let mut shown = Value::clone(record.object());
    for field in ["managedFields", "ownerReferences"] {
        object::set_meta(&mut shown, field, Value::Null);
    }
    Some(shown)
}

fn misconfigured_denial(what: &str, why: &str) -> Denial {
    Denial { message: format!("failed to configure {what}: {why}"), reason: "Invalid".into() }
}

fn denial_error(
    attempt: &AdmissionRequest<'_>,
    policy: &Policy,
    binding: Option<&Binding>,
    denial: &Denial,
) -> ApiError {
    let resource = &attempt.call.resource;
    let bound = binding.map(|binding| format!(" with binding '{}'", binding.name)).unwrap_or_default();
    let message =
        format!("ValidatingAdmissionPolicy '{}'{bound} denied request: {}", policy.name, denial.message);
    let mut error = ApiError::forbidden(&resource.group, &resource.plural, &attempt.call.name, &message)
        .with_causes(vec![Cause { reason: String::new(), message, field: String::new() }]);
    (error.reason, error.code) = match denial.reason.as_str() {
        "Forbidden" => ("Forbidden", StatusCode::FORBIDDEN),
        "RequestEntityTooLarge" => ("RequestEntityTooLarge", StatusCode::PAYLOAD_TOO_LARGE),
        _ => ("Invalid", StatusCode::UNPROCESSABLE_ENTITY),
    };
    error
}
