//! The default roles and bindings of a control plane. Missing ones are created at start; existing ones are
//! never changed: an administrator's edits stay.

use serde_json::{Value, json};

use super::rbac::GROUP;

const LABEL: &str = "kubernetes.io/bootstrapping";
const READ: &[&str] = &["get", "list", "watch"];
const EDIT: &[&str] = &["get", "list", "watch", "create", "delete", "deletecollection", "patch", "update"];

fn role(name: &str, rules: Value) -> Value {
    json!({
        "apiVersion": format!("{GROUP}/v1"), "kind": "ClusterRole",
        "metadata": {"name": name, "labels": {LABEL: "rbac-defaults"}}, "rules": rules,
    })
}

fn aggregated(name: &str, into: &str) -> Value {
    let mut role = role(name, json!([]));
    role["aggregationRule"] = json!({"clusterRoleSelectors": [{"matchLabels": {into: "true"}}]});
    role
}

fn part(name: &str, into: &str, rules: Value) -> Value {
    let mut role = role(name, rules);
    role["metadata"]["labels"][into] = json!("true");
    role
}

fn binding(name: &str, role: &str, groups: &[&str]) -> Value {
    let subjects: Vec<Value> =
        groups.iter().map(|group| json!({"kind": "Group", "apiGroup": GROUP, "name": group})).collect();
    json!({
        "apiVersion": format!("{GROUP}/v1"), "kind": "ClusterRoleBinding",
        "metadata": {"name": name, "labels": {LABEL: "rbac-defaults"}},
        "roleRef": {"apiGroup": GROUP, "kind": "ClusterRole", "name": role}, "subjects": subjects,
    })
}

/// The default cluster roles.
pub fn cluster_roles() -> Vec<Value> {
    let to = |role: &str| format!("rbac.authorization.k8s.io/aggregate-to-{role}");
    let (to_admin, to_edit, to_view) = (to("admin"), to("edit"), to("view"));
    let mut edit = aggregated("edit", &to_edit);
    edit["metadata"]["labels"][&to_admin] = json!("true");
    let mut view = aggregated("view", &to_view);
    view["metadata"]["labels"][&to_edit] = json!("true");
    vec![
        role(
            "cluster-admin",
            json!([
                {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]},
                {"nonResourceURLs": ["*"], "verbs": ["*"]},
            ]),
        ),
        aggregated("admin", &to_admin),
        edit,
        view,
        part(
            "system:aggregate-to-admin",
            &to_admin,
            json!([{"apiGroups": [GROUP], "resources": ["roles", "rolebindings"], "verbs": EDIT}]),
        ),
        part(
            "system:aggregate-to-edit",
            &to_edit,
            json!([
                {"apiGroups": [""], "resources": ["configmaps", "secrets", "serviceaccounts", "events"], "verbs": EDIT},
                {"apiGroups": [""], "resources": ["serviceaccounts/token"], "verbs": ["create"]},
                {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": EDIT},
                {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": EDIT},
            ]),
        ),
        part(
            "system:aggregate-to-view",
            &to_view,
            json!([
                {"apiGroups": [""], "resources": ["configmaps", "serviceaccounts", "events", "namespaces", "pods", "services", "resourcequotas", "resourcequotas/status"], "verbs": READ},
                {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": READ},
                {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": READ},
            ]),
        ),
        role(
            "system:discovery",
            json!([{
                "nonResourceURLs": ["/api", "/api/*", "/apis", "/apis/*", "/healthz", "/livez", "/openapi", "/openapi/*", "/readyz", "/version", "/version/"],
                "verbs": ["get"],
            }]),
        ),
        role(
            "system:service-account-issuer-discovery",
            json!([{
                "nonResourceURLs": ["/.well-known/openid-configuration", "/.well-known/openid-configuration/", "/openid/v1/jwks", "/openid/v1/jwks/"],
                "verbs": ["get"],
            }]),
        ),
        role(
            "system:public-info-viewer",
            json!([{"nonResourceURLs": ["/healthz", "/livez", "/readyz", "/version", "/version/"], "verbs": ["get"]}]),
        ),
        role(
            "system:basic-user",
            json!([
                {"apiGroups": ["authorization.k8s.io"], "resources": ["selfsubjectaccessreviews", "selfsubjectrulesreviews"], "verbs": ["create"]},
                {"apiGroups": ["authentication.k8s.io"], "resources": ["selfsubjectreviews"], "verbs": ["create"]},
            ]),
        ),
        role(
            "system:node-bootstrapper",
            json!([{"apiGroups": ["certificates.k8s.io"], "resources": ["certificatesigningrequests"], "verbs": ["create", "get", "list", "watch"]}]),
        ),
    ]
}

/// The default cluster role bindings.
pub fn cluster_role_bindings() -> Vec<Value> {
    use crate::auth::user::{AUTHENTICATED, MASTERS, UNAUTHENTICATED};
    vec![
        binding("cluster-admin", "cluster-admin", &[MASTERS]),
        binding("system:discovery", "system:discovery", &[AUTHENTICATED]),
        binding(
            "system:service-account-issuer-discovery",
            "system:service-account-issuer-discovery",
            &["system:serviceaccounts"],
        ),
        binding("system:basic-user", "system:basic-user", &[AUTHENTICATED]),
        binding("system:public-info-viewer", "system:public-info-viewer", &[AUTHENTICATED, UNAUTHENTICATED]),
        binding("system:node-bootstrapper", "system:node-bootstrapper", &["system:bootstrappers"]),
    ]
}
