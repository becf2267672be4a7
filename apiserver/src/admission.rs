//! Admission: ValidatingAdmissionPolicies and their bindings, evaluated on every write before it is stored. A
//! policy is in force as soon as it is stored.
//!
//! Policies do not apply to policies, so that one that denies everything can still be deleted, and not to the
//! server's own writes. Not here: mutating policies and webhooks, which this server does not have.

pub mod attempt;
pub mod authorizer;
pub mod expression;
pub mod inputs;
pub mod matching;
pub mod parameters;
pub mod policies;
pub mod policy;
pub mod validation;

use http::StatusCode;
use serde_json::Value;

use crate::auth::user::User;
use crate::kinds;
use crate::kinds::builtin::ADMISSION_GROUP;
use crate::object;
use crate::state::ServerState;
use crate::status::{ApiError, Cause, Result};
use attempt::AdmissionRequest;
use inputs::Inputs;
use policy::{Binding, Denial, Policy, ValidationAction};

/// Evaluates every policy in force; returns the warnings of policies whose action is to warn.
pub fn admit(api: &ServerState, attempt: &AdmissionRequest<'_>) -> Result<Vec<String>> {
    let call = attempt.call;
    let book = api.admission.current();
    if book.policies.is_empty() || call.resource.group == ADMISSION_GROUP || call.user == User::server() {
        return Ok(Vec::new());
    }
    let table = api.kinds.current();
    let mut warnings = Vec::new();
    // Of the request's own version, for all policies that see it so.
    let mut own_inputs = None;
    for (policy, bindings) in &book.policies {
        let Some(seen_as) = policy.matching.covers(&table, &*api.store, attempt) else { continue };
        if let Some(why) = parameters::param_kind_problem(api, policy) {
            if policy.fails {
                return Err(denial_error(attempt, policy, None, &misconfigured_denial("policy", &why)));
            }
            continue;
        }
        let mut converted_inputs = None;
        for binding in bindings {
            if binding
                .matching
                .as_ref()
                .is_some_and(|matching| matching.covers(&table, &*api.store, attempt).is_none())
            {
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
            let inputs = if attempt.is_of(&seen_as) { &mut own_inputs } else { &mut converted_inputs };
            let inputs = &*inputs
                .get_or_insert_with(|| Inputs::new(attempt, seen_as.clone(), || namespace(api, attempt)));
            for params in params {
                let asked = || policy.evaluate(inputs, params.as_deref());
                let denials = authorizer::with_policy(api.policies.current(), call.user.clone(), asked);
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
                                "an admission policy with action Audit would deny this request"
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
