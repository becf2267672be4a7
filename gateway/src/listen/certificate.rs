//! The server certificate that other machines see. It is read from two files and reloaded when they change,
//! so that renewing it needs no restart of the gateway.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use thiserror::Error;
use tokio_rustls::TlsAcceptor;

/// Time between two checks of the files.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// Paths of certificate and key, both PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerFiles {
    /// The certificate chain, the server's own certificate first.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Why a certificate cannot be used.
#[derive(Debug, Error)]
pub enum CertificateError {
    /// A file cannot be read.
    #[error("cannot read {path} for the gateway's listener; check --tls-cert and --tls-key")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A file does not contain the expected PEM.
    #[error("{path} contains no {what} in PEM format")]
    Pem {
        /// The file.
        path: PathBuf,
        /// A certificate or a private key.
        what: &'static str,
        /// The cause.
        source: rustls::pki_types::pem::Error,
    },
    /// Certificate and key do not match.
    #[error("the certificate {cert} does not match the private key {key}")]
    Mismatch {
        /// The certificate.
        cert: PathBuf,
        /// The key.
        key: PathBuf,
        /// The cause.
        source: rustls::Error,
    },
    /// The TLS library cannot be set up.
    #[error("cannot set up TLS")]
    Setup(#[source] rustls::Error),
}

/// A server certificate that can be replaced while it is in use.
#[derive(Clone)]
pub struct Certificate {
    files: ServerFiles,
    contents: PemContents,
    current: Arc<CurrentCertificate>,
    config: Arc<ServerConfig>,
}

#[derive(Debug)]
struct CurrentCertificate(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for CurrentCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.read().clone())
    }
}

/// The contents of both files.
type PemContents = (Vec<u8>, Vec<u8>);

impl Certificate {
    /// The certificate in `files`.
    pub fn read(files: ServerFiles) -> Result<Self, CertificateError> {
        let contents = read_files(&files)?;
        let current = Arc::new(CurrentCertificate(RwLock::new(Arc::new(parse(&files, &contents)?))));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(CertificateError::Setup)?
            .with_no_client_auth()
            .with_cert_resolver(current.clone());
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self { files, contents, current, config: Arc::new(config) })
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        self.config.clone().into()
    }

    /// Reloads the files whenever they change, until the future is dropped. An unusable certificate is logged
    /// once and the last good one stays in use.
    pub async fn follow(self) {
        let Self { files, mut contents, current, config: _ } = self;
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let paths = files.clone();
            let Ok(Ok(reread)) = tokio::task::spawn_blocking(move || read_files(&paths)).await else {
                continue;
            };
            if reread == contents {
                continue;
            }
            contents = reread;
            match parse(&files, &contents) {
                Ok(renewed) => {
                    *current.0.write() = Arc::new(renewed);
                    tracing::info!(cert = %files.cert.display(), "the gateway uses a renewed certificate");
                }
                Err(error) => tracing::warn!(
                    "cannot use the new certificate, the gateway keeps the previous one: {}",
                    russet_telemetry::errors::chain(&error)
                ),
            }
        }
    }
}

fn read_files(files: &ServerFiles) -> Result<PemContents, CertificateError> {
    let read = |path: &Path| {
        std::fs::read(path).map_err(|source| CertificateError::Read { path: path.to_owned(), source })
    };
    Ok((read(&files.cert)?, read(&files.key)?))
}

fn parse(files: &ServerFiles, (cert, key): &PemContents) -> Result<CertifiedKey, CertificateError> {
    let pem = |path: &Path, what, source| CertificateError::Pem { path: path.to_owned(), what, source };
    let chain =
        CertificateDer::pem_slice_iter(cert)
            .collect::<Result<Vec<_>, _>>()
            .and_then(|chain| {
                if chain.is_empty() { Err(rustls::pki_types::pem::Error::NoItemsFound) } else { Ok(chain) }
            })
            .map_err(|source| pem(&files.cert, "certificate", source))?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|source| pem(&files.key, "private key", source))?;
    CertifiedKey::from_der(chain, key, &rustls::crypto::ring::default_provider()).map_err(|source| {
        CertificateError::Mismatch { cert: files.cert.clone(), key: files.key.clone(), source }
    })
}
