//! Real `russet-engine` processes on loopback, with MLX and its ring, and a client over mTLS like a gateway:
//! outputs, failures of single ranks, and the state that the agent receives.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/engines.rs"]
mod engines;
#[path = "support/identities.rs"]
mod identities;
#[path = "support/model.rs"]
mod model;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use russet_rpc::engine as pb;
use russet_wire::engine_config::OverlapScheduling;
use russet_wire::engine_options::KvCacheType;
use russet_wire::event::{FailureKind, FinishReason, GenerationEvent, GenerationFailure};
use russet_wire::request::{GenerationRequest, Sampling};
use rustix::process::Signal;
use tonic::Streaming;

use engines::{EngineHarness, ask, collect, next, say, within};

/// Timeout for the smallest model's group to detect a killed rank.
const NOTICE: Duration = Duration::from_secs(10);

/// An output far longer than any test waits for.
fn endless() -> GenerationRequest {
    GenerationRequest { max_tokens: Some(2000), ignore_eos: true, ..say("on and on") }
}

/// Reads until `count` tokens have arrived.
async fn some_tokens(events: &mut Streaming<pb::GenerateEvent>, count: usize) {
    let mut seen = 0;
    while seen < count {
        match next(events).await {
            Some(GenerationEvent::Token { .. }) => seen += 1,
            Some(GenerationEvent::Started { .. }) => {}
            other => panic!("{other:?} before {count} tokens"),
        }
    }
}

/// Each token of a response depends on all those before it.
fn penalised() -> Sampling {
    Sampling {
        repetition_penalty: 1.3,
        presence_penalty: 0.5,
        frequency_penalty: 2.0,
        logit_bias: [(9, 1.5)].into(),
        ..Sampling::default()
    }
}

/// The token that [`biased`] leaves.
const BIASED: u32 = 77;

