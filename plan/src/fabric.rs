//! Which nodes are connected by RDMA cables, and over which devices: the input of MLX's Jaccl backends. Pure;
//! a cable counts only if both ends report it. Not here: speeds and probes.
//!
//! ```text
//! every pair of a team cabled ─▶ Jaccl       a ring of cables ─▶ JacclRing       neither ─▶ Ring (TCP)
//! ```

pub mod address_plan;
pub mod cabling;
mod domain;
pub mod network_spec;
mod tp_team;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use russet_crds::{Backend, GroupPlan, Link, LinkKind, Peer, Transport};

use crate::nodes::Nodes;
use cabling::{is_too_slow, links, offers_rdma};

pub use cabling::{Cable, Cabling, TOO_SLOW_FOR_RDMA, differing_systems};
pub use domain::{LinkGraph, show_bits};
pub use tp_team::{nearest, pairs, teams};

/// Maximum ranks of Jaccl with every rank cabled to every other.
pub const MAX_MESH_RANKS: u32 = 8;
/// Maximum cables between two neighbours that JacclRing uses.
pub const MAX_RING_WIRES: usize = 4;

/// RDMA devices by member and peer; an empty cell is no cable.
pub type DeviceMatrix = Vec<Vec<Vec<String>>>;

/// User of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortUser<'a> {
    /// The ShardGroup of this name.
    Group(&'a str),
    /// An engine without a group; the ports it still holds are unknown.
    Unreleased,
}

impl fmt::Display for PortUser<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Group(name) => write!(out, "ShardGroup {name}"),
            Self::Unreleased => out.write_str("an engine its agent has not released"),
        }
    }
}

/// Ports in use, as `(node, device)`, and their users.
pub type PortUse<'a> = BTreeMap<(&'a str, &'a str), PortUser<'a>>;

/// The usable cables of a cluster.
#[derive(Clone, Debug)]
pub struct Fabric<'a> {
    nodes: &'a Nodes,
    port_use: PortUse<'a>,
    /// Pairs of nodes that are joined only by ports in use, as indices.
    busy_pairs: BTreeSet<(usize, usize)>,
}

impl<'a> Fabric<'a> {
    /// The cables between `nodes`, without those of `taken` ports.
    pub fn new(nodes: &'a Nodes, taken: PortUse<'a>) -> Self {
        let cabling = nodes.cabling();
        let mut fabric = Self { nodes, port_use: taken, busy_pairs: BTreeSet::new() };
        let holding: BTreeSet<&str> = fabric.port_use.keys().map(|(node, _)| *node).collect();
        for node in holding {
            let Some(place) = cabling.index_of(node) else { continue };
            for peer in cabling.neighbours(place) {
                if !fabric.joined(node, cabling.name(peer)) {
                    fabric.busy_pairs.extend([(place, peer), (peer, place)]);
                }
            }
        }
        fabric
    }

    /// The cables as if no port were in use; `None` if none is.
    pub fn ignoring_use(&self) -> Option<Self> {
        (!self.port_use.is_empty()).then(|| Self::new(self.nodes, PortUse::new()))
    }

