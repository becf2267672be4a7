//! Listeners: one on loopback, and, once a join token for another machine exists, one on every address of
//! this host. They accept and serve connections. Not here: requests.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use super::connection_limit::{ConnectionLimiter, ConnectionPermit};
use super::handshakes::{HandshakeLimits, Handshaken, Handshakes};
use super::host::{certificate_addresses, host_addresses};
use super::tls::{self, Resolver};
use crate::auth::tokens;
use crate::auth::user::User;
use crate::pki::Authority;
use crate::state::ServerState;

/// Connections that are still busy this long after shutdown are closed.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout of a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Poll interval of the host's addresses: cables and Wi-Fi change, and no system notifies reliably.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// How often a running server renews its certificate, long before it expires.
const CERTIFICATE_RENEW_INTERVAL: Duration = Duration::from_secs(30 * 24 * 3600);
/// Streams of a connection whose client has a certificate: each watch is one, and a controller may have a hundred.
const MAX_STREAMS: u32 = 1000;
/// Streams of other connections, as in Kubernetes.
const MAX_UNCERTIFIED_STREAMS: u32 = 100;
/// Largest head of a request in bytes, its path and all headers together.
const MAX_HEAD_BYTES: u32 = 64 * 1024;

/// Shared state of connections.
#[derive(Clone)]
pub struct ConnectionService {
    /// The API.
    pub api: Arc<ServerState>,
    /// TLS.
    pub acceptor: TlsAcceptor,
    /// The limits of connections.
    pub limiter: Arc<ConnectionLimiter>,
}

/// A connection from a listener, before its handshake.
pub struct AcceptedConnection {
    stream: TcpStream,
    peer: IpAddr,
    /// Ends when the listener is closed.
    listener: watch::Receiver<()>,
}

