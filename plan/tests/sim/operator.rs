//! One reconciliation of one deployment, as the operator does it: read the server, call the planner, and
//! write the result, object by object. Every placement passes the independent checker first.

use russet_crds::{ModelDeployment, PlacementReport};
use russet_plan::joint_placement::{JointPlan, solve};
use russet_plan::placement::{NewGroup, Placement, RemovalReason, place_with, scale_down};
use russet_plan::validate::read_at;
use russet_plan::{Note, ValidDeployment, check};

use super::disk;
use super::ledger;
use super::trace::Trace;
use super::world::{SPACE, ShownStatus, World};

/// One write.
#[derive(Clone, Debug)]
pub enum Write {
    /// Create a group, for the deployment as it was at the decision, in these pools.
    Create(Box<ModelDeployment>, Vec<String>, NewGroup),
    /// Fetch files to a node before a group needs them: the model and the node.
    Fetch(String, String),
    /// Delete a group: its UID, its short name, and why.
    Delete(String, String, RemovalReason),
    /// Delete a group of another deployment: its UID, its short name, and for which deployment.
    Preempt(String, String, String),
}

/// Decides for a deployment; returns the writes, in order. The error is a violated invariant.
pub fn turn(world: &mut World, name: &str, trace: &mut Trace) -> Result<Vec<Write>, String> {
    let Some(owner) = world.deployments.get(name).cloned() else { return Ok(Vec::new()) };
    world.assign();
    world.retier(name);
    let (view, now) = (world.view(), world.now);
    let valid = |owner: &ModelDeployment| read_at(&view, owner, now);
    let (placement, said, pools) = match valid(&owner) {
        Ok(desired) => {
            let others = world.deployments.iter().filter(|(other, _)| *other != name);
            let competitors: Vec<ValidDeployment> =
                others.filter_map(|(_, other)| valid(other).ok()).collect();
            let joint_plan = if competitors.is_empty() {
                JointPlan::default()
            } else {
                solve(&view, &competitors.iter().chain([&desired]).collect::<Vec<_>>())
            };
            let (placement, notes) = place_with(&view, &desired, &joint_plan);
            if let (Some(report), Some(seen)) = (&placement.report, world.deployments.get_mut(name)) {
                seen.status.get_or_insert_default().placement = Some(report.clone());
            }
            let wrong = check::check(&view, &desired, &placement);
            if let Some(first) = wrong.first() {
                return Err(format!("the checker says of {name}: {}", world.short(&first.to_string())));
            }
            let notes = notes.iter().filter(|note| !matches!(note, Note::Placed { .. }));
            let rests = desired.idle_reason.as_ref().map(ToString::to_string);
            let said = ShownStatus {
                notes: lines(world, notes),
                rests,
                asks: placement.approval_requests.clone(),
                ..ShownStatus::default()
            };
            (placement, said, desired.pools())
        }
        Err(notes) => {
            // Even an invalid deployment may be scaled down.
            let refused = (owner.spec.replicas > 0).then(|| lines(world, notes.iter()));
            let placement = scale_down(&view, SPACE, name, owner.spec.replicas);
            (placement, ShownStatus { refused, ..ShownStatus::default() }, Vec::new())
        }
    };
    let resting = said.rests.is_some();
    if let Some(wrong) = ledger::unrequested(world, name, &placement, resting).first() {
        return Err(wrong.clone());
    }
    let Placement { keep: _, create, delete, preempt, prefetch, approval_requests: _, waiting, report } =
        placement;
    create.iter().for_each(|new| world.name_group(name, new));
    let before = world.said.get(name).and_then(|said| said.report.clone());
    let report = report.map(|report| PlacementReport {
        decision: world.short(&report.decision),
        reason: world.short(&report.reason),
        ..report
    });
    let said = ShownStatus { waiting, report: report.or(before), ..said };
    trace.says(name, world.said.get(name), &said);
    world.said.insert(name.to_owned(), said);
    let uid = |name: &str| {
        let group = world.cluster.groups.iter().find(|group| group.metadata.name.as_deref() == Some(name))?;
        group.metadata.uid.clone()
    };
    let deletes = delete
        .into_iter()
        .filter_map(|old| Some(Write::Delete(uid(&old.name)?, world.short(&old.name), old.reason)));
    let preempts = preempt
        .into_iter()
        .filter_map(|(_, group)| Some(Write::Preempt(uid(&group)?, world.short(&group), name.to_owned())));
    let creates = create.into_iter().map(|new| Write::Create(Box::new(owner.clone()), pools.clone(), new));
    let fetches = prefetch.into_iter().filter(|(model, node)| {
        let asked = world.fetching.contains(&(model.clone(), node.clone()));
        !asked && !disk::holds(world, model, node)
    });
    Ok(creates
        .chain(fetches.map(|(model, node)| Write::Fetch(model, node)))
        .chain(deletes)
        .chain(preempts)
        .collect())
}

/// Notes, one per line.
fn lines<'n>(world: &World, notes: impl Iterator<Item = &'n Note>) -> String {
    world.short(&notes.map(ToString::to_string).collect::<Vec<_>>().join("\n"))
}

/// Writes one object.
pub fn write(world: &mut World, write: &Write, trace: &mut Trace) -> Result<(), String> {
    match write {
        Write::Create(owner, pools, new) => {
            if let Some(wrong) = ledger::doubled(world, &owner.spec.model_ref.name, new).first() {
                return Err(wrong.clone());
            }
            world.create(owner, pools, new);
            let label = world.short(&new.name);
            trace.created(owner.metadata.name.as_deref().unwrap_or_default(), &label, &new.plan);
        }
        Write::Fetch(model, node) => {
            world.fetching.insert((model.clone(), node.clone()));
        }
        Write::Delete(uid, label, why) => {
            let group = world.cluster.groups.iter().find(|group| group.metadata.uid.as_ref() == Some(uid));
            let of = group.map(|group| group.spec.deployment_ref.name.clone());
            world.delete(uid);
            let why = match why {
                RemovalReason::ScaledDown => "fewer replicas are wanted",
                RemovalReason::Idle => "it rests",
                RemovalReason::Replaced => "another serves in its place",
                RemovalReason::Drained => "its successor needs its room",
            };
            trace.deleted(of.as_deref().unwrap_or_default(), label, why);
        }
        Write::Preempt(uid, label, by) => {
            let group = world.cluster.groups.iter().find(|group| group.metadata.uid.as_ref() == Some(uid));
            let of = group.map(|group| group.spec.deployment_ref.name.clone());
            world.delete(uid);
            trace.deleted(of.as_deref().unwrap_or_default(), label, &format!("{by} needs its room"));
        }
    }
    Ok(())
}
