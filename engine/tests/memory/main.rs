//! What the planner reserves for a rank (`plan/src/memory_model.rs`), beside the most that MLX held in real engines
//! whose caches were filled to the last token they were planned for. Sizes come from the headers, read as
//! agents read them. The large models run in `cargo xtask proof memory`, not in every test run: they take
//! minutes, and gigabytes.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "../support/adapter.rs"]
mod adapter;
mod embeddings;
#[path = "../support/engines.rs"]
mod engines;
#[path = "../support/identities.rs"]
mod identities;
#[path = "../support/model.rs"]
mod model;
#[path = "../embeddings/random_models.rs"]
#[allow(dead_code, reason = "the models alone are of interest here")]
mod random_models;
#[path = "../support/random_weights.rs"]
mod random_weights;
#[path = "../support/share.rs"]
mod share;
mod weights;

use std::path::Path;
use std::time::Duration;

use futures::future::join_all;
use russet_agent::store::{Context, SourceSpec, Store};
use russet_crds::{EngineOptions, KvCacheType};
use russet_model::partition::Partition;
use russet_model::shape::ModelShape;
use russet_plan::memory_model::{
    DeployedAdapter, DraftModelShape, ENGINE_BASE_BYTES, MemoryEstimate, MemoryModel, ServingCapacity,
};
use russet_rpc::engine::GenerateRequest;
use russet_rpc::engine::engine_client::EngineClient;
use russet_wire::engine_config::{AdapterDir, Dtype};
use russet_wire::engine_options::Speculation;
use russet_wire::event::GenerationEvent;
use russet_wire::request::GenerationRequest;

use tempfile::TempDir;
use tonic::transport::Channel;

use engines::{EngineHarness, say};
use random_weights::Numbers;
use weights::Sizes;

/// Tokens that the template adds to a prompt.
const TEMPLATE_TOKENS: u32 = 4;
/// Output tokens. Sequences run in turn, so all prompts are prefilled before the first output ends, and all
/// KV caches are full at the same time.
const ANSWER: u32 = 3;
const MIB: u64 = 1 << 20;
/// A busy machine's CPU takes minutes for a prefill in 16 bits; the engine itself ends a step that hangs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3600);

/// One rank of one run.
struct RankMemory {
    /// For example `rank 1 of a pipeline of 2`.
    name: String,
    need: MemoryEstimate,
    /// Its part for the draft model's computation, which is seldom in use at the same time as the target
    /// model's.
    draft_workspace: u64,
    /// Peak memory of MLX.
    peak: u64,
    /// Peak memory of the process, if the system reports it.
    process: Option<u64>,
}

/// What runs beside a model.
#[derive(Clone, Copy, Default)]
struct Beside<'a> {
    draft: Option<&'a Path>,
    adapters: &'a [AdapterDir],
}

/// Calls the callback for every rank of `model`: a single rank, a pipeline of two, and a tensor group of two.
/// With a draft model on rank 0 and adapters, if any are given; of groups in whose names `only` is.
async fn measure(
    model: &Path,
    beside: Beside<'_>,
    sizes: &Sizes,
    room: ServingCapacity,
    only: &str,
    look: impl Fn(RankMemory),
) {
    let shape = shape_of(model).await;
    let draft_shape = match beside.draft {
        Some(draft) => Some(DraftModelShape { name: "draft".to_owned(), shape: shape_of(draft).await }),
        None => None,
    };
    let mut adapters = Vec::new();
    for AdapterDir { dir, .. } in beside.adapters {
        let shape = shape_of(dir).await.adapter.unwrap();
        adapters.push(DeployedAdapter { shape, ..DeployedAdapter::default() });
    }
    assert_eq!(shape.total_bytes(), sizes.bytes(), "headers and file disagree");
    let (all, half) = (shape.layers as usize, shape.layers as usize / 2);
    for (group, layers, members) in [
        ("one rank", vec![all], 1),
        ("a pipeline of 2", vec![all - half, half], 1),
        ("a tensor group of 2", vec![all], 2),
    ] {
        if !group.contains(only) {
            continue;
        }
        let peaks = fill(model, beside, &layers, members, room).await;
        let split = layers.iter().flat_map(|&count| vec![count as u32; members]).collect();
        let partition = Partition::with_tensor(split, members as u32, shape.layers).unwrap();
        let fit = MemoryModel::new(&shape, room).with_draft(draft_shape.as_ref()).with_adapters(&adapters);
        for (rank, (peak, process)) in peaks.into_iter().enumerate() {
            let need = fit.rank_estimate(&partition.part(rank as u32).unwrap());
            let workspace = fit.draft().filter(|_| rank == 0).map_or(0, |draft| draft.estimate.overhead);
            let name =
                if partition.size() == 1 { group.to_owned() } else { format!("rank {rank} of {group}") };
            look(RankMemory { name, need, draft_workspace: workspace, peak, process });
        }
    }
}

