//! Hot reload of an identity that may be renewed at any moment: values built from its files are rebuilt when
//! the files change. Open connections keep their certificate; new ones use the current one.

use std::collections::HashMap;
use std::fs;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
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
use tokio::io::{AsyncRead, AsyncWrite, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};

use super::{Protocol, TlsError, TlsFiles};
use crate::batched_writes::BatchedWrites;
use crate::ports::{self, Egress};

/// Handshake timeout.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Limits against peers that connect and send nothing.
#[derive(Clone, Copy, Debug)]
struct HandshakeLimits {
    /// Timeout of one handshake.
    timeout: Duration,
    /// Maximum number of pending handshakes. Peers of a cluster complete theirs in milliseconds, so with this
    /// many pending the oldest one of the host with the most is taken for a silent one: it is closed, and new
    /// connections do not wait. Half of the file descriptor limit of a macOS shell.
    max_pending: usize,
}

const HANDSHAKE_LIMITS: HandshakeLimits = HandshakeLimits { timeout: HANDSHAKE_TIMEOUT, max_pending: 128 };

/// Attempts to read while a version is being replaced between two files.
const MAX_READ_ATTEMPTS: usize = 5;

/// Distinguishes versions of a file: the inode changes with every rename.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileVersion(Option<(u64, u64, i64, i64)>);

impl FileVersion {
    pub(crate) fn read(path: &Path) -> Self {
        Self(fs::metadata(path).ok().map(|it| (it.dev(), it.ino(), it.mtime(), it.mtime_nsec())))
    }
}

/// A value built from an identity's files, rebuilt when they change.
#[derive(Debug)]
struct HotReload<T> {
    files: TlsFiles,
    protocol: Protocol,
    build: fn(&TlsFiles, Protocol) -> Result<T, TlsError>,
    current: Mutex<(FileVersion, Arc<T>)>,
}

impl<T> HotReload<T> {
    fn new(
        files: &TlsFiles,
        protocol: Protocol,
        make: fn(&TlsFiles, Protocol) -> Result<T, TlsError>,
    ) -> Result<Self, TlsError> {
        // Version first, then read: a change in between is read again, never missed.
        let stamp = FileVersion::read(&files.cert);
        let made = Mutex::new((stamp, Arc::new(make(files, protocol)?)));
        Ok(Self { files: files.clone(), protocol, build: make, current: made })
    }

    fn current(&self) -> Arc<T> {
        let stamp = FileVersion::read(&self.files.cert);
        let mut made = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if made.0 != stamp {
            match (self.build)(&self.files, self.protocol) {
                Ok(fresh) => *made = (stamp, Arc::new(fresh)),
                Err(error) => {
                    tracing::warn!(%error, "the renewed identity cannot be used yet; the former one is");
                }
            }
        }
        made.1.clone()
    }
}

/// Bytes per read from the system; rustls alone reads 4 KiB each time.
const READ_BUFFER_BYTES: usize = 256 << 10;

/// Opens TLS connections with this identity.
#[derive(Clone, Debug)]
pub struct Connector(Arc<HotReload<ClientConfig>>);

impl Connector {
    /// Connects to `address` and verifies that the server is `name`.
    pub async fn connect(
        &self,
        name: ServerName<'static>,
        address: &str,
    ) -> std::io::Result<client::TlsStream<TcpStream>> {
        let stream = TcpStream::connect(address).await?;
        let _ = stream.set_nodelay(true);
        self.shake_hands(name, stream).await
    }

    /// The same, through this egress, with large read buffers.
    pub async fn connect_from(
        &self,
        name: ServerName<'static>,
        exit: &Egress,
        address: SocketAddr,
    ) -> std::io::Result<client::TlsStream<BufReader<TcpStream>>> {
        let stream = ports::connect_from(exit, address).await?;
        let _ = stream.set_nodelay(true);
        self.shake_hands(name, BufReader::with_capacity(READ_BUFFER_BYTES, stream)).await
    }

    async fn shake_hands<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        name: ServerName<'static>,
        stream: S,
    ) -> std::io::Result<client::TlsStream<S>> {
        let handshake = TlsConnector::from(self.0.current()).connect(name, stream);
        tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await?
    }
}

