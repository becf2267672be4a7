//! Whole ranks in one process, over real sockets and mTLS, with a fake executor.

mod heartbeat;
mod reform;

use std::sync::Arc;
use std::time::Duration;

use russet_rpc::engine::control_client::ControlClient;
use russet_rpc::engine::engine_client::EngineClient;
use russet_rpc::engine::follow_command::Command;
use russet_rpc::tls::{self, TlsFiles};
use russet_wire::conversation::Message;
use russet_wire::engine_options::{DEFAULT_MAX_WAITING_REQUESTS, EngineOptions};
use russet_wire::event::{FailureKind, FinishReason, GenerationEvent, GenerationFailure, Usage};
use russet_wire::prefix_mark::PrefixMark;
use russet_wire::request::GenerationRequest;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::Runtime;
use tonic::transport::Channel;
use tonic::{Code, Streaming};

use super::*;
use crate::executor::SequenceStep;
use crate::fixture::{self, FakeBehaviour, FakeExecutor, eventually, within};
use crate::identities::Identities;

/// A model, a CA and the sockets of some ranks.
struct RankHarness {
    identities: Identities,
    model: TempDir,
    sockets: TempDir,
}

/// A running rank, on threads of its own, so that it can be killed as a whole.
struct RankProcess {
    address: String,
    node: String,
    life: Lifecycle,
    states: Option<tokio::task::JoinHandle<Vec<pb::EngineState>>>,
    outcome: tokio::sync::oneshot::Receiver<Result<ExitOutcome, String>>,
    runtime: Option<Runtime>,
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl RankProcess {
    /// Like kill -9: sockets close without a message.
    fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    async fn outcome(&mut self) -> ExitOutcome {
        within("the outcome", &mut self.outcome).await.unwrap().unwrap()
    }

    async fn serving(&self) {
        within("serving", self.life.wait_until(|now| now.phase >= Phase::Serving)).await;
        assert_eq!(self.life.status().phase, Phase::Serving, "{}", self.life.status().message);
    }

    /// All states that the agent received, once the rank has ended.
    async fn states(&mut self) -> Vec<pb::EngineState> {
        within("the end of the watch", self.states.take().unwrap()).await.unwrap()
    }

    fn peer(&self, rank: u32) -> PeerRank {
        PeerRank { rank, address: self.address.parse().unwrap(), node: self.node.clone() }
    }
}

/// A short context, and everything else as usual.
fn short() -> EngineConfig {
    EngineConfig { context_tokens: 128, ..EngineConfig::default() }
}

/// A rank of a group with one layer per rank, over MLX's own connections, with rank 0 on node `n0`.
fn pipeline_of(ranks: usize, config: EngineConfig) -> EngineConfig {
    EngineConfig {
        layers_per_rank: vec![1; ranks],
        ring_hosts: unused_hosts(ranks),
        transport: Transport::Direct,
        peers: vec![led_by("n0")],
        ..config
    }
}

/// Rank 0 as higher ranks need to know it.
fn led_by(node: &str) -> PeerRank {
    PeerRank { rank: 0, address: unused_hosts(1)[0], node: node.into() }
}

/// Addresses that a fake executor never opens.
fn unused_hosts(ranks: usize) -> Vec<std::net::SocketAddr> {
    vec![([127, 0, 0, 1], 1).into(); ranks]
}

impl RankHarness {
    fn new() -> Self {
        Self {
            identities: Identities::new(),
            model: fixture::model_dir(),
            sockets: tempfile::tempdir().unwrap(),
        }
    }

    /// Starts a rank on `node` with a watching agent.
    async fn start(&self, node: &str, config: EngineConfig, fake: Arc<FakeExecutor>) -> RankProcess {
        let mut process = self.start_unwatched(node, config, fake).await;
        let socket = self.sockets.path().join(node);
        process.states = Some(tokio::spawn(async move {
            let mut client = ControlClient::new(tls::unix_channel(socket));
            let mut states = client.watch(pb::WatchRequest {}).await.unwrap().into_inner();
            let mut all = Vec::new();
            while let Ok(Some(state)) = states.message().await {
                let reusable = state.reuse() == pb::Reuse::Yes;
                all.push(state);
                // Like the agent of a deleted Shard, which has no next formation for it.
                if reusable {
                    break;
                }
            }
            all
        }));
        process
    }

    /// The configuration of a rank on `node`, with the harness's model, identity and socket.
    fn config(&self, node: &str, config: EngineConfig) -> EngineConfig {
        EngineConfig {
            model_dir: self.model.path().to_owned(),
            served_model_name: "small".into(),
            tls_dir: self.identities.node(node),
            control_socket: self.sockets.path().join(node),
            group_uid: "g".into(),
            ..config
        }
    }

    async fn start_unwatched(
        &self,
        node: &str,
        config: EngineConfig,
        fake: Arc<FakeExecutor>,
    ) -> RankProcess {
        let config = self.config(node, config);
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (sender, bound) = tokio::sync::oneshot::channel();
        let (ended, outcome) = tokio::sync::oneshot::channel();
        let compute = fake.clone();
        runtime.spawn(async move {
            let rank = EngineProcess::bind(config, compute).await.unwrap();
            sender.send((rank.address().unwrap().to_string(), rank.life())).unwrap();
            let _ = ended.send(rank.run().await.map_err(|error| error.to_string()));
        });
        let (address, life) = bound.await.unwrap();
        RankProcess { address, node: node.to_owned(), life, states: None, outcome, runtime: Some(runtime) }
    }

    /// Starts a pipeline: rank 0 on node `n0`, and so on.
    async fn pipeline(&self, fakes: &[Arc<FakeExecutor>], config: EngineConfig) -> Vec<RankProcess> {
        self.pipeline_on(0, fakes, config).await
    }

