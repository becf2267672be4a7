//! Which nodes hold which model's files ahead of need, and what goes where room is short. Replicas come
//! first: what they read stays, what they wait for gets its room. Not a download manager: how bytes come to
//! a node, and whether its disk really has the room, is its agent's business.
//!
//! ```text
//! files of replicas, pinned ones, ready ones of `Always` ─▶ kept ──┐
//! files replicas wait for ─▶ copies on their way ─▶ new copies ────┴─▶ within the node's limit? ─no─▶ Lack
//!                                                                           │ yes
//!            everything else on that node goes, least important first, until all of that fits
//! ```
//!
//! Whether something fits is asked of what may not go alone, so nothing is ever removed in vain, and what
//! was removed for one plan changes no answer of the next.

pub(crate) mod disks;
mod lack;
mod room;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;

pub use self::disks::{Disks, Outlook, files, limit};
pub use self::lack::Lack;
use self::room::{Room, Unit};
use crate::snapshot::{Availability, Key};

/// Everything the choice depends on.
#[derive(Clone, Debug, Default)]
pub struct Stock {
    /// Machines, by name.
    pub nodes: BTreeMap<String, Disk>,
    /// Models whose headers were read, and those that have copies.
    pub models: BTreeMap<Key, Model>,
    /// Files on nodes, there or on their way; headers alone are none.
    pub copies: Vec<Copy>,
    /// Which model's files ranks read or will read, and on which node.
    pub uses: BTreeSet<(Key, String)>,
}

/// The disk of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    /// Bytes all models together may take: what they have and what is free, less the reserve. Absent until
    /// its agent has measured it.
    pub limit: Option<u64>,
    /// Whether new work may come.
    pub availability: Availability,
}

/// A model.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// Names its bytes: two Models of one source share them.
    pub files: String,
    /// Bytes of all files; 0 while unknown.
    pub bytes: u64,
    /// The larger, the later its files go.
    pub priority: i32,
    /// What is wanted ahead of need.
    pub preload: Option<Preload>,
    /// Nodes its deployments may use; empty when they say nothing.
    pub runs_on: BTreeSet<String>,
}

/// What is wanted ahead of need.
#[derive(Clone, Debug, Default)]
pub struct Preload {
    /// The nodes of its pool; absent for all.
    pub nodes: Option<Arc<BTreeSet<String>>>,
    /// How many nodes at least; absent for every one.
    pub least: Option<u32>,
    /// Whether no copy of it ever goes.
    pub pinned: bool,
}

/// A model's files on a node.
#[derive(Clone, Debug, Default)]
pub struct Copy {
    /// The model.
    pub model: Key,
    /// The node.
    pub node: String,
    /// Bytes when it is whole; 0 while unknown.
    pub bytes: u64,
    /// Bytes that are there.
    pub done: u64,
    /// Whether all are there and verified.
    pub ready: bool,
    /// When an engine last had them open, else when they were asked for.
    pub last_used: Option<Timestamp>,
    /// Whether it never goes.
    pub pinned: bool,
}

/// What to do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Files to ask for: model and node.
    pub create: BTreeSet<(Key, String)>,
    /// Copies that make room.
    pub remove: Vec<Removal>,
    /// What becomes of every preload.
    pub preloads: BTreeMap<Key, Preloaded>,
}

/// A copy that makes room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removal {
    /// Its model.
    pub model: Key,
    /// Its node.
    pub node: String,
    /// Bytes it takes, together with other copies of the same files.
    pub bytes: u64,
    /// Whose files get the room.
    pub wanted: BTreeSet<Key>,
}

/// What becomes of a preload.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Preloaded {
    /// Nodes that are to hold the files.
    pub wanted: u32,
    /// Nodes that hold them or are asked to, and whether every byte is there.
    pub held: BTreeMap<String, bool>,
    /// What keeps the others from it.
    pub lacks: Vec<Lack>,
}

