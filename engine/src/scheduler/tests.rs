//! The scheduler with a fake executor and without sockets: order of service, preemption, and that every
//! output equals the one of a request that runs alone.

mod prompt_scores;

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use russet_wire::conversation::Message;
use russet_wire::event::{EngineEvent, GenerationEvent, PromptToken, Usage};
use russet_wire::request::GenerationRequest;
use tempfile::TempDir;
use tokio::sync::Notify;

use super::kv_budget::{MAX_PREEMPTIONS, MIN_TOKENS_BEFORE_PREEMPTION};
use super::response_sink::SentEvent;
use super::*;
use crate::executor::{CacheSupport, SequenceStep};
use crate::fixture::{self, FakeExecutor, eventually, token_of_byte, within};
use crate::lifecycle::Phase;
use crate::speculative::MAX_DRAFT_TOKENS;

/// What the fixture's template puts around a question.
const FRAME: u32 = 4;

/// Requests that may wait.
const WAITING: u32 = 64;

/// A running scheduler.
struct SchedulerHarness {
    fake: Arc<FakeExecutor>,
    intake: Intake,
    metrics: EngineMetrics,
    life: Lifecycle,
    _model: TempDir,
}

impl SchedulerHarness {
    fn start(max_sequences: u32, context_tokens: u32, kv_tokens: u64, fake: Arc<FakeExecutor>) -> Self {
        let stages = 1;
        let (prefix_cache, proposers) = (false, Proposers::default());
        Self::with_config(
            SchedulerConfig {
                context_tokens,
                max_sequences,
                max_waiting_requests: WAITING,
                kv_tokens,
                stages,
                prefix_cache,
                proposers,
                adapters: ServedAdapters::default(),
            },
            fake,
        )
    }

    fn with_config(config: SchedulerConfig, fake: Arc<FakeExecutor>) -> Self {
        let SchedulerConfig { context_tokens, kv_tokens, .. } = config;
        let model = fixture::model_dir();
        let tokens = Arc::new(ChatTokenizer::load(model.path()).unwrap());
        let (life, metrics) =
            (Lifecycle::default(), EngineMetrics::new("m", 0, context_tokens, kv_tokens).unwrap());
        let followers = Followers::default();
        let (schedule, intake) = Scheduler::new(
            fake.clone(),
            followers,
            tokens,
            life.clone(),
            metrics.clone(),
            config,
            BlockHash::root(b"m"),
        )
        .unwrap();
        life.advance(Phase::Serving, "");
        tokio::spawn(schedule.run());
        Self { fake, intake, metrics, life, _model: model }
    }

    /// Submits a request and waits for its first token.
    async fn ask_until_token(&self, request: GenerationRequest) -> ResponseReader {
        let mut answer = self.ask(request);
        while answer.text.is_empty() {
            assert!(answer.next().await, "{:?}", answer.end);
        }
        answer
    }

    /// Submits a request; on return the loop has received it or it is refused. The loop runs on this thread
    /// too and has done nothing in between.
    fn ask(&self, request: GenerationRequest) -> ResponseReader {
        let events = self.intake.submit(request, tokio::sync::oneshot::channel().0);
        // A request in the intake holds a sender.
        while self.intake.requests.strong_count() > 1 {
            std::thread::yield_now();
        }
        ResponseReader::new(events)
    }

    fn preemptions(&self) -> u64 {
        self.metrics.preemptions.get()
    }
}

impl Drop for SchedulerHarness {
    fn drop(&mut self) {
        self.life.fail("the test is over");
    }
}

/// Events of one request.
struct ResponseReader {
    events: UnboundedReceiver<SentEvent>,
    started: bool,
    prompt: Vec<PromptToken>,
    text: String,
    /// Of its last event.
    engine_microseconds: Option<u64>,
    end: Option<GenerationEvent>,
}

impl ResponseReader {
    fn new(events: UnboundedReceiver<SentEvent>) -> Self {
        Self {
            events,
            started: false,
            prompt: Vec::new(),
            text: String::new(),
            engine_microseconds: None,
            end: None,
        }
    }

