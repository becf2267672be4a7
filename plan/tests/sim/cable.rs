//! Cables between nodes, and the links that each end reports. Not here: the planner's use of links.

use russet_crds::{Link, LinkKind};

/// A cable, or another link between two nodes.
#[derive(Clone, Debug)]
pub struct SimCable {
    /// Its two ends.
    pub ends: [CableSide; 2],
    /// Kind of link.
    pub kind: LinkKind,
    /// Whether it supports RDMA.
    pub rdma: bool,
    /// Negotiated bits per second.
    pub bits: u64,
    /// What the addresses of its ends tell.
    pub pairing: Pairing,
}

/// One end.
#[derive(Clone, Debug)]
pub struct CableSide {
    /// The node.
    pub node: String,
    /// Whether this end reports it.
    pub up: bool,
}

/// What the addresses of the two ends of a cable tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// The ends belong together.
    Matching,
    /// Nothing: there are no addresses.
    Absent,
    /// A mismatch: each end names an address that the other one lacks.
    Crossed,
}

impl SimCable {
    /// Whether it joins these two.
    pub fn joins(&self, a: &str, b: &str) -> bool {
        let [near, far] = &self.ends;
        (near.node == a && far.node == b) || (near.node == b && far.node == a)
    }
}

/// The links that `node` reports; `rdma` is whether it supports RDMA at all.
pub fn links(cables: &[SimCable], node: &str, rdma: bool) -> Vec<Link> {
    let mut links = Vec::new();
    // A port keeps its name while its cable is out.
    let mut port = 3;
    for (number, cable) in cables.iter().enumerate() {
        let Some(own) = cable.ends.iter().position(|end| end.node == node) else { continue };
        let (end, other) = (&cable.ends[own], &cable.ends[1 - own]);
        let interface = match cable.kind {
            LinkKind::Thunderbolt => {
                port += 1;
                format!("en{}", port - 1)
            }
            LinkKind::Ethernet => "en0".to_owned(),
            LinkKind::Wifi | LinkKind::Other => "en1".to_owned(),
        };
        if !end.up {
            continue;
        }
        let address = |end: usize| format!("10.0.{}.{}", number + 1, end + 1);
        let elsewhere = format!("10.9.{}.{}", number + 1, own + 1);
        let (address, peer_address) = match cable.pairing {
            Pairing::Matching => (Some(address(own)), Some(address(1 - own))),
            Pairing::Absent => (None, None),
            Pairing::Crossed => (Some(address(own)), Some(elsewhere)),
        };
        links.push(Link {
            peer: other.node.clone(),
            kind: cable.kind,
            address,
            peer_address,
            rdma_device: (cable.rdma && rdma).then(|| format!("rdma_{interface}")),
            bits_per_second: Some(cable.bits),
            interface,
            ..Link::default()
        });
    }
    links
}
