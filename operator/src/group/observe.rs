//! The inputs of a group's decision, read from the caches.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::ResourceExt as _;
use kube::runtime::reflector::ObjectRef;
use russet_crds::conditions::{self, Type, is_true};
use russet_crds::{GroupEnergy, Link, Shard, ShardGroup, ShardGroupSpec, names};
use russet_plan::snapshot::Availability;

use super::energy::{NodePower, group_energy};
use crate::context::Context;
use crate::memory::PeerTable;
use russet_plan::cluster::{availability, until_lost};

/// A group and the objects around it.
#[derive(Clone, Debug)]
pub struct ObservedGroup {
    /// The group.
    pub group: Arc<ShardGroup>,
    /// Its Shards, by rank.
    pub shards: BTreeMap<u32, Arc<Shard>>,
    /// Orphans: Shards with its name that belong to a former group, or to no rank.
    pub orphans: Vec<Arc<Shard>>,
    /// Missing files, by node; nodes with all files are left out.
    pub missing_files: BTreeMap<String, String>,
    /// Unreachable nodes.
    pub unreachable: BTreeSet<String>,
    /// Nodes that have been unreachable for so long that their engines have exited.
    pub lost: BTreeSet<String>,
    /// Time until the next of its nodes counts as lost.
    pub until_lost: Option<Duration>,
    /// When recent epochs began.
    pub epoch_starts: Vec<Timestamp>,
    /// The peer table that this process wrote for the group's epoch, whatever the caches show.
    pub peer_table: Option<PeerTable>,
    /// Links its nodes report, by node.
    pub links: BTreeMap<String, Vec<Link>>,
    /// Power of its nodes; none where one has no figure.
    pub energy: Option<GroupEnergy>,
}

impl ObservedGroup {
    /// Whether the cache of groups lags behind that of Shards. A group is always written first, so a Shard
    /// with a higher epoch means that the cache has not got this process's write yet.
    pub fn is_stale(&self) -> bool {
        self.shards.values().any(|shard| shard.spec.epoch > self.group.spec.epoch)
    }
}

/// Reads the caches.
pub fn observe(context: &Context, group: &Arc<ShardGroup>, now: Timestamp) -> ObservedGroup {
    let (namespace, name) = (group.namespace().unwrap_or_default(), group.name_any());
    let uid = group.uid().unwrap_or_default();
    let (mut shards, mut orphans) = (BTreeMap::new(), Vec::new());
    for shard in context.stores.shards.state() {
        if shard.namespace().as_deref() != Some(&namespace) || shard.spec.group_ref.name != name {
            continue;
        }
        let own = shard.spec.group_uid == uid && (shard.spec.rank as usize) < group.spec.plan.members.len();
        if own && shard.name_any() == names::shard(&name, shard.spec.rank) {
            shards.insert(shard.spec.rank, shard);
        } else {
            orphans.push(shard);
        }
    }
    let history = context.memory.epochs.lock().get(&uid).cloned().unwrap_or_default();
    let mut observed = ObservedGroup {
        group: group.clone(),
        shards,
        orphans,
        missing_files: missing_files(context, &namespace, &group.spec),
        unreachable: BTreeSet::new(),
        lost: BTreeSet::new(),
        until_lost: None,
        epoch_starts: history.epoch_starts,
        peer_table: history
            .peer_table
            .filter(|(epoch, _)| *epoch == group.spec.epoch)
            .map(|(_, table)| table),
        links: BTreeMap::new(),
        energy: None,
    };
    let mut powers = Vec::with_capacity(group.spec.plan.members.len());
    for member in &group.spec.plan.members {
        let node = &member.node_name;
        let known = context.stores.nodes.get(&ObjectRef::new(node));
        let links = known.as_ref().and_then(|known| Some(known.status.as_ref()?.links.clone()));
        observed.links.insert(node.clone(), links.unwrap_or_default());
        powers.push(known.as_ref().map(|known| NodePower::of(known)).unwrap_or_default());
        let soon = known.as_ref().and_then(|known| until_lost(known, now));
        observed.until_lost = observed.until_lost.into_iter().chain(soon).min();
        match known.map(|known| availability(&known, now)) {
            None | Some(Availability::Lost) => {
                observed.lost.insert(node.clone());
                observed.unreachable.insert(node.clone());
            }
            Some(Availability::Unreachable) => {
                observed.unreachable.insert(node.clone());
            }
            Some(_) => {}
        }
    }
    observed.energy = group_energy(powers);
    observed
}

/// Missing files of a group's ranks, as text, by node; nodes with all files are left out.
pub fn missing_files(context: &Context, namespace: &str, spec: &ShardGroupSpec) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let own = &spec.model_ref.name;
    for (model, node) in spec.plan.files(own) {
        let Some(missing) = missing(context, namespace, model, node) else { continue };
        let is_adapter = || spec.plan.adapters.iter().any(|adapter| adapter.model_ref.name == model);
        let missing = match model {
            model if model == own => missing,
            model if is_adapter() => format!("adapter {model}: {missing}"),
            model => format!("draft model {model}: {missing}"),
        };
        // Missing files of the model come first.
        all.entry(node.to_owned()).or_insert(missing);
    }
    all
}

/// Missing files of a model on a node, as text; `None` if all are present and verified.
fn missing(context: &Context, namespace: &str, model: &str, node: &str) -> Option<String> {
    let key = ObjectRef::new(&names::model_copy(namespace, model, node));
    let Some(copy) = context.stores.copies.get(&key) else { return Some("no copy requested yet".to_owned()) };
    let status = copy.status.clone().unwrap_or_default();
    let files = copy.spec.want == russet_crds::CopyMode::Files;
    if files && is_true(&status.conditions, Type::Ready) {
        return None;
    }
    let condition = conditions::get(&status.conditions, Type::Ready);
    let message = condition.map(|it| it.message.clone()).filter(|message| !message.is_empty());
    Some(match (status.progress, message) {
        (Some(progress), Some(message)) => format!("{progress}, {message}"),
        (Some(text), None) | (None, Some(text)) => text,
        (None, None) => "waits for its agent".to_owned(),
    })
}