/// Chooses.
pub fn plan(stock: &Stock) -> Plan {
    let mut choice = Choice { stock, rooms: rooms(stock), plan: Plan::default() };
    let order = order(stock);
    for (key, preload) in &order {
        choice.keep(key, preload);
    }
    choice.replicas();
    for (key, preload) in &order {
        choice.go_on(key, preload);
    }
    for (key, preload) in &order {
        choice.begin(key, preload);
    }
    let Choice { rooms, mut plan, .. } = choice;
    for (node, room) in &rooms {
        for unit in room.victims() {
            let removal = |model: &Key| Removal {
                model: model.clone(),
                node: (*node).clone(),
                bytes: unit.bytes,
                wanted: room.wanted().clone(),
            };
            plan.remove.extend(unit.models.iter().map(removal));
        }
    }
    plan
}

/// Preloads, those first that matter most.
fn order(stock: &Stock) -> Vec<(&Key, &Preload)> {
    let preloads = stock.models.iter().filter(|(_, model)| model.bytes > 0);
    let mut order: Vec<_> =
        preloads.filter_map(|(key, model)| Some((key, model.preload.as_ref()?, model.priority))).collect();
    order.sort_by_key(|(key, preload, priority)| (!preload.pinned, Reverse(*priority), *key));
    order.into_iter().map(|(key, preload, _)| (key, preload)).collect()
}

fn rooms(stock: &Stock) -> BTreeMap<&String, Room> {
    let mut rooms: BTreeMap<&String, Room> =
        stock.nodes.iter().map(|(name, disk)| (name, Room::new(disk.limit))).collect();
    let read = stock.uses.iter().filter_map(|(key, node)| Some((node.as_str(), stock.models.get(key)?)));
    let read: BTreeSet<(&str, &str)> = read.map(|(node, model)| (node, model.files.as_str())).collect();
    for copy in &stock.copies {
        let Some(room) = rooms.get_mut(&copy.node) else { continue };
        let model = stock.models.get(&copy.model);
        let known = model.map_or(0, |model| model.bytes);
        let pinned = model.is_some_and(|model| model.preload.as_ref().is_some_and(|preload| preload.pinned));
        let unit = Unit {
            bytes: if copy.bytes > 0 { copy.bytes } else { known },
            done: copy.done,
            ready: copy.ready,
            last_used: copy.last_used,
            priority: model.map_or(i32::MAX, |model| model.priority),
            models: [copy.model.clone()].into(),
        };
        // Of a model nobody can read nothing goes: what its owner wants of it is not known.
        let stays = copy.pinned || pinned || model.is_none();
        let (namespace, name) = &copy.model;
        let files = model.map_or_else(|| format!("{namespace}/{name}"), |model| model.files.clone());
        let stays = stays || read.contains(&(copy.node.as_str(), files.as_str()));
        room.add(files, unit, stays);
    }
    rooms
}

/// A choice in the making.
struct Choice<'a> {
    stock: &'a Stock,
    rooms: BTreeMap<&'a String, Room>,
    plan: Plan,
}

impl<'a> Choice<'a> {
    /// Whole copies that a preload counts on stay, and no more of them than it asks for.
    fn keep(&mut self, key: &'a Key, preload: &Preload) {
        let wanted = self.wanted(key, preload);
        let mut preloaded = Preloaded { wanted, ..Preloaded::default() };
        for node in self.held(key, preload) {
            let files = &self.stock.models[key].files;
            let Some(room) = self.rooms.get_mut(node) else { continue };
            if preloaded.held.len() < wanted as usize && room.is_ready(files) {
                room.keep(files);
                preloaded.held.insert(node.clone(), true);
            }
        }
        self.plan.preloads.insert(key.clone(), preloaded);
    }

    /// What ranks wait for.
    fn replicas(&mut self) {
        let stock = self.stock;
        let mut uses: Vec<_> = stock
            .uses
            .iter()
            .filter_map(|(key, node)| Some((stock.models.get(key)?, key, node)))
            .filter(|(model, _, node)| model.bytes > 0 && self.answers(node))
            .collect();
        uses.sort_by_key(|(model, key, node)| (Reverse(model.priority), *key, *node));
        for (model, key, node) in uses {
            if let Some(room) = self.rooms.get_mut(node) {
                // What lacks room says so itself: its agent refuses to begin, with the numbers.
                room.take(node, key, &model.files, model.bytes).ok();
            }
        }
    }

    /// Copies that are on their way already.
    fn go_on(&mut self, key: &'a Key, preload: &Preload) {
        for node in self.held(key, preload) {
            self.try_node(key, node);
        }
    }

