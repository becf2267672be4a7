//! Attempts of a node: its own work, which must succeed, and all else, each rejected with 403 and a message
//! that names the action. `MINE` is the requesting node; `THEIRS` is another node.

use serde_json::{Value, json};

use crate::server::Request;

/// The requesting node.
pub const OWN_NODE: &str = "attempt-a";
/// Another node.
pub const OTHER_NODE: &str = "attempt-b";
/// A node with an over-privileged role.
pub const OVERPRIVILEGED_NODE: &str = "attempt-c";
/// Namespace of the models and ranks.
pub const NAMESPACE: &str = "attempts";

const RUSSET: &str = "/apis/russet.dev/v1alpha1";
const NODES: &str = "/apis/russet.dev/v1alpha1/inferencenodes";
const COPIES: &str = "/apis/russet.dev/v1alpha1/modelcopies";
const SHARDS: &str = "/apis/russet.dev/v1alpha1/namespaces/attempts/shards";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/russet-system/leases";
const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/default/events";
const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
const POLICIES: &str = "/apis/admissionregistration.k8s.io/v1";

/// One attempt.
pub struct Attempt {
    /// The action.
    pub what: &'static str,
    /// The request.
    pub request: Request,
    /// Words of the rejection, by role or by policy.
    pub words: Vec<String>,
}

/// The policy's rejection of a node.
fn policy(node: &str, words: &str) -> Vec<String> {
    vec![
        "ValidatingAdmissionPolicy 'russet-nodes' with binding 'russet-nodes' denied request: ".into(),
        format!("node {node} {words}"),
    ]
}

/// The roles' rejection.
fn role(words: &str) -> Vec<String> {
    vec![" is forbidden: User ".into(), words.into()]
}

fn refused(what: &'static str, request: Request, words: Vec<String>) -> Attempt {
    Attempt { what, request, words }
}

fn allowed(what: &'static str, request: Request) -> Attempt {
    Attempt { what, request, words: Vec::new() }
}

/// The object with a finalizer.
fn held(mut object: Value) -> Value {
    object["metadata"]["finalizers"] = json!(["example.com/hold"]);
    object
}

fn status(kind: &str, status: Value) -> Value {
    json!({"apiVersion": "russet.dev/v1alpha1", "kind": kind, "status": status})
}

fn lease(name: &str) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": name}, "spec": {"holderIdentity": "boot", "leaseDurationSeconds": 20},
    })
}

fn event(name: &str, kind: &str, about: &str) -> Value {
    json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": name, "namespace": "default"},
        "eventTime": "2026-01-01T00:00:00.000000Z", "type": "Normal", "reason": "Attempted", "action": "Attempt",
        "reportingController": "russet.dev/attempts", "reportingInstance": "attempts",
        "regarding": {"apiVersion": "russet.dev/v1alpha1", "kind": kind, "name": about},
    })
}

/// A Model of this source.
pub fn model(name: &str, uri: &str) -> Value {
    json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "Model", "metadata": {"name": name},
        "spec": {"source": {"uri": uri}},
    })
}

/// A certificate signing request: `body` is base64 of its PEM.
pub fn signing(name: &str, signer: &str, body: &str) -> Value {
    json!({
        "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": {"name": name},
        "spec": {"signerName": signer, "request": body, "usages": ["client auth", "digital signature"]},
    })
}

/// A rank bound to a node.
pub fn shard(name: &str, node: &str) -> Value {
    json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "Shard", "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "nodeName": node, "groupRef": {"name": "none"}, "groupUid": "none", "epoch": 1, "rank": 0,
            "modelRef": {"name": "none"}, "servedModelName": "none", "layersPerRank": [1], "contextTokens": 1,
            "maxSequences": 1, "weightBytes": 1, "kvBytes": 1, "overheadBytes": 1,
        },
    })
}

/// Files requested from a node.
pub fn copy(name: &str, node: &str) -> Value {
    json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "ModelCopy", "metadata": {"name": name},
        "spec": {"nodeName": node, "modelRef": {"name": "none", "namespace": NAMESPACE}, "source": {"uri": "hf://none/none"}},
    })
}

/// A node.
pub fn node(name: &str) -> Value {
    json!({"apiVersion": "russet.dev/v1alpha1", "kind": "InferenceNode", "metadata": {"name": name}, "spec": {}})
}

