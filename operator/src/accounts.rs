//! What a machine that joins finds in the cluster: its InferenceNode and, for API servers to which a
//! node's certificate is no credential, a ServiceAccount whose tokens it alone may ask for. Nodes may
//! make none of these themselves, so a node that was removed stays removed.

use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::PostParams;
use kube::{Api, Client};
use russet_crds::{InferenceNode, InferenceNodeSpec};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::ssa;

/// Namespace of the nodes' ServiceAccounts.
pub const NODES_NAMESPACE: &str = "russet-nodes";

/// Makes the InferenceNode of a node; one that is there stays as it is.
pub async fn ensure_node(client: &Client, node: &str) -> Result<(), kube::Error> {
    let nodes: Api<InferenceNode> = Api::all(client.clone());
    match nodes.create(&PostParams::default(), &InferenceNode::new(node, InferenceNodeSpec::default())).await
    {
        Ok(_) => Ok(()),
        Err(error) if ssa::is_code(&error, 409) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Makes everything a node needs; `bootstrap` may ask for its first token.
pub async fn admit(client: &Client, node: &str, bootstrap: Option<&str>) -> Result<(), kube::Error> {
    ensure_node(client, node).await?;
    apply::<ServiceAccount>(client, node, json!({})).await?;
    let rule = json!({
        "apiGroups": [""], "resources": ["serviceaccounts/token"], "resourceNames": [node], "verbs": ["create"],
    });
    apply::<Role>(client, node, json!({"rules": [rule]})).await?;
    bind(client, node, bootstrap).await
}

/// Leaves the tokens of a node to the node itself.
pub async fn bind(client: &Client, node: &str, bootstrap: Option<&str>) -> Result<(), kube::Error> {
    let mut subjects = vec![json!({"kind": "ServiceAccount", "name": node, "namespace": NODES_NAMESPACE})];
    if let Some(id) = bootstrap {
        let user = format!("system:bootstrap:{id}");
        subjects.push(json!({"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": user}));
    }
    let role = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": node});
    apply::<RoleBinding>(client, node, json!({"roleRef": role, "subjects": subjects})).await
}

/// Takes a node's ServiceAccount away; its tokens end with it.
pub async fn dismiss(client: &Client, node: &str) -> Result<(), kube::Error> {
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
