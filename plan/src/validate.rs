//! From what a person wrote to what can be planned. Everything that can be wrong with a spec is
//! found here, all of it at once; what comes out needs no second look.

use russet_crds::{KvRoom, LocalReference, ModelDeploymentSpec, Sharding, ShardingMode};
use russet_wire::partition::Partition;
use russet_wire::shape::ModelShape;

use crate::fit::Room;
use crate::note::Note;
use crate::snapshot::Snapshot;

pub use russet_wire::architecture::ARCHITECTURES;

/// Most ranks a group may have; the schema of ShardGroup says the same.
pub const MAX_RANKS: u32 = 64;

/// A deployment that makes sense for its model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidDeployment {
    /// Namespace of the ModelDeployment.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Name of the Model.
    pub model: String,
    /// Sizes of the model.
    pub shape: ModelShape,
    /// The split asked for.
    pub split: Split,
    /// Room for conversations.
    pub room: Room,
    /// Replicas; 0 stops the deployment.
    pub replicas: i32,
}

/// The split asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Split {
    /// One node when the model fits one, else as few as hold it.
    Auto,
    /// One node.
    Single,
    /// A pipeline over as few nodes as hold it, two at least.
    Pipeline,
    /// A pipeline over so many nodes.
    Ranks(u32),
    /// A pipeline with exactly these layers on each rank.
    Layers(Vec<u32>),
}

/// Reads a ModelDeployment; the notes name everything that is wrong with it.
pub fn validate(
    view: &Snapshot,
    namespace: &str,
    name: &str,
    spec: &ModelDeploymentSpec,
) -> Result<ValidDeployment, Vec<Note>> {
    let ModelDeploymentSpec {
        model_ref: LocalReference { name: model },
        sharding: Sharding { mode, ranks, layers_per_rank, kv, .. },
        replicas,
    } = spec;
    let Some(shape) = view.models.get(&(namespace.to_owned(), model.clone())) else {
        return Err(vec![Note::ModelUnknown { model: model.clone() }]);
    };
    let mut notes = shape_notes(model, shape);
    if !notes.is_empty() {
        return Err(notes);
    }
    let room = room(kv, shape, &mut notes);
    let split = split(*mode, *ranks, layers_per_rank.as_deref(), shape, &mut notes);
    if *replicas < 0 {
        notes.push(invalid(
            "spec.replicas",
            format!("{replicas} replicas cannot be; use 0 to stop the deployment"),
        ));
    }
    if !notes.is_empty() {
        return Err(notes);
    }
    Ok(ValidDeployment {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        model: model.clone(),
        shape: shape.clone(),
        split,
        room,
        replicas: *replicas,
    })
}

/// What is wrong with a model whatever is asked of it; empty when the engine can run it.
pub fn shape_notes(model: &str, shape: &ModelShape) -> Vec<Note> {
    let mut notes = Vec::new();
    if !ARCHITECTURES.contains(&shape.architecture.as_str()) {
        notes.push(Note::Architecture { model: model.to_owned(), architecture: shape.architecture.clone() });
    }
    if shape.layers == 0 || shape.layer_bytes.len() != shape.layers as usize {
        notes.push(Note::Headers {
            model: model.to_owned(),
            why: format!(
                "config.json names {} layers, the files hold {}",
                shape.layers,
                shape.layer_bytes.len()
            ),
        });
    }
    notes
}

fn room(kv: &KvRoom, shape: &ModelShape, notes: &mut Vec<Note>) -> Room {
    let KvRoom { context_tokens, max_sequences, headroom_percent } = kv;
    for (field, value) in
        [("spec.sharding.kv.contextTokens", context_tokens), ("spec.sharding.kv.maxSequences", max_sequences)]
    {
        if *value == 0 {
            notes.push(invalid(field, "0 leaves no room for any conversation; use at least 1".to_owned()));
        }
    }
    Room {
        // A model without a stated limit takes what is asked for.
        context_tokens: match shape.context_length {
            0 => *context_tokens,
            limit => (*context_tokens).min(limit),
        },
        max_sequences: *max_sequences,
        headroom_percent: *headroom_percent,
    }
}

fn split(
    mode: ShardingMode,
    ranks: Option<u32>,
    layers_per_rank: Option<&[u32]>,
    shape: &ModelShape,
    notes: &mut Vec<Note>,
) -> Split {
    const RANKS: &str = "spec.sharding.ranks";
    const LAYERS: &str = "spec.sharding.layersPerRank";
    if let ShardingMode::Tensor | ShardingMode::Hybrid = mode {
        notes.push(invalid(
            "spec.sharding.mode",
            format!("{mode:?} is not in this release; use Pipeline or Auto"),
        ));
    }
    if let Some(ranks) = ranks {
        if ranks == 0 || ranks > MAX_RANKS {
            notes.push(invalid(RANKS, format!("{ranks} ranks cannot be; use 1 to {MAX_RANKS}")));
        } else if ranks > shape.layers {
            notes.push(invalid(
                RANKS,
                format!(
                    "{ranks} ranks cannot share {} layers; every rank needs one, so ask for at most {}",
                    shape.layers, shape.layers
                ),
            ));
        }
    }
    if let Some(layers) = layers_per_rank {
        if layers.len() > MAX_RANKS as usize {
            notes.push(invalid(
                LAYERS,
                format!("{} ranks are too many; name at most {MAX_RANKS}", layers.len()),
            ));
        }
        if let Err(error) = Partition::new(layers.to_vec(), shape.layers) {
            notes.push(invalid(LAYERS, error.to_string()));
        }
        if let Some(ranks) = ranks
            && ranks as usize != layers.len()
        {
            notes.push(invalid(
                LAYERS,
                format!("names {} ranks, spec.sharding.ranks says {ranks}; make them equal", layers.len()),
            ));
        }
    }
    let size = layers_per_rank.map(|layers| layers.len() as u32).or(ranks);
    if let (ShardingMode::Single, Some(size)) = (mode, size)
        && size != 1
    {
        notes.push(invalid(
            "spec.sharding.mode",
            format!("Single runs on one rank, not {size}; leave ranks out or use Pipeline"),
        ));
    }
    match (size, layers_per_rank) {
        (Some(1), _) => Split::Single,
        (Some(_), Some(layers)) => Split::Layers(layers.to_vec()),
        (Some(ranks), None) => Split::Ranks(ranks),
        (None, _) => match mode {
            ShardingMode::Single => Split::Single,
            ShardingMode::Pipeline => Split::Pipeline,
            ShardingMode::Auto | ShardingMode::Tensor | ShardingMode::Hybrid | ShardingMode::Unknown => {
                Split::Auto
            }
        },
    }
}

