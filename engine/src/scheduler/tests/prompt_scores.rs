//! Prompts that are told with log-probabilities: in pieces, beside other requests, over preemptions, and whatever is cached.

use russet_wire::event::{PromptLogprobs, PromptToken};
use russet_wire::request::RawPrompt;

use super::*;
use crate::fixture::{ASSISTANT, BEGIN, END, FakeBehaviour, USER, fake_logprob};

/// The prompt of such a request.
fn prompt(request: &GenerationRequest) -> Vec<u32> {
    let content = request.messages[0].content.bytes().map(token_of_byte);
    [BEGIN, USER].into_iter().chain(content).chain([END, ASSISTANT]).collect()
}

/// A token of a prompt, its log-probability, and those of others in its place.
type TokenNumbers = (u32, Option<(f32, Vec<f32>)>);

/// What is told of it: of each token the number that fakes have for it behind those before it.
fn reported(prompt: &[u32], top: u32) -> Vec<TokenNumbers> {
    let of = |at: usize| {
        let before = &prompt[..at];
        let top = (0..top).map(|id| fake_logprob(before, id));
        let top = top.collect::<Vec<_>>();
        (prompt[at], (at > 0).then(|| (fake_logprob(before, prompt[at]), top)))
    };
    (0..prompt.len()).map(of).collect()
}

fn seen(tokens: &[PromptToken]) -> Vec<TokenNumbers> {
    let numbers = |PromptLogprobs { logprob, rank: _, top }: &PromptLogprobs| {
        (*logprob, top.iter().map(|token| token.logprob).collect())
    };
    tokens.iter().map(|token| (token.id, token.logprobs.as_ref().map(numbers))).collect()
}

#[tokio::test]
async fn prompts_are_reported_whole_and_once_in_every_order_of_work() {
    let (mut preemptions, mut scored, mut reported_tokens, mut prompts) = (0, 0, 0, 0);
    for seed in 0..40 {
        let mut random = StdRng::seed_from_u64(seed);
        let config = SchedulerConfig {
            context_tokens: 2000,
            max_sequences: random.random_range(1..12),
            max_waiting_requests: WAITING,
            kv_tokens: random.random_range(1600..4000),
            stages: 1 + u32::from(seed % 3 == 0),
            prefix_cache: seed % 2 == 1,
            proposers: Proposers { prompt_lookup: seed % 5 == 0, draft_model: false },
            adapters: ServedAdapters::default(),
        };
        let lab = SchedulerHarness::with_config(config, FakeExecutor::new());
        let mut readers = Vec::new();
        for _ in 0..random.random_range(10..30) {
            // Few texts, so that most prompts are cached before.
            let content =
                ["again and ", "b", "12"][random.random_range(0..3)].repeat(random.random_range(1..120));
            let tokens = [0, 1, 300][random.random_range(0..3)];
            let prompt_logprobs = [None, Some(0), Some(3)][random.random_range(0..3)];
            let request = GenerationRequest {
                prompt_logprobs,
                echo: tokens == 0 || random.random_bool(0.5),
                ..say(&content, tokens, random.random_range(-2..=2))
            };
            readers.push((request.clone(), lab.ask(request)));
            for _ in 0..random.random_range(0..8) {
                tokio::task::yield_now().await;
            }
        }
        for (request, mut reader) in readers {
            while reader.next().await {}
            let prompt = prompt(&request);
            let expected = match (request.prompt_logprobs, request.echo) {
                (Some(top), _) => reported(&prompt, top),
                (None, true) => prompt.iter().map(|id| (*id, None)).collect(),
                (None, false) => Vec::new(),
            };
            assert_eq!(seen(&reader.prompt), expected, "seed {seed}");
            let (text, end) = undisturbed(&request);
            assert_eq!(reader.text, text, "seed {seed}");
            let (
                Some(GenerationEvent::Finished { reason, usage }),
                GenerationEvent::Finished { usage: own, .. },
            ) = (reader.end, end)
            else {
                panic!("seed {seed}: {request:?} failed")
            };
            assert_eq!((reason, usage.completion_tokens), (FinishReason::Length, own.completion_tokens));
            prompts += u32::from(request.prompt_logprobs.is_some());
            if request.prompt_logprobs.is_some() {
                reported_tokens += prompt.len() - 1;
                // What was told is computed, whatever was cached.
                assert_eq!(usage.cached_tokens, 0, "seed {seed}");
            }
        }
        preemptions += lab.preemptions();
        scored += lab
            .fake
            .steps()
            .iter()
            .flat_map(|step| &step.score)
            .map(|score| score.tokens.len())
            .sum::<usize>();
        assert_eq!((lab.metrics.running.get(), lab.metrics.waiting.get()), (0, 0));
    }
    println!("{prompts} prompts, {preemptions} preemptions, {reported_tokens} of {scored} tokens");
    assert!(prompts > 100 && preemptions > 20, "{prompts} prompts, {preemptions} preemptions");
    assert!(scored >= reported_tokens, "more was told than computed");
}