/// Passes the connections of one listener on, until the server stops. Those still open end when it is dropped.
pub async fn accept(listener: TcpListener, accepted: mpsc::Sender<AcceptedConnection>) {
    let (_open, state) = watch::channel(());
    loop {
        let connection = tokio::select! {
            connection = listener.accept() => connection,
            () = accepted.closed() => return,
        };
        match connection {
            Ok((stream, peer)) => {
                let connection = AcceptedConnection { stream, peer: peer.ip(), listener: state.clone() };
                if accepted.send(connection).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                // Most likely out of file descriptors: the next accept may succeed.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// Serves the connections of all listeners until the server stops.
pub async fn serve(service: ConnectionService, mut accepted: mpsc::Receiver<AcceptedConnection>) {
    let stopping = service.api.stopping.clone();
    let limits =
        HandshakeLimits { timeout: HANDSHAKE_TIMEOUT, max_concurrent: service.limiter.limits().handshakes };
    let mut handshakes = Handshakes::new(service.acceptor.clone(), limits);
    let mut connections = tokio::task::JoinSet::new();
    let mut number = 0;
    loop {
        tokio::select! {
            Some(connection) = accepted.recv() => {
                let AcceptedConnection { stream, peer, listener } = connection;
                handshakes.start(stream, peer, listener);
            }
            handshaken = handshakes.next() => {
                number += 1;
                let user = tls::user(handshaken.stream.get_ref().1.peer_certificates());
                if let Some(permit) = service.limiter.open_connection(number, handshaken.peer, user.as_ref()) {
                    connections.spawn(serve_connection(service.api.clone(), handshaken, user, permit));
                }
            }
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            () = crate::state::stopped(stopping.clone()) => break,
        }
    }
    drop((accepted, handshakes));
    let ended = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(DRAIN_TIMEOUT, ended).await.is_err() {
        connections.shutdown().await;
    }
}

async fn serve_connection(
    api: Arc<ServerState>,
    handshaken: Handshaken,
    user: Option<User>,
    permit: ConnectionPermit,
) {
    let Handshaken { stream, mut listener, .. } = handshaken;
    let stopping = api.stopping.clone();
    let idle_timeout = permit.idle_timeout();
    let max_streams = if user.is_some() { MAX_STREAMS } else { MAX_UNCERTIFIED_STREAMS };
    let permit = Arc::new(permit);
    let handler = service_fn({
        let permit = permit.clone();
        move |request| super::handle(api.clone(), permit.clone(), user.clone(), request)
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(idle_timeout)
        .max_buf_size(MAX_HEAD_BYTES as usize);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(max_streams)
        .max_header_list_size(MAX_HEAD_BYTES)
        .keep_alive_interval(Some(Duration::from_secs(30)));
    // ALPN has settled the HTTP version: no bytes are read to detect it, which a client could delay.
    let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let builder = if h2 { builder.http2_only() } else { builder.http1_only() };
    let connection = builder.serve_connection(TokioIo::new(stream), handler);
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        // First: the listeners end with the server, and must not cut off what is drained.
        biased;
        () = crate::state::stopped(stopping.clone()) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
        _ = listener.changed() => return,
        () = permit.evicted() => return,
        ended = connection.as_mut() => ended,
        () = permit.idle() => {
            // A request that is on its way is answered; the client opens another connection for the next one.
            connection.as_mut().graceful_shutdown();
            match tokio::time::timeout(DRAIN_TIMEOUT, connection).await {
                Ok(ended) => ended,
                Err(_) => return,
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended with an error");
    }
}

/// Opens listeners on the host's addresses once the first join token exists, follows address changes, closes them
/// again once the marker and all tokens are gone, and keeps the server's certificate valid for all addresses.
pub struct LanListener {
    /// Takes their connections.
    pub accepted: mpsc::Sender<AcceptedConnection>,
    /// The API.
    pub api: Arc<ServerState>,
    /// Signs new server certificates.
    pub authority: Arc<Authority>,
    /// Serves the current certificate.
    pub resolver: Arc<Resolver>,
    /// The port on every address.
    pub port: u16,
    /// The address of the main listener, which is open anyway.
    pub main: SocketAddr,
    /// The addresses to open; all of the host's if none is named.
    pub addresses: Vec<IpAddr>,
    /// A file that exists once the listeners were opened, so that they are opened again after a restart.
    pub marker: PathBuf,
}

/// The addresses of the host that are to be open, given those that were named.
fn open_addresses(host: &[IpAddr], main: IpAddr, named: &[IpAddr]) -> Vec<IpAddr> {
    let all = named.is_empty() || named.iter().any(IpAddr::is_unspecified);
    host.iter()
        .copied()
        .filter(|address| *address != main && !main.is_unspecified() && (all || named.contains(address)))
        .collect()
}

impl LanListener {
    /// Runs until the server stops.
    pub async fn run(self) {
        let stopping: watch::Receiver<bool> = self.api.stopping.clone();
        let mut open: HashMap<IpAddr, JoinHandle<()>> = HashMap::new();
        let mut named = Vec::new();
        let mut refused: HashSet<IpAddr> = HashSet::new();
        let mut renewed = tokio::time::Instant::now();
        loop {
            let host = host_addresses();
            let addresses = certificate_addresses(&host);
            if addresses != named || renewed.elapsed() > CERTIFICATE_RENEW_INTERVAL {
                match self.resolver.renew(&self.authority, &addresses) {
                    Ok(()) => (named, renewed) = (addresses, tokio::time::Instant::now()),
                    Err(error) => tracing::warn!(%error, "the server certificate could not be renewed"),
                }
            }
            let desired = if self.should_open() {
                open_addresses(&host, self.main.ip(), &self.addresses)
            } else {
                Vec::new()
            };
            open.retain(|address, task| {
                let keep = desired.contains(address) && !task.is_finished();
                if !keep {
                    tracing::info!(%address, port = self.port, "closed for other machines");
                    task.abort();
                }
                keep
            });
            for address in self.addresses.iter().filter(|it| !it.is_unspecified() && !it.is_loopback()) {
                if !host.contains(address) && refused.insert(*address) {
                    tracing::warn!(%address, "this host does not have the address of --api-listen; it is opened once it does");
                }
            }
            for address in desired {
                if open.contains_key(&address) {
                    continue;
                }
                match TcpListener::bind(SocketAddr::new(address, self.port)).await {
                    Ok(listener) => {
                        tracing::info!(%address, port = self.port, "listening for joining machines");
                        open.insert(address, tokio::spawn(accept(listener, self.accepted.clone())));
                    }
                    // Retried each time, logged once: an address may take a moment to become usable.
                    Err(error) if refused.insert(address) => {
                        tracing::warn!(%address, port = self.port, %error, "cannot listen on an address of this host");
                    }
                    Err(_) => {}
                }
            }
            tokio::select! {
                () = tokio::time::sleep(POLL_INTERVAL) => {}
                () = self.token_created() => {}
                () = crate::state::stopped(stopping.clone()) => break,
            }
        }
        for (_, task) in open {
            let _ = task.await;
        }
    }

    /// Whether a join token exists, or one existed since the listeners were closed.
    fn should_open(&self) -> bool {
        if self.marker.exists() {
            return true;
        }
        if !self.has_token() {
            return false;
        }
        if let Err(error) = std::fs::write(&self.marker, "") {
            tracing::warn!(%error, "the marker for LAN listeners could not be written; after a restart they open only once a new join token exists");
        }
        // `russet token close` revokes the tokens and then removes the marker: it may have done so just now.
        let open = self.has_token();
        if !open {
            let _ = std::fs::remove_file(&self.marker);
        }
        open
    }

    fn has_token(&self) -> bool {
        let now = jiff::Timestamp::now();
        self.api.store.range(&tokens::bootstrap_prefix(), None, None).is_ok_and(|snapshot| {
            snapshot.records.iter().any(|record| tokens::is_live_bootstrap(record.object(), now))
        })
    }

    async fn token_created(&self) {
        let store = &self.api.store;
        match store.watch(&tokens::bootstrap_prefix(), store.revision()) {
            Ok(mut watch) => {
                let _ = watch.next().await;
            }
            Err(_) => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_named_addresses_of_the_host_are_opened() {
        let list = |text: &str| -> Vec<IpAddr> {
            text.split_whitespace().map(|address| address.parse().unwrap()).collect()
        };
        let host = "10.0.0.1 192.168.1.2 fd00::1";
        for (main, named, expected) in [
            ("127.0.0.1", "", host),
            ("127.0.0.1", "0.0.0.0", host),
            ("127.0.0.1", "10.0.0.1 10.9.9.9", "10.0.0.1"),
            ("127.0.0.1", "127.0.0.1", ""),
            ("10.0.0.1", "", "192.168.1.2 fd00::1"),
            ("0.0.0.0", "10.0.0.1", ""),
        ] {
            let opened = open_addresses(&list(host), main.parse().unwrap(), &list(named));
            assert_eq!(opened, list(expected), "{named} beside {main}");
        }
    }
}
