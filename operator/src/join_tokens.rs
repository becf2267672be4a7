//! Join tokens: a bootstrap token of the API server in kube-system, and the operator's permission to read
//! this one Secret and no other there. The Secret owns that permission, so they are deleted together.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client, Resource as _};
use rand::Rng as _;
use serde_json::json;
use thiserror::Error;

/// Namespace of bootstrap tokens.
pub(crate) const NAMESPACE: &str = "kube-system";
/// The group of machines with one of Russet's tokens; other bootstrap tokens grant nothing here.
const GROUP: &str = "system:bootstrappers:russet";

/// A new token.
#[derive(Clone)]
pub struct BootstrapToken {
    /// Its public part.
    pub id: String,
    /// Its secret part.
    pub secret: String,
    /// Its expiry.
    pub expires: Timestamp,
}

/// Why no token was created.
#[derive(Debug, Error)]
pub enum Error {
    /// The server rejected an object.
    #[error("{kind} {NAMESPACE}/{name} could not be written; use an administrator's kubeconfig")]
    Refused {
        /// Kind of the object.
        kind: &'static str,
        /// Its name.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// The server did not delete tokens.
    #[error("Secret {NAMESPACE}/{name} could not be deleted; use an administrator's kubeconfig")]
    Undeletable {
        /// Its name.
        name: String,
        /// The server's error.
        #[source]
        source: kube::Error,
    },
    /// The clock is far off.
    #[error("the token's expiry time is out of range; set this machine's clock")]
    Clock(#[source] jiff::Error),
}

/// Name of a token's Secret.
pub(crate) fn secret_name(id: &str) -> String {
    format!("bootstrap-token-{id}")
}

/// Deletes a token that nobody holds.
pub async fn delete(client: &Client, id: &str) -> Result<(), Error> {
    let (kind, name) = ("Secret", secret_name(id));
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    match secrets.delete(&name, &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(source) => Err(Error::Refused { kind, name, source }),
    }
}

/// Creates a token with which one machine may join within `lifetime`.
pub async fn create(client: &Client, lifetime: SignedDuration) -> Result<BootstrapToken, Error> {
    let expires = Timestamp::now().checked_add(lifetime).map_err(Error::Clock)?;
    let token = BootstrapToken { id: random(6), secret: random(16), expires };
    let name = secret_name(&token.id);
    let failed = |kind| {
        let name = name.clone();
        move |source| Error::Refused { kind, name, source }
    };
    let params = PostParams::default();
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let made = secrets.create(&params, &secret(&token)).await.map_err(failed("Secret"))?;

    let metadata = json!({"name": name, "namespace": NAMESPACE, "ownerReferences": [made.owner_ref(&())]});
    let role = json!({
        "metadata": metadata,
        "rules": [{
            "apiGroups": [""], "resources": ["secrets"], "resourceNames": [name],
            "verbs": ["get", "patch", "delete"],
        }],
    });
    let binding = json!({
        "metadata": metadata,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [
            {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "russet:operator"},
            {"kind": "ServiceAccount", "name": "russet-operator", "namespace": "russet-system"},
        ],
    });
    let roles: Api<Role> = Api::namespaced(client.clone(), NAMESPACE);
    let role = serde_json::from_value(role).map_err(kube::Error::SerdeError).map_err(failed("Role"))?;
    roles.create(&params, &role).await.map_err(failed("Role"))?;
    let bindings: Api<RoleBinding> = Api::namespaced(client.clone(), NAMESPACE);
    let binding =
        serde_json::from_value(binding).map_err(kube::Error::SerdeError).map_err(failed("RoleBinding"))?;
    bindings.create(&params, &binding).await.map_err(failed("RoleBinding"))?;
    Ok(token)
}

/// Deletes all bootstrap tokens; returns how many there were. What belongs to them is deleted with them.
pub async fn revoke_all(client: &Client) -> Result<usize, Error> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let failed = |name: &str| {
        let name = name.to_owned();
        move |source| Error::Undeletable { name, source }
    };
    let all = ListParams::default().fields("type=bootstrap.kubernetes.io/token");
    let tokens = secrets.list_metadata(&all).await.map_err(failed("bootstrap-token-*"))?;
    let names: Vec<String> = tokens.items.into_iter().filter_map(|token| token.metadata.name).collect();
    for name in &names {
        match secrets.delete(name, &DeleteParams::default()).await {
            Ok(_) => {}
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(failed(name)(error)),
        }
    }
    Ok(names.len())
}

fn secret(token: &BootstrapToken) -> Secret {
    let entries = [
        ("token-id", token.id.clone()),
        ("token-secret", token.secret.clone()),
        ("expiration", format!("{:.0}", token.expires)),
        ("usage-bootstrap-authentication", "true".to_owned()),
        ("auth-extra-groups", GROUP.to_owned()),
        ("description", "one machine may join Russet with it".to_owned()),
    ];
    let mut secret = Secret {
        type_: Some("bootstrap.kubernetes.io/token".to_owned()),
        data: Some(entries.map(|(name, text)| (name.to_owned(), ByteString(text.into_bytes()))).into()),
        ..Secret::default()
    };
    secret.metadata.name = Some(secret_name(&token.id));
    secret
}

fn random(length: usize) -> String {
    const ALPHABET: &[u8] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    let mut random = rand::rng();
    (0..length).map(|_| ALPHABET[random.random_range(0..ALPHABET.len())] as char).collect()
}