/// The model's shape, as the agent reports it.
async fn shape_of(model: &Path) -> ModelShape {
    // Already installed by another test of this process: the same provider.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let context = Context::new("http://127.0.0.1:1", vec![model.to_owned()]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().to_owned(), context).unwrap();
    let uri = format!("file://{}", model.display());
    let spec = SourceSpec { uri, revision: None, pinned: false, sha256: None, ..Default::default() };
    store.headers(&spec).await.unwrap().shape
}

/// Peaks of MLX and of the process, by rank, once every admitted sequence had its maximum length.
async fn fill(
    model: &Path,
    Beside { draft, adapters }: Beside<'_>,
    layers: &[usize],
    members: usize,
    room: ServingCapacity,
) -> Vec<(u64, Option<u64>)> {
    let mut lab = EngineHarness::new();
    lab.config.dtype = Dtype::Auto; // as agents start them
    lab.config.context_tokens = room.context_tokens;
    lab.config.kv_tokens = room.kv_tokens;
    lab.config.options.kv_cache = room.engine.kv_cache;
    // These engines have no agent, and random weights produce no readable text.
    (lab.config.orphan_seconds, lab.config.smoke_prompt) = (3600, false);
    if let Some(draft) = draft {
        // Without prompt lookup, so that the draft model runs in any case.
        lab.config.options.speculation = Speculation::Off;
        lab.config.draft_dir = Some(draft.to_owned());
    }
    lab.config.adapters = adapters.to_vec();
    let engines = lab.start_stages(model, layers, members);
    let client = lab.client(&engines[0]).await;
    let question = "a".repeat((room.context_tokens - TEMPLATE_TOKENS - ANSWER) as usize);
    // One after the other, the model itself behind them.
    let names = || adapters.iter().map(|adapter| adapter.name.clone()).chain([String::new()]).cycle();
    let answers = join_all(names().take(room.max_sequences as usize).map(|adapter| async {
        let request = GenerationRequest { max_tokens: Some(ANSWER), ignore_eos: true, ..say(&question) };
        let request = GenerationRequest { adapter, ..request };
        end_of(client.clone(), request).await
    }));
    for end in tokio::time::timeout(ANSWER_TIMEOUT, answers).await.unwrap() {
        let GenerationEvent::Finished { usage, .. } = end else { panic!("{end:?} in place of an answer") };
        assert_eq!(usage.prompt_tokens + usage.completion_tokens, room.context_tokens);
    }
    let mut peaks = Vec::new();
    for engine in &engines {
        peaks.push((engine.until(|_| true).await.peak_memory_bytes, engine.process_peak()));
    }
    peaks
}

/// The end of a response.
async fn end_of(mut client: EngineClient<Channel>, request: GenerationRequest) -> GenerationEvent {
    let mut events = client.generate(GenerateRequest::from(request)).await.unwrap().into_inner();
    let mut last = None;
    while let Some(event) = events.message().await.unwrap() {
        last = Some(GenerationEvent::from(event));
    }
    last.unwrap()
}

