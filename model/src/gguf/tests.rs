//! Whole models in GGUF: what is made of their metadata, and that the engine's reader takes it.

use serde_json::{Value, json};

use super::*;
use crate::{
    config::CONFIG,
    families,
    gguf::header::HeaderRead,
    shape::ModelShape,
    tokenizer_files::{TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, TokenizerFiles},
};

/// A file under construction.
#[derive(Clone, Default)]
pub(super) struct GgufFile {
    keys: u64,
    metadata: Vec<u8>,
    tensors: u64,
    table: Vec<u8>,
    data: Vec<u8>,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

impl GgufFile {
    pub fn new() -> Self {
        Self::default()
    }

    /// A small Llama with a byte-level tokenizer and a template.
    pub fn llama() -> Self {
        Self::model("llama", 64, 128, 8)
    }

    /// A model of one layer with matrices of a type.
    pub fn model(architecture: &str, hidden: u64, width: u64, kind: u32) -> Self {
        let key = |key: &str| format!("{architecture}.{key}");
        let tokens = ["a", "b", "ab", "<|im_start|>", "<|im_end|>", "<tool>"].map(str::to_owned);
        let types: Vec<u8> = [1_i32, 1, 1, 3, 3, 4].iter().flat_map(|kind| kind.to_le_bytes()).collect();
        let mut file = Self::new()
            .text("general.architecture", architecture)
            .text("general.name", "a name")
            .whole(&key("block_count"), 1)
            .whole(&key("context_length"), 128)
            .whole(&key("embedding_length"), hidden as u32)
            .whole(&key("feed_forward_length"), width.max(1) as u32)
            .whole(&key("attention.head_count"), 4)
            .whole(&key("attention.head_count_kv"), 2)
            .whole(&key("rope.dimension_count"), hidden as u32 / 4)
            .value(&key("attention.layer_norm_rms_epsilon"), 6, &1e-5_f32.to_le_bytes())
            .value(&key("rope.freq_base"), 6, &1e4_f32.to_le_bytes())
            .text("tokenizer.ggml.model", "gpt2")
            .text("tokenizer.ggml.pre", "smollm")
            .texts("tokenizer.ggml.tokens", &tokens)
            .value(
                "tokenizer.ggml.token_type",
                9,
                &[&5_u32.to_le_bytes()[..], &6_u64.to_le_bytes(), &types].concat(),
            )
            .texts("tokenizer.ggml.merges", &["a b".to_owned()])
            .whole("tokenizer.ggml.bos_token_id", 3)
            .whole("tokenizer.ggml.eos_token_id", 4)
            .text("tokenizer.chat_template", "{{ messages }}")
            .matrix("token_embd.weight", hidden, 6, kind)
            .vector("output_norm.weight", hidden);
        for (name, inputs, outputs) in [
            ("attn_q", hidden, hidden),
            ("attn_k", hidden, hidden / 2),
            ("attn_v", hidden, hidden / 2),
            ("attn_output", hidden, hidden),
            ("ffn_gate", hidden, width),
            ("ffn_up", hidden, width),
            ("ffn_down", width, hidden),
        ] {
            // A width of 0 leaves the MLP out.
            if inputs * outputs > 0 {
                file = file.matrix(&format!("blk.0.{name}.weight"), inputs, outputs, kind);
            }
        }
        file.vector("blk.0.attn_norm.weight", hidden).vector("blk.0.ffn_norm.weight", hidden)
    }

    pub fn matrix(self, name: &str, columns: u64, rows: u64, kind: u32) -> Self {
        let element = block_type::ElementType::of(kind).unwrap();
        let bytes = columns * rows / element.block_elements() * element.block_bytes();
        self.tensor(name, &[columns, rows], kind, vec![0; bytes as usize])
    }

    fn vector(self, name: &str, width: u64) -> Self {
        self.tensor(name, &[width], 0, vec![0; 4 * width as usize])
    }

    pub fn raw_key(mut self, bytes: &[u8]) -> Self {
        self.keys += 1;
        self.metadata.extend(bytes);
        self
    }

    pub fn value(self, key: &str, kind: u32, bytes: &[u8]) -> Self {
        self.raw_key(&[&text(key)[..], &kind.to_le_bytes(), bytes].concat())
    }

