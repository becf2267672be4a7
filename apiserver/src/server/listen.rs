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
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::handshakes::{HandshakeLimits, Handshakes};
use super::host::{certificate_addresses, host_addresses};
use super::tls::{self, Resolver};
use crate::auth::tokens;
use crate::pki::Authority;
use crate::state::ServerState;

/// A connection without a request for this long is closed.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Connections that are still busy this long after shutdown are closed.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);
/// Poll interval of the host's addresses: cables and Wi-Fi change, and no system notifies reliably.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// How often a running server renews its certificate, long before it expires.
const CERTIFICATE_RENEW_INTERVAL: Duration = Duration::from_secs(30 * 24 * 3600);
/// Streams per connection: each watch is one, and a controller may have a hundred.
const MAX_STREAMS: u32 = 1000;

/// Shared state of connections.
#[derive(Clone)]
pub struct ConnectionService {
    /// The API.
    pub api: Arc<ServerState>,
    /// TLS.
    pub acceptor: TlsAcceptor,
}

/// Accepts connections until the server stops.
pub async fn accept(service: ConnectionService, listener: TcpListener) {
    let stopping = service.api.stopping.clone();
    let mut handshakes = Handshakes::new(service.acceptor.clone(), HandshakeLimits::default());
    let mut connections = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => handshakes.start(stream, peer.ip()),
                Err(error) => {
                    // Most likely out of file descriptors: the next accept may succeed.
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            stream = handshakes.next() => { connections.spawn(serve(service.clone(), stream)); }
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            () = crate::state::stopped(stopping.clone()) => break,
        }
    }
    drop((listener, handshakes));
    let ended = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(DRAIN_TIMEOUT, ended).await.is_err() {
        connections.shutdown().await;
    }
}

async fn serve(service: ConnectionService, stream: TlsStream<TcpStream>) {
    let user = tls::user(stream.get_ref().1.peer_certificates());
    let api = service.api.clone();
    let stopping = api.stopping.clone();
    let asked = Arc::new(Notify::new());
    let handler = service_fn({
        let asked = asked.clone();
        move |request| {
            asked.notify_one();
            super::handle(api.clone(), user.clone(), request)
        }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new());
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .keep_alive_interval(Some(Duration::from_secs(30)));
    // ALPN has settled the HTTP version: no bytes are read to detect it, which a client could delay.
    let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let builder = if h2 { builder.http2_only() } else { builder.http1_only() };
    let connection = builder.serve_connection(TokioIo::new(stream), handler);
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = idle_timeout(&asked) => return,
        () = crate::state::stopped(stopping.clone()) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended with an error");
    }
}

/// Completes if no request arrives in time.
async fn idle_timeout(asked: &Notify) {
    if tokio::time::timeout(FIRST_REQUEST_TIMEOUT, asked.notified()).await.is_ok() {
        std::future::pending().await
    }
}

/// Opens listeners on the host's addresses once the first join token exists, follows address changes, and
/// keeps the server's certificate valid for all of them.
pub struct LanListener {
    /// Shared state of connections.
    pub service: ConnectionService,
    /// Signs new server certificates.
    pub authority: Arc<Authority>,
    /// Serves the current certificate.
    pub resolver: Arc<Resolver>,
    /// The port on every address.
    pub port: u16,
    /// The address of the main listener, which is open anyway.
    pub main: SocketAddr,
    /// A file that exists once the listeners were opened, so that they are opened again after a restart.
    pub marker: PathBuf,
}

impl LanListener {
    /// Runs until the server stops.
    pub async fn run(self) {
        let stopping: watch::Receiver<bool> = self.service.api.stopping.clone();
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
            if !self.main.ip().is_unspecified() && self.should_open() {
                open.retain(|address, task| {
                    let keep = host.contains(address) && !task.is_finished();
                    if !keep {
                        task.abort();
                    }
                    keep
                });
                for address in host {
                    if address == self.main.ip() || open.contains_key(&address) {
                        continue;
                    }
                    match TcpListener::bind(SocketAddr::new(address, self.port)).await {
                        Ok(listener) => {
                            tracing::info!(%address, port = self.port, "listening for joining machines");
                            open.insert(address, tokio::spawn(accept(self.service.clone(), listener)));
                        }
                        // Retried each time, logged once: an address may take a moment to become usable.
                        Err(error) if refused.insert(address) => {
                            tracing::warn!(%address, port = self.port, %error, "cannot listen on an address of this host");
                        }
                        Err(_) => {}
                    }
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

    /// Whether a join token exists or existed.
    fn should_open(&self) -> bool {
        if self.marker.exists() {
            return true;
        }
        let now = jiff::Timestamp::now();
        let live =
            self.service.api.store.range(&tokens::bootstrap_prefix(), None, None).is_ok_and(|snapshot| {
                snapshot.records.iter().any(|record| tokens::is_live_bootstrap(record.object(), now))
            });
        if live && let Err(error) = std::fs::write(&self.marker, "") {
            tracing::warn!(%error, "the marker for LAN listeners could not be written; after a restart they open only once a new join token exists");
        }
        live
    }

    async fn token_created(&self) {
        let store = &self.service.api.store;
        match store.watch(&tokens::bootstrap_prefix(), store.revision()) {
            Ok(mut watch) => {
                let _ = watch.next().await;
            }
            Err(_) => std::future::pending().await,
        }
    }
}
