//! The shipped smoke model in real engines: it answers what the demo may ask, and adds numbers it was
//! never shown, on one rank, as a pipeline and in four bits.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/engines.rs"]
mod engines;
#[path = "support/identities.rs"]
mod identities;

use std::path::{Path, PathBuf};

use futures::StreamExt as _;
use russet_wire::event::{Event, FinishReason};
use russet_wire::request::{GenerationRequest, Message};
use serde::Deserialize;

use engines::{Lab, ask, collect, say};

/// Layers of the smoke model.
const LAYERS: usize = 4;
/// Share of sums it has to get right, in percent.
const ENOUGH: usize = 97;

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

/// Asks a group every case, as many at once as it has slots; returns the wrong answers.
async fn wrong_answers(model: &str, layers: &[usize], cases: &[Case]) -> Vec<String> {
    let mut lab = Lab::new();
    // Hundreds of sums take longer than an engine waits for an agent, on a busy machine.
    lab.flags = vec!["--orphan-seconds", "3600"];
    let engines = lab.start(&folder().join(model), layers);
    let client = lab.client(&engines[0]).await;
    let answers = futures::stream::iter(cases).map(|Case { messages, expect }| {
        let mut client = client.clone();
        async move {
            let request = GenerationRequest { messages: messages.clone(), max_tokens: Some(600), ..say("") };
            let (_, text, end) = collect(&mut ask(&mut client, request).await).await;
            let stopped = matches!(end, Event::Finished { reason: FinishReason::Stop, .. });
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
async fn sums_it_never_saw_are_right_on_one_rank_on_two_and_in_four_bits() {
    let cases = cases("heldout.jsonl");
    for (model, layers) in
        [("model", &[LAYERS][..]), ("model", &[LAYERS / 2, LAYERS / 2]), ("model-4bit", &[LAYERS])]
    {
        let wrong = wrong_answers(model, layers, &cases).await;
        let right = cases.len() - wrong.len();
        eprintln!("{model} on {layers:?}: {right} of {} right", cases.len());
        assert!(
            right * 100 >= ENOUGH * cases.len(),
            "{right} of {} right:\n{}",
            cases.len(),
            wrong.join("\n")
        );
    }
}
