//! Applies the decisions for a Model, and writes its status.

use std::sync::Arc;

use kube::{Api, ResourceExt as _};
use russet_crds::conditions::Reason;
use russet_crds::{CopyMode, Model, ModelCopy, ModelCopySpec, Retention, names};
use russet_plan::copies::CopyRemoval;
use russet_plan::quantity::show;
use serde_json::json;

use super::decide::ModelDecision;
use super::preload::FilesPlan;
use super::source_selection::{self, SourceChange};
use super::{Error, copy_object, copy_spec};
use crate::context::Context;
use crate::ssa;

/// Finalizer first: no copy may outlive its Model.
pub async fn apply(
    context: &Context,
    model: &Model,
    copies: &[Arc<ModelCopy>],
    decision: &ModelDecision,
) -> Result<(), Error> {
    let name = model.name_any();
    if let Some(finalizers) = &decision.finalizers {
        let api: Api<Model> = ssa::namespaced_api(&context.client, model);
        ssa::set_finalizers(&api, model, finalizers.clone())
            .await
            .map_err(|source| Error::Finalizer { model: name.clone(), source })?;
    }
    let api: Api<ModelCopy> = Api::all(context.client.clone());
    let failed = |copy: String| {
        let model = name.clone();
        move |source| Error::Copy { model, copy, source }
    };
    if let Some(node) = &decision.header_node {
        let copy = copy_object(copy_spec(model, node, CopyMode::Headers));
        ssa::apply(&api, &copy).await.map_err(failed(copy.name_any()))?;
    }
    for copy in copies.iter().filter(|copy| decision.delete.contains(&copy.name_any())) {
        ssa::delete(&api, copy.as_ref()).await.map_err(failed(copy.name_any()))?;
    }
    Ok(())
}

/// Deletes evicted copies, and requests files. The agents wait for the space themselves.
pub async fn apply_files(
    context: &Context,
    model: &Model,
    all: &[Arc<ModelCopy>],
    choice: &FilesPlan,
) -> Result<(), Error> {
    let api: Api<ModelCopy> = Api::all(context.client.clone());
    let failed = |copy: String| {
        let model = model.name_any();
        move |source| Error::Copy { model, copy, source }
    };
    for removal in &choice.remove {
        let CopyRemoval { model: (namespace, name), node, bytes, beneficiaries: _ } = removal;
        let copy = names::model_copy(namespace, name, node);
        let Some(object) = all.iter().find(|object| object.name_any() == copy) else { continue };
        ssa::delete(&api, object.as_ref()).await.map_err(failed(copy.clone()))?;
        let bytes = show(*bytes);
        let message = format!("{bytes} of Model {namespace}/{name} on node {node} make room for its files");
        tracing::info!(copy, beneficiary = model.name_any(), message, "an unused copy was removed");
        context.record(model, true, Reason::Insufficient, "MakeRoom", &message).await;
    }
    for node in &choice.create {
        let spec = copy_spec(model, node, CopyMode::Files);
        let copy = copy_object(spec.clone()).name_any();
        let known = all.iter().find(|object| object.name_any() == copy);
        request_files(&api, &spec, known.map(AsRef::as_ref)).await.map_err(failed(copy))?;
    }
    Ok(())
}

/// Requests a model's files from a node's agent. The supply is written first, telling it to wait: no agent
/// may start a fetch in between. It is written under the supply's field manager, so that only that one can
/// change it later; the other fields that it has to send along are released with the next supply it writes.
pub async fn request_files(
    api: &Api<ModelCopy>,
    spec: &ModelCopySpec,
    known: Option<&ModelCopy>,
) -> Result<(), kube::Error> {
    let copy = copy_object(spec.clone());
    if let Some(supply) = source_selection::initial_source(spec, known) {
        let spec = ModelCopySpec { supply: Some(supply), ..spec.clone() };
        ssa::apply_as(names::SUPPLY_MANAGER, api, &ModelCopy::new(&copy.name_any(), spec)).await?;
    }
    ssa::apply(api, &copy).await.map(|_| ())
}

/// Writes the retention of a Model's copies.
pub async fn retention(
    context: &Context,
    model: &Model,
    copies: &[String],
    retention: Retention,
) -> Result<(), Error> {
    let api: Api<ModelCopy> = Api::all(context.client.clone());
    for copy in copies {
        ssa::apply_spec(&api, names::RETENTION_MANAGER, copy, &json!({"retention": retention}))
            .await
            .map_err(|source| Error::Copy { model: model.name_any(), copy: copy.clone(), source })?;
    }
    Ok(())
}

/// Writes the sources of a Model's copies.
pub async fn supply(context: &Context, model: &Model, changes: &[SourceChange]) -> Result<(), Error> {
    let api: Api<ModelCopy> = Api::all(context.client.clone());
    for SourceChange { copy, supply, unfinished } in changes {
        let failed = |source| Error::Copy { model: model.name_any(), copy: copy.clone(), source };
        // Otherwise the other fields would have no owner.
        if let Some(object) = unfinished {
            ssa::apply(&api, object).await.map_err(failed)?;
        }
        let spec = supply.as_ref().map_or(json!({}), |supply| json!({"supply": supply}));
        ssa::apply_spec(&api, names::SUPPLY_MANAGER, copy, &spec).await.map_err(failed)?;
    }
    Ok(())
}

/// Writes the status if it differs.
pub async fn report(context: &Context, model: &Model, decision: &ModelDecision) -> Result<(), Error> {
    if model.status.as_ref() == Some(&decision.status) {
        return Ok(());
    }
    let name = model.name_any();
    let api: Api<Model> = ssa::namespaced_api(&context.client, model);
    ssa::apply_status(&api, &name, &decision.status)
        .await
        .map_err(|source| Error::Report { model: name, source })
}
