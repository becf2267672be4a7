//! TLS of the server: a certificate that can be replaced at run time, and users from client certificates.

use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::RootCertStore;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls_pki_types::CertificateDer;

use crate::auth::user::User;
use crate::pki::{self, Authority, PkiError, SERVER_DAYS};

/// DNS names of the server for clients on this machine and in a cluster.
const NAMES: &[&str] = &[
    "localhost",
    "russet",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
];

/// Serves the current certificate.
#[derive(Debug)]
pub struct Resolver {
    current: RwLock<Arc<CertifiedKey>>,
}

impl ResolvesServerCert for Resolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

impl Resolver {
    /// A resolver with a new certificate for these addresses.
    pub fn new(authority: &Authority, addresses: &[IpAddr]) -> Result<Self, PkiError> {
        Ok(Self { current: RwLock::new(Arc::new(certified(authority, addresses)?)) })
    }

    /// Replaces the certificate with one for these addresses; open connections keep theirs.
    pub fn renew(&self, authority: &Authority, addresses: &[IpAddr]) -> Result<(), PkiError> {
        let fresh = Arc::new(certified(authority, addresses)?);
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = fresh;
        Ok(())
    }
}

fn certified(authority: &Authority, addresses: &[IpAddr]) -> Result<CertifiedKey, PkiError> {
    let mut names: Vec<String> = NAMES.iter().map(ToString::to_string).collect();
    if let Some(host) = super::host::host_name() {
        // Macs and many Linux machines resolve as `NAME.local` on their network.
        names.push(format!("{}.local", host.trim_end_matches(".local")));
        names.push(host);
    }
    let (cert, key) = authority.issue_server("russet-apiserver", &names, addresses, SERVER_DAYS)?;
    let key = pki::private_key(&key)?;
    let key = ring::sign::any_supported_type(&key)
        .map_err(|error| PkiError::Unusable { what: "server key".into(), why: error.to_string() })?;
    // The chain includes the CA, so that a joining machine can compare it with the pin in its token.
    let chain = vec![pki::certificate(&cert)?, pki::certificate(authority.cert_pem())?];
    Ok(CertifiedKey::new(chain, key))
}

/// The TLS configuration: client certificates are optional, HTTP/2 is preferred.
pub fn config(authority: &Authority, resolver: Arc<Resolver>) -> Result<ServerConfig, PkiError> {
    let unusable = |why: String| PkiError::Unusable { what: "TLS configuration".into(), why };
    let provider = Arc::new(ring::default_provider());
    let mut roots = RootCertStore::empty();
    // All of them: during a CA rotation, certificates of both are shown.
    for authority in pki::certificates(authority.cert_pem())? {
        roots.add(authority).map_err(|error| unusable(error.to_string()))?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .allow_unauthenticated()
        .build()
        .map_err(|error| unusable(error.to_string()))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(error.to_string()))?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(resolver);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// The user of a verified client certificate.
pub fn user(certificates: Option<&[CertificateDer<'_>]>) -> Option<User> {
    let pki::CertificateSubject { name, orgs, uid } = pki::subject(certificates?.first()?).ok()?;
    (!name.is_empty()).then(|| User { uid, ..User::authenticated(&name, orgs) })
}
