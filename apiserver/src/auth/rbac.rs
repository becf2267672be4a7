//! Role-based access control: a policy compiled from roles and bindings, and its checks. Pure: no IO,
//! no clock.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use serde_json::Value;

use super::user::{MASTERS, User};
use crate::object;
use crate::selector;
use crate::store::StoredObject;
use crate::store::reflector::FromObjects;

/// The API group of roles and bindings.
pub const GROUP: &str = "rbac.authorization.k8s.io";

/// Maximum combinations of a rule that are looked up to find whether a user holds it.
const MAX_PERMISSIONS: usize = 10_000;

/// Attributes of a request to authorize. `path` is set for non-resource paths.
#[derive(Clone, Copy, Debug, Default)]
pub struct Attributes<'a> {
    /// Such as `get`.
    pub verb: &'a str,
    /// Empty for the core group.
    pub group: &'a str,
    /// Such as `secrets`.
    pub resource: &'a str,
    /// Such as `status`, or empty.
    pub subresource: &'a str,
    /// Empty for cluster scope.
    pub namespace: &'a str,
    /// Empty for a collection.
    pub name: &'a str,
    /// Such as `/metrics`.
    pub path: &'a str,
}

/// One rule of a role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RbacRule {
    /// Verbs.
    pub verbs: Vec<String>,
    /// API groups.
    pub groups: Vec<String>,
    /// Resources, with `/subresource` where needed.
    pub resources: Vec<String>,
    /// Names; empty means all.
    pub names: Vec<String>,
    /// Non-resource paths.
    pub urls: Vec<String>,
}

impl fmt::Display for RbacRule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{{APIGroups:{:?}, Resources:{:?}, ResourceNames:{:?}, NonResourceURLs:{:?}, Verbs:{:?}}}",
            self.groups, self.resources, self.names, self.urls, self.verbs
        )
    }
}

fn listed(list: &[String], value: &str) -> bool {
    list.iter().any(|entry| entry == "*" || entry == value)
}

impl RbacRule {
    /// Its combinations of verb, group, resource and name, or of verb and path.
    fn permissions(&self) -> usize {
        let resources = self.groups.len().saturating_mul(self.resources.len());
        let named = resources.saturating_mul(self.names.len().max(1));
        self.verbs.len().saturating_mul(named.saturating_add(self.urls.len()))
    }

    /// The rule of a cluster administrator, for resources.
    pub fn everything() -> Self {
        let all = vec!["*".to_string()];
        Self { verbs: all.clone(), groups: all.clone(), resources: all, names: Vec::new(), urls: Vec::new() }
    }

    /// The rule in the format of roles.
    pub fn to_value(&self) -> Value {
        let mut value = serde_json::json!({"verbs": self.verbs});
        for (field, list) in [
            ("apiGroups", &self.groups),
            ("resources", &self.resources),
            ("resourceNames", &self.names),
            ("nonResourceURLs", &self.urls),
        ] {
            if !list.is_empty() {
                value[field] = serde_json::json!(list);
            }
        }
        value
    }

    fn has_resource(&self, resource: &str, subresource: &str) -> bool {
        if subresource.is_empty() {
            return listed(&self.resources, resource);
        }
        self.resources.iter().any(|entry| {
            entry == "*"
                || entry.split_once('/').is_some_and(|(main, sub)| {
                    sub == subresource && (main == "*" || main == resource)
                        || (main == resource && sub == "*")
                })
        })
    }

    fn allows(&self, asked: &Attributes<'_>) -> bool {
        if !listed(&self.verbs, asked.verb) {
            return false;
        }
        if !asked.path.is_empty() {
            return self.urls.iter().any(|url| {
                url == asked.path || url.strip_suffix('*').is_some_and(|start| asked.path.starts_with(start))
            });
        }
        listed(&self.groups, asked.group)
            && self.has_resource(asked.resource, asked.subresource)
            && (self.names.is_empty() || self.names.iter().any(|name| name == asked.name))
    }
}

/// The rules of a role.
pub fn rules(value: &Value) -> Vec<RbacRule> {
    let strings = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_string).collect()
    };
    value
        .as_array()
        .into_iter()
        .flatten()
        .map(|rule| RbacRule {
            verbs: strings(&rule["verbs"]),
            groups: strings(&rule["apiGroups"]),
            resources: strings(&rule["resources"]),
            names: strings(&rule["resourceNames"]),
            urls: strings(&rule["nonResourceURLs"]),
        })
        .collect()
}

#[derive(Clone, Debug)]
struct Binding {
    subjects: Vec<Value>,
    namespace: String,
    role_kind: String,
    role_name: String,
}

