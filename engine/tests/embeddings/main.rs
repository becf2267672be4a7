//! Vectors and scores are those of Transformers and sentence-transformers: of random models of each family, and of
//! all-MiniLM-L6-v2 with its own tokenizer. What they gave is in `goldens.json`, so that no run needs PyTorch; `goldens.py`
//! writes it anew, for a Python that has it:
//! `RUSSET_UPDATE_GOLDENS=1 RUSSET_TORCH_PYTHON=… cargo test -p russet-engine --test embeddings`.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "../support/engines.rs"]
mod engines;
#[path = "../support/identities.rs"]
mod identities;
#[path = "../support/model.rs"]
mod model;
mod random_models;
mod service;

use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use russet_engine::executor::{Executor as _, PooledModel, PooledText};
use russet_engine::pooling::{TextInput, TextTokenizer};
use russet_engine::runtime::{Runtime, RuntimeConfig};
use russet_tests::provided;
use serde_json::{Value, json};

use random_models::{CASES, RandomModel};

const GOLDENS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/embeddings/goldens.json");
/// Texts for MiniLM: of one word and of several lines, with accents, other scripts and words it does not know.
const TEXTS: [&str; 6] = [
    "Hello",
    "The quick brown fox jumps over the lazy dog.",
    "Ein Würfel fällt selten auf die Kante; un café crème, s'il vous plaît!",
    "北京 and Москва are capitals 🙂",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "Rust is a language.\nIt has no garbage collector, and yet its programs free what they allocate: at the end of a scope, by the rules of ownership that its compiler checks.",
];

/// A model on a thread of its own, in the type of its files.
struct Loaded {
    runtime: Runtime,
    model: PooledModel,
}

impl Loaded {
    fn new(dir: &Path) -> Self {
        let runtime = Runtime::start(RuntimeConfig::alone(dir.to_owned())).unwrap();
        runtime.load().blocking_recv().unwrap().unwrap();
        let model = runtime.pooled_model().unwrap();
        Self { runtime, model }
    }

    /// The vector of each, computed together.
    fn vectors(&self, mut texts: Vec<(usize, PooledText)>) -> Vec<Vec<f32>> {
        texts.sort_by_key(|(_, text)| text.tokens.len());
        let order: Vec<usize> = texts.iter().map(|(index, _)| *index).collect();
        let all = texts.into_iter().map(|(_, text)| text).collect();
        let pooled = self.runtime.pool(all).blocking_recv().unwrap().unwrap();
        let mut vectors = vec![Vec::new(); order.len()];
        order.into_iter().zip(pooled).for_each(|(index, vector)| vectors[index] = vector);
        vectors
    }
}

fn cosine(one: &[f32], other: &[f32]) -> f64 {
    let dot = |one: &[f32], other: &[f32]| -> f64 {
        one.iter().zip(other).map(|(one, other)| f64::from(*one) * f64::from(*other)).sum()
    };
    dot(one, other) / (dot(one, one) * dot(other, other)).sqrt()
}

/// That these are the vectors of a case, or that the reference's are written down as its goldens.
fn check(case: &str, request: &Value, dir: &Path, vectors: &[Vec<f32>]) {
    let mut goldens: Value = serde_json::from_slice(&std::fs::read(GOLDENS).unwrap()).unwrap();
    if std::env::var_os("RUSSET_UPDATE_GOLDENS").is_some() {
        let python =
            std::env::var_os("RUSSET_TORCH_PYTHON").expect("a Python with torch and sentence-transformers");
        let script = Path::new(GOLDENS).with_file_name("goldens.py");
        let output = Command::new(python).arg(script).arg(dir).arg(request.to_string()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        goldens[case] = serde_json::from_slice(&output.stdout).unwrap();
        std::fs::write(GOLDENS, format!("{goldens:#}\n")).unwrap();
    }
    let expected = goldens[case].as_array().unwrap_or_else(|| panic!("{case} has no goldens"));
    assert_eq!(vectors.len(), expected.len(), "{case}");
    for (index, (vector, expected)) in vectors.iter().zip(expected).enumerate() {
        let bytes = STANDARD.decode(expected.as_str().unwrap()).unwrap();
        let expected: Vec<f32> =
            bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
        assert_eq!(vector.len(), expected.len(), "{case}, text {index}");
        let pairs = vector.iter().zip(&expected);
        let apart = pairs.map(|(one, other)| (one - other).abs()).fold(0.0, f32::max);
        assert!(apart < 1e-4, "{case}, text {index}: a number is off by {apart}");
        let cosine = cosine(vector, &expected);
        println!("{case}, text {index}: cosine 1 - {:.1e}, numbers within {apart:.1e}", 1.0 - cosine);
        assert!(cosine >= 0.99999, "{case}, text {index}: {cosine}");
    }
}

#[test]
fn vectors_of_every_family_are_those_of_transformers() {
    for case in CASES {
        let RandomModel { dir, texts, request } = (case.make)();
        let loaded = Loaded::new(dir.path());
        let together = loaded.vectors(texts.iter().cloned().enumerate().collect());
        check(case.name, &request, dir.path(), &together);
        // Alone, each is what it is among others.
        for (text, vector) in texts.iter().zip(&together) {
            let alone = loaded.vectors(vec![(0, text.clone())]);
            let pairs = alone[0].iter().zip(vector);
            let apart = pairs.map(|(one, other)| (one - other).abs()).fold(0.0, f32::max);
            assert!(apart < 1e-5, "{}: {apart} with others of {} tokens", case.name, text.tokens.len());
        }
    }
}

#[test]
fn minilm_embeds_like_sentence_transformers() {
    let Some(dir) = provided::path("RUSSET_MINILM") else { return };
    let loaded = Loaded::new(&dir);
    let tokenizer = TextTokenizer::load(&dir).unwrap();
    let tokens = |text: &str| tokenizer.tokens(TextInput::Text(text.to_owned()), &loaded.model);
    let texts = TEXTS.iter().map(|text| tokens(text).unwrap());
    let vectors = loaded.vectors(texts.enumerate().collect());
    check("all-MiniLM-L6-v2", &json!({"texts": TEXTS}), &dir, &vectors);
    assert_eq!(loaded.model.width, 384);
}

/// The folder of the goldens' script, for the message of a missing file.
#[test]
fn goldens_have_no_case_that_is_not_run() {
    let goldens: Value = serde_json::from_slice(&std::fs::read(PathBuf::from(GOLDENS)).unwrap()).unwrap();
    for name in goldens.as_object().unwrap().keys() {
        let known = CASES.iter().any(|case| case.name == name) || name == "all-MiniLM-L6-v2";
        assert!(known, "{name} is no case; take it out of {GOLDENS}");
    }
}
