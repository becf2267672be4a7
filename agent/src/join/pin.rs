//! Authenticates a server before any secret is sent to it. The token pins the CA's public key; the server
//! sends the CA in its chain; from then on TLS is verified as usual.

use std::sync::Arc;
use std::time::Duration;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, RootCertStore, SignatureScheme};
use sha2::Digest as _;
use thiserror::Error;

/// Why a server was not trusted.
#[derive(Debug, Error)]
pub enum PinError {
    /// The URL is invalid.
    #[error("`{0}` is not the address of an API server; write it like https://10.0.0.5:6443")]
    Url(String),
    /// The server cannot be reached.
    #[error(
        "{server} cannot be reached ({problem}); check the address and the port, and that `russet token create` ran there (it opens the server to the network)"
    )]
    Unreachable {
        /// The server.
        server: String,
        /// Cause.
        problem: String,
    },
    /// The server has another CA.
    #[error(
        "{server} is not the server this token is for: none of its certificates has the CA pin {pin}; use a token of that cluster; if this is one, the connection may be intercepted"
    )]
    Mismatch {
        /// The server.
        server: String,
        /// Pin of the token.
        pin: String,
    },
    /// The pinned CA has not signed a certificate for this address.
    #[error(
        "{server} has the right CA but a certificate that is not valid for this address ({problem}); use an address the certificate names, or restart `russet serve`"
    )]
    Certificate {
        /// The server.
        server: String,
        /// The problem.
        problem: String,
    },
}

/// `sha256:<hex>` of a certificate's public key.
pub fn of_der(certificate: &[u8]) -> Option<String> {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
    let key = parsed.public_key().raw;
    Some(format!("sha256:{}", hex::encode(sha2::Sha256::digest(key))))
}

/// Whether one of the certificates of a PEM text has that pin.
pub fn is_in(pem: &str, pin: &str) -> bool {
    CertificateDer::pem_slice_iter(pem.as_bytes()).flatten().any(|ca| of_der(&ca).as_deref() == Some(pin))
}

/// A certificate as PEM.
pub(super) fn to_pem(der: &[u8]) -> String {
    use base64::Engine as _;
    let body = base64::engine::general_purpose::STANDARD.encode(der);
    let lines: Vec<&str> =
        body.as_bytes().chunks(64).filter_map(|line| std::str::from_utf8(line).ok()).collect();
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
}

/// Connects to `server` and returns its CA, which must have the public key that `pin` names and have signed
/// the server's certificate for this address. `known` is the CA itself, for a server that does not send it.
/// Nothing is sent but the handshake.
pub async fn fetch(server: &str, pin: &str, known: Option<&[u8]>) -> Result<Vec<u8>, PinError> {
    let url = reqwest::Url::parse(server).ok().filter(|url| url.scheme() == "https");
    let bad = || PinError::Url(server.to_owned());
    let url = url.ok_or_else(bad)?;
    let host = url.host_str().ok_or_else(bad)?.trim_matches(['[', ']']).to_owned();
    let port = url.port_or_known_default().unwrap_or(6443);
    let name = ServerName::try_from(host.clone()).map_err(|_| bad())?;

    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let known = known.filter(|known| of_der(known).as_deref() == Some(pin)).map(<[u8]>::to_vec);
    let verifier =
        Arc::new(PinVerifier { pin: pin.to_owned(), known: known.clone(), provider: provider.clone() });
    let unreachable = |problem: String| PinError::Unreachable { server: server.to_owned(), problem };
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| unreachable(error.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    let connect = async {
        let stream = tokio::net::TcpStream::connect((host.as_str(), port)).await?;
        tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await
    };
    let stream = match tokio::time::timeout(Duration::from_secs(15), connect).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Err(connection_error(server, pin, &error)),
        Err(_) => return Err(unreachable("no answer within 15 s".into())),
    };
    if let Some(known) = known {
        return Ok(known);
    }
    let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let ca = chain.iter().find(|certificate| of_der(certificate).as_deref() == Some(pin));
    ca.map(|ca| ca.to_vec())
        .ok_or_else(|| PinError::Mismatch { server: server.to_owned(), pin: pin.to_owned() })
}

fn connection_error(server: &str, pin: &str, error: &std::io::Error) -> PinError {
    let server = server.to_owned();
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        // Another CA with the same name.
        Some(rustls::Error::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        )) => PinError::Mismatch { server, pin: pin.to_owned() },
        Some(rustls::Error::InvalidCertificate(problem)) => {
            PinError::Certificate { server, problem: problem.to_string() }
        }
        _ => PinError::Unreachable { server, problem: error.to_string() },
    }
}

/// Accepts a chain that contains the pinned CA and is signed by it.
#[derive(Debug)]
struct PinVerifier {
    pin: String,
    known: Option<Vec<u8>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PinVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let mut chain = intermediates.iter().chain([end_entity]);
        let ca = match &self.known {
            Some(known) => CertificateDer::from(known.clone()),
            None => chain
                .find(|certificate| of_der(certificate).as_ref() == Some(&self.pin))
                .ok_or(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer))?
                .clone()
                .into_owned(),
        };
        let mut roots = RootCertStore::empty();
        roots.add(ca)?;
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), self.provider.clone())
            .build()
            .map_err(|error| rustls::Error::General(error.to_string()))?;
        verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

    /// A server with a certificate for `name`, and its CA, which it sends or not.
    async fn server(name: &str, sends: bool) -> (String, Vec<u8>) {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &ca).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut chain = vec![leaf.der().clone()];
        chain.extend(sends.then(|| ca.der().clone()));
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, rustls::pki_types::PrivateKeyDer::try_from(key.serialize_der()).unwrap())
            .unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                acceptor.accept(stream).await.ok();
            }
        });
        (url, ca.der().to_vec())
    }

    #[tokio::test]
    async fn only_the_pinned_ca_is_trusted_for_its_own_addresses() {
        let (url, ca) = server("127.0.0.1", true).await;
        let pin = of_der(&ca).unwrap();
        assert_eq!(fetch(&url, &pin, None).await.unwrap(), ca);
        assert!(is_in(&to_pem(&ca), &pin));

        let other = format!("sha256:{}", "00".repeat(32));
        assert!(!is_in(&to_pem(&ca), &other));
        assert!(matches!(fetch(&url, &other, None).await, Err(PinError::Mismatch { .. })));
        let (elsewhere, foreign) = server("10.9.9.9", true).await;
        let foreign_pin = of_der(&foreign).unwrap();
        assert!(is_in(&(to_pem(&foreign) + &to_pem(&ca)), &pin), "any of them");
        assert!(matches!(fetch(&elsewhere, &foreign_pin, None).await, Err(PinError::Certificate { .. })));
        assert!(matches!(fetch("http://127.0.0.1:1", &pin, None).await, Err(PinError::Url(_))));
        assert!(matches!(fetch("https://127.0.0.1:1", &pin, None).await, Err(PinError::Unreachable { .. })));

        // A server that does not send its CA is accepted only by a client that brings the CA.
        let (silent, ca) = server("127.0.0.1", false).await;
        let pin = of_der(&ca).unwrap();
        assert!(matches!(fetch(&silent, &pin, None).await, Err(PinError::Mismatch { .. })));
        assert_eq!(fetch(&silent, &pin, Some(&ca)).await.unwrap(), ca);
        assert!(matches!(fetch(&silent, &pin, Some(&foreign)).await, Err(PinError::Mismatch { .. })));
        assert!(matches!(fetch(&silent, &foreign_pin, Some(&foreign)).await, Err(PinError::Mismatch { .. })));
    }
}