impl Binding {
    fn binds(&self, user: &User) -> bool {
        self.subjects.iter().any(|subject| {
            let name = subject["name"].as_str().unwrap_or_default();
            match subject["kind"].as_str() {
                Some("User") => name == user.name,
                Some("Group") => user.groups.iter().any(|group| group == name),
                Some("ServiceAccount") => {
                    let namespace = subject["namespace"].as_str().unwrap_or(&self.namespace);
                    user.name == format!("system:serviceaccount:{namespace}:{name}")
                }
                _ => false,
            }
        })
    }
}

/// The compiled roles and bindings.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    cluster_roles: HashMap<String, Vec<RbacRule>>,
    roles: HashMap<(String, String), Vec<RbacRule>>,
    cluster_bindings: Vec<Binding>,
    bindings: HashMap<String, Vec<Binding>>,
    /// Names of aggregated cluster roles.
    aggregated: Vec<String>,
}

impl FromObjects for Policy {
    const PREFIX: &'static str = "/registry/rbac.authorization.k8s.io/";
    const OBJECTS: &'static str = "roles and bindings";

    fn from_objects(objects: &[Arc<StoredObject>], _before: &Self) -> Self {
        Self::new(objects.iter().map(|record| Value::clone(record.object())))
    }
}

impl Policy {
    /// Compiles roles and bindings; aggregated roles get the rules of the roles that their selectors match.
    pub fn new(objects: impl IntoIterator<Item = Value>) -> Self {
        let mut policy = Self::default();
        let mut cluster_roles = Vec::new();
        for object in objects {
            let (name, namespace) =
                (object::name(&object).to_string(), object::namespace(&object).to_string());
            match object["kind"].as_str() {
                Some("ClusterRole") => cluster_roles.push(object),
                Some("Role") => {
                    policy.roles.insert((namespace, name), rules(&object["rules"]));
                }
                Some(kind @ ("ClusterRoleBinding" | "RoleBinding")) => {
                    let binding = Binding {
                        subjects: object["subjects"].as_array().cloned().unwrap_or_default(),
                        namespace: namespace.clone(),
                        role_kind: object["roleRef"]["kind"].as_str().unwrap_or_default().into(),
                        role_name: object["roleRef"]["name"].as_str().unwrap_or_default().into(),
                    };
                    if kind == "RoleBinding" {
                        policy.bindings.entry(namespace).or_default().push(binding);
                    } else {
                        policy.cluster_bindings.push(binding);
                    }
                }
                _ => {}
            }
        }
        for role in &cluster_roles {
            let mut seen = Vec::new();
            if !role["aggregationRule"].is_null() {
                policy.aggregated.push(object::name(role).into());
            }
            policy
                .cluster_roles
                .insert(object::name(role).into(), aggregated(role, &cluster_roles, &mut seen));
        }
        policy
    }

    /// The rules of a role that a binding refers to; `None` if there is no such role.
    pub fn role(&self, kind: &str, namespace: &str, name: &str) -> Option<Vec<RbacRule>> {
        let rules = if kind == "ClusterRole" {
            self.cluster_roles.get(name)
        } else {
            self.roles.get(&(namespace.to_string(), name.to_string()))
        };
        rules.cloned()
    }

    /// The rules that apply to a user in a namespace, or cluster-wide when it is empty.
    pub fn rules_of<'a>(&'a self, user: &User, namespace: &str) -> Vec<&'a RbacRule> {
        let local = self.bindings.get(namespace).into_iter().flatten();
        self.cluster_bindings
            .iter()
            .chain(local)
            .filter(|binding| binding.binds(user))
            .filter_map(|binding| match binding.role_kind.as_str() {
                "ClusterRole" => self.cluster_roles.get(&binding.role_name),
                _ => self.roles.get(&(binding.namespace.clone(), binding.role_name.clone())),
            })
            .flatten()
            .collect()
    }

    /// The rules of aggregated cluster roles, by name, in the format of roles.
    pub fn aggregated(&self) -> impl Iterator<Item = (&str, Value)> {
        self.aggregated.iter().map(|name| {
            let rules = self.cluster_roles.get(name).into_iter().flatten().map(RbacRule::to_value).collect();
            (name.as_str(), Value::Array(rules))
        })
    }

    /// Whether the user is allowed to make the request.
    pub fn allows(&self, user: &User, asked: &Attributes<'_>) -> bool {
        user.groups.iter().any(|group| group == MASTERS)
            || self.rules_of(user, asked.namespace).iter().any(|rule| rule.allows(asked))
    }

    /// Whether a user has all permissions of a rule; of a rule with more than [`MAX_PERMISSIONS`] nobody has but
    /// administrators.
    pub fn covers(&self, user: &User, namespace: &str, requested: &RbacRule) -> bool {
        if user.groups.iter().any(|group| group == MASTERS) {
            return true;
        }
        if requested.permissions() > MAX_PERMISSIONS {
            return false;
        }
        let held = self.rules_of(user, namespace);
        let covered = |asked: &Attributes<'_>| held.iter().any(|rule| rule.allows(asked));
        let any_name = [String::new()];
        let names = if requested.names.is_empty() { &any_name[..] } else { &requested.names };
        requested.verbs.iter().all(|verb| {
            let urls = requested
                .urls
                .iter()
                .all(|path| covered(&Attributes { verb, path, ..Attributes::default() }));
            let resources = requested.groups.iter().all(|group| {
                requested.resources.iter().all(|entry| {
                    let (resource, subresource) = entry.split_once('/').unwrap_or((entry, ""));
                    names.iter().all(|name| {
                        covered(&Attributes { verb, group, resource, subresource, namespace, name, path: "" })
                    })
                })
            });
            urls && resources
        })
    }
}

