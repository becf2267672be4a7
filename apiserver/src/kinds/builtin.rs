//! The built-in resources, as one table. A kind is added by adding a line; what makes it special goes to [`super::rules`].

use super::{Backing, Resource};

const ALL: &[&str] = &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];
/// Kinds of workloads that this control plane does not run; clients look them up and must find none.
const READ: &[&str] = &["get", "list", "watch"];
const ASK: &[&str] = &["create"];

struct Line {
    group: &'static str,
    version: &'static str,
    plural: &'static str,
    kind: &'static str,
    short: &'static [&'static str],
    namespaced: bool,
    verbs: &'static [&'static str],
    subresources: &'static [&'static str],
    /// The resource whose objects these are, when it is another one.
    stored_as: Option<(&'static str, &'static str)>,
}

const fn line(
    (group, version): (&'static str, &'static str),
    plural: &'static str,
    kind: &'static str,
    short: &'static [&'static str],
    namespaced: bool,
    verbs: &'static [&'static str],
    subresources: &'static [&'static str],
) -> Line {
    Line { group, version, plural, kind, short, namespaced, verbs, subresources, stored_as: None }
}

const CORE: (&str, &str) = ("", "v1");
const RBAC: (&str, &str) = ("rbac.authorization.k8s.io", "v1");
const AUTHORIZATION: (&str, &str) = ("authorization.k8s.io", "v1");
const ADMISSION: (&str, &str) = (crate::admission::GROUP, "v1");
const AUTHENTICATION: (&str, &str) = ("authentication.k8s.io", "v1");

const LINES: &[Line] = &[
    line(CORE, "configmaps", "ConfigMap", &["cm"], true, ALL, &[]),
    line(CORE, "events", "Event", &["ev"], true, ALL, &[]),
    line(CORE, "namespaces", "Namespace", &["ns"], false, ALL, &["status", "finalize"]),
    line(CORE, "nodes", "Node", &["no"], false, READ, &[]),
    line(CORE, "pods", "Pod", &["po"], true, READ, &[]),
    line(CORE, "secrets", "Secret", &[], true, ALL, &[]),
    line(CORE, "serviceaccounts", "ServiceAccount", &["sa"], true, ALL, &["token"]),
    line(CORE, "services", "Service", &["svc"], true, READ, &[]),
    line(("coordination.k8s.io", "v1"), "leases", "Lease", &[], true, ALL, &[]),
    line(RBAC, "clusterroles", "ClusterRole", &[], false, ALL, &[]),
    line(RBAC, "clusterrolebindings", "ClusterRoleBinding", &[], false, ALL, &[]),
    line(RBAC, "roles", "Role", &[], true, ALL, &[]),
    line(RBAC, "rolebindings", "RoleBinding", &[], true, ALL, &[]),
    line(ADMISSION, "validatingadmissionpolicies", "ValidatingAdmissionPolicy", &[], false, ALL, &["status"]),
    line(
        ADMISSION,
        "validatingadmissionpolicybindings",
        "ValidatingAdmissionPolicyBinding",
        &[],
        false,
        ALL,
        &[],
    ),
    line(
        ("apiextensions.k8s.io", "v1"),
        "customresourcedefinitions",
        "CustomResourceDefinition",
        &["crd", "crds"],
        false,
        ALL,
        &["status"],
    ),
    line(
        ("certificates.k8s.io", "v1"),
        "certificatesigningrequests",
        "CertificateSigningRequest",
        &["csr"],
        false,
        ALL,
        &["status", "approval"],
    ),
    Line {
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
    line(AUTHORIZATION, "selfsubjectaccessreviews", "SelfSubjectAccessReview", &[], false, ASK, &[]),
    line(AUTHORIZATION, "selfsubjectrulesreviews", "SelfSubjectRulesReview", &[], false, ASK, &[]),
    line(AUTHORIZATION, "subjectaccessreviews", "SubjectAccessReview", &[], false, ASK, &[]),
    line(AUTHORIZATION, "localsubjectaccessreviews", "LocalSubjectAccessReview", &[], true, ASK, &[]),
    line(AUTHENTICATION, "selfsubjectreviews", "SelfSubjectReview", &[], false, ASK, &[]),
    line(AUTHENTICATION, "tokenreviews", "TokenReview", &[], false, ASK, &[]),
];

/// The storage prefix of a resource.
pub fn prefix(group: &str, plural: &str) -> String {
    let group = if group.is_empty() { "core" } else { group };
    format!("/registry/{group}/{plural}/")
}

/// The built-in resources.
pub fn resources() -> Vec<Resource> {
    LINES.iter().map(resource).collect()
}

fn resource(line: &Line) -> Resource {
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
