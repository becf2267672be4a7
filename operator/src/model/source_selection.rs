//! Source selection: where the bytes of a Model's copies come from, so that they enter the cluster once.
//! Pure.
//!
//! ```text
//! requested ─▶ waits ─▶ fetches ─▶ ready, seeds ─▶ all others download: from it, and from one another
//!                ▲         └─ unreachable, or failed on its own machine ─▶ passed over: the next one fetches
//!                └─ retries too, and is no longer passed over: the copy with the most bytes continues
//! ```
//!
//! One copy fetches: among those that are not passed over one that fetches already, of several the one with
//! the most bytes, and of equals the first by name. A copy that is passed over is not asked to wait: it keeps
//! retrying, which is how its recovery is detected, and transfers no bytes meanwhile. So each is tried once
//! at most; if all fail, all retry, and the first that succeeds makes the others wait again. Except for
//! `supply` itself, nothing here depends on earlier decisions.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use kube::ResourceExt as _;
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{
    CopyMode, CopyPeer, CopySource, InferenceNode, ModelCopy, ModelCopySpec, ModelSource, names,
};

use super::{copy_object, is_ready};

/// Maximum number of peers in a copy's `supply.from`. More would not make it faster.
const MAX_PEERS: usize = 64;

/// A node, as other nodes reach it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerNode {
    /// Whether its agent is reachable.
    pub reachable: bool,
    /// Where its agent serves other agents; an older one does not.
    pub address: Option<SocketAddr>,
}

/// A copy whose supply changes.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceChange {
    /// Its name.
    pub copy: String,
    /// Its new supply.
    pub supply: Option<CopySource>,
    /// The other fields, if its creation was interrupted: its supply was written, and its labels were not.
    pub unfinished: Option<ModelCopy>,
}

/// The nodes, as other nodes reach them, by name.
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

/// Supply of a copy at its creation: it has to wait, so that it does not fetch what another copy fetches
/// already. Which copy fetches is decided once it exists.
pub fn initial_source(spec: &ModelCopySpec, known: Option<&ModelCopy>) -> Option<CopySource> {
    let requested = known.is_some_and(|known| known.spec.want == CopyMode::Files);
    (!requested && !spec.source.is_local()).then(CopySource::default)
}

/// The changes of the copies' supplies.
pub fn changes(
    source: &ModelSource,
    copies: &[Arc<ModelCopy>],
    nodes: &BTreeMap<String, PeerNode>,
) -> Vec<SourceChange> {
    let mut desired = decide(source, copies, nodes);
    let change = |copy: &Arc<ModelCopy>| {
        let name = copy.name_any();
        let supply = desired.remove(&name)?;
        let labelled = copy.labels().contains_key(names::LABEL_NODE);
        let unfinished = (!labelled).then(|| copy_object(copy.spec.agent_work()));
        (supply != copy.spec.supply).then_some(SourceChange { copy: name, supply, unfinished })
    };
    copies.iter().filter_map(change).collect()
}

/// The source of every incomplete copy, by the copy's name.
pub fn decide(
    source: &ModelSource,
    copies: &[Arc<ModelCopy>],
    nodes: &BTreeMap<String, PeerNode>,
) -> BTreeMap<String, Option<CopySource>> {
    let requested =
        |copy: &&ModelCopy| copy.spec.want == CopyMode::Files && copy.metadata.deletion_timestamp.is_none();
    let (ready, coming): (Vec<&ModelCopy>, Vec<&ModelCopy>) =
        copies.iter().map(AsRef::as_ref).filter(requested).partition(|copy| is_ready(copy));
    // Every machine reads its own files.
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

/// A verified copy on a node that serves it to others.
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

/// Agents' reports are validated: one malformed digest would keep every other copy from its supply, which the
/// server would reject.
fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The node, if others can reach it.
fn peer(node: &str, nodes: &BTreeMap<String, PeerNode>) -> Option<CopyPeer> {
    let address = nodes.get(node).filter(|node| node.reachable)?.address?;
    Some(CopyPeer { node_name: node.to_owned(), address: address.to_string() })
}

/// The content that most nodes hold, of those that match a copy's commit. Seeds disagree if a source without
/// commits changed between two fetches; then all later copies agree.
fn majority_content<'a>(holders: &[SeedCopy<'a>], commit: Option<&str>) -> Option<&'a str> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let agrees = |holder: &&SeedCopy<'_>| holder.commit.zip(commit).is_none_or(|(theirs, own)| theirs == own);
    for holder in holders.iter().filter(agrees) {
        *counts.entry(holder.content).or_default() += 1;
    }
    counts.into_iter().min_by_key(|(content, count)| (Reverse(*count), *content)).map(|(content, _)| content)
}

/// Providers: nodes with every byte first, then nodes that are downloading, each by name.
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

/// Elects the copy that fetches; the others wait for it.
fn elect_fetcher(
    copies: &[&ModelCopy],
    nodes: &BTreeMap<String, PeerNode>,
) -> BTreeMap<String, Option<CopySource>> {
    let fetches = |copy: &ModelCopy| copy.spec.supply.is_none();
    let rank = |copy: &ModelCopy| {
        let node = nodes.get(&copy.spec.node_name).copied().unwrap_or_default();
        let done = copy.status.as_ref().map_or(0, |status| status.bytes_done);
        // A node that serves no other nodes would fetch for itself only.
        (fetch_precondition(copy, node), node.address.is_none(), !fetches(copy), Reverse(done))
    };
    let chosen =
        copies.iter().min_by_key(|copy| (rank(copy), &copy.spec.node_name)).map(|copy| copy.name_any());
    let part = |copy: &&ModelCopy| {
        let node = nodes.get(&copy.spec.node_name).copied().unwrap_or_default();
        let tries = fetches(copy) && fetch_precondition(copy, node) != FetchObstacle::No;
        let name = copy.name_any();
        let supply = (chosen.as_ref() != Some(&name) && !tries).then(CopySource::default);
        (name, supply)
    };
    copies.iter().map(part).collect()
}

/// Why another copy should fetch; later variants are less likely to recover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum FetchObstacle {
    No,
    /// Its agent reports an error that may be local to its machine or network.
    Failing,
    /// It is unreachable.
    Unreachable,
}

fn fetch_precondition(copy: &ModelCopy, node: PeerNode) -> FetchObstacle {
    if !node.reachable {
        return FetchObstacle::Unreachable;
    }
    let conditions = copy.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let fails = match conditions::get(conditions, Type::Ready).and_then(conditions::reason) {
        Some(Reason::DiskPressure | Reason::DiskFull | Reason::NewerRelease | Reason::QuietHours) => true,
        // A copy that downloads from peers reports errors of other nodes. Errors that every agent would get
        // (no such file, a digest mismatch) do not count: each would fetch the same bytes in vain.
        Some(Reason::SourceForbidden | Reason::SourceNotAllowed | Reason::SourceUnreachable) => {
            copy.spec.supply.is_none()
        }
        _ => false,
    };
    if fails { FetchObstacle::Failing } else { FetchObstacle::No }
}

#[cfg(test)]
mod tests;
