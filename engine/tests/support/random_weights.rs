//! Models of any family with random weights, by the table of its tensors, written to disk in chunks.

#![allow(dead_code, reason = "each of its users needs another part")]

use std::fs::File;
use std::io::{BufWriter, Write as _};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use russet_model::{
    config::{Config, Document},
    families,
    safetensors::Headers,
    tensors::{beside, table},
};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::model::model_dir;

/// Format of stored weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    F32,
    Bf16,
    /// Four bits in groups of 64, with scales and biases in bf16.
    Affine4,
}

/// A tensor: its name, type and shape.
pub type Tensor = (String, &'static str, Vec<usize>);

/// Every tensor that the description of a configuration calls for.
pub fn tensors(config: &Value, numbers: Numbers) -> Vec<Tensor> {
    let mut document = Document::parse(config.to_string().as_bytes()).unwrap();
    let family = families::family(&document).unwrap();
    document.set_defaults(family.defaults);
    let config = Config::read(&document).unwrap();
    let has_head = config.tie_word_embeddings == Some(false);
    let description = (family.describe)(&config, has_head).unwrap();
    let plain = if numbers == Numbers::F32 { "F32" } else { "BF16" };
    let mut tensors = Vec::new();
    for tensor in table(&description, &Headers::default(), None) {
        let shape: Vec<usize> = tensor.shape.iter().map(|&size| size as usize).collect();
        if numbers != Numbers::Affine4 || !tensor.is_matrix {
            tensors.push((tensor.name, plain, shape));
            continue;
        }
        let packed = |divisor: usize| {
            let mut shape = shape.clone();
            shape.iter_mut().next_back().into_iter().for_each(|last| *last /= divisor);
            shape
        };
        tensors.push((tensor.name.clone(), "U32", packed(8)));
        for part in ["scales", "biases"] {
            tensors.push((beside(&tensor.name, part), plain, packed(64)));
        }
    }
    tensors
}

/// Bytes of a tensor.
pub fn bytes_of(dtype: &str, shape: &[usize]) -> usize {
    let item = match dtype {
        "U8" => 1,
        "BF16" => 2,
        _ => 4,
    };
    shape.iter().product::<usize>() * item
}

/// A folder with such a model, whose matrices hold numbers between minus `spread` and `spread`.
pub fn write(config: &Value, numbers: Numbers, spread: f32) -> TempDir {
    write_tensors(config, &tensors(config, numbers), spread)
}

/// A folder with these tensors.
pub fn write_tensors(config: &Value, tensors: &[Tensor], spread: f32) -> TempDir {
    let dir = model_dir();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let mut header = Map::new();
    let mut end = 0;
    for (name, dtype, shape) in tensors {
        let begin = end;
        end += bytes_of(dtype, shape);
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}));
    }
    let header = Value::from(header).to_string();
    let mut file = BufWriter::new(File::create(dir.path().join("model.safetensors")).unwrap());
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let mut random = StdRng::seed_from_u64(7);
    for (name, dtype, shape) in tensors {
        let piece = piece(&mut random, (name, dtype, shape), spread);
        let mut left = bytes_of(dtype, shape);
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
fn piece(random: &mut StdRng, (name, dtype, shape): (&str, &str, &[usize]), spread: f32) -> Vec<u8> {
    const MAX_NUMBERS: usize = 40_009;
    let count = shape.iter().product::<usize>().min(MAX_NUMBERS);
    let mut bytes = Vec::new();
    for _ in 0..count {
        // Four-bit values lie between 0 and 15; the bias subtracts half of that.
        let number = match name.rsplit('.').next() {
            Some("scales") => 0.004,
            Some("biases") => -0.03,
            _ if name.contains("norm") => random.random_range(0.5..1.5_f32),
            _ => random.random_range(-spread..spread),
        };
        match dtype {
            "U8" => bytes.push(random.random()),
            "U32" => bytes.extend(random.random::<u32>().to_le_bytes()),
            // The upper half of a float32.
            "BF16" => bytes.extend(&number.to_le_bytes()[2..]),
            _ => bytes.extend(number.to_le_bytes()),
        }
    }
    bytes
}
