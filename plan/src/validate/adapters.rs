//! Validation of a deployment's adapters. Whether each matrix of one is the model's is checked by the engine, which has
//! the names of all; headers tell how many layers it needs and what it takes.

use std::collections::BTreeSet;

use russet_crds::Adapter;
use russet_model::shape::ModelShape;

use super::{adapter_notes, invalid};
use crate::memory_model::DeployedAdapter;
use crate::note::Note;
use crate::snapshot::Snapshot;

/// The Models of `adapters` with their sizes, by name, so that their order in the spec means nothing; the notes say why one
/// cannot be an adapter of the Model `model`.
pub(super) fn read(
    view: &Snapshot,
    (namespace, model, shape): (&str, &str, &ModelShape),
    adapters: &[Adapter],
    notes: &mut Vec<Note>,
) -> Vec<DeployedAdapter> {
    let mut names = BTreeSet::new();
    let mut read = Vec::new();
    if !adapters.is_empty() && !shape.task.is_generate() {
        let why =
            format!("Model {model} embeds or scores texts, and adapters of such models are not supported");
        notes.push(invalid("spec.adapters".to_owned(), format!("{why}; leave them out")));
    }
    for adapter in adapters {
        let Adapter { name, model_ref } = adapter;
        let field = format!("spec.adapters[{name}]");
        let own = &model_ref.name;
        if !names.insert(name) {
            notes.push(invalid(
                field.clone(),
                "the name is there twice; give each adapter its own".to_owned(),
            ));
        }
        let Some(known) = view.models.get(&(namespace.to_owned(), own.clone())) else {
            notes.push(Note::ModelUnknown { model: own.clone() });
            continue;
        };
        let Some(sizes) = &known.adapter else {
            notes.push(invalid(
                field,
                format!("Model {own} is no adapter; name a Model with adapter_config.json"),
            ));
            continue;
        };
        notes.extend(adapter_notes(own, known));
        if sizes.layers > shape.layers {
            let (needed, has) = (sizes.layers, shape.layers);
            notes.push(invalid(
                field,
                format!(
                    "Model {own} changes layers up to {needed}, and Model {model} has {has}; use an adapter that was trained on this model"
                ),
            ));
        }
        read.push(DeployedAdapter { adapter: adapter.clone(), shape: sizes.clone() });
    }
    read.sort_by(|a, b| a.adapter.name.cmp(&b.adapter.name));
    read
}

#[cfg(test)]
mod tests {
    use russet_crds::{LocalReference, ModelDeploymentSpec};
    use russet_model::adapter::{AdapterKind, AdapterShape};
    use russet_model::description::Task;

    use super::*;
    use crate::note::join;
    use crate::validate::validate;

    fn model(layers: u32, adapter: Option<AdapterShape>) -> ModelShape {
        let bytes = if adapter.is_some() { Vec::new() } else { vec![1; layers as usize] };
        ModelShape {
            architecture: "llama".to_owned(),
            layers,
            layer_bytes: bytes,
            adapter,
            ..ModelShape::default()
        }
    }

    #[test]
    fn adapters_must_be_known_adapters_of_the_model() {
        let of = |layers, kind| Some(AdapterShape { layers, kind, bytes: 9, ..AdapterShape::default() });
        let broken =
            ModelShape { unsupported: Some("bias: \"all\"".into()), ..model(0, of(0, AdapterKind::Lora)) };
        let mut view = Snapshot::default();
        view.models.extend(
            [
                ("m", model(4, None)),
                ("other", model(4, None)),
                ("a", model(0, of(4, AdapterKind::Lora))),
                ("b", model(0, of(1, AdapterKind::Dora))),
                ("deep", model(0, of(5, AdapterKind::Lora))),
                ("broken", broken),
                ("newer", model(0, of(1, AdapterKind::Unknown))),
                ("embeds", ModelShape { task: Task::Embed, ..model(4, None) }),
            ]
            .map(|(name, shape)| (("ns".to_owned(), name.to_owned()), shape)),
        );
        let adapter = |&(name, model): &(&str, &str)| Adapter {
            name: name.into(),
            model_ref: LocalReference::new(model),
        };
        for (model, adapters, expected) in [
            ("m", vec![("x", "a"), ("y", "b")], ""),
            ("m", vec![("y", "a"), ("x", "a")], ""),
            ("m", vec![("x", "a"), ("x", "b")], "spec.adapters[x]: the name is there twice"),
            ("m", vec![("x", "gone")], "Model \"gone\" does not exist"),
            ("m", vec![("x", "other")], "spec.adapters[x]: Model other is no adapter"),
            ("m", vec![("x", "broken")], "bias: \"all\""),
            ("m", vec![("x", "newer")], "it is of a kind that only newer releases know"),
            ("embeds", vec![("x", "a")], "spec.adapters: Model embeds embeds or scores texts"),
            ("m", vec![("x", "deep")], "Model deep changes layers up to 5, and Model m has 4"),
            ("a", vec![], "Model a: it is an adapter; name it in spec.adapters of a deployment of the model"),
        ] {
            let spec = ModelDeploymentSpec {
                model_ref: LocalReference::new(model),
                adapters: adapters.iter().map(adapter).collect(),
                replicas: 1,
                ..ModelDeploymentSpec::default()
            };
            // There are no nodes, which is said too.
            let said = validate(&view, "ns", "d", &spec).map_or_else(
                |notes| join(&notes),
                |valid| {
                    assert_eq!(valid.adapters.len(), adapters.len());
                    assert!(valid.adapters.is_sorted_by_key(|deployed| deployed.adapter.name.clone()));
                    String::new()
                },
            );
            assert!(said.contains(expected), "{model} {adapters:?}: {said}");
            assert!(!expected.is_empty() || !said.contains("adapter"), "{said}");
        }
    }
}
