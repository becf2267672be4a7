//! Soak test: many concurrent clients over a long time. Real engines serve long and short requests of clients
//! that often disconnect or cancel, with slots for a part of them and a prefix cache in memory and on a small
//! disk. Every complete output equals that of the request alone, no slot or capacity leaks, and memory does
//! not grow.
//!
//! A part with fewer requests runs with the tests, on one rank or on a pipeline of two; `cargo xtask proof soak SECONDS`
//! runs both, sets `RUSSET_SOAK_SECONDS` and records the output.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/engines.rs"]
mod engines;
#[path = "support/identities.rs"]
mod identities;
#[path = "support/share.rs"]
mod share;
#[path = "support/reference_model.rs"]
mod solo;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::future::join_all;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use russet_rpc::engine as pb;
use russet_rpc::engine::engine_client::EngineClient;
use russet_wire::event::{FailureKind, GenerationEvent};
use russet_wire::request::{GenerationRequest, Sampling};
use tonic::Streaming;
use tonic::transport::Channel;

use engines::{EngineHarness, TestEngine, ask, say, within};
use solo::ReferenceModel;

/// Clients, each with one request at a time.
const CLIENTS: usize = 200;
/// Fewer than clients, so that some wait.
const SLOTS: u32 = 160;
/// Capacity for all slots with short sequences, and for a part of them with long ones.
const KV_TOKENS: u64 = 160 * 256 + 8192;
/// Small enough to fill up soon.
const DISK: u64 = 16 << 20;
/// Connections that the clients share.
const CONNECTIONS: usize = 8;
/// Requests of the part that runs with the tests, in each of two rounds.
const REQUESTS: usize = 300;
/// The same for a pipeline, which is much slower where its ranks share cores.
const REQUESTS_OF_TWO: usize = 200;
/// Timeout of an event: with so many clients, the last one waits long on a busy machine.
const EVENT_TIMEOUT: Duration = Duration::from_secs(900);
/// Maximum growth factor of memory.
const GROWTH: f64 = 1.05;
/// Bytes per token and layer of the smoke model's KV cache in float32: keys and values of 4 heads of 32.
const TOKEN_BYTES: f64 = (2 * 4 * 32 * 4) as f64;
/// Allocation of a slot with a short sequence, in tokens.
const SLOT_TOKENS: f64 = 256.0;

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("smoke/model")
}

/// Greedy requests: words, one letter, long prompts with a common prefix, and long ones without.
fn questions() -> Vec<GenerationRequest> {
    let sums = |from: usize, count: usize| -> String {
        (from..from + count).map(|at| format!("{} + {}, ", at * 37 % 90 + 10, at * 53 % 90 + 10)).collect()
    };
    let shared = sums(0, 40);
    let mut texts =
        vec![("a".to_owned(), 1), ("What is Russet?".to_owned(), 48), ("What is 17 + 25?".to_owned(), 24)];
    for number in 0..9 {
        texts.push((format!("What is {} + {}?", 11 * number + 3, 7 * number + 5), 8 + 3 * number as u32));
        texts.push((format!("{shared} and what is {number} + 4?"), 32));
        texts.push((format!("{} and what is that?", sums(100 * number, 15 + 6 * number)), 16));
    }
    let question = |(text, tokens): &(String, u32)| GenerationRequest {
        max_tokens: Some(*tokens),
        ignore_eos: *tokens > 1,
        ..say(text)
    };
    texts.iter().map(question).collect()
}

/// A unique random prompt, useless to the prefix cache; one in ten fills most of the context.
fn unheard(random: &mut StdRng) -> String {
    let most = if random.random_bool(0.1) { 70 } else { 25 };
    let sums: Vec<String> = (0..random.random_range(1..most))
        .map(|_| format!("{} + {}", random.random_range(0..1000), random.random_range(0..1000)))
        .collect();
    format!("What is {}?", sums.join(" + "))
}

/// Outcomes of all requests.
#[derive(Debug, Default)]
struct Tally {
    compared: AtomicUsize,
    /// Outputs that differ where two tokens are equally good.
    excused: AtomicUsize,
    sampled: AtomicUsize,
    disconnected: AtomicUsize,
    cancelled: AtomicUsize,
    refused: AtomicUsize,
}

