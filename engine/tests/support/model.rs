//! A model folder for tests: a tokenizer with one token per byte and four marks, a template, and optionally
//! random weights of the Llama architecture. Used by the library's own tests and by those that start real
//! processes.

#![allow(dead_code, reason = "each of its users needs another part")]

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::{Map, json};
use tempfile::TempDir;

/// Token that begins a conversation.
pub const BEGIN: u32 = 256;
/// Token that begins a user's turn.
pub const USER: u32 = 257;
/// Token that begins the assistant's turn.
pub const ASSISTANT: u32 = 258;
/// Token that ends a turn.
pub const END: u32 = 259;

/// The token of one byte, in the order of byte-level tokenizers' own alphabet.
pub fn token_of_byte(byte: u8) -> u32 {
    u32::from(byte)
}

/// The printable character that stands for a byte in byte-level vocabularies: printable ASCII and
/// Latin-1 stand for themselves, the others are moved beyond.
fn character_of_byte(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let moved = (0..byte).filter(|&other| !printable(other)).count() as u32;
    char::from_u32(256 + moved).expect("at most 68 bytes are moved, all to Latin Extended-A")
}

/// A folder with all files that the serving half reads.
pub fn model_dir() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let vocabulary: Map<String, serde_json::Value> =
        (0..=255u8).map(|byte| (character_of_byte(byte).to_string(), json!(token_of_byte(byte)))).collect();
    let added: Vec<_> =
        [(BEGIN, "<|begin|>"), (USER, "<|user|>"), (ASSISTANT, "<|assistant|>"), (END, "<|end|>")]
            .into_iter()
            .map(|(id, content)| {
                json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                   "rstrip": false, "normalized": false, "special": true})
            })
            .collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                  "vocab": vocabulary, "merges": []},
    });
    let template = "<|begin|>{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('only user and assistant speak here') }}{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>";
    for (file, text) in [
        ("tokenizer.json", tokenizer.to_string()),
        ("tokenizer_config.json", json!({"bos_token": "<|begin|>", "eos_token": "<|end|>"}).to_string()),
        ("config.json", json!({"model_type": "llama", "eos_token_id": END}).to_string()),
        ("chat_template.jinja", template.to_owned()),
    ] {
        std::fs::write(dir.path().join(file), text).unwrap();
    }
    dir
}

/// Layers of the random model: enough for pipelines of two and three with uneven splits.
pub const LAYERS: usize = 4;

/// Sizes of a random model.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub layers: usize,
    /// Weights are random between `-spread` and `spread`.
    pub spread: f32,
}

/// The smallest useful shape.
pub const SMALL: Shape =
    Shape { hidden: 64, intermediate: 128, heads: 4, kv_heads: 2, layers: LAYERS, spread: 0.3 };

/// A folder with random weights too: nonsense, but the same nonsense on any number of ranks.
pub fn random_model_dir() -> TempDir {
    random_model(SMALL)
}

/// The same with these sizes.
pub fn random_model(shape: Shape) -> TempDir {
    random_model_of(shape, 260)
}

/// The same with a vocabulary of so many tokens.
pub fn random_model_of(shape: Shape, vocabulary: usize) -> TempDir {
    let Shape { hidden, intermediate, heads, kv_heads, layers, spread } = shape;
    let head = hidden / heads;
    let dir = model_dir();
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head, "vocab_size": vocabulary,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": false, "torch_dtype": "float32", "eos_token_id": END,
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();

    let mut tensors: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".into(), vec![vocabulary, hidden]),
        ("model.norm.weight".into(), vec![hidden]),
        ("lm_head.weight".into(), vec![vocabulary, hidden]),
    ];
    for layer in 0..layers {
        for (name, shape) in [
            ("self_attn.q_proj", vec![hidden, hidden]),
            ("self_attn.k_proj", vec![kv_heads * head, hidden]),
            ("self_attn.v_proj", vec![kv_heads * head, hidden]),
            ("self_attn.o_proj", vec![hidden, hidden]),
            ("mlp.gate_proj", vec![intermediate, hidden]),
            ("mlp.up_proj", vec![intermediate, hidden]),
            ("mlp.down_proj", vec![hidden, intermediate]),
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
        ] {
            tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    let mut random = StdRng::seed_from_u64(7);
    let mut header = Map::new();
    let mut data: Vec<u8> = Vec::new();
    for (name, shape) in tensors {
        let begin = data.len();
        let (low, high) = if shape.len() == 1 { (0.5, 1.5) } else { (-spread, spread) };
        for _ in 0..shape.iter().product::<usize>() {
            data.extend(random.random_range::<f32, _>(low..high).to_le_bytes());
        }
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]}));
    }
    let header = serde_json::Value::from(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.extend(data);
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    dir
}
