//! One deployment's turn: what becomes of each of its replicas, one after the other, on a view that changes with
//! what was decided for those before it.

use std::borrow::Cow;
use std::collections::BTreeSet;

use russet_crds::{Action, names};

use super::choose::{Choice, Choices, find};
use super::current::{Named, broken, may_stay, on_its_way, outside, severed, split_groups};
use super::preempt::{self, Ask, Outcome, Victims};
use super::spread::{Spread, counted};
use super::worth::Way;
use super::{NewGroup, OldGroup, Placement, Removal, SHOWN, plan_hash};
use crate::copies::Lack;
use crate::fit::Fit;
use crate::note::{Drain, Note};
use crate::quantity::show;
use crate::shard::Candidate;
use crate::snapshot::{Availability, Group, Key, Snapshot};
use crate::solve::Advice;
use crate::validate::ValidDeployment;

/// A deployment being placed.
pub struct Turn<'a> {
    view: Cow<'a, Snapshot>,
    want: &'a ValidDeployment,
    fit: Fit<'a>,
    advice: &'a Advice,
    /// What was decided so far.
    pub placement: Placement,
    /// Why.
    pub notes: Vec<Note>,
    /// What was found for replicas that come.
    pub found: Vec<(i32, Choice)>,
    /// The replicas there are to be.
    pub wanted: BTreeSet<i32>,
    /// Groups of those there are too many, in the order in which they go.
    surplus: Vec<Key>,
}

impl<'a> Turn<'a> {
    /// Nothing is decided yet. Of a large cluster nothing is copied while nothing changes.
    pub fn new(view: &'a Snapshot, want: &'a ValidDeployment, advice: &'a Advice) -> Self {
        let fit = want.fit();
        let own = view.groups_of(&want.namespace, &want.name).filter(|(_, group)| !group.deleting);
        let own: Vec<(&Key, &Group)> = own.collect();
        let (wanted, surplus) = counted(view, &own, want.replicas, &want.topology_key);
        let of = |index: i32| own.iter().filter(move |(_, group)| group.replica == index);
        let surplus = surplus.into_iter().flat_map(of).map(|(key, _)| (*key).clone()).collect();
        let (placement, notes, found) = (Placement::default(), Vec::new(), Vec::new());
        Self { view: Cow::Borrowed(view), want, fit, advice, placement, notes, found, wanted, surplus }
    }

    /// Replicas that nobody wants go.
    pub fn excess(&mut self) {
        let why = if self.want.rest.is_some() { Removal::Rests } else { Removal::ScaledDown };
        for key in std::mem::take(&mut self.surplus) {
            self.remove(&key, why);
        }
    }

    /// Decides for one replica.
    pub fn replica(&mut self, replica: i32) {
        let (current, outdated) = split_groups(&self.view, self.want, &self.fit, replica);
        if let Some(((kept, ready), surplus)) = current.split_first() {
            return self.stays(kept, *ready, surplus, outdated);
        }
        if let Some(note) = self.unapproved(replica, &outdated) {
            self.notes.push(note);
            return self.waits(replica, outdated);
        }
        let goes_first = self.want.drains && answers(&outdated);
        let fit = self.fit.clone();
        let beside = match goes_first {
            true => Err(Vec::new()),
            false => find(&self.view, self.want, &fit, replica, true, |_| false),
        };
        match beside {
            Ok(choices) if self.fewer_soon(replica, &choices, &outdated) => {
                self.is_patient(replica, outdated)
            }
            Ok(choices) => self.comes(replica, choices, outdated),
            Err(refusal) => self.makes_room(replica, outdated, refusal, goes_first),
        }
    }

    /// It runs; its predecessors go once it answers.
    fn stays(&mut self, kept: &Key, ready: bool, surplus: &[Named], outdated: Vec<Named>) {
        self.notes.extend(outside(&self.view, self.want, kept));
        self.notes.extend(severed(&self.view, kept));
        self.placement.keep.push(kept.clone());
        for (key, _) in surplus {
            self.remove(key, Removal::Replaced);
        }
        for (key, old_ready) in outdated {
            if ready || !old_ready {
                self.remove(&key, Removal::Replaced);
            } else {
                self.placement.keep.push(key);
            }
        }
    }

