//! The cables of a cluster, regardless of use. A cable counts only if both of its ends report it.

use std::collections::{BTreeMap, BTreeSet};

use russet_crds::{Link, LinkKind};

use crate::node_info::NodeInfo;

/// A cable as its two ends name it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cable {
    /// Device of the first node.
    pub near: String,
    /// Device of the second node.
    pub far: String,
}

/// Which nodes are joined by which cables. A node's index is its position in the order of names.
#[derive(Clone, Debug, Default)]
pub struct Cabling {
    names: Vec<String>,
    /// For every node, the nodes joined with it and the cables, with itself as the near end.
    joined: Vec<BTreeMap<usize, Vec<Cable>>>,
}

impl Cabling {
    /// The cables between `nodes`.
    pub fn from_nodes(nodes: &BTreeMap<String, NodeInfo>) -> Self {
        let names: Vec<String> = nodes.keys().cloned().collect();
        let mut cabling = Self { joined: vec![BTreeMap::new(); names.len()], names };
        for (near, (name, node)) in nodes.iter().enumerate() {
            let peers: BTreeSet<&str> = node.links.iter().map(|link| link.peer.as_str()).collect();
            for peer in peers.into_iter().filter(|peer| *peer > name.as_str()) {
                let (Some(far), Some(other)) = (cabling.index_of(peer), nodes.get(peer)) else { continue };
                let cables = match_cables(name, node, peer, other);
                if !cables.is_empty() {
                    cabling.joined[far].insert(near, cables.iter().map(reversed).collect());
                    cabling.joined[near].insert(far, cables);
                }
            }
        }
        cabling
    }

    /// Index of a node.
    pub fn index_of(&self, node: &str) -> Option<usize> {
        self.names.binary_search_by(|name| name.as_str().cmp(node)).ok()
    }

    /// The node with this index.
    pub fn name(&self, place: usize) -> &str {
        self.names.get(place).map_or("", String::as_str)
    }

    /// Indices of the nodes joined with a node, in order.
    pub fn neighbours(&self, place: usize) -> impl Iterator<Item = usize> {
        self.joined.get(place).into_iter().flatten().map(|(far, _)| *far)
    }

    /// Whether any cable joins two nodes.
    pub fn joins(&self, a: usize, b: usize) -> bool {
        self.joined.get(a).is_some_and(|near| near.contains_key(&b))
    }

    /// The cables between two nodes, in the same order from either side.
    pub fn between(&self, near: &str, far: &str) -> &[Cable] {
        let pair = self.index_of(near).zip(self.index_of(far));
        let cables = pair.and_then(|(near, far)| self.joined[near].get(&far));
        cables.map(Vec::as_slice).unwrap_or_default()
    }
}

fn reversed(cable: &Cable) -> Cable {
    Cable { near: cable.far.clone(), far: cable.near.clone() }
}

/// Whether the engine of a node supports RDMA; one that reports nothing may.
pub(super) fn offers_rdma(node: &NodeInfo) -> bool {
    node.backends.is_empty() || node.backends.iter().any(|backend| backend.eq_ignore_ascii_case("jaccl"))
}

/// The builds of two Macs if they differ, which prevents RDMA; those of other systems do not matter.
pub fn differing_systems<'a>(own: Option<&'a str>, other: Option<&'a str>) -> Option<(&'a str, &'a str)> {
    let (own, other) = (own?, other?);
    let macs = own.starts_with("macOS") && other.starts_with("macOS");
    (macs && own != other).then_some((own, other))
}

/// Thunderbolt 4 runs at 40 Gbit/s and has no usable RDMA although its ports have devices: JACCL fails
/// (ml-explore/mlx#4485).
pub const TOO_SLOW_FOR_RDMA: u64 = 40_000_000_000;

/// Whether a link negotiated too low a speed for RDMA.
pub(super) fn is_too_slow(link: &Link) -> bool {
    link.bits_per_second.is_some_and(|bits| bits <= TOO_SLOW_FOR_RDMA)
}

/// The Thunderbolt links that a node reports to a peer.
pub(super) fn links<'a>(node: &'a NodeInfo, peer: &str) -> impl Iterator<Item = &'a Link> {
    node.links.iter().filter(move |link| link.peer == peer && link.kind == LinkKind::Thunderbolt)
}

/// Ends at `node` of cables to `peer`: Thunderbolt 5 links with a device that no other link of the node
/// names.
fn ends<'a>(node: &'a NodeInfo, peer: &str) -> Vec<(&'a Link, &'a str)> {
    let alone = |device: &str| {
        node.links.iter().filter(|link| link.rdma_device.as_deref() == Some(device)).count() == 1
    };
    let links = links(node, peer).filter(|link| !is_too_slow(link));
    let named = links.filter_map(|link| Some((link, link.rdma_device.as_deref()?)));
    named.filter(|(_, device)| alone(device)).collect()
}

/// The cables between two nodes, as far as their reports match.
fn match_cables(near: &str, own: &NodeInfo, far: &str, other: &NodeInfo) -> Vec<Cable> {
    if !offers_rdma(own)
        || !offers_rdma(other)
        || differing_systems(own.os.as_deref(), other.os.as_deref()).is_some()
    {
        return Vec::new();
    }
    let (own, other) = (ends(own, far), ends(other, near));
    let sole = own.len() == 1 && other.len() == 1;
    let mut cables = Vec::new();
    for (end, device) in &own {
        let mut opposite = other.iter().filter(|(link, _)| match same_cable(end, link) {
            Some(same) => same,
            None => sole,
        });
        // Two candidates for the other end are ambiguous.
        if let (Some((_, far)), None) = (opposite.next(), opposite.next()) {
            cables.push(Cable { near: (*device).to_owned(), far: (*far).to_owned() });
        }
    }
    let uses = |far: &str| cables.iter().filter(|cable| cable.far == far).count();
    let mut unique: Vec<Cable> = cables.iter().filter(|cable| uses(&cable.far) == 1).cloned().collect();
    unique.sort();
    unique
}

/// Whether two links are one cable by their addresses; `None` if the addresses do not tell.
fn same_cable(one: &Link, other: &Link) -> Option<bool> {
    let pairs = [(&one.address, &other.peer_address), (&one.peer_address, &other.address)];
    let known: Vec<bool> = pairs.iter().filter_map(|(a, b)| Some(a.as_ref()? == b.as_ref()?)).collect();
    (!known.is_empty()).then(|| known.into_iter().all(|equal| equal))
}
