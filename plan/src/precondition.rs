//! Preconditions of planning a deployment: its Model, its draft model and its adapters exist, are not being deleted, and
//! their headers were read.

use russet_crds::conditions::{self, Reason, Type, is_true};
use russet_crds::{Model, ModelDeploymentSpec};

const DRAFT_FIELD: &str = "spec.draftModelRef";

/// An unmet precondition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnmetPrecondition {
    /// The reason for conditions.
    pub reason: Reason,
    /// The message.
    pub message: String,
    /// Whether only a person can fix it.
    pub stalled: bool,
}

/// The first unmet precondition of a deployment in `namespace` that names these Models; `find` looks a Model
/// up.
pub fn unmet_precondition<'m>(
    namespace: &str,
    spec: &ModelDeploymentSpec,
    find: impl Fn(&str) -> Option<&'m Model>,
) -> Option<UnmetPrecondition> {
    let own = ReferringField { path: "spec.modelRef".to_owned(), leave_out: None };
    let draft = spec
        .draft_model_ref
        .as_ref()
        .map(|_| ReferringField { path: DRAFT_FIELD.to_owned(), leave_out: Some(DRAFT_FIELD.to_owned()) });
    let adapters = spec.adapters.iter().map(|adapter| {
        let entry = format!("spec.adapters[{}]", adapter.name);
        ReferringField { path: format!("{entry}.modelRef"), leave_out: Some(entry) }
    });
    // In the order of the models.
    let fields = std::iter::once(own).chain(draft).chain(adapters);
    spec.models()
        .zip(fields)
        .find_map(|(name, field)| model_precondition(namespace, name, &field, find(name)))
}

/// A field that names a Model.
struct ReferringField {
    /// Its path.
    path: String,
    /// What may be left out of the spec instead; `None` of the model itself.
    leave_out: Option<String>,
}

fn model_precondition(
    namespace: &str,
    name: &str,
    ReferringField { path: field, leave_out }: &ReferringField,
    model: Option<&Model>,
) -> Option<UnmetPrecondition> {
    let Some(model) = model else {
        let message = format!(
            "Model {name:?} does not exist in namespace {namespace}; create it, or correct {field}.name"
        );
        return Some(UnmetPrecondition { reason: Reason::ModelNotFound, message, stalled: true });
    };
    if model.metadata.deletion_timestamp.is_some() {
        let without = leave_out.as_ref().map(|field| format!("leave {field} out, or ")).unwrap_or_default();
        let message = format!(
            "Model {name} is being deleted and waits for this deployment; {without}delete or scale down the deployment"
        );
        return Some(UnmetPrecondition { reason: Reason::ModelNotFound, message, stalled: true });
    }
    let status = model.status.clone().unwrap_or_default();
    if status.shape.is_some() {
        return None;
    }
    let ready = conditions::get(&status.conditions, Type::Ready);
    let why = ready.map_or_else(|| "its headers are not read yet".to_owned(), |ready| ready.message.clone());
    Some(UnmetPrecondition {
        reason: Reason::WaitingForModel,
        message: format!("Model {name}: {why}"),
        stalled: is_true(&status.conditions, Type::Stalled),
    })
}

#[cfg(test)]
mod tests {
    use russet_crds::{Adapter, LocalReference, ModelSpec, ModelStatus};
    use russet_model::shape::ModelShape;

    use super::*;

    fn model(name: &str, read: bool, goes: bool) -> Model {
        let mut model = Model::new(name, ModelSpec::default());
        let goes = goes.then_some("2026-01-01T00:00:00Z");
        model.metadata.deletion_timestamp = serde_json::from_value(serde_json::json!(goes)).unwrap();
        let shape = read.then(ModelShape::default);
        model.status = Some(ModelStatus { shape, ..ModelStatus::default() });
        model
    }

    #[test]
    fn preconditions_of_all_models_are_checked_alike() {
        let ready = |name: &str| model(name, true, false);
        let french =
            |name: &&str| Adapter { name: "french".to_owned(), model_ref: LocalReference::new(*name) };
        let unread = "Model d: its headers are not read yet";
        let of_drafts = [
            (vec![ready("m")], None, None),
            (vec![ready("m"), ready("d")], Some("d"), None),
            (vec![], None, Some((true, "correct spec.modelRef.name"))),
            (vec![ready("d")], Some("d"), Some((true, "correct spec.modelRef.name"))),
            (vec![ready("m")], Some("d"), Some((true, "Model \"d\" does not exist in namespace ns"))),
            (vec![ready("m")], Some("d"), Some((true, "correct spec.draftModelRef.name"))),
            (vec![ready("m"), model("d", false, false)], Some("d"), Some((false, unread))),
            (
                vec![ready("m"), model("d", true, true)],
                Some("d"),
                Some((true, "leave spec.draftModelRef out")),
            ),
        ];
        let of_adapters = [
            (vec![ready("m"), ready("x")], Some("x"), None),
            (vec![ready("m")], Some("x"), Some((true, "correct spec.adapters[french].modelRef.name"))),
            (vec![ready("m"), model("x", false, false)], Some("x"), Some((false, "Model x: its headers"))),
            (
                vec![ready("m"), model("x", true, true)],
                Some("x"),
                Some((true, "leave spec.adapters[french] out")),
            ),
        ];
        let of_drafts = of_drafts.map(|(there, draft, expected)| (there, draft, None, expected));
        let of_adapters = of_adapters.map(|(there, adapter, expected)| (there, None, adapter, expected));
        for (there, draft, adapter, expected) in of_drafts.into_iter().chain(of_adapters) {
            let spec = ModelDeploymentSpec {
                model_ref: LocalReference::new("m"),
                draft_model_ref: draft.map(LocalReference::new),
                adapters: adapter.iter().map(french).collect(),
                ..ModelDeploymentSpec::default()
            };
            let find = |name: &str| there.iter().find(|model| model.metadata.name.as_deref() == Some(name));
            match (unmet_precondition("ns", &spec, find), expected) {
                (None, None) => {}
                (Some(UnmetPrecondition { message, stalled, .. }), Some((person, words))) => {
                    assert!(message.contains(words) && stalled == person, "{stalled} {message}");
                }
                (got, expected) => panic!("{got:?}, not {expected:?}"),
            }
        }
    }
}
