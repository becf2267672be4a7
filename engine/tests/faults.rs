//! Failures in real engines and their scope: NaN logits end only the request that causes them; an
//! out-of-memory condition ends the engine with a reason; and `/readyz` is correct throughout.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/engines.rs"]
mod engines;
#[path = "support/identities.rs"]
mod identities;
#[path = "support/model.rs"]
mod model;

use std::path::Path;
use std::time::Duration;

use futures::future::join_all;
use russet_wire::event::{FailureKind, FinishReason, GenerationEvent, GenerationFailure};
use russet_wire::request::GenerationRequest;
use rustix::process::{Resource, Rlimit, Signal, prlimit};

use engines::{EngineHarness, TestEngine, ask, collect, next, page, say, within};

/// A prompt with this character makes the model compute NaN.
const POISON_CHAR: char = '~';

/// Sets that token's row of the embedding to NaN, and keeps the model from ever sampling it.
fn poison(model: &Path) {
    let path = model.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..data]).unwrap();
    for (tensor, number) in [("model.embed_tokens.weight", f32::NAN), ("lm_head.weight", 0.0)] {
        let place = |at: &str, index: usize| header[tensor][at][index].as_u64().unwrap() as usize;
        let row = 4 * place("shape", 1);
        let begin = data + place("data_offsets", 0) + row * model::token_of_byte(POISON_CHAR as u8) as usize;
        bytes[begin..begin + row]
            .chunks_exact_mut(4)
            .for_each(|four| four.copy_from_slice(&number.to_le_bytes()));
    }
    std::fs::write(&path, bytes).unwrap();
}

fn question(text: &str, tokens: u32) -> GenerationRequest {
    GenerationRequest { max_tokens: Some(tokens), ignore_eos: true, ..say(text) }
}

/// Tokens of a complete output, and the number of cached tokens of its prompt.
async fn sound(lab: &EngineHarness, engine: &TestEngine, request: GenerationRequest) -> (Vec<u32>, u32) {
    let (ids, _, end) = collect(&mut ask(&mut lab.client(engine).await, request).await).await;
    let GenerationEvent::Finished { reason: FinishReason::Length, usage } = end else { panic!("{end:?}") };
    (ids, usage.cached_tokens)
}

/// The failure of a request.
async fn failed(lab: &EngineHarness, engine: &TestEngine, request: GenerationRequest) -> GenerationFailure {
    let (_, _, end) = collect(&mut ask(&mut lab.client(engine).await, request).await).await;
    let GenerationEvent::Failed(failure) = end else { panic!("{end:?}") };
    failure
}

async fn ready(address: &str) -> bool {
    // An engine that has exited is not ready either.
    page(address, "/readyz").await.is_ok_and(|page| page.starts_with("HTTP/1.1 200"))
}

async fn address(engine: &TestEngine) -> String {
    engine.until(|state| !state.metrics_address.is_empty()).await.metrics_address
}