/// Steps start before the last token is known.
fn biased() -> Sampling {
    Sampling { logit_bias: [(BIASED, 100.0)].into(), ..Sampling::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn groups_answer_as_one_rank_does() {
    let mut lab = EngineHarness::new();
    let model = model::random_model_dir();
    let long: String = (0..290).map(|n| format!("{n} and ")).collect();
    let sampled = Sampling { temperature: 1.0, top_p: 0.9, seed: Some(5), ..Sampling::default() };
    let questions = [
        say("hello"),
        say("日本語 and é"),
        // Longer than one prefill chunk.
        say(&long),
        GenerationRequest { sampling: sampled, ..say("what is 17 + 25?") },
        GenerationRequest { sampling: penalised(), ..say("hello") },
        GenerationRequest { sampling: biased(), ..say("hello") },
    ];
    let mut answers: Vec<Vec<Vec<u32>>> = Vec::new();
    // A single CPU rank overlaps steps by default; groups do so on Macs.
    for (layers, members, overlap) in [
        (&[model::LAYERS][..], 1, OverlapScheduling::Auto),
        (&[1, 3], 1, OverlapScheduling::Auto),
        (&[1, 2, 1], 1, OverlapScheduling::On),
        (&[model::LAYERS], 2, OverlapScheduling::Auto),
        (&[3, 1], 2, OverlapScheduling::On),
        (&[model::LAYERS], 1, OverlapScheduling::Off),
        (&[model::LAYERS], 2, OverlapScheduling::On),
    ] {
        lab.config.overlap_scheduling = overlap;
        let mut engines = lab.start_stages(model.path(), layers, members);
        let mut client = lab.client(&engines[0]).await;
        // All at once, so that sequences share the batches.
        let mut streams = Vec::new();
        for question in &questions {
            let request = GenerationRequest { ignore_eos: true, ..question.clone() };
            streams.push(ask(&mut client, request).await);
        }
        let mut group = Vec::new();
        for mut events in streams {
            let (ids, _, end) = collect(&mut events).await;
            assert!(matches!(end, GenerationEvent::Finished { reason: FinishReason::Length, .. }), "{end:?}");
            assert_eq!(ids.len(), 32);
            group.push(ids);
        }
        answers.push(group);
        // A drained group ends without an error: followers stay until rank 0 leaves.
        let (leader, followers) = engines.split_first().unwrap();
        for follower in followers {
            follower.signal(Signal::TERM);
            let state = follower.until(|state| state.message.starts_with("stopping")).await;
            assert_eq!(state.phase(), pb::Phase::Serving, "{}", state.message);
        }
        leader.signal(Signal::TERM);
        for engine in &mut engines {
            assert_eq!(engine.exit().await.code(), Some(0), "{} of {layers:?} by {members}", engine.node);
        }
    }
    let repeats = |ids: &[u32]| ids.len() - ids.iter().collect::<BTreeSet<_>>().len();
    let [plain, .., penalised, biased] = answers[0].as_slice() else { panic!("six answers") };
    assert!(repeats(penalised) < repeats(plain), "{plain:?} {penalised:?}");
    assert!(biased.iter().all(|id| *id == BIASED), "{biased:?}");
    assert_eq!(answers[1], answers[0], "two ranks");
    assert_eq!(answers[2], answers[0], "three ranks");
    assert_eq!(answers[5], answers[0], "one rank that waits for every token");
    // Sums of shards round differently, in the seventh digit; no two candidate tokens of these outputs are
    // that close.
    assert_eq!(answers[3], answers[0], "a stage of two members");
    assert_eq!(answers[4], answers[0], "two stages of two members");
    assert_eq!(answers[6], answers[0], "a stage of two members that looks ahead");
}

/// An output starts on a single rank and resumes on another group after any number of emitted tokens: the
/// emitted tokens are prefilled at once there, and were decoded one by one before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counted_tokens_are_those_that_are_read() {
    let model = model::random_model_dir();
    let mut lab = EngineHarness::new();
    lab.config.context_tokens = 256;
    let engines = lab.start(model.path(), &[model::LAYERS]);
    let mut client = lab.client(&engines[0]).await;
    let count = async |request: GenerationRequest| {
        let mut client = lab.client(&engines[0]).await;
        let call = client.count_tokens(pb::GenerateRequest::from(request));
        let pb::CountTokensReply { failed, prompt_tokens } =
            within("a number", call).await.unwrap().into_inner();
        failed.map_or(Ok(prompt_tokens), |failed| Err(GenerationFailure::from(failed)))
    };
    for text in ["hi", "What is 17 + 25?", "日本 🙂"] {
        let request = GenerationRequest { max_tokens: Some(1), ..say(text) };
        let counted = count(request.clone()).await;
        let (_, _, end) = collect(&mut ask(&mut client, request).await).await;
        let GenerationEvent::Finished { usage, .. } = end else { panic!("{end:?}") };
        assert_eq!(counted, Ok(usage.prompt_tokens), "{text}");
    }
    // Of a prompt that is too long the number is what its client asks for.
    let short = count(say("x")).await.unwrap();
    assert_eq!(count(say(&"x".repeat(1000))).await, Ok(short + 999));
    let wrong = GenerationRequest { template_arguments: "[]".into(), ..say("hi") };
    assert_eq!(count(wrong).await.unwrap_err().kind, FailureKind::InvalidRequest);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_group_resumes_an_answer_unchanged() {
    let lab = EngineHarness::new();
    let model = model::random_model_dir();
    let sampled = Sampling { temperature: 1.0, top_p: 0.9, seed: Some(5), ..Sampling::default() };
    let with = |sampling| GenerationRequest { sampling, ..say("what is 17 + 25?") };
    let questions = [say("hello"), with(sampled), with(penalised()), with(biased())]
        .map(|question| GenerationRequest { ignore_eos: true, ..question });
    let alone = lab.start(model.path(), &[model::LAYERS]);
    let mut client = lab.client(&alone[0]).await;
    let mut answers = Vec::new();
    for question in &questions {
        answers.push(collect(&mut ask(&mut client, question.clone()).await).await);
    }
    drop(alone);
    let group = lab.start(model.path(), &[1, 3]);
    let mut client = lab.client(&group[0]).await;
    for (question, (ids, text, end)) in questions.iter().zip(&answers) {
        for cut in 1..=ids.len() {
            let request = GenerationRequest { emitted: ids[..cut].to_vec(), ..question.clone() };
            let (rest, sent, ended) = collect(&mut ask(&mut client, request).await).await;
            assert_eq!(rest, ids[cut..], "cut after {cut}");
            let (
                GenerationEvent::Finished { reason, usage },
                GenerationEvent::Finished { reason: as_before, usage: cost },
            ) = (ended, end)
            else {
                panic!("it ended with something else than {end:?}")
            };
            assert_eq!((reason, usage.prompt_tokens), (*as_before, cost.prompt_tokens), "cut after {cut}");
            assert_eq!(usage.completion_tokens, cost.completion_tokens, "cut after {cut}");
            assert!(text.ends_with(&sent), "{sent:?} does not end {text:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preempted_answer_equals_an_undisturbed_one() {
    let model = model::random_model_dir();
    let mut lab = EngineHarness::new();
    let sampled = Sampling { temperature: 1.0, top_p: 0.9, seed: Some(5), ..Sampling::default() };
    let questions = [say("on and on"), GenerationRequest { sampling: sampled, ..say("what is 17 + 25?") }]
        .map(|question| GenerationRequest { max_tokens: Some(700), ignore_eos: true, ..question });
    let mut answers = Vec::new();
    // Both fit with their expected length, and grow beyond it.
    for (kv_tokens, layers, preemptions) in [
        (None, &[model::LAYERS][..], 0.0),
        (Some(1100), &[model::LAYERS], 1.0),
        (Some(1100), &[1, 2, 1], 1.0),
    ] {
        lab.config.kv_tokens = kv_tokens;
        let engines = lab.start(model.path(), layers);
        let mut client = lab.client(&engines[0]).await;
        let mut streams = Vec::new();
        for question in &questions {
            streams.push(ask(&mut client, question.clone()).await);
        }
        let mut group = Vec::new();
        for mut events in streams {
            let (ids, _, end) = collect(&mut events).await;
            assert!(matches!(end, GenerationEvent::Finished { reason: FinishReason::Length, .. }), "{end:?}");
            group.push(ids);
        }
        assert_eq!(engines[0].metric("vllm:num_preemptions_total").await, preemptions, "{layers:?}");
        answers.push(group);
    }
    // Prefill rounds differently from decode, in the seventh digit; no two candidate tokens of these outputs
    // are that close.
    assert_eq!(answers[1], answers[0], "one rank");
    assert_eq!(answers[2], answers[0], "three ranks");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_or_frozen_rank_fails_the_stream_with_a_typed_error() {
    let lab = EngineHarness::new();
    let model = model::random_model_dir();
    let pipeline: (&[usize], usize) = (&[1, 2, 1], 1);
    let hybrid: (&[usize], usize) = (&[2, 2], 2);
    for (signal, victim, (layers, members)) in [
        (Signal::KILL, 1, pipeline),
        (Signal::KILL, 2, pipeline),
        (Signal::STOP, 1, pipeline),
        (Signal::KILL, 1, hybrid),
        (Signal::KILL, 3, hybrid),
    ] {
        let mut engines = lab.start_stages(model.path(), layers, members);
        let mut client = lab.client(&engines[0]).await;
        let mut events = ask(&mut client, endless()).await;
        some_tokens(&mut events, 3).await;
        let since = Instant::now();
        engines[victim].signal(signal);
        let (_, _, end) = collect(&mut events).await;
        let took = since.elapsed();
        let GenerationEvent::Failed(GenerationFailure { kind, message }) = end else {
            panic!("{end:?} after {signal:?} of {victim}")
        };
        assert_eq!(kind, FailureKind::Unavailable, "{message}");
        eprintln!("{signal:?} of rank {victim}: {message} after {took:?}");
        let allowed = if signal == Signal::STOP { 2 * NOTICE } else { NOTICE };
        assert!(took < allowed, "{took:?}");
        for (rank, engine) in engines.iter_mut().enumerate().filter(|(rank, _)| *rank != victim) {
            assert_eq!(engine.exit().await.code(), Some(1), "rank {rank} after {signal:?} of {victim}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_end_with_rank_zero() {
    let lab = EngineHarness::new();
    let model = model::random_model_dir();
    let mut engines = lab.start(model.path(), &[2, 2]);
    let mut client = lab.client(&engines[0]).await;
    let mut events = ask(&mut client, endless()).await;
    some_tokens(&mut events, 3).await;
    engines[0].signal(Signal::KILL);
    assert_eq!(engines[1].exit().await.code(), Some(1));
    // The client of a killed rank 0 sees its connection break, which the gateway turns into an error.
    loop {
        match within("the broken stream", events.message()).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream of a killed engine ended as if it were complete"),
            Err(_) => break,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_checkpoint_is_reported_to_the_agent_by_name() {
    let lab = EngineHarness::new();
    let model = model::random_model_dir();
    let path = model.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[0..8].copy_from_slice(&u64::MAX.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let mut engines = lab.start(model.path(), &[model::LAYERS]);
    let state = engines[0].until(|state| state.phase() == pb::Phase::Failed).await;
    assert_eq!(state.phase(), pb::Phase::Failed);
    assert!(state.message.contains("model.safetensors"), "{}", state.message);
    assert_eq!(engines[0].exit().await.code(), Some(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_that_no_group_divides_are_refused_with_the_number() {
    let mut lab = EngineHarness::new();
    lab.config.options.kv_cache = KvCacheType::Int8;
    let model = model::random_model_dir();
    let mut engines = lab.start(model.path(), &[model::LAYERS]);
    let state = engines[0].until(|state| state.phase() == pb::Phase::Failed).await;
    let said = "head_dim is 16, which groups of 64 or 32 do not divide";
    assert!(state.message.contains(said), "{}", state.message);
    assert_eq!(engines[0].exit().await.code(), Some(1));
}
