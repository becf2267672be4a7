//! MLX's ring between machines, carried over mutual TLS.
//!
//! MLX's ring has neither encryption nor a handshake: the first connection is taken for the peer. So every
//! rank gets a ring on loopback, and this module connects it to the other machines:
//!
//! ```text
//! machine of member r                              machine of member r+1
//! MLX ──▶ 127.0.0.1 forwarder ══ mTLS, label ══▶ published address ──▶ 127.0.0.1 MLX
//!         (next)                                 (hosts[r+1])           (own)
//! ```
//!
//! Each direction carries exactly one connection: from this process on loopback, and from the neighbour's
//! node outside, over a cable that leads there or at its published address ([`dial`]). The tunnel is part of
//! the engine and not of the agent, because engines outlive their agents.

pub mod dial;
mod handshake;
mod identity;
mod loopback;
mod peer_stub;
mod relay;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use russet_rpc::tls::TlsFiles;
use russet_telemetry::errors::chain;
use russet_wire::engine_config::CableEnds;
use thiserror::Error;
use tokio::io::BufReader;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use dial::{Neighbour, NeighbourPath};
use identity::RingIdentity;
use loopback::ReservedPort;
use peer_stub::StubSignal;
pub use peer_stub::StubSwitch;

/// Timeout for one end to wait for the other. MLX itself tries for about 31 s; the control stream, which
/// detects lost ranks, is faster than this.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout for the handshakes of one connection, so that a silent client cannot hold resources.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum concurrent handshakes; the neighbour retries if it exceeds the limit.
const MAX_HANDSHAKES: usize = 16;
/// Initial and maximum retry delay.
const RETRY_BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// Why a tunnel failed.
#[derive(Debug, Error)]
pub enum TunnelError {
    /// The arguments do not describe a ring.
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
    /// An address in use or not local.
    #[error("cannot listen on {address} for the ring {label}; free it, or let the agent choose another")]
    Listen {
        /// The ring.
        label: String,
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The neighbour was not reachable in time.
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
        /// Error of the last attempt.
        reason: String,
    },
    /// MLX did not accept the neighbour's connection.
    #[error(
        "ring {label}: MLX of this process did not listen on 127.0.0.1:{port} within {} s",
        CONNECT_TIMEOUT.as_secs()
    )]
    NotListening {
        /// The ring.
        label: String,
        /// Port on which MLX should listen.
        port: u16,
    },
    /// Another process of this machine connected to MLX before the neighbour did.
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
    #[error("ring {label}: the connection {direction} {node} ended: {reason}")]
    Lost {
        /// The ring.
        label: String,
        /// Direction: `from` or `to`.
        direction: &'static str,
        /// The neighbour's node.
        node: String,
        /// Which side closed it, or the error.
        reason: String,
    },
}

/// A rank's two connections in an MLX ring, presented on loopback. They end when the tunnel and all handles
/// that may declare the group lost are dropped.
#[derive(Debug)]
pub struct Tunnel {
    directions: JoinSet<TunnelError>,
    stub_switch: StubSwitch,
    path: watch::Receiver<Option<NeighbourPath>>,
}

/// What both directions of a tunnel need.
struct RingContext {
    identity: RingIdentity,
    label: String,
}

impl Tunnel {
    /// `hosts[i]` and `nodes[i]` are the published address and the node of ring member `i`; `own` is this
    /// process's index. Listens on `hosts[own]`. Returns the addresses for MLX; those of members it never
    /// connects to have port 0. `label` names group, epoch and ring; a neighbour with another label is
    /// refused. `cables` to the neighbour's node are preferred over its published address.
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
        // Before the published address: a neighbour that finds the published listener has found the cable's
        // too.
        let mut listeners = dial::listen_on_cables(cables, &nodes[previous], hosts[own], label).await;
        listeners.push(TcpListener::bind(hosts[own]).await.map_err(listen(hosts[own]))?);
        let forwarder = TcpListener::bind(loopback).await.map_err(listen(loopback))?;
        let reserved = ReservedPort::reserve().map_err(listen(loopback))?;

