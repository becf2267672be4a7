//! Tiers: which nodes the workload groups of a Dedicated tier own. Not here: placement on them (`place`), and
//! a tier's terms for a deployment (`validate`).
//!
//! ```text
//! nodes of a group stay its own while it needs them ─┬─ all its deployments fit there ─▶ nothing changes
//!                                                    └─ they do not ─▶ the fewest, then the smallest free
//!                                                                      nodes with which they do
//! ```

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use russet_crds::{ModelDeployment, ModelDeploymentSpec, TierMode};

use crate::joint_placement::solve;
use crate::note::Note;
use crate::placement;
use crate::quantity::show;
use crate::snapshot::{Availability, GroupInfo, ObjectKey, Snapshot};
pub use crate::tier_info::TierInfo;
use crate::validate::{ValidDeployment, eligible_nodes, validate};

/// Maximum number of nodes that a shortage names.
const MAX_SHOWN_NODES: usize = 5;

/// A deployment of a workload group.
#[derive(Clone, Copy, Debug)]
pub struct TierMember<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
    /// Its spec.
    pub spec: &'a ModelDeploymentSpec,
}

/// The deployments of a tier, by workload group.
pub fn members<'a>(
    tier: &str,
    deployments: impl Iterator<Item = &'a ModelDeployment>,
) -> BTreeMap<String, Vec<TierMember<'a>>> {
    let mut members: BTreeMap<String, Vec<TierMember<'a>>> = BTreeMap::new();
    for ModelDeployment { metadata, spec, status: _ } in deployments {
        let of_tier = spec.tier_ref.as_ref().is_some_and(|reference| reference.name == tier);
        if let Some(group) = spec.workload_group.as_ref().filter(|_| of_tier) {
            let text = |text: &'a Option<String>| text.as_deref().unwrap_or_default();
            let member =
                TierMember { namespace: text(&metadata.namespace), name: text(&metadata.name), spec };
            members.entry(group.clone()).or_default().push(member);
        }
    }
    members
}

/// The nodes of a workload group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeGrant {
    /// Its nodes.
    pub nodes: BTreeSet<String>,
    /// Why they are too few, if they are.
    pub shortage: Option<String>,
}

/// Assigns nodes to every workload group of a Dedicated tier; `members` are the deployments of each. The
/// notes are the errors of its pools.
pub fn assign(
    view: &Snapshot,
    name: &str,
    members: &BTreeMap<String, Vec<TierMember<'_>>>,
) -> Result<BTreeMap<String, NodeGrant>, Vec<Note>> {
    let Some(tier) = view.tiers.get(name).filter(|tier| tier.mode == TierMode::Dedicated) else {
        return Ok(BTreeMap::new());
    };
    let mut notes: Vec<Note> = tier.schedule_error.iter().cloned().collect();
    let areas = eligible_nodes(view, &tier.pools, &mut notes);
    if !notes.is_empty() {
        return Err(notes);
    }
    if !tier.active_hours.open {
        // It gets its nodes back at its next active hours.
        let unchanged = |nodes: &BTreeSet<String>| NodeGrant { nodes: nodes.clone(), shortage: None };
        return Ok(tier.owned.iter().map(|(group, nodes)| (group.clone(), unchanged(nodes))).collect());
    }
    let reach: BTreeSet<String> =
        view.nodes.keys().filter(|node| areas.iter().any(|area| area.contains(node))).cloned().collect();
    let mut state = TierAssignment { view: view.clone(), tier: name, eligible: reach };
    // Foreign groups that are being deleted do not block a node.
    state.view.groups.retain(|_, group| !group.deleting);
    let mut grants = BTreeMap::new();
    // Groups with deployments choose before those without.
    let (busy, idle): (Vec<&String>, Vec<&String>) =
        tier.groups.iter().partition(|group| members.get(*group).is_some_and(|them| !them.is_empty()));
    for group in busy.into_iter().chain(idle) {
        let none = Vec::new();
        let members = members.get(group).unwrap_or(&none);
        let grant = state.grant(group, members);
        state.set(group, grant.nodes.clone());
        grants.insert(group.clone(), grant);
    }
    Ok(grants)
}

/// State of an assignment.
struct TierAssignment<'a> {
    view: Snapshot,
    tier: &'a str,
    /// Nodes of its pools.
    eligible: BTreeSet<String>,
}

