//! Adapters in real engines: sequences of several adapters and of the model itself run beside each other, on every split,
//! and each is answered as if it were alone; what one makes of a prefix is no other's.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/adapter.rs"]
mod adapter;
#[path = "support/engines.rs"]
mod engines;
#[path = "support/identities.rs"]
mod identities;
#[path = "support/model.rs"]
mod model;
#[path = "support/random_weights.rs"]
mod random_weights;

use std::path::Path;

use futures::future::join_all;
use russet_rpc::engine as pb;
use russet_wire::engine_config::AdapterDir;
use russet_wire::event::{FailureKind, GenerationEvent, Usage};
use russet_wire::request::GenerationRequest;
use serde_json::{Value, json};
use tempfile::TempDir;

use adapter::adapter;
use engines::{EngineHarness, TestEngine, ask, collect, say};
use random_weights::Numbers;

/// Tokens of an answer.
const TOKENS: u32 = 24;

fn config() -> Value {
    json!({
        "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 260,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": false, "eos_token_id": model::END, "num_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 48, "norm_topk_prob": true,
    })
}

/// One of everything, and one of some of it.
fn adapters() -> [(&'static str, TempDir); 2] {
    let attention = [
        ("self_attn.q_proj", 64, 64, None),
        ("self_attn.k_proj", 64, 32, None),
        ("self_attn.v_proj", 64, 32, None),
        ("self_attn.o_proj", 64, 64, None),
    ];
    let experts = [
        ("mlp.gate", 64, 8, None),
        ("mlp.switch_mlp.gate_proj", 64, 48, Some(8)),
        ("mlp.switch_mlp.up_proj", 64, 48, Some(8)),
        ("mlp.switch_mlp.down_proj", 48, 64, Some(8)),
    ];
    let all = [&attention[..], &experts[..]].concat();
    [("pirate", adapter("lora", 1, &all)), ("clerk", adapter("dora", 2, &attention[1..]))]
}

fn dirs(adapters: &[(&str, TempDir)]) -> Vec<AdapterDir> {
    let dir =
        |(name, dir): &(&str, TempDir)| AdapterDir { name: (*name).to_owned(), dir: dir.path().to_owned() };
    adapters.iter().map(dir).collect()
}

/// Questions of a position, and of more than a block of the prefix cache, to each adapter and to the model itself.
fn questions() -> Vec<GenerationRequest> {
    let long: String = (0..40).map(|number| format!("{number} and ")).collect();
    let of = |text: &str, adapter: &str| GenerationRequest {
        adapter: adapter.to_owned(),
        ignore_eos: true,
        max_tokens: Some(TOKENS),
        ..say(text)
    };
    let names = ["", "pirate", "clerk"];
    [&long, "hi"].iter().flat_map(|text| names.map(|name| of(text, name))).collect()
}

async fn answer(lab: &EngineHarness, engine: &TestEngine, asked: GenerationRequest) -> (Vec<u32>, Usage) {
    let (ids, _, end) = collect(&mut ask(&mut lab.client(engine).await, asked).await).await;
    let GenerationEvent::Finished { usage, .. } = end else { panic!("{end:?}") };
    (ids, usage)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adapters_and_their_model_share_batches_and_no_prefix() {
    let model = random_weights::write(&config(), Numbers::F32, 0.3);
    let adapters = adapters();
    let without = EngineHarness::new();
    let plain = without.start(model.path(), &[model::LAYERS]);
    let mut lab = EngineHarness::new();
    lab.config.adapters = dirs(&adapters);
    lab.config.max_sequences = 6;
    let alone = lab.start(model.path(), &[model::LAYERS]);
    let mut expected = Vec::new();
    for asked in questions() {
        let (ids, usage) = answer(&lab, &alone[0], asked.clone()).await;
        assert_eq!(usage.cached_tokens, 0, "of {:?} nothing was asked before", asked.adapter);
        if asked.adapter.is_empty() {
            assert_eq!(answer(&without, &plain[0], asked).await.0, ids, "as without adapters");
        }
        assert!(!expected.contains(&ids), "two adapters give the same answer");
        expected.push(ids);
    }
    drop((plain, alone));
    for (layers, members) in [(&[model::LAYERS][..], 1), (&[1, 3], 1), (&[model::LAYERS], 2)] {
        let group = lab.start_stages(model.path(), layers, members);
        let split = format!("on {layers:?} by {members}");
        let together = join_all(questions().into_iter().map(|asked| answer(&lab, &group[0], asked))).await;
        for ((asked, ids), (found, _)) in questions().iter().zip(&expected).zip(&together) {
            assert_eq!(found, ids, "{split}: {:?} beside the others", asked.adapter);
        }
        for (asked, ids) in questions().into_iter().zip(&expected) {
            let cut = ids.len() / 2;
            let resumed = GenerationRequest { emitted: ids[..cut].to_vec(), ..asked };
            let (rest, usage) = answer(&lab, &group[0], resumed.clone()).await;
            assert_eq!(rest, ids[cut..], "{split}: {:?} cut after {cut}", resumed.adapter);
            assert!(usage.cached_tokens > 0, "{split}: its own prefix is there");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adapters_that_do_not_fit_are_refused_by_name() {
    let model = random_weights::write(&config(), Numbers::F32, 0.3);
    let wide = adapter("lora", 3, &[("self_attn.q_proj", 128, 64, None)]);
    let missing = adapter("lora", 3, &[("mlp.up_proj", 64, 96, None)]);
    let empty = tempfile::tempdir().unwrap();
    for (dir, expected) in [
        (wide.path(), "q_proj: the adapter is of a matrix [64, 128], and the model's is [64, 64]"),
        (missing.path(), "mlp.up_proj: its adapter cannot be used: the model has no such matrix"),
        (empty.path(), "adapter_config.json is missing"),
        (Path::new("/nowhere"), "adapter_config.json is missing"),
    ] {
        let mut lab = EngineHarness::new();
        lab.config.adapters = vec![AdapterDir { name: "sailor".to_owned(), dir: dir.to_owned() }];
        let engines = lab.start(model.path(), &[model::LAYERS]);
        let state = engines[0].until(|state| state.phase == pb::Phase::Failed as i32).await;
        let says = state.message.contains("adapter sailor: ") && state.message.contains(expected);
        assert!(says, "{}", state.message);
        assert_eq!(state.cause, pb::FailureCause::Model as i32, "it would be refused again");
    }
    let lab = EngineHarness::new();
    let engines = lab.start(model.path(), &[model::LAYERS]);
    let asked = GenerationRequest { adapter: "sailor".to_owned(), ..say("hi") };
    let (_, _, end) = collect(&mut ask(&mut lab.client(&engines[0]).await, asked).await).await;
    let GenerationEvent::Failed(failure) = end else { panic!("{end:?}") };
    assert_eq!(failure.kind, FailureKind::InvalidRequest);
    assert!(failure.message.contains("no adapter \"sailor\"; it has none"), "{}", failure.message);
}
