//! Where the bytes of a Model's copies come from, so that they enter the cluster once. Pure.
//!
//! ```text
//! asked ─▶ waits ─▶ fetches ─▶ ready, holds ─▶ all others receive: from it, and from one another
//!            ▲         └─ unreachable, or failed on its own machine ─▶ passed over: the next one fetches
//!            └─ fetches as well, and is no longer passed over: who has the most bytes goes on
//! ```
//!
//! One copy fetches: of those that are not passed over one that fetches already, of several the one with the most
//! bytes, and of equals the first by name. Who is passed over is not told to wait: it tries on, which is how anybody
//! learns that it could again, and brings no bytes meanwhile. So it goes round once at most; where all fail, all try,
//! and the first that gets on sends the others back. Nothing here depends on what was decided before but for that
//! `supply` itself.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use kube::ResourceExt as _;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{CopyPeer, InferenceNode, ModelCopy, ModelCopySpec, ModelSource, CopySource, CopyMode, names};

use super::{copy_object, is_ready};

/// Nodes that a copy is told of: as many as its `supply.from` may name. More would not make it quicker.
const MAX_PEERS: usize = 64;

/// A node as others reach it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerNode {
    /// Whether its agent is alive.
    pub reachable: bool,
    /// Where its agent answers others; an older one does not.
    pub address: Option<SocketAddr>,
}

/// A copy that is told something else of its supply than before.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceChange {
    /// Its name.
    pub copy: String,
    /// What it is told from now on.
    pub supply: Option<CopySource>,
    /// All else of it, where asking for it was cut off: its supply was written, and its labels were not.
    pub unfinished: Option<ModelCopy>,
}

/// The nodes as others reach them, by name.
pub fn peer_nodes(nodes: &[Arc<InferenceNode>]) -> BTreeMap<String, PeerNode> {
    let seen = |node: &Arc<InferenceNode>| {
        let status = node.status.as_ref()?;
        let ip: Option<IpAddr> = status.addresses.iter().find_map(|address| address.parse().ok());
        let port = status.peer_port.and_then(|port| u16::try_from(port).ok());
        let reachable = conditions::is_true(&status.conditions, Type::Reachable);
        Some(PeerNode { reachable, address: ip.zip(port).map(SocketAddr::from) })
    };
    nodes.iter().map(|node| (node.name_any(), seen(node).unwrap_or_default())).collect()
}

/// What a copy is told of its supply in the moment its files are asked for: to wait, so that it does not begin to
/// fetch what another one fetches already. Who fetches is decided when it is there.
pub fn initial_source(spec: &ModelCopySpec, known: Option<&ModelCopy>) -> Option<CopySource> {
    let asked = known.is_some_and(|known| known.spec.want == CopyMode::Files);
    (!asked && !spec.source.is_local()).then(CopySource::default)
}

/// What is to change of the copies' supplies.
pub fn changes(
    source: &ModelSource,
    copies: &[Arc<ModelCopy>],
    nodes: &BTreeMap<String, PeerNode>,
) -> Vec<SourceChange> {
    let mut wanted = decide(source, copies, nodes);
    let change = |copy: &Arc<ModelCopy>| {
        let name = copy.name_any();
        let supply = wanted.remove(&name)?;
        let labelled = copy.labels().contains_key(names::LABEL_NODE);
        let unfinished = (!labelled).then(|| copy_object(copy.spec.agent_work()));
        (supply != copy.spec.supply).then_some(SourceChange { copy: name, supply, unfinished })
    };
    copies.iter().filter_map(change).collect()
}

/// Where the bytes of every copy that lacks some are to come from, by the copy's name.
pub fn decide(
    source: &ModelSource,
    copies: &[Arc<ModelCopy>],
    nodes: &BTreeMap<String, PeerNode>,
) -> BTreeMap<String, Option<CopySource>> {
    let wanted =
        |copy: &&ModelCopy| copy.spec.want == CopyMode::Files && copy.metadata.deletion_timestamp.is_none();
    let (ready, coming): (Vec<&ModelCopy>, Vec<&ModelCopy>) =
        copies.iter().map(AsRef::as_ref).filter(wanted).partition(|copy| is_ready(copy));
    // Every machine reads its own.
    if source.is_local() {
        return coming.iter().map(|copy| (copy.name_any(), None)).collect();
    }
    let holders: Vec<SeedCopy<'_>> = ready.iter().filter_map(|copy| seed_copy(copy, nodes)).collect();
    let mut receivers: BTreeMap<&str, Vec<&ModelCopy>> = BTreeMap::new();
    let mut without = Vec::new();
    for copy in coming {
        match majority_content(&holders, copy.spec.commit.as_deref()) {
            Some(content) => receivers.entry(content).or_default().push(copy),
            None => without.push(copy),
        }
    }
    let mut decided = elect_fetcher(&without, nodes);
    for (content, receivers) in receivers {
        let holders = holders.iter().filter(|holder| holder.content == content);
        let from = providers(holders.map(|holder| holder.peer.clone()).collect(), &receivers, nodes);
        for copy in receivers {
            let others = from.iter().filter(|peer| peer.node_name != copy.spec.node_name);
            let mut from: Vec<CopyPeer> = others.take(MAX_PEERS).cloned().collect();
            from.sort();
            let supply = CopySource { content: Some(content.to_owned()), from };
            decided.insert(copy.name_any(), Some(supply));
        }
    }
    decided
}