    /// There is room for it.
    fn comes(&mut self, replica: i32, choices: Choices<'_>, outdated: Vec<Named>) {
        let want = self.want;
        let advised = self.advice.splits.get(&(want.key(), replica));
        if advised == Some(&None) {
            self.notes.push(Note::Outweighed { replica, by: self.advice.preferred() });
            return self.waits(replica, outdated);
        }
        let Some(choice) = choices.choose(&self.view, advised.and_then(Option::as_ref)) else { return };
        let new = new_group(want, &self.fit, replica, &choice.candidate);
        let key = (want.namespace.clone(), new.name.clone());
        if self.view.groups.contains_key(&key) {
            // The same plan, being deleted: its name is free once its agents let go.
            let holders = vec![format!("ShardGroup {}", new.name)];
            self.notes.push(Note::WaitingForRelease { replica, holders });
            return self.waits(replica, outdated);
        }
        self.notes.push(Note::Placed { replica, decision: choice.candidate.show() });
        let nodes = choice.candidate.ranks.iter().map(|rank| rank.node.as_str());
        let (domains, with) = Spread::around(&self.view, want, replica, |_| false).shared(nodes);
        if !with.is_empty() {
            let (key, apart) = (want.topology_key.clone(), choice.apart.clone());
            self.notes.push(Note::FailsTogether { replica, key, domains, with, apart });
        }
        for (old, old_ready) in outdated {
            if old_ready {
                self.placement.keep.push(old);
            } else {
                self.remove(&old, Removal::Replaced);
            }
        }
        self.view.to_mut().groups.insert(key, want.group(new.replica, new.plan.clone()));
        self.placement.create.push(new);
        self.found.push((replica, choice));
    }

    /// Whether fewer nodes will do once agents have let go of what was deleted, and of what a predecessor still holds
    /// that has lost a node. Cut over more of them it would stay so for as long as it lives.
    fn fewer_soon(&self, replica: i32, choices: &Choices<'_>, outdated: &[Named]) -> bool {
        let Self { view, want, fit, .. } = self;
        let leaves = |key: &Key| {
            let own = || outdated.iter().any(|(old, _)| old == key);
            view.groups.get(key).is_some_and(|group| group.deleting || (own() && broken(view, group)))
        };
        let passing =
            || view.nodes.values().any(|node| node.unreleased > 0) || view.groups.keys().any(leaves);
        choices.size() > 1
            && passing()
            && find(view, want, fit, replica, false, leaves).is_ok_and(|soon| soon.size() < choices.size())
    }

    /// It waits for memory that comes free by itself; a predecessor that has lost a node goes for it.
    fn is_patient(&mut self, replica: i32, outdated: Vec<Named>) {
        let of = |(key, _): &Named| self.view.groups.get(key).is_some_and(|group| broken(&self.view, group));
        let (broken, rest): (Vec<Named>, Vec<Named>) = outdated.into_iter().partition(of);
        for (key, _) in broken {
            self.notes.push(Note::DrainFirst { group: key.1.clone(), why: Drain::Broken });
            self.remove(&key, Removal::Drained);
        }
        self.notes.push(Note::WaitingForRelease { replica, holders: holders(&self.view) });
        self.waits(replica, rest);
    }

