//! Path to a neighbour: over a cable to its node if one works, otherwise at its published address, which may
//! be one of Wi-Fi or a VPN.
//!
//! A rank listens on the same port of all these addresses, on the published one last. So a neighbour that
//! answers at the published address and not over a cable will not answer over the cable a moment later
//! either.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use russet_rpc::ports;
use russet_wire::engine_config::CableEnds;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::{HANDSHAKE_TIMEOUT, RingContext, buffered, error_chain, handshake, identity};

/// Connect timeout over a cable, before the handshakes. There are no hops between, so it takes a millisecond
/// or fails.
const CABLE_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The path by which a neighbour was reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeighbourPath {
    /// The neighbour's node.
    pub node: String,
    /// This end of the connection.
    pub from: SocketAddr,
    /// The other end.
    pub to: SocketAddr,
    /// Whether it uses a cable.
    pub over_cable: bool,
    /// Why it does not use the cable, although there is one.
    pub fallback: Option<String>,
}

impl fmt::Display for NeighbourPath {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let over = if self.over_cable { " over a cable" } else { "" };
        write!(out, "{} to {}{over}", self.from, self.to)
    }
}

/// The next member, and its addresses.
#[derive(Debug)]
pub(super) struct Neighbour {
    pub node: String,
    pub address: SocketAddr,
    /// Local and remote address of each cable to the neighbour.
    cables: Vec<(IpAddr, SocketAddr)>,
}

impl Neighbour {
    pub fn new(node: &str, address: SocketAddr, cables: &[CableEnds]) -> Self {
        let lead = cables.iter().filter(|cable| cable.node == node && cable.peer != address.ip());
        let cables = lead.map(|cable| (cable.own, SocketAddr::new(cable.peer, address.port()))).collect();
        Self { node: node.to_owned(), address, cables }
    }

    /// Tries every path once.
    pub async fn connect(
        &self,
        ring: &RingContext,
    ) -> Result<(identity::DialledStream, NeighbourPath), String> {
        if let Ok(reached) = self.connect_over_cable(ring).await {
            return Ok(reached);
        }
        let stream = timeout(HANDSHAKE_TIMEOUT, TcpStream::connect(self.address)).await;
        let stream = stream.map_err(|_| "it did not answer".to_owned())?.map_err(error_chain)?;
        // The neighbour is listening now, and may not have been a moment ago.
        let fallback = match self.connect_over_cable(ring).await {
            Ok(reached) => return Ok(reached),
            Err(reason) => reason,
        };
        let path = self.path(&stream, false, fallback)?;
        let greeted = timeout(HANDSHAKE_TIMEOUT, handshake_dialled(ring, stream, &self.node)).await;
        Ok((greeted.unwrap_or_else(|_| Err("it did not answer".into()))?, path))
    }

    /// The first cable that carries a connection, or why none does; `Err(None)` without any.
    async fn connect_over_cable(
        &self,
        ring: &RingContext,
    ) -> Result<(identity::DialledStream, NeighbourPath), Option<String>> {
        let mut reasons = Vec::new();
        for (own, peer) in &self.cables {
            let dialled = async {
                let silent = || format!("no answer within {} s", CABLE_CONNECT_TIMEOUT.as_secs());
                let stream = timeout(CABLE_CONNECT_TIMEOUT, ports::connect_from(&(*own).into(), *peer))
                    .await
                    .map_err(|_| silent())?;
                let stream = stream.map_err(error_chain)?;
                let path = self.path(&stream, true, None)?;
                let greeted = timeout(HANDSHAKE_TIMEOUT, handshake_dialled(ring, stream, &self.node)).await;
                let unfinished = || Err("its handshake did not end".to_owned());
                Ok::<_, String>((greeted.unwrap_or_else(|_| unfinished())?, path))
            };
            match dialled.await {
                Ok(reached) => return Ok(reached),
                Err(why) => reasons.push(format!("{own} to {}: {why}", peer.ip())),
            }
        }
        Err((!reasons.is_empty()).then(|| reasons.join("; ")))
    }

    fn path(
        &self,
        stream: &TcpStream,
        over_cable: bool,
        fallback: Option<String>,
    ) -> Result<NeighbourPath, String> {
        let from = stream.local_addr().map_err(error_chain)?;
        let to = stream.peer_addr().map_err(error_chain)?;
        Ok(NeighbourPath { node: self.node.clone(), from, to, over_cable, fallback })
    }
}

async fn handshake_dialled(
    ring: &RingContext,
    stream: TcpStream,
    node: &str,
) -> Result<identity::DialledStream, String> {
    stream.set_nodelay(true).map_err(error_chain)?;
    let mut stream = ring.identity.dial(buffered(stream), node).await?;
    handshake::exchange_labels(&mut stream, &ring.label).await?;
    Ok(stream)
}

/// Listeners at this end of every cable to the previous member, on the published port. A failed one is
/// logged: the neighbour then uses the published address.
pub(super) async fn listen_on_cables(
    cables: &[CableEnds],
    previous: &str,
    published: SocketAddr,
    label: &str,
) -> Vec<TcpListener> {
    let mut listeners = Vec::new();
    for cable in cables.iter().filter(|cable| cable.node == previous && cable.own != published.ip()) {
        let address = SocketAddr::new(cable.own, published.port());
        match TcpListener::bind(address).await {
            Ok(listener) => listeners.push(listener),
            Err(error) => {
                tracing::warn!(ring = label, %address, %error, "cannot listen at this end of a cable")
            }
        }
    }
    listeners
}