fn aggregated(role: &Value, all: &[Value], seen: &mut Vec<String>) -> Vec<RbacRule> {
    let Some(selectors) = role["aggregationRule"]["clusterRoleSelectors"].as_array() else {
        return rules(&role["rules"]);
    };
    // The rules stored in an aggregated role are those collected before.
    let mut collected = Vec::new();
    seen.push(object::name(role).to_string());
    for other in all {
        let chosen =
            selectors.iter().any(|selector| selector::matches_labels(selector, &other["metadata"]["labels"]));
        if chosen && !seen.iter().any(|name| name == object::name(other)) {
            for rule in aggregated(other, all, seen) {
                if !collected.contains(&rule) {
                    collected.push(rule);
                }
            }
        }
    }
    collected
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn policy() -> Policy {
        Policy::new([
            json!({"kind": "ClusterRole", "metadata": {"name": "reader", "labels": {"agg": "yes"}},
                "rules": [{"verbs": ["get", "list"], "apiGroups": [""], "resources": ["configmaps", "things/status"]}]}),
            json!({"kind": "ClusterRole", "metadata": {"name": "sum"},
                "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"agg": "yes"}}]}}),
            json!({"kind": "Role", "metadata": {"name": "one", "namespace": "a"},
                "rules": [{"verbs": ["*"], "apiGroups": [""], "resources": ["secrets"], "resourceNames": ["mine"]}]}),
            json!({"kind": "ClusterRoleBinding", "metadata": {"name": "b"}, "subjects": [{"kind": "Group", "name": "staff"}],
                "roleRef": {"kind": "ClusterRole", "name": "sum"}}),
            json!({"kind": "RoleBinding", "metadata": {"name": "c", "namespace": "a"},
                "subjects": [{"kind": "ServiceAccount", "name": "robot"}], "roleRef": {"kind": "Role", "name": "one"}}),
        ])
    }

    #[test]
    fn the_policy_allows_what_it_says_and_nothing_else() {
        let policy = policy();
        let staff = User::authenticated("eve", vec!["staff".into()]);
        let robot = User::authenticated("system:serviceaccount:a:robot", Vec::new());
        let ask = |user: &User, verb, namespace, resource, subresource, name| {
            policy.allows(
                user,
                &Attributes { verb, resource, subresource, namespace, name, ..Attributes::default() },
            )
        };
        for (allowed, expected) in [
            (ask(&staff, "get", "x", "configmaps", "", "c"), true),
            (ask(&staff, "delete", "x", "configmaps", "", "c"), false),
            (ask(&staff, "get", "x", "things", "status", "c"), true),
            (ask(&staff, "get", "x", "things", "", "c"), false),
            (ask(&robot, "delete", "a", "secrets", "", "mine"), true),
            (ask(&robot, "delete", "a", "secrets", "", "other"), false),
            (ask(&robot, "get", "b", "secrets", "", "mine"), false),
            (ask(&User::server(), "anything", "b", "secrets", "", "mine"), true),
        ] {
            assert_eq!(allowed, expected);
        }
    }

    #[test]
    fn escalation_check_refuses_rules_the_user_lacks() {
        let policy = policy();
        let staff = User::authenticated("eve", vec!["staff".into()]);
        let rule = |verb: &str| RbacRule {
            verbs: vec![verb.into()],
            groups: vec!["".into()],
            resources: vec!["configmaps".into()],
            ..RbacRule::default()
        };
        assert!(policy.covers(&staff, "x", &rule("get")));
        assert!(!policy.covers(&staff, "x", &rule("*")));
        assert!(!policy.covers(&staff, "x", &RbacRule::everything()));
    }
}
