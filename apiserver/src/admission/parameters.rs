//! Parameters that a binding passes to its policy: objects of the policy's `paramKind`, found by `paramRef`.

use std::sync::Arc;

use serde_json::Value;

use super::policy::{Binding, Policy};
use crate::object;
use crate::selector;
use crate::state::ServerState;

/// Why a policy's `paramKind` is unusable.
pub fn param_kind_problem(api: &ServerState, policy: &Policy) -> Option<String> {
    let (api_version, kind) = policy.param_kind.as_ref()?;
    let known = api.kinds.current().of_kind(api_version, kind).is_some();
    (!known).then(|| format!("failed to find resource referenced by paramKind: '{api_version}, Kind={kind}'"))
}

/// The parameters to evaluate with, one after another; an error if the binding is wrong. A policy without
/// parameters is evaluated once, with none.
pub fn find(
    api: &ServerState,
    policy: &Policy,
    binding: &Binding,
    namespace: &str,
) -> Result<Vec<Option<Arc<Value>>>, String> {
    let (Some((api_version, kind)), Some(param_ref)) = (&policy.param_kind, &binding.param_ref) else {
        return Ok(vec![None]);
    };
    let Some(resource) = api.kinds.current().of_kind(api_version, kind) else { return Ok(Vec::new()) };
    let given = param_ref["namespace"].as_str().unwrap_or_default();
    let place = match (resource.namespaced, given) {
        (false, "") => "",
        (false, _) => {
            return Err("paramRef.namespace must not be provided for a cluster-scoped `paramKind`".into());
        }
        (true, "") if namespace.is_empty() => {
            return Err(
                "cannot use namespaced paramRef in policy binding that matches cluster-scoped resources"
                    .into(),
            );
        }
        (true, "") => namespace,
        (true, given) => given,
    };
    let found: Vec<Arc<Value>> = match param_ref["name"].as_str().unwrap_or_default() {
        "" => {
            let snapshot =
                api.store.range(&resource.prefix_of(place), None, None).map_err(|error| error.to_string())?;
            let chosen = snapshot.records.iter().filter(|record| {
                selector::matches_labels(&param_ref["selector"], &record.object()["metadata"]["labels"])
                    && object::namespace(record.object()) == place
            });
            chosen.map(|record| resource.view(record)).collect()
        }
        name => api
            .store
            .get(&resource.key(place, name))
            .map(|record| resource.view(&record))
            .into_iter()
            .collect(),
    };
    if found.is_empty() && param_ref["parameterNotFoundAction"] == "Deny" {
        return Err("no params found for policy binding with `Deny` parameterNotFoundAction".into());
    }
    Ok(found.into_iter().map(Some).collect())
}
