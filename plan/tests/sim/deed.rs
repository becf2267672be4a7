//! What a single step does to the world. Steps that take turns of the operator are the story's.

use std::collections::BTreeSet;

use russet_crds::Sharding;

use super::agent;
use super::disk;
use super::script::Step;
use super::wish;
use super::words::Wrong;
use super::world::World;

/// Does a step; `false` where it is none that changes the world by itself.
pub fn perform(world: &mut World, step: &Step) -> Result<bool, Wrong> {
    match step {
        Step::Node(machine) => world.add(machine.clone())?,
        Step::Cable(cable) => {
            for end in &cable.ends {
                world.node(&end.node)?;
            }
            world.cables.push(cable.clone());
            world.relink();
        }
        Step::Pool(name, spec) => world.pool(name, spec.clone()),
        Step::Strategy(name, fields) => {
            let sharding = wish::split(Sharding::default(), &mut fields.clone())?;
            world.strategy(name, sharding);
        }
        Step::Tier(name, spec) => world.tier(name, (**spec).clone()),
        Step::Request(name, waiting) => world.request(name, *waiting)?,
        Step::Answer(name, decision) => world.answer(name, *decision)?,
        Step::Copy(model, node, pinned) => disk::put(world, model, node, *pinned)?,
        Step::Model(name, shape) => world.model(name, shape.clone()),
        Step::Deploy(name, fields) => {
            let bare = russet_crds::ModelDeploymentSpec { replicas: 1, ..Default::default() };
            world.ask(name, wish::change(bare, fields.clone())?);
        }
        Step::Edit(name, fields) => {
            let spec = wish::change(world.spec(name)?, fields.clone())?;
            world.ask(name, spec);
        }
        Step::Delete(name) => world.forget(name)?,
        Step::Schedule(node, scheduling) => world.schedule(node, *scheduling)?,
        Step::Lose(node) => world.reach(node, false)?,
        Step::Back(node) => world.reach(node, true)?,
        Step::Leave(node) => world.dismiss(node)?,
        Step::Cut(a, b, at) => plug(world, a, b, at.as_deref(), false)?,
        Step::Join(a, b) => plug(world, a, b, None, true)?,
        Step::Rdma(node, on) => {
            machine(world, node, |machine| machine.rdma = *on)?;
            world.relink();
        }
        Step::Skew(node, build) => {
            machine(world, node, |machine| machine.build = build.clone())?;
            world.status(node)?.engine_build = Some(build.clone());
        }
        Step::Label(node, labels) => {
            world.node(node)?.metadata.labels.get_or_insert_default().extend(labels.iter().cloned());
        }
        Step::Limit(node, bytes) => {
            machine(world, node, |machine| machine.limit = *bytes)?;
            world.status(node)?.memory.get_or_insert_default().serving_limit_bytes = *bytes;
        }
        Step::Refuse(node) => {
            world.node(node)?;
            world.refusing.insert(node.clone());
        }
        Step::Release(None) => agent::let_go(world),
        Step::Release(Some(node)) => {
            world.node(node)?;
            world.refusing.remove(node);
        }
        Step::Ready(name) => {
            world.spec(name)?;
            world.failing.remove(name);
            agent::bring_up(world, name);
        }
        Step::NotReady(name, only_new) => fail(world, name, *only_new)?,
        Step::Clock(seconds) => {
            let now = world.now.as_second() + seconds;
            world.now = jiff::Timestamp::from_second(now).map_err(|wrong| wrong.to_string())?;
        }
        Step::Turn(_) | Step::Restart | Step::Settle | Step::During(_) | Step::Expect(_) => return Ok(false),
    }
    Ok(true)
}

fn machine(
    world: &mut World,
    node: &str,
    change: impl Fn(&mut super::machine::Machine),
) -> Result<(), Wrong> {
    world.machines.get_mut(node).map(change).ok_or(format!("there is no node {node}"))
}

/// Plugs the cables between two nodes in or out, at both ends or at one.
fn plug(world: &mut World, a: &str, b: &str, at: Option<&str>, up: bool) -> Result<(), Wrong> {
    let mut found = false;
    for cable in world.cables.iter_mut().filter(|cable| cable.joins(a, b)) {
        for end in cable.ends.iter_mut().filter(|end| at.is_none_or(|at| at == end.node)) {
            end.up = up;
            found = true;
        }
    }
    world.relink();
    if found { Ok(()) } else { Err(format!("there is no cable between {a} and {b}")) }
}

/// The groups of a deployment do not come to answer any more, or only those that come.
fn fail(world: &mut World, name: &str, only_new: bool) -> Result<(), Wrong> {
    world.spec(name)?;
    let now = world.now;
    let mut exempt = BTreeSet::new();
    for group in &mut world.cluster.groups {
        if group.spec.deployment_ref.name != name {
            continue;
        }
        if only_new {
            exempt.extend(group.metadata.uid.clone());
        } else {
            agent::set_ready(std::sync::Arc::make_mut(group), false, now);
        }
    }
    world.failing.insert(name.to_owned(), exempt);
    Ok(())
}
