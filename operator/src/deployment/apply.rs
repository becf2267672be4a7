//! Applies a plan: files first, because they take longest, then new groups, then the deletion of old ones.
//! Not here: decisions.

use std::sync::Arc;

use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, Resource as _, ResourceExt as _};
use russet_crds::{LocalReference, ModelCopy, ModelDeployment, ShardGroup, ShardGroupSpec, names};
use russet_plan::ValidDeployment;
use russet_plan::placement::NewGroup;

use super::stages::{AppliedDeployment, PlannedDeployment, Resources};
use super::{Error, approvals, preempt};
use crate::context::Context;
use crate::group::operator_fields;
use crate::{model, ssa};

/// Writes everything that was planned.
pub async fn apply(
    context: &Context,
    resources: Resources<PlannedDeployment>,
    now: Timestamp,
) -> Result<Resources<AppliedDeployment>, Error> {
    let Resources { deployment, stage: planned } = resources;
    let name = deployment.name_any();
    preempt::apply(context, &deployment, &planned.placement.preempt, now).await?;
    if planned.valid.is_some() {
        approvals::apply(context, &deployment, &planned.placement.approval_requests, now).await?;
    }
    let copies: Api<ModelCopy> = Api::all(context.client.clone());
    for spec in &planned.copies {
        let copy = names::model_copy(&spec.model_ref.namespace, &spec.model_ref.name, &spec.node_name);
        let known = context.stores.copies.get(&ObjectRef::new(&copy));
        let is_current = |known: &ModelCopy| {
            known.spec.agent_work() == *spec || known.metadata.deletion_timestamp.is_some()
        };
        if known.as_deref().is_some_and(is_current) {
            continue;
        }
        let requested = model::request_files(&copies, spec, known.as_deref()).await;
        requested.map_err(|source| Error::Copy { name: name.clone(), copy, source })?;
    }
    let api: Api<ShardGroup> = ssa::namespaced_api(&context.client, deployment.as_ref());
    let failed = |group: &str| {
        let (name, group) = (name.clone(), group.to_owned());
        move |source| Error::Group { name, group, source }
    };
    let mut groups = Vec::new();
    for new in &planned.placement.create {
        let group = ssa::apply(&api, &group_object(&deployment, planned.valid.as_ref(), new))
            .await
            .map_err(failed(&new.name))?;
        groups.push(Arc::new(group));
    }
    let mut leaving = 0;
    for group in &planned.observed.groups {
        let is_deleted = planned.placement.delete.iter().any(|old| old.name == group.name_any());
        if is_deleted {
            ssa::delete(&api, group.as_ref()).await.map_err(failed(&group.name_any()))?;
        }
        if is_deleted || group.metadata.deletion_timestamp.is_some() {
            leaving += 1;
        } else if planned.valid.is_some() && group.spec.tier_ref != deployment.spec.tier_ref {
            let spec = ShardGroupSpec { tier_ref: deployment.spec.tier_ref.clone(), ..group.spec.clone() };
            let group =
                ssa::apply(&api, &operator_fields(group, spec)).await.map_err(failed(&group.name_any()))?;
            groups.push(Arc::new(group));
        } else {
            groups.push(group.clone());
        }
    }
    groups.sort_by_key(|group| (group.spec.replica, group.name_any()));
    Ok(Resources { deployment, stage: AppliedDeployment { planned, groups, leaving } })
}

fn group_object(deployment: &ModelDeployment, valid: Option<&ValidDeployment>, new: &NewGroup) -> ShardGroup {
    let NewGroup { name, replica, plan } = new;
    let pools = valid.map(ValidDeployment::pools).unwrap_or_default();
    // The last known good spec may be planned instead of the requested one.
    let model = valid.map_or(&deployment.spec.model_ref.name, |valid| &valid.model);
    let spec = ShardGroupSpec {
        deployment_ref: LocalReference::new(deployment.name_any()),
        model_ref: LocalReference::new(model),
        replica: *replica,
        plan: plan.clone(),
        pool_refs: pools.into_iter().map(LocalReference::new).collect(),
        tier_ref: deployment.spec.tier_ref.clone(),
        epoch: 1,
    };
    let mut group = ShardGroup::new(name, spec);
    group.metadata.namespace = deployment.namespace();
    let label = (names::LABEL_DEPLOYMENT.to_owned(), names::label_value(&deployment.name_any()));
    group.metadata.labels = Some([label].into());
    group.metadata.owner_references = deployment.controller_owner_ref(&()).map(|owner| vec![owner]);
    group
}
