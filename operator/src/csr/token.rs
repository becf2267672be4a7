//! The bootstrap token of a request, and the record in its Secret: which node used it, with which key. One
//! token is for one machine; the record enforces that.

use k8s_openapi::api::core::v1::Secret;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;

use crate::join_tokens::{NAMESPACE, secret_name};
use crate::ssa;

/// Annotation on a token's Secret: the node that used it.
const NODE: &str = "russet.dev/used-by-node";
/// Annotation on a token's Secret: digest of the public key that it was used with.
const KEY: &str = "russet.dev/used-with-key";

/// State of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenState {
    /// None is visible to this operator: it was used up, or is not one of Russet's.
    Gone,
    /// It has not been used.
    Fresh(SecretVersion),
    /// It was used.
    Used {
        /// By this node.
        node: String,
        /// With this key.
        key: String,
        /// The Secret.
        secret: SecretVersion,
    },
}

/// A version of the Secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SecretVersion {
    uid: Option<String>,
    version: Option<String>,
}

fn secrets(client: &Client) -> Api<Secret> {
    Api::namespaced(client.clone(), NAMESPACE)
}

/// Reads a token. `russet token create` lets the operator read its tokens, and no others.
pub async fn observe(client: &Client, id: &str) -> Result<TokenState, kube::Error> {
    match secrets(client).get(&secret_name(id)).await {
        Ok(secret) => Ok(read(&secret)),
        Err(error) if ssa::is_code(&error, 404) || ssa::is_code(&error, 403) => Ok(TokenState::Gone),
        Err(error) => Err(error),
    }
}

fn read(secret: &Secret) -> TokenState {
    if secret.metadata.deletion_timestamp.is_some() {
        return TokenState::Gone;
    }
    let seen = SecretVersion { uid: secret.uid(), version: secret.resource_version() };
    match (secret.annotations().get(NODE), secret.annotations().get(KEY)) {
        (Some(node), Some(key)) => TokenState::Used { node: node.clone(), key: key.clone(), secret: seen },
        _ => TokenState::Fresh(seen),
    }
}

/// Records the user of a token; fails if a concurrent write was faster.
pub async fn claim(
    client: &Client,
    id: &str,
    seen: &SecretVersion,
    node: &str,
    key: &str,
) -> Result<(), kube::Error> {
    let patch = json!({"metadata": {
        "resourceVersion": seen.version,
        "annotations": {NODE: node, KEY: key},
    }});
    secrets(client).patch(&secret_name(id), &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
}

/// Removes a used token, and with it everything that it owns.
pub async fn remove(client: &Client, id: &str, seen: &SecretVersion) -> Result<(), kube::Error> {
    let preconditions = Preconditions { uid: seen.uid.clone(), resource_version: None };
    let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    match secrets(client).delete(&secret_name(id), &params).await {
        Ok(_) => Ok(()),
        Err(error) if ssa::is_code(&error, 404) || ssa::is_code(&error, 409) => Ok(()),
        Err(error) => Err(error),
    }
}