    /// Receives one more event; `false` at the end.
    async fn next(&mut self) -> bool {
        let Some(sent) = within("an event", self.events.recv()).await else { return false };
        let EngineEvent { event, engine_microseconds } = sent.event;
        assert!(engine_microseconds >= self.engine_microseconds, "time is taken back");
        self.engine_microseconds = engine_microseconds;
        assert!(self.end.is_none(), "{event:?} after {:?}", self.end);
        match event {
            GenerationEvent::Started { .. } => {
                assert!(!std::mem::replace(&mut self.started, true), "it starts twice")
            }
            GenerationEvent::Prompt { tokens } => {
                assert!(self.started && self.text.is_empty(), "the prompt is told before the response");
                self.prompt.extend(tokens);
            }
            GenerationEvent::Token { delta, .. } => self.text.push_str(&delta.text),
            end => self.end = Some(end),
        }
        true
    }

    /// Receives all events; checks that there is exactly one end.
    async fn collect(mut self) -> (String, GenerationEvent) {
        while self.next().await {}
        (self.text, self.end.expect("a stream never just ends"))
    }

    async fn failure(self) -> GenerationFailure {
        match self.collect().await.1 {
            GenerationEvent::Failed(failure) => failure,
            end => panic!("{end:?} is no failure"),
        }
    }
}

/// A request whose output repeats its own text until `tokens`.
fn say(content: &str, tokens: u32, priority: i32) -> GenerationRequest {
    GenerationRequest {
        id: format!("say {content:.40}"),
        messages: vec![Message::new("user", content)],
        max_tokens: Some(tokens),
        ignore_eos: true,
        priority,
        ..GenerationRequest::default()
    }
}

/// The output of that request when nothing interferes.
fn undisturbed(request: &GenerationRequest) -> (String, GenerationEvent) {
    let content = &request.messages[0].content;
    let tokens = request.max_tokens.unwrap();
    let text = content.chars().cycle().take(tokens as usize).collect();
    let usage =
        Usage { prompt_tokens: content.len() as u32 + FRAME, completion_tokens: tokens, ..Usage::default() };
    (text, GenerationEvent::Finished { reason: FinishReason::Length, usage })
}

/// A fake whose batches take a moment, so that other requests can arrive in between.
fn slow() -> Arc<FakeExecutor> {
    FakeExecutor::with_timing(Duration::from_millis(1), None)
}

#[tokio::test]
async fn higher_priority_preempts_and_the_victim_resumes() {
    let lab = SchedulerHarness::start(1, 20_000, 20_000, slow());
    let (low, high) = (say("low", 400, 0), say("HIGH", 100, 1));
    let running = lab.ask_until_token(low.clone()).await;
    let (text, end) = lab.ask(high.clone()).collect().await;
    assert_eq!((text, end), undisturbed(&high));
    assert_eq!(lab.preemptions(), 1);
    assert_eq!(running.collect().await, undisturbed(&low));
    // It was not preempted before it had decoded some tokens.
    let batches = lab.fake.batches();
    let first = batches.iter().position(|batch| batch[0].tokens.contains(&token_of_byte(b'H'))).unwrap();
    let sampled = batches[..first].iter().flatten().filter(|step| step.sample.is_some()).count();
    assert!(sampled >= MIN_TOKENS_BEFORE_PREEMPTION as usize, "it left after {sampled} tokens");
    // A request of equal priority waits.
    let running = lab.ask_until_token(low.clone()).await;
    let equal = lab.ask(say("next", 3, 0));
    assert_eq!(running.collect().await, undisturbed(&low));
    assert_eq!(equal.collect().await.0, "nex");
    assert_eq!(lab.preemptions(), 1);
}

#[tokio::test]
async fn preemptions_per_sequence_are_bounded() {
    let lab = SchedulerHarness::start(1, 20_000, 20_000, slow());
    let low = say("low", 2000, -100);
    let running = lab.ask_until_token(low.clone()).await;
    let mut higher = Vec::new();
    for number in 0..MAX_PREEMPTIONS + 2 {
        let answer = lab.ask(say("HIGH", 5, number as i32));
        if number < MAX_PREEMPTIONS {
            answer.collect().await;
        } else {
            higher.push(answer);
        }
    }
    assert_eq!(running.collect().await, undisturbed(&low));
    assert_eq!(lab.preemptions(), u64::from(MAX_PREEMPTIONS));
    for answer in higher {
        assert_eq!(answer.collect().await.0, "HIGHH");
    }
}

