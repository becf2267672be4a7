//! Paths to the agents that have a model: every cable to their machines, and the network as a fallback where
//! no cable works.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use russet_crds::{CopyPeer, Link};
use russet_rpc::ports::Egress;

use crate::process::launch;

/// A path to another agent.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PeerPath {
    /// Its node.
    pub peer: String,
    /// Egress of this machine.
    pub egress: Egress,
    /// Address of the other agent on it.
    pub to: SocketAddr,
    /// Whether it is used only while no other path to that node works.
    pub fallback: bool,
}

/// All paths to `peers` from a machine with this address and these links.
pub(crate) fn paths(peers: &[CopyPeer], own: IpAddr, links: &[Link]) -> BTreeSet<PeerPath> {
    let cables = launch::carrying_ring(links).filter_map(|(link, from, to)| {
        let named = peers.iter().any(|peer| peer.node_name == link.peer);
        let to = SocketAddr::new(to, u16::try_from(link.peer_port?).ok()?);
        named.then(|| {
            let from = Egress { address: from, interface: Some(link.interface.clone()) };
            PeerPath { peer: link.peer.clone(), egress: from, to, fallback: false }
        })
    });
    let network = peers.iter().filter_map(|peer| {
        let to: SocketAddr = peer.address.parse().ok()?;
        // There is no path between IPv4 and IPv6.
        (to.is_ipv4() == own.is_ipv4()).then(|| PeerPath {
            peer: peer.node_name.clone(),
            egress: own.into(),
            to,
            fallback: true,
        })
    });
    cables.chain(network).collect()
}

#[cfg(test)]
mod tests {
    use russet_crds::LinkKind;

    use super::*;

    #[test]
    fn every_cable_is_a_path_and_the_network_a_fallback() {
        let peer = |name: &str, address: &str| CopyPeer { node_name: name.into(), address: address.into() };
        let link = |peer: &str, end: u8, kind| Link {
            peer: peer.into(),
            kind,
            interface: format!("en{end}"),
            address: Some(format!("192.0.2.{end}")),
            peer_address: Some(format!("192.0.2.{}", end + 1)),
            peer_port: Some(20_001),
            ..Link::default()
        };
        let links = [
            link("b", 1, LinkKind::Thunderbolt),
            link("b", 5, LinkKind::Thunderbolt),
            link("z", 9, LinkKind::Thunderbolt),
            Link { peer_port: None, ..link("c", 13, LinkKind::Thunderbolt) },
        ];
        let own = "10.0.0.1".parse().unwrap();
        let found = paths(
            &[peer("b", "10.0.0.2:20001"), peer("c", "10.0.0.3:20001"), peer("d", "[::1]:1")],
            own,
            &links,
        );
        let shown: Vec<String> = found
            .iter()
            .map(|path| {
                let PeerPath { peer, egress: Egress { address, interface }, to, fallback: spare } = path;
                let (by, spare) = (interface.as_deref().unwrap_or("any"), if *spare { " spare" } else { "" });
                format!("{peer} {address} by {by}>{to}{spare}")
            })
            .collect();
        assert_eq!(
            shown,
            [
                "b 10.0.0.1 by any>10.0.0.2:20001 spare",
                "b 192.0.2.1 by en1>192.0.2.2:20001",
                "b 192.0.2.5 by en5>192.0.2.6:20001",
                "c 10.0.0.1 by any>10.0.0.3:20001 spare",
            ]
        );
    }
}