    /// Starts a pipeline with rank 0 on node `first`.
    async fn pipeline_on(
        &self,
        first: usize,
        fakes: &[Arc<FakeExecutor>],
        config: EngineConfig,
    ) -> Vec<RankProcess> {
        let shared = pipeline_of(fakes.len(), config);
        let mut followers = Vec::new();
        for (rank, fake) in fakes.iter().enumerate().skip(1) {
            let peers = vec![led_by(&format!("n{first}"))];
            let config = EngineConfig { rank: rank as u32, peers, ..shared.clone() };
            followers.push(self.start(&format!("n{}", first + rank), config, fake.clone()).await);
        }
        let peers = followers.iter().zip(1..).map(|(process, rank)| process.peer(rank)).collect();
        let config = EngineConfig { peers, ..shared };
        let leader = self.start(&format!("n{first}"), config, fakes[0].clone()).await;
        std::iter::once(leader).chain(followers).collect()
    }

    fn channel(&self, process: &RankProcess, user: &str) -> Channel {
        self.identities.user(user).channel(&process.address, &process.node).unwrap()
    }

    fn client(&self, process: &RankProcess) -> EngineClient<Channel> {
        EngineClient::new(self.channel(process, tls::GATEWAY_USER))
    }
}

fn say(content: &str) -> GenerationRequest {
    GenerationRequest {
        id: format!("say {content:.40}"),
        messages: vec![Message::new("user", content)],
        ..GenerationRequest::default()
    }
}

/// A request whose output continues until `tokens`.
fn say_for(content: &str, tokens: u32) -> GenerationRequest {
    GenerationRequest { ignore_eos: true, max_tokens: Some(tokens), ..say(content) }
}

async fn ask(client: &mut EngineClient<Channel>, request: GenerationRequest) -> Streaming<pb::GenerateEvent> {
    within("the answer's headers", client.generate(pb::GenerateRequest::from(request)))
        .await
        .unwrap()
        .into_inner()
}

async fn next(events: &mut Streaming<pb::GenerateEvent>) -> Option<GenerationEvent> {
    within("an event", events.message()).await.unwrap().map(GenerationEvent::from)
}

/// The whole response: its text and its end, after a check that there is exactly one end.
async fn collect(events: &mut Streaming<pb::GenerateEvent>) -> (String, GenerationEvent) {
    let mut text = String::new();
    let mut end = None;
    while let Some(event) = next(events).await {
        assert!(end.is_none(), "{event:?} after {end:?}");
        match event {
            GenerationEvent::Started { .. } => assert_eq!(text, ""),
            GenerationEvent::Token { delta, .. } => text.push_str(&delta.text),
            event => end = Some(event),
        }
    }
    (text, end.expect("a stream never just ends"))
}

/// A page of the metrics address, including headers.
async fn get(address: &str, path: &str) -> String {
    let mut admin = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    admin.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    admin.read_to_string(&mut text).await.unwrap();
    text
}

fn failure(event: GenerationEvent) -> GenerationFailure {
    match event {
        GenerationEvent::Failed(failure) => failure,
        event => panic!("{event:?} is no failure"),
    }
}

/// `begin user … end assistant`: the tokens that the fixture's template adds.
const FRAME: u32 = 4;

#[tokio::test]
async fn one_rank_answers_and_says_what_it_cost() {
    let lab = RankHarness::new();
    let rank = lab.start("n0", short(), FakeExecutor::new()).await;
    rank.serving().await;
    let mut client = lab.client(&rank);
    for (request, text, reason, tokens) in [
        (say("héllo 日本"), "héllo 日本", FinishReason::Stop, 13),
        (say_for("ab", 5), "ababa", FinishReason::Length, 5),
        (
            GenerationRequest { stop: vec!["lo w".into()], ..say("hello world") },
            "hel",
            FinishReason::StopString(0),
            7,
        ),
        // The context ends before the output does.
        (
            GenerationRequest { max_tokens: None, ..say_for(&"x".repeat(120), 1) },
            "xxxx",
            FinishReason::Length,
            4,
        ),
    ] {
        let prompt_tokens = request.messages[0].content.len() as u32 + FRAME;
        let mut events = ask(&mut client, request).await;
        let usage = Usage { prompt_tokens, completion_tokens: tokens, cached_tokens: 0 };
        assert_eq!(
            collect(&mut events).await,
            (text.to_owned(), GenerationEvent::Finished { reason, usage })
        );
    }
    let description = client.describe(pb::DescribeRequest {}).await.unwrap().into_inner();
    assert_eq!((description.model.as_str(), description.rank, description.size), ("small", 0, 1));
}

#[tokio::test]
async fn any_group_resumes_an_answer_after_any_token() {
    let lab = RankHarness::new();
    let rank = lab.start("n0", short(), FakeExecutor::new()).await;
    let fakes = [FakeExecutor::new(), FakeExecutor::new()];
    let pipeline = lab.pipeline_on(1, &fakes, short()).await;
    rank.serving().await;
    pipeline[0].serving().await;
    let mut clients = [lab.client(&rank), lab.client(&pipeline[0])];
    // The number of cached tokens differs from one request to the next.
    let without_cached = |event: GenerationEvent| match event {
        GenerationEvent::Finished { reason, usage } => {
            GenerationEvent::Finished { reason, usage: Usage { cached_tokens: 0, ..usage } }
        }
        event => event,
    };
    for request in [
        say("héllo 日本"),
        say_for("añb", 7),
        GenerationRequest { stop: vec!["lo w".into()], ..say("hello world") },
        GenerationRequest { max_tokens: None, ..say_for(&"x".repeat(120), 1) },
    ] {
        let mut events = ask(&mut clients[0], request.clone()).await;
        let mut undisturbed = Vec::new();
        while let Some(event) = next(&mut events).await {
            undisturbed.push(without_cached(event));
        }
        let (Some(GenerationEvent::Started { prompt_tokens, .. }), Some(end)) =
            (undisturbed.first().cloned(), undisturbed.pop())
        else {
            panic!("{undisturbed:?}")
        };
        let tokens = undisturbed.split_off(1);
        for cut in 1..=tokens.len() {
            let emitted: Vec<u32> = tokens[..cut]
                .iter()
                .filter_map(
                    |event| if let GenerationEvent::Token { id, .. } = event { Some(*id) } else { None },
                )
                .collect();
            let emitted_tokens = emitted.len() as u32;
            for client in &mut clients {
                let request = GenerationRequest { emitted: emitted.clone(), ..request.clone() };
                let mut events = ask(client, request).await;
                let started = GenerationEvent::Started { prompt_tokens, emitted_tokens };
                assert_eq!(next(&mut events).await, Some(started));
                for event in tokens[cut..].iter().chain([&end]) {
                    assert_eq!(
                        next(&mut events).await.map(without_cached).as_ref(),
                        Some(event),
                        "cut after {cut}"
                    );
                }
                assert_eq!(next(&mut events).await, None);
            }
        }
    }
    let beyond = GenerationRequest { emitted: vec![9; 5], ..say_for("a", 4) };
    let mut events = ask(&mut clients[0], beyond).await;
    let failure = failure(collect(&mut events).await.1);
    assert_eq!(failure.kind, FailureKind::InvalidRequest);
    assert!(failure.message.contains("5 tokens of this answer"), "{}", failure.message);
}

#[tokio::test]
async fn requests_run_together_and_wait_for_a_slot() {
    let lab = RankHarness::new();
    let fake = FakeExecutor::with_timing(Duration::from_millis(5), None);
    let rank = lab
        .start(
            "n0",
            EngineConfig {
                max_sequences: 2,
                options: EngineOptions { speculation: Speculation::Off, ..EngineOptions::default() },
                ..short()
            },
            fake.clone(),
        )
        .await;
    rank.serving().await;
    let mut client = lab.client(&rank);
    let mut first = ask(&mut client, say_for("a", 40)).await;
    let mut second = ask(&mut client, say_for("b", 40)).await;
    for events in [&mut first, &mut second] {
        assert!(matches!(next(events).await, Some(GenerationEvent::Started { .. })));
    }
    let mut third = ask(&mut client, say("c")).await;
    assert_eq!(collect(&mut first).await.0, "a".repeat(40));
    assert_eq!(collect(&mut second).await.0, "b".repeat(40));
    assert_eq!(collect(&mut third).await.0, "c");
    let sizes: Vec<usize> = fake.batches().iter().map(Vec::len).collect();
    let shared = sizes.iter().filter(|&&size| size == 2).count();
    assert!(shared > 30, "the two slots shared only {shared} batches: {sizes:?}");
    assert!(fake.steps().iter().all(|step| step.slot < 2));
}

#[tokio::test]
async fn a_long_prompt_holds_up_no_answer() {
    let lab = RankHarness::new();
    let fake = FakeExecutor::with_timing(Duration::from_millis(1), None);
    let rank = lab
        .start(
            "n0",
            EngineConfig { max_sequences: 2, context_tokens: 10_000, ..EngineConfig::default() },
            fake.clone(),
        )
        .await;
    rank.serving().await;
    let mut client = lab.client(&rank);
    let mut answer = ask(&mut client, say_for("a", 9_000)).await;
    while !matches!(next(&mut answer).await, Some(GenerationEvent::Token { .. })) {}
    let mut long = ask(&mut client, say_for(&"x".repeat(5_000), 1)).await;
    assert_eq!(collect(&mut long).await.0, "x");
    drop(answer);
    let reading =
        |step: &&SequenceStep| step.tokens.contains(&fixture::token_of_byte(b'x')) && step.sample.is_none();
    let batches: Vec<Vec<SequenceStep>> =
        fake.batches().into_iter().filter(|batch| batch.iter().any(|step| reading(&step))).collect();
    assert!(batches.len() > 15, "the prompt was read in {} batches", batches.len());
    for batch in batches {
        let read = batch.iter().find(reading).map_or(0, |step| step.tokens.len());
        assert!(read <= 256, "{read} tokens were read at a time");
        assert!(batch.iter().any(|step| step.sample.is_some()), "the answer waited for {read} tokens");
    }
}

#[tokio::test]
async fn nan_logits_fail_only_their_request() {
    let lab = RankHarness::new();
    let fake = FakeExecutor::with_timing(Duration::from_millis(1), None);
    let rank = lab
        .start(
            "n0",
            EngineConfig { max_sequences: 2, context_tokens: 2000, ..EngineConfig::default() },
            fake.clone(),
        )
        .await;
    rank.serving().await;
    fake.set_behaviour(FakeBehaviour::NotFiniteOn(fixture::token_of_byte(b'!')));
    let mut client = lab.client(&rank);
    let mut sound = ask(&mut client, say_for("a", 200)).await;
    while !matches!(next(&mut sound).await, Some(GenerationEvent::Token { .. })) {}
    for _ in 0..3 {
        let mut poisoned = ask(&mut client, say("b!")).await;
        let failure = failure(collect(&mut poisoned).await.1);
        assert_eq!(failure.kind, FailureKind::Internal);
        assert!(failure.message.contains("no finite numbers"), "{}", failure.message);
    }
    // A prompt with NaN logits is not cached, nor are the tokens before the one that causes it.
    let text = "abcdefghij".repeat(40);
    let mut poisoned = ask(&mut client, say(&format!("{text}!"))).await;
    assert_eq!(failure(collect(&mut poisoned).await.1).kind, FailureKind::Internal);
    assert_eq!(cached(&mut client, &text).await, 0);
    let (text, end) = collect(&mut sound).await;
    assert_eq!(text.len(), 199, "{end:?}");
    assert!(matches!(end, GenerationEvent::Finished { reason: FinishReason::Length, .. }), "{end:?}");
    assert_eq!(rank.life.status().phase, Phase::Serving);
}

/// Cached tokens of a prompt, after a check of the output.
async fn cached(client: &mut EngineClient<Channel>, text: &str) -> u32 {
    cached_with(client, text, "").await
}

/// Cached tokens of a prompt with a salt, after a check of the output.
async fn cached_with(client: &mut EngineClient<Channel>, text: &str, salt: &str) -> u32 {
    let request = GenerationRequest { cache_salt: salt.into(), ..say_for(text, 3) };
    let mut events = ask(client, request).await;
    let (said, end) = collect(&mut events).await;
    assert_eq!(said, text[..3]);
    match end {
        GenerationEvent::Finished { usage, .. } => usage.cached_tokens,
        end => panic!("{end:?}"),
    }
}

#[tokio::test]
async fn clients_with_other_salts_do_not_learn_what_is_cached() {
    let lab = RankHarness::new();
    let config = EngineConfig { max_sequences: 4, context_tokens: 2000, ..EngineConfig::default() };
    let rank = lab.start("n0", config, FakeExecutor::new()).await;
    rank.serving().await;
    let mut client = lab.client(&rank);
    let text = "abcdefghij".repeat(50);
    for (salt, again) in [("", false), ("a", false), ("b", false), ("a", true), ("", true), ("b", true)] {
        let found = cached_with(&mut client, &text, salt).await;
        assert_eq!(found > 0, again, "{found} tokens for {salt:?}");
    }
}

#[tokio::test]
async fn shared_prefix_is_prefilled_once_also_after_a_restart() {
    let lab = RankHarness::new();
    let text = |shared: usize, own: &str| format!("{}{own}", "abcdefghij".repeat(shared));
    let config = EngineConfig { max_sequences: 2, context_tokens: 2000, ..EngineConfig::default() };
    let fakes = [FakeExecutor::new(), FakeExecutor::new()];
    let ranks = lab.pipeline(&fakes, config.clone()).await;
    ranks[0].serving().await;
    let mut client = lab.client(&ranks[0]);
    let mut feed = client.prefixes(pb::PrefixesRequest {}).await.unwrap().into_inner();
    let all = within("the feed", feed.message()).await.unwrap().unwrap();
    assert!(all.reset && all.added.is_empty(), "{all:?}");
    let load = all.load.unwrap();
    assert_eq!((load.running, load.waiting, load.slots, load.unread_tokens), (0, 0, 2, 0));
    let marked = GenerationRequest {
        prefix_marks: [(1, 70), (2, 100)].map(|(key, bytes)| PrefixMark { key, bytes }).to_vec(),
        ..say_for(&text(50, "first"), 3)
    };
    let (_, end) = collect(&mut ask(&mut client, marked).await).await;
    let GenerationEvent::Finished { usage, .. } = end else { panic!("{end:?}") };
    assert_eq!(usage.cached_tokens, 0);
    let (mut added, mut marks) = (Vec::new(), Vec::new());
    while added.is_empty() {
        let news = within("news", feed.message()).await.unwrap().unwrap();
        assert_eq!((news.block_tokens, news.reset), (64, false), "{news:?}");
        added.extend(news.added);
        marks.extend(news.marked);
    }
    assert_eq!(added.len(), 7, "500 and some tokens");
    for (mark, share) in marks.iter().zip([70, 100]) {
        assert_eq!(mark.tokens, usage.prompt_tokens * share / 100);
        assert!(added.contains(&mark.block), "{mark:?}");
    }
    assert_eq!(marks.iter().map(|mark| mark.key).collect::<Vec<_>>(), [1, 2]);
    // The same slot continues: all but the marks after the first output.
    let again = cached(&mut client, &text(50, "second")).await;
    assert!((500..512).contains(&again), "{again}");
    // An unrelated prompt, and then a prefix that is only in blocks.
    assert_eq!(cached(&mut client, &text(0, "else")).await, 0);
    assert_eq!(cached(&mut client, &text(13, "third")).await, 128);
    assert_eq!(ranks[0].life.status().phase, Phase::Serving, "{}", ranks[0].life.status().message);
    drop((client, ranks, feed));

    // Blocks on disk survive the ranks; a file that one rank lost is loaded by none.
    for (damaged, expected) in [(false, 448), (true, 0)] {
        let fakes = fakes.each_ref().map(|fake| fake.restarted());
        if damaged {
            fakes[1].damage();
        }
        let ranks = lab.pipeline(&fakes, config.clone()).await;
        ranks[0].serving().await;
        let mut client = lab.client(&ranks[0]);
        let found = cached(&mut client, &text(50, "fourth")).await;
        assert!(found == expected, "{found} of {expected}, damaged: {damaged}");
        assert_eq!(cached(&mut client, &text(50, "fourth")).await, 509, "what was read is there again");
        assert_eq!(ranks[0].life.status().phase, Phase::Serving, "{}", ranks[0].life.status().message);
    }
}

#[tokio::test]
async fn a_caller_that_leaves_frees_its_slot() {
    let lab = RankHarness::new();
    let fake = FakeExecutor::with_timing(Duration::from_millis(2), None);
    let config = EngineConfig {
        max_sequences: 1,
        context_tokens: 100_000,
        prefix_cache: false,
        ..EngineConfig::default()
    };
    let rank = lab.start("n0", config, fake.clone()).await;
    rank.serving().await;
    let mut client = lab.client(&rank);
    let mut events = ask(&mut client, say_for("a", 90_000)).await;
    while !matches!(next(&mut events).await, Some(GenerationEvent::Token { .. })) {}
    // A waiting request may be cancelled as well; the order in which the engine sees two streams end is open.
    let mut control = ControlClient::new(tls::unix_channel(lab.sockets.path().join("n0")));
    let mut watch = control.watch(pb::WatchRequest {}).await.unwrap().into_inner();
    let state = within("the state at once", watch.message()).await.unwrap().unwrap();
    let waits = async |number: u32| {
        let line = format!("vllm:num_requests_waiting{{engine=\"0\",model_name=\"small\"}} {number}");
        within(&line, async { while !get(&state.metrics_address, "/metrics").await.contains(&line) {} })
            .await;
    };
    let never = ask(&mut client, say("never")).await;
    waits(1).await;
    drop(never);
    waits(0).await;
    drop(events);
    // The first one was the smoke prompt.
    eventually("freeing the slot", || fake.resets() == [0, 0]).await;
    let mut events = ask(&mut client, say("next")).await;
    assert_eq!(collect(&mut events).await.0, "next");
    let said_never = |step: &SequenceStep| step.tokens.contains(&fixture::token_of_byte(b'v'));
    assert!(!fake.steps().iter().any(said_never), "the request that left while waiting was run");
}

#[tokio::test]
async fn every_wrong_request_gets_a_typed_failure() {
    let lab = RankHarness::new();
    let fake = FakeExecutor::new();
    let rank = lab.start("n0", EngineConfig { max_sequences: 1, ..short() }, fake.clone()).await;
    rank.serving().await;
    let mut client = lab.client(&rank);
    let mut wizard = say("hi");
    wizard.messages[0].role = "wizard".into();
    let mut hot = say("hi");
    hot.sampling.temperature = f32::INFINITY;
    for (request, kind, expected) in [
        (say(&"x".repeat(124)), FailureKind::ContextLengthExceeded, "resulted in 128 tokens"),
        (wizard, FailureKind::InvalidRequest, "only user and assistant speak here"),
        (hot, FailureKind::InvalidRequest, "temperature is inf"),
    ] {
        let mut events = ask(&mut client, request).await;
        let (_, end) = collect(&mut events).await;
        let failure = failure(end);
        assert_eq!(failure.kind, kind);
        assert!(failure.message.contains(expected), "{}", failure.message);
    }
}

#[test]
fn blocks_on_disk_are_of_one_arithmetic() {
    let config = EngineConfig { model_dir: "/nowhere".into(), ..EngineConfig::default() };
    let packed = |quantization| EngineOptions { quantization, ..EngineOptions::default() };
    let identities: std::collections::BTreeSet<String> = [
        config.clone(),
        EngineConfig { dtype: Dtype::F32, ..config.clone() },
        EngineConfig { options: packed(WeightQuantization::Int4), ..config.clone() },
        EngineConfig { options: packed(WeightQuantization::Int8), ..config.clone() },
        EngineConfig { options: packed(WeightQuantization::Int8), dtype: Dtype::F32, ..config },
    ]
    .iter()
    .map(block_identity)
    .collect();
    assert_eq!(identities.len(), 5, "{identities:?}");
}

#[tokio::test]
async fn as_many_wait_as_the_options_say() {
    for (asked, waiting) in [(None, DEFAULT_MAX_WAITING_REQUESTS), (Some(2), 2), (Some(0), 0)] {
        let lab = RankHarness::new();
        let fake = FakeExecutor::new();
        let options = EngineOptions { max_waiting_requests: asked, ..EngineOptions::default() };
        let config = EngineConfig { max_sequences: 1, options, ..short() };
        let rank = lab.start("n0", config, fake.clone()).await;
        rank.serving().await;
        let mut client = lab.client(&rank);
        // One runs forever, the queue is full, and the next one is refused.
        fake.set_behaviour(FakeBehaviour::Hanging);
        let mut held = Vec::new();
        for _ in 0..=waiting {
            held.push(ask(&mut client, say("x")).await);
            if held.len() == 1 {
                assert!(matches!(next(&mut held[0]).await, Some(GenerationEvent::Started { .. })));
            }
        }
        let mut events = ask(&mut client, say("x")).await;
        let failure = failure(collect(&mut events).await.1);
        assert_eq!(failure.kind, FailureKind::Overloaded);
        let expected = format!("1 requests are running and {waiting} are waiting");
        assert!(failure.message.contains(&expected), "{}", failure.message);
    }
}

#[tokio::test]
async fn unauthorised_clients_are_rejected() {
    let lab = RankHarness::new();
    let rank = lab.start("n0", short(), FakeExecutor::new()).await;
    rank.serving().await;
    let follower = pipeline_of(2, short());
    let follower = lab.start("n1", EngineConfig { rank: 1, ..follower }, FakeExecutor::new()).await;
    let request = || pb::GenerateRequest::from(say("hi"));
    let hello = |message| futures::stream::iter([pb::FollowCommand { command: message }]);
    // Every user on rank 0 alone and on rank 1 of a group that is led from n0. What is allowed fails for another
    // reason where the rank has another role or the call is empty.
    let denied = Some(Code::PermissionDenied);
    for (rank, user, generate, prefixes, follow) in [
        (&rank, tls::GATEWAY_USER, None, None, denied),
        (&rank, "russet:node:n0", denied, denied, denied),
        (&rank, "russet:operator", denied, denied, denied),
        (&rank, "somebody", denied, denied, denied),
        (
            &follower,
            tls::GATEWAY_USER,
            Some(Code::FailedPrecondition),
            Some(Code::FailedPrecondition),
            denied,
        ),
        (
            &follower,
            "russet:node:n0",
            Some(Code::FailedPrecondition),
            Some(Code::FailedPrecondition),
            Some(Code::InvalidArgument),
        ),
        (&follower, "russet:node:n1", denied, denied, denied),
        (&follower, "russet:node:n2", denied, denied, denied),
        (&follower, "somebody", denied, denied, denied),
    ] {
        let mut client = EngineClient::new(lab.channel(rank, user));
        let codes = (
            client.generate(request()).await.err().map(|status| status.code()),
            client.prefixes(pb::PrefixesRequest {}).await.err().map(|status| status.code()),
            client.follow(hello(None)).await.err().map(|status| status.code()),
        );
        assert_eq!(codes, (generate, prefixes, follow), "{user} on {}", rank.node);
    }
    // A client of another CA does not even get a connection.
    let other = Identities::new().user(tls::GATEWAY_USER);
    let mixed = TlsFiles { ca: lab.identities.user(tls::GATEWAY_USER).ca, ..other };
    // The other CA's files are removed with it, so they are read here.
    if let Ok(channel) = mixed.channel(&rank.address, &rank.node) {
        assert!(EngineClient::new(channel).generate(request()).await.is_err());
    }
}

#[tokio::test]
async fn a_pipeline_runs_the_same_steps_on_every_rank() {
    let lab = RankHarness::new();
    let fakes = [FakeExecutor::new(), FakeExecutor::new(), FakeExecutor::new()];
    let mut ranks = lab.pipeline(&fakes, short()).await;
    for rank in &ranks {
        rank.serving().await;
    }
    let mut client = lab.client(&ranks[0]);
    for _ in 0..2 {
        let mut events = ask(&mut client, say("pipeline")).await;
        assert_eq!(collect(&mut events).await.0, "pipeline");
    }
    let steps: Vec<SequenceStep> =
        fakes[0].steps().into_iter().map(|step| SequenceStep { sample: None, score: None, ..step }).collect();
    for follower in &fakes[1..] {
        eventually("the last steps of a follower", || follower.steps() == steps).await;
        eventually("the last reset of a follower", || follower.resets() == fakes[0].resets()).await;
    }
    assert_eq!(
        lab.client(&ranks[1]).generate(pb::GenerateRequest::from(say("hi"))).await.unwrap_err().code(),
        Code::FailedPrecondition
    );
    let states = {
        ranks[0].life.drain("the test is over");
        assert_eq!(ranks[0].outcome().await, ExitOutcome::Stopped);
        ranks[0].states().await
    };
    assert!(states.iter().any(|state| state.phase() == pb::Phase::Serving));
}

#[tokio::test]
async fn lost_follower_fails_every_stream_even_when_mlx_hangs() {
    for (mood, how) in [
        (FakeBehaviour::Normal, "killed"),
        (FakeBehaviour::Hanging, "killed"),
        (FakeBehaviour::Normal, "broken"),
    ] {
        let lab = RankHarness::new();
        let fakes = [
            FakeExecutor::with_timing(Duration::from_millis(2), None),
            FakeExecutor::new(),
            FakeExecutor::new(),
        ];
        let mut ranks = lab
            .pipeline(
                &fakes,
                EngineConfig { max_sequences: 1, context_tokens: 100_000, ..EngineConfig::default() },
            )
            .await;
        ranks[0].serving().await;
        let mut client = lab.client(&ranks[0]);
        let mut running = ask(&mut client, say_for("a", 90_000)).await;
        while !matches!(next(&mut running).await, Some(GenerationEvent::Token { .. })) {}
        let mut waiting = ask(&mut client, say("b")).await;
        fakes[0].set_behaviour(mood);
        let expected = match how {
            "killed" => {
                ranks[2].kill();
                "rank 2 on n2"
            }
            _ => {
                fakes[1].set_behaviour(FakeBehaviour::Failing);
                "rank 1: [ring] connection to a peer was lost"
            }
        };
        for events in [&mut running, &mut waiting] {
            let failure = failure(collect(events).await.1);
            assert_eq!(failure.kind, FailureKind::Unavailable);
            assert!(failure.message.contains(expected), "{how}: {}", failure.message);
        }
        assert!(matches!(ranks[0].outcome().await, ExitOutcome::Failed(reason) if reason.contains(expected)));
        let last = ranks[0].states().await.pop().unwrap();
        assert_eq!(last.phase(), pb::Phase::Failed);
        assert!(last.message.contains(expected), "{}", last.message);
        // The survivor has failed too.
        assert!(matches!(ranks[1].outcome().await, ExitOutcome::Failed(_)));
    }
}

#[tokio::test]
async fn a_follower_ends_when_rank_zero_is_gone() {
    let lab = RankHarness::new();
    let fakes = [FakeExecutor::new(), FakeExecutor::new()];
    let mut ranks = lab.pipeline(&fakes, short()).await;
    ranks[1].serving().await;
    ranks[0].kill();
    assert!(matches!(ranks[1].outcome().await, ExitOutcome::Failed(reason) if reason.contains("rank 0")));
}

#[tokio::test]
async fn mismatched_ranks_reject_each_other_by_name() {
    let lab = RankHarness::new();
    let group = pipeline_of(2, EngineConfig { epoch: 3, ..short() });
    let follower = lab.start("n1", EngineConfig { rank: 1, ..group.clone() }, FakeExecutor::new()).await;
    let group = EngineConfig { peers: vec![follower.peer(1)], ..group };
    let mut leader = lab.start("n0", EngineConfig { epoch: 4, ..group.clone() }, FakeExecutor::new()).await;
    let ExitOutcome::Failed(reason) = leader.outcome().await else { panic!("rank 0 served") };
    assert!(reason.contains("rank 1 on n1"), "{reason}");
    assert!(reason.contains("the epochs differ: this rank has 3, rank 0 has 4"), "{reason}");
    // The follower still waits for the right leader.
    let mut right = lab.start("n0", group, FakeExecutor::new()).await;
    right.serving().await;
    right.life.drain("the test is over");
    assert_eq!(right.outcome().await, ExitOutcome::Stopped);
}

#[tokio::test]
async fn follower_rejects_a_leader_of_another_build_or_group() {
    let lab = RankHarness::new();
    let group = EngineConfig {
        layers_per_rank: vec![2, 2, 1, 1],
        tensor_size: 2,
        tensor_hosts: unused_hosts(4),
        ..pipeline_of(4, short())
    };
    let fake = FakeExecutor::new();
    let follower = lab.start("n3", EngineConfig { rank: 3, epoch: 3, ..group }, fake.clone()).await;
    let build = russet_rpc::ENGINE_BUILD;
    let right = pb::Hello { build: build.into(), group_uid: "g".into(), epoch: 3, size: 4, tensor_size: 2 };
    let newer = "russet-engine/999.0.0";
    let mut client = EngineClient::new(lab.channel(&follower, &tls::node_user("n0")));
    for (wrong, said) in [
        (
            pb::Hello { build: newer.into(), ..right.clone() },
            format!("the builds differ: this rank has {build}, rank 0 has {newer}"),
        ),
        (pb::Hello { group_uid: "h".into(), ..right.clone() }, "this rank has g, rank 0 has h".into()),
        (pb::Hello { epoch: 4, ..right.clone() }, "epochs differ: this rank has 3, rank 0 has 4".into()),
        (pb::Hello { size: 2, ..right.clone() }, "sizes differ: this rank has 4, rank 0 has 2".into()),
        (
            pb::Hello { tensor_size: 1, ..right.clone() },
            "tensor sizes differ: this rank has 2, rank 0 has 1".into(),
        ),
    ] {
        let hello = pb::FollowCommand { command: Some(Command::Hello(wrong)) };
        let status =
            within("the rejection", client.follow(futures::stream::iter([hello]))).await.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().contains(&said), "{said}: {}", status.message());
    }
    assert!(fake.steps().is_empty());
    // The right leader is still accepted.
    let (sender, commands) = tokio::sync::mpsc::unbounded_channel();
    sender.send(pb::FollowCommand { command: Some(Command::Hello(right)) }).unwrap();
    let commands = tokio_stream::wrappers::UnboundedReceiverStream::new(commands);
    within("the welcome", client.follow(commands)).await.unwrap();
}