    /// There is none, or its predecessor goes first.
    fn makes_room(&mut self, replica: i32, outdated: Vec<Named>, refusal: Vec<Note>, goes_first: bool) {
        let (fit, want) = (self.fit.clone(), self.want);
        let view = &self.view;
        let gone = |key: &Key| view.groups.get(key).is_some_and(|group| group.deleting);
        if !goes_first && find(view, want, &fit, replica, false, gone).is_ok() {
            let holders = holders(view);
            self.notes.push(Note::WaitingForRelease { replica, holders });
            return self.waits(replica, outdated);
        }
        let drained = |key: &Key| gone(key) || outdated.iter().any(|(old, _)| old == key);
        // Memory that agents have not released may stay so: nothing is taken down for it.
        let after = find(view, want, &fit, replica, true, drained).ok().filter(|_| !outdated.is_empty());
        if let Some(after) = after {
            let ports = refusal.iter().any(|note| matches!(note, Note::PortsBusy { .. }));
            let why = match (goes_first, ports) {
                (true, _) => Drain::Asked,
                (false, true) => Drain::Ports,
                (false, false) => Drain::Memory,
            };
            return self.drains(replica, outdated, &after, why);
        }
        let outcome = preempt::preempt(view, want, &fit, replica, drained);
        let full = refusal.iter().filter_map(|note| match note {
            Note::Disk { lack: Lack::Room { node, .. } } => Some(node.clone()),
            _ => None,
        });
        let full = full.take(SHOWN).collect();
        let ports = refusal.iter().any(|note| matches!(note, Note::PortsTaken { .. }));
        self.notes.extend(refusal);
        let remedy = match outcome {
            Some(Outcome::Take(victims)) => return self.preempts(replica, outdated, victims),
            Some(Outcome::Ask(ask, note)) => {
                self.placement.asks.push(ask);
                Some(note)
            }
            Some(Outcome::Wait(note)) => Some(note),
            None => None,
        };
        let (needed, draft) = (fit.whole(), fit.draft().cloned().map(Box::new));
        let closed = closed(&self.view, want, needed.total());
        self.notes.push(Note::NothingFits { replica, needed, draft, closed, full, ports });
        // Last, because it is what will help.
        self.notes.extend(remedy);
        let kept = self.answering(&outdated).map(|key| Note::KeptOutdated { group: key.1.clone() });
        self.notes.extend(kept);
        self.waits(replica, outdated);
    }

    /// It fits once its predecessor is gone: one replica at a time, and its files first.
    fn drains(&mut self, replica: i32, outdated: Vec<Named>, after: &Choices<'_>, why: Drain) {
        if !self.placement.create.is_empty()
            || on_its_way(&self.view, self.want, &self.fit, &self.wanted, replica)
        {
            self.notes.push(Note::InTurn { replica });
            return self.waits(replica, outdated);
        }
        let nodes = after.ways().next().map(Way::nodes).unwrap_or_default();
        if answers(&outdated) && self.fetches(replica, nodes) {
            return self.waits(replica, outdated);
        }
        self.placement.waiting.push(replica);
        for (key, _) in &outdated {
            self.notes.push(Note::DrainFirst { group: key.1.clone(), why });
            self.remove(key, Removal::Drained);
        }
    }

    /// It fits once others are gone, and its files are there.
    fn preempts(&mut self, replica: i32, outdated: Vec<Named>, victims: Victims) {
        let Victims { groups, deployments, frees, nodes } = victims;
        if !self.fetches(replica, nodes) {
            let seen = &mut self.view.to_mut().groups;
            for key in &groups {
                seen.entry(key.clone()).and_modify(|group| group.deleting = true);
            }
            self.notes.push(Note::Preempts { replica, deployments, frees });
            self.placement.preempt.extend(groups);
        }
        self.waits(replica, outdated);
    }

    /// Whether some of these nodes lack the model's files, which then come first: nothing stops for a model that
    /// is not there yet.
    fn fetches(&mut self, replica: i32, nodes: Vec<String>) -> bool {
        let Self { view, want, .. } = self;
        let Some(disks) = &view.disks else { return false };
        // Rank 0 is the first.
        let draft = want.draft.iter().zip(nodes.first()).map(|(draft, node)| (&draft.name, node));
        let files = nodes.iter().map(|node| (&want.model, node)).chain(draft);
        let lacking = files.filter(|(model, node)| !disks.holds(&want.namespace, model, node));
        let lacking: Vec<(String, String)> =
            lacking.map(|(model, node)| (model.clone(), node.clone())).collect();
        if lacking.is_empty() {
            return false;
        }
        let lacks = |node: &String| lacking.iter().any(|(_, lacks)| lacks == node);
        let nodes = nodes.iter().filter(|node| lacks(node)).cloned().collect();
        self.notes.push(Note::FetchFirst { replica, nodes });
        self.placement.prefetch.extend(lacking);
        true
    }