impl TlsFiles {
    /// A connector that uses the current identity for each connection.
    pub fn connector(&self, protocol: Protocol) -> Result<Connector, TlsError> {
        Ok(Connector(Arc::new(HotReload::new(self, protocol, client_config)?)))
    }

    /// Connections of `listener` after a successful handshake, for a server of `protocol`. The listener
    /// closes when the stream is dropped.
    pub fn incoming(
        &self,
        listener: TcpListener,
        protocol: Protocol,
    ) -> Result<ReceiverStream<std::io::Result<server::TlsStream<TcpStream>>>, TlsError> {
        let config = Arc::new(HotReload::new(self, protocol, server_config)?);
        let (sender, receiver) = mpsc::channel(16);
        tokio::spawn(accept(listener, config, sender, HANDSHAKE_LIMITS));
        Ok(ReceiverStream::new(receiver))
    }

    /// The same for a server of gRPC.
    pub fn incoming_grpc(
        &self,
        listener: TcpListener,
    ) -> Result<
        impl Stream<Item = std::io::Result<BatchedWrites<server::TlsStream<TcpStream>>>> + use<>,
        TlsError,
    > {
        Ok(self.incoming(listener, Protocol::Grpc)?.map(|stream| stream.map(BatchedWrites::new)))
    }
}

async fn accept(
    listener: TcpListener,
    config: Arc<HotReload<ServerConfig>>,
    sender: mpsc::Sender<std::io::Result<server::TlsStream<TcpStream>>>,
    bounds: HandshakeLimits,
) {
    // Dropped with this task, so no handshake outlives the server.
    let mut handshakes = JoinSet::new();
    let mut oldest_first: Vec<(IpAddr, AbortHandle)> = Vec::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = handshakes.join_next(), if !handshakes.is_empty() => continue,
            () = sender.closed() => return,
        };
        match accepted {
            Ok((stream, peer)) => {
                let _ = stream.set_nodelay(true);
                let handshake = TlsAcceptor::from(config.current()).accept(stream);
                let sender = sender.clone();
                let handshake = handshakes.spawn(async move {
                    match tokio::time::timeout(bounds.timeout, handshake).await {
                        // A closed channel means that the server ends.
                        Ok(Ok(stream)) => drop(sender.send(Ok(stream)).await),
                        Ok(Err(error)) => tracing::debug!(%peer, %error, "a peer was refused"),
                        Err(_) => tracing::debug!(%peer, "a peer was too slow with the TLS handshake"),
                    }
                });
                oldest_first.retain(|(_, handshake)| !handshake.is_finished());
                oldest_first.push((host_of(peer.ip()), handshake));
                if oldest_first.len() > bounds.max_pending {
                    let hosts: Vec<IpAddr> = oldest_first.iter().map(|(host, _)| *host).collect();
                    if let Some(index) = handshake_to_evict(&hosts) {
                        oldest_first.remove(index).1.abort();
                    }
                }
            }
            Err(error) => {
                // Probably out of file descriptors: the next connection may find a free one.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Index of the handshake to evict, of pending ones with these hosts, oldest first: the oldest of the host
/// with the most, so that a host with many evicts its own.
fn handshake_to_evict(hosts: &[IpAddr]) -> Option<usize> {
    let mut counts = HashMap::new();
    for host in hosts {
        *counts.entry(host).or_insert(0) += 1;
    }
    let most = counts.values().max()?;
    hosts.iter().position(|host| counts.get(host) == Some(most))
}

/// The host of an address: in IPv6 one host has all addresses of a /64.
pub fn host_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        address => address,
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn server_config(files: &TlsFiles, protocol: Protocol) -> Result<ServerConfig, TlsError> {
    let unusable = |problem: String| TlsError::Unusable { path: files.ca.clone(), problem };
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(&files.ca)?), provider())
        .build()
        .map_err(|error| unusable(error.to_string()))?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(error.to_string()))?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(certified(files)?)));
    config.alpn_protocols = vec![protocol.name().to_vec()];
    // A resumed session would keep the certificates of the first one, renewed or expired.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn client_config(files: &TlsFiles, protocol: Protocol) -> Result<ClientConfig, TlsError> {
    let unusable = |problem: String| TlsError::Unusable { path: files.ca.clone(), problem };
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(error.to_string()))?
        .with_root_certificates(roots(&files.ca)?)
        .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(certified(files)?)));
    config.alpn_protocols = vec![protocol.name().to_vec()];
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

