//! Played models for tests: a configuration and the headers of all its tensors.

use serde_json::{Value, json};

use crate::{
    config::{Config, Document},
    description::{Description, Latent, Layer, Mamba2, NormOffset, Rope, RopeScaling},
    families,
    load_quantization::MatrixQuantization,
    safetensors::Headers,
};

/// A small Llama; tests change what they are about.
pub fn llama(layers: u32) -> Value {
    json!({"model_type": "llama", "num_hidden_layers": layers, "hidden_size": 64, "num_attention_heads": 4,
           "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 128,
           "rms_norm_eps": 1e-5})
}

/// A Qwen3 of the same sizes.
pub fn qwen3(layers: u32) -> Value {
    let mut config = llama(layers);
    config["model_type"] = json!("qwen3");
    config["head_dim"] = json!(32);
    config["rope_theta"] = json!(1e6);
    config
}

/// A description of these layers.
pub fn description(layers: Vec<Layer>) -> Description {
    Description {
        model_type: "played".to_owned(),
        hidden_size: 64,
        vocab_size: 100,
        context_length: 128,
        tied: true,
        norm: Some("norm"),
        norm_epsilon: 1e-5,
        norm_offset: NormOffset::None,
        projections_back: MatrixQuantization::AsAsked,
        embedding_scale: None,
        logit_divisor: None,
        logit_cap: None,
        per_layer_inputs: None,
        encoder: None,
        pooling: None,
        layers,
        unused_layers: 0,
        notes: Vec::new(),
    }
}

/// Latent attention of these widths.
pub fn latent(heads: u32, rank: u32, rope_dim: u32, value_dim: u32) -> Latent {
    let rope = Rope { width: rope_dim, base: 1e4, traditional: true, scaling: RopeScaling::None };
    let (query_rank, nope_dim) = (None, value_dim);
    Latent {
        heads,
        rank,
        query_rank,
        rope_dim,
        nope_dim,
        value_dim,
        scale: 1.0,
        rope,
        epsilon: 1e-6,
        bias: false,
        query_scale: None,
    }
}

/// A Mamba-2 mixer of these sizes.
pub fn mamba2(heads: u32, head_dim: u32, groups: u32, state_dim: u32) -> Mamba2 {
    Mamba2 {
        heads,
        head_dim,
        groups,
        state_dim,
        conv_kernel: 4,
        conv_bias: true,
        bias: false,
        step_limits: [0.0, f32::INFINITY],
        epsilon: 1e-5,
    }
}

/// Tensors of a file: name, dtype and shape.
pub type Tensors = Vec<(String, &'static str, Vec<u64>)>;

/// Every tensor of the model in one dtype; with `group` every matrix is packed in four bits.
pub fn tensors(config: &Value, dtype: &'static str, group: Option<u64>, has_head: bool) -> Tensors {
    let mut document = Document::parse(config.to_string().as_bytes()).unwrap();
    let family = families::family(&document).unwrap();
    document.set_defaults(family.defaults);
    let description = (family.describe)(&Config::read(&document).unwrap(), has_head).unwrap();
    let mut tensors = Vec::new();
    for tensor in crate::tensors::table(&description, &Headers::default(), None) {
        match group.filter(|_| tensor.is_matrix) {
            None => tensors.push((tensor.name, dtype, tensor.shape)),
            Some(group) => tensors.extend(packed(&tensor.name, &tensor.shape, 4, group, dtype)),
        }
    }
    tensors
}

/// A packed matrix: values, scales and biases.
pub fn packed(name: &str, shape: &[u64], bits: u64, group: u64, dtype: &'static str) -> Tensors {
    let [rows, columns] = *shape else { panic!("{name} is no matrix") };
    let path = name.strip_suffix(".weight").unwrap();
    vec![
        (name.to_owned(), "U32", vec![rows, columns * bits / 32]),
        (format!("{path}.scales"), dtype, vec![rows, columns / group]),
        (format!("{path}.biases"), dtype, vec![rows, columns / group]),
    ]
}

/// The header of a file of these tensors and the file's size.
pub fn header(tensors: &[(String, &'static str, Vec<u64>)]) -> (String, u64) {
    let mut offset = 0;
    let mut header = serde_json::Map::new();
    for (name, dtype, shape) in tensors {
        let width = crate::safetensors::Dtype::named(dtype).bytes().unwrap();
        let bytes = shape.iter().product::<u64>() * width;
        header.insert(
            name.clone(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + bytes]}),
        );
        offset += bytes;
    }
    let header = Value::from(header).to_string();
    let size = 8 + header.len() as u64 + offset;
    (header, size)
}

/// Headers of one file of these tensors.
pub fn headers(tensors: &[(String, &'static str, Vec<u64>)]) -> Headers {
    let (text, size) = header(tensors);
    let mut headers = Headers::default();
    headers.add("model.safetensors", text.as_bytes(), size).unwrap();
    headers
}
