//! Replica steps: for each replica of one deployment, keep, create, drain, preempt or wait. Replicas are
//! decided one after the other, on a view updated with the previous decisions. Not here: which
//! groups may keep their nodes, as none on a draining one may (`running`).

use std::borrow::Cow;
use std::collections::BTreeSet;

use russet_crds::{ApprovalAction, names};

use super::failure_domains::{SiblingDomains, desired_and_surplus};
use super::preempt::{self, ApprovalRequest, PreemptOutcome, Victims};
use super::running::{
    GroupReadiness, current_and_outdated, has_lost_node, lost_cable_note, may_keep_nodes, outside_pools_note,
    rollout_in_progress,
};
use super::score::ScoredCandidate;
use super::selection::{RankedCandidates, Selection, find_candidates};
use super::{MAX_SHOWN_NODES, NewGroup, Placement, RemovalReason, RemovedGroup, plan_hash};
use crate::copies::Shortage;
use crate::joint_plan::JointPlan;
use crate::memory_model::MemoryModel;
use crate::note::{DrainReason, Note};
use crate::quantity::show;
use crate::shard::SplitCandidate;
use crate::snapshot::{Availability, GroupInfo, ObjectKey, Snapshot};
use crate::valid_deployment::ValidDeployment;

/// The placement of one deployment in progress.
pub struct ReplicaSteps<'a> {
    view: Cow<'a, Snapshot>,
    desired: &'a ValidDeployment,
    memory: MemoryModel<'a>,
    joint_plan: &'a JointPlan,
    /// The decisions so far.
    pub placement: Placement,
    /// Why.
    pub notes: Vec<Note>,
    /// Selections for replicas to create.
    pub selections: Vec<(i32, Selection)>,
    /// The desired replicas, by index.
    pub desired_replicas: BTreeSet<i32>,
    /// Groups of surplus replicas, in order of removal.
    surplus: Vec<ObjectKey>,
}

impl<'a> ReplicaSteps<'a> {
    /// The initial state. The view of a large cluster is not copied until it changes.
    pub fn new(view: &'a Snapshot, desired: &'a ValidDeployment, joint_plan: &'a JointPlan) -> Self {
        let memory = desired.memory_model();
        let own = view.groups_of(&desired.namespace, &desired.name).filter(|(_, group)| !group.deleting);
        let own: Vec<(&ObjectKey, &GroupInfo)> = own.collect();
        let (desired_replicas, surplus) =
            desired_and_surplus(view, &own, desired.replicas, &desired.topology_key);
        let of = |index: i32| own.iter().filter(move |(_, group)| group.replica == index);
        let surplus = surplus.into_iter().flat_map(of).map(|(key, _)| (*key).clone()).collect();
        let (placement, notes, selections) = (Placement::default(), Vec::new(), Vec::new());
        Self {
            view: Cow::Borrowed(view),
            desired,
            memory,
            joint_plan,
            placement,
            notes,
            selections,
            desired_replicas,
            surplus,
        }
    }

    /// Removes surplus replicas.
    pub fn remove_surplus(&mut self) {
        let why =
            if self.desired.idle_reason.is_some() { RemovalReason::Idle } else { RemovalReason::ScaledDown };
        for key in std::mem::take(&mut self.surplus) {
            self.remove(&key, why);
        }
    }

    /// Decides for one replica.
    pub fn step(&mut self, replica: i32) {
        let (current, outdated) = current_and_outdated(&self.view, self.desired, &self.memory, replica);
        if let Some(((current, ready), surplus)) = current.split_first() {
            return self.keep(current, *ready, surplus, outdated);
        }
        if let Some(note) = self.approval_note(replica, &outdated) {
            self.notes.push(note);
            return self.wait(replica, outdated);
        }
        let goes_first = self.desired.drain_first && any_ready(&outdated);
        let fit = self.memory.clone();
        let beside = match goes_first {
            true => Err(Vec::new()),
            false => find_candidates(&self.view, self.desired, &fit, replica, true, |_| false),
        };
        match beside {
            Ok(choices) if self.fewer_nodes_soon(replica, &choices, &outdated) => {
                self.wait_for_release(replica, outdated)
            }
            Ok(choices) => self.create(replica, choices, outdated),
            Err(refusal) => self.make_room(replica, outdated, refusal, goes_first),
        }
    }