    pub fn whole(self, key: &str, number: u32) -> Self {
        self.value(key, 4, &number.to_le_bytes())
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.value(key, 8, &text(value))
    }

    pub fn texts(self, key: &str, texts: &[String]) -> Self {
        let list = [&8_u32.to_le_bytes()[..], &(texts.len() as u64).to_le_bytes()].concat();
        let texts = texts.iter().flat_map(|own| text(own));
        self.value(key, 9, &list.into_iter().chain(texts).collect::<Vec<u8>>())
    }

    /// A tensor with its data; sizes innermost first, as the file has them.
    pub fn tensor(mut self, name: &str, sizes: &[u64], kind: u32, data: Vec<u8>) -> Self {
        self.data.resize(self.data.len().next_multiple_of(32), 0);
        let begin = self.data.len() as u64;
        self.data.extend(data);
        self.tensor_at(name, sizes, kind, begin)
    }

    pub fn tensor_at(mut self, name: &str, sizes: &[u64], kind: u32, begin: u64) -> Self {
        self.tensors += 1;
        self.table.extend(text(name));
        self.table.extend((sizes.len() as u32).to_le_bytes());
        sizes.iter().for_each(|size| self.table.extend(size.to_le_bytes()));
        self.table.extend(kind.to_le_bytes());
        self.table.extend(begin.to_le_bytes());
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3_u32.to_le_bytes());
        file.extend(self.tensors.to_le_bytes());
        file.extend(self.keys.to_le_bytes());
        file.extend(&self.metadata);
        file.extend(&self.table);
        if !self.data.is_empty() {
            file.resize(file.len().next_multiple_of(32), 0);
        }
        file.extend(&self.data);
        file
    }
}

