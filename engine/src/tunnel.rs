//! MLX's ring between machines, carried over mutual TLS.
//!
//! MLX's ring has neither secrecy nor a handshake: whoever connects first is taken for the peer. So
//! every rank is told a ring on loopback, and this module is what lies behind it:
//!
//! ```text
//! machine of member r                              machine of member r+1
//! MLX ──▶ 127.0.0.1 forwarder ══ mTLS, label ══▶ published address ──▶ 127.0.0.1 MLX
//!         (next)                                 (hosts[r+1])           (own)
//! ```
//!
//! Each way carries exactly one connection: of this process on loopback, of the neighbour's node
//! outside, over a cable that leads there or at its published address ([`dial`]). It lives in the engine and not in the
//! agent, because engines outlive their agents.

mod peer_stub;
pub mod dial;
mod handshake;
mod identity;
mod loopback;
mod relay;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use russet_rpc::tls::TlsFiles;
use thiserror::Error;
use tokio::io::BufReader;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

pub use peer_stub::StubSwitch;
use peer_stub::StubSignal;
use dial::{CableEnds, Neighbour, NeighbourPath};
use identity::RingIdentity;
use loopback::ReservedPort;

/// How long one end waits for the other to be there. MLX itself tries for about 31 s; the control
/// path, which notices lost ranks, is quicker than this.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// For the handshakes of one connection, so that a silent stranger holds nothing for long.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Strangers shaking hands at a time; the neighbour is one of them, and tries again if it is not.
const MAX_HANDSHAKES: usize = 16;
/// Between two attempts, at first and at most.
const RETRY_BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// Why a tunnel could not be opened or is of no more use.
#[derive(Debug, Error)]
pub enum TunnelError {
    /// What the engine was told does not describe a ring.
    #[error(
        "a ring needs at least two members, as many nodes as addresses and an own index among them; got {hosts} addresses, {nodes} nodes and index {own}"
    )]
    Members {
        /// Addresses given.
        hosts: usize,
        /// Nodes given.
        nodes: usize,
        /// Own index.
        own: usize,
    },
    /// The node's identity is unusable.
    #[error("cannot use the node's identity in {path}; join the node again with `russet join`")]
    Identity {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An address is taken or not ours.
    #[error("cannot listen on {address} for the ring {label}; free it, or let the agent choose another")]
    Listen {
        /// The ring.
        label: String,
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The neighbour was not there in time.
    #[error(
        "ring {label}: {node} at {address} was not to be reached within {} s; the last attempt said: {reason}",
        CONNECT_TIMEOUT.as_secs()
    )]
    Unreachable {
        /// The ring.
        label: String,
        /// The neighbour's node.
        node: String,
        /// Its published address.
        address: SocketAddr,
        /// What the last attempt said.
        reason: String,
    },
    /// MLX did not take the neighbour's connection.
    #[error(
        "ring {label}: MLX of this process did not listen on 127.0.0.1:{port} within {} s",
        CONNECT_TIMEOUT.as_secs()
    )]
    NotListening {
        /// The ring.
        label: String,
        /// Where it was told to listen.
        port: u16,
    },
    /// Somebody on this machine reached MLX before its neighbour did.
    #[error(
        "ring {label}: another process of this machine connected to MLX's port 127.0.0.1:{port}; the group has to be formed again"
    )]
    Intruder {
        /// The ring.
        label: String,
        /// MLX's port.
        port: u16,
    },
    /// An established connection ended.
    #[error("ring {label}: the connection {way} {node} ended: {reason}")]
    Lost {
        /// The ring.
        label: String,
        /// `from` or `to`.
        way: &'static str,
        /// The neighbour's node.
        node: String,
        /// Who closed, or what went wrong.
        reason: String,
    },
}