        let mut tunnelled = vec![loopback; size];
        tunnelled[own].set_port(reserved.port());
        tunnelled[next] = forwarder.local_addr().map_err(listen(loopback))?;

        let (mut directions, stub_switch) = (JoinSet::new(), StubSwitch::default());
        let (taken, path) = watch::channel(None);
        let neighbour = Neighbour::new(&nodes[next], hosts[next], cables);
        directions.spawn(accept_previous(
            ring.clone(),
            listeners,
            nodes[previous].clone(),
            reserved,
            stub_switch.subscribe(),
        ));
        directions.spawn(connect_next(ring, forwarder, neighbour, taken, stub_switch.subscribe()));
        Ok((Self { directions, stub_switch, path }, tunnelled))
    }

    /// How the next member was reached, once it was; `None` where no cable leads to it.
    pub fn path(&self) -> watch::Receiver<Option<NeighbourPath>> {
        self.path.clone()
    }

    /// A handle that declares the group lost.
    pub fn stub_switch(&self) -> StubSwitch {
        self.stub_switch.clone()
    }

    /// Waits until one direction has ended; returns why. An orderly exit of a neighbour looks the same, so
    /// this explains a failure rather than being one.
    pub async fn wait_lost(&mut self) -> TunnelError {
        loop {
            match self.directions.join_next().await {
                Some(Ok(error)) => return error,
                // A cancelled task, or a bug that the panic hook has logged.
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
    stub_signal: StubSignal,
) -> TunnelError {
    let remote = accept_neighbour(&ring, listeners, &node).await;
    let label = ring.label.clone();
    let local = match loopback::connect(reserved, CONNECT_TIMEOUT).await {
        Ok(local) => local,
        Err(loopback::MlxPortError::NotListening(port)) => return TunnelError::NotListening { label, port },
        Err(loopback::MlxPortError::Intruder(port)) => return TunnelError::Intruder { label, port },
    };
    tracing::info!(ring = label, node, "the previous rank is connected");
    let reason = relay::run(local, remote, stub_signal).await;
    TunnelError::Lost { label, direction: "from", node, reason }
}

/// The first connection with the certificate of `node` and the right label. All others are rejected without
/// effect.
async fn accept_neighbour(
    ring: &Arc<RingContext>,
    listeners: Vec<TcpListener>,
    node: &str,
) -> identity::AcceptedStream {
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
                // Out of file descriptors, or the connection is gone already.
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

async fn handshake_accepted(
    ring: &RingContext,
    stream: TcpStream,
    node: &str,
) -> Result<identity::AcceptedStream, String> {
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
    stub_signal: StubSignal,
) -> TunnelError {
    let local = loopback::accept_own(forwarder).await;
    let label = ring.label.clone();
    let (since, mut pause) = (Instant::now(), RETRY_BACKOFF.0);
    let (remote, path) = loop {
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
    match &path.fallback {
        Some(why) => {
            tracing::warn!(ring = label, node, %path, why, "a cable leads to the next rank, which is connected another way")
        }
        None => tracing::info!(ring = label, node, %path, "connected to the next rank"),
    }
    if path.over_cable || path.fallback.is_some() {
        taken.send_replace(Some(path));
    }
    let reason = relay::run(local, remote, stub_signal).await;
    TunnelError::Lost { label, direction: "to", node, reason }
}

/// rustls reads 4 KiB at a time, each of which would be a system call.
fn buffered(stream: TcpStream) -> BufReader<TcpStream> {
    BufReader::with_capacity(relay::BUFFER_BYTES, stream)
}

/// An error with its causes, as an owner: for `map_err`.
fn error_chain(error: impl std::error::Error) -> String {
    chain(&error)
}

#[cfg(test)]
mod tests;
