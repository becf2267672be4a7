//! Joining a cluster: pin the CA, create a key, have the cluster sign it, find out which credential the API
//! server accepts, store the result. Joining again with the same files is a no-op, so a service may call it
//! at every start; a machine that lost the reply requests again with the same key.
//!
//! ```text
//! token ─▶ CA (pinned) ─▶ key, stored ─▶ CSR ─▶ certificate ─▶ accepted by the API server? ─yes─▶ identity
//!                                                                   └─ no ─▶ ServiceAccount's token ─┘
//! ```

pub mod access;
pub mod identity;
pub mod pin;
pub mod request;

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::{Api, Client, Config};
use rcgen::KeyPair;
use russet_crds::InferenceNode;
use thiserror::Error;

use self::access::Access;
use self::identity::{IdentityError, Material, NodeIdentity};
use self::pin::PinError;
use self::request::{CertificateRequest, RequestError};
use crate::token::{JoinToken, TokenError};

/// Key file of an unfinished join: the cluster records the token as used with this key, so another attempt
/// must use the same one.
const PENDING_KEY: &str = "joining.key";
/// Read timeout: an API server that hangs must not hang the join.
const READ_TIMEOUT: Duration = Duration::from_secs(20);

/// Configuration of a join.
#[derive(Clone, Debug)]
pub struct JoinConfig {
    /// URLs of the API server, such as `https://10.0.0.5:6443`; the join goes through the first that answers,
    /// and all are stored.
    pub servers: Vec<String>,
    /// The line `russet token create` printed.
    pub token: String,
    /// State directory of this machine; the agent uses `agent/` in it.
    pub data_dir: PathBuf,
    /// Name of the node.
    pub node_name: String,
    /// Credential for the API server; detected when absent.
    pub access: Option<Access>,
}

/// Why a machine could not join.
#[derive(Debug, Error)]
pub enum JoinError {
    /// The token is malformed.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The node name is invalid.
    #[error(
        "`{0}` cannot be a node's name: use up to 63 lower-case letters, digits, hyphens and dots, and choose one with --node-name"
    )]
    Name(String),
    /// The server could not be pinned.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The identity's files cannot be used.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The certificate could not be obtained.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The token is unknown, used up or expired.
    #[error(
        "{server} does not accept the token {id}.… ({message}); a token is good for one machine and one day, make a new one with `russet token create`"
    )]
    Refused {
        /// The API server.
        server: String,
        /// Public part of the token.
        id: String,
        /// Its message.
        message: String,
    },
    /// The API server failed.
    #[error("{server} failed while node {node} joined")]
    Api {
        /// The API server.
        server: String,
        /// The node.
        node: String,
        /// Cause.
        #[source]
        source: Box<kube::Error>,
    },
    /// The key could not be made.
    #[error("no key could be made for node {node}")]
    Key {
        /// The node.
        node: String,
        /// Cause.
        #[source]
        source: rcgen::Error,
    },
}

/// Joins the cluster, or returns the identity that an earlier join left.
pub async fn join(config: JoinConfig) -> Result<NodeIdentity, JoinError> {
    let JoinConfig { servers, token, data_dir, node_name: node, access } = config;
    let token = JoinToken::decode(&token)?;
    check_name(&node)?;
    // Another part of the process may have installed it already, which is fine.
    rustls::crypto::ring::default_provider().install_default().ok();
    let folder = crate::agent_dir(&data_dir);
    if let Some(stored) = stored_identity(&folder, &node, &token)? {
        // The cluster may have moved to another address; the node name is the same.
        let stored = stored.with_servers(&servers)?;
        if is_known(&stored).await {
            return Ok(stored);
        }
        tracing::warn!(node, "the cluster has removed this node; it joins again");
    }
    let (server, ca) = reach(&servers, &token).await?;
    // The server that answers is tried first from now on.
    let others = servers.iter().filter(|other| **other != server).cloned();
    let servers: Vec<String> = std::iter::once(server.clone()).chain(others).collect();
    let failed =
        |source| JoinError::Api { server: server.clone(), node: node.clone(), source: Box::new(source) };
    let mut config = pinned_config(&server, &ca).map_err(failed)?;
    let anonymous = config.clone();
    config.auth_info.token = Some(token.bearer().into());
    let client = Client::try_from(config).map_err(failed)?;
    let key = pending_key(&folder, &node)?;
    let certificate_request = CertificateRequest::node(&node);
    let certificate = match request::certificate(&client, &certificate_request, &key).await {
        Ok(certificate) => certificate,
        Err(error) => return Err(join_error(error, &server, &token)),
    };
    let server_ca = pin::to_pem(&ca);
    let authority = request::authority(&client, &certificate_request, &certificate, Some(&server_ca)).await?;
    let key = key.serialize_pem();
    let access = match access {
        Some(access) => access,
        None => access::discover(anonymous, &node, &certificate, &key).await.map_err(failed)?,
    };
    let account = match access {
        Access::Certificate => None,
        Access::Token => Some(access::token(&client, &node).await.map_err(failed)?),
    };
    let material = Material {
        certificate: &certificate,
        key: &key,
        ca: &authority,
        server_ca: &server_ca,
        token: account.as_deref(),
    };
    let identity = NodeIdentity::store(&folder, &node, &servers, &material)?;
    std::fs::remove_file(folder.join(PENDING_KEY)).ok();
    Ok(identity)
}