/// Actions that a node needs. `csr` is a request body, `round` makes names unique.
pub fn allowed_attempts(csr: &str, round: &str) -> Vec<Attempt> {
    let own_lease = format!("{LEASES}/node-{OWN_NODE}");
    vec![
        allowed(
            "report its status",
            Request::apply(
                &format!("{NODES}/{OWN_NODE}/status"),
                status("InferenceNode", json!({"chip": round})),
            ),
        ),
        allowed("make its Lease", Request::apply(&own_lease, lease(&format!("node-{OWN_NODE}")))),
        allowed("renew its Lease", Request::merge(&own_lease, json!({"spec": {"holderIdentity": round}}))),
        allowed(
            "report a rank of its own",
            Request::apply(&format!("{SHARDS}/mine/status"), status("Shard", json!({"observedEpoch": 1}))),
        ),
        allowed(
            "report a copy of its own",
            Request::apply(
                &format!("{COPIES}/attempt-mine/status"),
                status("ModelCopy", json!({"bytesDone": 1})),
            ),
        ),
        allowed(
            "say something about itself",
            Request::create(EVENTS, event(&format!("{OWN_NODE}.{round}"), "InferenceNode", OWN_NODE)),
        ),
        allowed(
            "ask for its certificate",
            Request::create(REQUESTS, signing(&format!("attempt-{round}"), "russet.dev/node", csr)),
        ),
        allowed("read what it serves", Request::get(SHARDS)),
        allowed(
            "ask who it is",
            Request::create(
                "/apis/authentication.k8s.io/v1/selfsubjectreviews",
                json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}),
            ),
        ),
        allowed(
            "ask what it may",
            Request::create(
                "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
                json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
                    "spec": {"resourceAttributes": {"verb": "get", "resource": "secrets"}}}),
            ),
        ),
    ]
}