#[tokio::test]
async fn a_long_prompt_is_scored_in_the_pieces_it_is_read_in() {
    let lab = SchedulerHarness::start(2, 20_000, 40_000, FakeExecutor::new());
    let request = GenerationRequest { prompt_logprobs: Some(1), ..say(&"x".repeat(5000), 0, 0) };
    let mut reader = lab.ask(request.clone());
    while reader.next().await {}
    assert_eq!(seen(&reader.prompt), reported(&prompt(&request), 1));
    let steps = lab.fake.steps();
    let pieces: Vec<usize> = steps.iter().map(|step| step.score.as_ref().unwrap().tokens.len()).collect();
    assert_eq!(pieces, [2048, 2048, 907], "every token but the last is run, and none is sampled");
    assert!(steps.iter().all(|step| step.sample.is_none()));
}

#[tokio::test]
async fn a_prompt_preempted_while_it_is_read_is_reported_once() {
    const ANSWERS: usize = 8;
    // The long prompt fits beside the answers, with what they are expected to need. While the last of it is read they need
    // another step of the cache each.
    let (context, kv_tokens) = (50_000, 512 * ANSWERS as u64 + 40_192);
    let lab = SchedulerHarness::start(1 + ANSWERS as u32, context, kv_tokens, slow());
    let answer = say(&"x".repeat(96), 500, 0);
    let mut answers: Vec<ResponseReader> = (0..ANSWERS).map(|_| lab.ask(answer.clone())).collect();
    while answers[0].text.len() < 104 {
        assert!(answers[0].next().await);
    }
    let long = GenerationRequest { prompt_logprobs: Some(0), ..say(&"long ".repeat(8000), 2, 0) };
    let mut reader = lab.ask(long.clone());
    while reader.next().await {}
    assert_eq!(seen(&reader.prompt), reported(&prompt(&long), 0));
    assert_eq!(reader.text, "lo");
    assert!(lab.preemptions() > 0, "nothing was preempted");
    for reader in answers {
        assert_eq!(reader.collect().await, undisturbed(&answer));
    }
    let steps = lab.fake.steps();
    let scored: usize = steps.iter().flat_map(|step| &step.score).map(|score| score.tokens.len()).sum();
    assert!(scored >= reader.prompt.len(), "of {scored} tokens, none was read twice");
}

#[tokio::test]
async fn a_score_that_is_no_number_fails_its_request_alone() {
    let fake = FakeExecutor::with_behaviour(FakeBehaviour::NotFiniteOn(token_of_byte(b'#')));
    let lab = SchedulerHarness::start(4, 2000, 8000, fake);
    let with = |content: &str| GenerationRequest { prompt_logprobs: Some(0), ..say(content, 2, 0) };
    let (bad, good) = (lab.ask(with("a # b")), lab.ask(with("a b")));
    let failure = bad.failure().await;
    assert_eq!(failure.kind, FailureKind::Internal);
    assert!(failure.message.contains("no finite numbers"), "{}", failure.message);
    assert_eq!(good.collect().await.0, "a ");
}