/// The next event of a response.
async fn next(events: &mut Streaming<pb::GenerateEvent>) -> Option<GenerationEvent> {
    let event = tokio::time::timeout(EVENT_TIMEOUT, events.message()).await;
    event
        .unwrap_or_else(|_| panic!("an event took more than {EVENT_TIMEOUT:?}"))
        .unwrap()
        .map(GenerationEvent::from)
}

/// Tokens and end of a response.
async fn collect(events: &mut Streaming<pb::GenerateEvent>) -> (Vec<u32>, GenerationEvent) {
    let mut ids = Vec::new();
    loop {
        match next(events).await {
            Some(GenerationEvent::Started { .. }) => assert!(ids.is_empty()),
            Some(GenerationEvent::Token { id, .. }) => ids.push(id),
            Some(end) => {
                assert!(next(events).await.is_none(), "an event after {end:?}");
                return (ids, end);
            }
            None => panic!("a stream never just ends"),
        }
    }
}

fn count(counter: &AtomicUsize) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// When clients stop.
#[derive(Clone)]
enum StopCondition {
    Requests(Arc<AtomicUsize>, usize),
    Time(Instant),
}

impl StopCondition {
    fn requests(most: usize) -> Self {
        Self::Requests(Arc::default(), most)
    }

    fn continues(&self) -> bool {
        match self {
            Self::Requests(asked, most) => asked.fetch_add(1, Ordering::Relaxed) < *most,
            Self::Time(end) => Instant::now() < *end,
        }
    }
}

/// A group, its clients' connections, and its outputs for one request at a time.
struct SoakGroup {
    lab: EngineHarness,
    engines: Vec<TestEngine>,
    /// Layers of each rank.
    layers: Vec<usize>,
    /// Bytes that MLX held on each rank before the first request.
    weights: Vec<f64>,
    clients: Vec<EngineClient<Channel>>,
    questions: Vec<(GenerationRequest, Vec<u32>)>,
    solo: ReferenceModel,
    tally: Tally,
    _disk: tempfile::TempDir,
}

impl SoakGroup {
    async fn start(layers: &[usize]) -> Self {
        let mut lab = EngineHarness::new();
        let disk = tempfile::tempdir().unwrap();
        lab.prefix_dir = Some(disk.path().to_owned());
        lab.config.context_tokens = 1024;
        lab.config.orphan_seconds = 7200;
        lab.config.max_sequences = 160;
        lab.config.kv_tokens = Some(49_152);
        lab.config.prefix_dir_bytes = 16 << 20;
        let engines = lab.start(&model(), layers);
        let mut clients = Vec::new();
        for _ in 0..CONNECTIONS {
            clients.push(lab.client(&engines[0]).await);
        }
        let mut weights = Vec::new();
        for engine in &engines {
            weights.push(value(&engine.metrics().await, "russet_engine_memory_bytes"));
        }
        let mut alone = Vec::new();
        for question in questions() {
            let (ids, end) = collect(&mut ask(&mut clients[0], question.clone()).await).await;
            assert!(matches!(end, GenerationEvent::Finished { .. }), "{end:?}");
            alone.push((question, ids));
        }
        let solo = ReferenceModel::load(&model());
        let (layers, tally) = (layers.to_vec(), Tally::default());
        Self { lab, engines, layers, weights, clients, questions: alone, solo, tally, _disk: disk }
    }

    /// Runs all clients at once, until they stop.
    async fn ask(&self, seed: u64, until: StopCondition) {
        join_all((0..CLIENTS).map(|number| self.client(number, seed, until.clone()))).await;
    }

    async fn client(&self, number: usize, seed: u64, until: StopCondition) {
        let mut random = StdRng::seed_from_u64(1000 * seed + number as u64);
        let mut client = self.clients[number % CONNECTIONS].clone();
        while until.continues() {
            match random.random_range(0..10) {
                0..5 => self.compare(&mut client, &mut random).await,
                5 => {
                    let temperature = random.random_range(0.2..1.5);
                    let sampling = Sampling { temperature, seed: Some(number as u64), ..Sampling::default() };
                    let request = GenerationRequest { sampling, ..long(&mut random) };
                    let (_, end) = collect(&mut ask(&mut client, request).await).await;
                    self.ended(&end, &self.tally.sampled);
                }
                // Before the first event, like a cancelled request.
                6 => {
                    drop(ask(&mut client, long(&mut random)).await);
                    count(&self.tally.cancelled);
                }
                // In the middle of the output, alone or with everything on the connection.
                7..9 => self.disconnect(&mut client, &mut random).await,
                _ => {
                    let mut own = self.lab.client(&self.engines[0]).await;
                    self.disconnect(&mut own, &mut random).await;
                }
            }
        }
    }

