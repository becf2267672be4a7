//! Benchmark: what the masks of a grammar cost, on a vocabulary of 151,936 tokens, Qwen's own. The same engine answers with
//! and without a JSON Schema, in turns. Prints one JSON object per figure for `cargo xtask bench structured`, which sets
//! `RUSSET_VOCABULARIES`.

#![allow(clippy::unwrap_used, reason = "a bench fails as a whole")]

#[path = "../tests/support/engines.rs"]
mod engines;
#[path = "../tests/support/identities.rs"]
mod identities;
#[path = "../tests/support/model.rs"]
mod model;
#[path = "support/peer.rs"]
mod peer;
#[path = "support/speed.rs"]
mod speed;
#[path = "support/vocabulary.rs"]
mod vocabulary;

use std::path::{Path, PathBuf};

use russet_rpc::engine::engine_client::EngineClient;
use russet_wire::engine_options::Speculation;
use russet_wire::request::{GenerationRequest, StructuredOutput};
use tonic::transport::Channel;

use engines::{EngineHarness, say};
use model::Shape;
use peer::tell;
use speed::{GenerationSpeed, decode, measure_request};

/// Small, so that a mask weighs: its decode step takes some 50 ms on two slow cores.
const MODEL: Shape =
    Shape { hidden: 256, intermediate: 1024, heads: 4, kv_heads: 4, layers: 12, spread: 0.05 };
/// Qwen's vocabulary.
const VOCABULARY: usize = 151_936;
/// A mask may cost a twentieth of a decode step.
const MIN_RATIO: f64 = 0.95;
/// Odd, so that a median is one of them.
const ROUNDS: usize = 7;

fn main() {
    tokio::runtime::Runtime::new().unwrap().block_on(run());
}

async fn run() {
    let folder = PathBuf::from(std::env::var_os("RUSSET_VOCABULARIES").expect("cargo xtask bench sets it"));
    let model = model::random_model_of(MODEL, VOCABULARY);
    vocabulary::write(&folder.join("ggml-vocab-qwen2.gguf"), "<|im_end|>", model.path());
    let mut lab = EngineHarness::new();
    lab.config.orphan_seconds = 3600;
    lab.config.prefix_cache = false;
    lab.config.options.speculation = Speculation::Off;
    for overlap in [false, true] {
        compare(&mut lab, model.path(), overlap).await;
    }
}

/// With `overlap`, steps without a grammar start before the last token is read.
async fn compare(lab: &mut EngineHarness, model: &Path, overlap: bool) {
    use russet_wire::engine_config::OverlapScheduling;
    lab.config.overlap_scheduling = if overlap { OverlapScheduling::On } else { OverlapScheduling::Off };
    let engines = lab.start(model, &[MODEL.layers]);
    let mut client = lab.client(&engines[0]).await;
    let schemas = [
        ("a string", r#"{"type": "string"}"#),
        (
            "objects",
            r#"{"type": "array", "minItems": 100, "items": {"type": "object", "additionalProperties": false,
                "required": ["name", "age"], "properties": {"name": {"type": "string", "maxLength": 12},
                "age": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["red", "green"]}}}}}"#,
        ),
    ];
    let mut free = Vec::new();
    let mut masked = [Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        let rate = measure(&mut client, None).await;
        if round > 0 {
            free.push(rate);
        }
        for (rates, (_, schema)) in masked.iter_mut().zip(schemas) {
            let rate = measure(&mut client, Some(StructuredOutput::JsonSchema(schema.to_owned()))).await;
            if round > 0 {
                rates.push(rate);
            }
        }
    }
    let free = decode(&free);
    for (rates, (name, _)) in masked.into_iter().zip(schemas) {
        let without = if overlap { ", beside steps that overlap" } else { "" };
        let what = format!("decode with the masks of a schema of {name}, 151,936 tokens{without}");
        tell(&what, "tokens/s", if overlap { 0.0 } else { MIN_RATIO }, decode(&rates), free);
    }
}

/// The speed of a response of this output.
async fn measure(client: &mut EngineClient<Channel>, output: Option<StructuredOutput>) -> GenerationSpeed {
    let asked = say("Fill in the form, please, and take your time.");
    measure_request(client, GenerationRequest { structured_output: output, ..asked }).await.1
}
