//! Small random models as Transformers writes them, with what is asked of each. Their numbers are made by a rule of a few
//! lines, since they must be the same for as long as the goldens are.

use std::path::Path;

use russet_engine::executor::PooledText;
use russet_model::config::{Config, Document};
use russet_model::families;
use russet_model::safetensors::Headers;
use russet_model::tensors::table;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::model::model_dir;

/// A case of the goldens.
pub struct Case {
    pub name: &'static str,
    pub make: fn() -> RandomModel,
}

/// A model's folder, texts, and how the reference is asked for the same.
pub struct RandomModel {
    pub dir: TempDir,
    pub texts: Vec<PooledText>,
    pub request: Value,
}

pub const CASES: &[Case] = &[
    Case { name: "bert", make: bert },
    Case { name: "bert cross-encoder", make: bert_cross_encoder },
    Case { name: "xlm-roberta", make: xlm_roberta },
    Case { name: "roberta cross-encoder", make: roberta_cross_encoder },
    Case { name: "qwen3", make: qwen3 },
    Case { name: "embedding gemma", make: gemma },
];

const VOCABULARY: u32 = 260;
const NORMALIZE: &str = "Normalize";

/// Numbers between -1 and 1, by SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn number(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Texts of every length that makes a difference: some equal, one alone, and some beyond a window.
fn texts(segments: bool) -> Vec<PooledText> {
    let mut random = Random(5);
    let text = |length: u32| {
        let tokens: Vec<u32> = (0..length).map(|_| 3 + (random.next() % 250) as u32).collect();
        let token_types = (0..length).map(|place| u32::from(segments && place > length / 3)).collect();
        PooledText { tokens, token_types }
    };
    [7, 1, 19, 7, 2, 33, 1, 12].into_iter().map(text).collect()
}

/// Writes tensors in 32 bits.
fn write_safetensors(path: &Path, tensors: &[(String, Vec<u64>)], random: &mut Random) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, shape) in tensors {
        let begin = data.len();
        let columns = *shape.last().unwrap() as f32;
        for _ in 0..shape.iter().product::<u64>() {
            let number = random.number();
            let is_norm = name.to_ascii_lowercase().contains("norm");
            let value = match (is_norm && name.ends_with("weight"), shape.len()) {
                (true, _) => 0.8 + 0.4 * number,
                (false, 1) => 0.2 * number,
                // As wide as a trained one's, so that what a layer adds is neither nothing nor all.
                (false, _) if name.contains("embed") => number,
                (false, _) => number * 2.0 / columns.sqrt(),
            };
            data.extend(value.to_le_bytes());
        }
        header.insert(
            name.clone(),
            json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]}),
        );
    }
    let header = Value::from(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.extend(data);
    std::fs::write(path, file).unwrap();
}

/// A model of this configuration in files that have a tensor of these names, by which its layout is known.
fn model(config: &Value, layout: &[&str], has_head: bool, modules: &[(&str, Value)]) -> TempDir {
    let dir = model_dir();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let mut document = Document::parse(config.to_string().as_bytes()).unwrap();
    let family = families::family(&document).unwrap();
    document.set_defaults(family.defaults);
    let description = (family.describe)(&Config::read(&document).unwrap(), has_head).unwrap();
    let marks: Map<String, Value> = layout
        .iter()
        .map(|name| ((*name).to_owned(), json!({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})))
        .collect();
    let marks = Value::from(marks).to_string();
    let mut headers = Headers::default();
    headers.add("model.safetensors", marks.as_bytes(), 8 + marks.len() as u64).unwrap();
    let tensors: Vec<(String, Vec<u64>)> = table(&description, &headers, None)
        .into_iter()
        .filter(|tensor| tensor.name != "lm_head.weight")
        .map(|tensor| (tensor.sources[0].clone(), tensor.source_shape()))
        .collect();
    let mut random = Random(1);
    write_safetensors(&dir.path().join("model.safetensors"), &tensors, &mut random);
    if modules.is_empty() {
        return dir;
    }
    let mut list = vec![json!({"path": "", "type": "sentence_transformers.models.Transformer"})];
    for (index, (kind, config)) in (1..).zip(modules) {
        let path = format!("{index}_{kind}");
        list.push(json!({"path": path, "type": format!("sentence_transformers.models.{kind}")}));
        let folder = dir.path().join(path);
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        if let (Some(inputs), Some(outputs)) =
            (config["in_features"].as_u64(), config["out_features"].as_u64())
        {
            let mut tensors = vec![("linear.weight".to_owned(), vec![outputs, inputs])];
            if config["bias"] == true {
                tensors.push(("linear.bias".to_owned(), vec![outputs]));
            }
            write_safetensors(&folder.join("model.safetensors"), &tensors, &mut random);
        }
    }
    std::fs::write(dir.path().join("modules.json"), json!(list).to_string()).unwrap();
    dir
}

