//! Writes the epoch and the Shards. The group first: if the operator crashes between the two, the group's
//! epoch counts and the Shards are updated to it.

use std::time::Instant;

use futures::future::try_join_all;
use jiff::Timestamp;
use kube::{Api, Resource as _, ResourceExt as _};
use russet_crds::conditions::Reason;
use russet_crds::{Shard, ShardGroup, ShardGroupSpec, ShardSpec, names};

use super::Error;
use super::decide::{PlannedGroup, RESTART_WINDOW};
use super::observe::ObservedGroup;
use crate::context::Context;
use crate::memory::PeerTable;
use crate::ssa;

/// Writes the plan of `observed`. `group` is that group after the report.
pub async fn apply(
    context: &Context,
    observed: &ObservedGroup,
    group: &ShardGroup,
    planned: &PlannedGroup,
    now: Timestamp,
) -> Result<(), Error> {
    let name = group.name_any();
    if let Some(loss) = &planned.bump {
        let spec = ShardGroupSpec { epoch: planned.epoch, ..group.spec.clone() };
        let mut next = operator_fields(group, spec);
        // A newer version may have this epoch already.
        next.metadata.resource_version = group.resource_version();
        let api: Api<ShardGroup> = ssa::namespaced_api(&context.client, group);
        ssa::apply(&api, &next).await.map_err(|source| Error::Epoch {
            group: name.clone(),
            epoch: planned.epoch,
            source,
        })?;
        record_epoch(context, group, planned.epoch, Some(now));
        context.metrics.restarts.with_label_values(&[&format!("{:?}", loss.reason)]).inc();
        tracing::warn!(group = name, epoch = planned.epoch, why = loss.message, "the group re-forms");
    }
    let api: Api<Shard> = ssa::namespaced_api(&context.client, group);
    let failed = |shard: String| {
        let group = name.clone();
        move |source| Error::Shard { group, shard, source }
    };
    for shard in observed.orphans.iter().filter(|shard| planned.delete.contains(&shard.name_any())) {
        ssa::delete(&api, shard.as_ref()).await.map_err(failed(shard.name_any()))?;
    }
    if let Some(connected) = planned.shards.iter().find(|shard| !shard.peers.is_empty()) {
        // Before the write: if it fails, some ranks may have got it all the same.
        let mut epochs = context.memory.epochs.lock();
        epochs.entry(group.uid().unwrap_or_default()).or_default().peer_table = Some((
            planned.epoch,
            PeerTable { peers: connected.peers.clone(), transport: connected.transport },
        ));
    }
    let writes = planned.shards.iter().map(|spec| {
        let shard = shard_object(group, spec.clone());
        let api = api.clone();
        async move { ssa::apply(&api, &shard).await.map_err(failed(shard.name_any())) }
    });
    try_join_all(writes).await?;
    if let Some(loss) = &planned.bump {
        // Last, so that nothing waits for it.
        let note = format!("{}; epoch {} begins", loss.message, planned.epoch);
        context.record(group, false, loss.reason, "FormAnew", &note).await;
    } else if !observed.group.is_reported() {
        record_epoch(context, group, planned.epoch, None);
        context.record(group, true, Reason::InProgress, "Form", "the Shards are created").await;
    }
    Ok(())
}

fn record_epoch(context: &Context, group: &ShardGroup, epoch: i64, bumped: Option<Timestamp>) {
    let mut epochs = context.memory.epochs.lock();
    // Drop the history of deleted groups.
    let alive: std::collections::BTreeSet<String> =
        context.stores.groups.state().iter().filter_map(|it| it.uid()).collect();
    epochs.retain(|uid, _| alive.contains(uid));
    let history = epochs.entry(group.uid().unwrap_or_default()).or_default();
    if history.forming.is_none_or(|(forming, _)| forming != epoch) {
        history.forming = Some((epoch, Instant::now()));
    }
    if let Some(now) = bumped {
        history.epoch_starts.retain(|time| now.duration_since(*time).unsigned_abs() < RESTART_WINDOW);
        history.epoch_starts.push(now);
    }
}

/// The group with only the operator's fields.
pub fn operator_fields(group: &ShardGroup, spec: ShardGroupSpec) -> ShardGroup {
    let mut object = ShardGroup::new(&group.name_any(), spec);
    object.metadata.namespace = group.namespace();
    object.metadata.labels = group.metadata.labels.clone();
    object.metadata.owner_references = group.metadata.owner_references.clone();
    object
}

fn shard_object(group: &ShardGroup, spec: ShardSpec) -> Shard {
    let labels = [
        (names::LABEL_DEPLOYMENT, names::label_value(&group.spec.deployment_ref.name)),
        (names::LABEL_GROUP, names::label_value(&group.name_any())),
        (names::LABEL_NODE, names::label_value(&spec.node_name)),
    ];
    let mut shard = Shard::new(&names::shard(&group.name_any(), spec.rank), spec);
    shard.metadata.namespace = group.namespace();
    shard.metadata.labels = Some(labels.into_iter().map(|(key, value)| (key.to_owned(), value)).collect());
    shard.metadata.owner_references = group.controller_owner_ref(&()).map(|owner| vec![owner]);
    shard
}
