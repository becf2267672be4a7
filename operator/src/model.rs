//! Models: asks an agent to read the headers, shows what they say, and removes the copies when the
//! Model goes. Files are asked for by deployments.

mod apply;
mod decide;

use std::sync::Arc;

use jiff::Timestamp;
use kube::ResourceExt as _;
use kube::runtime::controller::Action;
use russet_crds::conditions::{Type, is_true};
use russet_crds::{Model, ModelCopySpec, NamespacedReference, Want, names};
use russet_plan::snapshot::Availability;
use thiserror::Error;

use crate::context::Context;
use crate::reconcile::after;
use russet_plan::cluster::availability;

/// Why a Model could not be looked after.
#[derive(Debug, Error)]
pub enum Error {
    /// A copy was not written or deleted.
    #[error("Model {model}: its copy {copy} could not be changed")]
    Copy {
        /// The Model.
        model: String,
        /// The ModelCopy.
        copy: String,
        /// The server's answer.
        #[source]
        source: kube::Error,
    },
    /// The finalizer was not set or removed.
    #[error("Model {model}: its finalizer could not be changed")]
    Finalizer {
        /// The Model.
        model: String,
        /// The server's answer.
        #[source]
        source: kube::Error,
    },
    /// The status was not written.
    #[error("Model {model}: its status could not be written")]
    Report {
        /// The Model.
        model: String,
        /// The server's answer.
        #[source]
        source: kube::Error,
    },
}

/// Looks after one Model.
pub async fn reconcile(model: Arc<Model>, context: Arc<Context>) -> Result<Action, Error> {
    let now = Timestamp::now();
    let (namespace, name) = (model.namespace().unwrap_or_default(), model.name_any());
    let mut copies = context.stores.copies.state();
    copies.retain(|copy| copy.spec.model_ref.namespace == namespace && copy.spec.model_ref.name == name);
    let mut nodes: Vec<decide::Reader> = context
        .stores
        .nodes
        .state()
        .iter()
        .map(|node| {
            let availability = availability(node, now);
            decide::Reader {
                name: node.name_any(),
                reachable: node
                    .status
                    .as_ref()
                    .is_some_and(|status| is_true(&status.conditions, Type::Reachable)),
                open: availability == Availability::Open,
            }
        })
        .collect();
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    let users: Vec<String> = context
        .stores
        .groups
        .state()
        .iter()
        .filter(|group| group.namespace().as_deref() == Some(&namespace) && group.spec.model_ref.name == name)
        .map(|group| group.name_any())
        .collect();
    let decision = decide::decide(&model, &copies, &nodes, &users, now);
    apply::apply(&context, &model, &copies, &decision).await?;
    apply::report(&context, &model, &decision).await?;
    Ok(after([]))
}

/// The copy of a model on a node, as the operator wants it.
pub fn copy_spec(model: &Model, node: &str, want: Want) -> ModelCopySpec {
    ModelCopySpec {
        model_ref: NamespacedReference {
            namespace: model.namespace().unwrap_or_default(),
            name: model.name_any(),
        },
        source: model.spec.source.clone(),
        commit: model.status.as_ref().and_then(|status| status.commit.clone()),
        node_name: node.to_owned(),
        want,
    }
}

/// The copy as an object, with the labels people select by.
pub fn copy_object(spec: ModelCopySpec) -> russet_crds::ModelCopy {
    let name = names::model_copy(&spec.model_ref.namespace, &spec.model_ref.name, &spec.node_name);
    let labels = [
        (names::LABEL_MODEL_NAMESPACE, names::label_value(&spec.model_ref.namespace)),
        (names::LABEL_MODEL, names::label_value(&spec.model_ref.name)),
        (names::LABEL_NODE, names::label_value(&spec.node_name)),
    ];
    let mut copy = russet_crds::ModelCopy::new(&name, spec);
    copy.metadata.labels = Some(labels.into_iter().map(|(key, value)| (key.to_owned(), value)).collect());
    copy
}