/// A verified copy on a node that gives it to others.
struct SeedCopy<'a> {
    content: &'a str,
    commit: Option<&'a str>,
    peer: CopyPeer,
}

fn seed_copy<'a>(copy: &'a ModelCopy, nodes: &BTreeMap<String, PeerNode>) -> Option<SeedCopy<'a>> {
    let status = copy.status.as_ref()?;
    let content = status.content.as_deref().filter(|content| is_digest(content))?;
    let commit = status.commit.as_deref().or(copy.spec.commit.as_deref());
    Some(SeedCopy { content, commit, peer: peer(&copy.spec.node_name, nodes)? })
}

/// What an agent says is not taken for more than it is: one odd word would keep every other copy from its supply,
/// which the server would refuse.
fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The node, where others reach it.
fn peer(node: &str, nodes: &BTreeMap<String, PeerNode>) -> Option<CopyPeer> {
    let address = nodes.get(node).filter(|node| node.reachable)?.address?;
    Some(CopyPeer { node_name: node.to_owned(), address: address.to_string() })
}

/// What most nodes hold of what a copy of this commit may take. Holders disagree where a source moved between two
/// fetches and names no commits; then all that come later agree.
fn majority_content<'a>(holders: &[SeedCopy<'a>], commit: Option<&str>) -> Option<&'a str> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let agrees = |holder: &&SeedCopy<'_>| holder.commit.zip(commit).is_none_or(|(theirs, own)| theirs == own);
    for holder in holders.iter().filter(agrees) {
        *counts.entry(holder.content).or_default() += 1;
    }
    counts.into_iter().min_by_key(|(content, count)| (Reverse(*count), *content)).map(|(content, _)| content)
}

/// Who gives: those that have every byte first, then those that get them, each by name.
fn providers(
    mut holders: Vec<CopyPeer>,
    receivers: &[&ModelCopy],
    nodes: &BTreeMap<String, PeerNode>,
) -> Vec<CopyPeer> {
    holders.sort();
    let mut others: Vec<CopyPeer> =
        receivers.iter().filter_map(|copy| peer(&copy.spec.node_name, nodes)).collect();
    others.sort();
    holders.extend(others);
    holders
}

/// One copy fetches, the others wait for it.
fn elect_fetcher(copies: &[&ModelCopy], nodes: &BTreeMap<String, PeerNode>) -> BTreeMap<String, Option<CopySource>> {
    let fetches = |copy: &ModelCopy| copy.spec.supply.is_none();
    let rank = |copy: &ModelCopy| {
        let node = nodes.get(&copy.spec.node_name).copied().unwrap_or_default();
        let done = copy.status.as_ref().map_or(0, |status| status.bytes_done);
        // What comes to a node that gives nothing to others comes to that one only.
        (fetch_obstacle(copy, node), node.address.is_none(), !fetches(copy), Reverse(done))
    };
    let chosen =
        copies.iter().min_by_key(|copy| (rank(copy), &copy.spec.node_name)).map(|copy| copy.name_any());
    let part = |copy: &&ModelCopy| {
        let node = nodes.get(&copy.spec.node_name).copied().unwrap_or_default();
        let tries = fetches(copy) && fetch_obstacle(copy, node) != FetchObstacle::No;
        let name = copy.name_any();
        let supply = (chosen.as_ref() != Some(&name) && !tries).then(CopySource::default);
        (name, supply)
    };
    copies.iter().map(part).collect()
}

/// Why another copy is to fetch; the later, the less likely it comes to anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum FetchObstacle {
    No,
    /// Its agent reports what may be its own machine's or network's lack.
    Failing,
    /// Nobody hears of it.
    Unreachable,
}

fn fetch_obstacle(copy: &ModelCopy, node: PeerNode) -> FetchObstacle {
    if !node.reachable {
        return FetchObstacle::Unreachable;
    }
    let conditions = copy.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let fails = match conditions::get(conditions, Type::Ready).and_then(conditions::reason) {
        Some(Reason::DiskPressure | Reason::DiskFull | Reason::NewerRelease | Reason::QuietHours) => true,
        // From a copy that was to receive it speaks of other nodes. What every agent would be told alike (no such
        // file, bytes that do not match) moves nothing: each would bring in the same bytes in vain.
        Some(Reason::SourceForbidden | Reason::SourceNotAllowed | Reason::SourceUnreachable) => {
            copy.spec.supply.is_none()
        }
        _ => false,
    };
    if fails { FetchObstacle::Failing } else { FetchObstacle::No }
}

#[cfg(test)]
mod tests;