#[tokio::test]
async fn rank_zero_waits_for_a_follower_that_is_not_there_yet() {
    let lab = RankHarness::new();
    let group = pipeline_of(2, short());
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let peers = vec![PeerRank { rank: 1, address: free, node: "n1".into() }];
    let leader = lab.start("n0", EngineConfig { peers, ..group.clone() }, FakeExecutor::new()).await;
    within(
        "naming whom it waits for",
        leader.life.wait_until(|now| now.message.contains("waiting for rank 1 on n1")),
    )
    .await;
    let mut events = ask(&mut lab.client(&leader), say("early")).await;
    assert_eq!(failure(collect(&mut events).await.1).kind, FailureKind::Unavailable);
    let config = EngineConfig { rank: 1, listen: free, ..group };
    let follower = lab.start("n1", config, FakeExecutor::new()).await;
    follower.serving().await;
    leader.serving().await;
}

#[tokio::test]
async fn load_failure_is_reported_to_the_agent() {
    let lab = RankHarness::new();
    std::fs::write(lab.model.path().join("tokenizer.json"), "{").unwrap();
    let mut rank = lab.start("n0", short(), FakeExecutor::new()).await;
    assert!(
        matches!(rank.outcome().await, ExitOutcome::Failed(reason) if reason.contains("tokenizer.json is broken"))
    );
    let last = rank.states().await.pop().unwrap();
    assert_eq!(last.phase(), pb::Phase::Failed);
    assert!(last.message.contains("tokenizer.json is broken"));

    let lab = RankHarness::new();
    let fake = FakeExecutor::new();
    fake.break_weights();
    let mut rank = lab.start("n0", short(), fake).await;
    assert!(
        matches!(rank.outcome().await, ExitOutcome::Failed(reason) if reason.contains("model.safetensors is broken"))
    );
}

