//! Log-probabilities of prompts, of real engines: those of the tokens as they were sampled, whatever split of the model, size of
//! the pieces, other requests or cached prefix.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/engines.rs"]
mod engines;
#[path = "support/identities.rs"]
mod identities;
#[path = "support/model.rs"]
mod model;

use std::path::Path;

use russet_rpc::engine::engine_client::EngineClient;
use russet_wire::engine_config::Dtype;
use russet_wire::event::{FinishReason, GenerationEvent, Logprobs, PromptToken, Usage};
use russet_wire::request::{GenerationRequest, RawPrompt};
use tonic::transport::Channel;

use engines::{EngineHarness, ask, next, say};

/// A small trained model, of 16 bits.
const SMOKE_MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/smoke/model");
/// Sums of shards and of pieces round differently.
const TOLERANCE: f32 = 1e-4;

/// What an engine told of a request.
#[derive(Default)]
struct PromptAnswer {
    prompt: Vec<PromptToken>,
    ids: Vec<u32>,
    logprobs: Vec<Logprobs>,
    usage: Usage,
}

async fn tell(client: &mut EngineClient<Channel>, request: GenerationRequest) -> PromptAnswer {
    let mut events = ask(client, request).await;
    let (mut answer, mut ended) = (PromptAnswer::default(), false);
    while let Some(event) = next(&mut events).await {
        assert!(!ended, "{event:?} after the end");
        match event {
            GenerationEvent::Started { .. } => assert!(answer.prompt.is_empty() && answer.ids.is_empty()),
            GenerationEvent::Prompt { tokens } => {
                assert!(answer.ids.is_empty(), "the prompt comes before the response");
                answer.prompt.extend(tokens);
            }
            GenerationEvent::Token { id, delta } => {
                answer.ids.push(id);
                answer.logprobs.extend(delta.logprobs);
            }
            GenerationEvent::Finished { reason, usage } => {
                assert_eq!(reason, FinishReason::Length);
                (answer.usage, ended) = (usage, true);
            }
            GenerationEvent::Failed(failure) => panic!("{failure:?}"),
        }
    }
    answer
}

/// A request to continue these tokens.
fn continued(tokens: &[u32], max_tokens: u32) -> GenerationRequest {
    GenerationRequest {
        messages: Vec::new(),
        raw_prompt: Some(RawPrompt::Tokens(tokens.to_vec())),
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        ..say("")
    }
}

fn scored(tokens: &[u32], max_tokens: u32, top: u32) -> GenerationRequest {
    GenerationRequest { prompt_logprobs: Some(top), ..continued(tokens, max_tokens) }
}

/// A prompt of so many tokens.
fn text(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|at| (at * at + 7 * at / 3) % 251).collect()
}

