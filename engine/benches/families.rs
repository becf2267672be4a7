//! Benchmark: a mixture of experts, a gated delta net and latent attention against mlx-lm on the same weights in the same
//! run, and how long weights take to load. Prints one JSON object per figure for `cargo xtask bench families`.

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
#[path = "../tests/support/random_weights.rs"]
mod random_weights;
#[path = "support/speed.rs"]
mod speed;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use russet_engine::{
    executor::Executor,
    runtime::{Runtime, RuntimeConfig},
};
use russet_rpc::engine::{Phase, engine_client::EngineClient};
use russet_wire::engine_options::Speculation;
use serde_json::{Value, json};
use tempfile::TempDir;
use tonic::transport::Channel;

use arrivals::{Arrival, beside, throughput};
use engines::EngineHarness;
use peer::{MlxLmProcess, median, tell};
use random_weights::Numbers;
use speed::{GenerationSpeed, ask_peers, decode, measure, prefill};

/// Odd, so that a median is one of them.
const ROUNDS: usize = 5;
/// Minimum ratio to mlx-lm's speed.
const MIN_RATIO: f64 = 0.97;
/// The same of eight answers at once.
const MIN_BATCH_RATIO: f64 = 1.1;
/// Bytes of a short, a long and a very long prompt; each byte is a token.
const SHORT: usize = 16;
const LONG: usize = 1000;
const CONTEXT: usize = 4000;

fn main() {
    tokio::runtime::Runtime::new().unwrap().block_on(run());
}

async fn run() {
    let mut lab = EngineHarness::new();
    lab.config.context_tokens = 8192;
    lab.config.max_sequences = 8;
    // These engines have no agent.
    lab.config.orphan_seconds = 3600;
    lab.config.prefix_cache = false;
    lab.config.options.speculation = Speculation::Off;

    let experts = Pair::start(&lab, &experts()).await;
    let mut experts = experts.compare("experts").await;
    let uniform = vec![Arrival { at: 0.0, prompt: 32, answer: 48 }; 8];
    let what = "experts, 8 equal requests at once, throughput";
    beside(what, "tokens/s", MIN_BATCH_RATIO, &experts.client, &mut experts.peers[0], &uniform, throughput)
        .await;
    drop(experts);
    drop(Pair::start(&lab, &delta_nets()).await.compare("gated delta nets").await);
    let mut latents = Pair::start(&lab, &latents()).await;
    let (ours, theirs) = latents.speeds(CONTEXT).await;
    tell("latents, decode after 4,000 tokens", "tokens/s", MIN_RATIO, decode(&ours), decode(&theirs));
    drop(latents);
    load(&lab).await;
}

fn with(model_type: &str, own: &Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "vocab_size": 260, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false, "eos_token_id": model::END,
    });
    config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    config
}

/// About 150 million parameters, of which a token passes 35.
fn experts() -> Value {
    let own = json!({
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
        "moe_intermediate_size": 352, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
    });
    with("qwen3_moe", &own)
}

/// About 80 million, three layers of four with a state.
fn delta_nets() -> Value {
    let own = json!({
        "hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "linear_num_value_heads": 16, "linear_num_key_heads": 8,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4, "num_experts": 0, "num_experts_per_tok": 0, "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 0, "mlp_only_layers": [], "moe_intermediate_size": 0,
        "norm_topk_prob": true, "partial_rotary_factor": 0.25,
    });
    with("qwen3_next", &own)
}

/// About 60 million, all layers dense.
fn latents() -> Value {
    let own = json!({
        "hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 10, "num_attention_heads": 12,
        "num_key_value_heads": 12, "kv_lora_rank": 256, "q_lora_rank": 384, "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64, "v_head_dim": 64, "first_k_dense_replace": 10, "moe_layer_freq": 1,
        "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": true, "routed_scaling_factor": 1.0,
        "rope_scaling": null, "attention_bias": false,
    });
    with("deepseek_v3", &own)
}

