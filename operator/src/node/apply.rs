//! Writes labels, links and the operator's conditions of a node, if they differ.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{Api, ResourceExt as _};
use russet_crds::InferenceNode;
use serde_json::json;

use super::Error;
use super::decide::{NodeDecision, OPERATOR_CONDITIONS};
use crate::context::Context;
use crate::ssa;

/// Writes labels for selectors.
pub async fn labels(context: &Context, node: &InferenceNode, decision: &NodeDecision) -> Result<(), Error> {
    if decision.labels.iter().all(|(key, value)| node.labels().get(key) == Some(value)) {
        return Ok(());
    }
    let name = node.name_any();
    let api: Api<InferenceNode> = Api::all(context.client.clone());
    ssa::apply_labels(&api, &name, &decision.labels).await.map_err(|source| Error::Apply { name, source })
}

/// Writes the operator's conditions and the links.
pub async fn status(context: &Context, node: &InferenceNode, decision: &NodeDecision) -> Result<(), Error> {
    let there = node.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let links = node.status.as_ref().map(|status| status.links.as_slice()).unwrap_or_default();
    let own = |condition: &&Condition| {
        OPERATOR_CONDITIONS.iter().any(|kind| condition.type_ == format!("{kind:?}"))
    };
    let same = decision.links.as_ref().is_none_or(|desired| desired == links)
        && decision.conditions.iter().all(|condition| there.contains(condition));
    if same && there.iter().filter(own).count() == decision.conditions.len() {
        return Ok(());
    }
    let name = node.name_any();
    let api: Api<InferenceNode> = Api::all(context.client.clone());
    let mut status = json!({"conditions": decision.conditions});
    if let Some(links) = &decision.links {
        status["links"] = json!(links);
    }
    ssa::apply_status(&api, &name, &status).await.map_err(|source| Error::Report { name, source })
}