#[tokio::test]
async fn youngest_sequence_is_preempted_when_kv_tokens_run_out() {
    // Each fits with its expected length, and both need more in the end.
    let lab = SchedulerHarness::start(4, 20_000, 1100, slow());
    let requests = [say("eldest", 700, 0), say("youngest", 700, 0), say("late", 10, 0)];
    let eldest = lab.ask_until_token(requests[0].clone()).await;
    let youngest = lab.ask_until_token(requests[1].clone()).await;
    let late = lab.ask(requests[2].clone());
    assert_eq!(eldest.collect().await, undisturbed(&requests[0]));
    assert_eq!(youngest.collect().await, undisturbed(&requests[1]));
    assert_eq!(late.collect().await, undisturbed(&requests[2]));
    assert_eq!(lab.preemptions(), 1);
    assert!(lab.fake.peak() <= 1100, "{} tokens were held", lab.fake.peak());
    assert!(lab.fake.peak() > 900, "only {} tokens were held", lab.fake.peak());
    assert_eq!(lab.metrics.prompt_tokens.get(), u64::from("eldestyoungestlate".len() as u32 + 3 * FRAME));
    assert_eq!(lab.metrics.generated_tokens.get(), 1410);
}

#[tokio::test]
async fn kv_capacity_rejects_long_prompts_and_bounds_answers() {
    let lab = SchedulerHarness::start(4, 20_000, 300, FakeExecutor::new());
    let failure = lab.ask(say(&"x".repeat(296), 1, 0)).failure().await;
    assert_eq!(failure.kind, FailureKind::ContextLengthExceeded);
    assert!(failure.message.contains("length is 300 tokens, all that the KV cache of this engine holds"));
    let (text, end) = lab.ask(say(&"x".repeat(290), 100, 0)).collect().await;
    let usage = Usage { prompt_tokens: 294, completion_tokens: 6, ..Usage::default() };
    assert_eq!(
        (text.as_str(), end),
        ("xxxxxx", GenerationEvent::Finished { reason: FinishReason::Length, usage })
    );
}

#[tokio::test]
async fn higher_priority_displaces_the_newest_lowest_in_the_queue() {
    let lab = SchedulerHarness::start(1, 200_000, 200_000, slow());
    let running = lab.ask_until_token(say("a", 100_000, 50)).await;
    let mut waiting: Vec<ResponseReader> = (0..WAITING as usize).map(|_| lab.ask(say("low", 2, 0))).collect();
    let failure = lab.ask(say("low", 2, 0)).failure().await;
    assert_eq!(failure.kind, FailureKind::Overloaded);
    assert!(failure.message.contains("1 requests are running and 64 are waiting"), "{}", failure.message);
    let high = lab.ask(say("high", 2, 1));
    let failure = waiting.pop().unwrap().failure().await;
    assert_eq!(failure.kind, FailureKind::Overloaded);
    assert!(failure.message.contains("one of higher priority"), "{}", failure.message);
    drop(running);
    assert_eq!(high.collect().await.0, "hi");
    for answer in waiting {
        assert_eq!(answer.collect().await.0, "lo");
    }
    let first = |byte| lab.fake.steps().iter().position(|step| step.tokens.contains(&token_of_byte(byte)));
    assert!(first(b'g') < first(b'w'), "the higher one was not answered first");
    assert_eq!(lab.metrics.waiting.get(), 0);
}

#[tokio::test]
async fn a_burst_that_fits_slots_and_queue_is_admitted() {
    const SLOTS: usize = 100;
    let lab = SchedulerHarness::start(SLOTS as u32, 512, 200_000, FakeExecutor::new());
    let answers: Vec<ResponseReader> =
        (0..SLOTS + WAITING as usize).map(|_| lab.ask(say("all", 3, 0))).collect();
    assert_eq!(lab.ask(say("one more", 3, 0)).failure().await.kind, FailureKind::Overloaded);
    for answer in answers {
        assert_eq!(answer.collect().await.0, "all");
    }
    assert_eq!((lab.metrics.running.get(), lab.metrics.waiting.get()), (0, 0));
}

