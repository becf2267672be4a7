//! Listeners: plain HTTP on loopback, TLS everywhere else, and the limits that keep one slow or greedy client
//! from affecting all others. Not here: what requests mean.

mod certificate;
mod connection_limit;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use russet_rpc::write_timeout::WriteTimeout;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

pub use certificate::{Certificate, CertificateError, ServerFiles};
use connection_limit::ConnectionLimiter;

use crate::workers::Workers;

/// Which machines can reach a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposure {
    /// Programs on this machine.
    Loopback,
    /// Other machines.
    Network,
}

impl Exposure {
    /// The exposure of a listener on this address.
    pub fn for_address(address: SocketAddr) -> Self {
        if address.ip().to_canonical().is_loopback() { Self::Loopback } else { Self::Network }
    }
}

/// Timeouts and limits of client connections.
#[derive(Clone, Copy, Debug)]
pub struct ListenerLimits {
    /// Timeout of the TLS handshake.
    pub handshake_timeout: Duration,
    /// Timeout of the first request of a connection, and in HTTP/1 of the head of each later one, from the
    /// end of the last response. Longer than clients keep idle connections, so that they rarely send on one
    /// that is about to close.
    pub head_timeout: Duration,
    /// Interval of pings on an idle HTTP/2 connection, and their timeout.
    pub ping_interval: Duration,
    /// How long a client may leave what it was sent unread; then its connection is closed.
    pub write_timeout: Duration,
    /// Concurrent connections of one listener; further ones wait unaccepted.
    pub max_connections: usize,
    /// How many of these are reserved for hosts that have fewer than this. Once no others are free, the
    /// gateway closes further connections of a host with more. The others are not limited per host: many
    /// people may share the address of one proxy.
    pub reserved_connections: usize,
}

impl Default for ListenerLimits {
    fn default() -> Self {
        Self {
            handshake_timeout: Duration::from_secs(10),
            head_timeout: Duration::from_secs(60),
            ping_interval: Duration::from_secs(20),
            write_timeout: Duration::from_secs(60),
            // More than engines have slots, and few beside the file limit that `russet` raises.
            max_connections: 2048,
            reserved_connections: 512,
        }
    }
}

/// Concurrent requests on one HTTP/2 connection.
const MAX_STREAMS: u32 = 128;
/// Largest request head in bytes, all headers together.
pub(crate) const MAX_HEAD_BYTES: usize = 64 * 1024;
/// What is read of a head: one between the two sizes is refused with a reason, a larger one without. HTTP/1 may read
/// one buffer more before it notices.
const MAX_READ_HEAD_BYTES: usize = 2 * MAX_HEAD_BYTES;

/// A listening socket and its protocol.
pub struct HttpListener {
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
}

impl HttpListener {
    /// A listener for programs on this machine, without TLS.
    pub fn loopback(listener: TcpListener) -> Self {
        Self { listener, tls: None }
    }

    /// A listener for other machines, with TLS and this `certificate`.
    pub fn network(listener: TcpListener, certificate: &Certificate) -> Self {
        Self { listener, tls: Some(certificate.acceptor()) }
    }

    /// Which machines can reach it.
    pub fn exposure(&self) -> Exposure {
        if self.tls.is_some() { Exposure::Network } else { Exposure::Loopback }
    }

    /// Serves until `stopping`, then until all connections have drained. Dropping the future closes them at
    /// once.
    pub(crate) async fn serve(
        self,
        router: Router,
        limits: ListenerLimits,
        stopping: CancellationToken,
        workers: Arc<Workers>,
    ) {
        let Self { listener, tls } = self;
        let graceful = GracefulShutdown::new();
        // Loopback has one host only.
        let reserved = if tls.is_some() { limits.reserved_connections } else { 0 };
        let limiter = ConnectionLimiter::new(limits.max_connections, reserved);
        let mut connections = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                accepted = limiter.accept(&listener) => accepted,
                Some(_) = connections.join_next() => continue,
                () = stopping.cancelled() => break,
            };
            let (stream, permit) = accepted;
            let (tls, router, watcher) = (tls.clone(), router.clone(), graceful.watcher());
            let stopping = stopping.clone();
            let connection = async move {
                // The system may have no room to watch it: the client may come again.
                let moved = stream.into_std().and_then(TcpStream::from_std);
                let Ok(stream) = moved else { return };
                let first_request_by = Instant::now() + limits.head_timeout;
                let version = tokio::select! {
                    version = http_version(&stream, tls.is_some(), first_request_by) => version,
                    () = stopping.cancelled() => None,
                };
                if let Some(version) = version {
                    serve_connection(stream, (version, first_request_by), tls, router, limits, watcher).await;
                }
                drop(permit);
            };
            connections.spawn_on(connection, workers.next());
        }
        drop(listener);
        graceful.shutdown().await;
        while connections.join_next().await.is_some() {}
    }
}