/// Actions that no node may do.
pub fn forbidden_attempts(csr: &str, round: &str) -> Vec<Attempt> {
    let status_of = |place: &str, kind: &str| {
        Request::apply(&format!("{place}/status"), status(kind, json!({"conditions": []})))
    };
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "attempt"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "russet:nodes"}],
    });
    let token = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "attempt"}});
    let mut owned = lease(&format!("node-{OWN_NODE}"));
    owned["metadata"]["ownerReferences"] = json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "00000000-0000-4000-8000-000000000000"}]);
    vec![
        // Other nodes.
        refused(
            "report another node's status",
            status_of(&format!("{NODES}/{OTHER_NODE}"), "InferenceNode"),
            policy(OWN_NODE, &format!("may write its own InferenceNode only, not {OTHER_NODE}")),
        ),
        refused(
            "report another node's status without storing it",
            Request::apply(
                &format!("{NODES}/{OTHER_NODE}/status?dryRun=All"),
                status("InferenceNode", json!({"chip": "x"})),
            ),
            policy(OWN_NODE, &format!("may write its own InferenceNode only, not {OTHER_NODE}")),
        ),
        refused(
            "patch another node's status",
            Request::merge(&format!("{NODES}/{OTHER_NODE}/status"), json!({"status": {"chip": "x"}})),
            policy(OWN_NODE, &format!("may write its own InferenceNode only, not {OTHER_NODE}")),
        ),
        refused(
            "replace another node's status",
            Request::replace(&format!("{NODES}/{OTHER_NODE}/status"), node(OTHER_NODE)),
            role("cannot update resource \"inferencenodes/status\""),
        ),
        refused(
            "remove another node",
            Request::delete(&format!("{NODES}/{OTHER_NODE}")),
            vec![format!("\"{OTHER_NODE}\" is forbidden")],
        ),
        refused(
            "remove all nodes",
            Request::delete(NODES),
            role("cannot deletecollection resource \"inferencenodes\""),
        ),
        refused(
            "make another node",
            Request::create(NODES, node("attempt-new")),
            vec!["inferencenodes.russet.dev".into(), "is forbidden".into()],
        ),
        refused(
            "make another node by applying it",
            Request::apply(&format!("{NODES}/attempt-new"), node("attempt-new")),
            role("cannot patch resource \"inferencenodes\""),
        ),
        // Its own spec and labels.
        refused(
            "uncordon itself",
            Request::merge(&format!("{NODES}/{OWN_NODE}"), json!({"spec": {"scheduling": "Enabled"}})),
            role("cannot patch resource \"inferencenodes\""),
        ),
        refused(
            "label itself",
            Request::merge(&format!("{NODES}/{OWN_NODE}"), json!({"metadata": {"labels": {"zone": "x"}}})),
            role("cannot patch resource \"inferencenodes\""),
        ),
        refused(
            "label itself as a larger machine, which pools would select",
            Request::merge(
                &format!("{NODES}/{OWN_NODE}"),
                json!({"metadata": {"labels": {"russet.dev/memory": "512Gi"}}}),
            ),
            role("cannot patch resource \"inferencenodes\""),
        ),
        refused(
            "make a pool of every node",
            Request::create(
                &format!("{RUSSET}/nodepools"),
                json!({
                    "apiVersion": "russet.dev/v1alpha1", "kind": "NodePool", "metadata": {"name": "attempt"},
                    "spec": {"selector": {}},
                }),
            ),
            role("cannot create resource \"nodepools\""),
        ),
        // Work.
        refused(
            "report another node's rank",
            status_of(&format!("{SHARDS}/theirs"), "Shard"),
            policy(
                OWN_NODE,
                &format!("may write the status of what is on it only, and Shard theirs is on {OTHER_NODE}"),
            ),
        ),
        refused(
            "report another node's copy",
            status_of(&format!("{COPIES}/attempt-theirs"), "ModelCopy"),
            policy(
                OWN_NODE,
                &format!(
                    "may write the status of what is on it only, and ModelCopy attempt-theirs is on {OTHER_NODE}"
                ),
            ),
        ),
        refused(
            "bind a rank to itself",
            Request::merge(&format!("{SHARDS}/theirs"), json!({"spec": {"nodeName": OWN_NODE}})),
            role("cannot patch resource \"shards\""),
        ),
        refused(
            "make a rank",
            Request::create(SHARDS, shard("new", OWN_NODE)),
            role("cannot create resource \"shards\""),
        ),
        refused(
            "remove its rank",
            Request::delete(&format!("{SHARDS}/mine")),
            role("cannot delete resource \"shards\""),
        ),
        refused(
            "make a copy",
            Request::create(COPIES, copy("attempt-new", OWN_NODE)),
            role("cannot create resource \"modelcopies\""),
        ),
        refused(
            "change a copy's source",
            Request::merge(
                &format!("{COPIES}/attempt-mine"),
                json!({"spec": {"source": {"uri": "hf://evil/evil"}}}),
            ),
            role("cannot patch resource \"modelcopies\""),
        ),
        refused(
            "make a model",
            Request::apply(
                &format!("{RUSSET}/namespaces/{NAMESPACE}/models/new"),
                json!({"apiVersion": "russet.dev/v1alpha1", "kind": "Model", "spec": {"source": {"uri": "hf://none/none"}}}),
            ),
            role("cannot patch resource \"models\""),
        ),
        refused(
            "change a group's status",
            status_of(&format!("{RUSSET}/namespaces/{NAMESPACE}/shardgroups/none"), "ShardGroup"),
            role("cannot patch resource \"shardgroups/status\""),
        ),
        refused(
            "read keys",
            Request::get(&format!("{RUSSET}/namespaces/{NAMESPACE}/accesskeys")),
            role("cannot list resource \"accesskeys\""),
        ),
        // Leases.
        refused(
            "make another node's Lease",
            Request::apply(&format!("{LEASES}/node-{OTHER_NODE}"), lease(&format!("node-{OTHER_NODE}"))),
            policy(
                OWN_NODE,
                &format!(
                    "may write Lease russet-system/node-{OWN_NODE} only, not russet-system/node-{OTHER_NODE}"
                ),
            ),
        ),
        refused(
            "take the operator's Lease",
            Request::apply(&format!("{LEASES}/russet-operator"), lease("russet-operator")),
            policy(
                OWN_NODE,
                &format!(
                    "may write Lease russet-system/node-{OWN_NODE} only, not russet-system/russet-operator"
                ),
            ),
        ),
        refused(
            "make a Lease elsewhere",
            Request::create(
                "/apis/coordination.k8s.io/v1/namespaces/default/leases",
                lease(&format!("node-{OWN_NODE}")),
            ),
            role("cannot create resource \"leases\""),
        ),
        refused(
            "give its Lease an owner",
            Request::apply(&format!("{LEASES}/node-{OWN_NODE}"), owned),
            policy(OWN_NODE, "may not give its Lease finalizers or owners"),
        ),
        refused(
            "remove its Lease",
            Request::delete(&format!("{LEASES}/node-{OWN_NODE}")),
            role("cannot delete resource \"leases\""),
        ),
        // Events.
        refused(
            "say something about another node",
            Request::create(EVENTS, event(&format!("{OTHER_NODE}.{round}"), "InferenceNode", OTHER_NODE)),
            policy(OWN_NODE, "may write events about itself only"),
        ),
        refused(
            "say something about a namespace",
            Request::create(EVENTS, event(&format!("namespace.{round}"), "Namespace", OWN_NODE)),
            policy(OWN_NODE, "may write events about itself only"),
        ),
        refused(
            "keep a namespace from going with an event",
            Request::create(EVENTS, held(event(&format!("held.{round}"), "InferenceNode", OWN_NODE))),
            policy(OWN_NODE, "may not give what it creates finalizers or owners"),
        ),
        // Certificates and tokens.
        refused(
            "ask for a certificate for ever",
            Request::create(
                REQUESTS,
                held(signing(&format!("attempt-held-{round}"), "russet.dev/node", csr)),
            ),
            policy(OWN_NODE, "may not give what it creates finalizers or owners"),
        ),
        refused(
            "ask for a certificate of another signer",
            Request::create(
                REQUESTS,
                signing(&format!("attempt-other-{round}"), "kubernetes.io/kube-apiserver-client", csr),
            ),
            policy(
                OWN_NODE,
                "may ask for certificates of russet.dev/node only, not of kubernetes.io/kube-apiserver-client",
            ),
        ),
        refused(
            "approve its own certificate",
            Request::merge(
                &format!("{REQUESTS}/attempt-{round}/approval"),
                json!({"status": {"conditions": [{"type": "Approved", "status": "True", "reason": "x", "message": "x"}]}}),
            ),
            role("cannot patch resource \"certificatesigningrequests/approval\""),
        ),
        refused(
            "sign its own certificate",
            Request::merge(
                &format!("{REQUESTS}/attempt-{round}/status"),
                json!({"status": {"certificate": "eA=="}}),
            ),
            role("cannot patch resource \"certificatesigningrequests/status\""),
        ),
        refused(
            "ask for another node's token",
            Request::create(
                &format!("/api/v1/namespaces/russet-nodes/serviceaccounts/{OTHER_NODE}/token"),
                token.clone(),
            ),
            role("cannot create resource \"serviceaccounts/token\""),
        ),
        refused(
            "ask for the operator's token",
            Request::create("/api/v1/namespaces/russet-system/serviceaccounts/russet-operator/token", token),
            role("cannot create resource \"serviceaccounts/token\""),
        ),
        refused(
            "make a ServiceAccount",
            Request::create(
                "/api/v1/namespaces/russet-nodes/serviceaccounts",
                json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "attempt-new"}}),
            ),
            role("cannot create resource \"serviceaccounts\""),
        ),
        // The cluster.
        refused(
            "read the CA's key",
            Request::get("/api/v1/namespaces/russet-system/secrets/russet-ca"),
            role("cannot get resource \"secrets\""),
        ),
        refused(
            "list join tokens",
            Request::get("/api/v1/namespaces/kube-system/secrets"),
            role("cannot list resource \"secrets\""),
        ),
        refused(
            "make a Secret",
            Request::create("/api/v1/namespaces/russet-system/secrets", secret),
            role("cannot create resource \"secrets\""),
        ),
        refused(
            "become an administrator",
            Request::create(&format!("{RBAC}/clusterrolebindings"), binding),
            role("cannot create resource \"clusterrolebindings\""),
        ),
        refused(
            "widen its role",
            Request::merge(&format!("{RBAC}/clusterroles/russet-node"), json!({"rules": []})),
            role("cannot patch resource \"clusterroles\""),
        ),
        refused(
            "change the policy that holds it",
            Request::merge(
                &format!("{POLICIES}/validatingadmissionpolicies/russet-nodes"),
                json!({"spec": {"failurePolicy": "Ignore"}}),
            ),
            role("cannot patch resource \"validatingadmissionpolicies\""),
        ),
        refused(
            "remove the binding that holds it",
            Request::delete(&format!("{POLICIES}/validatingadmissionpolicybindings/russet-nodes")),
            role("cannot delete resource \"validatingadmissionpolicybindings\""),
        ),
        refused(
            "change a kind",
            Request::merge(
                "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/shards.russet.dev",
                json!({"spec": {"scope": "Cluster"}}),
            ),
            role("cannot patch resource \"customresourcedefinitions\""),
        ),
        refused(
            "make a namespace",
            Request::create(
                "/api/v1/namespaces",
                json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "attempt-new"}}),
            ),
            role("cannot create resource \"namespaces\""),
        ),
    ]
}

