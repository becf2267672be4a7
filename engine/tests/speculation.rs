//! Speculative decoding in real engines: outputs, greedy and sampled, equal those without draft tokens, on
//! one rank and in groups, with prompt lookup and with draft models that are always accepted, or almost never. So do
//! those of recurrent layers, which go back to the beginning of a step.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "support/engines.rs"]
mod engines;
#[path = "support/identities.rs"]
mod identities;
#[path = "support/model.rs"]
mod model;
#[path = "support/random_weights.rs"]
mod random_weights;

use std::path::Path;

use russet_wire::conversation::Message;
use russet_wire::engine_options::Speculation;
use russet_wire::event::{FinishReason, GenerationEvent};
use russet_wire::request::{GenerationRequest, Sampling};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use engines::{EngineHarness, ask, collect, say};
use model::Shape;
use random_weights::Numbers;

/// Tokens of each output.
const TOKENS: u32 = 48;

/// Prompts whose outputs do not repeat them, sent together.
fn questions() -> Vec<GenerationRequest> {
    let sampled = Sampling { temperature: 0.7, top_p: 0.9, seed: Some(5), ..Sampling::default() };
    let text: String = (0..60).map(|number| format!("{number} and ")).collect();
    let questions =
        [say("hello"), say(&text), GenerationRequest { sampling: sampled, ..say("what is 17 + 25?") }];
    questions
        .map(|question| GenerationRequest { max_tokens: Some(TOKENS), ignore_eos: true, ..question })
        .into()
}

/// A conversation whose output repeats earlier text, greedy and sampled.
fn repetitions() -> Vec<GenerationRequest> {
    let turn = |role: &str, content: &str| Message::new(role, content);
    let question = "What is 17 + 25? Think step by step.";
    let answer = "7 + 5 = 12, 1 + 2 + 1 = 4, so 17 + 25 = 42.";
    let messages = vec![turn("user", question), turn("assistant", answer), turn("user", question)];
    let sampled = Sampling { temperature: 0.3, seed: Some(5), ..Sampling::default() };
    let greedy = GenerationRequest { messages, max_tokens: Some(TOKENS), ignore_eos: true, ..say("") };
    vec![greedy.clone(), GenerationRequest { sampling: sampled, ..greedy }]
}

/// The outputs of a group with this proposer, and the numbers of draft tokens and of accepted ones.
async fn answers(
    model: &Path,
    (layers, members): (&[usize], usize),
    (speculation, draft): (Speculation, Option<&Path>),
    questions: Vec<GenerationRequest>,
) -> (Vec<Vec<u32>>, [u64; 2]) {
    let mut lab = EngineHarness::new();
    lab.config.options.speculation = speculation;
    lab.config.draft_dir = draft.map(Path::to_path_buf);
    let mut engines = lab.start_stages(model, layers, members);
    let mut client = lab.client(&engines[0]).await;
    let mut streams = Vec::new();
    for question in questions {
        streams.push(ask(&mut client, question).await);
    }
    let mut answers = Vec::new();
    for mut events in streams {
        let (ids, _, end) = collect(&mut events).await;
        assert!(matches!(end, GenerationEvent::Finished { reason: FinishReason::Length, .. }), "{end:?}");
        assert_eq!(ids.len(), TOKENS as usize);
        answers.push(ids);
    }
    let address = engines[0].until(|state| !state.metrics_address.is_empty()).await.metrics_address;
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let source = if draft.is_some() { "source=\"draft\"" } else { "source=\"lookup\"" };
    let count = |name: &str| -> u64 {
        let name = format!("vllm:spec_decode_num_{name}_total");
        let lines = text.lines().filter(|line| line.starts_with(&name) && line.contains(source));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
    };
    let counts = [count("draft_tokens"), count("accepted_tokens")];
    for engine in engines.iter().rev() {
        engine.signal(Signal::KILL);
    }
    for engine in &mut engines {
        engine.exit().await;
    }
    (answers, counts)
}