/// What is found in a file.
pub(super) fn with<T>(file: &GgufFile, then: impl FnOnce(&Gguf<'_>) -> Result<T, Error>) -> Result<T, Error> {
    let bytes = file.bytes();
    let HeaderRead::Whole(header) = HeaderRead::new("x.gguf", &bytes, bytes.len() as u64)? else {
        panic!("the whole file is not enough")
    };
    then(&Gguf::new(vec![("x.gguf".to_owned(), header)])?)
}

pub(super) fn config(file: &GgufFile) -> Value {
    serde_json::from_slice(&with(file, |gguf| gguf.configuration(None)).unwrap()).unwrap()
}

pub(super) fn rejection(file: &GgufFile) -> String {
    let read = with(file, |gguf| {
        gguf.configuration(None)?;
        gguf.weights(gguf.value_type(), None)?;
        gguf.tokenizer()
    });
    read.unwrap_err().to_string()
}

#[test]
fn model_in_gguf_is_a_model_like_any_other() {
    // Q4_0, Q4_1, Q8_0; Q6_K is packed anew. 64 rows of 128 columns take so many bytes of integers and scales.
    for (kind, packing, anew) in
        [(2, (32, 4), false), (3, (32, 4), false), (8, (32, 8), false), (14, (64, 8), true)]
    {
        let file = if kind == 14 {
            GgufFile::model("llama", 256, 512, kind)
        } else {
            GgufFile::model("llama", 64, 128, kind)
        };
        let (model, note) = with(&file, |gguf| {
            let weights = gguf.weights(gguf.value_type(), None)?;
            Ok((crate::read(&gguf.configuration(None)?, &weights.headers)?, gguf.note()))
        })
        .unwrap();
        let (down, stored) = model
            .tensors
            .iter()
            .find(|(tensor, _)| tensor.name == "model.layers.0.mlp.down_proj.weight")
            .unwrap();
        let (group_size, bits) = packing;
        let found = stored.packing.map(|packing| (packing.group_size, packing.bits));
        assert_eq!(found, Some(packing), "{kind}");
        let count = down.parameters();
        assert_eq!(stored.bytes, count * u64::from(bits) / 8 + count / u64::from(group_size) * 4);
        assert!(model.description.tied && model.value_bytes() == 2);
        assert_eq!(note.contains("% of it is packed anew in 8 bits"), anew, "{note}");
        let shape = ModelShape::of(&model);
        let group = format!("groups of {group_size} quantised MLP columns");
        assert!(shape.shard_units.iter().any(|unit| unit.unit == group), "{:?}", shape.shard_units);
    }
}

#[test]
fn metadata_becomes_the_configuration() {
    let found = config(&GgufFile::llama());
    for (field, expected) in [
        ("model_type", json!("llama")),
        ("num_hidden_layers", json!(1)),
        ("hidden_size", json!(64)),
        ("intermediate_size", json!(128)),
        ("num_attention_heads", json!(4)),
        ("num_key_value_heads", json!(2)),
        ("head_dim", json!(16)),
        ("vocab_size", json!(6)),
        ("max_position_embeddings", json!(128)),
        ("rope_theta", json!(1e4)),
        ("rope_traditional", json!(true)),
        ("tie_word_embeddings", json!(true)),
        ("attention_bias", json!(false)),
        ("eos_token_id", json!([4])),
    ] {
        assert_eq!(found[field], expected, "{field}");
    }
    assert_eq!(found["rms_norm_eps"].as_f64().unwrap() as f32, 1e-5);
    let window = config(&GgufFile::llama().whole("llama.attention.sliding_window", 64));
    assert_eq!((&window["model_type"], &window["sliding_window"]), (&json!("mistral"), &json!(64)));
    let linear = config(&GgufFile::llama().value("llama.rope.scale_linear", 6, &4_f32.to_le_bytes()));
    assert_eq!(linear["rope_scaling"], json!({"rope_type": "linear", "factor": 4.0}));
    let qwen = config(&GgufFile::model("qwen3", 64, 128, 8).whole("qwen3.attention.key_length", 16));
    assert_eq!((&qwen["model_type"], &qwen["rope_traditional"]), (&json!("qwen3"), &json!(false)));
    let experts = GgufFile::model("qwen3moe", 64, 128, 8)
        .whole("qwen3moe.expert_count", 8)
        .whole("qwen3moe.expert_used_count", 2)
        .whole("qwen3moe.expert_feed_forward_length", 32);
    let experts = config(&experts);
    assert_eq!((&experts["model_type"], &experts["num_experts"]), (&json!("qwen3_moe"), &json!(8)));
}

#[test]
fn families_that_are_known_run_from_gguf() {
    let qwen2 = ["q", "k", "v"].iter().fold(GgufFile::model("qwen2", 64, 128, 8), |file, name| {
        file.vector(&format!("blk.0.attn_{name}.bias"), if *name == "q" { 64 } else { 32 })
    });
    let heads = |file: GgufFile| {
        let named = file.vector("blk.0.attn_q_norm.weight", 16).vector("blk.0.attn_k_norm.weight", 16);
        named.matrix("output.weight", 64, 6, 8)
    };
    let qwen3 = heads(GgufFile::model("qwen3", 64, 128, 8).whole("qwen3.attention.key_length", 16));
    let experts = GgufFile::model("qwen3moe", 64, 0, 8)
        .whole("qwen3moe.attention.key_length", 16)
        .whole("qwen3moe.expert_count", 4)
        .whole("qwen3moe.expert_used_count", 2)
        .whole("qwen3moe.expert_feed_forward_length", 32)
        .tensor("blk.0.ffn_gate_inp.weight", &[64, 4], 0, vec![0; 4 * 64 * 4]);
    let experts = [("gate", 64, 32), ("up", 64, 32), ("down", 32, 64)].iter().fold(
        heads(experts),
        |file, (name, inputs, outputs)| {
            let bytes = 4 * inputs * outputs / 32 * 34;
            file.tensor(
                &format!("blk.0.ffn_{name}_exps.weight"),
                &[*inputs, *outputs, 4],
                8,
                vec![0; bytes as usize],
            )
        },
    );
    let gemma = GgufFile::model("gemma3", 64, 128, 8)
        .whole("gemma3.attention.key_length", 16)
        .whole("gemma3.attention.sliding_window", 32)
        .vector("blk.0.attn_q_norm.weight", 16)
        .vector("blk.0.attn_k_norm.weight", 16)
        .vector("blk.0.post_attention_norm.weight", 64)
        .vector("blk.0.post_ffw_norm.weight", 64);
    for (model_type, file) in
        [("qwen2", qwen2), ("qwen3", qwen3), ("qwen3_moe", experts), ("gemma3_text", gemma)]
    {
        let read = with(&file, |gguf| {
            let weights = gguf.weights(gguf.value_type(), None)?;
            crate::read(&gguf.configuration(None)?, &weights.headers)
        });
        match read {
            Ok(model) => assert_eq!(model.description.model_type, model_type),
            Err(error) => {
                let known = families::is_known(model_type);
                assert!(!known && error.to_string().contains("is not supported"), "{model_type}: {error}");
            }
        }
    }
}

#[test]
fn plain_files_are_computed_in_the_type_of_their_weights() {
    for (kind, expected) in
        [(0, ValueType::F32), (1, ValueType::F16), (30, ValueType::Bf16), (8, ValueType::Bf16)]
    {
        let value = with(&GgufFile::model("llama", 64, 128, kind), |gguf| Ok(gguf.value_type())).unwrap();
        assert_eq!(value, expected, "{kind}");
    }
}

#[test]
fn what_the_engine_cannot_be_sure_of_is_refused_by_name() {
    let llama = GgufFile::llama;
    for (file, said) in [
        (GgufFile::new(), "its metadata has no general.architecture"),
        (
            GgufFile::new().text("general.architecture", "mamba"),
            "\"mamba\" is not supported as GGUF; supported are llama",
        ),
        (GgufFile::new().text("general.architecture", "llama"), "llama.embedding_length is missing"),
        (llama().whole("split.count", 3), "it is one of 3 parts, and 1 are there"),
        (
            llama().whole("llama.expert_count", 8),
            "GGUF metadata llama.expert_count: this release does not know it",
        ),
        (llama().value("llama.logit_scale", 6, &0.5_f32.to_le_bytes()), "llama.logit_scale: this release"),
        (llama().whole("llama.attention.value_length", 8), "8 is not supported for heads of 16"),
        (llama().matrix("blk.0.ssm_in.weight", 64, 64, 8), "blk.0.ssm_in.weight: this release does not know"),
        (llama().matrix("output.weight", 256, 6, 34), "its type TQ1_0 is not read; read are F32"),
        (llama().vector("token_embd.weight", 6), "is there twice"),
        (GgufFile::model("llama", 64, 128, 8).text("llama.rope.scaling.type", "none"), ""),
    ] {
        if said.is_empty() {
            assert_eq!(config(&file).get("rope_scaling"), None);
            continue;
        }
        let error = rejection(&file);
        assert!(error.contains(said), "{said}: {error}");
    }
}

#[test]
fn tokenizers_that_are_not_known_are_refused_by_name() {
    let file = |keys: &[(&str, &str)]| {
        let start = GgufFile::new().text("general.architecture", "llama");
        keys.iter().fold(start, |file, (key, value)| file.text(key, value))
    };
    for (file, said) in [
        (file(&[]), "tokenizer.ggml.model: it is missing"),
        (
            file(&[("tokenizer.ggml.model", "bert")]),
            "\"bert\" is not supported; supported are gpt2, llama and gemma4",
        ),
        (
            file(&[("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "klingon")]),
            "\"klingon\" is not supported; supported are smollm",
        ),
        (file(&[("tokenizer.ggml.model", "gpt2")]), "its metadata has no tokenizer.ggml.tokens"),
        (
            file(&[("tokenizer.ggml.model", "gpt2")])
                .texts("tokenizer.ggml.tokens", &["a".to_owned()])
                .value(
                    "tokenizer.ggml.token_type",
                    9,
                    &[&5_u32.to_le_bytes()[..], &0_u64.to_le_bytes()].concat(),
                ),
            "it has 1 tokens and types of 0",
        ),
        (
            file(&[("tokenizer.ggml.model", "gpt2")])
                .texts("tokenizer.ggml.tokens", &["a".to_owned()])
                .texts("tokenizer.ggml.merges", &["ab".to_owned()]),
            "merge 0 is no pair of tokens",
        ),
        (
            file(&[("tokenizer.ggml.model", "gemma4")]).texts("tokenizer.ggml.tokens", &["a".to_owned()]),
            "its metadata has no tokenizer.ggml.merges",
        ),
        (
            file(&[("tokenizer.ggml.model", "llama")]).texts("tokenizer.ggml.tokens", &["a".to_owned()]),
            "it has 1 tokens and scores of 0",
        ),
    ] {
        let error = with(&file, |gguf| gguf.tokenizer()).unwrap_err().to_string();
        assert!(error.contains(said), "{said}: {error}");
    }
}

#[test]
fn byte_level_vocabulary_becomes_a_tokenizer() {
    let bytes = with(&GgufFile::llama(), |gguf| gguf.tokenizer()).unwrap();
    let tokenizer: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(tokenizer["model"]["vocab"]["ab"], 2);
    assert_eq!(tokenizer["model"]["merges"], json!([["a", "b"]]));
    let added: Vec<(u64, &str, bool)> = tokenizer["added_tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|token| {
            let (id, text) = (token["id"].as_u64().unwrap(), token["content"].as_str().unwrap());
            (id, text, token["special"].as_bool().unwrap())
        })
        .collect();
    assert_eq!(added, [(3, "<|im_start|>", true), (4, "<|im_end|>", true), (5, "<tool>", false)]);
    assert_eq!(tokenizer["pre_tokenizer"]["pretokenizers"][0]["type"], "Digits");
    let special: Value =
        serde_json::from_slice(&with(&GgufFile::llama(), |gguf| Ok(gguf.tokenizer_config())).unwrap())
            .unwrap();
    assert_eq!(special, json!({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}));
}

#[test]
fn pieces_with_scores_become_merges_in_their_order() {
    let tokens =
        ["<unk>", "<0x41>", "\u{2581}", "a", "b", "ab", "\u{2581}ab", "\u{2581}a"].map(str::to_owned);
    let types: Vec<u8> = [2_i32, 6, 1, 1, 1, 1, 1, 1].iter().flat_map(|kind| kind.to_le_bytes()).collect();
    let scores = [0.0_f32, 0.0, -4.0, -5.0, -6.0, -1.0, -3.0, -2.0];
    let scores: Vec<u8> = scores.iter().flat_map(|score| score.to_le_bytes()).collect();
    let list = |kind: u32, bytes: &[u8]| [&kind.to_le_bytes()[..], &8_u64.to_le_bytes(), bytes].concat();
    let file = GgufFile::new()
        .text("general.architecture", "llama")
        .text("tokenizer.ggml.model", "llama")
        .texts("tokenizer.ggml.tokens", &tokens)
        .value("tokenizer.ggml.token_type", 9, &list(5, &types))
        .value("tokenizer.ggml.scores", 9, &list(6, &scores));
    let tokenizer: Value = serde_json::from_slice(&with(&file, |gguf| gguf.tokenizer()).unwrap()).unwrap();
    let space = "\u{2581}";
    let pair = |left: &str, right: &str| json!([left, right]);
    let spaced = format!("{space}a");
    assert_eq!(
        tokenizer["model"]["merges"],
        json!([pair("a", "b"), pair(space, "a"), pair(space, "ab"), pair(&spaced, "b")])
    );
    assert_eq!(tokenizer["model"]["unk_token"], "<unk>");
    assert_eq!(tokenizer["model"]["byte_fallback"], true);
    assert_eq!(tokenizer["normalizer"]["normalizers"][0]["prepend"], space);
}

#[test]
fn missing_files_beside_gguf_are_made_and_judged() {
    let judged = |file: &GgufFile, names: &[&str]| {
        with(file, |gguf| {
            let mut files = TokenizerFiles {
                names: names.iter().map(|name| (*name).to_owned()).collect(),
                config: gguf.configuration(None)?,
                judged: Vec::new(),
            };
            gguf.complete(&mut files)?;
            files.check_tokenizer()?;
            files.check_chat()?;
            Ok(files.names)
        })
    };
    assert_eq!(judged(&GgufFile::llama(), &["x.gguf"]).unwrap(), ["x.gguf", TOKENIZER, TEMPLATE]);
    let own = [TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, CONFIG];
    assert_eq!(judged(&GgufFile::llama(), &own).unwrap(), own);
}