/// The first reachable server, and its CA. A reachable server with another CA than the token's ends the join:
/// it may be a man in the middle.
async fn reach(servers: &[String], token: &JoinToken) -> Result<(String, Vec<u8>), PinError> {
    let mut last = PinError::Url(String::new());
    for server in servers {
        match pin::fetch(server, &token.ca_pin, token.ca_der().as_deref()).await {
            Ok(ca) => return Ok((server.clone(), ca)),
            Err(error @ PinError::Unreachable { .. }) => {
                tracing::warn!(%error, "the next server is tried, if there is one");
                last = error;
            }
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

/// A stored identity of the same node in the same cluster that is still valid.
fn stored_identity(folder: &Path, node: &str, token: &JoinToken) -> Result<Option<NodeIdentity>, JoinError> {
    let Some(stored) = NodeIdentity::load(folder)? else { return Ok(None) };
    let same = stored.node == node && pin::is_in(&stored.server_ca_pem()?, &token.ca_pin);
    Ok((same && stored.is_valid()?).then_some(stored))
}

/// Whether the cluster still has this node; true when it cannot be reached.
async fn is_known(identity: &NodeIdentity) -> bool {
    let Ok(client) = identity.client(|config| config.read_timeout = Some(READ_TIMEOUT)).await else {
        return true;
    };
    let nodes: Api<InferenceNode> = Api::all(client);
    match nodes.get_opt(&identity.node).await {
        Ok(found) => found.is_some(),
        // The ServiceAccount was removed together with the node.
        Err(kube::Error::Api(answer)) => answer.code != 401,
        Err(_) => true,
    }
}

/// A client configuration that trusts only the pinned CA and sends no credentials.
fn pinned_config(server: &str, ca: &[u8]) -> Result<Config, kube::Error> {
    let url = server.parse().map_err(|error| kube::Error::Service(Box::new(error)))?;
    let mut config = Config::new(url);
    config.root_cert = Some(vec![ca.to_vec()]);
    config.read_timeout = Some(READ_TIMEOUT);
    Ok(config)
}

/// The key of an earlier attempt, or a new one, stored before its public half is sent.
fn pending_key(folder: &Path, node: &str) -> Result<KeyPair, JoinError> {
    let path = folder.join(PENDING_KEY);
    if let Ok(text) = std::fs::read_to_string(&path)
        && let Ok(key) = KeyPair::from_pem(&text)
    {
        return Ok(key);
    }
    let key = KeyPair::generate().map_err(|source| JoinError::Key { node: node.to_owned(), source })?;
    std::fs::create_dir_all(folder)
        .map_err(|source| IdentityError::Io { path: folder.to_owned(), source })?;
    identity::write(&path, &key.serialize_pem())?;
    Ok(key)
}

/// Converts a failed request into the error for the user of a token.
fn join_error(error: RequestError, server: &str, token: &JoinToken) -> JoinError {
    match error {
        RequestError::Api { source, .. } if matches!(&*source, kube::Error::Api(answer) if matches!(answer.code, 401 | 403)) =>
        {
            let message = match *source {
                kube::Error::Api(answer) => answer.message.clone(),
                other => other.to_string(),
            };
            JoinError::Refused { server: server.to_owned(), id: token.id.clone(), message }
        }
        other => other.into(),
    }
}

fn check_name(node: &str) -> Result<(), JoinError> {
    let label = |label: &str| {
        !label.is_empty()
            && label.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    if node.len() <= 63 && node.split('.').all(label) {
        return Ok(());
    }
    Err(JoinError::Name(node.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn node_names_are_dns_names() {
        for (name, good) in
            [("mac-1", true), ("a.b", true), ("", false), ("-a", false), ("Mac", false), ("a..b", false)]
        {
            assert_eq!(check_name(name).is_ok(), good, "{name}");
        }
    }

    #[test]
    fn interrupted_join_resumes_with_the_same_key() {
        let folder = tempfile::tempdir().unwrap();
        let first = pending_key(folder.path(), "a").unwrap().serialize_pem();
        assert_eq!(pending_key(folder.path(), "a").unwrap().serialize_pem(), first);
        let mode = std::fs::metadata(folder.path().join(PENDING_KEY)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
