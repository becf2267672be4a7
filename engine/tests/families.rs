//! What real engines promise of a Llama holds for every kind of layer: experts, a latent, a window, recurrent states. An
//! answer that another group resumes goes on unchanged, a group that lost a rank answers as before, and what is in a slot
//! is used again where the conversation goes on.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/engines.rs"]
mod engines;
#[path = "support/identities.rs"]
mod identities;
#[path = "support/model.rs"]
mod model;
#[path = "support/random_weights.rs"]
mod random_weights;
#[path = "support/share.rs"]
mod share;

use std::path::Path;

use futures::future::join_all;
use russet_rpc::engine as pb;
use russet_wire::conversation::Message;
use russet_wire::engine_options::RouterBroadcast;
use russet_wire::event::{GenerationEvent, Usage};
use russet_wire::request::GenerationRequest;
use rustix::process::Signal;
use serde_json::{Value, json};

use engines::{EngineHarness, Formation, TestEngine, ask, collect, next, say, within};
use random_weights::Numbers;

/// Tokens of an answer.
const TOKENS: u32 = 24;

/// A small model of each kind, with every piece of it.
fn kinds() -> Vec<Value> {
    let of = |model_type: &str, own: Value| {
        let mut config = json!({
            "model_type": model_type, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 260,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
            "tie_word_embeddings": false, "eos_token_id": model::END,
        });
        config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        config
    };
    vec![
        of(
            "qwen3_moe",
            json!({"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": true}),
        ),
        of(
            "deepseek_v3",
            json!({"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 1,
                   "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "kv_lora_rank": 32, "q_lora_rank": 48,
                   "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}),
        ),
        of("gpt_oss", json!({"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 24})),
        of(
            "qwen3_next",
            json!({"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
                   "linear_value_head_dim": 16, "full_attention_interval": 2}),
        ),
        of(
            "lfm2_moe",
            json!({"conv_L_cache": 3, "full_attn_idxs": [1, 3], "num_dense_layers": 1, "num_experts": 8,
                   "num_experts_per_tok": 3, "moe_intermediate_size": 48}),
        ),
        // In the pipelines below, a rank has a layer that remembers nothing, and no other.
        of(
            "nemotron_h",
            json!({"hybrid_override_pattern": "M*ME", "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
                   "ssm_state_size": 16, "conv_kernel": 4, "use_conv_bias": true, "n_routed_experts": 8,
                   "num_experts_per_tok": 3, "moe_intermediate_size": 48, "moe_latent_size": 32}),
        ),
    ]
}

fn question(text: &str) -> GenerationRequest {
    GenerationRequest { ignore_eos: true, max_tokens: Some(TOKENS), ..say(text) }
}

async fn answer(lab: &EngineHarness, engine: &TestEngine, asked: GenerationRequest) -> (Vec<u32>, Usage) {
    let (ids, _, end) = collect(&mut ask(&mut lab.client(engine).await, asked).await).await;
    let GenerationEvent::Finished { usage, .. } = end else { panic!("{end:?}") };
    (ids, usage)
}

/// Questions shorter and longer than the window, and one of several pieces of a prompt.
fn questions() -> Vec<GenerationRequest> {
    let long: String = (0..120).map(|number| format!("{number} and ")).collect();
    vec![question("hi"), question("what is 17 + 25?"), question(&long)]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_layer_resumes_and_shares_what_it_has() {
    for config in share::of_this_run(kinds(), 6) {
        let kind = config["model_type"].as_str().unwrap().to_owned();
        let model = random_weights::write(&config, Numbers::F32, 0.3);
        let lab = EngineHarness::new();
        let alone = lab.start(model.path(), &[model::LAYERS]);
        let mut expected = Vec::new();
        for asked in questions() {
            expected.push(answer(&lab, &alone[0], asked).await.0);
        }
        // All at once, beside each other.
        let together = join_all(questions().into_iter().map(|asked| answer(&lab, &alone[0], asked))).await;
        let together: Vec<Vec<u32>> = together.into_iter().map(|(ids, _)| ids).collect();
        assert_eq!(together, expected, "{kind}: together");
        drop(alone);
        for (layers, members) in [(&[1, 3][..], 1), (&[model::LAYERS], 2)] {
            let group = lab.start_stages(model.path(), layers, members);
            for (asked, ids) in questions().into_iter().zip(&expected) {
                for cut in [1, 2, ids.len() / 2, ids.len() - 1] {
                    let resumed = GenerationRequest { emitted: ids[..cut].to_vec(), ..asked.clone() };
                    let (rest, _) = answer(&lab, &group[0], resumed).await;
                    assert_eq!(rest, ids[cut..], "{kind} on {layers:?} by {members}: cut after {cut}");
                }
            }
            // What the slot holds is the beginning of what is asked now.
            let asked = question("a question of its own");
            let (ids, before) = answer(&lab, &group[0], asked.clone()).await;
            let longer = GenerationRequest { max_tokens: Some(2 * TOKENS), emitted: ids.clone(), ..asked };
            let (_, usage) = answer(&lab, &group[0], longer).await;
            assert_eq!(usage.cached_tokens, before.prompt_tokens, "{kind} on {layers:?} by {members}");
        }
    }
}

/// A conversation whose history has another answer than the slot, as it is where thoughts are left out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_layer_goes_back_to_what_is_repeated() {
    let first: String = (0..60).map(|number| format!("{number} or ")).collect();
    let with = |said: &[&str]| {
        let roles = ["user", "assistant"].into_iter().cycle();
        let message = |(role, text): (&str, &&str)| Message::new(role, *text);
        let messages = roles.zip(said).map(message).collect();
        GenerationRequest { messages, ..question("") }
    };
    for config in share::of_this_run(kinds(), 6) {
        let kind = config["model_type"].as_str().unwrap().to_owned();
        let model = random_weights::write(&config, Numbers::F32, 0.3);
        let lab = EngineHarness::new();
        let turns =
            [with(&[&first]), with(&[&first, "seven", "why?"]), with(&[&first, "seven", "so", "ah", "?"])];
        let mut expected = Vec::new();
        for turn in &turns {
            let fresh = lab.start(model.path(), &[model::LAYERS]);
            expected.push(answer(&lab, &fresh[0], turn.clone()).await.0);
        }
        for (layers, members) in [(&[1, 3][..], 1), (&[model::LAYERS], 2)] {
            let group = lab.start_stages(model.path(), layers, members);
            let mut repeated = 0;
            for (turn, ids) in turns.iter().zip(&expected) {
                let (answered, usage) = answer(&lab, &group[0], turn.clone()).await;
                assert_eq!(&answered, ids, "{kind} on {layers:?} by {members}");
                // All of the prompt before but its end; an answer may begin like the one that is said to be it.
                assert!(
                    usage.cached_tokens + 64 > repeated && usage.cached_tokens < usage.prompt_tokens,
                    "{kind} on {layers:?} by {members}: {} of {repeated} tokens were there",
                    usage.cached_tokens
                );
                repeated = usage.prompt_tokens;
            }
        }
    }
}

/// Conversations of an agent: all begin with its system prompt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_layer_shares_how_conversations_begin() {
    let system: String = (0..150).map(|number| format!("{number} and ")).collect();
    let asked = |own: &str| question(&format!("{system}{own}"));
    for config in share::of_this_run(kinds(), 6) {
        let kind = config["model_type"].as_str().unwrap().to_owned();
        let model = random_weights::write(&config, Numbers::F32, 0.3);
        let mut lab = EngineHarness::new();
        lab.config.max_sequences = 4;
        let owns = ["first", "2nd", "the third", "and a fourth", "fifth"];
        let mut expected = Vec::new();
        for own in owns {
            let fresh = lab.start(model.path(), &[model::LAYERS]);
            expected.push(answer(&lab, &fresh[0], asked(own)).await.0);
        }
        for (layers, members) in [(&[1, 3][..], 1), (&[model::LAYERS], 2)] {
            let group = lab.start_stages(model.path(), layers, members);
            let mut shared = Vec::new();
            for (own, ids) in owns.into_iter().zip(&expected) {
                let (answered, usage) = answer(&lab, &group[0], asked(own)).await;
                assert_eq!(&answered, ids, "{kind} on {layers:?} by {members}: {own}");
                shared.push(usage.cached_tokens);
            }
            // Blocks are there for the second conversation, copies of a slot for the third: whole blocks of 64 tokens.
            let least = system.len() as u32 - 64;
            assert!(shared[2..].iter().all(|tokens| *tokens > least), "{kind} on {layers:?}: {shared:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_layer_answers_after_a_lost_rank() {
    for config in share::of_this_run(kinds(), 6) {
        let kind = config["model_type"].as_str().unwrap().to_owned();
        let model = random_weights::write(&config, Numbers::F32, 0.3);
        let lab = EngineHarness::new();
        let mut formation = Formation::first(&[1, 3], 1);
        let mut rank0 = lab.begin(model.path(), &formation, 0);
        let rank1 = lab.begin(model.path(), &formation, 1);
        let asked = || question("what is 17 + 25?");
        let (expected, _) = answer(&lab, &rank0, asked()).await;
        let mut watch = rank0.watch().await;
        let endless = GenerationRequest { max_tokens: Some(2000), ..asked() };
        let mut events = ask(&mut lab.client(&rank0).await, endless).await;
        while !matches!(next(&mut events).await, Some(GenerationEvent::Token { .. })) {}
        rank1.signal(Signal::KILL);
        let left = within("a rank that has left its group", async {
            while let Some(state) = watch.message().await.unwrap() {
                if state.phase() == pb::Phase::Failed && state.reuse() != pb::Reuse::Pending {
                    return state.reuse();
                }
            }
            pb::Reuse::No
        });
        assert_eq!(left.await, pb::Reuse::Yes, "{kind}");
        formation = formation.next();
        lab.form(&mut rank0, model.path(), &formation, 0).await.unwrap();
        let _rank1 = lab.begin(model.path(), &formation, 1);
        let epoch = formation.epoch;
        rank0.until(|state| state.epoch == epoch && state.phase() == pb::Phase::Serving).await;
        assert_eq!(answer(&lab, &rank0, asked()).await.0, expected, "{kind}");
    }
}

/// The same model whose routers choose otherwise: their numbers have the other sign.
fn with_other_routers(model: &Path) {
    let path = model.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let mut changed = 0;
    for (name, tensor) in header.as_object().unwrap() {
        if !name.ends_with(".gate.weight") && !name.ends_with(".router.weight") {
            continue;
        }
        let offset = |at: usize| 8 + length + tensor["data_offsets"][at].as_u64().unwrap() as usize;
        for number in bytes[offset(0)..offset(1)].chunks_exact_mut(4) {
            // The sign is the highest bit of a float32.
            number[3] ^= 0x80;
        }
        changed += 1;
    }
    assert!(changed > 0, "the model has no router");
    std::fs::write(path, bytes).unwrap();
}

/// What chips that round differently do to a tensor group, much enlarged: its second rank has other routers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_rank_chooses_experts_for_all() {
    let with_experts = kinds().into_iter().filter(|config| config["num_experts_per_tok"].is_number());
    for config in share::of_this_run(with_experts.collect(), 4) {
        let kind = config["model_type"].as_str().unwrap().to_owned();
        let [model, other] = [(); 2].map(|()| random_weights::write(&config, Numbers::F32, 0.3));
        with_other_routers(other.path());
        let mut lab = EngineHarness::new();
        let alone = lab.start(model.path(), &[model::LAYERS]);
        let mut expected = Vec::new();
        for asked in questions() {
            expected.push(answer(&lab, &alone[0], asked).await.0);
        }
        drop(alone);
        // The ranks of this test run on one chip.
        for (broadcast, is_equal) in [(RouterBroadcast::On, true), (RouterBroadcast::Auto, false)] {
            lab.config.options.router_broadcast = broadcast;
            let formation = Formation::first(&[model::LAYERS], 2);
            let group =
                [(0, &model), (1, &other)].map(|(rank, model)| lab.begin(model.path(), &formation, rank));
            let mut answers = Vec::new();
            for asked in questions() {
                answers.push(answer(&lab, &group[0], asked).await.0);
            }
            assert_eq!(answers == expected, is_equal, "{kind}, {broadcast:?}");
        }
    }
}
