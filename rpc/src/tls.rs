//! Mutual TLS between components: every process has a certificate of the one data-plane CA, with its user in
//! the subject's common name. Names are verified, not addresses, so a node may change its address without a
//! new certificate.

mod hot_reload;
pub mod identity_dir;

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustls::pki_types::{CertificateDer, ServerName};
use thiserror::Error;
use tonic::transport::{Channel, Endpoint};

use crate::batched_writes::BatchedWrites;

#[cfg(feature = "api")]
pub(crate) use self::hot_reload::FileVersion;
pub use self::hot_reload::{Connector, host_of};

/// Group (O) of agents' and engines' certificates.
pub const NODES_GROUP: &str = "russet:nodes";
/// Common name of the gateway's certificate.
pub const GATEWAY_USER: &str = "russet:gateway";
/// Common name of the operator's certificate.
pub const OPERATOR_USER: &str = "russet:operator";
/// Prefix of a node's common name; the node's name follows.
pub const NODE_USER_PREFIX: &str = "russet:node:";

/// The user a node's agent and engines act as.
pub fn node_user(node: &str) -> String {
    format!("{NODE_USER_PREFIX}{node}")
}

/// The DNS name in a node's certificate, verified whatever its address is.
pub fn node_dns_name(node: &str) -> String {
    format!("{node}.node.russet.dev")
}

/// The DNS name in the gateway's certificate.
pub const GATEWAY_DNS_NAME: &str = "gateway.russet.dev";

/// Application protocol inside TLS (ALPN); a peer with another one fails the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// gRPC, over HTTP/2.
    Grpc,
    /// Protocol between agents, over HTTP/1.1.
    Agents,
}

impl Protocol {
    /// Its ALPN name.
    fn name(self) -> &'static [u8] {
        match self {
            Self::Grpc => b"h2",
            Self::Agents => b"russet-agents/1",
        }
    }
}

/// Files of one identity: certificate chain, key and the CA, all PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificate chain of this component.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The data-plane CA.
    pub ca: PathBuf,
}

/// Why TLS could not be set up.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file of the identity is missing or unreadable.
    #[error("cannot read {path}: join the node again with `russet join`, or check the file's owner")]
    Read {
        /// The file.
        path: PathBuf,
        /// System error.
        source: std::io::Error,
    },
    /// A file of the identity is invalid.
    #[error("{path} cannot be used ({problem}); join the node again with `russet join`")]
    Unusable {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// The address or the name is invalid.
    #[error("{target} is no address of a node")]
    Address {
        /// The peer.
        target: String,
    },
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Read { path: path.to_owned(), source })
}

impl TlsFiles {
    /// The conventional names inside one directory: `tls.crt`, `tls.key`, `ca.crt`.
    pub fn in_dir(dir: &Path) -> Self {
        Self { cert: dir.join("tls.crt"), key: dir.join("tls.key"), ca: dir.join("ca.crt") }
    }

    /// A channel to the engine of `node` at `address` (`ip:port`). It connects on first use, and reconnects
    /// after a loss, each time with the current identity.
    pub fn channel(&self, address: &str, node: &str) -> Result<Channel, TlsError> {
        let wrong = || TlsError::Address { target: format!("{node} at {address}") };
        let name = server_name(node)?;
        // The connector handles TLS, so the scheme is plain.
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|_| wrong())?
            // A peer that vanished without closing (power, cable) must end streams, not hang them.
            .http2_keep_alive_interval(Duration::from_secs(5))
            .keep_alive_timeout(Duration::from_secs(5))
            .keep_alive_while_idle(true)
            .connect_timeout(CONNECT_TIMEOUT);
        let (connector, address) = (self.connector(Protocol::Grpc)?, address.to_owned());
        Ok(endpoint.connect_with_connector_lazy(tower::service_fn(move |_| {
            let (connector, name, address) = (connector.clone(), name.clone(), address.clone());
            async move {
                let stream = connector.connect(name, &address).await?;
                Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(BatchedWrites::new(stream)))
            }
        })))
    }
}

/// Timeout of a connection to a node: a call that still waits after it has a connection.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The server name that a node's certificate must have.
pub fn server_name(node: &str) -> Result<ServerName<'static>, TlsError> {
    ServerName::try_from(node_dns_name(node)).map_err(|_| TlsError::Address { target: node.to_owned() })
}

/// The common name of the peer's certificate; `None` without TLS or without a certificate.
pub fn peer_user<T>(request: &tonic::Request<T>) -> Option<String> {
    common_name(request.peer_certs()?.first()?)
}

/// The common name of a certificate.
pub fn common_name(leaf: &CertificateDer<'_>) -> Option<String> {
    let (_, certificate) = x509_parser::parse_x509_certificate(leaf.as_ref()).ok()?;
    let name = certificate.subject().iter_common_name().next()?.as_str().ok()?;
    Some(name.to_owned())
}

/// A channel over a unix socket, from an agent to the engines of its own machine.
pub fn unix_channel(socket: PathBuf) -> Channel {
    // The address is never resolved: the connector below ignores it.
    Endpoint::from_static("http://engine.local").connect_with_connector_lazy(tower::service_fn(move |_| {
        let socket = socket.clone();
        async move {
            let stream = tokio::net::UnixStream::connect(socket).await?;
            Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
        }
    }))
}
