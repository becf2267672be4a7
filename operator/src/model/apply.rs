//! Carries out what was decided for a Model, and shows it.

use std::sync::Arc;

use kube::{Api, ResourceExt as _};
use russet_crds::{Model, ModelCopy, Want};

use super::decide::Decision;
use super::{Error, copy_object, copy_spec};
use crate::context::Context;
use crate::ssa;

/// Finalizer first: no copy may outlive a Model nobody guards.
pub async fn apply(
    context: &Context,
    model: &Model,
    copies: &[Arc<ModelCopy>],
    decision: &Decision,
) -> Result<(), Error> {
    let name = model.name_any();
    if let Some(finalizers) = &decision.finalizers {
        let api: Api<Model> = ssa::beside(&context.client, model);
        ssa::set_finalizers(&api, model, finalizers.clone())
            .await
            .map_err(|source| Error::Finalizer { model: name.clone(), source })?;
    }
    let api: Api<ModelCopy> = Api::all(context.client.clone());
    let failed = |copy: String| {
        let model = name.clone();
        move |source| Error::Copy { model, copy, source }
    };
    if let Some(node) = &decision.read_on {
        let copy = copy_object(copy_spec(model, node, Want::Headers));
        ssa::apply(&api, &copy).await.map_err(failed(copy.name_any()))?;
    }
    for copy in copies.iter().filter(|copy| decision.delete.contains(&copy.name_any())) {
        ssa::delete(&api, copy.as_ref()).await.map_err(failed(copy.name_any()))?;
    }
    Ok(())
}

/// Writes the status when it differs.
pub async fn report(context: &Context, model: &Model, decision: &Decision) -> Result<(), Error> {
    if model.status.as_ref() == Some(&decision.status) {
        return Ok(());
    }
    let name = model.name_any();
    let api: Api<Model> = ssa::beside(&context.client, model);
    ssa::apply_status(&api, &name, &decision.status)
        .await
        .map_err(|source| Error::Report { model: name, source })
}