    /// Keeps a running group; its predecessors are deleted once it is ready.
    fn keep(
        &mut self,
        group: &ObjectKey,
        ready: bool,
        surplus: &[GroupReadiness],
        outdated: Vec<GroupReadiness>,
    ) {
        self.notes.extend(outside_pools_note(&self.view, self.desired, group));
        self.notes.extend(lost_cable_note(&self.view, group));
        self.placement.keep.push(group.clone());
        for (key, _) in surplus {
            self.remove(key, RemovalReason::Replaced);
        }
        for (key, old_ready) in outdated {
            if ready || !old_ready {
                self.remove(&key, RemovalReason::Replaced);
            } else {
                self.placement.keep.push(key);
            }
        }
    }

    /// Creates a group in free memory.
    fn create(&mut self, replica: i32, choices: RankedCandidates<'_>, outdated: Vec<GroupReadiness>) {
        let desired = self.desired;
        let advised = self.joint_plan.splits.get(&(desired.key(), replica));
        if advised == Some(&None) {
            self.notes.push(Note::Outweighed { replica, by: self.joint_plan.preferred() });
            return self.wait(replica, outdated);
        }
        let Some(choice) = choices.select(&self.view, advised.and_then(Option::as_ref)) else { return };
        let new = new_group(desired, &self.memory, replica, &choice.candidate);
        let key = (desired.namespace.clone(), new.name.clone());
        if self.view.groups.contains_key(&key) {
            // The same plan, being deleted: its name is free once its agents have released it.
            let holders = vec![format!("ShardGroup {}", new.name)];
            self.notes.push(Note::WaitingForRelease { replica, holders });
            return self.wait(replica, outdated);
        }
        self.notes.push(Note::Placed { replica, decision: choice.candidate.show() });
        let nodes = choice.candidate.ranks.iter().map(|rank| rank.node.as_str());
        let (domains, with) =
            SiblingDomains::for_replica(&self.view, desired, replica, |_| false).shared_domains(nodes);
        if !with.is_empty() {
            let (key, apart) = (desired.topology_key.clone(), choice.best_apart.clone());
            self.notes.push(Note::SharedFailureDomain { replica, key, domains, with, apart });
        }
        for (old, old_ready) in outdated {
            if old_ready {
                self.placement.keep.push(old);
            } else {
                self.remove(&old, RemovalReason::Replaced);
            }
        }
        self.view.to_mut().groups.insert(key, desired.new_group(new.replica, new.plan.clone()));
        self.placement.create.push(new);
        self.selections.push((replica, choice));
    }

    /// Whether fewer nodes will be enough once agents have released deleted groups, and a predecessor that
    /// has lost a node. A group placed on more nodes now would stay on them for its lifetime.
    fn fewer_nodes_soon(
        &self,
        replica: i32,
        choices: &RankedCandidates<'_>,
        outdated: &[GroupReadiness],
    ) -> bool {
        let Self { view, desired, memory, .. } = self;
        let leaves = |key: &ObjectKey| {
            let own = || outdated.iter().any(|(old, _)| old == key);
            view.groups.get(key).is_some_and(|group| group.deleting || (own() && has_lost_node(view, group)))
        };
        let passing =
            || view.nodes.values().any(|node| node.unreleased > 0) || view.groups.keys().any(leaves);
        choices.best_node_count() > 1
            && passing()
            && find_candidates(view, desired, memory, replica, false, leaves)
                .is_ok_and(|soon| soon.best_node_count() < choices.best_node_count())
    }

    /// Waits for memory that is being released; a predecessor that has lost a node is deleted for that.
    fn wait_for_release(&mut self, replica: i32, outdated: Vec<GroupReadiness>) {
        let of = |(key, _): &GroupReadiness| {
            self.view.groups.get(key).is_some_and(|group| has_lost_node(&self.view, group))
        };
        let (broken, rest): (Vec<GroupReadiness>, Vec<GroupReadiness>) = outdated.into_iter().partition(of);
        for (key, _) in broken {
            self.notes.push(Note::DrainFirst { group: key.1.clone(), why: DrainReason::NodeLost });
            self.remove(&key, RemovalReason::Drained);
        }
        self.notes.push(Note::WaitingForRelease { replica, holders: memory_holders(&self.view) });
        self.wait(replica, rest);
    }

