//! Models of any size with random weights, written to disk in chunks.

use std::fs::File;
use std::io::{BufWriter, Write as _};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use russet_crds::KvCacheType;
use serde_json::{Map, json};
use tempfile::TempDir;

use crate::model::{END, model_dir};

/// Format of stored weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    F32,
    Bf16,
    /// Four bits in groups of 64, with scales and biases in bf16.
    Affine4,
}

/// Sizes of a model.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub model_type: &'static str,
    pub numbers: Numbers,
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub layers: usize,
    pub vocabulary: usize,
    pub tied: bool,
}

const GROUPED: Sizes = Sizes {
    model_type: "llama",
    numbers: Numbers::F32,
    hidden: 1024,
    intermediate: 1024,
    heads: 16,
    kv_heads: 8,
    head_dim: 128,
    layers: 4,
    vocabulary: 128_256,
    tied: false,
};

/// Models of more than a gigabyte, with their context, number of sequences and KV format. A CPU computes
/// 16-bit and packed values slowly, so most of those models is embedding and head, which cost nothing during
/// prefill.
pub const LARGE: [(&str, Sizes, u32, u32, KvCacheType); 4] = [
    ("Llama, float32, grouped heads", GROUPED, 1024, 4, KvCacheType::AsComputed),
    ("Llama, float32, grouped heads, KV in 8 bits", GROUPED, 1024, 4, KvCacheType::Int8),
    (
        "Llama, 4-bit",
        Sizes {
            model_type: "llama",
            numbers: Numbers::Affine4,
            hidden: 2048,
            intermediate: 512,
            heads: 8,
            kv_heads: 8,
            head_dim: 64,
            layers: 2,
            vocabulary: 512_000,
            tied: false,
        },
        512,
        4,
        KvCacheType::AsComputed,
    ),
    (
        "Qwen3, bfloat16, tied",
        Sizes {
            model_type: "qwen3",
            numbers: Numbers::Bf16,
            hidden: 1024,
            intermediate: 1024,
            heads: 16,
            kv_heads: 8,
            head_dim: 128,
            layers: 2,
            vocabulary: 560_000,
            tied: true,
        },
        512,
        4,
        KvCacheType::AsComputed,
    ),
];

/// A tensor: its name, type and shape.
type Tensor = (String, &'static str, Vec<usize>);

impl Sizes {
    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors().iter().map(|(_, dtype, shape)| bytes_of(dtype, shape) as u64).sum()
    }

    fn tensors(&self) -> Vec<Tensor> {
        let Self { hidden, intermediate, heads, kv_heads, head_dim, .. } = *self;
        let mut tensors = Vec::new();
        self.matrix(&mut tensors, "model.embed_tokens", self.vocabulary, hidden);
        if !self.tied {
            self.matrix(&mut tensors, "lm_head", self.vocabulary, hidden);
        }
        self.norm(&mut tensors, "model.norm", hidden);
        for layer in 0..self.layers {
            let name = |tensor: &str| format!("model.layers.{layer}.{tensor}");
            for (tensor, outputs, inputs) in [
                ("self_attn.q_proj", heads * head_dim, hidden),
                ("self_attn.k_proj", kv_heads * head_dim, hidden),
                ("self_attn.v_proj", kv_heads * head_dim, hidden),
                ("self_attn.o_proj", hidden, heads * head_dim),
                ("mlp.gate_proj", intermediate, hidden),
                ("mlp.up_proj", intermediate, hidden),
                ("mlp.down_proj", hidden, intermediate),
            ] {
                self.matrix(&mut tensors, &name(tensor), outputs, inputs);
            }
            self.norm(&mut tensors, &name("input_layernorm"), hidden);
            self.norm(&mut tensors, &name("post_attention_layernorm"), hidden);
            if self.model_type == "qwen3" {
                self.norm(&mut tensors, &name("self_attn.q_norm"), head_dim);
                self.norm(&mut tensors, &name("self_attn.k_norm"), head_dim);
            }
        }
        tensors
    }

    fn matrix(&self, tensors: &mut Vec<Tensor>, name: &str, outputs: usize, inputs: usize) {
        let weight = format!("{name}.weight");
        match self.numbers {
            Numbers::F32 => tensors.push((weight, "F32", vec![outputs, inputs])),
            Numbers::Bf16 => tensors.push((weight, "BF16", vec![outputs, inputs])),
            Numbers::Affine4 => {
                tensors.push((weight, "U32", vec![outputs, inputs / 8]));
                for part in ["scales", "biases"] {
                    tensors.push((format!("{name}.{part}"), "BF16", vec![outputs, inputs / 64]));
                }
            }
        }
    }

    fn norm(&self, tensors: &mut Vec<Tensor>, name: &str, width: usize) {
        let dtype = if self.numbers == Numbers::F32 { "F32" } else { "BF16" };
        tensors.push((format!("{name}.weight"), dtype, vec![width]));
    }

    fn config(&self) -> serde_json::Value {
        let mut config = json!({
            "model_type": self.model_type, "hidden_size": self.hidden,
            "intermediate_size": self.intermediate, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "vocab_size": self.vocabulary, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
            "tie_word_embeddings": self.tied, "eos_token_id": END,
        });
        if self.numbers == Numbers::Affine4 {
            config["quantization"] = json!({"group_size": 64, "bits": 4});
        }
        config
    }
}

fn bytes_of(dtype: &str, shape: &[usize]) -> usize {
    shape.iter().product::<usize>() * if dtype == "BF16" { 2 } else { 4 }
}

/// A folder with such a model.
pub fn write(sizes: &Sizes) -> TempDir {
    let dir = model_dir();
    std::fs::write(dir.path().join("config.json"), sizes.config().to_string()).unwrap();
    let mut header = Map::new();
    let mut end = 0;
    for (name, dtype, shape) in sizes.tensors() {
        let begin = end;
        end += bytes_of(dtype, &shape);
        header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}));
    }
    let header = serde_json::Value::from(header).to_string();
    let mut file = BufWriter::new(File::create(dir.path().join("model.safetensors")).unwrap());
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let mut random = StdRng::seed_from_u64(7);
    for (name, dtype, shape) in sizes.tensors() {
        let piece = piece(&mut random, &name, dtype);
        let mut left = bytes_of(dtype, &shape);
        while left > 0 {
            let now = left.min(piece.len());
            file.write_all(&piece[..now]).unwrap();
            left -= now;
        }
    }
    file.flush().unwrap();
    dir
}

/// The bytes that a tensor repeats: generating a thousand million random numbers would take longer than the
/// runs.
fn piece(random: &mut StdRng, name: &str, dtype: &str) -> Vec<u8> {
    const COUNT: usize = 40_009;
    let norm = name.contains("norm");
    let mut bytes = Vec::new();
    for _ in 0..COUNT {
        // Four-bit values lie between 0 and 15; the bias subtracts half of that.
        let number = match (norm, name.rsplit('.').next()) {
            (true, _) => random.random_range(0.5..1.5_f32),
            (false, Some("scales")) => 0.004,
            (false, Some("biases")) => -0.03,
            (false, _) => random.random_range(-0.03..0.03_f32),
        };
        match dtype {
            "U32" => bytes.extend(random.random::<u32>().to_le_bytes()),
            // The upper half of a float32.
            "BF16" => bytes.extend(&number.to_le_bytes()[2..]),
            _ => bytes.extend(number.to_le_bytes()),
        }
    }
    bytes
}