/// Checks that both tell the same numbers of the same tokens.
fn check_same(story: &str, one: &[PromptToken], other: &[PromptToken]) {
    assert_eq!(one.len(), other.len(), "{story}");
    for (at, (one, other)) in one.iter().zip(other).enumerate() {
        assert_eq!((one.id, &one.bytes), (other.id, &other.bytes), "{story}: token {at}");
        let (one, other) = match (&one.logprobs, &other.logprobs) {
            (Some(one), Some(other)) => (one, other),
            (None, None) if at == 0 => continue,
            one => panic!("{story}: token {at} has {one:?}"),
        };
        let differ = (one.logprob - other.logprob).abs();
        assert!(differ < TOLERANCE, "{story}: token {at} differs by {differ}");
        assert_eq!(one.top.len(), other.top.len(), "{story}: token {at}");
        for (one, other) in one.top.iter().zip(&other.top) {
            let differ = (one.logprob - other.logprob).abs();
            assert!(differ < TOLERANCE, "{story}: a token in place of {at} differs by {differ}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_has_the_logprobs_with_which_it_was_sampled() {
    let model = model::random_model_dir();
    let mut groups: Vec<Vec<PromptToken>> = Vec::new();
    for (layers, members) in [(&[model::LAYERS][..], 1), (&[1, 3], 1), (&[model::LAYERS], 2), (&[2, 2], 2)] {
        let story = format!("{layers:?} by {members}");
        let lab = EngineHarness::new();
        let engines = lab.start_stages(model.path(), layers, members);
        let mut client = lab.client(&engines[0]).await;
        let prompt = text(300);
        let asked = GenerationRequest { logprobs: Some(3), ..continued(&prompt, 8) };
        let sampled = tell(&mut client, asked).await;
        assert!(sampled.prompt.is_empty());
        assert_eq!(sampled.ids.len(), 8);
        // Most of it is cached, and computed all the same.
        let whole = [prompt.as_slice(), &sampled.ids].concat();
        let plain = tell(&mut client, continued(&whole, 1)).await;
        assert!(plain.usage.cached_tokens > 200, "{story}: {:?}", plain.usage);
        let answer = tell(&mut client, scored(&whole, 0, 3)).await;
        assert!(answer.ids.is_empty() && answer.logprobs.is_empty(), "{story}: nothing is sampled");
        let usage = Usage { prompt_tokens: 308, completion_tokens: 0, cached_tokens: 0 };
        assert_eq!(answer.usage, usage, "{story}");
        assert_eq!(answer.prompt.iter().map(|token| token.id).collect::<Vec<_>>(), whole);
        for (answer, Logprobs { sampled, top }) in answer.prompt[300..].iter().zip(&sampled.logprobs) {
            let logprobs = answer.logprobs.as_ref().unwrap();
            assert_eq!((answer.id, &answer.bytes), (sampled.id, &sampled.bytes));
            assert!((logprobs.logprob - sampled.logprob).abs() < TOLERANCE, "{answer:?} {sampled:?}");
            for (answer, sampled) in logprobs.top.iter().zip(top) {
                assert_eq!((answer.id, &answer.bytes), (sampled.id, &sampled.bytes));
                assert!((answer.logprob - sampled.logprob).abs() < TOLERANCE, "{answer:?} {sampled:?}");
            }
            // It was the best that may be sampled; the end token may not.
            let is_end = logprobs.top[0].id == model::END;
            assert_eq!(logprobs.rank, 1 + u32::from(is_end), "{answer:?}");
        }
        // With an answer behind it, it has the same numbers.
        let again = tell(&mut client, scored(&whole, 2, 3)).await;
        assert_eq!((again.ids.len(), again.usage.cached_tokens), (2, 0));
        check_same(&story, &again.prompt, &answer.prompt);
        groups.push(answer.prompt);
    }
    for group in &groups[1..] {
        // Each group sampled the same tokens.
        check_same("another split", group, &groups[0]);
    }
}

/// A model of 16 bits computes one position and many of them in other orders, which rounds hidden states by some thousandths.
/// What is told of a token is not rounded once more, to two or three digits, where it was generated or where it was read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_of_16_bit_models_are_in_32_bits() {
    let mut lab = EngineHarness::new();
    lab.config.dtype = Dtype::Auto;
    let engines = lab.start(Path::new(SMOKE_MODEL), &[4]);
    let mut client = lab.client(&engines[0]).await;
    let prompt = [274, 272, 225, 20, 26];
    let asked = GenerationRequest { logprobs: Some(1), ..continued(&prompt, 24) };
    let sampled = tell(&mut client, asked).await;
    let whole = [prompt.as_slice(), &sampled.ids].concat();
    let answer = tell(&mut client, scored(&whole, 0, 1)).await.prompt;
    let read: Vec<f32> =
        answer[prompt.len()..].iter().map(|token| token.logprobs.as_ref().unwrap().logprob).collect();
    let generated: Vec<f32> = sampled.logprobs.iter().map(|one| one.sampled.logprob).collect();
    for (read, generated) in read.iter().zip(&generated) {
        assert!((read - generated).abs() < 0.1, "{read} and {generated}");
    }
    // Of a probability of 1 nothing is left to round.
    let rounded =
        |numbers: &[f32]| numbers.iter().all(|number| *number == 0.0 || number.to_bits() & 0xFFFF == 0);
    assert!(!rounded(&read) && !rounded(&generated), "{read:?} {generated:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pieces_and_other_requests_change_no_logprob() {
    let model = model::random_model_dir();
    let mut lab = EngineHarness::new();
    lab.config.context_tokens = 8192;
    for layers in [&[model::LAYERS][..], &[2, 2]] {
        let engines = lab.start(model.path(), layers);
        let mut client = lab.client(&engines[0]).await;
        // Beyond one piece of a prompt that is read alone.
        let prompt = text(2500);
        let alone = tell(&mut client, scored(&prompt, 1, 2)).await.prompt;
        assert_eq!(alone.len(), 2500);
        // A shorter prompt is another number of pieces, and has the same beginning.
        let short = tell(&mut client, scored(&prompt[..1700], 0, 2)).await.prompt;
        check_same("a prompt that ends before", &short, &alone[..1700]);
        // Beside an answer a prompt is read in small pieces, and in one batch with other prompts.
        let mut running =
            ask(&mut client, GenerationRequest { ignore_eos: true, ..continued(&text(9), 4000) }).await;
        while !matches!(next(&mut running).await, Some(GenerationEvent::Token { .. })) {}
        let (mut other, mut third) = (client.clone(), client.clone());
        let others = async {
            tokio::join!(
                tell(&mut client, scored(&prompt, 3, 2)),
                tell(&mut other, scored(&prompt[..700], 0, 0)),
                tell(&mut third, continued(&text(500), 5)),
            )
        };
        tokio::pin!(others);
        let mut tokens_beside = 0;
        let (beside, shorter, plain) = loop {
            tokio::select! {
                others = &mut others => break others,
                event = next(&mut running) => match event {
                    Some(GenerationEvent::Token { .. }) => tokens_beside += 1,
                    other => panic!("the answer ended before the prompts: {other:?}"),
                },
            }
        };
        assert!(tokens_beside > 10, "{tokens_beside} tokens beside the prompts");
        // Nobody reads it any more, so it is cancelled.
        drop(running);
        check_same("beside others", &beside.prompt, &alone);
        let plainer = alone[..700].iter().cloned().map(|mut token| {
            token.logprobs.iter_mut().for_each(|logprobs| logprobs.top.clear());
            token
        });
        check_same("the second prompt of a batch", &shorter.prompt, &plainer.collect::<Vec<_>>());
        assert!(plain.prompt.is_empty() && plain.ids.len() == 5);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_tokens_together_are_one_and_the_end_is_reported() {
    let model = model::random_model_dir();
    let lab = EngineHarness::new();
    let engines = lab.start(model.path(), &[model::LAYERS]);
    let mut client = lab.client(&engines[0]).await;
    let answer = tell(&mut client, scored(&text(40), 0, 260)).await.prompt;
    for token in &answer[1..] {
        let logprobs = token.logprobs.as_ref().unwrap();
        let mass: f64 = logprobs.top.iter().map(|token| f64::from(token.logprob).exp()).sum();
        assert!((mass - 1.0).abs() < 1e-4, "all tokens together are {mass}");
        let place = logprobs.top.iter().position(|other| other.id == token.id).unwrap();
        assert_eq!(logprobs.top[place].logprob, logprobs.logprob, "one number, wherever it is told");
        let better = logprobs.top.iter().filter(|other| other.logprob > logprobs.logprob).count();
        assert_eq!(logprobs.rank as usize, better + 1);
    }
    // An end token is none of the response, but where the prompt is echoed clients count it.
    for (echo, expected) in [(true, vec![model::END]), (false, Vec::new())] {
        let request = GenerationRequest {
            echo,
            logprobs: Some(0),
            ignore_eos: false,
            sampling: russet_wire::request::Sampling {
                logit_bias: [(model::END, 100.0)].into(),
                ..Default::default()
            },
            ..continued(&text(5), 4)
        };
        let mut events = ask(&mut client, request).await;
        let (mut ends, mut reasons, mut prompt) = (Vec::new(), Vec::new(), 0);
        while let Some(event) = next(&mut events).await {
            match event {
                GenerationEvent::Prompt { tokens } => prompt += tokens.len(),
                GenerationEvent::Token { delta, .. } => {
                    assert_eq!(delta.text, "");
                    ends.extend(delta.logprobs.iter().map(|logprobs| logprobs.sampled.id));
                }
                GenerationEvent::Finished { reason, usage } => {
                    reasons.push((reason, usage.completion_tokens))
                }
                GenerationEvent::Started { .. } => {}
                GenerationEvent::Failed(failure) => panic!("{failure:?}"),
            }
        }
        assert_eq!((ends, prompt), (expected, if echo { 5 } else { 0 }));
        assert_eq!(reasons, [(FinishReason::Stop, 0)]);
    }
}
