//! Copy planning: which nodes hold which model's files in advance, and which files are evicted when disk
//! space is short. Replicas have precedence: the files they read stay, and the files they wait for get space.
//! Not here: the download and the free space on a disk, which are left to the node's agent.
//!
//! ```text
//! files of replicas, pinned ones, ready ones of `Always` ─▶ protected ──┐
//! files replicas wait for ─▶ copies being fetched ─▶ new copies ────────┴─▶ within the limit? ─no─▶ Shortage
//!                                                                                │ yes
//!            everything else on that node is evicted, lowest priority first, until all of that fits
//! ```
//!
//! Whether files fit depends only on files that may not be evicted. So no eviction is in vain, and an
//! eviction for one plan changes no result of the next.

mod disk_budget;
mod disk_outlook;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;

use self::disk_budget::{DiskBudget, FileSet};
pub use self::disk_outlook::DiskOutlook;
pub use crate::disk_state::{DiskState, files_id, limit};
use crate::group_info::ObjectKey;
use crate::node_info::Availability;
pub use crate::shortage::Shortage;

/// Input of the plan.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    /// Disks of nodes, by node name.
    pub nodes: BTreeMap<String, NodeStorage>,
    /// Models whose headers were read, and those that have copies.
    pub models: BTreeMap<ObjectKey, ModelFiles>,
    /// Files on nodes, present or being fetched; headers alone do not count.
    pub copies: Vec<NodeCopy>,
    /// Which model's files ranks read or will read, and on which node.
    pub uses: BTreeSet<(ObjectKey, String)>,
}

/// The disk of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeStorage {
    /// Bytes that all models together may take: what they use plus what is free, minus the reserve. `None`
    /// until the agent has measured the disk.
    pub limit: Option<u64>,
    /// Whether the node takes new work.
    pub availability: Availability,
}

/// A model.
#[derive(Clone, Debug, Default)]
pub struct ModelFiles {
    /// Identity of its bytes: two Models of one source share them.
    pub files: String,
    /// Bytes of all files; 0 while unknown.
    pub bytes: u64,
    /// Eviction priority: higher ones are evicted later.
    pub priority: i32,
    /// Its preload, if any.
    pub preload: Option<PreloadRule>,
    /// Nodes that its deployments may use; empty if they name none.
    pub runs_on: BTreeSet<String>,
}

/// A preload: files wanted before a deployment needs them.
#[derive(Clone, Debug, Default)]
pub struct PreloadRule {
    /// The nodes of its pool; `None` for all.
    pub nodes: Option<Arc<BTreeSet<String>>>,
    /// Minimum number of nodes; `None` for every one.
    pub min_nodes: Option<u32>,
    /// Whether no copy of it is ever evicted.
    pub pinned: bool,
}

/// A model's files on a node.
#[derive(Clone, Debug, Default)]
pub struct NodeCopy {
    /// The model.
    pub model: ObjectKey,
    /// The node.
    pub node: String,
    /// Bytes of the complete copy; 0 while unknown.
    pub bytes: u64,
    /// Bytes present.
    pub done: u64,
    /// Whether all bytes are present and verified.
    pub ready: bool,
    /// When an engine last had the files open, else when they were requested.
    pub last_used: Option<Timestamp>,
    /// Whether it is never evicted.
    pub pinned: bool,
}

/// The plan: files to fetch and to evict.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CopyPlan {
    /// Files to fetch: model and node.
    pub create: BTreeSet<(ObjectKey, String)>,
    /// Copies to evict.
    pub remove: Vec<CopyRemoval>,
    /// The state of every preload.
    pub preloads: BTreeMap<ObjectKey, PreloadOutcome>,
}

/// A copy to evict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyRemoval {
    /// Its model.
    pub model: ObjectKey,
    /// Its node.
    pub node: String,
    /// Bytes it takes, together with other copies of the same files.
    pub bytes: u64,
    /// Models whose files get the space.
    pub beneficiaries: BTreeSet<ObjectKey>,
}

/// The state of a preload.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PreloadOutcome {
    /// Number of nodes that have to hold the files.
    pub desired_nodes: u32,
    /// Nodes that hold the files or fetch them, and whether every byte is present.
    pub holders: BTreeMap<String, bool>,
    /// Why the other nodes do not.
    pub shortages: Vec<Shortage>,
}