    fn port_user<'s>(&'s self, node: &'s str, device: &'s str) -> Option<&'s PortUser<'s>> {
        let taken: &PortUse<'s> = &self.port_use;
        taken.get(&(node, device))
    }

    /// The free cables between two nodes, in the same order from either side.
    fn free<'s>(&'s self, near: &'s str, far: &'s str) -> impl Iterator<Item = &'s Cable> {
        let taken = move |cable: &Cable| {
            self.port_user(near, &cable.near).or(self.port_user(far, &cable.far)).is_some()
        };
        self.nodes.cabling().between(near, far).iter().filter(move |cable| !taken(cable))
    }

    /// The same, as a vector.
    pub fn cables(&self, near: &str, far: &str) -> Vec<Cable> {
        self.free(near, far).cloned().collect()
    }

    /// Whether a free cable joins two nodes.
    pub fn joined(&self, a: &str, b: &str) -> bool {
        self.free(a, b).next().is_some()
    }

    /// Whether a free cable joins the nodes with these indices.
    fn joins(&self, a: usize, b: usize) -> bool {
        self.nodes.cabling().joins(a, b) && !self.busy_pairs.contains(&(a, b))
    }

    /// Indices of the nodes joined with this one by a free cable.
    fn neighbours(&self, place: usize) -> impl Iterator<Item = usize> {
        let peers = self.nodes.cabling().neighbours(place);
        peers.filter(move |peer| !self.busy_pairs.contains(&(place, *peer)))
    }

    /// What two nodes lack to be joined.
    pub fn missing_link(&self, a: &str, b: &str) -> String {
        for (node, peer) in [(a, b), (b, a)] {
            let known = self.nodes.get(node);
            if !known.is_some_and(offers_rdma) {
                return format!("the engine of node {node} does not offer jaccl");
            }
            let links: Vec<&Link> = known.into_iter().flat_map(|known| links(known, peer)).collect();
            let Some(first) = links.first() else {
                return format!("node {node} reports no Thunderbolt link to node {peer}");
            };
            if links.iter().all(|link| link.rdma_device.is_none()) {
                return format!(
                    "node {node} has no RDMA device on its Thunderbolt link {} to node {peer}",
                    first.interface
                );
            }
            if links.iter().all(|link| is_too_slow(link)) {
                let bits = first.bits_per_second.unwrap_or(0) / 1_000_000_000;
                return format!(
                    "the Thunderbolt link {} of node {node} to node {peer} has {bits} Gbit/s, and RDMA needs Thunderbolt 5 (80) at both ends",
                    first.interface
                );
            }
        }
        let systems = self.nodes.get(a).zip(self.nodes.get(b));
        if let Some((own, other)) =
            systems.and_then(|(a, b)| differing_systems(a.os.as_deref(), b.os.as_deref()))
        {
            return format!("node {a} has {own} and node {b} {other}, and RDMA needs the same build on both");
        }
        let mut cables = self.nodes.cabling().between(a, b).to_vec();
        cables.sort();
        for cable in cables {
            for (node, device) in [(a, &cable.near), (b, &cable.far)] {
                if let Some(owner) = self.port_user(node, device) {
                    return format!("port {device} of node {node} is in use by {owner}");
                }
            }
        }
        format!("the addresses of nodes {a} and {b} do not tell which ends of their cables belong together")
    }

    /// The device matrix of a team in which every pair is joined; otherwise the first pair that is not.
    pub fn mesh(&self, team: &[&str]) -> Result<DeviceMatrix, String> {
        if team.len() > MAX_MESH_RANKS as usize {
            return Err(format!("Jaccl joins at most {MAX_MESH_RANKS} ranks, not {}", team.len()));
        }
        let cell = |a: &str, b: &str| match self.cables(a, b).into_iter().next() {
            _ if a == b => Ok(Vec::new()),
            // A mesh uses only the first cable.
            Some(cable) => Ok(vec![cable.near]),
            None => Err(self.refusal(a, b)),
        };
        team.iter().map(|a| team.iter().map(|b| cell(a, b)).collect()).collect()
    }

    /// The device matrix of a team in which neighbours are joined, with the same number of wires each; wire
    /// `k` is the same cable at both ends.
    pub fn ring(&self, team: &[&str]) -> Result<DeviceMatrix, String> {
        let size = team.len();
        let mut wires = MAX_RING_WIRES;
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
        format!("{a} and {b} have no RDMA link: {}", self.missing_link(a, b))
    }
}

/// The ports of a running plan, as `(node, device)`.
pub fn ports(plan: &GroupPlan) -> impl Iterator<Item = (&str, &str)> {
    plan.members.iter().flat_map(|member| {
        let devices = member.rdma_devices.iter().flatten();
        devices.map(|device| (member.node_name.as_str(), device.as_str()))
    })
}

/// The first cable of a running plan that no longer exists.
pub fn severed(nodes: &Nodes, plan: &GroupPlan) -> Option<String> {
    let whole = Fabric::new(nodes, PortUse::new());
    let teams = plan.members.chunks(plan.tensor_size.max(1) as usize);
    let ends = teams.flat_map(|team| {
        team.iter().flat_map(move |member| {
            let cells = team.iter().zip(&member.rdma_devices);
            cells.flat_map(move |(peer, cell)| {
                cell.iter().map(move |device| (&*member.node_name, &*peer.node_name, device))
            })
        })
    });
    let there = |near: &str, far: &str, device: &String| {
        nodes.cabling().between(near, far).iter().any(|cable| cable.near == *device)
    };
    let (near, far, device) = ends.into_iter().find(|(near, far, device)| !there(near, far, device))?;
    Some(match whole.joined(near, far) {
        true => format!("port {device} of node {near} leads to node {far} no longer"),
        false => whole.refusal(near, far),
    })
}

/// Whether traffic between ranks needs no tunnel: every connection of every ring runs between the addresses
/// of a Thunderbolt link that both of its nodes report. Links are by node.
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