/// The matching certificate and key.
fn certified(files: &TlsFiles) -> Result<CertifiedKey, TlsError> {
    let pair = || {
        let chain = certificates(&files.cert)?;
        let unusable = |problem: String| TlsError::Unusable { path: files.key.clone(), problem };
        let key = PrivateKeyDer::from_pem_slice(&super::read(&files.key)?)
            .map_err(|error| unusable(error.to_string()))?;
        CertifiedKey::from_der(chain, key, &provider()).map_err(|error| unusable(error.to_string()))
    };
    let mut last = pair();
    for _ in 1..MAX_READ_ATTEMPTS {
        if last.is_ok() {
            break;
        }
        last = pair();
    }
    last
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use tokio::io::AsyncReadExt as _;

    use super::*;

    /// Longer than anything takes on a busy machine.
    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn busiest_host_loses_its_oldest_handshake() {
        for (addresses, expected) in [
            ("", None),
            ("10.0.0.1", Some(0)),
            ("10.0.0.1 10.0.0.2 10.0.0.3", Some(0)),
            ("10.0.0.1 10.0.0.2 10.0.0.2", Some(1)),
            ("10.0.0.1 10.0.0.2 ::ffff:10.0.0.2", Some(1)),
            ("10.0.0.1 10.0.0.2 10.0.0.2 10.0.0.1", Some(0)),
            ("10.0.0.1 2001:db8::1 10.0.0.2 2001:db8::2:2", Some(1)),
            ("10.0.0.1 2001:db8::1 10.0.0.2 2001:db8:0:1::1", Some(0)),
        ] {
            let hosts: Vec<IpAddr> =
                addresses.split_whitespace().map(|address| host_of(address.parse().unwrap())).collect();
            assert_eq!(handshake_to_evict(&hosts), expected, "{addresses}");
        }
    }

    #[tokio::test]
    async fn silent_handshake_is_evicted_and_delays_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let files = TlsFiles::in_dir(folder.path());
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(vec!["peer".into()]).unwrap().signed_by(&key, &ca).unwrap();
        for (path, text) in
            [(&files.ca, ca.pem()), (&files.cert, leaf.pem()), (&files.key, key.serialize_pem())]
        {
            fs::write(path, text).unwrap();
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let config = Arc::new(HotReload::new(&files, Protocol::Grpc, server_config).unwrap());
        let (sender, mut receiver) = mpsc::channel(16);
        // Longer than the test's own timeout, so that only the limit can close a connection.
        let bounds = HandshakeLimits { timeout: PATIENCE * 2, max_pending: 2 };
        let server = tokio::spawn(accept(listener, config.clone(), sender, bounds));
        let mut silent = Vec::new();
        for _ in 0..4 {
            silent.push(TcpStream::connect(&address).await.unwrap());
        }
        closes(&mut silent[0]).await;
        closes(&mut silent[1]).await;
        let name = ServerName::try_from("peer").unwrap();
        let connector = files.connector(Protocol::Grpc).unwrap();
        let (connected, served) = tokio::join!(connector.connect(name, &address), receiver.recv());
        connected.unwrap();
        served.unwrap().unwrap();
        closes(&mut silent[2]).await;
        server.abort();

        // A few handshakes get their timeout, and no more.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut silent = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (sender, _receiver) = mpsc::channel(16);
        let bounds = HandshakeLimits { timeout: Duration::from_millis(50), max_pending: 2 };
        let server = tokio::spawn(accept(listener, config, sender, bounds));
        closes(&mut silent).await;
        server.abort();
    }

    /// Waits until the other side has closed a connection on which nothing was sent.
    async fn closes(client: &mut TcpStream) {
        let closed = tokio::time::timeout(PATIENCE, client.read(&mut [0])).await;
        assert!(matches!(closed, Ok(Ok(0) | Err(_))), "{closed:?}");
    }
}
