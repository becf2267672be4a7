//! Authentication and authorization: client certificates, tokens, impersonation, RBAC. Handlers see a
//! [`user::User`] and never how it was authenticated.

pub mod defaults;
pub mod rbac;
pub mod signer;
pub mod tokens;
pub mod user;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use serde_json::Value;

use crate::call::Call;
use crate::state::ServerState;
use crate::status::{ApiError, Result};
use rbac::{Attributes, RbacRule};
use user::{MASTERS, User};

/// Authenticates a request: `certified` by the connection's client certificate, else by a bearer token.
pub fn authenticate(api: &ServerState, certified: Option<&User>, headers: &HeaderMap) -> Result<User> {
    let bearer = headers
        .get(AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.strip_prefix("Bearer ").or_else(|| value.strip_prefix("bearer ")));
    let user = match (certified, bearer) {
        (Some(user), _) => user.clone(),
        (None, Some(token)) => tokens::user(api, token.trim(), jiff::Timestamp::now())
            .ok_or_else(|| ApiError::unauthorized("Unauthorized"))?,
        (None, None) => User::anonymous(),
    };
    impersonate(api, user, headers)
}

/// Switches to another user when the headers request it and the user may impersonate.
fn impersonate(api: &ServerState, user: User, headers: &HeaderMap) -> Result<User> {
    let text = |value: &http::HeaderValue| value.to_str().unwrap_or_default().to_string();
    let Some(name) = headers.get("impersonate-user").map(text) else {
        // A client that expects to act with fewer rights must not act with all.
        if headers.keys().any(|name| name.as_str().starts_with("impersonate-")) {
            return Err(ApiError::bad_request("impersonation needs a user: send Impersonate-User, too"));
        }
        return Ok(user);
    };
    let groups: Vec<String> = headers.get_all("impersonate-group").iter().map(text).collect();
    let policy = api.policies.current();
    let requested = std::iter::once(("users", &name)).chain(groups.iter().map(|group| ("groups", group)));
    for (resource, name) in requested {
        let asked = Attributes { verb: "impersonate", resource, name, ..Attributes::default() };
        if !policy.allows(&user, &asked) {
            return Err(ApiError::forbidden("", resource, name, denial(&user, &asked)));
        }
    }
    Ok(User::authenticated(&name, groups))
}

/// An error if the policy does not allow the request.
pub fn authorize(api: &ServerState, user: &User, asked: &Attributes<'_>) -> Result<()> {
    if api.policies.current().allows(user, asked) {
        return Ok(());
    }
    if user.is_anonymous() {
        return Err(ApiError::unauthorized("Unauthorized"));
    }
    if asked.path.is_empty() {
        let resource = match asked.subresource {
            "" => asked.resource.to_string(),
            subresource => format!("{}/{subresource}", asked.resource),
        };
        return Err(ApiError::forbidden(asked.group, &resource, asked.name, denial(user, asked)));
    }
    let message = format!("forbidden: User \"{}\" cannot {} path \"{}\"", user.name, asked.verb, asked.path);
    Err(ApiError::new(http::StatusCode::FORBIDDEN, "Forbidden", message))
}

fn denial(user: &User, asked: &Attributes<'_>) -> String {
    let resource = match asked.subresource {
        "" => asked.resource.to_string(),
        subresource => format!("{}/{subresource}", asked.resource),
    };
    let scope = if asked.namespace.is_empty() {
        "at the cluster scope".to_string()
    } else {
        format!("in the namespace \"{}\"", asked.namespace)
    };
    format!(
        "User \"{}\" cannot {} resource \"{resource}\" in API group \"{}\" {scope}",
        user.name, asked.verb, asked.group
    )
}

/// Rejects privilege escalation: users may not grant permissions that they do not have, except by the
/// `escalate` verb on roles and the `bind` verb on bindings.
pub fn check_escalation(api: &ServerState, call: &Call, new: &Value, old: Option<&Value>) -> Result<()> {
    if call.resource.group != rbac::GROUP || call.user.groups.iter().any(|group| group == MASTERS) {
        return Ok(());
    }
    let policy = api.policies.current();
    let namespace = call.namespace.as_str();
    let is_role = matches!(call.resource.kind.as_str(), "Role" | "ClusterRole");
    let (rules, verb, resource, name): (Option<Vec<RbacRule>>, _, _, &str) = if is_role {
        // Labels decide which roles take these rules over.
        let unchanged = |old: &Value| {
            old["rules"] == new["rules"]
                && old["aggregationRule"] == new["aggregationRule"]
                && old["metadata"]["labels"] == new["metadata"]["labels"]
        };
        if old.is_some_and(unchanged) {
            return Ok(());
        }
        if !new["aggregationRule"].is_null() && !policy.covers(&call.user, "", &RbacRule::everything()) {
            return Err(call.forbidden("must have cluster-admin privileges to use the aggregationRule"));
        }
        (Some(rbac::rules(&new["rules"])), "escalate", call.resource.plural.as_str(), call.name.as_str())
    } else {
        let role = &new["roleRef"];
        let (kind, name) =
            (role["kind"].as_str().unwrap_or_default(), role["name"].as_str().unwrap_or_default());
        let resource = if kind == "ClusterRole" { "clusterroles" } else { "roles" };
        (policy.role(kind, namespace, name), "bind", resource, name)
    };
    let permission =
        Attributes { verb, group: rbac::GROUP, resource, namespace, name, ..Attributes::default() };
    if policy.allows(&call.user, &permission) {
        return Ok(());
    }
    // What a role will allow that somebody else makes later, nobody can hold now.
    let rules = rules.ok_or_else(|| ApiError::not_found(rbac::GROUP, resource, name))?;
    match rules.iter().find(|rule| !policy.covers(&call.user, namespace, rule)) {
        None => Ok(()),
        Some(rule) => Err(call.forbidden(format!(
            "user \"{}\" (groups={:?}) is attempting to grant RBAC permissions not currently held: {rule}",
            call.user.name, call.user.groups
        ))),
    }
}
