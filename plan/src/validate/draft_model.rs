//! Validation of a draft model. Whether both tokenizers agree is checked by the engine, which has them;
//! headers only tell the vocabulary sizes.

use russet_crds::{EngineOptions, Speculation};
use russet_model::shape::ModelShape;

use super::{draft_notes, invalid};
use crate::memory_model::DraftModelShape;
use crate::note::Note;
use crate::snapshot::Snapshot;

/// Vocabularies of one family differ by less: sizes are padded to multiples that suit the training hardware,
/// such as 151,936 and 152,064 of Qwen 2.5's small and large models, which have the same tokenizer.
const MAX_VOCABULARY_PADDING: u32 = 1024;

const FIELD: &str = "spec.draftModelRef";

/// The Model `draft` if it can be the draft model of `(namespace, model, shape)`; the notes say why it
/// cannot.
pub(super) fn read(
    view: &Snapshot,
    (namespace, model, shape): (&str, &str, &ModelShape),
    draft: &str,
    engine: &EngineOptions,
    notes: &mut Vec<Note>,
) -> Option<DraftModelShape> {
    let mut refuse = |why: String| notes.push(invalid(FIELD.to_owned(), why));
    if engine.speculation == Speculation::Off {
        refuse(format!(
            "Model {draft} is the draft model, and spec.engine.speculation is Off, which allows none; leave one of them out"
        ));
    }
    if draft == model {
        refuse(format!(
            "Model {draft} would be its own draft model, which saves nothing; name a smaller one, or leave it out"
        ));
        return None;
    }
    if !shape.task.is_generate() {
        refuse(format!("Model {model} embeds or scores texts and generates none; leave the draft model out"));
        return None;
    }
    let Some(known) = view.models.get(&(namespace.to_owned(), draft.to_owned())) else {
        notes.push(Note::ModelUnknown { model: draft.to_owned() });
        return None;
    };
    if !known.task.is_generate() {
        refuse(format!(
            "Model {draft} embeds or scores texts and generates none; use a smaller model of the same family, or none"
        ));
        return None;
    }
    let (ours, theirs) = (shape.vocabulary, known.vocabulary);
    // Headers read by an older release may lack it.
    if ours > 0 && theirs > 0 && ours.abs_diff(theirs) >= MAX_VOCABULARY_PADDING {
        refuse(format!(
            "Model {draft} has {theirs} tokens and Model {model} {ours}, so what one means by a token the other does not; use a draft model of the same family, or none"
        ));
    }
    notes.extend(draft_notes(draft, known));
    Some(DraftModelShape { name: draft.to_owned(), shape: known.clone() })
}

#[cfg(test)]
mod tests {
    use russet_crds::{LocalReference, ModelDeploymentSpec};

    use super::*;
    use crate::note::join;
    use crate::validate::validate;

    #[test]
    fn draft_model_must_be_another_known_one_with_same_tokens() {
        let shape = |vocabulary: u32| ModelShape {
            architecture: "llama".to_owned(),
            layers: 1,
            layer_bytes: vec![1],
            vocabulary,
            ..ModelShape::default()
        };
        let mut view = Snapshot::default();
        let chat_unsupported = Some("no end-of-sequence token".to_owned());
        view.models
            .insert(("ns".to_owned(), "base".to_owned()), ModelShape { chat_unsupported, ..shape(152_064) });
        let strange = ModelShape { architecture: "mamba".to_owned(), ..shape(151_936) };
        for (name, shape) in [
            ("m", shape(152_064)),
            ("padded", shape(151_936)),
            ("untold", shape(0)),
            ("other", shape(128_256)),
            ("strange", strange),
        ] {
            view.models.insert(("ns".to_owned(), name.to_owned()), shape);
        }
        use Speculation::{Off, PromptLookup};
        for (draft, speculation, expected) in [
            ("padded", PromptLookup, Ok(())),
            ("untold", PromptLookup, Ok(())),
            ("base", PromptLookup, Ok(())),
            (
                "other",
                PromptLookup,
                Err("spec.draftModelRef: Model other has 128256 tokens and Model m 152064"),
            ),
            ("m", PromptLookup, Err("spec.draftModelRef: Model m would be its own draft model")),
            ("ghost", PromptLookup, Err("Model \"ghost\" does not exist or its headers are not read yet")),
            ("strange", PromptLookup, Err("Model \"strange\" has the architecture \"mamba\"")),
            (
                "padded",
                Off,
                Err(
                    "spec.draftModelRef: Model padded is the draft model, and spec.engine.speculation is Off",
                ),
            ),
        ] {
            let spec = ModelDeploymentSpec {
                model_ref: LocalReference::new("m"),
                draft_model_ref: Some(LocalReference::new(draft)),
                engine: EngineOptions { speculation, ..EngineOptions::default() }.into(),
                replicas: 1,
                ..ModelDeploymentSpec::default()
            };
            match (validate(&view, "ns", "chat", &spec), expected) {
                (Ok(valid), Ok(())) => {
                    assert_eq!(valid.draft.map(|draft| draft.name).as_deref(), Some(draft));
                }
                (Err(notes), Err(why)) => assert!(join(&notes).starts_with(why), "{draft}: {notes:?}"),
                (got, _) => panic!("{draft}, {speculation:?}: {got:?}"),
            }
        }
        // By itself it answers nobody.
        let spec =
            ModelDeploymentSpec { model_ref: LocalReference::new("base"), ..ModelDeploymentSpec::default() };
        let notes = join(&validate(&view, "ns", "chat", &spec).unwrap_err());
        assert!(notes.contains("no end-of-sequence token"), "{notes}");
    }
}
