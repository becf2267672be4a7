//! Benchmark: many concurrent requests against mlx-lm's batches on the same weights in the same run, and the
//! gain of a second pipeline stage. Prints one JSON object per figure for `cargo xtask bench engine`.

#![allow(clippy::unwrap_used, reason = "a bench fails as a whole")]

#[path = "support/arrivals.rs"]
mod arrivals;
#[path = "../tests/support/engines.rs"]
mod engines;
#[path = "../tests/support/identities.rs"]
mod identities;
#[path = "../tests/support/model.rs"]
mod model;
#[path = "support/peer.rs"]
mod peer;

use std::time::{Duration, Instant};

use futures::future::join_all;
use russet_rpc::engine::engine_client::EngineClient;
use russet_wire::conversation::Message;
use russet_wire::engine_options::Speculation;
use russet_wire::event::GenerationEvent;
use russet_wire::request::GenerationRequest;
use tonic::transport::Channel;

use arrivals::{Arrival, ROUNDS, Times, beside, serve, throughput};
use engines::{EngineHarness, ask, next, say};
use model::Shape;
use peer::{MlxLmProcess, median, tell};

/// About 100 million parameters, nearly all of them in the layers.
const MODEL: Shape =
    Shape { hidden: 768, intermediate: 2048, heads: 12, kv_heads: 12, layers: 14, spread: 0.03 };
/// About 8 million: prefilling 8,000 tokens with the other one takes a minute here.
const SMALL: Shape =
    Shape { hidden: 384, intermediate: 1024, heads: 6, kv_heads: 6, layers: 4, spread: 0.03 };
/// Layers of the trained model.
const SMOKE_LAYERS: usize = 4;

fn main() {
    tokio::runtime::Runtime::new().unwrap().block_on(run());
}

async fn run() {
    let (model, small) = (model::random_model(MODEL), model::random_model(SMALL));
    let mut lab = EngineHarness::new();
    lab.config.context_tokens = 16384;
    // These engines have no agent.
    lab.config.orphan_seconds = 3600;
    lab.config.max_sequences = 16;
    speculation(&mut lab).await;
    // Comparisons with mlx-lm decode token by token, as it does.
    lab.config.options.speculation = Speculation::Off;
    prefixes(&mut lab, model.path()).await;
    // The prompts repeat, and mlx-lm's batches cache nothing.
    lab.config.prefix_cache = false;

    let engines = lab.start(model.path(), &[MODEL.layers]);
    let client = lab.client(&engines[0]).await;
    let mut peer = MlxLmProcess::start(model.path(), None, None);
    let uniform = vec![Arrival { at: 0.0, prompt: 32, answer: 48 }; 8];
    let what = "8 equal requests at once, throughput";
    beside(what, "tokens/s", 0.97, &client, &mut peer, &uniform, throughput).await;
    let what = "16 requests of mixed lengths, staggered, goodput";
    beside(what, "tokens/s", 1.3, &client, &mut peer, &staggered(), throughput).await;
    drop((engines, peer));

    let engines = lab.start(small.path(), &[SMALL.layers]);
    let client = lab.client(&engines[0]).await;
    let mut peer = MlxLmProcess::start(small.path(), None, None);
    let running = Arrival { at: 0.0, prompt: 32, answer: 200 };
    let disturbed = vec![running, running, Arrival { at: 0.3, prompt: 8000, answer: 1 }];
    let what = "stall of running answers while 8,000 tokens are read";
    beside(what, "ms", 5.0, &client, &mut peer, &disturbed, stall).await;
    drop((engines, peer));

    pipeline(&lab, model.path()).await;
}

/// Sixteen requests with different prompts and outputs, each arriving before the previous one has ended.
fn staggered() -> Vec<Arrival> {
    (0..16)
        .map(|index| Arrival {
            at: 0.15 * f64::from(index),
            prompt: [24, 200, 60, 400][index as usize % 4],
            answer: [64, 16, 40, 24][index as usize % 4],
        })
        .collect()
}