#[tokio::test]
async fn deadline_ends_a_request_in_every_phase() {
    let lab = SchedulerHarness::start(1, 200_000, 200_000, slow());
    let by =
        |milliseconds, request| GenerationRequest { deadline_milliseconds: Some(milliseconds), ..request };
    let exceeded = |failure: &GenerationFailure| failure.kind == FailureKind::DeadlineExceeded;
    assert!(exceeded(&lab.ask(by(0, say("now", 1, 0))).failure().await));
    // A running request, and one that waits behind it.
    let running = lab.ask(by(500, say("a", 100_000, 0)));
    let waiting = lab.ask(by(50, say("b", 5, 0)));
    let failure = waiting.failure().await;
    assert!(exceeded(&failure) && failure.message.contains("with 0 tokens"), "{}", failure.message);
    assert!(exceeded(&running.failure().await));
    assert!(!lab.fake.steps().iter().any(|step| step.tokens.contains(&token_of_byte(b'b'))));
    // A preempted request.
    let left = lab.ask(by(1000, say("a", 100_000, 0)));
    let high = lab.ask(say("HIGH", 100_000, 1));
    assert!(exceeded(&left.failure().await));
    drop(high);
    eventually("an empty engine", || lab.metrics.running.get() + lab.metrics.waiting.get() == 0).await;
    // A request whose prompt alone takes too long.
    (0..4).for_each(|_| lab.metrics.throughput.lock().record_prefill(512, Duration::from_secs(1)));
    let steps = lab.fake.steps().len();
    let failure = lab.ask(by(100_000, say(&"x".repeat(150_000), 1, 0))).failure().await;
    assert!(exceeded(&failure), "{failure:?}");
    assert!(failure.message.contains("the 150004 tokens of the prompt"), "{}", failure.message);
    assert_eq!(lab.fake.steps().len(), steps);
}

#[tokio::test]
async fn only_a_single_stage_overlaps_steps_where_it_pays() {
    for (stages, pays) in [(1, true), (1, false), (2, true)] {
        let (prefix_cache, proposers) = (false, Proposers::default());
        let config = SchedulerConfig {
            context_tokens: 1000,
            max_sequences: 2,
            max_waiting_requests: WAITING,
            kv_tokens: 2000,
            stages,
            prefix_cache,
            proposers,
            adapters: ServedAdapters::default(),
        };
        let lab = SchedulerHarness::with_config(
            config,
            if pays { FakeExecutor::new() } else { FakeExecutor::without_overlap() },
        );
        let request = say("what follows", 40, 0);
        assert_eq!(lab.ask(request.clone()).collect().await, undisturbed(&request));
        let ahead = lab.fake.steps().iter().filter(|step| step.tokens.is_empty()).count();
        assert_eq!(ahead > 0, stages == 1 && pays, "{ahead} steps of {stages} stages went ahead");
    }
}

#[tokio::test]
async fn accepted_draft_tokens_save_batches_and_keep_rows_together() {
    let config = SchedulerConfig {
        context_tokens: 20_000,
        max_sequences: 4,
        max_waiting_requests: WAITING,
        kv_tokens: 20_000,
        stages: 1,
        prefix_cache: false,
        proposers: Proposers { prompt_lookup: true, draft_model: false },
        adapters: ServedAdapters::default(),
    };
    let lab = SchedulerHarness::with_config(config, FakeExecutor::new());
    // The first one repeats itself; the second one never does.
    let requests =
        [say("over and over", 400, 0), say(&String::from_utf8((33..123).collect()).unwrap(), 90, 0)];
    let answers = requests.each_ref().map(|request| lab.ask(request.clone()));
    for (answer, request) in answers.into_iter().zip(&requests) {
        assert_eq!(answer.collect().await, undisturbed(request));
    }
    let batches = lab.fake.batches();
    assert!(batches.len() < 220, "{} batches", batches.len());
    // No sequence runs ahead of one with draft tokens: sequences of a batch with draft tokens are all in the
    // next one too.
    let both = |batch: &Vec<SequenceStep>| batch.len() == 2;
    let (first, last) = (batches.iter().position(both).unwrap(), batches.iter().rposition(both).unwrap());
    let alone = batches[first..=last].iter().filter(|batch| !both(batch)).count();
    assert!(alone <= 2, "{alone} of {} batches had one of the two alone", last - first);
    let shown = lab.metrics.accepted_draft_tokens();
    assert!((200..490).contains(&shown), "{shown} accepted draft tokens are shown");
}

