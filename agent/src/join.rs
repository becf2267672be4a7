//! Joining a cluster: pin the CA, make a key, have the cluster sign it, keep the result. Joining
//! again with the same files is a no-op, so a service may call it at every start.
//!
//! ```text
//! token ─▶ CA (pinned) ─▶ key + CSR ─▶ wait for the certificate ─▶ identity on disk
//! ```

pub mod identity;
mod pin;

use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec, CertificateSigningRequestStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Client};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use russet_rpc::tls::{NODES_GROUP, node_dns_name, node_user};
use thiserror::Error;

use self::identity::{Identity, IdentityError};
use self::pin::PinError;
use crate::token::{JoinToken, TokenError};

/// How long a signature is waited for. The operator answers within a second; a cluster whose
/// operator is just starting deserves some patience.
const SIGNATURE_TIMEOUT: Duration = Duration::from_secs(120);

/// What joining needs.
#[derive(Clone, Debug)]
pub struct JoinConfig {
    /// URL of the API server, such as `https://10.0.0.5:6443`.
    pub url: String,
    /// The line `russet token create` printed.
    pub token: String,
    /// Folder of this machine's state; the agent's own part is `agent/` in it.
    pub data_dir: PathBuf,
    /// Name of the node.
    pub node_name: String,
}

/// Why a machine could not join.
#[derive(Debug, Error)]
pub enum JoinError {
    /// The token is none.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The name cannot be a node's.
    #[error(
        "`{0}` cannot be a node's name: use up to 63 lower-case letters, digits, hyphens and dots, and choose one with --node-name"
    )]
    Name(String),
    /// The server could not be pinned.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// Files of the identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The token is unknown or expired.
    #[error(
        "{server} does not accept the token {id}.… ({message}); tokens last 24 hours, make a new one with `russet token create` on the control plane"
    )]
    Refused {
        /// The API server.
        server: String,
        /// Public part of the token.
        id: String,
        /// What it said.
        message: String,
    },
    /// The request was denied or failed.
    #[error("the cluster did not sign a certificate for node {node}: {message}")]
    Denied {
        /// The node.
        node: String,
        /// Why.
        message: String,
    },
    /// Nobody signed in time.
    #[error(
        "no certificate came for node {node} within {seconds} s; the operator signs requests, look whether `russet serve` runs (request {request})"
    )]
    Unsigned {
        /// The node.
        node: String,
        /// Seconds waited.
        seconds: u64,
        /// Name of the request.
        request: String,
    },
    /// The API server failed.
    #[error("{server} failed while node {node} joined")]
    Api {
        /// The API server.
        server: String,
        /// The node.
        node: String,
        /// Why.
        #[source]
        source: Box<kube::Error>,
    },
    /// The key or the request could not be made.
    #[error("no key could be made for node {node}")]
    Key {
        /// The node.
        node: String,
        /// Why.
        #[source]
        source: rcgen::Error,
    },
}

/// Joins the cluster, or returns the identity that an earlier join left.
pub async fn join(config: JoinConfig) -> Result<Identity, JoinError> {
    let JoinConfig { url: server, token, data_dir, node_name: node } = config;
    let token = JoinToken::decode(&token)?;
    check_name(&node)?;
    // Another part of the process may have installed it already, which is as good.
    rustls::crypto::ring::default_provider().install_default().ok();
    let folder = crate::agent_dir(&data_dir);
    if let Some(kept) = Identity::load(&folder)?
        && kept.node == node
        && pin::of_pem(&kept.ca_pem()?).as_deref() == Some(&token.ca_pin)
        && kept.remaining()? > Duration::from_secs(3600)
    {
        // The cluster may have moved to another address; who it is did not change.
        return Ok(kept.with_server(&server)?);
    }
    let ca = pin::fetch(&server, &token.ca_pin).await?;
    let client = bootstrap_client(&server, &ca, &token).map_err(|source| JoinError::Api {
        server: server.clone(),
        node: node.clone(),
        source: Box::new(source),
    })?;
    let (key, certificate) = request(&client, &server, &node, Some(&token.id)).await?;
    Ok(Identity::store(&folder, &node, &server, &certificate, &key, &pin::to_pem(&ca))?)
}

