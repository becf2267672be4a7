//! The agent reads a folder before its weights are copied, the engine when it loads them: one answer for every folder,
//! down to the texts. Nothing is accepted for placement and refused by the engine.

use russet_agent::store::{Context, SourceSpec, Store, StoreError};
use russet_model::shape::ModelShape;

use super::*;

/// What the agent reports of a folder.
async fn agent(dir: &Path) -> Result<ModelShape, StoreError> {
    // Already installed by another test of this process: the same provider.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let context = Context::new("http://127.0.0.1:1", vec![dir.to_owned()]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().to_owned(), context).unwrap();
    let uri = format!("file://{}", dir.display());
    let spec = SourceSpec { uri, revision: None, pinned: false, sha256: None, ..Default::default() };
    store.headers(&spec).await.map(|headers| headers.shape)
}

/// One folder: what is changed of a small llama, and what both say.
struct Case {
    what: &'static str,
    config: Value,
    files: Vec<(&'static str, Vec<u8>)>,
    said: Expected,
}

enum Expected {
    /// Both run it, and its shape is so.
    Runs(fn(&ModelShape) -> bool),
    /// Both refuse it with this text, and the agent reports a shape that says so.
    Unsupported(&'static str),
    /// The files are damaged or incomplete.
    Fails(&'static str),
}

fn with(fields: &[(&str, Value)]) -> Value {
    let mut config = config();
    for (field, value) in fields {
        config[*field] = value.clone();
    }
    config
}

/// A file that claims a header of so many bytes, and has them.
fn long_header(bytes: u64) -> Vec<u8> {
    let mut file = bytes.to_le_bytes().to_vec();
    file.resize(8 + bytes as usize, b' ');
    file
}

fn cases() -> Vec<Case> {
    let whole = safetensors(&tensors());
    let single = || vec![(SINGLE, whole.clone())];
    let mut with_head = tensors();
    with_head.push(("lm_head.weight".into(), "F32", vec![8, 64]));
    let (mut first, mut second) = (tensors(), tensors());
    first.truncate(4);
    second.drain(..4);
    let [one, two] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let stale = br#"{"weight_map":{"a":"model-00001-of-00002.safetensors"}}"#.to_vec();
    let mut unbiased = tensors();
    unbiased.retain(|tensor| !tensor.0.ends_with(".bias"));
    let mut strange = tensors();
    strange.push(("model.layers.0.self_attn.sinks.bias".into(), "F32", vec![4]));
    let runs = |what, config, files, shape| Case { what, config, files, said: Expected::Runs(shape) };
    let unsupported =
        |what, config, files, said| Case { what, config, files, said: Expected::Unsupported(said) };
    let fails = |what, config, files, said| Case { what, config, files, said: Expected::Fails(said) };
    vec![
        runs("no context length", config(), single(), |shape| shape.context_length == 2048),
        runs("a context length", with(&[("max_position_embeddings", json!(512))]), single(), |shape| {
            shape.context_length == 512
        }),
        runs(
            "tied, and a head in the files",
            with(&[("tie_word_embeddings", json!(true))]),
            vec![(SINGLE, safetensors(&with_head))],
            |shape| shape.tied && shape.head_bytes == 64 * 4,
        ),
        runs("a head in the files", config(), vec![(SINGLE, safetensors(&with_head))], |shape| !shape.tied),
        runs(
            "another group size in config.json than in the shapes",
            with(&[("quantization", json!({"group_size": 32, "bits": 8}))]),
            single(),
            |shape| shape.quantization_group_size == 64,
        ),
        runs(
            "shards without an index",
            config(),
            vec![(one, safetensors(&first)), (two, safetensors(&second))],
            |shape| shape.layers == 1,
        ),
        runs(
            "shards without an index, and other files besides",
            config(),
            vec![
                (one, safetensors(&first)),
                (two, safetensors(&second)),
                ("consolidated.safetensors", whole.clone()),
                ("adapters.safetensors", whole.clone()),
            ],
            |shape| shape.layers == 1,
        ),
        runs(
            "an index of one of the shards",
            config(),
            vec![(one, safetensors(&first)), (two, safetensors(&second)), (INDEX, stale.clone())],
            |shape| shape.layers == 1,
        ),
        runs("an empty index", config(), vec![(SINGLE, whole.clone()), (INDEX, Vec::new())], |shape| {
            shape.notes[0].contains("is passed over")
        }),
        unsupported(
            "a field that nobody knows",
            with(&[("attn_logit_softcapping", json!(50.0))]),
            single(),
            "attn_logit_softcapping: this release does not know the field",
        ),
        runs("a stale index", config(), vec![(SINGLE, whole.clone()), (INDEX, stale)], |shape| {
            shape.layers == 1
        }),
        runs(
            "a window shorter than the context",
            with(&[
                ("model_type", json!("mistral")),
                ("max_position_embeddings", json!(512)),
                ("sliding_window", json!(128)),
            ]),
            single(),
            |shape| {
                let window = shape.layer_groups[0].state.window_tokens;
                shape.context_length == 512 && window == Some(128 + 64 + 256)
            },
        ),
        unsupported(
            "a rope scaling",
            with(&[("rope_scaling", json!({"rope_type": "dynamic", "factor": 2.0}))]),
            single(),
            "rope scaling \"dynamic\"",
        ),
        unsupported(
            "layer types",
            with(&[("layer_types", json!(["sliding_attention"]))]),
            single(),
            "sliding_attention",
        ),
        unsupported(
            "another packing",
            with(&[("quantization_config", json!({"quant_method": "bitnet"}))]),
            single(),
            "bitnet",
        ),
        unsupported(
            "a family",
            with(&[("model_type", json!("mamba"))]),
            single(),
            "\"mamba\" is not supported",
        ),
        unsupported(
            "a bias that no config names",
            config(),
            vec![(SINGLE, safetensors(&strange))],
            "sinks.bias",
        ),
        unsupported(
            "biases that are not there",
            config(),
            vec![(SINGLE, safetensors(&unbiased))],
            "q_proj.bias is missing",
        ),
        fails("a shard is missing", config(), vec![(one, safetensors(&first))], two),
        fails(
            "a header beyond the limit",
            config(),
            vec![(SINGLE, long_header((16 << 20) + 1))],
            "limit of 16777216",
        ),
    ]
}

#[tokio::test]
async fn agent_and_engine_agree_on_every_folder() {
    for Case { what, config, files, said } in cases() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(CONFIG), config.to_string()).unwrap();
        for (name, bytes) in &files {
            std::fs::write(dir.path().join(name), bytes).unwrap();
        }
        std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
        let tokenizer = r#"{"eos_token": "</s>", "chat_template": "{{ messages }}"}"#;
        std::fs::write(dir.path().join("tokenizer_config.json"), tokenizer).unwrap();
        let reported = agent(dir.path()).await;
        let opened = Checkpoint::open(dir.path());
        match (said, reported, opened) {
            (Expected::Runs(is_right), Ok(shape), Ok(checkpoint)) => {
                assert_eq!(shape.unsupported, None, "{what}");
                // The agent alone says which files it passed over.
                let own = ModelShape::of(checkpoint.model());
                assert!(shape.notes.starts_with(&own.notes), "{what}");
                let (notes, quantized) = (shape.notes.clone(), shape.quantized.clone());
                assert_eq!(shape, ModelShape { notes, quantized, ..own }, "{what}");
                assert!(is_right(&shape), "{what}: {shape:?}");
            }
            (Expected::Unsupported(said), Ok(shape), Err(error)) => {
                let reported = shape.unsupported.unwrap_or_default();
                assert!(reported.contains(said), "{what}: {reported}");
                assert!(error.to_string().ends_with(&reported), "{what}: {error} / {reported}");
            }
            (Expected::Fails(said), Err(StoreError::Header(reported)), Err(error)) => {
                assert!(reported.to_string().contains(said), "{what}: {reported}");
                assert!(error.to_string().ends_with(&reported.to_string()), "{what}: {error} / {reported}");
            }
            (_, reported, opened) => panic!("{what}: {reported:?} / {:?}", opened.map(|_| "opened")),
        }
    }
}
