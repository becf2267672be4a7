//! What a model is, from its configuration and the headers of its safetensors files alone. Pure:
//! bytes in, sizes out; every number of a header is doubted, because anybody may have written it.

use std::collections::BTreeMap;

use russet_wire::shape::{ModelShape, ShardAxis, TensorRole, shard_axis, tensor_role};
use serde_json::{Map, Value};
use thiserror::Error;

/// Name of the configuration.
pub const CONFIG: &str = "config.json";
/// Name of the index of a model in several files.
pub const INDEX: &str = "model.safetensors.index.json";
/// Name of the weights of a model in one file.
const SINGLE_FILE: &str = "model.safetensors";
/// Longest header (and configuration) read: the limit the safetensors format itself sets.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Most layers believed: the deepest models have a few hundred.
const MAX_LAYERS: u64 = 10_000;
/// Largest of most other numbers. The API server's are signed, and so are products of a few of them.
const MAX_FIELD_VALUE: u64 = 1 << 29;

/// Why headers are not believed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum HeaderError {
    /// A file the model needs is not there.
    #[error("{file} is missing; the source must hold {CONFIG} and the safetensors files it belongs to")]
    Missing {
        /// The file.
        file: String,
    },
    /// The header reaches beyond the file.
    #[error(
        "{file} says its header has {length} bytes, but the file has only {size}; it is cut or no safetensors file, fetch or export it again"
    )]
    BeyondFile {
        /// The file.
        file: String,
        /// Length the file claims.
        length: u64,
        /// Size of the file.
        size: u64,
    },
    /// The header is longer than any real one.
    #[error(
        "{file} says its header has {length} bytes, more than the {limit} allowed; it is no safetensors file, export it again"
    )]
    TooLong {
        /// The file.
        file: String,
        /// Length the file claims.
        length: u64,
        /// The limit.
        limit: u64,
    },
    /// A file is not the JSON it should be.
    #[error("{file} is not valid JSON ({problem}); fetch or export it again")]
    BadJson {
        /// The file.
        file: String,
        /// What the parser says.
        problem: String,
    },
    /// A tensor's entry is impossible.
    #[error("{file} describes tensor {tensor} wrongly: {problem}; export the model again")]
    BadTensor {
        /// The file.
        file: String,
        /// The tensor.
        tensor: String,
        /// What is wrong, with numbers.
        problem: String,
    },
    /// The tensors do not fill the file.
    #[error(
        "{file} has {size} bytes, but its header accounts for {described}; it is cut or damaged, fetch or export it again"
    )]
    WrongSize {
        /// The file.
        file: String,
        /// Size of the file.
        size: u64,
        /// Size the header describes.
        described: u64,
    },
    /// The configuration lacks a field or has a senseless one.
    #[error(
        "{CONFIG} has no usable `{field}` ({found}); the model cannot be planned without it, take the {CONFIG} that belongs to the weights"
    )]
    Field {
        /// The field.
        field: &'static str,
        /// What is there.
        found: String,
    },
    /// Configuration and weights disagree.
    #[error("{CONFIG} and the weights disagree: {problem}; take both from one export")]
    Disagree {
        /// How, with numbers.
        problem: String,
    },
}

/// What planning needs of `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    architecture: String,
    layers: u32,
    hidden_size: u32,
    attention_heads: u32,
    key_value_heads: u32,
    head_dim: u32,
    intermediate_size: u32,
    vocabulary: u32,
    context_length: u32,
    tied: Option<bool>,
    quantization: Map<String, Value>,
}

/// One tensor of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    file: String,
    name: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: u64,
}