#[tokio::test]
async fn failed_smoke_test_keeps_every_rank_from_serving() {
    let unknown = 300;
    for (mood, expected) in [
        (FakeBehaviour::Failing, "not answered: [ring] connection to a peer was lost"),
        (
            FakeBehaviour::FixedToken(unknown),
            "token 1 of its answer is 300, which the tokenizer does not have",
        ),
        (
            FakeBehaviour::FixedToken(fixture::USER),
            "the tokens of its answer, [257, 257, 257, 257], have no text",
        ),
    ] {
        for size in [1, 2] {
            let lab = RankHarness::new();
            let fakes: Vec<_> = (0..size).map(|_| FakeExecutor::new()).collect();
            fakes[0].set_behaviour(mood);
            let mut ranks = if size == 1 {
                vec![lab.start("n0", short(), fakes[0].clone()).await]
            } else {
                lab.pipeline(&fakes, short()).await
            };
            for rank in &mut ranks {
                let ExitOutcome::Failed(reason) = rank.outcome().await else {
                    panic!("{mood:?}: it stopped")
                };
                assert!(reason.starts_with("the smoke prompt was not answered: "), "{reason}");
                assert!(reason.contains(expected), "{reason}");
                let states = rank.states().await;
                assert!(states.iter().all(|state| state.phase() != pb::Phase::Serving), "{mood:?}");
                let last = states.last().unwrap();
                assert_eq!((last.phase(), last.cause()), (pb::Phase::Failed, pb::FailureCause::Smoke));
            }
        }
    }
}