#[tokio::test]
async fn draft_model_speeds_up_new_text_and_its_loss_fails_no_answer() {
    let config = SchedulerConfig {
        context_tokens: 20_000,
        max_sequences: 2,
        max_waiting_requests: WAITING,
        kv_tokens: 20_000,
        stages: 1,
        prefix_cache: false,
        proposers: Proposers { prompt_lookup: false, draft_model: true },
        adapters: ServedAdapters::default(),
    };
    let text = String::from_utf8((33..123).collect()).unwrap();
    let requests = [say(&text, 90, 0), say("over", 60, 0)];
    for broken in [false, true] {
        let lab = SchedulerHarness::with_config(config.clone(), FakeExecutor::new());
        lab.fake.break_draft(broken);
        let answers = requests.each_ref().map(|request| lab.ask(request.clone()));
        for (answer, request) in answers.into_iter().zip(&requests) {
            assert_eq!(answer.collect().await, undisturbed(request));
        }
        let (batches, right) = (lab.fake.batches().len(), lab.metrics.accepted_draft_tokens());
        assert_eq!(broken, right == 0, "{right} draft tokens were accepted");
        assert_eq!(broken, batches > 80, "{batches} batches");
    }
}

/// A scheduler whose batches end one at a time, on command.
async fn stepwise(max_sequences: u32) -> (SchedulerHarness, Arc<Notify>) {
    let gate = Arc::new(Notify::new());
    let fake = FakeExecutor::with_timing(Duration::ZERO, Some(gate.clone()));
    (SchedulerHarness::start(max_sequences, 20_000, 20_000, fake), gate)
}

/// Ends one batch, and waits until the next one starts or no sequence runs.
async fn step(lab: &SchedulerHarness, gate: &Notify) {
    let started = lab.fake.batches().len();
    gate.notify_one();
    eventually("the next batch", || lab.fake.batches().len() > started || lab.metrics.running.get() == 0)
        .await;
}

#[tokio::test]
async fn disconnected_client_is_dropped_at_the_next_step() {
    let held = |lab: &SchedulerHarness, byte: u8, from: usize| {
        let slots: Vec<u32> = lab
            .fake
            .steps()
            .iter()
            .filter(|step| step.tokens.contains(&token_of_byte(byte)))
            .map(|step| step.slot)
            .collect();
        lab.fake.batches()[from..].iter().flatten().any(|step| slots.contains(&step.slot))
    };
    // During chunked prefill, and during decode.
    for (phase, content, steps) in [("reading", "x".repeat(9000), 1), ("answering", "x".into(), 6)] {
        let (lab, gate) = stepwise(2).await;
        let beside = lab.ask(say("a", 10_000, 0));
        eventually("the first batches", || lab.fake.batches().len() == 2).await;
        let leaves = lab.ask(say(&content, 10_000, 0));
        for _ in 0..steps {
            step(&lab, &gate).await;
        }
        assert!(held(&lab, b'x', 0), "{phase}");
        let started = lab.fake.batches().len();
        drop(leaves);
        step(&lab, &gate).await;
        step(&lab, &gate).await;
        assert!(lab.fake.batches().len() > started, "{phase}");
        assert!(!held(&lab, b'x', started), "{phase}: a step was begun for one that had left");
        assert_eq!(lab.fake.resets().len(), 1, "{phase}");
        assert_eq!(lab.metrics.running.get(), 1, "{phase}");
        drop(beside);
    }
    // While it waits, and after it was preempted.
    let (lab, gate) = stepwise(1).await;
    let low = lab.ask(say("low", 10_000, 0));
    eventually("the first batches", || lab.fake.batches().len() == 2).await;
    let waits = lab.ask(say("x", 10_000, 0));
    step(&lab, &gate).await;
    assert_eq!(lab.metrics.waiting.get(), 1, "waiting");
    drop(waits);
    step(&lab, &gate).await;
    assert_eq!(lab.metrics.waiting.get(), 0, "waiting");
    assert!(!held(&lab, b'x', 0), "waiting");
    let high = lab.ask(say("HIGH", 10_000, 1));
    while lab.preemptions() == 0 {
        step(&lab, &gate).await;
    }
    assert_eq!(lab.metrics.waiting.get(), 1, "preempted");
    drop(low);
    step(&lab, &gate).await;
    step(&lab, &gate).await;
    assert_eq!((lab.metrics.running.get(), lab.metrics.waiting.get()), (1, 0), "preempted");
    drop(high);
}

