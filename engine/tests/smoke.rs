//! The shipped smoke model in real engines: it answers the demo's questions, and adds numbers outside its
//! training data, on one rank, as a pipeline and in four bits. With damaged weights it never serves.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/engines.rs"]
mod engines;
#[path = "support/identities.rs"]
mod identities;
#[path = "support/share.rs"]
mod share;

use std::path::{Path, PathBuf};

use futures::StreamExt as _;
use futures::future::join_all;
use russet_rpc::engine as pb;
use russet_wire::conversation::Message;
use russet_wire::event::{FinishReason, GenerationEvent};
use russet_wire::request::GenerationRequest;
use serde::Deserialize;

use engines::{EngineHarness, ask, collect, say};

/// Layers of the smoke model.
const LAYERS: usize = 4;
/// Minimum share of correct sums, in percent.
const MIN_CORRECT_PERCENT: usize = 97;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("smoke")
}

/// A conversation and the only right answer.
#[derive(Deserialize)]
struct Case {
    messages: Vec<Message>,
    expect: String,
}

fn cases(file: &str) -> Vec<Case> {
    let text = std::fs::read_to_string(folder().join(file)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Sends every case to a group, as many at once as it has slots; returns the wrong answers.
async fn wrong_answers(model: &str, layers: &[usize], cases: &[Case]) -> Vec<String> {
    let mut lab = EngineHarness::new();
    // On a busy machine, hundreds of sums take longer than the orphan timeout of an engine without an agent.
    lab.config.orphan_seconds = 3600;
    let engines = lab.start(&folder().join(model), layers);
    let client = lab.client(&engines[0]).await;
    let answers = futures::stream::iter(cases).map(|Case { messages, expect }| {
        let mut client = client.clone();
        async move {
            let request = GenerationRequest { messages: messages.clone(), max_tokens: Some(600), ..say("") };
            let (_, text, end) = collect(&mut ask(&mut client, request).await).await;
            let stopped = matches!(end, GenerationEvent::Finished { reason: FinishReason::Stop, .. });
            (&text != expect || !stopped).then(|| format!("{model} on {layers:?}: {text:?}, not {expect:?}"))
        }
    });
    answers.buffer_unordered(4).filter_map(std::future::ready).collect().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_prompt_of_the_demo_is_answered_right() {
    let cases = cases("prompts.jsonl");
    let mut wrong = Vec::new();
    for layers in [&[LAYERS][..], &[1, LAYERS - 1]] {
        wrong.extend(wrong_answers("model", layers, &cases).await);
    }
    assert!(wrong.is_empty(), "{} wrong answers:\n{}", wrong.len(), wrong.join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_out_sums_are_right_on_two_ranks_and_in_four_bits() {
    let cases = cases("heldout.jsonl");
    let groups =
        vec![("model", &[LAYERS][..]), ("model", &[LAYERS / 2, LAYERS / 2]), ("model-4bit", &[LAYERS])];
    for (model, layers) in share::of_this_run(groups, 3) {
        let wrong = wrong_answers(model, layers, &cases).await;
        let right = cases.len() - wrong.len();
        eprintln!("{model} on {layers:?}: {right} of {} right", cases.len());
        assert!(
            right * 100 >= MIN_CORRECT_PERCENT * cases.len(),
            "{right} of {} right:\n{}",
            cases.len(),
            wrong.join("\n")
        );
    }
}

/// The smoke model with NaN values in one tensor.
fn damaged(tensor: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(folder().join("model")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..data]).unwrap();
    let offset = |end: usize| data + header[tensor]["data_offsets"][end].as_u64().unwrap() as usize;
    // All bits set is NaN in every element type of the weights.
    bytes[offset(0)..offset(1)].fill(0xFF);
    std::fs::write(&path, bytes).unwrap();
    dir
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nan_weights_fail_every_rank_before_it_serves() {
    for (tensor, layers) in [
        ("model.norm.weight", &[LAYERS][..]),
        // A tensor of the highest rank, whose failure rank 0 sees only in the data from the ring.
        ("model.layers.0.input_layernorm.weight", &[1, LAYERS - 1]),
    ] {
        let model = damaged(tensor);
        let lab = EngineHarness::new();
        let mut engines = lab.start(model.path(), layers);
        let ends = engines.iter().map(|engine| engine.until(|state| state.phase() >= pb::Phase::Serving));
        for (engine, state) in engines.iter().zip(join_all(ends).await) {
            assert_eq!(
                (state.phase(), state.cause()),
                (pb::Phase::Failed, pb::FailureCause::Smoke),
                "{tensor}, {}: {}",
                engine.node,
                state.message
            );
            assert!(state.message.contains("some logits are no finite numbers"), "{}", state.message);
        }
        for engine in &mut engines {
            assert_eq!(engine.exit().await.code(), Some(1), "{tensor}, {}", engine.node);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn smoke_test_leaves_nothing_in_the_prefix_cache() {
    let case = &cases("prompts.jsonl")[0];
    let request = GenerationRequest { messages: case.messages.clone(), max_tokens: Some(600), ..say("") };
    let mut answers = Vec::new();
    for layers in [&[LAYERS][..], &[1, LAYERS - 1]] {
        let mut lab = EngineHarness::new();
        // A single slot, which the smoke prompt uses.
        lab.config.max_sequences = 1;
        let engines = lab.start(&folder().join("model"), layers);
        let mut client = lab.client(&engines[0]).await;
        for _ in 0..2 {
            let (ids, text, _) = collect(&mut ask(&mut client, request.clone()).await).await;
            assert_eq!(text, case.expect, "{layers:?}");
            answers.push(ids);
        }
    }
    assert!(answers.windows(2).all(|pair| pair[0] == pair[1]), "{answers:?}");
}