#[tokio::test]
async fn requests_are_rejected_until_the_smoke_test_passes() {
    let lab = RankHarness::new();
    let fakes = [FakeExecutor::with_behaviour(FakeBehaviour::Hanging), FakeExecutor::new()];
    let mut ranks = lab.pipeline(&fakes, short()).await;
    for rank in &ranks {
        let trying = rank.life.wait_until(|now| now.message.contains("the smoke prompt"));
        assert_eq!(within("trying", trying).await.phase, Phase::Loaded);
    }
    let mut events = ask(&mut lab.client(&ranks[0]), say("early")).await;
    let refused = failure(collect(&mut events).await.1);
    assert_eq!(refused.kind, FailureKind::Unavailable);
    assert!(refused.message.contains("its smoke prompt"), "{}", refused.message);
    let mut control = ControlClient::new(tls::unix_channel(lab.sockets.path().join("n0")));
    let mut watch = control.watch(pb::WatchRequest {}).await.unwrap().into_inner();
    let state = within("the state at once", watch.message()).await.unwrap().unwrap();
    let ready = get(&state.metrics_address, "/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
    // A rank that is asked to stop does so without waiting for a reply.
    ranks[0].life.drain("the test is over");
    assert_eq!(ranks[0].outcome().await, ExitOutcome::Stopped);
}

#[tokio::test]
async fn engine_without_an_agent_exits() {
    let lab = RankHarness::new();
    let mut rank =
        lab.start_unwatched("n0", EngineConfig { orphan_seconds: 1, ..short() }, FakeExecutor::new()).await;
    assert_eq!(rank.outcome().await, ExitOutcome::Failed("no agent has watched this engine for 1 s".into()));

    // With a watcher it outlives its orphan timeout, and exits after the watch ends.
    let mut rank = lab.start("n1", EngineConfig { orphan_seconds: 1, ..short() }, FakeExecutor::new()).await;
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(rank.life.status().phase, Phase::Serving);
    rank.states.take().unwrap().abort();
    assert!(matches!(rank.outcome().await, ExitOutcome::Failed(_)));
}

#[tokio::test]
async fn a_bug_ends_streams_and_rank_alike() {
    let lab = RankHarness::new();
    let fake = FakeExecutor::with_timing(Duration::from_millis(2), None);
    let mut rank = lab
        .start("n0", EngineConfig { context_tokens: 100_000, ..EngineConfig::default() }, fake.clone())
        .await;
    rank.serving().await;
    let mut events = ask(&mut lab.client(&rank), say_for("a", 90_000)).await;
    while !matches!(next(&mut events).await, Some(GenerationEvent::Token { .. })) {}
    fake.set_behaviour(FakeBehaviour::Panicking);
    let failure = failure(collect(&mut events).await.1);
    assert_eq!(failure.kind, FailureKind::Internal);
    assert!(matches!(rank.outcome().await, ExitOutcome::Failed(reason) if reason.contains("bug")));
}

#[tokio::test]
async fn stopping_answers_what_runs_and_refuses_the_rest() {
    let lab = RankHarness::new();
    let mut rank = lab.start("n0", short(), FakeExecutor::with_timing(Duration::from_millis(20), None)).await;
    rank.serving().await;
    let mut client = lab.client(&rank);
    let mut events = ask(&mut client, say_for("a", 50)).await;
    assert!(matches!(next(&mut events).await, Some(GenerationEvent::Started { .. })));
    let mut control = ControlClient::new(tls::unix_channel(lab.sockets.path().join("n0")));
    control.stop(pb::StopRequest {}).await.unwrap();
    let mut late = ask(&mut client, say("late")).await;
    let refused = failure(collect(&mut late).await.1);
    assert_eq!(refused.kind, FailureKind::Unavailable);
    assert!(refused.message.contains("stopping"), "{}", refused.message);
    assert_eq!(collect(&mut events).await.0, "a".repeat(50));
    assert_eq!(rank.outcome().await, ExitOutcome::Stopped);
}

#[tokio::test]
async fn the_agent_sees_phases_and_the_metrics_show_the_requests() {
    let lab = RankHarness::new();
    let mut rank = lab
        .start(
            "n0",
            EngineConfig {
                epoch: 7,
                shard_uid: "s".into(),
                options: EngineOptions { speculation: Speculation::Off, ..EngineOptions::default() },
                ..short()
            },
            FakeExecutor::new(),
        )
        .await;
    rank.serving().await;
    let mut events = ask(&mut lab.client(&rank), say("measure")).await;
    collect(&mut events).await;
    let mut control = ControlClient::new(tls::unix_channel(lab.sockets.path().join("n0")));
    let mut watch = control.watch(pb::WatchRequest {}).await.unwrap().into_inner();
    let state = within("the state at once", watch.message()).await.unwrap().unwrap();
    assert_eq!((state.phase(), state.epoch, state.shard_uid.as_str()), (pb::Phase::Serving, 7, "s"));
    let mut text = String::new();
    for path in ["/metrics", "/readyz"] {
        text.push_str(&get(&state.metrics_address, path).await);
    }
    assert_eq!(text.matches("HTTP/1.1 200").count(), 2, "{text}");
    for line in [
        "vllm:request_success_total{engine=\"0\",finished_reason=\"stop\",model_name=\"small\"} 1",
        "vllm:generation_tokens_total{engine=\"0\",model_name=\"small\"} 7",
        "vllm:prompt_tokens_total{engine=\"0\",model_name=\"small\"} 11",
        "vllm:num_requests_running{engine=\"0\",model_name=\"small\"} 0",
        "vllm:time_to_first_token_seconds_count{engine=\"0\",model_name=\"small\"} 1",
        "vllm:cache_config_info{block_size=\"128\",engine=\"0\",model_name=\"small\",num_gpu_blocks=\"4\"} 1",
        // The smoke prompt is no request, but its five steps count; and one was started before the end was
        // known.
        "russet_engine_steps_total{model_name=\"small\"} 15",
    ] {
        assert!(text.contains(line), "{line} is missing from {text}");
    }
    assert!(!text.contains("russet_engine_smoke_seconds{model_name=\"small\"} 0\n"), "{text}");
    rank.life.drain("the test is over");
    let phases: Vec<pb::Phase> = rank.states().await.iter().map(pb::EngineState::phase).collect();
    assert!(phases.is_sorted() && phases.contains(&pb::Phase::Serving), "{phases:?}");
}

#[tokio::test]
async fn a_taken_port_is_named_with_its_field() {
    let lab = RankHarness::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let config = lab.config("n0", EngineConfig { listen: address, ..short() });
    let error = EngineProcess::bind(config, FakeExecutor::new()).await.err().unwrap().to_string();
    assert!(error.contains(&format!("cannot listen on {address} (listen)")), "{error}");
}