/// Time to first token with a cached prefix, in memory and after a restart from disk, against a prompt that
/// is not cached.
async fn prefixes(lab: &mut EngineHarness, model: &std::path::Path) {
    const SHARED: usize = 1350;
    const OWN: usize = 150;
    let folder = tempfile::tempdir().unwrap();
    lab.prefix_dir = Some(folder.path().to_owned());
    let first = async |client: &EngineClient<Channel>, text: usize, question: usize| {
        let word =
            |seed: usize, place: usize| char::from(b'a' + ((place * seed + place / 7 + seed) % 26) as u8);
        let shared = (0..SHARED).map(|place| word(2 * text + 3, place));
        let content: String = shared.chain((0..OWN).map(|place| word(2 * question + 5, place))).collect();
        // They differ from the first letter on.
        let content = format!("{text:05}{content}");
        let started = Instant::now();
        let request = GenerationRequest { max_tokens: Some(1), ignore_eos: true, ..say(&content) };
        let mut events = ask(&mut client.clone(), request).await;
        loop {
            match next(&mut events).await {
                Some(GenerationEvent::Token { .. }) => break,
                Some(GenerationEvent::Started { .. }) => {}
                other => panic!("{other:?} before the first token"),
            }
        }
        started.elapsed().as_secs_f64() * 1e3
    };
    let (mut cold, mut warm, mut again) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let engines = lab.start(model, &[MODEL.layers]);
        let client = lab.client(&engines[0]).await;
        // Warm-up: loads kernels, and prefills and caches blocks once.
        first(&client, 900, 0).await;
        first(&client, 900, 1).await;
        if round > 0 {
            again.push(first(&client, round - 1, 2).await);
        }
        cold.push(first(&client, round, 0).await);
        warm.push(first(&client, round, 1).await);
        let blocks = (SHARED / 64) * (round + 1);
        let mut waited = 0;
        while files(folder.path()) < blocks && waited < 1000 {
            waited += 1;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    lab.prefix_dir = None;
    let cold = median(cold.into_iter());
    tell("time to first token, nine tenths known", "ms", 5.0, median(warm.into_iter()), cold);
    tell(
        "time to first token, nine tenths known before a restart",
        "ms",
        3.0,
        median(again.into_iter()),
        cold,
    );
}

/// The trained model with an output that repeats earlier text, with and without speculation.
async fn speculation(lab: &mut EngineHarness) {
    let smoke = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("smoke/model");
    let turn = |role: &str, content: &str| Message::new(role, content);
    let question = "What is 17 + 25? Think step by step.";
    let answer = "7 + 5 = 12, 1 + 2 + 1 = 4, so 17 + 25 = 42.";
    let messages = vec![turn("user", question), turn("assistant", answer), turn("user", question)];
    let with = lab.start(&smoke, &[SMOKE_LAYERS]);
    lab.config.options.speculation = Speculation::Off;
    let without = lab.start(&smoke, &[SMOKE_LAYERS]);
    lab.config.options.speculation = Speculation::PromptLookup;
    let clients = [lab.client(&with[0]).await, lab.client(&without[0]).await];
    let mut rates = [Vec::new(), Vec::new()];
    let mut answers = Vec::new();
    for round in 0..=4 * ROUNDS {
        for (client, rates) in clients.iter().zip(&mut rates) {
            let request = GenerationRequest { messages: messages.clone(), max_tokens: Some(100), ..say("") };
            let mut events = ask(&mut client.clone(), request).await;
            let (mut times, mut text) = (Vec::new(), String::new());
            let started = Instant::now();
            loop {
                match next(&mut events).await {
                    Some(GenerationEvent::Token { delta, .. }) => {
                        times.push(started.elapsed().as_secs_f64());
                        text.push_str(&delta.text);
                    }
                    Some(GenerationEvent::Started { .. }) => {}
                    Some(GenerationEvent::Finished { .. }) => break,
                    other => panic!("{other:?} in the middle of an answer"),
                }
            }
            if round > 0 {
                rates.push((times.len() - 1) as f64 / (times[times.len() - 1] - times[0]));
            }
            answers.push(text);
        }
    }
    answers.dedup();
    assert_eq!(answers.len(), 1, "guesses changed an answer: {answers:?}");
    let [with, without] = rates.map(|rates| median(rates.into_iter()));
    tell("an answer that was given before, guessed against not", "tokens/s", 1.5, with, without);
}

/// Number of files below a folder.
fn files(folder: &std::path::Path) -> usize {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| if entry.path().is_dir() { files(&entry.path()) } else { 1 }).sum()
}

/// Two stages with a core each against one rank with one core; and against two independent engines with half
/// of the layers each on those cores, with half of the requests each, which equals stages that never wait.
async fn pipeline(lab: &EngineHarness, model: &std::path::Path) {
    let half = MODEL.layers / 2;
    let half_model = model::random_model(Shape { layers: half, ..MODEL });
    let one = lab.start_pinned(model, &[MODEL.layers], 1, 0);
    let two = lab.start_pinned(model, &[MODEL.layers - half, half], 1, 0);
    let halves = [0, 1].map(|core| lab.start_pinned(half_model.path(), &[half], 1, core));
    let (one, two) = (lab.client(&one[0]).await, lab.client(&two[0]).await);
    let halves = [lab.client(&halves[0][0]).await, lab.client(&halves[1][0]).await];
    let arrivals = vec![Arrival { at: 0.0, prompt: 32, answer: 32 }; 8];
    let mut rates = [Vec::new(), Vec::new(), Vec::new()];
    for round in 0..=ROUNDS {
        let whole = [
            throughput(&serve(&one, &arrivals).await),
            throughput(&serve(&two, &arrivals).await),
            // Each token passes both, so the slower one counts.
            join_all(halves.iter().map(|half| serve(half, &arrivals[..4])))
                .await
                .iter()
                .map(throughput)
                .fold(f64::INFINITY, f64::min),
        ];
        if round > 0 {
            rates.iter_mut().zip(whole).for_each(|(rates, rate)| rates.push(rate));
        }
    }
    let [one, two, stages] = rates.map(|rates| median(rates.into_iter()));
    tell("8 requests, pipeline of 2 ranks of one core against 1", "tokens/s", 1.6, two, one);
    tell(
        "8 requests, pipeline of 2 ranks, beside its stages without each other",
        "tokens/s",
        0.9,
        two,
        stages,
    );
}

/// 99th percentile of the inter-token latency, in milliseconds, of all requests but the last, while the last
/// one's prompt is prefilled.
fn stall(times: &Times) -> f64 {
    let (last, running) = times.split_last().unwrap();
    let pairs = running.iter().flat_map(|times| times.windows(2));
    let during = pairs.filter(|pair| pair[1] > 0.3 && pair[0] < last[0]);
    let mut gaps: Vec<f64> = during.map(|pair| (pair[1] - pair[0]) * 1e3).collect();
    gaps.sort_by(f64::total_cmp);
    gaps[((gaps.len() as f64 * 0.99).ceil() as usize).saturating_sub(1)]
}
