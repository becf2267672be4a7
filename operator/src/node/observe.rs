//! Observations of a node: when this process last saw its Lease change, and the ranks bound to it.

use std::collections::BTreeSet;
use std::time::Instant;

use jiff::Timestamp;
use kube::ResourceExt as _;
use kube::runtime::reflector::ObjectRef;
use russet_crds::conditions::{Type, get};
use russet_crds::{InferenceNode, names};

use super::cables::{self, FarEnds};
use super::decide::NodeObservation;
use crate::context::Context;
use crate::memory::LeaseObservation;

/// Reads the caches and records when the Lease last changed.
pub fn observe(context: &Context, node: &InferenceNode) -> NodeObservation {
    let name = node.name_any();
    let key = ObjectRef::new(&names::node_lease(&name)).within(names::SYSTEM_NAMESPACE);
    // Most nodes have no ports, and every renewal of a Lease comes through here.
    let mut ends = match cables::ports(node) {
        [] => FarEnds::default(),
        _ => cables::ends(node, context.stores.nodes.state().iter().map(AsRef::as_ref), Timestamp::now()),
    };
    ends.fallbacks = fallbacks(context, node);
    let bare = NodeObservation { ranks: ranks(context, &name), ends, ..NodeObservation::default() };
    let Some(lease) = context.stores.leases.get(&key) else { return bare };
    let Some(spec) = &lease.spec else { return bare };
    let renewed = spec.renew_time.as_ref().map(|time| time.0);
    let now = Instant::now();
    let mut leases = context.memory.leases.lock();
    let seen = leases
        .entry(name)
        .and_modify(|seen| {
            if seen.renewed != renewed {
                *seen = LeaseObservation { renewed, at: now, changed: true };
            }
        })
        .or_insert(LeaseObservation { renewed, at: now, changed: false });
    NodeObservation {
        exists: true,
        renewed,
        age: now.duration_since(seen.at),
        changed: seen.changed,
        holder: spec.holder_identity.clone(),
        ..bare
    }
}

/// The group of every rank bound to a node.
fn ranks(context: &Context, node: &str) -> Vec<String> {
    let shards = context.stores.shards.state();
    let here = shards.iter().filter(|shard| shard.spec.node_name == node);
    let mut groups: Vec<String> = here
        .map(|shard| {
            let namespace = shard.namespace().unwrap_or_default();
            format!("ShardGroup {namespace}/{}", shard.spec.group_ref.name)
        })
        .collect();
    groups.sort();
    groups
}

/// Messages of a node's ranks that do not use existing cables to their neighbours.
fn fallbacks(context: &Context, node: &InferenceNode) -> Vec<String> {
    let links = node.status.as_ref().map(|status| status.links.as_slice()).unwrap_or_default();
    let leads: BTreeSet<&str> = links
        .iter()
        .filter(|link| link.address.is_some() && link.peer_address.is_some())
        .map(|link| link.peer.as_str())
        .collect();
    if leads.is_empty() {
        return Vec::new();
    }
    let name = node.name_any();
    let shards = context.stores.shards.state();
    let here = shards.iter().filter(|shard| {
        let mut peers = shard.spec.peers.iter();
        shard.spec.node_name == name && peers.any(|peer| leads.contains(peer.node_name.as_str()))
    });
    let mut words: Vec<String> = here
        .filter_map(|shard| {
            let over = get(&shard.status.as_ref()?.conditions, Type::OverCables)?;
            let namespace = shard.namespace().unwrap_or_default();
            let shown = format!("Shard {namespace}/{}: {}", shard.name_any(), over.message);
            (over.status == "False").then_some(shown)
        })
        .collect();
    words.sort();
    words
}