/// The version of HTTP that a client begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HttpVersion {
    Http1,
    Http2,
    /// TLS settles it, or the client has not sent enough to tell.
    Unclear,
}

/// The version, by the first bytes of a client, which stay where they are: who reads them to tell, hyper too, keeps a second
/// buffer for them. `None` where the client leaves or sends nothing.
async fn http_version(stream: &TcpStream, tls: bool, until: Instant) -> Option<HttpVersion> {
    if tls {
        return Some(HttpVersion::Unclear);
    }
    // No method of HTTP/1 begins with them.
    const HTTP2: &[u8; 3] = b"PRI";
    let mut first = [0; HTTP2.len()];
    match timeout_at(until, stream.peek(&mut first)).await {
        Ok(Ok(count)) if count < HTTP2.len() => Some(HttpVersion::Unclear),
        Ok(Ok(_)) if &first == HTTP2 => Some(HttpVersion::Http2),
        Ok(Ok(_)) => Some(HttpVersion::Http1),
        Ok(Err(error)) => {
            tracing::debug!("a connection ended: {error}");
            None
        }
        Err(_) => {
            tracing::debug!("closed an idle connection: it sent nothing");
            None
        }
    }
}

async fn serve_connection(
    stream: TcpStream,
    (version, first_request_by): (HttpVersion, Instant),
    tls: Option<TlsAcceptor>,
    router: Router,
    limits: ListenerLimits,
    watcher: Watcher,
) {
    // A client that is gone already has none.
    let Ok(client) = stream.peer_addr() else { return };
    // Tokens are small and must not wait until a packet is full.
    let _ = stream.set_nodelay(true);
    let stream = WriteTimeout::new(stream, limits.write_timeout);
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(MAX_READ_HEAD_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(limits.ping_interval)
        .keep_alive_timeout(limits.ping_interval)
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_READ_HEAD_BYTES as u32);
    match tls {
        None => {
            let builder = match version {
                HttpVersion::Http1 => builder.http1_only(),
                HttpVersion::Http2 => builder.http2_only(),
                HttpVersion::Unclear => builder,
            };
            serve_http(builder, stream, (router, client.ip()), first_request_by, watcher).await;
        }
        // In boxes: a connection without TLS needs their room at no time.
        Some(tls) => match Box::pin(timeout(limits.handshake_timeout, tls.accept(stream))).await {
            // ALPN has settled the HTTP version: no bytes are read to detect it, which a client could delay.
            Ok(Ok(stream)) => {
                let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                let builder = if h2 { builder.http2_only() } else { builder.http1_only() };
                // The handshake has a time of its own.
                let first_request_by = Instant::now() + limits.head_timeout;
                Box::pin(serve_http(builder, stream, (router, client.ip()), first_request_by, watcher)).await;
            }
            Ok(Err(error)) => tracing::debug!("a client did not complete the TLS handshake: {error}"),
            Err(_) => tracing::debug!("a client exceeded the timeout of the TLS handshake"),
        },
    }
}

/// The address that a request comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientAddress(pub(crate) IpAddr);

async fn serve_http<S>(
    builder: Builder<TokioExecutor>,
    stream: S,
    (router, client): (Router, IpAddr),
    first_request_by: Instant,
    watcher: Watcher,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let first_request = Arc::new(Notify::new());
    let service = service_fn({
        let (first_request, service) = (first_request.clone(), TowerToHyperService::new(router));
        move |mut request: axum::http::Request<_>| {
            first_request.notify_one();
            request.extensions_mut().insert(ClientAddress(client));
            service.call(request)
        }
    });
    let connection = builder.serve_connection(TokioIo::new(stream), service).into_owned();
    tokio::select! {
        ended = watcher.watch(connection) => if let Err(error) = ended {
            tracing::debug!("a connection ended: {error}");
        },
        () = idle_timeout(&first_request, first_request_by) => {
            tracing::debug!("closed an idle connection: no request arrived")
        },
    }
}

/// Completes if no request arrives in time. Before the HTTP version is known, and before HTTP/2 has started,
/// no other timeout covers a silent client.
async fn idle_timeout(first_request: &Notify, until: Instant) {
    if timeout_at(until, first_request.notified()).await.is_ok() {
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_loopback() {
        for (address, expected) in [
            ("127.0.0.1:1", Exposure::Loopback),
            ("127.9.9.9:1", Exposure::Loopback),
            ("[::1]:1", Exposure::Loopback),
            ("[::ffff:127.0.0.1]:1", Exposure::Loopback),
            ("0.0.0.0:1", Exposure::Network),
            ("[::]:1", Exposure::Network),
            ("10.0.0.1:1", Exposure::Network),
            ("[::ffff:10.0.0.1]:1", Exposure::Network),
            ("[fe80::1]:1", Exposure::Network),
        ] {
            assert_eq!(Exposure::for_address(address.parse().unwrap()), expected, "{address}");
        }
    }
}