fn pooling(mode: &str) -> (&'static str, Value) {
    ("Pooling", json!({"word_embedding_dimension": 48, "pooling_mode": mode}))
}

fn asked(dir: TempDir, texts: Vec<PooledText>) -> RandomModel {
    let ids: Vec<&[u32]> = texts.iter().map(|text| text.tokens.as_slice()).collect();
    let types: Vec<&[u32]> = texts.iter().map(|text| text.token_types.as_slice()).collect();
    let request = json!({"ids": ids, "token_types": types});
    RandomModel { dir, texts, request }
}

fn encoder(own: Value) -> Value {
    let mut config = json!({
        "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80,
        "vocab_size": VOCABULARY, "max_position_embeddings": 64, "type_vocab_size": 2, "hidden_act": "gelu",
        "layer_norm_eps": 1e-12, "pad_token_id": 0,
    });
    config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    config
}

/// A small BERT with its modules in folders, as repositories have them.
pub fn bert() -> RandomModel {
    bert_of(&json!({}))
}

/// The same with these fields of its configuration.
pub fn bert_of(own: &Value) -> RandomModel {
    let mut config = encoder(json!({"model_type": "bert", "architectures": ["BertModel"]}));
    config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    let modules = [pooling("mean"), (NORMALIZE, json!({}))];
    asked(model(&config, &["embeddings.word_embeddings.weight"], false, &modules), texts(false))
}

/// A small BERT that scores.
pub fn bert_cross_encoder() -> RandomModel {
    let config = encoder(json!({
        "model_type": "bert", "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"},
    }));
    let layout = ["bert.embeddings.word_embeddings.weight", "classifier.weight"];
    asked(model(&config, &layout, true, &[]), texts(true))
}

fn xlm_roberta() -> RandomModel {
    let own = json!({"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "pad_token_id": 1,
                     "type_vocab_size": 1, "layer_norm_eps": 1e-5});
    let modules = [pooling("cls")];
    asked(model(&encoder(own), &["embeddings.word_embeddings.weight"], false, &modules), texts(false))
}

fn roberta_cross_encoder() -> RandomModel {
    let own = json!({
        "model_type": "roberta", "architectures": ["RobertaForSequenceClassification"], "pad_token_id": 1,
        "type_vocab_size": 1, "layer_norm_eps": 1e-5, "id2label": {"0": "LABEL_0"},
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
    });
    let layout = ["roberta.embeddings.word_embeddings.weight", "classifier.out_proj.weight"];
    asked(model(&encoder(own), &layout, true, &[]), texts(false))
}

fn qwen3() -> RandomModel {
    qwen3_of(&json!({}))
}

/// A small Qwen3 that embeds, with these fields of its configuration.
pub fn qwen3_of(own: &Value) -> RandomModel {
    let mut config = json!({
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 80,
        "vocab_size": VOCABULARY, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
        "hidden_act": "silu", "tie_word_embeddings": true, "eos_token_id": 259,
    });
    config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    let modules = [pooling("lasttoken"), (NORMALIZE, json!({}))];
    asked(model(&config, &["embed_tokens.weight"], false, &modules), texts(false))
}

fn gemma() -> RandomModel {
    let config = json!({
        "model_type": "gemma3_text", "architectures": ["Gemma3TextModel"], "hidden_size": 48, "num_hidden_layers": 6,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 80,
        "vocab_size": VOCABULARY, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16,
        "sliding_window": 8, "sliding_window_pattern": 6, "use_bidirectional_attention": true, "pad_token_id": 0,
    });
    let dense = |inputs: u32, outputs: u32, bias: bool, activation: &str| json!({"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": activation});
    let modules = [
        pooling("mean"),
        ("Dense", dense(48, 96, false, "torch.nn.modules.linear.Identity")),
        ("Dense", dense(96, 32, true, "torch.nn.modules.activation.Tanh")),
        (NORMALIZE, json!({})),
    ];
    asked(model(&config, &["embed_tokens.weight"], false, &modules), texts(false))
}