/// A rank's neighbourhood in one MLX ring, made to look like loopback. Its connections end when it
/// is dropped, and whoever may say that the group is lost.
#[derive(Debug)]
pub struct Tunnel {
    directions: JoinSet<TunnelError>,
    stub_switch: StubSwitch,
    path: watch::Receiver<Option<NeighbourPath>>,
}

/// What both ways of a tunnel need.
struct RingContext {
    identity: RingIdentity,
    label: String,
}

impl Tunnel {
    /// `hosts[i]` and `nodes[i]` are the published address and the node of ring member `i`; `own` is
    /// this process's index. Listens on `hosts[own]`. Returns the addresses MLX is to be told; those of
    /// members it never speaks to have port 0. `label` names group, epoch and ring; a neighbour that
    /// says another one is refused. A neighbour to which one of `cables` leads is met over it, if that can be.
    pub async fn open(
        tls: &TlsFiles,
        label: &str,
        hosts: &[SocketAddr],
        nodes: &[String],
        own: usize,
        cables: &[CableEnds],
    ) -> Result<(Self, Vec<SocketAddr>), TunnelError> {
        let size = hosts.len();
        if size < 2 || nodes.len() != size || own >= size {
            return Err(TunnelError::Members { hosts: size, nodes: nodes.len(), own });
        }
        let (previous, next) = ((own + size - 1) % size, (own + 1) % size);
        let listen = |address| move |source| TunnelError::Listen { label: label.to_owned(), address, source };
        let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));

        let ring = Arc::new(RingContext { identity: RingIdentity::read(tls)?, label: label.to_owned() });
        // Before the published address: who finds this member there has found it over a cable too.
        let mut listeners = dial::listen_on_cables(cables, &nodes[previous], hosts[own], label).await;
        listeners.push(TcpListener::bind(hosts[own]).await.map_err(listen(hosts[own]))?);
        let forwarder = TcpListener::bind(loopback).await.map_err(listen(loopback))?;
        let reserved = ReservedPort::reserve().map_err(listen(loopback))?;

        let mut told = vec![loopback; size];
        told[own].set_port(reserved.port());
        told[next] = forwarder.local_addr().map_err(listen(loopback))?;

        let (mut ways, alone) = (JoinSet::new(), StubSwitch::default());
        let (taken, way) = watch::channel(None);
        let neighbour = Neighbour::new(&nodes[next], hosts[next], cables);
        ways.spawn(accept_previous(ring.clone(), listeners, nodes[previous].clone(), reserved, alone.subscribe()));
        ways.spawn(connect_next(ring, forwarder, neighbour, taken, alone.subscribe()));
        Ok((Self { directions: ways, stub_switch: alone, path: way }, told))
    }

    /// How the next member was reached, once it was; nothing where no cable leads to it.
    pub fn path(&self) -> watch::Receiver<Option<NeighbourPath>> {
        self.path.clone()
    }

    /// For whoever knows that the group is lost.
    pub fn stub_switch(&self) -> StubSwitch {
        self.stub_switch.clone()
    }

    /// Waits until one way is of no more use and says why. A neighbour that stops in good order looks the
    /// same, so this explains a failure rather than being one.
    pub async fn wait_lost(&mut self) -> TunnelError {
        loop {
            match self.directions.join_next().await {
                Some(Ok(error)) => return error,
                // A way that was cancelled or has a bug, which the panic hook has told.
                Some(Err(_)) => {}
                None => std::future::pending().await,
            }
        }
    }
}

/// From the previous member to MLX's own port.
async fn accept_previous(
    ring: Arc<RingContext>,
    listeners: Vec<TcpListener>,
    node: String,
    reserved: ReservedPort,
    told: StubSignal,
) -> TunnelError {
    let remote = accept_neighbour(&ring, listeners, &node).await;
    let label = ring.label.clone();
    let local = match loopback::connect(reserved, CONNECT_TIMEOUT).await {
        Ok(local) => local,
        Err(loopback::MlxPortError::NotListening(port)) => return TunnelError::NotListening { label, port },
        Err(loopback::MlxPortError::Intruder(port)) => return TunnelError::Intruder { label, port },
    };
    tracing::info!(ring = label, node, "the previous rank is connected");
    let reason = relay::run(local, remote, told).await;
    TunnelError::Lost { label, way: "from", node, reason }
}