impl ModelConfig {
    /// Reads `config.json`.
    pub fn parse(bytes: &[u8]) -> Result<Self, HeaderError> {
        let json = object(CONFIG, bytes)?;
        let found = |field: &str| json.get(field).map_or("absent".to_owned(), truncated);
        let number = |field: &'static str, limit: u64| {
            json.get(field)
                .and_then(Value::as_u64)
                .filter(|&number| number > 0 && number <= limit)
                .map(|number| number as u32)
                .ok_or_else(|| HeaderError::Field { field, found: found(field) })
        };
        let optional = |field: &'static str| match json.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(_) => number(field, MAX_FIELD_VALUE).map(Some),
        };
        let architecture = json
            .get("model_type")
            .and_then(Value::as_str)
            .ok_or_else(|| HeaderError::Field { field: "model_type", found: found("model_type") })?;
        let hidden_size = number("hidden_size", 1 << 24)?;
        let attention_heads = number("num_attention_heads", 1 << 16)?;
        Ok(Self {
            architecture: architecture.to_owned(),
            layers: number("num_hidden_layers", MAX_LAYERS)?,
            hidden_size,
            attention_heads,
            key_value_heads: optional("num_key_value_heads")?.unwrap_or(attention_heads),
            head_dim: optional("head_dim")?.unwrap_or(hidden_size / attention_heads),
            // Every known architecture has one; without it nothing is cut, and that is said then.
            intermediate_size: optional("intermediate_size")?.unwrap_or(0),
            vocabulary: number("vocab_size", 1 << 30)?,
            context_length: optional("max_position_embeddings")?.unwrap_or(2048),
            tied: json.get("tie_word_embeddings").and_then(Value::as_bool),
            quantization: json
                .get("quantization")
                .or_else(|| json.get("quantization_config"))
                .and_then(Value::as_object)
                .cloned()
                .unwrap_or_default(),
        })
    }

    /// Values that share one scale in a quantised module.
    fn group_size(&self, module: &str) -> u64 {
        let own = self.quantization.get(module).and_then(|own| own.get("group_size"));
        own.or_else(|| self.quantization.get("group_size"))
            .and_then(Value::as_u64)
            .unwrap_or(64)
            .min(MAX_FIELD_VALUE)
    }
}

/// The weight files the model uses, out of `names`: those its index names, else the single file,
/// else every safetensors file there is.
pub fn weight_files(index: Option<&[u8]>, names: &[&str]) -> Result<Vec<String>, HeaderError> {
    let there = |name: &str| names.contains(&name);
    let wanted = match index {
        Some(index) => index_files(index)?,
        None if there(SINGLE_FILE) => vec![SINGLE_FILE.to_owned()],
        None => {
            let all = names.iter().filter(|name| name.ends_with(".safetensors"));
            all.map(|&name| name.to_owned()).collect()
        }
    };
    if wanted.is_empty() {
        return Err(HeaderError::Missing { file: SINGLE_FILE.to_owned() });
    }
    match wanted.iter().find(|name| !there(name)) {
        Some(file) => Err(HeaderError::Missing { file: file.clone() }),
        None => Ok(wanted),
    }
}

/// The files an index names, sorted.
pub fn index_files(index: &[u8]) -> Result<Vec<String>, HeaderError> {
    let json = object(INDEX, index)?;
    let map = json.get("weight_map").and_then(Value::as_object).ok_or_else(|| HeaderError::BadJson {
        file: INDEX.to_owned(),
        problem: "there is no weight_map".into(),
    })?;
    let files: std::collections::BTreeSet<String> =
        map.values().filter_map(Value::as_str).map(str::to_owned).collect();
    Ok(files.into_iter().collect())
}

/// The length of the header of a safetensors file, from its first eight bytes.
pub fn header_length(file: &str, start: &[u8], size: u64) -> Result<u64, HeaderError> {
    let file = file.to_owned();
    let Ok(length) = <[u8; 8]>::try_from(start).map(u64::from_le_bytes) else {
        return Err(HeaderError::BeyondFile { file, length: 8, size });
    };
    if length > MAX_HEADER_BYTES {
        return Err(HeaderError::TooLong { file, length, limit: MAX_HEADER_BYTES });
    }
    if length + 8 > size {
        return Err(HeaderError::BeyondFile { file, length, size });
    }
    Ok(length)
}