/// Splits of a model of four layers.
const SPLITS: [(&[usize], usize); 3] = [(&[4], 1), (&[1, 3], 1), (&[4], 2)];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_lookup_changes_no_answer() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("smoke/model");
    for split in SPLITS {
        let (expected, [drafted, _]) = answers(&model, split, (Speculation::Off, None), repetitions()).await;
        assert_eq!(drafted, 0);
        let (answered, [drafted, accepted]) =
            answers(&model, split, (Speculation::PromptLookup, None), repetitions()).await;
        assert_eq!(answered, expected, "over {split:?}");
        println!("over {split:?} {accepted} of {drafted} draft tokens were accepted");
        // How many draft tokens pay depends on the machine.
        assert!(accepted > 0, "{accepted} of {drafted} draft tokens were accepted over {split:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draft_models_change_no_answer() {
    let (model, other) =
        (model::random_model_dir(), model::random_model(Shape { layers: 1, ..model::SMALL }));
    for split in SPLITS {
        let (expected, [drafted, _]) =
            answers(model.path(), split, (Speculation::Off, None), questions()).await;
        assert_eq!(drafted, 0);
        for (who, draft, enough) in [("itself", &model, 0.9), ("another", &other, 0.0)] {
            let (answered, [drafted, accepted]) =
                answers(model.path(), split, (Speculation::Off, Some(draft.path())), questions()).await;
            assert_eq!(answered, expected, "drafted by {who}, over {split:?}");
            println!("over {split:?} {accepted} of {drafted} draft tokens of {who} were accepted");
            assert!(
                drafted > 0 && accepted as f64 >= enough * drafted as f64,
                "{accepted} of {drafted} of {who}"
            );
        }
    }
}

/// A small model with delta nets, one with short convolutions and one with state spaces, each beside attention.
fn recurrent_models() -> [(&'static str, TempDir); 3] {
    let of = |model_type: &'static str, own: Value| {
        let mut config = json!({
            "model_type": model_type, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 260,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": false, "eos_token_id": model::END,
        });
        config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        (model_type, random_weights::write(&config, Numbers::F32, 0.1))
    };
    [
        of(
            "qwen3_next",
            json!({"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
                   "linear_value_head_dim": 16, "full_attention_interval": 2}),
        ),
        of("lfm2", json!({"conv_L_cache": 3, "full_attn_idxs": [1, 3], "block_dim": 64, "block_ff_dim": 96})),
        of(
            "nemotron_h",
            json!({"hybrid_override_pattern": "M*M-", "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
                   "ssm_state_size": 16, "conv_kernel": 4, "use_conv_bias": true}),
        ),
    ]
}

/// The same model with other numbers in its file, a little: it often chooses the same tokens.
fn disturbed(model: &Path) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(model).unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let begin = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for (index, number) in bytes[begin..].chunks_exact_mut(4).enumerate() {
        let value = f32::from_le_bytes(number.try_into().unwrap());
        let factor = if index * index % 7 > 3 { 1.01 } else { 0.99 };
        number.copy_from_slice(&(value * factor).to_le_bytes());
    }
    std::fs::write(path, bytes).unwrap();
    dir
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_of_recurrent_layers_are_taken_back_whole() {
    for ((kind, model), split) in recurrent_models().into_iter().zip(SPLITS) {
        let (model, other) = (model.path(), disturbed(model.path()));
        let asked = || [questions(), repetitions()].concat();
        let (expected, _) = answers(model, split, (Speculation::Off, None), asked()).await;
        for (speculation, draft) in
            [(Speculation::PromptLookup, None), (Speculation::Off, Some(other.path()))]
        {
            let (answered, [drafted, accepted]) = answers(model, split, (speculation, draft), asked()).await;
            println!("{kind} over {split:?}, {speculation:?}: {accepted} of {drafted} were accepted");
            assert_eq!(answered, expected, "{kind} over {split:?}, {speculation:?}");
            assert!(draft.is_none() || accepted > 0, "{kind} over {split:?}: none of {drafted} was accepted");
        }
    }
}
