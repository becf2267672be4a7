//! The way to a neighbour: over a cable that leads to its node if one carries it, else at its published address, which
//! may be that of a radio or a VPN.
//!
//! A rank listens at the same port of all these addresses, at the published one last. So a neighbour that is there at
//! the published address and not over a cable will not be there in the next moment either, and is met where it is.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use russet_rpc::ports;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::{HANDSHAKE_TIMEOUT, RingContext, buffered, handshake, identity, error_chain};
use crate::args::ArgsError;

/// For a connection over a cable, before its handshakes. Nobody is between, so it takes a millisecond or never comes.
const CABLE_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// A cable between this machine and another one, by the addresses at its ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CableEnds {
    /// The node it leads to.
    pub node: String,
    /// This end.
    pub own: IpAddr,
    /// The other end.
    pub peer: IpAddr,
}

impl FromStr for CableEnds {
    type Err = ArgsError;

    /// Reads `node=own>peer`.
    fn from_str(text: &str) -> Result<Self, ArgsError> {
        let parse = || {
            let (node, ends) = text.split_once('=')?;
            let (own, peer) = ends.split_once('>')?;
            let (own, peer) = (own.parse().ok()?, peer.parse().ok()?);
            (!node.is_empty()).then(|| Self { node: node.to_owned(), own, peer })
        };
        parse().ok_or_else(|| ArgsError::Cable(text.to_owned()))
    }
}

/// How a neighbour was reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeighbourPath {
    /// The neighbour's node.
    pub node: String,
    /// This end of the connection.
    pub from: SocketAddr,
    /// The other end.
    pub to: SocketAddr,
    /// Whether it runs over a cable.
    pub over_cable: bool,
    /// Why it does not, although a cable leads there.
    pub fallback: Option<String>,
}

impl fmt::Display for NeighbourPath {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let over = if self.over_cable { " over a cable" } else { "" };
        write!(out, "{} to {}{over}", self.from, self.to)
    }
}

/// The next member, and where it may be.
#[derive(Debug)]
pub(super) struct Neighbour {
    pub node: String,
    pub address: SocketAddr,
    /// Own address and the neighbour's, for each cable that leads to it.
    cables: Vec<(IpAddr, SocketAddr)>,
}

impl Neighbour {
    pub fn new(node: &str, address: SocketAddr, cables: &[CableEnds]) -> Self {
        let lead = cables.iter().filter(|cable| cable.node == node && cable.peer != address.ip());
        let cables = lead.map(|cable| (cable.own, SocketAddr::new(cable.peer, address.port()))).collect();
        Self { node: node.to_owned(), address, cables }
    }

    /// Tries every way once.
    pub async fn connect(&self, ring: &RingContext) -> Result<(identity::DialledStream, NeighbourPath), String> {
        if let Ok(reached) = self.connect_over_cable(ring).await {
            return Ok(reached);
        }
        let stream = timeout(HANDSHAKE_TIMEOUT, TcpStream::connect(self.address)).await;
        let stream = stream.map_err(|_| "it did not answer".to_owned())?.map_err(error_chain)?;
        // It is there now, and may not have been a moment ago.
        let fallback = match self.connect_over_cable(ring).await {
            Ok(reached) => return Ok(reached),
            Err(reason) => reason,
        };
        let way = self.path(&stream, false, fallback)?;
        let greeted = timeout(HANDSHAKE_TIMEOUT, handshake_dialled(ring, stream, &self.node)).await;
        Ok((greeted.unwrap_or_else(|_| Err("it did not answer".into()))?, way))
    }

    /// The first cable that carries a connection, or why none does; `Err(None)` without any.
    async fn connect_over_cable(&self, ring: &RingContext) -> Result<(identity::DialledStream, NeighbourPath), Option<String>> {
        let mut reasons = Vec::new();
        for (own, peer) in &self.cables {
            let dialled = async {
                let silent = || format!("nobody answered within {} s", CABLE_CONNECT_TIMEOUT.as_secs());
                let stream = timeout(CABLE_CONNECT_TIMEOUT, ports::connect_from(&(*own).into(), *peer))
                    .await
                    .map_err(|_| silent())?;
                let stream = stream.map_err(error_chain)?;
                let way = self.path(&stream, true, None)?;
                let greeted = timeout(HANDSHAKE_TIMEOUT, handshake_dialled(ring, stream, &self.node)).await;
                let unfinished = || Err("its handshake did not end".to_owned());
                Ok::<_, String>((greeted.unwrap_or_else(|_| unfinished())?, way))
            };
            match dialled.await {
                Ok(reached) => return Ok(reached),
                Err(why) => reasons.push(format!("{own} to {}: {why}", peer.ip())),
            }
        }
        Err((!reasons.is_empty()).then(|| reasons.join("; ")))
    }

    fn path(&self, stream: &TcpStream, over_cable: bool, fallback: Option<String>) -> Result<NeighbourPath, String> {
        let from = stream.local_addr().map_err(error_chain)?;
        let to = stream.peer_addr().map_err(error_chain)?;
        Ok(NeighbourPath { node: self.node.clone(), from, to, over_cable, fallback })
    }
}

async fn handshake_dialled(ring: &RingContext, stream: TcpStream, node: &str) -> Result<identity::DialledStream, String> {
    stream.set_nodelay(true).map_err(error_chain)?;
    let mut stream = ring.identity.dial(buffered(stream), node).await?;
    handshake::exchange_labels(&mut stream, &ring.label).await?;
    Ok(stream)
}

/// Listeners at this end of every cable to the previous member, at the port that is published. One that cannot be is
/// told: the neighbour then comes by the published address.
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