/// The tensors a header describes; they must fill the file of `size` bytes without overlap.
pub fn tensors(file: &str, header: &[u8], size: u64) -> Result<Vec<Tensor>, HeaderError> {
    let data = size.saturating_sub(8 + header.len() as u64);
    let mut spans: Vec<(u64, u64, String)> = Vec::new();
    let mut tensors = Vec::new();
    for (name, entry) in object(file, header)? {
        if name == "__metadata__" {
            continue;
        }
        let wrong =
            |problem: String| HeaderError::BadTensor { file: file.to_owned(), tensor: name.clone(), problem };
        let text = entry.get("dtype").and_then(Value::as_str).unwrap_or("absent");
        let width = dtype_bytes(text).ok_or_else(|| wrong(format!("its dtype is {text}")))?;
        let shape =
            numbers(entry.get("shape")).ok_or_else(|| wrong("its shape is no list of sizes".into()))?;
        let offsets = numbers(entry.get("data_offsets")).unwrap_or_default();
        let &[begin, end] = &offsets[..] else {
            return Err(wrong("its data_offsets are no pair of numbers".into()));
        };
        if begin > end || end > data {
            return Err(wrong(format!("its bytes {begin}..{end} lie outside the {data} bytes of data")));
        }
        let elements = shape.iter().try_fold(1_u64, |product, &size| product.checked_mul(size));
        let bytes = elements.and_then(|elements| elements.checked_mul(width));
        if bytes != Some(end - begin) {
            return Err(wrong(format!(
                "shape {shape:?} of {text} does not take the {} bytes of {begin}..{end}",
                end - begin
            )));
        }
        if end > begin {
            spans.push((begin, end, name.clone()));
        }
        let dtype = text.to_owned();
        tensors.push(Tensor { file: file.to_owned(), name, dtype, shape, bytes: end - begin });
    }
    spans.sort();
    let mut filled = 0;
    for (begin, end, tensor) in spans {
        if begin < filled {
            let problem = format!("its bytes {begin}..{end} overlap those before, which end at {filled}");
            return Err(HeaderError::BadTensor { file: file.to_owned(), tensor, problem });
        }
        filled = end;
    }
    if filled != data {
        let described = size - data + filled;
        return Err(HeaderError::WrongSize { file: file.to_owned(), size, described });
    }
    Ok(tensors)
}