    /// Sends a request with a known output, and compares.
    async fn compare(&self, client: &mut EngineClient<Channel>, random: &mut StdRng) {
        let (question, alone) = self.questions.choose(random).unwrap();
        let request = GenerationRequest { priority: random.random_range(-2..3), ..question.clone() };
        let (ids, end) = collect(&mut ask(client, request).await).await;
        if !self.ended(&end, &self.tally.compared) {
            return;
        }
        if ids != *alone {
            count(&self.tally.excused);
            // Every token has to be the best one at its position, or equally good.
            self.solo.check(question, &ids, alone).await;
        }
    }

    /// Reads a part of a long output and disconnects.
    async fn disconnect(&self, client: &mut EngineClient<Channel>, random: &mut StdRng) {
        let mut events = ask(client, long(random)).await;
        let tokens = random.random_range(0..20);
        let mut received = 0;
        while received <= tokens {
            match next(&mut events).await {
                Some(GenerationEvent::Token { .. }) => received += 1,
                Some(GenerationEvent::Started { .. }) => {}
                Some(end) => {
                    self.ended(&end, &self.tally.disconnected);
                    return;
                }
                None => panic!("a stream never just ends"),
            }
        }
        count(&self.tally.disconnected);
    }

    /// Whether a response is complete; a refusal is allowed only for lack of capacity.
    fn ended(&self, end: &GenerationEvent, counter: &AtomicUsize) -> bool {
        match end {
            GenerationEvent::Finished { .. } => count(counter),
            GenerationEvent::Failed(failure) if failure.kind == FailureKind::Overloaded => {
                count(&self.tally.refused)
            }
            other => panic!("an answer ended with {other:?}"),
        }
        matches!(end, GenerationEvent::Finished { .. })
    }