    /// Nothing is free: drain the predecessor, preempt others, or report the refusal.
    fn make_room(
        &mut self,
        replica: i32,
        outdated: Vec<GroupReadiness>,
        refusal: Vec<Note>,
        goes_first: bool,
    ) {
        let (fit, desired) = (self.memory.clone(), self.desired);
        let view = &self.view;
        let gone = |key: &ObjectKey| view.groups.get(key).is_some_and(|group| group.deleting);
        if !goes_first && find_candidates(view, desired, &fit, replica, false, gone).is_ok() {
            let holders = memory_holders(view);
            self.notes.push(Note::WaitingForRelease { replica, holders });
            return self.wait(replica, outdated);
        }
        let drained = |key: &ObjectKey| gone(key) || outdated.iter().any(|(old, _)| old == key);
        // Memory that agents have not released may stay held: no group is stopped for it.
        let after = find_candidates(view, desired, &fit, replica, true, drained)
            .ok()
            .filter(|_| !outdated.is_empty());
        if let Some(after) = after {
            let ports = refusal.iter().any(|note| matches!(note, Note::PortsBusy { .. }));
            let why = match (goes_first, ports) {
                (true, _) => DrainReason::Requested,
                (false, true) => DrainReason::Ports,
                (false, false) => DrainReason::Memory,
            };
            return self.drain(replica, outdated, &after, why);
        }
        let outcome = preempt::preempt(view, desired, &fit, replica, drained);
        let full = refusal.iter().filter_map(|note| match note {
            Note::Disk { shortage: Shortage::Space { node, .. } } => Some(node.clone()),
            _ => None,
        });
        let full = full.take(MAX_SHOWN_NODES).collect();
        let ports = refusal.iter().any(|note| matches!(note, Note::PortsTaken { .. }));
        self.notes.extend(refusal);
        let remedy = match outcome {
            Some(PreemptOutcome::Preempt(victims)) => return self.preempt(replica, outdated, victims),
            Some(PreemptOutcome::RequestApproval(ask, note)) => {
                self.placement.approval_requests.push(ask);
                Some(note)
            }
            Some(PreemptOutcome::Wait(note)) => Some(note),
            None => None,
        };
        let (needed, draft) = (fit.whole_model(), fit.draft().cloned().map(Box::new));
        let adapters = fit.adapter_overhead();
        let closed = unavailable_nodes(&self.view, desired, needed.total());
        self.notes.push(Note::NothingFits { replica, needed, draft, adapters, closed, full, ports });
        // Last, because it is the remedy.
        self.notes.extend(remedy);
        let stays = self.ready_group(&outdated).map(|key| Note::OutdatedStays { group: key.1.clone() });
        self.notes.extend(stays);
        self.wait(replica, outdated);
    }

    /// Drains the predecessor, after which the replica fits: one replica at a time, and its files first.
    fn drain(
        &mut self,
        replica: i32,
        outdated: Vec<GroupReadiness>,
        after: &RankedCandidates<'_>,
        why: DrainReason,
    ) {
        if !self.placement.create.is_empty()
            || rollout_in_progress(&self.view, self.desired, &self.memory, &self.desired_replicas, replica)
        {
            self.notes.push(Note::WaitsForRollout { replica });
            return self.wait(replica, outdated);
        }
        let nodes = after.candidates().next().map(ScoredCandidate::nodes).unwrap_or_default();
        if any_ready(&outdated) && self.prefetch(replica, nodes) {
            return self.wait(replica, outdated);
        }
        self.placement.waiting.push(replica);
        for (key, _) in &outdated {
            self.notes.push(Note::DrainFirst { group: key.1.clone(), why });
            self.remove(key, RemovalReason::Drained);
        }
    }

    /// Preempts others, after which the replica fits, once its files are present.
    fn preempt(&mut self, replica: i32, outdated: Vec<GroupReadiness>, victims: Victims) {
        let Victims { groups, deployments, freed_bytes: frees, nodes } = victims;
        if !self.prefetch(replica, nodes) {
            let seen = &mut self.view.to_mut().groups;
            for key in &groups {
                seen.entry(key.clone()).and_modify(|group| group.deleting = true);
            }
            self.notes.push(Note::Preempts { replica, deployments, frees });
            self.placement.preempt.extend(groups);
        }
        self.wait(replica, outdated);
    }

    /// Whether some of these nodes lack the model's files, which are then fetched first: no group stops for a
    /// model without files.
    fn prefetch(&mut self, replica: i32, nodes: Vec<String>) -> bool {
        let Self { view, desired, .. } = self;
        let Some(disks) = &view.disks else { return false };
        // Rank 0 is the first.
        let draft = desired.draft.iter().zip(nodes.first()).map(|(draft, node)| (draft.name.as_str(), node));
        let models = || std::iter::once(desired.model.as_str()).chain(desired.adapter_models());
        let files = nodes.iter().flat_map(|node| models().map(move |model| (model, node))).chain(draft);
        let lacking = files.filter(|(model, node)| !disks.holds(&desired.namespace, model, node));
        let lacking: Vec<(String, String)> =
            lacking.map(|(model, node)| (model.to_owned(), node.clone())).collect();
        if lacking.is_empty() {
            return false;
        }
        let is_missing = |node: &String| lacking.iter().any(|(_, other)| other == node);
        let nodes = nodes.iter().filter(|node| is_missing(node)).cloned().collect();
        self.notes.push(Note::FetchFirst { replica, nodes });
        self.placement.prefetch.extend(lacking);
        true
    }

