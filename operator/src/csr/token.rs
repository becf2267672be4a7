//! The bootstrap token behind a request, and what its Secret remembers: which node used it, with
//! which key. One token is one machine's; the record is what makes it so.

use k8s_openapi::api::core::v1::Secret;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;

use crate::ssa;
use crate::join_tokens::{NAMESPACE, secret_name};

/// Annotation on a token's Secret: the node that used it.
const NODE: &str = "russet.dev/used-by-node";
/// Annotation on a token's Secret: digest of the public key it was used with.
const KEY: &str = "russet.dev/used-with-key";

/// What is known of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenState {
    /// There is none that this operator may see: it was used up, or not made for Russet.
    Gone,
    /// Nobody has used it.
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

/// A Secret as it was seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SecretVersion {
    uid: Option<String>,
    version: Option<String>,
}

fn secrets(client: &Client) -> Api<Secret> {
    Api::namespaced(client.clone(), NAMESPACE)
}

/// Looks at a token. `russet token create` lets the operator see each of its tokens, and no others.
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

/// Writes down who uses a token; fails when somebody else was faster.
pub async fn claim(client: &Client, id: &str, seen: &SecretVersion, node: &str, key: &str) -> Result<(), kube::Error> {
    let patch = json!({"metadata": {
        "resourceVersion": seen.version,
        "annotations": {NODE: node, KEY: key},
    }});
    secrets(client).patch(&secret_name(id), &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
}

/// Removes a token that has done its work, and with it everything it owns.
pub async fn remove(client: &Client, id: &str, seen: &SecretVersion) -> Result<(), kube::Error> {
    let preconditions = Preconditions { uid: seen.uid.clone(), resource_version: None };
    let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
    match secrets(client).delete(&secret_name(id), &params).await {
        Ok(_) => Ok(()),
        Err(error) if ssa::is_code(&error, 404) || ssa::is_code(&error, 409) => Ok(()),
        Err(error) => Err(error),
    }
}
