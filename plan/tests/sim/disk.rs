//! Disks of a story's machines, and the agents' use of them: they fetch wanted files and evict others for
//! them, never pinned files or those that ranks read. A story without disks has none.

use std::collections::BTreeSet;
use std::sync::Arc;

use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{
    CopyMode, ModelCopy, ModelCopySpec, ModelCopyStatus, NamespacedReference, Retention, names,
};

use super::words::LineError;
use super::world::{SPACE, World};

/// Puts all of a model's files on a node.
pub fn put(world: &mut World, model: &str, node: &str, pinned: bool) -> Result<(), LineError> {
    world.node(node)?;
    let bytes = bytes(world, model);
    if bytes == 0 {
        return Err(format!("there is no model {model} whose size is known"));
    }
    let spec = ModelCopySpec {
        model_ref: NamespacedReference { namespace: SPACE.to_owned(), name: model.to_owned() },
        node_name: node.to_owned(),
        want: CopyMode::Files,
        retention: pinned.then_some(Retention { pinned, ..Retention::default() }),
        ..ModelCopySpec::default()
    };
    let mut copy = ModelCopy::new(&names::model_copy(SPACE, model, node), spec);
    let mut status = ModelCopyStatus { bytes_done: bytes, bytes_total: bytes, ..ModelCopyStatus::default() };
    conditions::set(&mut status.conditions, Type::Ready, true, Reason::Settled, "", None, world.now);
    copy.status = Some(status);
    let copies = world.cluster.copies.get_or_insert_default();
    copies.retain(|other| other.metadata.name != copy.metadata.name);
    copies.push(Arc::new(copy));
    Ok(())
}

/// Whether a node has all of a model's files; true if the story has no disks.
pub fn holds(world: &World, model: &str, node: &str) -> bool {
    let Some(copies) = &world.cluster.copies else { return true };
    copies.iter().any(|copy| copy.spec.node_name == node && copy.spec.model_ref.name == model)
}

/// Agents fetch the files that ranks and the operator wait for; returns whether any did.
pub fn fetch(world: &mut World) -> bool {
    if world.cluster.copies.is_none() {
        return false;
    }
    let mut expected = read(world);
    expected.extend(world.fetching.iter().cloned());
    let mut changed = false;
    for (model, node) in &expected {
        if holds(world, model, node) || !world.is_reachable(node) {
            continue;
        }
        while !room(world, model, node) {
            let idle = |copy: &Arc<ModelCopy>| {
                let pinned = copy.spec.retention.is_some_and(|retention| retention.pinned);
                let of = (copy.spec.model_ref.name.clone(), copy.spec.node_name.clone());
                of.1 == *node && !pinned && !expected.contains(&of)
            };
            let copies = world.cluster.copies.get_or_insert_default();
            let Some(goes) = copies.iter().position(idle) else { break };
            copies.remove(goes);
        }
        if room(world, model, node) {
            changed |= put(world, model, node, false).is_ok();
        }
    }
    changed
}

/// Files that keep a model's from ever fitting on a node: pinned ones and those of other groups.
pub fn never_fits(world: &World, model: &str, node: &str) -> bool {
    let Some(limit) = world.machines.get(node).and_then(|machine| machine.disk) else { return false };
    let copies = world.cluster.copies.iter().flatten();
    let pinned = copies.filter(|copy| {
        copy.spec.node_name == node && copy.spec.retention.is_some_and(|retention| retention.pinned)
    });
    let living = world.living();
    let read = living.iter().flat_map(|group| group.spec.plan.files(&group.spec.model_ref.name));
    let mut models: BTreeSet<String> = pinned.map(|copy| copy.spec.model_ref.name.clone()).collect();
    models.extend(read.filter(|(_, other)| *other == node).map(|(model, _)| model.to_owned()));
    models.insert(model.to_owned());
    models.iter().map(|model| bytes(world, model)).sum::<u64>() > limit
}

/// Files that ranks read or wait for, and their nodes.
fn read(world: &World) -> BTreeSet<(String, String)> {
    let groups = world.cluster.groups.iter();
    let of = groups.flat_map(|group| {
        let files = group.spec.plan.files(&group.spec.model_ref.name);
        files.map(|(model, node)| (model.to_owned(), node.to_owned()))
    });
    of.collect()
}

fn room(world: &World, model: &str, node: &str) -> bool {
    let Some(limit) = world.machines.get(node).and_then(|machine| machine.disk) else { return true };
    let copies = world.cluster.copies.iter().flatten().filter(|copy| copy.spec.node_name == node);
    let held: u64 = copies.filter_map(|copy| Some(copy.status.as_ref()?.bytes_total)).sum();
    held + bytes(world, model) <= limit
}

fn bytes(world: &World, model: &str) -> u64 {
    let found = world.cluster.models.iter().find(|it| it.metadata.name.as_deref() == Some(model));
    let shape = found.and_then(|model| model.status.as_ref()?.shape.as_ref());
    shape.map_or(0, |shape| shape.total_bytes())
}