    /// Waits until no request is running or waiting, and checks that no KV capacity is in use.
    async fn wait_idle(&self) {
        let engine = &self.engines[0];
        within("the end of all requests", async {
            loop {
                let shown = engine.metrics().await;
                let held =
                    ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"];
                if held.iter().all(|name| value(&shown, name) == 0.0) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
    }

    /// Uses every slot at the same time, so that each holds a sequence afterwards.
    async fn fill_every_slot(&self) {
        // At most the minimum allocation of a slot, so that all of them fit.
        let request = GenerationRequest { max_tokens: Some(220), ignore_eos: true, ..say("What is Russet?") };
        let asked = (0..SLOTS as usize).map(|number| {
            let (mut client, request) = (self.clients[number % CONNECTIONS].clone(), request.clone());
            async move {
                let mut events = ask(&mut client, request).await;
                while !matches!(next(&mut events).await.unwrap(), GenerationEvent::Token { .. }) {}
                events
            }
        });
        let streams = join_all(asked).await;
        within("all slots in use", async {
            while value(&self.engines[0].metrics().await, "vllm:num_requests_running") < f64::from(SLOTS) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        drop(streams);
        self.wait_idle().await;
    }

    /// Bytes held by MLX and by the process, on each rank.
    async fn memory(&self) -> Vec<[f64; 2]> {
        let mut all = Vec::new();
        for engine in &self.engines {
            let mlx = value(&engine.metrics().await, "russet_engine_memory_bytes");
            all.push([mlx, engine.process_memory().unwrap_or(0) as f64]);
        }
        all
    }

    /// Once idle, checks that the prefix cache is within its bounds.
    async fn check_invariants(&self) {
        self.wait_idle().await;
        self.fill_every_slot().await;
        let shown = self.engines[0].metrics().await;
        let blocks = value(&shown, "russet_engine_prefix_cache_blocks{model_name=\"small\",tier=\"memory\"}");
        let tokens = f64::from(SLOTS) * SLOT_TOKENS + blocks * 64.0;
        assert!(tokens <= KV_TOKENS as f64, "{blocks} blocks of 64 tokens beside {SLOTS} slots");
        for (rank, [held, _]) in self.memory().await.into_iter().enumerate() {
            let token = TOKEN_BYTES * self.layers[rank] as f64;
            let known = self.weights[rank] + tokens * token;
            eprintln!("rank {rank} of {:?} holds {held} bytes, {known} of them known", self.layers);
            // The tolerance is less than the cache of one sequence.
            assert!(
                held < known + SLOT_TOKENS * token,
                "MLX holds {held} bytes on rank {rank}, and only {known} are known"
            );
        }
        let folder = self.lab.prefix_dir.as_deref().unwrap();
        // One file may be in flight while another is evicted.
        let (files, bytes) = files(folder);
        let most = (DISK + (1 << 20)) * self.engines.len() as u64;
        assert!(bytes <= most, "{files} files of {bytes} bytes are more than {most}");
    }
}

fn long(random: &mut StdRng) -> GenerationRequest {
    let (text, tokens) = (unheard(random), random.random_range(1..120));
    GenerationRequest { max_tokens: Some(tokens), ignore_eos: true, ..say(&text) }
}

/// Number and bytes of the files below a folder.
fn files(folder: &Path) -> (usize, u64) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let of = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(data) if data.is_dir() => files(&entry.path()),
        data => (1, data.map_or(0, |data| data.len())),
    };
    entries.map(of).fold((0, 0), |(files, bytes), (more, size)| (files + more, bytes + size))
}

/// A value from a metrics page.
fn value(page: &str, name: &str) -> f64 {
    let line =
        page.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {page}"));
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}

fn say_figure(what: &str, value: f64, unit: &str, goal: Option<f64>) {
    println!("{}", serde_json::json!({"what": what, "value": value, "unit": unit, "most": goal}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_clients_get_their_solo_answers_and_nothing_leaks() {
    let groups = vec![(&[4][..], REQUESTS), (&[1, 3], REQUESTS_OF_TWO)];
    for (layers, requests) in share::of_this_run(groups, 2) {
        let started = Instant::now();
        let field = SoakGroup::start(layers).await;
        for seed in 1..3 {
            field.ask(seed, StopCondition::requests(requests)).await;
            field.check_invariants().await;
        }
        eprintln!("{layers:?}: {:?} in {:?}", field.tally, started.elapsed());
        assert!(field.tally.compared.load(Ordering::Relaxed) > requests / 2, "{:?}", field.tally);
    }
}

/// Interval between two memory samples.
const MEMORY_INTERVAL: Duration = Duration::from_secs(1);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes as long as it is given; `cargo xtask proof soak SECONDS` runs it"]
async fn memory_stays_constant_for_the_given_time() {
    let seconds: u64 = std::env::var("RUSSET_SOAK_SECONDS").unwrap().parse().unwrap();
    let field = SoakGroup::start(&[4]).await;
    field.ask(1, StopCondition::requests(REQUESTS)).await;
    field.check_invariants().await;
    let started = Instant::now();
    let until = StopCondition::Time(started + Duration::from_secs(seconds));
    let (asking, mut looks) = (field.ask(2, until), Vec::new());
    tokio::pin!(asking);
    loop {
        tokio::select! {
            () = &mut asking => break,
            () = tokio::time::sleep(MEMORY_INTERVAL) => looks.push(field.memory().await[0]),
        }
    }
    field.check_invariants().await;
    let minutes = started.elapsed().as_secs_f64() / 60.0;
    // A tenth of the samples, starting after the first tenth.
    let tenth = looks.len() / 10;
    let mean = |looks: &[[f64; 2]], which: usize| {
        looks.iter().map(|look| look[which]).sum::<f64>() / looks.len().max(1) as f64
    };
    let (first, last) = (&looks[tenth..2 * tenth], &looks[looks.len() - tenth..]);
    let Tally { compared, excused, sampled, disconnected, cancelled, refused } = &field.tally;
    say_figure("lasted", minutes, "min", None);
    for (which, what) in ["MLX's memory", "memory of the process"].into_iter().enumerate() {
        say_figure(
            &format!("{what}, in the second tenth"),
            mean(first, which) / f64::from(1 << 20),
            "MiB",
            None,
        );
        say_figure(
            &format!("{what}, last tenth over second"),
            mean(last, which) / mean(first, which),
            "×",
            Some(GROWTH),
        );
    }
    for (what, number) in [
        ("answers compared with those alone", compared),
        ("of these different where two tokens are as good", excused),
        ("answers of drawn tokens", sampled),
        ("clients that disconnected in the middle", disconnected),
        ("clients that left before anything came", cancelled),
        ("requests refused for want of room", refused),
    ] {
        say_figure(what, number.load(Ordering::Relaxed) as f64, "", None);
    }
}