/// Adds tensors up by the part of the model they belong to.
pub fn shape(config: &ModelConfig, tensors: &[Tensor]) -> Result<ModelShape, HeaderError> {
    let by_name: BTreeMap<&str, &Tensor> = tensors.iter().map(|tensor| (&*tensor.name, tensor)).collect();
    if by_name.len() < tensors.len() {
        let twice = tensors.iter().find(|tensor| !std::ptr::eq(by_name[&*tensor.name], *tensor));
        let problem = twice.map_or_else(String::new, |tensor| {
            format!(
                "tensor {} is in {} and again in {}",
                tensor.name, tensor.file, by_name[&*tensor.name].file
            )
        });
        return Err(HeaderError::Disagree { problem });
    }
    let mut layer_bytes = vec![0_u64; config.layers as usize];
    let mut whole_bytes = layer_bytes.clone();
    let mut largest_group = 0;
    let (mut embedding_bytes, mut head_bytes, mut parameters) = (0, 0, 0_u64);
    let (mut wide, mut own_head) = (false, false);
    for tensor in tensors {
        let Some(role) = tensor_role(&tensor.name) else { continue };
        match role {
            TensorRole::Embedding => embedding_bytes = tensor.bytes.saturating_add(embedding_bytes),
            TensorRole::Head => head_bytes = tensor.bytes.saturating_add(head_bytes),
            TensorRole::Layer(index) => match layer_bytes.get_mut(index as usize) {
                Some(bytes) => {
                    *bytes = bytes.saturating_add(tensor.bytes);
                    let whole = &mut whole_bytes[index as usize];
                    if shard_axis(&tensor.name) == ShardAxis::Replicated {
                        *whole = whole.saturating_add(tensor.bytes);
                    } else if let Some(module) = tensor.name.strip_suffix(".scales") {
                        largest_group = config.group_size(module).max(largest_group);
                    }
                }
                None => {
                    let problem = format!(
                        "{} is of layer {index}, but num_hidden_layers is {}",
                        tensor.name, config.layers
                    );
                    return Err(HeaderError::Disagree { problem });
                }
            },
        }
        own_head |= tensor.name.contains("lm_head.");
        wide |= tensor.dtype == "F32";
        parameters = parameters.saturating_add(parameter_count(config, tensor, &by_name));
    }
    if let Some(index) = layer_bytes.iter().position(|&bytes| bytes == 0) {
        let problem = format!("num_hidden_layers is {}, but layer {index} has no tensors", config.layers);
        return Err(HeaderError::Disagree { problem });
    }
    if embedding_bytes == 0 {
        let problem = "there is no token embedding (embed_tokens)".to_owned();
        return Err(HeaderError::Disagree { problem });
    }
    // One tensor in f32 makes MLX compute in f32 from there on; anything else computes in 16 bits.
    let element = if wide { 4 } else { 2 };
    let heads = u64::from(config.key_value_heads) * u64::from(config.head_dim);
    Ok(ModelShape {
        architecture: config.architecture.clone(),
        parameters,
        layers: config.layers,
        hidden_size: config.hidden_size,
        attention_heads: config.attention_heads,
        key_value_heads: config.key_value_heads,
        head_dim: config.head_dim,
        vocabulary: config.vocabulary,
        context_length: config.context_length,
        embedding_bytes,
        head_bytes,
        tied: config.tied.unwrap_or(!own_head) && !own_head,
        layer_bytes,
        kv_bytes_per_token_per_layer: heads.saturating_mul(2 * element),
        intermediate_size: config.intermediate_size,
        quantization_group_size: largest_group as u32,
        whole_layer_bytes: whole_bytes.into_iter().max().unwrap_or(0),
    })
}

/// Parameters a tensor stands for. A quantised weight is counted by its scales: each stands for one
/// group of values.
fn parameter_count(config: &ModelConfig, tensor: &Tensor, all: &BTreeMap<&str, &Tensor>) -> u64 {
    let elements = |tensor: &Tensor| tensor.shape.iter().product::<u64>();
    let quantised = |module: &str| {
        all.get(format!("{module}.scales").as_str()).is_some()
            && all.get(format!("{module}.weight").as_str()).is_some_and(|weight| weight.dtype == "U32")
    };
    match tensor.name.rsplit_once('.') {
        Some((module, "scales")) if quantised(module) => {
            elements(tensor).saturating_mul(config.group_size(module))
        }
        Some((module, "weight" | "biases")) if quantised(module) => 0,
        _ => elements(tensor),
    }
}

fn object(file: &str, bytes: &[u8]) -> Result<Map<String, Value>, HeaderError> {
    serde_json::from_slice(bytes)
        .map_err(|error| HeaderError::BadJson { file: file.to_owned(), problem: error.to_string() })
}

fn numbers(value: Option<&Value>) -> Option<Vec<u64>> {
    value?.as_array()?.iter().map(Value::as_u64).collect()
}

/// A value for a message: never the whole of somebody's file.
fn truncated(value: &Value) -> String {
    let text = value.to_string();
    text.chars().take(40).collect()
}

