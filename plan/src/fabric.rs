//! Which nodes RDMA cables connect, and over which devices: what MLX's Jaccl backends need to know.
//! Pure; it believes a cable only when both ends report it. Speeds and probes are not its business.
//!
//! ```text
//! every pair of a team cabled ─▶ Jaccl       a ring of cables ─▶ JacclRing       neither ─▶ Ring (TCP)
//! ```

mod domain;
mod team;

use std::collections::{BTreeMap, BTreeSet};

use russet_crds::{Backend, GroupPlan, Link, LinkKind, Peer, Transport};

use crate::snapshot::Node;

pub use domain::{Web, show_bits};
pub use team::{nearest, pairs, teams};

/// Most ranks Jaccl joins when every rank is cabled to every other.
pub const MESH_RANKS: u32 = 8;
/// Most cables between two neighbours that JacclRing uses.
pub const RING_WIRES: usize = 4;

/// RDMA devices by member and peer; an empty cell is no cable.
pub type Matrix = Vec<Vec<Vec<String>>>;

/// A cable as its two ends name it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cable {
    /// Device of the node asked about first.
    pub near: String,
    /// Device of the other one.
    pub far: String,
}

/// The cables of a cluster that may be used.
#[derive(Clone, Debug)]
pub struct Fabric<'a> {
    nodes: &'a BTreeMap<String, Node>,
    /// Ports somebody uses, and who.
    taken: BTreeMap<(String, String), String>,
    /// Cables of every pair, the node whose name comes first near.
    cables: BTreeMap<(&'a str, &'a str), Vec<Cable>>,
}

impl<'a> Fabric<'a> {
    /// The cables between `nodes`, without those of `taken` ports: `(node, device) → who has it`.
    pub fn new(nodes: &'a BTreeMap<String, Node>, taken: BTreeMap<(String, String), String>) -> Self {
        let mut fabric = Self { nodes, taken, cables: BTreeMap::new() };
        for (name, node) in nodes {
            let peers: BTreeSet<&str> = node.links.iter().map(|link| link.peer.as_str()).collect();
            for peer in peers.into_iter().filter(|peer| *peer > name.as_str()) {
                let mut cables = fabric.between(name, peer);
                cables.retain(|cable| {
                    fabric.owner(name, &cable.near).or(fabric.owner(peer, &cable.far)).is_none()
                });
                if !cables.is_empty() {
                    fabric.cables.insert((name, peer), cables);
                }
            }
        }
        fabric
    }

    fn owner(&self, node: &str, device: &str) -> Option<&str> {
        self.taken.get(&(node.to_owned(), device.to_owned())).map(String::as_str)
    }

    fn links(&self, node: &str, peer: &str) -> Vec<&'a Link> {
        let links = self.nodes.get(node).map(|node| node.links.as_slice()).unwrap_or_default();
        links.iter().filter(|link| link.peer == peer && link.kind == LinkKind::Thunderbolt).collect()
    }

    /// Ends at `node` of cables to `peer`: links with a device no other link of the node names.
    fn ends(&self, node: &str, peer: &str) -> Vec<(&'a Link, &'a str)> {
        let all = self.nodes.get(node).map(|node| node.links.as_slice()).unwrap_or_default();
        let alone =
            |device: &str| all.iter().filter(|link| link.rdma_device.as_deref() == Some(device)).count() == 1;
        let named = self.links(node, peer).into_iter();
        named
            .filter_map(|link| Some((link, link.rdma_device.as_deref()?)))
            .filter(|(_, device)| alone(device))
            .collect()
    }

    /// Cables between two nodes, whoever uses them.
    fn between(&self, near: &str, far: &str) -> Vec<Cable> {
        if ![near, far].iter().all(|node| self.offers_rdma(node)) {
            return Vec::new();
        }
        let (own, other) = (self.ends(near, far), self.ends(far, near));
        let sole = own.len() == 1 && other.len() == 1;
        let mut cables = Vec::new();
        for (end, device) in &own {
            let mut opposite = other.iter().filter(|(link, _)| match same_cable(end, link) {
                Some(same) => same,
                None => sole,
            });
            // Two ends that could both be the other one say nothing.
            if let (Some((_, far)), None) = (opposite.next(), opposite.next()) {
                cables.push(Cable { near: (*device).to_owned(), far: (*far).to_owned() });
            }
        }
        let uses = |far: &str| cables.iter().filter(|cable| cable.far == far).count();
        let mut unique: Vec<Cable> = cables.iter().filter(|cable| uses(&cable.far) == 1).cloned().collect();
        unique.sort();
        unique
    }

    fn offers_rdma(&self, node: &str) -> bool {
        self.nodes.get(node).is_some_and(|node| {
            node.backends.is_empty()
                || node.backends.iter().any(|backend| backend.eq_ignore_ascii_case("jaccl"))
        })
    }

    /// The free cables between two nodes, in the same order whoever is near.
    pub fn cables(&self, near: &str, far: &str) -> Vec<Cable> {
        if near <= far {
            return self.cables.get(&(near, far)).cloned().unwrap_or_default();
        }
        let turned = |cable: &Cable| Cable { near: cable.far.clone(), far: cable.near.clone() };
        self.cables.get(&(far, near)).map(|cables| cables.iter().map(turned).collect()).unwrap_or_default()
    }

    /// Whether a free cable joins two nodes.
    pub fn joined(&self, a: &str, b: &str) -> bool {
        self.cables.contains_key(&if a <= b { (a, b) } else { (b, a) })
    }

    /// Every two nodes that a free cable joins.
    pub fn pairs(&self) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.cables.keys().copied()
    }

    /// What two nodes lack to be joined.
    pub fn lack(&self, a: &str, b: &str) -> String {
        for (node, peer) in [(a, b), (b, a)] {
            if !self.offers_rdma(node) {
                return format!("the engine of node {node} does not offer jaccl");
            }
            let links = self.links(node, peer);
            let Some(first) = links.first() else {
                return format!("node {node} reports no Thunderbolt link to node {peer}");
            };
            if links.iter().all(|link| link.rdma_device.is_none()) {
                return format!(
                    "node {node} has no RDMA device on its Thunderbolt link {} to node {peer}",
                    first.interface
                );
            }
        }
        for cable in self.between(a, b) {
            for (node, device) in [(a, &cable.near), (b, &cable.far)] {
                if let Some(owner) = self.owner(node, device) {
                    return format!("port {device} of node {node} is in use by {owner}");
                }
            }
        }
        format!("the addresses of nodes {a} and {b} do not tell which ends of their cables belong together")
    }

    /// The device matrix of a team in which every pair is joined; the first lacking pair otherwise.
    pub fn mesh(&self, team: &[&str]) -> Result<Matrix, String> {
        if team.len() > MESH_RANKS as usize {
            return Err(format!("Jaccl joins at most {MESH_RANKS} ranks, not {}", team.len()));
        }
        let cell = |a: &str, b: &str| match self.cables(a, b).into_iter().next() {
            _ if a == b => Ok(Vec::new()),
            // More than the first cable is of no use to a mesh.
            Some(cable) => Ok(vec![cable.near]),
            None => Err(self.refusal(a, b)),
        };
        team.iter().map(|a| team.iter().map(|b| cell(a, b)).collect()).collect()
    }

    /// The device matrix of a team in which neighbours are joined, with equally many wires each; wire
    /// `k` is the same cable at both ends.
    pub fn ring(&self, team: &[&str]) -> Result<Matrix, String> {
        let size = team.len();
        let mut wires = RING_WIRES;
        for (index, near) in team.iter().enumerate() {
            let far = team[(index + 1) % size];
            match self.cables(near, far).len() {
                0 => return Err(self.refusal(near, far)),
                count => wires = wires.min(count),
            }
        }
        let neighbours = |a: usize, b: usize| (a + 1) % size == b || (b + 1) % size == a;
        let cell = |a: usize, b: usize| match a != b && neighbours(a, b) {
            true => self.cables(team[a], team[b]).into_iter().take(wires).map(|cable| cable.near).collect(),
            false => Vec::new(),
        };
        Ok((0..size).map(|a| (0..size).map(|b| cell(a, b)).collect()).collect())
    }

    /// The same as a sentence about both.
    pub fn refusal(&self, a: &str, b: &str) -> String {
        format!("{a} and {b} have no RDMA link: {}", self.lack(a, b))
    }
}