#[tokio::test]
async fn random_requests_each_end_once_with_their_solo_output() {
    let (mut preemptions, mut cached, mut accepted) = (0, 0, 0);
    for seed in 0..36 {
        let mut random = StdRng::seed_from_u64(seed);
        let kv_tokens = random.random_range(900..2500);
        let config = SchedulerConfig {
            context_tokens: 2000,
            max_sequences: random.random_range(1..6),
            max_waiting_requests: WAITING,
            kv_tokens,
            stages: 1,
            // Preempted requests find some of their blocks.
            prefix_cache: seed % 2 == 1,
            // The outputs repeat the prompts, so draft tokens are mostly right.
            proposers: Proposers { prompt_lookup: seed % 4 > 1, draft_model: seed % 3 == 0 },
            adapters: ServedAdapters::default(),
        };
        let lab = SchedulerHarness::with_config(config, FakeExecutor::new());
        let (mut staying, mut leaving) = (Vec::new(), Vec::new());
        for number in 0..random.random_range(5..30_u8) {
            let content =
                "-".repeat(random.random_range(0..200)) + &char::from(b'a' + number % 26).to_string();
            let request = say(&content, random.random_range(1..700), random.random_range(-2..=2));
            if random.random_bool(0.15) {
                leaving.push((lab.ask(request), random.random_range(0..40)));
            } else {
                staying.push((undisturbed(&request), lab.ask(request)));
            }
            // The loop runs some dozens of times in between.
            for _ in 0..random.random_range(0..6) {
                tokio::task::yield_now().await;
            }
        }
        for (mut answer, events) in leaving {
            for _ in 0..events {
                answer.next().await;
            }
        }
        for (expected, answer) in staying {
            let (text, mut end) = answer.collect().await;
            if let GenerationEvent::Finished { usage, .. } = &mut end {
                cached += std::mem::take(&mut usage.cached_tokens);
            }
            assert_eq!((text, end), expected, "seed {seed}");
        }
        eventually("an empty engine", || lab.metrics.running.get() + lab.metrics.waiting.get() == 0).await;
        assert!(lab.fake.peak() as u64 <= kv_tokens, "seed {seed}: {} of {kv_tokens}", lab.fake.peak());
        preemptions += lab.preemptions();
        accepted += lab.metrics.accepted_draft_tokens();
    }
    assert!(preemptions > 50, "only {preemptions} preemptions were tried");
    assert!(cached > 1000, "only {cached} tokens were kept");
    assert!(accepted > 10_000, "only {accepted} tokens were accepted");
}

/// A request of a few letters in random order, whose output repeats them to its limit, its end or a stop string.
fn random_request(random: &mut StdRng) -> GenerationRequest {
    let letters = random.random_range(2..=4);
    let mut text = |length: usize| -> String {
        (0..length).map(|_| char::from(b'a' + random.random_range(0..letters))).collect()
    };
    let (content, stop) = (text(60), text(7));
    let content = &content[..random.random_range(1..60)];
    let stop = if random.random_range(0..3) == 0 { vec![stop] } else { Vec::new() };
    let ignore_eos = random.random_range(0..4) > 0;
    let request = say(content, random.random_range(1..400), random.random_range(-2..=2));
    GenerationRequest { stop, ignore_eos, ..request }
}