fn invalid(field: &'static str, why: String) -> Note {
    Note::Invalid { field, why }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view() -> Snapshot {
        let llama = ModelShape {
            architecture: "llama".to_owned(),
            layers: 4,
            layer_bytes: vec![1; 4],
            context_length: 2048,
            ..ModelShape::default()
        };
        let mut view = Snapshot::default();
        let mut model =
            |name: &str, shape: ModelShape| view.models.insert(("ns".to_owned(), name.to_owned()), shape);
        model("alien", ModelShape { architecture: "mamba".to_owned(), ..llama.clone() });
        model("torn", ModelShape { layer_bytes: vec![1; 3], ..llama.clone() });
        model("llama", llama);
        view
    }

    fn spec(
        model: &str,
        mode: ShardingMode,
        ranks: Option<u32>,
        layers: Option<Vec<u32>>,
    ) -> ModelDeploymentSpec {
        ModelDeploymentSpec {
            model_ref: LocalReference::new(model),
            sharding: Sharding { mode, ranks, layers_per_rank: layers, ..Sharding::default() },
            replicas: 1,
        }
    }

    #[test]
    fn every_spec_becomes_a_split_or_says_what_is_wrong() {
        use ShardingMode::*;
        for (model, mode, ranks, layers, want) in [
            ("llama", Auto, None, None, Ok(Split::Auto)),
            ("llama", Auto, Some(1), None, Ok(Split::Single)),
            ("llama", Auto, Some(2), None, Ok(Split::Ranks(2))),
            ("llama", Single, None, None, Ok(Split::Single)),
            ("llama", Pipeline, None, None, Ok(Split::Pipeline)),
            ("llama", Pipeline, Some(1), None, Ok(Split::Single)),
            ("llama", Pipeline, Some(4), None, Ok(Split::Ranks(4))),
            ("llama", Auto, None, Some(vec![3, 1]), Ok(Split::Layers(vec![3, 1]))),
            ("llama", Auto, None, Some(vec![4]), Ok(Split::Single)),
            ("llama", Single, Some(2), None, Err("Single runs on one rank, not 2")),
            ("llama", Pipeline, Some(5), None, Err("5 ranks cannot share 4 layers")),
            ("llama", Pipeline, Some(0), None, Err("0 ranks cannot be")),
            ("llama", Auto, Some(3), Some(vec![2, 2]), Err("names 2 ranks, spec.sharding.ranks says 3")),
            ("llama", Auto, None, Some(vec![2, 1]), Err("adds up to 3 layers, but the model has 4")),
            ("llama", Auto, None, Some(vec![4, 0]), Err("rank 1 would hold no layers")),
            ("llama", Tensor, Some(2), None, Err("Tensor is not in this release; use Pipeline")),
            ("llama", Hybrid, None, None, Err("Hybrid is not in this release; use Pipeline")),
            (
                "alien",
                Auto,
                None,
                None,
                Err("architecture \"mamba\", which this engine does not know; it knows llama, mistral"),
            ),
            ("torn", Auto, None, None, Err("config.json names 4 layers, the files hold 3")),
            ("ghost", Auto, None, None, Err("Model \"ghost\" does not exist")),
        ] {
            let got = validate(&view(), "ns", "chat", &spec(model, mode, ranks, layers.clone()));
            match (got, want) {
                (Ok(valid), Ok(split)) => assert_eq!(valid.split, split),
                (Err(notes), Err(text)) => {
                    assert!(crate::note::join(&notes).contains(text), "{notes:?} lacks {text:?}")
                }
                (got, want) => panic!("{model} {mode:?} {ranks:?} {layers:?}: {got:?}, wanted {want:?}"),
            }
        }
    }

    #[test]
    fn the_context_is_never_longer_than_the_models_own() {
        let valid = validate(&view(), "ns", "chat", &spec("llama", ShardingMode::Auto, None, None)).unwrap();
        assert_eq!(valid.room, Room { context_tokens: 2048, max_sequences: 4, headroom_percent: 5 });
    }

    #[test]
    fn all_mistakes_are_named_at_once() {
        let mut spec = spec("llama", ShardingMode::Tensor, Some(9), None);
        spec.replicas = -1;
        assert_eq!(validate(&view(), "ns", "chat", &spec).unwrap_err().len(), 3);
    }
}
