//! Effect of a single step on the world. Not here: steps that run the operator (`story`).

use std::collections::BTreeSet;

use russet_crds::Sharding;

use super::agent;
use super::disk;
use super::script::SimStep;
use super::spec_fields;
use super::words::LineError;
use super::world::World;

/// Performs a step; `false` if it is none that changes the world by itself.
pub fn perform(world: &mut World, step: &SimStep) -> Result<bool, LineError> {
    match step {
        SimStep::Node(machine) => world.add(machine.clone())?,
        SimStep::Cable(cable) => {
            for end in &cable.ends {
                world.node(&end.node)?;
            }
            world.cables.push(cable.clone());
            world.relink();
        }
        SimStep::Pool(name, spec) => world.pool(name, spec.clone()),
        SimStep::Strategy(name, fields) => {
            let sharding = spec_fields::split(Sharding::default(), &mut fields.clone())?;
            world.strategy(name, sharding);
        }
        SimStep::Tier(name, spec) => world.tier(name, (**spec).clone()),
        SimStep::Request(name, waiting) => world.request(name, *waiting)?,
        SimStep::Answer(name, decision) => world.answer(name, *decision)?,
        SimStep::Copy(model, node, pinned) => disk::put(world, model, node, *pinned)?,
        SimStep::Model(name, shape) => world.model(name, shape.as_deref().cloned()),
        SimStep::Deploy(name, fields) => {
            let bare = russet_crds::ModelDeploymentSpec { replicas: 1, ..Default::default() };
            world.apply_spec(name, spec_fields::change(bare, fields.clone())?);
        }
        SimStep::Edit(name, fields) => {
            let spec = spec_fields::change(world.spec(name)?, fields.clone())?;
            world.apply_spec(name, spec);
        }
        SimStep::Delete(name) => world.remove_deployment(name)?,
        SimStep::Schedule(node, scheduling) => world.schedule(node, *scheduling)?,
        SimStep::Lose(node) => world.reach(node, false)?,
        SimStep::Back(node) => world.reach(node, true)?,
        SimStep::Leave(node) => world.remove_machine(node)?,
        SimStep::Cut(a, b, at) => plug(world, a, b, at.as_deref(), false)?,
        SimStep::Join(a, b) => plug(world, a, b, None, true)?,
        SimStep::Rdma(node, on) => {
            machine(world, node, |machine| machine.rdma = *on)?;
            world.relink();
        }
        SimStep::Skew(node, build) => {
            machine(world, node, |machine| machine.build = build.clone())?;
            world.status(node)?.engine_build = Some(build.clone());
        }
        SimStep::Label(node, labels) => {
            world.node(node)?.metadata.labels.get_or_insert_default().extend(labels.iter().cloned());
        }
        SimStep::Limit(node, bytes) => {
            machine(world, node, |machine| machine.limit = *bytes)?;
            world.status(node)?.memory.get_or_insert_default().serving_limit_bytes = *bytes;
        }
        SimStep::Refuse(node) => {
            world.node(node)?;
            world.refusing.insert(node.clone());
        }
        SimStep::Release(None) => agent::release_deleted(world),
        SimStep::Release(Some(node)) => {
            world.node(node)?;
            world.refusing.remove(node);
        }
        SimStep::Ready(name) => {
            world.spec(name)?;
            world.failing.remove(name);
            agent::bring_up(world, name);
        }
        SimStep::NotReady(name, only_new) => fail(world, name, *only_new)?,
        SimStep::Clock(seconds) => {
            let now = world.now.as_second() + seconds;
            world.now = jiff::Timestamp::from_second(now).map_err(|wrong| wrong.to_string())?;
        }
        SimStep::Turn(_) | SimStep::Restart | SimStep::Settle | SimStep::During(_) | SimStep::Expect(_) => {
            return Ok(false);
        }
    }
    Ok(true)
}

fn machine(
    world: &mut World,
    node: &str,
    change: impl Fn(&mut super::machine::SimMachine),
) -> Result<(), LineError> {
    world.machines.get_mut(node).map(change).ok_or(format!("there is no node {node}"))
}

/// Plugs the cables between two nodes in or out, at both ends or at one.
fn plug(world: &mut World, a: &str, b: &str, at: Option<&str>, up: bool) -> Result<(), LineError> {
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

/// The groups of a deployment no longer become ready, or only new ones do not.
fn fail(world: &mut World, name: &str, only_new: bool) -> Result<(), LineError> {
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