/// Computes the plan.
pub fn plan(inventory: &Inventory) -> CopyPlan {
    let mut choice = CopyPlanner { inventory, budgets: disk_budgets(inventory), plan: CopyPlan::default() };
    let order = by_priority(inventory);
    for (key, preload) in &order {
        choice.protect_preloaded(key, preload);
    }
    choice.reserve_for_replicas();
    for (key, preload) in &order {
        choice.reserve_in_progress(key, preload);
    }
    for (key, preload) in &order {
        choice.add_copies(key, preload);
    }
    let CopyPlanner { budgets: rooms, mut plan, .. } = choice;
    for (node, room) in &rooms {
        for unit in room.victims() {
            let removal = |model: &ObjectKey| CopyRemoval {
                model: model.clone(),
                node: (*node).clone(),
                bytes: unit.bytes,
                beneficiaries: room.beneficiaries().clone(),
            };
            plan.remove.extend(unit.models.iter().map(removal));
        }
    }
    plan
}

/// Preloads, the highest priority first.
fn by_priority(inventory: &Inventory) -> Vec<(&ObjectKey, &PreloadRule)> {
    let preloads = inventory.models.iter().filter(|(_, model)| model.bytes > 0);
    let mut order: Vec<_> =
        preloads.filter_map(|(key, model)| Some((key, model.preload.as_ref()?, model.priority))).collect();
    order.sort_by_key(|(key, preload, priority)| (!preload.pinned, Reverse(*priority), *key));
    order.into_iter().map(|(key, preload, _)| (key, preload)).collect()
}

fn disk_budgets(inventory: &Inventory) -> BTreeMap<&String, DiskBudget> {
    let mut rooms: BTreeMap<&String, DiskBudget> =
        inventory.nodes.iter().map(|(name, disk)| (name, DiskBudget::new(disk.limit))).collect();
    let read =
        inventory.uses.iter().filter_map(|(key, node)| Some((node.as_str(), inventory.models.get(key)?)));
    let read: BTreeSet<(&str, &str)> = read.map(|(node, model)| (node, model.files.as_str())).collect();
    for copy in &inventory.copies {
        let Some(room) = rooms.get_mut(&copy.node) else { continue };
        let model = inventory.models.get(&copy.model);
        let known = model.map_or(0, |model| model.bytes);
        let pinned = model.is_some_and(|model| model.preload.as_ref().is_some_and(|preload| preload.pinned));
        let unit = FileSet {
            bytes: if copy.bytes > 0 { copy.bytes } else { known },
            done: copy.done,
            ready: copy.ready,
            last_used: copy.last_used,
            priority: model.map_or(i32::MAX, |model| model.priority),
            models: [copy.model.clone()].into(),
        };
        // Of a model that nothing is known of, no copy is evicted.
        let stays = copy.pinned || pinned || model.is_none();
        let (namespace, name) = &copy.model;
        let files = model.map_or_else(|| format!("{namespace}/{name}"), |model| model.files.clone());
        let stays = stays || read.contains(&(copy.node.as_str(), files.as_str()));
        room.add(files, unit, stays);
    }
    rooms
}

/// State of the planning.
struct CopyPlanner<'a> {
    inventory: &'a Inventory,
    budgets: BTreeMap<&'a String, DiskBudget>,
    plan: CopyPlan,
}

impl<'a> CopyPlanner<'a> {
    /// Protects complete copies that a preload counts, but no more than it asks for.
    fn protect_preloaded(&mut self, key: &'a ObjectKey, preload: &PreloadRule) {
        let desired = self.desired_nodes(key, preload);
        let mut preloaded = PreloadOutcome { desired_nodes: desired, ..PreloadOutcome::default() };
        for node in self.holders(key, preload) {
            let files = &self.inventory.models[key].files;
            let Some(room) = self.budgets.get_mut(node) else { continue };
            if preloaded.holders.len() < desired as usize && room.is_ready(files) {
                room.protect(files);
                preloaded.holders.insert(node.clone(), true);
            }
        }
        self.plan.preloads.insert(key.clone(), preloaded);
    }

    /// Reserves space for files that ranks wait for.
    fn reserve_for_replicas(&mut self) {
        let inventory = self.inventory;
        let mut uses: Vec<_> = inventory
            .uses
            .iter()
            .filter_map(|(key, node)| Some((inventory.models.get(key)?, key, node)))
            .filter(|(model, _, node)| model.bytes > 0 && self.is_responsive(node))
            .collect();
        uses.sort_by_key(|(model, key, node)| (Reverse(model.priority), *key, *node));
        for (model, key, node) in uses {
            if let Some(room) = self.budgets.get_mut(node) {
                // A shortage is reported by the agent, which refuses to start, with the numbers.
                room.reserve(node, key, &model.files, model.bytes).ok();
            }
        }
    }

    /// Reserves space for copies that are already being fetched.
    fn reserve_in_progress(&mut self, key: &'a ObjectKey, preload: &PreloadRule) {
        for node in self.holders(key, preload) {
            self.try_reserve(key, node);
        }
    }