/// An engine and mlx-lm on one model, both with all cores.
struct Pair {
    client: EngineClient<Channel>,
    peers: [MlxLmProcess; 1],
    _engines: Vec<engines::TestEngine>,
    _model: TempDir,
}

impl Pair {
    async fn start(lab: &EngineHarness, config: &Value) -> Self {
        let model = random_weights::write(config, Numbers::F32, 0.03);
        let layers = config["num_hidden_layers"].as_u64().unwrap() as usize;
        let engines = lab.start(model.path(), &[layers]);
        let client = lab.client(&engines[0]).await;
        let peers = [MlxLmProcess::start(model.path(), None, None)];
        Self { client, peers, _engines: engines, _model: model }
    }

    /// Answers to prompts of this length, in turn, after a warm-up.
    async fn speeds(&mut self, bytes: usize) -> (Vec<GenerationSpeed>, Vec<GenerationSpeed>) {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let (tokens, own) = measure(&mut self.client, bytes).await;
            let other = ask_peers(&mut self.peers, "generate", tokens);
            if round > 0 {
                ours.push(own);
                theirs.push(other);
            }
        }
        (ours, theirs)
    }

    /// Decode and prefill.
    async fn compare(mut self, what: &str) -> Self {
        let (ours, theirs) = self.speeds(SHORT).await;
        tell(&format!("{what}, decode"), "tokens/s", MIN_RATIO, decode(&ours), decode(&theirs));
        let (ours, theirs) = self.speeds(LONG).await;
        let (ours, theirs) = (prefill(&ours, LONG), prefill(&theirs, LONG));
        tell(&format!("{what}, prefill of 1,000 tokens"), "tokens/s", MIN_RATIO, ours, theirs);
        self
    }
}

/// Weights read in a process that runs already, beside mlx-lm's; and from the start of an engine until its weights are in
/// memory and until it serves, beside the same of mlx-lm, which then answers as many tokens as the smoke prompt has.
async fn load(lab: &EngineHarness) {
    const LAYERS: usize = 10;
    /// Tokens of the smoke prompt, and of its answer.
    const SMOKE: &str = "9 4";
    let own = json!({
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": LAYERS, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 64,
    });
    let model = random_weights::write(&with("llama", &own), Numbers::F32, 0.03);
    let small = model::random_model_dir();
    let mut peer = MlxLmProcess::start(small.path(), None, None);
    let mut rounds = [const { Vec::new() }; 5];
    for round in 0..=ROUNDS {
        let reading = read(model.path()).await;
        let started = Instant::now();
        let engines = lab.start(model.path(), &[LAYERS]);
        engines[0].until(|state| state.phase() >= Phase::Loaded).await;
        let loaded = started.elapsed();
        engines[0].serving().await;
        let serving = started.elapsed();
        drop(engines);
        peer.ask(&format!("load {SMOKE} {}", model.path().display()));
        let answer = peer.answer();
        let theirs = answer.split_whitespace().map(|seconds| seconds.parse::<f64>().unwrap());
        let times = [reading, loaded, serving].map(|time| time.as_secs_f64()).into_iter().chain(theirs);
        // The first round brings the file into memory.
        if round > 0 {
            rounds.iter_mut().zip(times).for_each(|(rounds, time)| rounds.push(time * 1e3));
        }
    }
    let [reading, loaded, serving, load, answer] = rounds.map(|times| median(times.into_iter()));
    tell("2 GB loaded", "ms", 1.0, reading, load);
    tell("2 GB in memory after the start of an engine, beside loading alone", "ms", 0.0, loaded, load);
    tell("an engine with 2 GB serves, beside loading and four tokens", "ms", 1.0, serving, answer);
}

/// How long this process takes to have the weights of a folder in memory.
async fn read(folder: &Path) -> Duration {
    let started = Instant::now();
    let runtime = Runtime::start(RuntimeConfig::alone(folder.to_owned())).unwrap();
    runtime.load().await.unwrap().unwrap();
    started.elapsed()
}