fn dtype_bytes(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" => 1,
        "U16" | "I16" | "F16" | "BF16" => 2,
        "U32" | "I32" | "F32" => 4,
        "U64" | "I64" | "F64" => 8,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(value: Value) -> ModelConfig {
        ModelConfig::parse(value.to_string().as_bytes()).unwrap()
    }

    fn llama(layers: u32) -> Value {
        json!({"model_type": "llama", "num_hidden_layers": layers, "hidden_size": 8, "num_attention_heads": 4,
               "num_key_value_heads": 2, "intermediate_size": 4, "vocab_size": 16, "max_position_embeddings": 128})
    }

    fn tensor(name: &str, dtype: &str, shape: &[u64]) -> Tensor {
        let bytes = shape.iter().product::<u64>() * dtype_bytes(dtype).unwrap();
        Tensor {
            file: "m.safetensors".into(),
            name: name.into(),
            dtype: dtype.into(),
            shape: shape.to_vec(),
            bytes,
        }
    }

    #[test]
    fn a_shape_adds_tensors_up_by_their_role() {
        let tensors = [
            tensor("model.embed_tokens.weight", "BF16", &[16, 8]),
            tensor("model.layers.0.mlp.up_proj.weight", "BF16", &[4, 8]),
            tensor("model.layers.1.mlp.up_proj.weight", "BF16", &[4, 8]),
            tensor("model.layers.1.self_attn.rotary_emb.inv_freq", "F32", &[4]),
            tensor("model.norm.weight", "BF16", &[8]),
            tensor("vision.patch", "F32", &[100]),
        ];
        let shape = shape(&config(llama(2)), &tensors).unwrap();
        assert_eq!(
            (shape.embedding_bytes, shape.head_bytes, shape.layer_bytes.clone()),
            (256, 16, vec![64, 64])
        );
        assert_eq!((shape.parameters, shape.tied, shape.head_dim), (128 + 32 + 32 + 8, true, 2));
        assert_eq!(
            (shape.intermediate_size, shape.quantization_group_size, shape.whole_layer_bytes),
            (4, 0, 0)
        );
        assert_eq!(shape.kv_bytes_per_token_per_layer, 2 * 2 * 2 * 2);
    }

    #[test]
    fn quantised_values_count_unpacked_and_f32_scales_widen_kv() {
        let mut json = llama(1);
        json["quantization"] =
            json!({"bits": 4, "group_size": 32, "model.embed_tokens": {"group_size": 8, "bits": 8}});
        let tensors = [
            tensor("model.embed_tokens.weight", "U32", &[16, 2]),
            tensor("model.embed_tokens.scales", "F32", &[16, 1]),
            tensor("model.embed_tokens.biases", "F32", &[16, 1]),
            tensor("model.layers.0.mlp.up_proj.weight", "U32", &[4, 8]),
            tensor("model.layers.0.mlp.up_proj.scales", "F32", &[4, 2]),
            tensor("model.layers.0.mlp.up_proj.biases", "F32", &[4, 2]),
            tensor("model.layers.0.input_layernorm.weight", "BF16", &[8]),
            tensor("lm_head.weight", "BF16", &[16, 8]),
        ];
        let shape = shape(&config(json), &tensors).unwrap();
        // The embedding's own group does not count: it is not cut.
        assert_eq!((shape.quantization_group_size, shape.whole_layer_bytes), (32, 16));
        assert_eq!(shape.parameters, 16 * 8 + 4 * 64 + 8 + 16 * 8);
        assert_eq!((shape.kv_bytes_per_token_per_layer, shape.tied), (2 * 2 * 2 * 4, false));
    }

    #[test]
    fn weights_that_mismatch_the_config_are_refused_with_numbers() {
        let embed = tensor("model.embed_tokens.weight", "BF16", &[16, 8]);
        let layer = |index: u32| tensor(&format!("model.layers.{index}.w.weight"), "BF16", &[8]);
        let message =
            |layers, tensors: &[Tensor]| shape(&config(llama(layers)), tensors).unwrap_err().to_string();
        assert!(message(1, &[embed.clone(), layer(0), layer(1)]).contains("layer 1"));
        assert!(message(3, &[embed.clone(), layer(0), layer(2)]).contains("layer 1 has no tensors"));
        assert!(message(1, &[layer(0)]).contains("embedding"));
        assert!(message(1, &[embed.clone(), layer(0), layer(0)]).contains("again in"));
    }

    #[test]
    fn huge_sizes_add_up_without_overflow() {
        let huge = |name: &str| Tensor { bytes: u64::MAX, ..tensor(name, "F32", &[1]) };
        let mut json = llama(1);
        json["num_key_value_heads"] = json!(MAX_FIELD_VALUE);
        json["head_dim"] = json!(MAX_FIELD_VALUE);
        let tensors = ["embed_tokens.w", "embed_tokens.v", "layers.0.w", "layers.0.v", "norm.w", "norm.v"];
        let shape = shape(&config(json), &tensors.map(huge)).unwrap();
        assert_eq!((shape.total_bytes(), shape.kv_bytes_per_token()), (u64::MAX, 1 << 61));
    }

    #[test]
    fn a_configuration_without_a_number_names_the_field() {
        for (field, value) in [
            ("num_hidden_layers", json!(0)),
            ("num_hidden_layers", json!(4_000_000_000_u64)),
            ("hidden_size", json!("wide")),
            ("vocab_size", json!(null)),
            ("head_dim", json!(-1)),
            ("model_type", json!(7)),
        ] {
            let mut json = llama(2);
            json[field] = value;
            let error = ModelConfig::parse(json.to_string().as_bytes()).unwrap_err();
            assert!(error.to_string().contains(field), "{error}");
        }
        assert!(matches!(ModelConfig::parse(b"[1]"), Err(HeaderError::BadJson { .. })));
    }

    #[test]
    fn corrupt_headers_are_refused_by_name_number_and_remedy() {
        fn check(header: &str, data: u64) -> Result<Vec<Tensor>, HeaderError> {
            tensors("x.safetensors", header.as_bytes(), 8 + header.len() as u64 + data)
        }
        let one = |offsets: &str| {
            format!(
                r#"{{"__metadata__":{{"shape":"x"}},"t":{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}}}"#
            )
        };
        assert_eq!(check(&one("[0,8]"), 8).unwrap().len(), 1);
        for (header, data, part) in [
            (one("[0,8]"), 4, "outside"),
            (one("[0,8]"), 9, "accounts for"),
            (one("[8,0]"), 8, "outside"),
            (one("[0,4]"), 8, "does not take"),
            (one("[0]"), 8, "pair"),
            (one("[-1,8]"), 8, "pair"),
            (r#"{"t":{"dtype":"F3","shape":[2],"data_offsets":[0,8]}}"#.to_owned(), 8, "dtype is F3"),
            (r#"{"t":{"dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,8]}}"#.to_owned(), 8, "does not take"),
            (r#"{"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#.to_owned(), 8, "overlap"),
            ("{nonsense".to_owned(), 8, "JSON"),
            ("".to_owned(), 8, "JSON"),
        ] {
            let error = check(&header, data).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("x.safetensors") && error.contains("again"), "{header}: {error}");
        }
        let length = |bytes: &[u8], size| header_length("x", bytes, size);
        assert_eq!(length(&16_u64.to_le_bytes(), 24), Ok(16));
        assert!(matches!(length(&17_u64.to_le_bytes(), 24), Err(HeaderError::BeyondFile { .. })));
        assert!(matches!(length(&u64::MAX.to_le_bytes(), 24), Err(HeaderError::TooLong { .. })));
        assert!(matches!(length(&[1, 2], 2), Err(HeaderError::BeyondFile { .. })));
    }

    #[test]
    fn the_index_chooses_the_files_and_all_of_them_must_be_there() {
        let index =
            br#"{"weight_map": {"a": "m-2.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}}"#;
        let both = ["m-1.safetensors", "m-2.safetensors", "extra.safetensors"];
        assert_eq!(weight_files(Some(index), &both).unwrap(), ["m-1.safetensors", "m-2.safetensors"]);
        assert_eq!(
            weight_files(Some(index), &both[..1]),
            Err(HeaderError::Missing { file: "m-2.safetensors".into() })
        );
        assert_eq!(
            weight_files(None, &["model.safetensors", "other.safetensors"]).unwrap(),
            ["model.safetensors"]
        );
        assert!(weight_files(None, &["tokenizer.json"]).is_err());
    }
}
