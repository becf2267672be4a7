//! The node's identity for rustls, and the two TLS handshakes of a ring. Either side accepts one node only:
//! the CA alone would let every node into every ring.

use std::path::Path;
use std::sync::Arc;

use russet_rpc::tls::{TlsFiles, node_dns_name};
use rustls::client::verify_server_name;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::BufReader;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::{TunnelError, error_chain};

/// ALPN protocol: a connection for another service with these certificates must not be taken for a ring.
const ALPN_PROTOCOL: &[u8] = b"russet-ring/1";

/// A connection from the previous member.
pub(super) type AcceptedStream = tokio_rustls::server::TlsStream<BufReader<TcpStream>>;
/// A connection to the next member.
pub(super) type DialledStream = tokio_rustls::client::TlsStream<BufReader<TcpStream>>;

/// Both roles of one node.
pub(super) struct RingIdentity {
    acceptor: TlsAcceptor,
    connector: TlsConnector,
}

impl RingIdentity {
    /// Reads the current files: a renewed certificate takes effect with the next epoch.
    pub(super) fn read(files: &TlsFiles) -> Result<Self, TunnelError> {
        let chain = certificates(&files.cert)?;
        let key = PrivateKeyDer::from_pem_file(&files.key).map_err(unusable(&files.key))?;
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&files.ca)? {
            roots.add(certificate).map_err(unusable(&files.ca))?;
        }
        let roots = Arc::new(roots);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let versions = &[&rustls::version::TLS13];

        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(unusable(&files.ca))?;
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(versions)
            .map_err(unusable(&files.cert))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(unusable(&files.cert))?;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .map_err(unusable(&files.cert))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(unusable(&files.cert))?;
        server.alpn_protocols = vec![ALPN_PROTOCOL.to_vec()];
        client.alpn_protocols = vec![ALPN_PROTOCOL.to_vec()];
        // One connection is made per epoch, so session tickets would be useless.
        server.send_tls13_tickets = 0;
        Ok(Self { acceptor: Arc::new(server).into(), connector: Arc::new(client).into() })
    }

    /// Accepts a connection from `node` only.
    pub(super) async fn accept(
        &self,
        stream: BufReader<TcpStream>,
        node: &str,
    ) -> Result<AcceptedStream, String> {
        let stream = self.acceptor.accept(stream).await.map_err(error_chain)?;
        let (_, session) = stream.get_ref();
        if session.alpn_protocol() != Some(ALPN_PROTOCOL) {
            return Err("it does not speak the ring's protocol".into());
        }
        let shown = session.peer_certificates().and_then(<[_]>::first).ok_or("it shows no certificate")?;
        let shown = ParsedCertificate::try_from(shown).map_err(error_chain)?;
        verify_server_name(&shown, &name(node)?)
            .map_err(|error| format!("its certificate is not that of {node}: {error}"))?;
        Ok(stream)
    }

    /// Connects to `node` only.
    pub(super) async fn dial(
        &self,
        stream: BufReader<TcpStream>,
        node: &str,
    ) -> Result<DialledStream, String> {
        self.connector.connect(name(node)?, stream).await.map_err(error_chain)
    }
}

fn name(node: &str) -> Result<ServerName<'static>, String> {
    ServerName::try_from(node_dns_name(node)).map_err(|_| format!("{node:?} is no name of a node"))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TunnelError> {
    CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(unusable(path))
}

fn unusable<E: std::error::Error + Send + Sync + 'static>(path: &Path) -> impl FnOnce(E) -> TunnelError {
    move |source| TunnelError::Identity { path: path.to_owned(), source: Box::new(source) }
}
