//! Listener for other agents: at the node's own address and at that of every port with a cable to another
//! machine, always at the same TCP port. Never at the unspecified address: other networks of the machine must
//! not reach it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use russet_rpc::ports;
use russet_rpc::tls::{Protocol, TlsError, TlsFiles};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::server::TlsStream;
use tokio_stream::StreamExt as _;

use super::write_timeout::WriteTimeout;
use super::{PeerServer, handle, node_name};
use crate::address::Address;
use crate::fabric::probe::PortScan;

/// Between two attempts to listen at an address that does not exist yet.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Idle timeout of a connection without a request.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of connections per address: no more than a machine can hold.
const MAX_CONNECTIONS: usize = 512;
/// Maximum number of them that one node holds: a few for each cable and its copies. A node that reads nothing keeps no
/// other one from its files.
const MAX_NODE_CONNECTIONS: usize = 64;

/// State of the listener.
pub(crate) struct PeerListener {
    pub files: TlsFiles,
    pub port: u16,
    pub address: Address,
    pub ports: watch::Receiver<PortScan>,
    pub server: PeerServer,
}

impl PeerListener {
    /// A port that is free at every address, because addresses change.
    pub fn free_port() -> io::Result<u16> {
        Ok(ports::bind_free(Ipv4Addr::UNSPECIFIED.into())?.local_addr()?.port())
    }

    /// The addresses to listen at.
    fn addresses(&mut self) -> BTreeSet<IpAddr> {
        let main = *self.address.borrow_and_update();
        let seen = self.ports.borrow_and_update();
        // A port with a default route is not a cable to another node.
        let cables = seen.ports.iter().filter(|port| !port.peers.is_empty() && !port.default_route);
        let ports = cables.filter_map(|port| port.address.as_ref()?.parse().ok());
        ports.chain([main]).collect()
    }
}

/// Listens until the agent exits.
pub(crate) async fn run(mut listening: PeerListener) {
    let mut tasks = JoinSet::new();
    let mut open: BTreeMap<IpAddr, AbortHandle> = BTreeMap::new();
    let mut warned: BTreeSet<IpAddr> = BTreeSet::new();
    loop {
        let desired = listening.addresses();
        open.retain(|address, task| {
            let keep = desired.contains(address) && !task.is_finished();
            if !keep {
                task.abort();
            }
            keep
        });
        warned.retain(|address| desired.contains(address));
        for address in desired {
            if open.contains_key(&address) {
                continue;
            }
            let at = SocketAddr::new(address, listening.port);
            match listen(at, &listening.files, &listening.server).await {
                Ok(serving) => {
                    warned.remove(&address);
                    open.insert(address, tasks.spawn(serving));
                }
                // A simulated machine has none of its addresses.
                Err(error) if warned.insert(address) => {
                    tracing::warn!(%at, error, "the listener for other agents could not be opened; retrying");
                }
                Err(_) => {}
            }
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY_INTERVAL) => {}
            changed = listening.address.changed() => if changed.is_err() { return },
            changed = listening.ports.changed() => if changed.is_err() { return },
            Some(_) = tasks.join_next(), if !tasks.is_empty() => {}
        }
    }
}

/// Listens at one address; returns the future that serves it.
pub(super) async fn listen(
    at: SocketAddr,
    files: &TlsFiles,
    answers: &PeerServer,
) -> Result<impl Future<Output = ()> + use<>, String> {
    let listener = TcpListener::bind(at).await.map_err(|error| error.to_string())?;
    let incoming = files.incoming(listener, Protocol::Agents);
    let mut incoming = incoming.map_err(|error: TlsError| error.to_string())?;
    let answers = answers.clone();
    Ok(async move {
        let mut connections = JoinSet::new();
        let places = NodePlaces::default();
        loop {
            let accepted = tokio::select! {
                accepted = incoming.next(), if connections.len() < MAX_CONNECTIONS => accepted,
                Some(_) = connections.join_next() => continue,
            };
            match accepted {
                Some(Ok(stream)) => drop(connections.spawn(serve(stream, answers.clone(), places.clone()))),
                Some(Err(_)) => {}
                None => return,
            }
        }
    })
}

/// Connections by node.
#[derive(Clone, Default)]
struct NodePlaces(Arc<Mutex<BTreeMap<String, usize>>>);

/// One connection's place, free again when it is dropped.
struct NodePlace {
    places: NodePlaces,
    node: String,
}

impl NodePlaces {
    fn counts(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a node's next connection, if it may have one.
    fn take(&self, node: &str) -> Option<NodePlace> {
        let mut counts = self.counts();
        let count = counts.entry(node.to_owned()).or_default();
        if *count >= MAX_NODE_CONNECTIONS {
            return None;
        }
        *count += 1;
        Some(NodePlace { places: self.clone(), node: node.to_owned() })
    }
}

impl Drop for NodePlace {
    fn drop(&mut self) {
        let mut counts = self.places.counts();
        if let Some(count) = counts.get_mut(&self.node) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.node);
            }
        }
    }
}

/// Serves one connection until it ends.
async fn serve(stream: TlsStream<TcpStream>, answers: PeerServer, places: NodePlaces) {
    let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let Some(peer) = shown.and_then(node_name) else {
        return tracing::debug!("a connection without a node's certificate was rejected");
    };
    let Some(_place) = places.take(&peer) else {
        return tracing::debug!(peer, "a node has more connections than it may; the new one is closed");
    };
    let service = service_fn(move |request| handle(request, answers.clone()));
    let mut server = http1::Builder::new();
    let served = server.timer(TokioTimer::new()).header_read_timeout(IDLE_TIMEOUT);
    if let Err(error) = served.serve_connection(TokioIo::new(WriteTimeout::new(stream)), service).await {
        tracing::debug!(peer, %error, "a connection of another agent ended");
    }
}