/// Waits until `/readyz` has the wanted result.
async fn until_ready(address: &str, expected: bool) {
    within("/readyz", async {
        while ready(address).await != expected {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nan_logits_fail_one_request_and_leave_nothing_cached() {
    let model = model::random_model_dir();
    poison(model.path());
    let long: String = (0..60).map(|number| format!("{number} and ")).collect();
    let questions = [question("hello", 60), question(&long, 40), question("what is 17 + 25?", 50)];
    // Alone, after a cacheable prefix, in a prefill chunk beside decoding sequences, and all of these at
    // once.
    let poisoned = [format!("{POISON_CHAR}"), format!("{long}{POISON_CHAR}"), format!("{POISON_CHAR}{long}")];
    for layers in [&[model::LAYERS][..], &[1, 3]] {
        let folder = tempfile::tempdir().unwrap();
        let mut lab = EngineHarness::new();
        lab.config.max_sequences = 8;
        lab.prefix_dir = Some(folder.path().to_owned());
        let engines = lab.start(model.path(), layers);
        let (lab, engine) = (&lab, &engines[0]);
        // Sent first, so that anything cached afterwards would be theirs.
        for text in &poisoned {
            let GenerationFailure { kind, message } = failed(lab, engine, question(text, 8)).await;
            assert_eq!(kind, FailureKind::Internal, "{message}");
            assert!(message.contains("some logits are no finite numbers"), "{message}");
        }
        let (alone, cached): (Vec<Vec<u32>>, Vec<u32>) =
            join_all(questions.iter().map(|question| sound(lab, engine, question.clone())))
                .await
                .into_iter()
                .unzip();
        assert_eq!(cached, [0, 0, 0], "{layers:?}: of a poisoned prompt something was kept");
        for round in 0..3 {
            let answers = questions.iter().map(|question| sound(lab, engine, question.clone()));
            let failures = poisoned.iter().map(|text| failed(lab, engine, question(text, 8)));
            let (answers, failures) = tokio::join!(join_all(answers), join_all(failures));
            let answers: Vec<Vec<u32>> = answers.into_iter().map(|(ids, _)| ids).collect();
            assert_eq!(answers, alone, "{layers:?}, round {round}");
            assert!(failures.iter().all(|failure| failure.kind == FailureKind::Internal), "{failures:?}");
        }
        assert!(ready(&address(engine).await).await, "{layers:?}: it serves");
        let shown = engine.metrics().await;
        for line in ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"] {
            let line = shown.lines().find(|shown| shown.starts_with(line)).unwrap();
            assert!(line.ends_with(" 0"), "{layers:?}: {line}");
        }
    }
}

/// Size of its address space in bytes.
fn address_space(engine: &TestEngine) -> u64 {
    engine.status("VmSize:").unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn out_of_memory_ends_the_engine_without_a_false_finish() {
    // Prefilling a few hundred tokens takes half a gigabyte, and decoding next to nothing.
    let model = model::random_model(model::Shape {
        hidden: 64,
        intermediate: 1 << 17,
        heads: 4,
        kv_heads: 2,
        layers: 1,
        spread: 0.01,
    });
    let mut lab = EngineHarness::new();
    (lab.config.smoke_prompt, lab.config.prefix_cache) = (false, false);
    let mut engines = lab.start(model.path(), &[1]);
    let mut client = lab.client(&engines[0]).await;
    let address = address(&engines[0]).await;
    until_ready(&address, true).await;
    let mut running = ask(&mut client, question("hello", 2000)).await;
    while !matches!(next(&mut running).await, Some(GenerationEvent::Token { .. })) {}
    // As if other processes had used up the memory: enough for small allocations, too little for this prompt.
    let limit = Rlimit { current: Some(address_space(&engines[0]) + (64 << 20)), maximum: None };
    prlimit(Some(engines[0].pid()), Resource::As, limit).unwrap();
    let mut large = ask(&mut client, question(&"x".repeat(1500), 8)).await;
    for events in [&mut running, &mut large] {
        // MLX on CPUs does not check the result of `malloc`, so the process crashes in the middle of the
        // batch. Clients see a connection error, after which a gateway resumes as after a kill.
        loop {
            match within("the end of the stream", events.message())
                .await
                .map(|event| event.map(GenerationEvent::from))
            {
                Ok(Some(GenerationEvent::Started { .. } | GenerationEvent::Token { .. })) => {}
                Ok(Some(GenerationEvent::Failed(GenerationFailure {
                    kind: FailureKind::Unavailable,
                    ..
                })))
                | Err(_) => break,
                other => panic!("without memory a stream ended with {other:?}"),
            }
        }
    }
    assert!(!engines[0].exit().await.success(), "its agent starts it anew");
    until_ready(&address, false).await;
}

/// Like [`collect`], for an output that has begun.
async fn collect_rest(
    events: &mut tonic::Streaming<russet_rpc::engine::GenerateEvent>,
) -> (usize, (), GenerationEvent) {
    let mut tokens = 0;
    loop {
        match next(events).await {
            Some(GenerationEvent::Token { .. }) => tokens += 1,
            Some(GenerationEvent::Started { .. }) => {}
            Some(end) => return (tokens, (), end),
            None => panic!("a stream never just ends"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_is_ready_only_while_it_accepts_requests() {
    let model = model::random_model_dir();
    let lab = EngineHarness::new();
    let mut engines = lab.start(model.path(), &[1, 3]);
    let addresses = join_all(engines.iter().map(address)).await;
    let mut client = lab.client(&engines[0]).await;
    for address in &addresses {
        until_ready(address, true).await;
    }
    let mut events = ask(&mut client, question("hello", 400)).await;
    while !matches!(next(&mut events).await, Some(GenerationEvent::Token { .. })) {}
    // Asked to stop, it finishes running requests and accepts no new ones.
    engines[0].signal(Signal::TERM);
    until_ready(&addresses[0], false).await;
    let (tokens, (), end) = collect_rest(&mut events).await;
    assert!(
        matches!(end, GenerationEvent::Finished { .. }) && tokens > 0,
        "{tokens} tokens came, then {end:?}"
    );
    assert_eq!(engines[0].exit().await.code(), Some(0));
    // It has no leader any more.
    until_ready(&addresses[1], false).await;
    assert_eq!(engines[1].exit().await.code(), Some(1));
}
