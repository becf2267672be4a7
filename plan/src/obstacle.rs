//! What keeps a deployment from being planned whatever it asks for: a Model that is not there, goes, or was not
//! read yet, its own or the one that guesses for it.

use russet_crds::conditions::{self, Reason, Type, is_true};
use russet_crds::{Model, ModelDeploymentSpec};

/// What keeps a deployment from being planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// The reason for conditions.
    pub reason: Reason,
    /// For people.
    pub message: String,
    /// Whether only a person can remove it.
    pub stalled: bool,
}

/// The first thing in the way of a deployment in `namespace` that names these Models, of which `find` knows those there
/// are.
pub fn obstacle<'m>(
    namespace: &str,
    spec: &ModelDeploymentSpec,
    find: impl Fn(&str) -> Option<&'m Model>,
) -> Option<Obstacle> {
    let fields = ["spec.modelRef", "spec.draftModelRef"];
    let mut named = spec.models().zip(fields).map(|(name, field)| (name, field, find(name)));
    named.find_map(|(name, field, model)| of_model(namespace, name, field, model))
}

fn of_model(namespace: &str, name: &str, field: &str, model: Option<&Model>) -> Option<Obstacle> {
    let Some(model) = model else {
        let message = format!(
            "Model {name:?} does not exist in namespace {namespace}; create it, or correct {field}.name"
        );
        return Some(Obstacle { reason: Reason::ModelNotFound, message, stalled: true });
    };
    if model.metadata.deletion_timestamp.is_some() {
        let message = format!(
            "Model {name} is being deleted and waits for this deployment; delete or scale down the deployment"
        );
        return Some(Obstacle { reason: Reason::ModelNotFound, message, stalled: true });
    }
    let status = model.status.clone().unwrap_or_default();
    if status.shape.is_some() {
        return None;
    }
    let ready = conditions::get(&status.conditions, Type::Ready);
    let why = ready.map_or_else(|| "its headers are not read yet".to_owned(), |ready| ready.message.clone());
    Some(Obstacle {
        reason: Reason::WaitingForModel,
        message: format!("Model {name}: {why}"),
        stalled: is_true(&status.conditions, Type::Stalled),
    })
}
