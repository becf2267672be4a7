//! TLS handshakes in progress, limited in time and number, so that clients that connect and stay silent block
//! no others. Not here: requests on the connections.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Limits of handshakes.
#[derive(Clone, Copy, Debug)]
pub(super) struct HandshakeLimits {
    /// Timeout of one handshake.
    pub(super) timeout: Duration,
    /// Maximum concurrent handshakes. A handshake takes milliseconds, so with this many the oldest one of the
    /// host with the most is a silent client: it is aborted, and no other client waits for it.
    pub(super) max_concurrent: usize,
}

/// A connection whose handshake succeeded, its client's address, and what ends with its listener.
pub(super) struct Handshaken {
    pub(super) stream: TlsStream<TcpStream>,
    pub(super) peer: IpAddr,
    pub(super) listener: watch::Receiver<()>,
}

/// The handshakes of one server, aborted with it.
pub(super) struct Handshakes {
    acceptor: TlsAcceptor,
    bounds: HandshakeLimits,
    running: JoinSet<Option<Handshaken>>,
    oldest_first: Vec<(IpAddr, AbortHandle)>,
}

impl Handshakes {
    pub(super) fn new(acceptor: TlsAcceptor, bounds: HandshakeLimits) -> Self {
        Self { acceptor, bounds, running: JoinSet::new(), oldest_first: Vec::new() }
    }

    /// Starts a handshake with this peer; above the limit, another one is aborted.
    pub(super) fn start(&mut self, stream: TcpStream, peer: IpAddr, listener: watch::Receiver<()>) {
        let _ = stream.set_nodelay(true);
        let handshake = tokio::time::timeout(self.bounds.timeout, self.acceptor.accept(stream));
        let handshake = self.running.spawn(async move {
            let stream = handshake.await.ok()?.ok()?;
            Some(Handshaken { stream, peer, listener })
        });
        self.oldest_first.retain(|(_, handshake)| !handshake.is_finished());
        self.oldest_first.push((host(peer), handshake));
        if self.oldest_first.len() > self.bounds.max_concurrent {
            let hosts: Vec<IpAddr> = self.oldest_first.iter().map(|(host, _)| *host).collect();
            if let Some(index) = victim(&hosts) {
                self.oldest_first.remove(index).1.abort();
            }
        }
    }

    /// The next connection whose handshake succeeded; pending while there is none.
    pub(super) async fn next(&mut self) -> Handshaken {
        loop {
            match self.running.join_next().await {
                Some(Ok(Some(handshaken))) => return handshaken,
                Some(_) => {}
                None => std::future::pending().await,
            }
        }
    }
}

/// The handshake to abort among those of these hosts, oldest first: the oldest of the host that has the most,
/// so that a host that opens many loses its own.
fn victim(hosts: &[IpAddr]) -> Option<usize> {
    let mut counts = HashMap::new();
    for host in hosts {
        *counts.entry(host).or_insert(0) += 1;
    }
    let most = counts.values().max()?;
    hosts.iter().position(|host| counts.get(host) == Some(most))
}

/// The host of an address: in IPv6 one host has all addresses of a /64.
pub(super) fn host(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::pki_types::ServerName;
    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpListener;
    use tokio_rustls::TlsConnector;

    use super::*;
    use crate::pki::{self, Authority};
    use crate::server::tls::{self, Resolver};

    /// Longer than anything takes on a busy machine.
    const TEST_TIMEOUT: Duration = Duration::from_secs(60);
    const HOST: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

    /// A client that sends nothing, and the server's end of its connection.
    async fn silent(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let address = listener.local_addr().unwrap();
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        (client.unwrap(), accepted.unwrap().0)
    }

    async fn closes(client: &mut TcpStream) {
        let closed = tokio::time::timeout(TEST_TIMEOUT, client.read(&mut [0])).await;
        assert!(matches!(closed, Ok(Ok(0) | Err(_))), "{closed:?}");
    }

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
                addresses.split_whitespace().map(|address| host(address.parse().unwrap())).collect();
            assert_eq!(victim(&hosts), expected, "{addresses}");
        }
    }

    #[tokio::test]
    async fn silent_handshake_is_evicted_and_delays_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::ensure(folder.path()).unwrap();
        let resolver = Arc::new(Resolver::new(&authority, &[[127, 0, 0, 1].into()]).unwrap());
        let acceptor = TlsAcceptor::from(Arc::new(tls::config(&authority, resolver).unwrap()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (_open, listener_state) = watch::channel(());

        // The timeout is longer than the test waits, so that only the limit can close a connection.
        let mut handshakes = Handshakes::new(
            acceptor.clone(),
            HandshakeLimits { timeout: TEST_TIMEOUT * 2, max_concurrent: 2 },
        );
        let mut clients = Vec::new();
        for _ in 0..4 {
            let (client, accepted) = silent(&listener).await;
            handshakes.start(accepted, HOST, listener_state.clone());
            clients.push(client);
        }
        closes(&mut clients[0]).await;
        closes(&mut clients[1]).await;
        let mut roots = rustls::RootCertStore::empty();
        roots.add(pki::certificate(authority.cert_pem()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let (client, accepted) = silent(&listener).await;
        handshakes.start(accepted, HOST, listener_state.clone());
        let name = ServerName::try_from("localhost").unwrap();
        let connecting = TlsConnector::from(Arc::new(config)).connect(name, client);
        let both = async { tokio::join!(connecting, handshakes.next()) };
        let (connected, _) =
            tokio::time::timeout(TEST_TIMEOUT, both).await.expect("one of four keeps a fifth waiting");
        connected.unwrap();
        closes(&mut clients[2]).await;

        // Below the limit, handshakes get their full timeout, and no more.
        let bounds = HandshakeLimits { timeout: Duration::from_millis(50), max_concurrent: 2 };
        let mut handshakes = Handshakes::new(acceptor, bounds);
        let (mut client, accepted) = silent(&listener).await;
        handshakes.start(accepted, HOST, listener_state.clone());
        closes(&mut client).await;
    }
}