/// A client that trusts only the pinned CA and shows the bootstrap token.
fn bootstrap_client(server: &str, ca: &[u8], token: &JoinToken) -> Result<Client, kube::Error> {
    let url = server.parse().map_err(|error| kube::Error::Service(Box::new(error)))?;
    let mut config = kube::Config::new(url);
    config.root_cert = Some(vec![ca.to_vec()]);
    config.auth_info.token = Some(token.bearer().into());
    config.read_timeout = Some(Duration::from_secs(20));
    Client::try_from(config)
}

/// Makes a key, asks the cluster to sign it for `node` and waits; returns key and certificate, PEM.
/// `token` is the bootstrap token in use, for messages; a node renewing itself has none.
pub(crate) async fn request(
    client: &Client,
    server: &str,
    node: &str,
    token: Option<&str>,
) -> Result<(String, String), JoinError> {
    let failed = |error: kube::Error| match (error, token) {
        (kube::Error::Api(status), Some(id)) if matches!(status.code, 401 | 403) => JoinError::Refused {
            server: server.to_owned(),
            id: id.to_owned(),
            message: status.message.clone(),
        },
        (error, _) => {
            JoinError::Api { server: server.to_owned(), node: node.to_owned(), source: Box::new(error) }
        }
    };
    let (key, csr) =
        signing_request(node).map_err(|source| JoinError::Key { node: node.to_owned(), source })?;
    let requests: Api<CertificateSigningRequest> = Api::all(client.clone());
    let name = format!("node-{node}-{}", hex::encode(rand::random::<[u8; 4]>()));
    let object = CertificateSigningRequest {
        metadata: ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() },
        spec: CertificateSigningRequestSpec {
            request: ByteString(csr.into_bytes()),
            signer_name: russet_crds::names::NODE_SIGNER.to_owned(),
            usages: Some(["digital signature", "client auth", "server auth"].map(String::from).to_vec()),
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    };
    requests.create(&PostParams::default(), &object).await.map_err(failed)?;

    let deadline = tokio::time::Instant::now() + SIGNATURE_TIMEOUT;
    while tokio::time::Instant::now() < deadline {
        let status = match requests.get(&name).await {
            Ok(found) => found.status.unwrap_or_default(),
            Err(error @ kube::Error::Api(_)) => return Err(failed(error)),
            // A control plane that restarts in this very minute keeps the request.
            Err(error) => {
                tracing::debug!(request = name, %error, "the request could not be looked at; tried again");
                CertificateSigningRequestStatus::default()
            }
        };
        if let Some(ByteString(certificate)) = status.certificate {
            return Ok((key, String::from_utf8_lossy(&certificate).into_owned()));
        }
        let refusal = status
            .conditions
            .unwrap_or_default()
            .into_iter()
            .find(|condition| matches!(condition.type_.as_str(), "Denied" | "Failed"));
        if let Some(refusal) = refusal {
            let message = refusal.message.or(refusal.reason).unwrap_or(refusal.type_);
            return Err(JoinError::Denied { node: node.to_owned(), message });
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    Err(JoinError::Unsigned { node: node.to_owned(), seconds: SIGNATURE_TIMEOUT.as_secs(), request: name })
}

/// A fresh key and the request that names its owner, both PEM.
fn signing_request(node: &str) -> Result<(String, String), rcgen::Error> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(vec![node_dns_name(node)])?;
    let mut subject = DistinguishedName::new();
    subject.push(DnType::OrganizationName, NODES_GROUP);
    subject.push(DnType::CommonName, node_user(node));
    params.distinguished_name = subject;
    let csr = params.serialize_request(&key)?.pem()?;
    Ok((key.serialize_pem(), csr))
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
    fn a_request_names_the_node_and_nothing_else() {
        let (key, csr) = signing_request("mac-1").unwrap();
        assert!(key.contains("PRIVATE KEY"));
        let parsed = rcgen::CertificateSigningRequestParams::from_pem(&csr).unwrap();
        let subject = &parsed.params.distinguished_name;
        assert_eq!(subject.get(&DnType::CommonName), Some(&"russet:node:mac-1".into()));
        assert_eq!(subject.get(&DnType::OrganizationName), Some(&"russet:nodes".into()));
        assert_eq!(parsed.params.subject_alt_names.len(), 1);
    }
}