    /// Waits while a predecessor keeps running. Of several outdated ones, one ready group is enough.
    fn wait(&mut self, replica: i32, outdated: Vec<GroupReadiness>) {
        self.placement.waiting.push(replica);
        let answering = self.ready_group(&outdated).cloned();
        for (key, _) in outdated {
            if answering.as_ref().is_none_or(|one| *one == key) {
                self.placement.keep.push(key);
            } else {
                self.remove(&key, RemovalReason::Replaced);
            }
        }
    }

    /// The first of these groups that is ready.
    fn ready_group<'n>(&self, groups: &'n [GroupReadiness]) -> Option<&'n ObjectKey> {
        let answers = |(key, ready): &&GroupReadiness| {
            *ready && self.view.groups.get(key).is_some_and(|group| !has_lost_node(&self.view, group))
        };
        groups.iter().find(answers).map(|(key, _)| key)
    }

    /// What prevents the replacement of a ready replica: its tier requires an approval. One that cannot stay
    /// where it is needs none.
    fn approval_note(&mut self, replica: i32, outdated: &[GroupReadiness]) -> Option<Note> {
        let Self { view, desired, .. } = self;
        let tier = view.tiers.get(desired.tier.as_ref()?)?;
        let answers = |(key, ready): &GroupReadiness| {
            *ready && view.groups.get(key).is_some_and(|group| may_keep_nodes(view, desired, group))
        };
        if !tier.approvals.contains(&ApprovalAction::Rollout) || !outdated.iter().any(answers) {
            return None;
        }
        let hash = preempt::approval_hash(desired, ApprovalAction::Rollout, &[]);
        if desired.approved.contains_key(&hash) || desired.approved_plan.as_ref() == Some(&hash) {
            return None;
        }
        if desired.denied.contains(&hash) {
            return Some(Note::Denied { replica, hash });
        }
        let (deployments, frees, foreign) = (Vec::new(), 0, false);
        let note = Note::AwaitsApproval { replica, hash: hash.clone(), deployments, frees, foreign };
        let message = note.to_string();
        self.placement.approval_requests.push(ApprovalRequest {
            action: ApprovalAction::Rollout,
            hash,
            affects: Vec::new(),
            message,
        });
        Some(note)
    }

    fn remove(&mut self, key: &ObjectKey, why: RemovalReason) {
        if let Some(group) = self.view.to_mut().groups.get_mut(key) {
            // It holds its memory until its agents report the release; only a later view has it free.
            group.deleting = true;
        }
        self.placement.delete.push(RemovedGroup { name: key.1.clone(), reason: why });
    }
}

/// Whether one of them is ready.
fn any_ready(groups: &[GroupReadiness]) -> bool {
    groups.iter().any(|(_, ready)| *ready)
}

/// Nodes that it may use and that would have enough memory if empty, but take no work.
fn unavailable_nodes(view: &Snapshot, desired: &ValidDeployment, needed: u64) -> Vec<String> {
    let holds = view.nodes.iter().filter(|(name, node)| {
        let shut = node.availability != Availability::Open && node.serving_limit >= needed;
        shut && desired.allows(std::iter::once(name.as_str()))
    });
    holds.take(MAX_SHOWN_NODES).map(|(name, _)| name.clone()).collect()
}

fn new_group(
    desired: &ValidDeployment,
    fit: &MemoryModel<'_>,
    replica: i32,
    candidate: &SplitCandidate,
) -> NewGroup {
    let mut plan = candidate.plan(fit);
    plan.hash = plan_hash(&desired.model, &plan);
    NewGroup { name: names::shard_group(&desired.name, replica, &plan.hash), replica, plan }
}

/// Holders of memory that is being released, or should be.
fn memory_holders(view: &Snapshot) -> Vec<String> {
    let leaving = view.groups.iter().filter(|(_, group)| group.deleting);
    let groups = leaving.map(|(key, group)| format!("ShardGroup {} {}", key.1, show(group.reserved_bytes())));
    let nodes = view
        .nodes
        .iter()
        .filter(|(_, node)| node.unreleased > 0 && node.availability == Availability::Open)
        .map(|(name, node)| format!("node {name} {}", show(node.unreleased)));
    groups.chain(nodes).collect()
}
