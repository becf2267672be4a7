//! Writes the status of a group, measures its formation time, and emits events about failures.

use std::sync::Arc;

use kube::{Api, ResourceExt as _};
use russet_crds::ShardGroup;
use russet_crds::conditions::{Reason, Type, get};

use super::Error;
use super::decide::PlannedGroup;
use super::observe::ObservedGroup;
use crate::context::Context;
use crate::ssa;

/// Writes the status if it differs, and returns the group as it is then.
pub async fn report(
    context: &Context,
    observed: &ObservedGroup,
    planned: &PlannedGroup,
) -> Result<Arc<ShardGroup>, Error> {
    let group = &observed.group;
    let (before, after) = (group.status.as_ref(), &planned.status);
    if before == Some(after) {
        return Ok(group.clone());
    }
    let api: Api<ShardGroup> = ssa::namespaced_api(&context.client, group.as_ref());
    let written = ssa::apply_status_on(&api, group.as_ref(), after)
        .await
        .map_err(|source| Error::Report { group: group.name_any(), source })?;
    let written = written.map_or_else(|| group.clone(), Arc::new);

    let ready = get(&after.conditions, Type::Ready);
    let was = before.and_then(|status| get(&status.conditions, Type::Ready));
    let Some(ready) = ready.filter(|ready| was.is_none_or(|was| was.reason != ready.reason)) else {
        return Ok(written);
    };
    if ready.status == "True" {
        let mut epochs = context.memory.epochs.lock();
        let forming =
            epochs.get_mut(&group.uid().unwrap_or_default()).and_then(|history| history.forming.take());
        if let Some((_, since)) = forming.filter(|(epoch, _)| *epoch == planned.epoch) {
            context.metrics.formation.observe(since.elapsed().as_secs_f64());
        }
    }
    for (reason, good) in [
        (Reason::Serving, true),
        (Reason::MemoryRefused, false),
        (Reason::HeldAfterPanics, false),
        (Reason::TooManyRestarts, false),
        (Reason::ModelRefused, false),
    ] {
        if ready.reason == format!("{reason:?}") {
            context.record(group.as_ref(), good, reason, "Form", &ready.message).await;
        }
    }
    Ok(written)
}