/// Whether two links are one cable by their addresses; `None` when the addresses do not say.
fn same_cable(one: &Link, other: &Link) -> Option<bool> {
    let pairs = [(&one.address, &other.peer_address), (&one.peer_address, &other.address)];
    let known: Vec<bool> = pairs.iter().filter_map(|(a, b)| Some(a.as_ref()? == b.as_ref()?)).collect();
    (!known.is_empty()).then(|| known.into_iter().all(|equal| equal))
}

/// The ports a running plan uses, as `(node, device)`.
pub fn ports(plan: &GroupPlan) -> impl Iterator<Item = (&str, &str)> {
    plan.members.iter().flat_map(|member| {
        let devices = member.rdma_devices.iter().flatten();
        devices.map(|device| (member.node_name.as_str(), device.as_str()))
    })
}

/// Whether what ranks send each other needs no tunnel: every connection of every ring runs between
/// the addresses of a Thunderbolt link that both of its nodes report. Links are by node.
pub fn transport(plan: &GroupPlan, peers: &[Peer], links: &BTreeMap<String, Vec<Link>>) -> Transport {
    let size = plan.tensor_size.max(1) as usize;
    let ip = |address: &str| address.rsplit_once(':').map(|(ip, _)| ip.trim_matches(['[', ']']).to_owned());
    let cabled = |from: &Peer, to: &Peer, address: fn(&Peer) -> &str| {
        let (Some(near), Some(far)) = (ip(address(from)), ip(address(to))) else { return false };
        let names = |node: &str, peer: &str, near: &str, far: &str| {
            links.get(node).into_iter().flatten().any(|link| {
                link.kind == LinkKind::Thunderbolt
                    && link.peer == peer
                    && link.address.as_deref() == Some(near)
                    && link.peer_address.as_deref() == Some(far)
            })
        };
        names(&from.node_name, &to.node_name, &near, &far)
            && names(&to.node_name, &from.node_name, &far, &near)
    };
    let ring = |members: Vec<&Peer>, address: fn(&Peer) -> &str| {
        let next = members.iter().cycle().skip(1);
        members.len() < 2 || members.iter().zip(next).all(|(from, to)| cabled(from, to, address))
    };
    let teams = plan.backend != Backend::Ring
        || peers.chunks(size).all(|team| ring(team.iter().collect(), |peer| &peer.tensor));
    let stages = (0..size.min(peers.len()))
        .all(|member| ring(peers.iter().skip(member).step_by(size).collect(), |peer| &peer.ring));
    if peers.len() > 1 && teams && stages { Transport::Direct } else { Transport::Tunnel }
}

#[cfg(test)]
mod tests;
