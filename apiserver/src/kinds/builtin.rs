//! The table of built-in resources. A kind is added by adding a line; its special rules go to
//! [`super::rules`].

use super::resource::{Backing, Resource};

/// The API group of admission policies and bindings.
pub const ADMISSION_GROUP: &str = "admissionregistration.k8s.io";

const ALL: &[&str] = &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];
/// Workload kinds that this control plane does not run; clients list them and must find none.
const READ: &[&str] = &["get", "list", "watch"];
const ASK: &[&str] = &["create"];

struct BuiltinKind {
    group: &'static str,
    version: &'static str,
    plural: &'static str,
    kind: &'static str,
    short: &'static [&'static str],
    namespaced: bool,
    verbs: &'static [&'static str],
    subresources: &'static [&'static str],
    /// The resource whose objects it serves, when it is another one.
    stored_as: Option<(&'static str, &'static str)>,
}

const fn builtin_kind(
    (group, version): (&'static str, &'static str),
    plural: &'static str,
    kind: &'static str,
    short: &'static [&'static str],
    namespaced: bool,
    verbs: &'static [&'static str],
    subresources: &'static [&'static str],
) -> BuiltinKind {
    BuiltinKind { group, version, plural, kind, short, namespaced, verbs, subresources, stored_as: None }
}

const CORE: (&str, &str) = ("", "v1");
const RBAC: (&str, &str) = ("rbac.authorization.k8s.io", "v1");
const AUTHORIZATION: (&str, &str) = ("authorization.k8s.io", "v1");
const ADMISSION: (&str, &str) = (ADMISSION_GROUP, "v1");
const AUTHENTICATION: (&str, &str) = ("authentication.k8s.io", "v1");

const BUILTIN_KINDS: &[BuiltinKind] = &[
    builtin_kind(CORE, "configmaps", "ConfigMap", &["cm"], true, ALL, &[]),
    builtin_kind(CORE, "events", "Event", &["ev"], true, ALL, &[]),
    builtin_kind(CORE, "namespaces", "Namespace", &["ns"], false, ALL, &["status", "finalize"]),
    builtin_kind(CORE, "nodes", "Node", &["no"], false, READ, &[]),
    builtin_kind(CORE, "pods", "Pod", &["po"], true, READ, &[]),
    builtin_kind(CORE, "resourcequotas", "ResourceQuota", &["quota"], true, ALL, &["status"]),
    builtin_kind(CORE, "secrets", "Secret", &[], true, ALL, &[]),
    builtin_kind(CORE, "serviceaccounts", "ServiceAccount", &["sa"], true, ALL, &["token"]),
    builtin_kind(CORE, "services", "Service", &["svc"], true, READ, &[]),
    builtin_kind(("coordination.k8s.io", "v1"), "leases", "Lease", &[], true, ALL, &[]),
    builtin_kind(RBAC, "clusterroles", "ClusterRole", &[], false, ALL, &[]),
    builtin_kind(RBAC, "clusterrolebindings", "ClusterRoleBinding", &[], false, ALL, &[]),
    builtin_kind(RBAC, "roles", "Role", &[], true, ALL, &[]),
    builtin_kind(RBAC, "rolebindings", "RoleBinding", &[], true, ALL, &[]),
    builtin_kind(
        ADMISSION,
        "validatingadmissionpolicies",
        "ValidatingAdmissionPolicy",
        &[],
        false,
        ALL,
        &["status"],
    ),
    builtin_kind(
        ADMISSION,
        "validatingadmissionpolicybindings",
        "ValidatingAdmissionPolicyBinding",
        &[],
        false,
        ALL,
        &[],
    ),
    builtin_kind(
        ("apiextensions.k8s.io", "v1"),
        "customresourcedefinitions",
        "CustomResourceDefinition",
        &["crd", "crds"],
        false,
        ALL,
        &["status"],
    ),
    builtin_kind(
        ("certificates.k8s.io", "v1"),
        "certificatesigningrequests",
        "CertificateSigningRequest",
        &["csr"],
        false,
        ALL,
        &["status", "approval"],
    ),
    BuiltinKind {
        group: "events.k8s.io",
        version: "v1",
        plural: "events",
        kind: "Event",
        short: &["ev"],
        namespaced: true,
        verbs: ALL,
        subresources: &[],
        stored_as: Some(("", "events")),
    },
    builtin_kind(AUTHORIZATION, "selfsubjectaccessreviews", "SelfSubjectAccessReview", &[], false, ASK, &[]),
    builtin_kind(AUTHORIZATION, "selfsubjectrulesreviews", "SelfSubjectRulesReview", &[], false, ASK, &[]),
    builtin_kind(AUTHORIZATION, "subjectaccessreviews", "SubjectAccessReview", &[], false, ASK, &[]),
    builtin_kind(AUTHORIZATION, "localsubjectaccessreviews", "LocalSubjectAccessReview", &[], true, ASK, &[]),
    builtin_kind(AUTHENTICATION, "selfsubjectreviews", "SelfSubjectReview", &[], false, ASK, &[]),
    builtin_kind(AUTHENTICATION, "tokenreviews", "TokenReview", &[], false, ASK, &[]),
];

/// The storage prefix of a resource.
pub fn prefix(group: &str, plural: &str) -> String {
    let group = if group.is_empty() { "core" } else { group };
    format!("/registry/{group}/{plural}/")
}

/// The built-in resources.
pub fn resources() -> Vec<Resource> {
    BUILTIN_KINDS.iter().map(resource).collect()
}

fn resource(line: &BuiltinKind) -> Resource {
    let (group, plural) = line.stored_as.unwrap_or((line.group, line.plural));
    let computed = line.verbs.len() == 1;
    Resource {
        group: line.group.into(),
        version: line.version.into(),
        plural: line.plural.into(),
        singular: line.kind.to_lowercase(),
        kind: line.kind.into(),
        list_kind: format!("{}List", line.kind),
        short_names: line.short.iter().map(ToString::to_string).collect(),
        categories: if matches!(line.plural, "pods" | "services") { vec!["all".into()] } else { Vec::new() },
        namespaced: line.namespaced,
        verbs: line.verbs,
        subresources: line.subresources.to_vec(),
        backing: if computed { Backing::Computed } else { Backing::Stored },
        prefix: prefix(group, plural),
        columns: crate::table::builtin_columns(line.group, line.kind),
        custom: None,
    }
}
