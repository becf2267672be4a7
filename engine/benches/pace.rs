//! Benchmark: prefill and decode speed against mlx-lm on the same weights in the same run; and the gain of a
//! second rank with a core of its own, against its gain for mlx-lm's bare layers. Real processes, with a
//! client over mTLS like a gateway; tensor ranks connect through their tunnel. Prints one JSON object per
//! figure for `cargo xtask bench engine`, which sets `RUSSET_PYTHON` and its environment.

#![allow(clippy::unwrap_used, reason = "a bench fails as a whole")]

#[path = "../tests/support/engines.rs"]
mod engines;
#[path = "../tests/support/identities.rs"]
mod identities;
#[path = "../tests/support/model.rs"]
mod model;
#[path = "support/peer.rs"]
mod peer;
#[path = "support/speed.rs"]
mod speed;

use std::path::Path;

use russet_wire::engine_config::Transport;
use russet_wire::engine_options::Speculation;

use engines::EngineHarness;
use model::Shape;
use peer::{MlxLmProcess, median, tell};
use speed::{ask_peers, decode, measure, prefill};

/// About 100 million parameters, nearly all of them in the layers.
const MODEL: Shape =
    Shape { hidden: 768, intermediate: 2048, heads: 12, kv_heads: 12, layers: 14, spread: 0.03 };
/// Minimum ratio to mlx-lm's speed.
const MIN_MLX_LM_RATIO: f64 = 0.97;
/// Minimum ratio to the speed of bare layers: allowance for control stream, scheduler and sampling.
const MIN_BARE_RATIO: f64 = 0.95;
/// Minimum ratio to the speed-up of bare layers.
const MIN_SHARDED_RATIO: f64 = 0.9;
/// Odd, so that a median is one of them.
const ROUNDS: usize = 7;
/// Bytes of the short and of the long prompt; each byte is a token.
const QUESTIONS: [usize; 2] = [16, 1000];

fn main() {
    tokio::runtime::Runtime::new().unwrap().block_on(run());
}

async fn run() {
    let model = model::random_model(MODEL);
    let mut lab = EngineHarness::new();
    // These engines have no agent.
    lab.config.orphan_seconds = 3600;
    lab.config.prefix_cache = false;
    lab.config.options.speculation = Speculation::Off;
    against_mlx_lm(&lab, model.path()).await;
    for (transport, through) in
        [(Transport::Direct, "by plain TCP"), (Transport::Tunnel, "through the tunnel")]
    {
        lab.config.transport = transport;
        two_against_one(&lab, model.path(), through).await;
    }
}

/// One rank and mlx-lm in turn, both with all cores.
async fn against_mlx_lm(lab: &EngineHarness, model: &Path) {
    let engines = lab.start(model, &[MODEL.layers]);
    let mut client = lab.client(&engines[0]).await;
    let mut peers = [MlxLmProcess::start(model, None, None)];
    let (mut ours, mut theirs) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    let mut bare = Vec::new();
    for round in 0..=ROUNDS {
        for (index, question) in QUESTIONS.into_iter().enumerate() {
            let (tokens, pace) = measure(&mut client, question).await;
            let peer = ask_peers(&mut peers, "generate", tokens);
            // The first round is a warm-up.
            if round > 0 {
                ours[index].push(pace);
                theirs[index].push(peer);
            }
        }
        let layers = ask_peers(&mut peers, "layers", QUESTIONS[0] as u32);
        if round > 0 {
            bare.push(layers);
        }
    }
    tell("decode, one rank", "tokens/s", MIN_MLX_LM_RATIO, decode(&ours[0]), decode(&theirs[0]));
    tell(
        "decode over gRPC, beside the bare forward step",
        "tokens/s",
        MIN_BARE_RATIO,
        decode(&ours[0]),
        decode(&bare),
    );
    tell(
        "prefill of 1,000 tokens, one rank",
        "tokens/s",
        MIN_MLX_LM_RATIO,
        prefill(&ours[1], QUESTIONS[1]),
        prefill(&theirs[1], QUESTIONS[1]),
    );
}

/// Two tensor ranks with a core each against one rank with one core, and the same for bare layers, which use
/// plain TCP.
async fn two_against_one(lab: &EngineHarness, model: &Path, through: &str) {
    let one = lab.start_pinned(model, &[MODEL.layers], 1, 0);
    let two = lab.start_pinned(model, &[MODEL.layers], 2, 0);
    let mut clients = [lab.client(&one[0]).await, lab.client(&two[0]).await];
    let hosts = tempfile::NamedTempFile::new().unwrap();
    let addresses = engines::free_addresses(2);
    std::fs::write(hosts.path(), serde_json::json!([[addresses[0]], [addresses[1]]]).to_string()).unwrap();
    let mut bare = [
        vec![MlxLmProcess::start(model, Some(0), None)],
        (0..2).map(|rank| MlxLmProcess::start(model, Some(rank), Some(hosts.path()))).collect(),
    ];
    let (mut ours, mut theirs) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for round in 0..=ROUNDS {
        for ranks in 0..2 {
            let (tokens, pace) = measure(&mut clients[ranks], QUESTIONS[0]).await;
            let peer = ask_peers(&mut bare[ranks], "layers", tokens);
            if round > 0 {
                ours[ranks].push(pace.rate);
                theirs[ranks].push(peer.rate);
            }
        }
    }
    let gain = |rates: [Vec<f64>; 2]| {
        let [one, two] = rates.map(|rates| median(rates.into_iter()));
        two / one
    };
    let what = format!("decode, tensor 2 ranks of one core against 1, {through}");
    tell(&what, "×", MIN_SHARDED_RATIO, gain(ours), gain(theirs));
}
