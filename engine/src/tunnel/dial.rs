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

use super::{HANDSHAKE, Ring, buffered, greeting, identity, words};
use crate::args::ArgsError;

/// For a connection over a cable, before its handshakes. Nobody is between, so it takes a millisecond or never comes.
const OVER_CABLE: Duration = Duration::from_secs(2);

/// A cable between this machine and another one, by the addresses at its ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cable {
    /// The node it leads to.
    pub node: String,
    /// This end.
    pub own: IpAddr,
    /// The other end.
    pub peer: IpAddr,
}

impl FromStr for Cable {
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
pub struct Way {
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

impl fmt::Display for Way {
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
    pub fn new(node: &str, address: SocketAddr, cables: &[Cable]) -> Self {
        let lead = cables.iter().filter(|cable| cable.node == node && cable.peer != address.ip());
        let cables = lead.map(|cable| (cable.own, SocketAddr::new(cable.peer, address.port()))).collect();
        Self { node: node.to_owned(), address, cables }
    }

    /// Tries every way once.
    pub async fn reach(&self, ring: &Ring) -> Result<(identity::Dialled, Way), String> {
        if let Ok(reached) = self.over_cable(ring).await {
            return Ok(reached);
        }
        let stream = timeout(HANDSHAKE, TcpStream::connect(self.address)).await;
        let stream = stream.map_err(|_| "it did not answer".to_owned())?.map_err(words)?;
        // It is there now, and may not have been a moment ago.
        let fallback = match self.over_cable(ring).await {
            Ok(reached) => return Ok(reached),
            Err(reason) => reason,
        };
        let way = self.way(&stream, false, fallback)?;
        let greeted = timeout(HANDSHAKE, greet(ring, stream, &self.node)).await;
        Ok((greeted.unwrap_or_else(|_| Err("it did not answer".into()))?, way))
    }

    /// The first cable that carries a connection, or why none does; `Err(None)` without any.
    async fn over_cable(&self, ring: &Ring) -> Result<(identity::Dialled, Way), Option<String>> {
        let mut reasons = Vec::new();
        for (own, peer) in &self.cables {
            let dialled = async {
                let silent = || format!("nobody answered within {} s", OVER_CABLE.as_secs());
                let stream = timeout(OVER_CABLE, ports::connect_from(&(*own).into(), *peer))
                    .await
                    .map_err(|_| silent())?;
                let stream = stream.map_err(words)?;
                let way = self.way(&stream, true, None)?;
                let greeted = timeout(HANDSHAKE, greet(ring, stream, &self.node)).await;
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

    fn way(&self, stream: &TcpStream, over_cable: bool, fallback: Option<String>) -> Result<Way, String> {
        let from = stream.local_addr().map_err(words)?;
        let to = stream.peer_addr().map_err(words)?;
        Ok(Way { node: self.node.clone(), from, to, over_cable, fallback })
    }
}

async fn greet(ring: &Ring, stream: TcpStream, node: &str) -> Result<identity::Dialled, String> {
    stream.set_nodelay(true).map_err(words)?;
    let mut stream = ring.identity.dial(buffered(stream), node).await?;
    greeting::exchange(&mut stream, &ring.label).await?;
    Ok(stream)
}

/// Listeners at this end of every cable to the previous member, at the port that is published. One that cannot be is
/// told: the neighbour then comes by the published address.
pub(super) async fn listen(
    cables: &[Cable],
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
