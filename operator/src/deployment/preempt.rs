//! Preemption of replicas of lower priority: each records for which deployment it stops before it does.

use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{ModelDeployment, ShardGroup};
use russet_plan::snapshot::ObjectKey;

use super::Error;
use crate::context::Context;
use crate::ssa;

/// Stops these groups for a deployment.
pub async fn apply(
    context: &Context,
    deployment: &ModelDeployment,
    victims: &[ObjectKey],
    now: Timestamp,
) -> Result<(), Error> {
    let name = deployment.name_any();
    for (namespace, group) in victims {
        let failed = |source| Error::Group { name: name.clone(), group: group.clone(), source };
        let api: Api<ShardGroup> = Api::namespaced(context.client.clone(), namespace);
        let Some(seen) = api.get_opt(group).await.map_err(failed)? else { continue };
        let for_whom = format!("{}/{name}", deployment.namespace().unwrap_or_default());
        let message = format!("stops to free memory for {for_whom}, which has a higher priority");
        let mut status = seen.status.clone().unwrap_or_default();
        let generation = seen.metadata.generation;
        let target = Type::DisruptionTarget;
        conditions::set(&mut status.conditions, target, true, Reason::Preempted, &message, generation, now);
        ssa::apply_status_on(&api, &seen, &status).await.map_err(failed)?;
        ssa::delete(&api, &seen).await.map_err(failed)?;
        let owner = ObjectRef::new(&seen.spec.deployment_ref.name).within(namespace);
        if let Some(owner) = context.stores.deployments.get(&owner) {
            let note = format!("replica {} {message}", seen.spec.replica);
            context.record(owner.as_ref(), false, Reason::Preempted, "Preempt", &note).await;
        }
    }
    Ok(())
}