impl TierAssignment<'_> {
    fn set(&mut self, group: &str, nodes: BTreeSet<String>) {
        if let Some(tier) = self.view.tiers.get_mut(self.tier) {
            tier.owned.insert(group.to_owned(), nodes);
        }
    }

    fn grant(&mut self, group: &str, members: &[TierMember<'_>]) -> NodeGrant {
        let usable = |view: &Snapshot, node: &str| {
            let seen = view.nodes.get(node).map(|node| node.availability);
            !matches!(seen, None | Some(Availability::Draining | Availability::Lost))
        };
        let had = self
            .view
            .tiers
            .get(self.tier)
            .and_then(|tier| tier.owned.get(group))
            .cloned()
            .unwrap_or_default();
        let had: BTreeSet<String> = had.into_iter().filter(|node| usable(&self.view, node)).collect();
        if !had.is_empty() && self.fits(group, members, &had) {
            return NodeGrant { nodes: had, shortage: None };
        }
        // Nodes with replicas of the group stay its own; an empty one may be exchanged.
        let retained: BTreeSet<String> = had
            .iter()
            .filter(|node| {
                let mut on_it =
                    self.view.groups.iter().filter(|(_, seen)| seen.nodes().any(|at| at == *node));
                on_it.any(|(key, seen)| belongs_to(members, key, seen))
            })
            .cloned()
            .collect();
        let mut free = self.free(group, members);
        free.extend(had.iter().filter(|node| !retained.contains(*node)).cloned());
        free.sort_by_key(|node| (self.limit(node), node.clone()));
        free.dedup();
        for node in &free {
            let nodes: BTreeSet<String> = retained.iter().cloned().chain([node.clone()]).collect();
            if self.fits(group, members, &nodes) {
                return NodeGrant { nodes, shortage: None };
            }
        }
        // Several: the largest first, so that they are few; unnecessary ones are dropped afterwards.
        let mut nodes = retained.clone();
        free.sort_by_key(|node| (Reverse(self.limit(node)), node.clone()));
        for node in &free {
            nodes.insert(node.clone());
            if nodes.len() > retained.len() + 1 && self.fits(group, members, &nodes) {
                for spare in &free {
                    let fewer: BTreeSet<String> =
                        nodes.iter().filter(|node| *node != spare).cloned().collect();
                    if nodes.contains(spare)
                        && fewer.len() > retained.len()
                        && self.fits(group, members, &fewer)
                    {
                        nodes = fewer;
                    }
                }
                return NodeGrant { nodes, shortage: None };
            }
        }
        let shortage = Some(self.shortage(group, members, &free));
        if had.is_empty() {
            // It has at least one, which runs what fits.
            return NodeGrant { nodes: free.first().cloned().into_iter().collect(), shortage };
        }
        NodeGrant { nodes: had, shortage }
    }

    fn limit(&self, node: &str) -> u64 {
        self.view.nodes.get(node).map_or(0, |node| node.serving_limit)
    }

    /// Nodes that the group could get: in its tier's pools, open, without an owner and without foreign
    /// replicas.
    fn free(&self, group: &str, members: &[TierMember<'_>]) -> Vec<String> {
        let owners = self.view.node_owners();
        let foreign = |node: &str| {
            let mut on_it = self.view.groups.iter().filter(|(_, seen)| seen.nodes().any(|at| at == node));
            on_it.any(|(key, seen)| !belongs_to(members, key, seen))
        };
        let free = self.eligible.iter().filter(|name| {
            let open = self
                .view
                .nodes
                .get(*name)
                .is_some_and(|node| node.availability == Availability::Open && node.unreleased == 0);
            let nobodys =
                owners.get(name.as_str()).is_none_or(|(tier, owner)| tier == self.tier && owner == group);
            open && nobodys && !foreign(name)
        });
        free.cloned().collect()
    }

    fn valid(&self, members: &[TierMember<'_>]) -> Vec<ValidDeployment> {
        let valid =
            |member: &TierMember<'_>| validate(&self.view, member.namespace, member.name, member.spec).ok();
        members.iter().filter_map(valid).collect()
    }

    /// Whether all deployments of the group fit on these nodes. Deployments that cannot be planned need
    /// nothing.
    fn fits(&mut self, group: &str, members: &[TierMember<'_>], nodes: &BTreeSet<String>) -> bool {
        let before = self.view.tiers.get(self.tier).and_then(|tier| tier.owned.get(group)).cloned();
        self.set(group, nodes.clone());
        let deployments = self.valid(members);
        let waiting: usize = deployments
            .iter()
            .map(|desired| placement::pending_replicas(&self.view, desired, &desired.memory_model()).len())
            .sum();
        let joint_plan = solve(&self.view, &deployments.iter().collect::<Vec<_>>());
        let placed = joint_plan.splits.values().filter(|split| split.is_some()).count();
        self.set(group, before.unwrap_or_default());
        placed == waiting
    }

    fn shortage(&self, group: &str, members: &[TierMember<'_>], free: &[String]) -> String {
        let deployments = self.valid(members);
        let needs: Vec<String> = deployments
            .iter()
            .map(|desired| {
                let each = show(desired.memory_model().whole_model().total());
                format!("{} needs {} × {each}", desired.name, desired.replicas)
            })
            .collect();
        let rooms: Vec<String> = free
            .iter()
            .take(MAX_SHOWN_NODES)
            .map(|node| format!("{node} has {}", show(self.limit(node))))
            .collect();
        let needs =
            if needs.is_empty() { "it waits for its first deployment".to_owned() } else { needs.join(", ") };
        let rooms = match rooms.as_slice() {
            [] => "no node of the tier's pools is free for it".to_owned(),
            rooms => format!("free for it are: {}", rooms.join(", ")),
        };
        format!("workload group {group}: {needs}; {rooms}; add nodes to the pools, or require less")
    }
}

/// Whether a replica belongs to one of a group's deployments.
fn belongs_to(members: &[TierMember<'_>], key: &ObjectKey, seen: &GroupInfo) -> bool {
    members.iter().any(|member| member.namespace == key.0 && member.name == seen.deployment)
}

#[cfg(test)]
mod tests;
