//! Request matching of policies and bindings: `matchConstraints` and `matchResources`.

use std::sync::Arc;

use serde_json::Value;

use super::attempt::AdmissionRequest;
use crate::kinds;
use crate::kinds::resource::Resource;
use crate::kinds::table::Table;
use crate::selector;
use crate::store::Store;

/// The compiled `matchConstraints`.
#[derive(Clone, Debug, Default)]
pub struct Matching {
    rules: Vec<MatchRule>,
    excluded: Vec<MatchRule>,
    /// Whether a rule for one version of a resource also matches its other versions.
    equivalent: bool,
    namespaces: Value,
    objects: Value,
}

#[derive(Clone, Debug, Default)]
struct MatchRule {
    operations: Vec<String>,
    groups: Vec<String>,
    versions: Vec<String>,
    resources: Vec<String>,
    names: Vec<String>,
    scope: String,
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_string).collect()
}

fn listed(list: &[String], value: &str) -> bool {
    list.iter().any(|entry| entry == "*" || entry == value)
}

impl MatchRule {
    fn read(rule: &Value) -> Self {
        Self {
            operations: strings(&rule["operations"]),
            groups: strings(&rule["apiGroups"]),
            versions: strings(&rule["apiVersions"]),
            resources: strings(&rule["resources"]),
            names: strings(&rule["resourceNames"]),
            scope: rule["scope"].as_str().unwrap_or("*").to_string(),
        }
    }

    fn covers(&self, attempt: &AdmissionRequest<'_>, resource: &Resource) -> bool {
        let subresource = attempt.call.subresource.as_str();
        let of_resource = self.resources.iter().any(|entry| {
            let (main, sub) = entry.split_once('/').unwrap_or((entry, ""));
            (main == "*" || main == resource.plural) && (sub == "*" || sub == subresource)
        });
        let in_scope = match self.scope.as_str() {
            "Cluster" => !resource.namespaced,
            "Namespaced" => resource.namespaced,
            _ => true,
        };
        of_resource
            && in_scope
            && listed(&self.operations, attempt.operation.as_str())
            && listed(&self.groups, &resource.group)
            && listed(&self.versions, &resource.version)
            && (self.names.is_empty() || self.names.contains(&attempt.call.name))
    }
}

/// The resource as which one of the rules matches a request.
fn covered(
    rules: &[MatchRule],
    attempt: &AdmissionRequest<'_>,
    equivalent: bool,
    table: &Table,
) -> Option<Arc<Resource>> {
    let own = &attempt.call.resource;
    if rules.iter().any(|rule| rule.covers(attempt, own)) {
        return Some(own.clone());
    }
    if !equivalent {
        return None;
    }
    // The same objects under another group or version.
    let others = || table.all().iter().filter(|other| other.prefix == own.prefix && !attempt.is_of(other));
    rules.iter().find_map(|rule| others().find(|other| rule.covers(attempt, other)).cloned())
}

impl Matching {
    /// Compiles `matchConstraints` or `matchResources`.
    pub fn read(source: &Value) -> Self {
        let rules =
            |field: &str| source[field].as_array().into_iter().flatten().map(MatchRule::read).collect();
        Self {
            rules: rules("resourceRules"),
            excluded: rules("excludeResourceRules"),
            equivalent: source["matchPolicy"] != "Exact",
            namespaces: source["namespaceSelector"].clone(),
            objects: source["objectSelector"].clone(),
        }
    }

    /// The resource as which a request matches; `None` if it does not match. Without rules every request
    /// matches.
    pub fn covers(
        &self,
        table: &Table,
        store: &dyn Store,
        attempt: &AdmissionRequest<'_>,
    ) -> Option<Arc<Resource>> {
        let found = if self.rules.is_empty() {
            attempt.call.resource.clone()
        } else {
            covered(&self.rules, attempt, self.equivalent, table)?
        };
        let excluded = covered(&self.excluded, attempt, self.equivalent, table).is_some();
        (!excluded && self.selects_namespace(store, attempt) && self.selects_object(attempt)).then_some(found)
    }

    fn selects_object(&self, attempt: &AdmissionRequest<'_>) -> bool {
        is_open(&self.objects)
            || [attempt.new, attempt.old]
                .into_iter()
                .flatten()
                .any(|object| selector::matches_labels(&self.objects, &object["metadata"]["labels"]))
    }

    /// Matches the labels of the object's namespace; for a namespace, its own labels. Cluster-scoped objects
    /// have no namespace and always match.
    fn selects_namespace(&self, store: &dyn Store, attempt: &AdmissionRequest<'_>) -> bool {
        let call = attempt.call;
        let itself = call.resource.group.is_empty() && call.resource.kind == "Namespace";
        if is_open(&self.namespaces) || !(itself || call.resource.namespaced) {
            return true;
        }
        if let Some(namespace) = attempt.new.or(attempt.old).filter(|_| itself) {
            return selector::matches_labels(&self.namespaces, &namespace["metadata"]["labels"]);
        }
        match store.get(&kinds::builtin_namespace_key(&call.namespace)) {
            Some(record) => {
                selector::matches_labels(&self.namespaces, &record.object()["metadata"]["labels"])
            }
            None => selector::matches_labels(&self.namespaces, &Value::Null),
        }
    }
}

/// Whether a selector matches everything.
fn is_open(selector: &Value) -> bool {
    let none = |field: &str| {
        let field = &selector[field];
        field.as_object().is_none_or(serde_json::Map::is_empty) && field.as_array().is_none_or(Vec::is_empty)
    };
    none("matchLabels") && none("matchExpressions")
}