/// Small enough for every test run. The planner's reserve for the program itself would hide all else here, so
/// it is excluded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_never_take_more_than_was_planned() {
    // As many as fit at once, and with a smaller budget one that waits for another.
    let mut cases = Vec::new();
    for kv_cache in [KvCacheType::AsComputed, KvCacheType::Int8, KvCacheType::Int4] {
        cases.extend([None, Some(1500)].map(|kv_tokens| (kv_tokens, kv_cache)));
    }
    for (kv_tokens, kv_cache) in share::of_this_run(cases, 2) {
        small_model_takes_no_more(SMALL, capacity(kv_tokens, kv_cache), Beside::default(), 16 * MIB).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_with_a_draft_model_never_take_more_than_was_planned() {
    for kv_tokens in share::of_this_run(vec![Some(1500), None], 2) {
        let draft = weights::write(&Sizes { layers: 2, hidden: 64, tied: true, ..SMALL });
        let beside = Beside { draft: Some(draft.path()), ..Beside::default() };
        small_model_takes_no_more(SMALL, capacity(kv_tokens, KvCacheType::Int8), beside, 16 * MIB).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_with_adapters_never_take_more_than_was_planned() {
    let modules = [
        ("self_attn.q_proj", 128, 256, None),
        ("self_attn.v_proj", 128, 128, None),
        ("mlp.up_proj", 128, 512, None),
        ("mlp.gate_proj", 128, 512, None),
        ("mlp.down_proj", 512, 128, None),
    ];
    let (lora, dora) = (adapter::adapter("lora", 1, &modules), adapter::adapter("dora", 2, &modules));
    let dir = |(name, dir): (&str, &TempDir)| AdapterDir { name: name.into(), dir: dir.path().to_owned() };
    let adapters = [("lora", &lora), ("dora", &dora)].map(dir);
    let beside = Beside { adapters: &adapters, ..Beside::default() };
    small_model_takes_no_more(SMALL, capacity(None, KvCacheType::AsComputed), beside, 16 * MIB).await;
}

/// Models that embed keep nothing of a text, and compute it at once however long it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_that_embed_never_take_more_than_was_planned() {
    for (model, context_tokens) in embeddings::models() {
        let shape = shape_of(model.dir.path()).await;
        let room = ServingCapacity { context_tokens, ..capacity(None, KvCacheType::AsComputed) };
        let peak = embeddings::peak(&model, shape.layers as usize, context_tokens).await;
        let need = MemoryModel::new(&shape, room).whole_model();
        let planned = need.total() - ENGINE_BASE_BYTES;
        assert!(need.kv == 0, "{need:?}");
        assert!(
            peak <= planned,
            "{peak} bytes at the most, {planned} planned: {need:?}, {context_tokens} tokens"
        );
        // An encoder has no gate, and room for one is reserved.
        let bound = peak + peak / 10 + 32 * MIB;
        assert!(planned <= bound, "{planned} bytes planned for {peak} at the most: {need:?}");
    }
}

fn capacity(kv_tokens: Option<u64>, kv_cache: KvCacheType) -> ServingCapacity {
    let engine = EngineOptions { kv_cache, ..EngineOptions::default() };
    ServingCapacity { context_tokens: 700, max_sequences: 3, kv_tokens, headroom_percent: 0, engine }
}

/// Layers of every other kind: experts, a latent, windows, states.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_of_every_family_never_take_more_than_was_planned() {
    let kinds = vec![
        Sizes { model_type: "qwen3_moe", own: weights::EXPERTS, ..SMALL },
        Sizes { model_type: "deepseek_v3", own: weights::LATENT, ..SMALL },
        Sizes { model_type: "gpt_oss", own: weights::WINDOWS, ..SMALL },
        Sizes { model_type: "qwen3_next", own: weights::DELTA_NETS, ..SMALL },
        Sizes { model_type: "lfm2", hidden: 512, own: weights::SHORT_CONVS, ..SMALL },
        Sizes { model_type: "nemotron_h", own: weights::STATE_SPACES, ..SMALL },
    ];
    for sizes in share::of_this_run(kinds, 2) {
        // What is computed in layers of different kinds is reserved as if one layer had the widest of all.
        small_model_takes_no_more(
            sizes,
            capacity(None, KvCacheType::AsComputed),
            Beside::default(),
            32 * MIB,
        )
        .await;
    }
}

const SMALL: Sizes = Sizes {
    model_type: "llama",
    numbers: Numbers::F32,
    hidden: 128,
    intermediate: 512,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    layers: 4,
    vocabulary: 4000,
    tied: false,
    own: "{}",
};

/// That what is planned is no less than the peak, and at most a tenth and `slack` bytes more.
async fn small_model_takes_no_more(sizes: Sizes, room: ServingCapacity, beside: Beside<'_>, slack: u64) {
    let model = weights::write(&sizes);
    measure(
        model.path(),
        beside,
        &sizes,
        room,
        "",
        |RankMemory { name, need, draft_workspace, peak, .. }| {
            let planned = need.total() - ENGINE_BASE_BYTES;
            assert!(
                peak <= planned,
                "{name}: {peak} bytes at the most, {planned} planned: {need:?}, {room:?}"
            );
            let bound = peak + peak / 10 + slack + draft_workspace;
            assert!(
                planned <= bound,
                "{name}: {planned} bytes planned for {peak} at the most: {need:?}, {room:?}"
            );
        },
    )
    .await;
}

/// Prints a line of JSON per rank for `cargo xtask proof memory`, which judges them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes and gigabytes: cargo xtask proof memory"]
async fn large_models() {
    // The default of a deployment.
    let headroom_percent = 5;
    let only = std::env::var("RUSSET_ONLY").unwrap_or_default();
    for (what, sizes, context_tokens, max_sequences, kv_cache) in weights::LARGE {
        let engine = EngineOptions { kv_cache, ..EngineOptions::default() };
        let room =
            ServingCapacity { context_tokens, max_sequences, kv_tokens: None, headroom_percent, engine };
        let model = weights::write(&sizes);
        measure(
            model.path(),
            Beside::default(),
            &sizes,
            room,
            &only,
            |RankMemory { name, need, peak, process, .. }| {
                let MemoryEstimate { weights, kv, overhead } = need;
                let line = serde_json::json!({
                    "what": format!("{what}, {max_sequences} × {context_tokens} tokens, {name}"),
                    "weights": weights, "kv": kv, "overhead": overhead, "peak": peak, "process": process,
                });
                println!("\n{line}");
            },
        )
        .await;
    }
}