#[tokio::test]
async fn steps_that_are_taken_back_whole_change_no_answer() {
    const STATES: CacheSupport = CacheSupport { max_rewind: Some(0), blocks: false };
    let (mut preemptions, mut accepted, mut repeated, mut stopped) = (0, 0, 0, 0);
    for seed in 0..24 {
        let mut random = StdRng::seed_from_u64(seed);
        let config = SchedulerConfig {
            context_tokens: 2000,
            max_sequences: random.random_range(1..6),
            max_waiting_requests: WAITING,
            kv_tokens: random.random_range(600..1500),
            stages: 1 + u32::from(seed % 5 == 0),
            prefix_cache: seed % 2 == 1,
            proposers: Proposers::default(),
            adapters: ServedAdapters::default(),
        };
        let requests: Vec<GenerationRequest> =
            (0..random.random_range(4..16)).map(|_| random_request(&mut random)).collect();
        let mut expected = None;
        for (prompt_lookup, draft_model) in [(false, false), (true, false), (false, true), (true, true)] {
            let proposers = Proposers { prompt_lookup, draft_model };
            let fake = FakeExecutor::with_cache_support(STATES);
            let lab = SchedulerHarness::with_config(SchedulerConfig { proposers, ..config.clone() }, fake);
            let mut readers = Vec::new();
            for request in &requests {
                readers.push(lab.ask(request.clone()));
                for _ in 0..random.random_range(0..6) {
                    tokio::task::yield_now().await;
                }
            }
            let mut answers = Vec::new();
            for reader in readers {
                let (text, mut end) = reader.collect().await;
                if let GenerationEvent::Finished { usage, reason } = &mut end {
                    usage.cached_tokens = 0;
                    stopped += u32::from(reason.is_stop());
                }
                answers.push((text, end));
            }
            preemptions += lab.preemptions();
            accepted += lab.metrics.accepted_draft_tokens();
            let decodes = lab.fake.steps().into_iter().filter(|step| step.sample.is_some());
            for step in decodes {
                assert!(step.tokens.len() <= 1 + MAX_DRAFT_TOKENS, "seed {seed}: {step:?}");
                repeated += step.length() - 1 - step.draft_tokens;
            }
            let expected = expected.get_or_insert_with(|| answers.clone());
            assert_eq!(&answers, expected, "seed {seed}, {proposers:?}");
        }
    }
    println!("{preemptions} preemptions, {accepted} accepted, {repeated} run again, {stopped} stopped");
    assert!(preemptions > 20, "only {preemptions} preemptions were tried");
    assert!(accepted > 10_000, "only {accepted} tokens were accepted");
    assert!(repeated > 1000, "only {repeated} tokens ran again");
    assert!(stopped > 100, "only {stopped} answers were stopped");
}

#[tokio::test]
async fn engine_time_of_requests_adds_up_to_the_batches() {
    // One is preempted, prompts are read beside answers, and all end at their limit, which is known beforehand.
    let lab = SchedulerHarness::start(2, 20_000, 20_000, slow());
    let mut answers = vec![
        lab.ask_until_token(say("first", 500, 0)).await,
        lab.ask_until_token(say(&"long ".repeat(400), 500, 0)).await,
        lab.ask(say("third", 20, 0)),
        lab.ask(say("HIGH", 60, 1)),
    ];
    for answer in &mut answers {
        while answer.next().await {}
    }
    assert_eq!(lab.preemptions(), 1);
    let taken: Vec<u64> = answers.iter().map(|answer| answer.engine_microseconds.unwrap()).collect();
    assert!(taken.iter().all(|microseconds| *microseconds > 0), "{taken:?}");
    let sum: u64 = taken.iter().sum();
    let (charged, _) = lab.metrics.engine_microseconds();
    assert_eq!(sum, charged, "{taken:?}");
}

#[tokio::test]
async fn what_runs_when_a_client_has_left_is_charged_to_none() {
    let (lab, gate) = stepwise(1).await;
    let mut leaving = lab.ask(say("leaving", 10_000, 0));
    eventually("the first batches", || lab.fake.batches().len() == 2).await;
    for _ in 0..4 {
        step(&lab, &gate).await;
    }
    let mut until = 0;
    while let Ok(event) = leaving.events.try_recv() {
        until = event.event.engine_microseconds.unwrap_or_default();
    }
    // What its client was told last is all of it so far.
    assert_eq!(lab.metrics.engine_microseconds(), (until, 0));
    drop(leaving);
    // One of the two batches in flight ends before the scheduler sees that, the other one after it.
    step(&lab, &gate).await;
    let (charged, uncharged) = lab.metrics.engine_microseconds();
    assert!(charged >= until && uncharged == 0, "{charged}, {uncharged} after {until}");
    assert_eq!(lab.metrics.running.get(), 0);
    let batch_time = Duration::from_millis(2);
    tokio::time::sleep(batch_time).await;
    gate.notify_one();
    eventually("the end of the last batch", || lab.metrics.engine_microseconds().1 > 0).await;
    let (then, uncharged) = lab.metrics.engine_microseconds();
    assert!(then == charged && u128::from(uncharged) >= batch_time.as_micros(), "{then}, {uncharged}");
}