    /// It waits, and what runs in its place goes on. Of several that were asked for one after the other, and are not
    /// any more, one that answers will do.
    fn waits(&mut self, replica: i32, outdated: Vec<Named>) {
        self.placement.waiting.push(replica);
        let answering = self.answering(&outdated).cloned();
        for (key, _) in outdated {
            if answering.as_ref().is_none_or(|one| *one == key) {
                self.placement.keep.push(key);
            } else {
                self.remove(&key, Removal::Replaced);
            }
        }
    }

    /// The first of these groups that answers.
    fn answering<'n>(&self, groups: &'n [Named]) -> Option<&'n Key> {
        let answers = |(key, ready): &&Named| {
            *ready && self.view.groups.get(key).is_some_and(|group| !broken(&self.view, group))
        };
        groups.iter().find(answers).map(|(key, _)| key)
    }

    /// What keeps a replica that answers from being replaced: its tier wants that approved. One that cannot stay
    /// where it is needs nobody's word.
    fn unapproved(&mut self, replica: i32, outdated: &[Named]) -> Option<Note> {
        let Self { view, want, .. } = self;
        let tier = view.tiers.get(want.tier.as_ref()?)?;
        let answers = |(key, ready): &Named| {
            *ready && view.groups.get(key).is_some_and(|group| may_stay(view, want, group))
        };
        if !tier.approvals.contains(&Action::Rollout) || !outdated.iter().any(answers) {
            return None;
        }
        let hash = preempt::hash(want, Action::Rollout, &[]);
        if want.approved.contains(&hash) {
            return None;
        }
        if want.denied.contains(&hash) {
            return Some(Note::Denied { replica, hash });
        }
        let note = Note::AwaitsApproval { replica, hash: hash.clone(), deployments: Vec::new(), frees: 0 };
        let message = note.to_string();
        self.placement.asks.push(Ask { action: Action::Rollout, hash, affects: Vec::new(), message });
        Some(note)
    }

    fn remove(&mut self, key: &Key, why: Removal) {
        if let Some(group) = self.view.to_mut().groups.get_mut(key) {
            // It keeps its memory until its agents say otherwise; only a later view shows that free.
            group.deleting = true;
        }
        self.placement.delete.push(OldGroup { name: key.1.clone(), why });
    }
}

/// Whether one of them answers.
fn answers(groups: &[Named]) -> bool {
    groups.iter().any(|(_, ready)| *ready)
}

/// Nodes it may have that would hold so much if nothing else ran there, and take no work.
fn closed(view: &Snapshot, want: &ValidDeployment, needed: u64) -> Vec<String> {
    let holds = view.nodes.iter().filter(|(name, node)| {
        let shut = node.availability != Availability::Open && node.serving_limit >= needed;
        shut && want.allows(std::iter::once(name.as_str()))
    });
    holds.take(SHOWN).map(|(name, _)| name.clone()).collect()
}

fn new_group(want: &ValidDeployment, fit: &Fit<'_>, replica: i32, candidate: &Candidate) -> NewGroup {
    let mut plan = candidate.plan(fit);
    plan.hash = plan_hash(&want.model, &plan);
    NewGroup { name: names::shard_group(&want.name, replica, &plan.hash), replica, plan }
}

/// Who holds memory that comes free by itself, or should.
fn holders(view: &Snapshot) -> Vec<String> {
    let leaving = view.groups.iter().filter(|(_, group)| group.deleting);
    let groups = leaving.map(|(key, group)| format!("ShardGroup {} {}", key.1, show(group.reserved_bytes())));
    let nodes = view
        .nodes
        .iter()
        .filter(|(_, node)| node.unreleased > 0 && node.availability == Availability::Open)
        .map(|(name, node)| format!("node {name} {}", show(node.unreleased)));
    groups.chain(nodes).collect()
}