/// The first connection that shows the certificate of `node` and knows the label. Everybody else is
/// turned away and leaves nothing behind.
async fn accept_neighbour(ring: &Arc<RingContext>, listeners: Vec<TcpListener>, node: &str) -> identity::AcceptedStream {
    let mut shaking = JoinSet::new();
    loop {
        let accepting = futures::future::select_all(listeners.iter().map(|one| Box::pin(one.accept())));
        tokio::select! {
            (accepted, ..) = accepting, if shaking.len() < MAX_HANDSHAKES => match accepted {
                Ok((stream, from)) => {
                    let (ring, node) = (ring.clone(), node.to_owned());
                    shaking.spawn(async move {
                        let greeted = timeout(HANDSHAKE_TIMEOUT, handshake_accepted(&ring, stream, &node)).await;
                        (from, greeted.unwrap_or_else(|_| Err("it did not finish its handshake".into())))
                    });
                }
                // Out of descriptors, or the connection was gone already.
                Err(error) => {
                    tracing::warn!(%error, "cannot accept");
                    sleep(RETRY_BACKOFF.1).await;
                }
            },
            Some(greeted) = shaking.join_next() => match greeted {
                Ok((_, Ok(stream))) => return stream,
                Ok((from, Err(reason))) => tracing::warn!(ring = ring.label, %from, reason, "refused a connection"),
                Err(_) => {}
            },
        }
    }
}

async fn handshake_accepted(ring: &RingContext, stream: TcpStream, node: &str) -> Result<identity::AcceptedStream, String> {
    stream.set_nodelay(true).map_err(error_chain)?;
    let mut stream = ring.identity.accept(buffered(stream), node).await?;
    handshake::exchange_labels(&mut stream, &ring.label).await?;
    Ok(stream)
}

/// From MLX's own connection to the next member.
async fn connect_next(
    ring: Arc<RingContext>,
    forwarder: TcpListener,
    neighbour: Neighbour,
    taken: watch::Sender<Option<NeighbourPath>>,
    told: StubSignal,
) -> TunnelError {
    let local = loopback::accept_own(forwarder).await;
    let label = ring.label.clone();
    let (since, mut pause) = (Instant::now(), RETRY_BACKOFF.0);
    let (remote, way) = loop {
        let reason = match neighbour.connect(&ring).await {
            Ok(reached) => break reached,
            Err(reason) => reason,
        };
        let Neighbour { node, address, .. } = &neighbour;
        if since.elapsed() >= CONNECT_TIMEOUT {
            return TunnelError::Unreachable { label, node: node.clone(), address: *address, reason };
        }
        tracing::debug!(ring = label, node, %address, reason, "not there yet");
        sleep(pause).await;
        pause = (2 * pause).min(RETRY_BACKOFF.1);
    };
    let node = neighbour.node;
    match &way.fallback {
        Some(why) => {
            tracing::warn!(ring = label, node, %way, why, "a cable leads to the next rank, which is connected another way")
        }
        None => tracing::info!(ring = label, node, %way, "connected to the next rank"),
    }
    if way.over_cable || way.fallback.is_some() {
        taken.send_replace(Some(way));
    }
    let reason = relay::run(local, remote, told).await;
    TunnelError::Lost { label, way: "to", node, reason }
}

/// rustls reads 4 KiB at a time, each of which would be a call of the system.
fn buffered(stream: TcpStream) -> BufReader<TcpStream> {
    BufReader::with_capacity(relay::BUFFER_BYTES, stream)
}

/// An error with its causes.
fn error_chain(error: impl std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests;