    /// Adds new copies, on the best nodes.
    fn add_copies(&mut self, key: &'a ObjectKey, preload: &PreloadRule) {
        let inventory = self.inventory;
        let model = &inventory.models[key];
        let held: BTreeSet<&String> = self.copies(key).map(|copy| &copy.node).collect();
        let open = |(name, disk): &(&String, &NodeStorage)| {
            disk.availability == Availability::Open && preload.allows(name) && !held.contains(*name)
        };
        let mut nodes: Vec<&String> = inventory.nodes.iter().filter(open).map(|(name, _)| name).collect();
        nodes.sort_by_cached_key(|name| {
            let room = &self.budgets[*name];
            let free = room.free();
            (
                !model.runs_on.contains(*name),
                Reverse(room.done(&model.files)),
                free < model.bytes,
                Reverse(free),
                (*name).clone(),
            )
        });
        for node in nodes {
            if self.try_reserve(key, node) {
                self.plan.create.insert((key.clone(), node.clone()));
            }
        }
        let Some(preloaded) = self.plan.preloads.get_mut(key) else { return };
        let there = u32::try_from(preloaded.holders.len() + preloaded.shortages.len()).unwrap_or(u32::MAX);
        if preloaded.holders.len() >= preloaded.desired_nodes as usize {
            preloaded.shortages.clear();
        } else if there < preloaded.desired_nodes {
            preloaded.shortages.push(Shortage::Nodes { desired: preloaded.desired_nodes, available: there });
        }
    }

    /// Reserves space on a node for a preload that still needs nodes; returns whether that was possible.
    fn try_reserve(&mut self, key: &ObjectKey, node: &String) -> bool {
        let model = &self.inventory.models[key];
        let answers = self.is_responsive(node);
        let (Some(preloaded), Some(room)) = (self.plan.preloads.get_mut(key), self.budgets.get_mut(node))
        else {
            return false;
        };
        if preloaded.holders.len() >= preloaded.desired_nodes as usize || preloaded.holders.contains_key(node)
        {
            return false;
        }
        // A node that is unreachable for a moment continues once it is back; nothing is evicted there
        // meanwhile.
        let taken = if answers { room.reserve(node, key, &model.files, model.bytes) } else { Ok(()) };
        match taken {
            Ok(()) => {
                preloaded.holders.insert(node.clone(), room.is_ready(&model.files));
                true
            }
            Err(lack) => {
                preloaded.shortages.push(lack);
                false
            }
        }
    }

    /// How many nodes have to hold a model.
    fn desired_nodes(&self, key: &ObjectKey, preload: &PreloadRule) -> u32 {
        let held: BTreeSet<&String> = self.holders(key, preload).into_iter().collect();
        let open = self.inventory.nodes.iter().filter(|(name, disk)| {
            preload.allows(name) && (disk.availability == Availability::Open || held.contains(name))
        });
        preload.min_nodes.unwrap_or_else(|| u32::try_from(open.count()).unwrap_or(u32::MAX))
    }

    /// Nodes with copies that count for a preload, the most certain first. Nodes that are draining, or
    /// unreachable for long, do not count.
    fn holders(&self, key: &ObjectKey, preload: &PreloadRule) -> Vec<&'a String> {
        let model = &self.inventory.models[key];
        let counts = |node: &String| {
            preload.allows(node)
                && self.inventory.nodes.get(node).is_some_and(|disk| {
                    !matches!(disk.availability, Availability::Lost | Availability::Draining)
                })
        };
        let mut copies: Vec<&NodeCopy> = self.copies(key).filter(|copy| counts(&copy.node)).collect();
        copies.sort_by_key(|copy| {
            let used = self.inventory.uses.contains(&(key.clone(), copy.node.clone()));
            (!used, !copy.ready, !model.runs_on.contains(&copy.node), Reverse(copy.done), &copy.node)
        });
        copies.into_iter().map(|copy| &copy.node).collect()
    }

    fn copies(&self, key: &ObjectKey) -> impl Iterator<Item = &'a NodeCopy> {
        self.inventory.copies.iter().filter(move |copy| copy.model == *key)
    }

    /// Whether a node's agent is responsive.
    fn is_responsive(&self, node: &str) -> bool {
        self.inventory
            .nodes
            .get(node)
            .is_some_and(|disk| !matches!(disk.availability, Availability::Unreachable | Availability::Lost))
    }
}

impl PreloadRule {
    fn allows(&self, node: &str) -> bool {
        self.nodes.as_ref().is_none_or(|nodes| nodes.contains(node))
    }
}

#[cfg(test)]
mod tests;
