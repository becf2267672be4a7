//! Objects created for a machine that joins: its InferenceNode, which records the incarnation of the node
//! name, and, for API servers that do not accept node certificates, a ServiceAccount of which only the node
//! may request tokens. Nodes may create neither themselves, so a removed node stays removed.

use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use russet_crds::{InferenceNode, InferenceNodeSpec};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::ssa;

/// Namespace of the nodes' ServiceAccounts.
pub const NODES_NAMESPACE: &str = "russet-nodes";

/// Annotation on InferenceNodes: the incarnation of the node, also in its certificates. Agents may write no
/// metadata, so a node cannot extend an incarnation that another machine has ended.
const INCARNATION_ANNOTATION: &str = "russet.dev/life";

/// How an API server authenticates nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credential {
    /// By certificate, as the embedded server does.
    Certificate,
    /// By tokens of their ServiceAccounts, as any other server does.
    Account,
}

/// The incarnation of a node; `None` for a control plane's own node, or one that an older release admitted.
pub fn node_incarnation(node: &InferenceNode) -> Option<&str> {
    node.annotations().get(INCARNATION_ANNOTATION).map(String::as_str)
}

/// Creates the InferenceNode of a node with this incarnation. An earlier incarnation of the name ends: its
/// ServiceAccount is deleted with its tokens, and its certificates are not renewed.
pub async fn begin_incarnation(client: &Client, node: &str, life: Option<&str>) -> Result<(), kube::Error> {
    let nodes: Api<InferenceNode> = Api::all(client.clone());
    let existing = nodes.get_opt(node).await?;
    if existing.as_ref().is_some_and(|existing| self::node_incarnation(existing) == life) {
        return Ok(());
    }
    remove_account(client, node).await?;
    if existing.is_some() {
        let patch = json!({"metadata": {"annotations": {INCARNATION_ANNOTATION: life}}});
        return nodes.patch(node, &PatchParams::default(), &Patch::Merge(patch)).await.map(drop);
    }
    let mut fresh = InferenceNode::new(node, InferenceNodeSpec::default());
    fresh.metadata.annotations =
        life.map(|life| [(INCARNATION_ANNOTATION.to_owned(), life.to_owned())].into());
    nodes.create(&PostParams::default(), &fresh).await.map(drop)
}

/// Creates the ServiceAccount of a node; the bootstrap token `bootstrap` may request its first token.
pub async fn create_account(client: &Client, node: &str, bootstrap: Option<&str>) -> Result<(), kube::Error> {
    apply::<ServiceAccount>(client, node, json!({})).await?;
    let rule = json!({
        "apiGroups": [""], "resources": ["serviceaccounts/token"], "resourceNames": [node], "verbs": ["create"],
    });
    apply::<Role>(client, node, json!({"rules": [rule]})).await?;
    bind_token_role(client, node, bootstrap).await
}

/// Restricts the tokens of a node to the node itself.
pub async fn bind_token_role(
    client: &Client,
    node: &str,
    bootstrap: Option<&str>,
) -> Result<(), kube::Error> {
    let mut subjects = vec![json!({"kind": "ServiceAccount", "name": node, "namespace": NODES_NAMESPACE})];
    if let Some(id) = bootstrap {
        let user = format!("system:bootstrap:{id}");
        subjects.push(json!({"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": user}));
    }
    let role = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": node});
    apply::<RoleBinding>(client, node, json!({"roleRef": role, "subjects": subjects})).await
}

/// Deletes a node's ServiceAccount; its tokens become invalid with it.
pub async fn remove_account(client: &Client, node: &str) -> Result<(), kube::Error> {
    delete::<ServiceAccount>(client, node).await?;
    delete::<RoleBinding>(client, node).await?;
    delete::<Role>(client, node).await
}

async fn apply<K>(client: &Client, name: &str, mut object: Value) -> Result<(), kube::Error>
where
    K: kube::Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>,
    K: Clone + DeserializeOwned + serde::Serialize + std::fmt::Debug,
{
    object["apiVersion"] = json!(K::api_version(&()));
    object["kind"] = json!(K::kind(&()));
    object["metadata"] = json!({"name": name, "namespace": NODES_NAMESPACE});
    let object: K = serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
    ssa::apply(&Api::namespaced(client.clone(), NODES_NAMESPACE), &object).await.map(drop)
}

async fn delete<K>(client: &Client, name: &str) -> Result<(), kube::Error>
where
    K: kube::Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>,
    K: Clone + DeserializeOwned + std::fmt::Debug,
{
    let api: Api<K> = Api::namespaced(client.clone(), NODES_NAMESPACE);
    match api.delete(name, &Default::default()).await {
        Ok(_) => Ok(()),
        Err(error) if ssa::is_code(&error, 404) => Ok(()),
        Err(error) => Err(error),
    }
}
