//! An identity that may be renewed at any moment: what is made of its files is made anew when they
//! change. Connections that are open keep what they were opened with; new ones get the new.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};
use tokio_stream::wrappers::ReceiverStream;

use super::{Files, TlsError};

/// A peer that has not finished its handshake by then is none of ours.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// HTTP/2, which is all that gRPC speaks.
const ALPN: &[u8] = b"h2";
/// A reader between two files of a version that is being replaced looks again.
const TRIES: usize = 5;

/// What tells one version of a file from another: the inode changes with every rename.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp(Option<(u64, u64, i64, i64)>);

impl Stamp {
    pub(crate) fn of(path: &Path) -> Self {
        Self(fs::metadata(path).ok().map(|it| (it.dev(), it.ino(), it.mtime(), it.mtime_nsec())))
    }
}

/// Something made of an identity's files, as current as they are.
#[derive(Debug)]
struct Live<T> {
    files: Files,
    make: fn(&Files) -> Result<T, TlsError>,
    made: Mutex<(Stamp, Arc<T>)>,
}

impl<T> Live<T> {
    fn new(files: &Files, make: fn(&Files) -> Result<T, TlsError>) -> Result<Self, TlsError> {
        // Stamped before it is read: what changes in between is read again, never missed.
        let stamp = Stamp::of(&files.cert);
        let made = Mutex::new((stamp, Arc::new(make(files)?)));
        Ok(Self { files: files.clone(), make, made })
    }

    fn current(&self) -> Arc<T> {
        let stamp = Stamp::of(&self.files.cert);
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if made.0 != stamp {
            match (self.make)(&self.files) {
                Ok(fresh) => *made = (stamp, Arc::new(fresh)),
                Err(error) => {
                    tracing::warn!(%error, "the renewed identity cannot be used yet; the former one is");
                }
            }
        }
        made.1.clone()
    }
}

/// Takes connections of peers that show a certificate of the same CA.
#[derive(Clone, Debug)]
pub struct Acceptor(Arc<Live<ServerConfig>>);

impl Acceptor {
    /// The handshake, bounded in time.
    pub async fn accept(&self, stream: TcpStream) -> std::io::Result<server::TlsStream<TcpStream>> {
        let _ = stream.set_nodelay(true);
        let handshake = TlsAcceptor::from(self.0.current()).accept(stream);
        tokio::time::timeout(HANDSHAKE, handshake).await?
    }
}

/// Opens connections as this identity.
#[derive(Clone, Debug)]
pub struct Connector(Arc<Live<ClientConfig>>);

impl Connector {
    /// Connects to whoever proves to be `name` at `address`.
    pub async fn connect(
        &self,
        name: ServerName<'static>,
        address: &str,
    ) -> std::io::Result<client::TlsStream<TcpStream>> {
        let stream = TcpStream::connect(address).await?;
        let _ = stream.set_nodelay(true);
        let handshake = TlsConnector::from(self.0.current()).connect(name, stream);
        tokio::time::timeout(HANDSHAKE, handshake).await?
    }
}

impl Files {
    /// Takes connections, with the identity as it is when each one comes.
    pub fn acceptor(&self) -> Result<Acceptor, TlsError> {
        Ok(Acceptor(Arc::new(Live::new(self, server_config)?)))
    }

    /// Opens connections, with the identity as it is when each one is opened.
    pub fn connector(&self) -> Result<Connector, TlsError> {
        Ok(Connector(Arc::new(Live::new(self, client_config)?)))
    }

    /// The connections of `listener` whose handshake succeeded, for a gRPC server. It closes when the
    /// stream is dropped.
    pub fn incoming(
        &self,
        listener: TcpListener,
    ) -> Result<ReceiverStream<std::io::Result<server::TlsStream<TcpStream>>>, TlsError> {
        let acceptor = self.acceptor()?;
        let (sender, receiver) = mpsc::channel(16);
        tokio::spawn(accept(listener, acceptor, sender));
        Ok(ReceiverStream::new(receiver))
    }
}

async fn accept(
    listener: TcpListener,
    acceptor: Acceptor,
    sender: mpsc::Sender<std::io::Result<server::TlsStream<TcpStream>>>,
) {
    // Dropped with this task, so no handshake outlives the server.
    let mut handshakes = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = handshakes.join_next(), if !handshakes.is_empty() => continue,
            () = sender.closed() => return,
        };
        match accepted {
            Ok((stream, peer)) => {
                let (acceptor, sender) = (acceptor.clone(), sender.clone());
                handshakes.spawn(async move {
                    match acceptor.accept(stream).await {
                        // A closed channel means that the server ends.
                        Ok(stream) => drop(sender.send(Ok(stream)).await),
                        Err(error) => tracing::debug!(%peer, %error, "a peer was refused"),
                    }
                });
            }
            Err(error) => {
                // Out of descriptors, most likely: the next connection may find one free again.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn server_config(files: &Files) -> Result<ServerConfig, TlsError> {
    let unusable = |problem: String| TlsError::Unusable { path: files.ca.clone(), problem };
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(&files.ca)?), provider())
        .build()
        .map_err(|error| unusable(error.to_string()))?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(error.to_string()))?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(certified(files)?)));
    config.alpn_protocols = vec![ALPN.to_vec()];
    // A resumed session would go on with the certificates of the first one, renewed or expired.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn client_config(files: &Files) -> Result<ClientConfig, TlsError> {
    let unusable = |problem: String| TlsError::Unusable { path: files.ca.clone(), problem };
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(error.to_string()))?
        .with_root_certificates(roots(&files.ca)?)
        .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(certified(files)?)));
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(config)
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots
            .add(certificate)
            .map_err(|error| TlsError::Unusable { path: path.to_owned(), problem: error.to_string() })?;
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let unusable = |problem: String| TlsError::Unusable { path: path.to_owned(), problem };
    let found = CertificateDer::pem_slice_iter(&super::read(path)?)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| unusable(error.to_string()))?;
    if found.is_empty() {
        return Err(unusable("it holds no certificate".into()));
    }
    Ok(found)
}

/// Certificate and key, which belong together.
fn certified(files: &Files) -> Result<CertifiedKey, TlsError> {
    let pair = || {
        let chain = certificates(&files.cert)?;
        let unusable = |problem: String| TlsError::Unusable { path: files.key.clone(), problem };
        let key = PrivateKeyDer::from_pem_slice(&super::read(&files.key)?)
            .map_err(|error| unusable(error.to_string()))?;
        CertifiedKey::from_der(chain, key, &provider()).map_err(|error| unusable(error.to_string()))
    };
    let mut last = pair();
    for _ in 1..TRIES {
        if last.is_ok() {
            break;
        }
        last = pair();
    }
    last
}
