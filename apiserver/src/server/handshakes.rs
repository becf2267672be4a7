//! TLS handshakes under way: bounded in time and in number, so that clients that connect and say nothing are in
//! nobody's way. What is asked over the connections that come of them is not its business.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// How much is borne.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// For one handshake.
    pub(super) patience: Duration,
    /// At once. Clients shake hands in milliseconds, so the oldest of so many is one that says nothing: it makes room,
    /// and nobody waits for it.
    pub(super) most: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { patience: Duration::from_secs(10), most: 256 }
    }
}

/// The handshakes of one listener; they end with it.
pub(super) struct Handshakes {
    acceptor: TlsAcceptor,
    bounds: Bounds,
    running: JoinSet<Option<TlsStream<TcpStream>>>,
    oldest_first: VecDeque<AbortHandle>,
}

impl Handshakes {
    pub(super) fn new(acceptor: TlsAcceptor, bounds: Bounds) -> Self {
        Self { acceptor, bounds, running: JoinSet::new(), oldest_first: VecDeque::new() }
    }

    /// Begins one; the oldest ends for it where there are too many.
    pub(super) fn begin(&mut self, stream: TcpStream) {
        self.oldest_first.retain(|handshake| !handshake.is_finished());
        if self.oldest_first.len() >= self.bounds.most
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            oldest.abort();
        }
        let _ = stream.set_nodelay(true);
        let handshake = tokio::time::timeout(self.bounds.patience, self.acceptor.accept(stream));
        self.oldest_first.push_back(self.running.spawn(async { handshake.await.ok()?.ok() }));
    }

    /// The next connection whose handshake succeeded; waits for ever where nobody comes.
    pub(super) async fn next(&mut self) -> TlsStream<TcpStream> {
        loop {
            match self.running.join_next().await {
                Some(Ok(Some(stream))) => return stream,
                Some(_) => {}
                None => std::future::pending().await,
            }
        }
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
    const PATIENCE: Duration = Duration::from_secs(60);

    /// A silent client, and its other end.
    async fn silent(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let address = listener.local_addr().unwrap();
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        (client.unwrap(), accepted.unwrap().0)
    }

    async fn closes(client: &mut TcpStream) {
        let closed = tokio::time::timeout(PATIENCE, client.read(&mut [0])).await;
        assert!(matches!(closed, Ok(Ok(0) | Err(_))), "{closed:?}");
    }

    #[tokio::test]
    async fn who_says_nothing_makes_room_and_nobody_waits_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::ensure(folder.path()).unwrap();
        let resolver = Arc::new(Resolver::new(&authority, &[[127, 0, 0, 1].into()]).unwrap());
        let acceptor = TlsAcceptor::from(Arc::new(tls::config(&authority, resolver).unwrap()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();

        // Longer than the test waits, so that only the number can close a connection.
        let mut handshakes = Handshakes::new(acceptor.clone(), Bounds { patience: PATIENCE * 2, most: 2 });
        let mut clients = Vec::new();
        for _ in 0..4 {
            let (client, accepted) = silent(&listener).await;
            handshakes.begin(accepted);
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
        handshakes.begin(accepted);
        let name = ServerName::try_from("localhost").unwrap();
        let connecting = TlsConnector::from(Arc::new(config)).connect(name, client);
        let both = async { tokio::join!(connecting, handshakes.next()) };
        let (connected, _) =
            tokio::time::timeout(PATIENCE, both).await.expect("one of four keeps a fifth waiting");
        connected.unwrap();
        closes(&mut clients[2]).await;

        // Those that are few are given their time, and no more.
        let bounds = Bounds { patience: Duration::from_millis(50), most: 2 };
        let mut handshakes = Handshakes::new(acceptor, bounds);
        let (mut client, accepted) = silent(&listener).await;
        handshakes.begin(accepted);
        closes(&mut client).await;
    }
}