    /// New copies, where they are worth most.
    fn begin(&mut self, key: &'a Key, preload: &Preload) {
        let stock = self.stock;
        let model = &stock.models[key];
        let held: BTreeSet<&String> = self.copies(key).map(|copy| &copy.node).collect();
        let open = |(name, disk): &(&String, &Disk)| {
            disk.availability == Availability::Open && preload.takes(name) && !held.contains(*name)
        };
        let mut nodes: Vec<&String> = stock.nodes.iter().filter(open).map(|(name, _)| name).collect();
        nodes.sort_by_cached_key(|name| {
            let room = &self.rooms[*name];
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
            if self.try_node(key, node) {
                self.plan.create.insert((key.clone(), node.clone()));
            }
        }
        let Some(preloaded) = self.plan.preloads.get_mut(key) else { return };
        let there = u32::try_from(preloaded.held.len() + preloaded.lacks.len()).unwrap_or(u32::MAX);
        if preloaded.held.len() >= preloaded.wanted as usize {
            preloaded.lacks.clear();
        } else if there < preloaded.wanted {
            preloaded.lacks.push(Lack::Nodes { wanted: preloaded.wanted, there });
        }
    }

    /// Promises a node's room to a preload that still lacks nodes; whether that was possible.
    fn try_node(&mut self, key: &Key, node: &String) -> bool {
        let model = &self.stock.models[key];
        let answers = self.answers(node);
        let (Some(preloaded), Some(room)) = (self.plan.preloads.get_mut(key), self.rooms.get_mut(node))
        else {
            return false;
        };
        if preloaded.held.len() >= preloaded.wanted as usize || preloaded.held.contains_key(node) {
            return false;
        }
        // A node that is silent for a moment goes on when it is back, and nothing is removed there meanwhile.
        let taken = if answers { room.take(node, key, &model.files, model.bytes) } else { Ok(()) };
        match taken {
            Ok(()) => {
                preloaded.held.insert(node.clone(), room.is_ready(&model.files));
                true
            }
            Err(lack) => {
                preloaded.lacks.push(lack);
                false
            }
        }
    }

    /// How many nodes are to hold a model.
    fn wanted(&self, key: &Key, preload: &Preload) -> u32 {
        let held: BTreeSet<&String> = self.held(key, preload).into_iter().collect();
        let open = self.stock.nodes.iter().filter(|(name, disk)| {
            preload.takes(name) && (disk.availability == Availability::Open || held.contains(name))
        });
        preload.least.unwrap_or_else(|| u32::try_from(open.count()).unwrap_or(u32::MAX))
    }

    /// Nodes a preload counts on that have copies, the surest first. One that is to be emptied, or that has
    /// been silent for long, is none of them.
    fn held(&self, key: &Key, preload: &Preload) -> Vec<&'a String> {
        let model = &self.stock.models[key];
        let counts = |node: &String| {
            preload.takes(node)
                && self.stock.nodes.get(node).is_some_and(|disk| {
                    !matches!(disk.availability, Availability::Lost | Availability::Draining)
                })
        };
        let mut copies: Vec<&Copy> = self.copies(key).filter(|copy| counts(&copy.node)).collect();
        copies.sort_by_key(|copy| {
            let used = self.stock.uses.contains(&(key.clone(), copy.node.clone()));
            (!used, !copy.ready, !model.runs_on.contains(&copy.node), Reverse(copy.done), &copy.node)
        });
        copies.into_iter().map(|copy| &copy.node).collect()
    }

    fn copies(&self, key: &Key) -> impl Iterator<Item = &'a Copy> {
        self.stock.copies.iter().filter(move |copy| copy.model == *key)
    }

    /// Whether a node's agent does what it is asked.
    fn answers(&self, node: &str) -> bool {
        self.stock
            .nodes
            .get(node)
            .is_some_and(|disk| !matches!(disk.availability, Availability::Unreachable | Availability::Lost))
    }
}

impl Preload {
    fn takes(&self, node: &str) -> bool {
        self.nodes.as_ref().is_none_or(|nodes| nodes.contains(node))
    }
}

#[cfg(test)]
mod tests;