#[tokio::test]
async fn prompts_that_nobody_reads_take_bounded_memory() {
    let mut lab = SchedulerHarness::start(8, 20_000, 80_000, FakeExecutor::new());
    let scored = |id: &str| GenerationRequest {
        id: id.to_owned(),
        prompt_logprobs: Some(3),
        ..say(&"x".repeat(3000), 0, 0)
    };
    let alone = GenerationRequest { prompt_logprobs: None, echo: true, ..scored("alone") };
    // What one of them tells.
    let mut reader = lab.ask(scored("first"));
    let mut bytes = 0;
    while let Some(sent) = within("an event", reader.events.recv()).await {
        bytes += report_budget::bytes_of(&sent.event.event);
    }
    assert!(bytes > 3000 * 4 * size_of::<u32>(), "{bytes}");
    lab.intake.reports = ReportBudget::new(2 * bytes);
    // Nobody reads while they are computed.
    let mut unread: Vec<_> = (0..5).map(|_| lab.ask(scored("unread"))).collect();
    assert_eq!(lab.ask(say("ab", 2, 0)).collect().await.0, "ab");
    eventually("they have ended", || lab.metrics.running.get() + lab.metrics.waiting.get() == 0).await;
    // Nor has a prompt without log-probabilities room, nor an answer that comes with the first batch.
    for request in [alone.clone(), GenerationRequest { max_tokens: Some(1), ..alone.clone() }] {
        let failure = lab.ask(request).failure().await;
        assert_eq!(failure.kind, FailureKind::Overloaded);
    }
    let (mut whole, mut failed, mut held) = (0, 0, 0);
    for reader in &mut unread {
        while let Ok(sent) = reader.events.try_recv() {
            held += report_budget::bytes_of(&sent.event.event);
            match sent.event.event {
                GenerationEvent::Finished { .. } => whole += 1,
                GenerationEvent::Failed(GenerationFailure { kind, message }) => {
                    assert_eq!(kind, FailureKind::Overloaded);
                    assert!(message.contains("wait to be read by the clients"), "{message}");
                    failed += 1;
                }
                _ => {}
            }
        }
    }
    assert!(held <= 2 * bytes && whole <= 2 && failed >= 3 && whole + failed == 5, "{held} {whole} {failed}");
    // All is read: there is room for others.
    for request in [scored("next"), alone] {
        let mut reader = lab.ask(request);
        while reader.next().await {}
        assert!(matches!(reader.end, Some(GenerationEvent::Finished { .. })), "{:?}", reader.end);
    }
    // Clients that leave give theirs back.
    drop((0..5).map(|_| lab.ask(scored("left"))).collect::<Vec<_>>());
    eventually("they have ended", || lab.metrics.running.get() + lab.metrics.waiting.get() == 0).await;
    let mut reader = lab.ask(scored("last"));
    while reader.next().await {}
    assert!(matches!(reader.end, Some(GenerationEvent::Finished { .. })), "{:?}", reader.end);
}

#[tokio::test]
async fn prompts_alone_need_no_slot_and_too_long_ones_are_refused() {
    let lab = SchedulerHarness::start(1, 300_000, 300_000, FakeExecutor::new());
    let tokens = RawPrompt::Tokens(vec![token_of_byte(b'a'), token_of_byte(b'b')]);
    let raw =
        GenerationRequest { messages: Vec::new(), raw_prompt: Some(tokens), echo: true, ..say("", 0, 0) };
    let mut reader = lab.ask(raw.clone());
    while reader.next().await {}
    assert_eq!(reader.prompt.iter().map(|token| token.bytes.as_slice()).collect::<Vec<_>>(), [b"a", b"b"]);
    assert_eq!(lab.fake.steps(), []);
    // Where no answer is asked for, a prompt may fill the context: given so, or cut.
    let lab = SchedulerHarness::start(1, 64, 64, FakeExecutor::new());
    let filling = |bytes: usize, truncate_prompt_tokens, max_tokens| GenerationRequest {
        raw_prompt: Some(RawPrompt::Tokens(vec![token_of_byte(b'a'); bytes])),
        prompt_logprobs: Some(0),
        truncate_prompt_tokens,
        max_tokens: Some(max_tokens),
        ..raw.clone()
    };
    for request in [filling(64, None, 0), filling(200, Some(u32::MAX), 0)] {
        let mut reader = lab.ask(request);
        while reader.next().await {}
        assert!(matches!(reader.end, Some(GenerationEvent::Finished { .. })), "{:?}", reader.end);
        assert_eq!(seen(&reader.prompt), reported(&[token_of_byte(b'a'); 64], 0));
    }
    for request in [filling(65, None, 0), filling(64, None, 1)] {
        assert_eq!(lab.ask(request).failure().await.kind, FailureKind::ContextLengthExceeded);
    }
    let lab = SchedulerHarness::start(1, 300_000, 300_000, FakeExecutor::new());
    let long = RawPrompt::Tokens(vec![1; 200_000]);
    let long = GenerationRequest { raw_prompt: Some(long), prompt_logprobs: Some(1), ..raw };
    let failure = lab.ask(long).failure().await;
    assert_eq!(failure.kind, FailureKind::InvalidRequest);
    assert!(failure.message.contains("tells of at most 131072"), "{}", failure.message);
}