/// Impersonation by header, which only a client with its own token can try here.
pub fn impersonation_attempts() -> Vec<Attempt> {
    vec![refused(
        "act as an administrator",
        Request::get("/api/v1/namespaces/kube-system/secrets").impersonating("system:admin"),
        role("cannot impersonate"),
    )]
}

/// Actions that a node may not do although its role would allow them: only the policy prevents them.
pub fn overprivileged_attempts(csr: &str, round: &str) -> Vec<Attempt> {
    let mut labelled = node(OVERPRIVILEGED_NODE);
    labelled["metadata"]["labels"] = json!({"zone": "x"});
    let hold = |words: &str| policy(OVERPRIVILEGED_NODE, words);
    vec![
        refused(
            "make a Secret",
            Request::create(
                "/api/v1/namespaces/russet-system/secrets",
                json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "attempt"}}),
            ),
            hold("may not CREATE secrets"),
        ),
        refused(
            "make itself, with labels of its choice",
            Request::create(NODES, labelled),
            hold("may not CREATE inferencenodes.russet.dev"),
        ),
        refused(
            "label another node",
            Request::merge(&format!("{NODES}/{OTHER_NODE}"), json!({"metadata": {"labels": {"zone": "x"}}})),
            hold("may not UPDATE inferencenodes.russet.dev"),
        ),
        refused(
            "remove another node",
            Request::delete(&format!("{NODES}/{OTHER_NODE}")),
            hold(&format!("may write its own InferenceNode only, not {OTHER_NODE}")),
        ),
        refused(
            "change a rank",
            Request::merge(&format!("{SHARDS}/theirs"), json!({"metadata": {"labels": {"x": "y"}}})),
            hold("may not UPDATE shards.russet.dev"),
        ),
        refused(
            "remove a rank",
            Request::delete(&format!("{SHARDS}/theirs")),
            hold("may not DELETE shards.russet.dev"),
        ),
        refused("remove all ranks", Request::delete(SHARDS), hold("may not DELETE shards.russet.dev")),
        refused(
            "approve a certificate",
            Request::merge(
                &format!("{REQUESTS}/attempt-{round}/approval"),
                json!({"status": {"conditions": [{"type": "Approved", "status": "True", "reason": "x", "message": "x"}]}}),
            ),
            hold("may not UPDATE certificatesigningrequests.certificates.k8s.io/approval"),
        ),
        refused(
            "ask for a certificate of another signer",
            Request::create(
                REQUESTS,
                signing(&format!("attempt-spoilt-{round}"), "kubernetes.io/kube-apiserver-client", csr),
            ),
            hold("may ask for certificates of russet.dev/node only"),
        ),
        refused(
            "ask for another node's token",
            Request::create(
                &format!("/api/v1/namespaces/russet-nodes/serviceaccounts/{OTHER_NODE}/token"),
                json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}),
            ),
            hold(&format!(
                "may ask for tokens of ServiceAccount russet-nodes/{OVERPRIVILEGED_NODE} only, not of russet-nodes/{OTHER_NODE}"
            )),
        ),
        refused(
            "write an old event",
            Request::create(
                "/api/v1/namespaces/default/events",
                json!({"apiVersion": "v1", "kind": "Event", "metadata": {"name": format!("old.{round}"), "namespace": "default"},
                    "involvedObject": {"kind": "InferenceNode", "name": OVERPRIVILEGED_NODE, "namespace": "default"}}),
            ),
            hold("may not CREATE events"),
        ),
        refused(
            "give a namespace away",
            Request::delete("/api/v1/namespaces/attempts"),
            hold("may not DELETE namespaces"),
        ),
    ]
}

/// The label by which a pool would select it.
pub fn overprivileged_label_attempts() -> Attempt {
    let label = json!({"metadata": {"labels": {"russet.dev/memory": "512Gi"}}});
    let words = policy(OVERPRIVILEGED_NODE, "may not UPDATE inferencenodes.russet.dev");
    refused("label itself", Request::merge(&format!("{NODES}/{OVERPRIVILEGED_NODE}"), label), words)
}
