//! Model folders that are whole, damaged or mismatched: every fault is an error that names its object.

mod agreement;
mod packed;
mod quantised;

use std::path::Path;

use mlx_rs::{Array, Dtype};
use russet_mlx::quantized::QuantizedWeight;
use russet_model::{
    config::CONFIG,
    index::{INDEX, SINGLE},
    partition::Partition,
    safetensors,
};
use serde_json::{Value, json};

use super::*;
use crate::partition::TpShard;

/// Name, dtype and shape.
type Tensors = Vec<(String, &'static str, Vec<u64>)>;

fn config() -> Value {
    json!({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32,
           "num_key_value_heads": 2, "intermediate_size": 192, "vocab_size": 8, "attention_bias": true,
           "rms_norm_eps": 1e-5})
}

fn tensors() -> Tensors {
    let layer = |name: &str| format!("model.layers.0.{name}");
    let plain = |name: String, shape: &[u64]| (name, "F32", shape.to_vec());
    vec![
        plain("model.embed_tokens.weight".into(), &[8, 64]),
        plain("model.norm.weight".into(), &[64]),
        plain(layer("input_layernorm.weight"), &[64]),
        plain(layer("post_attention_layernorm.weight"), &[64]),
        plain(layer("self_attn.q_proj.weight"), &[128, 64]),
        plain(layer("self_attn.q_proj.bias"), &[128]),
        plain(layer("self_attn.k_proj.weight"), &[64, 64]),
        plain(layer("self_attn.k_proj.bias"), &[64]),
        plain(layer("self_attn.v_proj.weight"), &[64, 64]),
        plain(layer("self_attn.v_proj.bias"), &[64]),
        plain(layer("self_attn.o_proj.weight"), &[64, 128]),
        plain(layer("self_attn.o_proj.bias"), &[64]),
        plain(layer("mlp.gate_proj.weight"), &[192, 64]),
        plain(layer("mlp.up_proj.weight"), &[192, 64]),
        (layer("mlp.down_proj.weight"), "U32", vec![64, 24]),
        (layer("mlp.down_proj.scales"), "F16", vec![64, 3]),
        (layer("mlp.down_proj.biases"), "F16", vec![64, 3]),
    ]
}

/// Bytes of an element.
fn width(dtype: &str) -> u64 {
    safetensors::Dtype::named(dtype).bytes().unwrap()
}

/// A safetensors file of the given tensors, each filled with zeros.
fn safetensors(tensors: &Tensors) -> Vec<u8> {
    let mut offset = 0;
    let mut header = serde_json::Map::new();
    for (name, dtype, shape) in tensors {
        let bytes = shape.iter().product::<u64>() * width(dtype);
        header.insert(
            name.clone(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + bytes]}),
        );
        offset += bytes;
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(vec![0; offset as usize]);
    file
}

/// A folder of these files, opened.
fn open(config: &Value, files: &[(&str, Vec<u8>)]) -> Result<Checkpoint, WeightsError> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(CONFIG), config.to_string()).unwrap();
    for (name, bytes) in files {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    Checkpoint::open(dir.path())
}

fn rejection(config: &Value, files: &[(&str, Vec<u8>)]) -> String {
    open(config, files).unwrap_err().to_string()
}

#[test]
fn only_the_wanted_tensor_is_read() {
    let checkpoint = open(&config(), &[(SINGLE, safetensors(&tensors()))]).unwrap();
    for (dtype, tensor, expected, bytes) in [
        (LoadDtype::AsStored, "model.norm.weight", Dtype::Float32, 256),
        (LoadDtype::Float32, "model.layers.0.self_attn.q_proj.bias", Dtype::Float32, 512),
    ] {
        let mut read = 0;
        let mut count = |bytes| read += bytes;
        let array = Weights::new(&checkpoint, dtype, TpShard::WHOLE, &mut count).tensor(tensor).unwrap();
        assert_eq!((array.dtype(), read), (expected, bytes), "{tensor}");
    }
}

#[test]
fn damaged_files_are_errors_that_name_them() {
    let good = safetensors(&tensors());
    let mut long = good.clone();
    long[7] = 0xff;
    for (file, said) in [
        (good[..good.len() - 1].to_vec(), "lie outside"),
        (good[..20].to_vec(), "but the file has only 20"),
        (vec![1, 2, 3], "says its header has 8 bytes, but the file has only 3"),
        (long, "more than the limit"),
    ] {
        let error = rejection(&config(), &[(SINGLE, file)]);
        assert!(error.contains(said) && error.contains(SINGLE), "{said}: {error}");
    }
}

#[test]
fn index_is_a_hint_and_the_headers_decide() {
    let (all, mut first, mut second) = (safetensors(&tensors()), tensors(), tensors());
    first.truncate(4);
    second.drain(..4);
    let [one, two] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let shards = || vec![(one, safetensors(&first)), (two, safetensors(&second))];
    let index = |text: &str| (INDEX, text.as_bytes().to_vec());
    let with = |mut files: Vec<(&'static str, Vec<u8>)>, text| {
        files.push(index(text));
        files
    };
    for (files, fault) in [
        (vec![(SINGLE, all.clone())], None),
        (shards(), None),
        (
            with(
                shards(),
                r#"{"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#,
            ),
            None,
        ),
        // Stale: it names shards that are elsewhere.
        (
            with(vec![(SINGLE, all.clone())], r#"{"weight_map":{"a":"model-00001-of-00002.safetensors"}}"#),
            None,
        ),
        (with(vec![(SINGLE, all.clone())], r#"{"weight_map":{}}"#), None),
        (with(vec![(SINGLE, all.clone())], ""), None),
        (
            with(vec![(SINGLE, all)], r#"{"weight_map":{"a":"../../etc/passwd"}}"#),
            Some("not a plain file name"),
        ),
        (shards()[..1].to_vec(), Some("model-00002-of-00002.safetensors is missing")),
        (vec![], Some("model.safetensors is missing")),
    ] {
        let names: Vec<&str> = files.iter().map(|file| file.0).collect();
        let error = open(&config(), &files).err().map(|error| error.to_string());
        assert_eq!(error.is_some(), fault.is_some(), "{names:?}: {error:?}");
        assert!(error.unwrap_or_default().contains(fault.unwrap_or_default()), "{names:?}");
    }
}

#[test]
fn what_the_engine_lacks_is_refused_on_opening() {
    let all = safetensors(&tensors());
    let with = |field: &str, value: Value| {
        let mut config = config();
        config[field] = value;
        config
    };
    for (config, said) in [
        (with("model_type", json!("mamba")), "\"mamba\" is not supported"),
        (with("rope_scaling", json!({"rope_type": "dynamic", "factor": 2.0})), "rope scaling \"dynamic\""),
        (with("hidden_size", json!(null)), "hidden_size"),
        (with("mlp_bias", json!(true)), "gate_proj.bias is missing"),
        (with("attention_bias", json!(false)), "_proj.bias: llama models have no such tensor"),
    ] {
        let error = rejection(&config, &[(SINGLE, all.clone())]);
        assert!(error.contains(said), "{config}: {error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("config.json is missing"), "{error}");
}

#[test]
fn member_reads_its_share_of_a_projection_and_all_of_the_rest() {
    let checkpoint = open(&config(), &[(SINGLE, safetensors(&tensors()))]).unwrap();
    let shard = TpShard { index: 1, count: 2 };
    let mut read = 0;
    let mut count = |bytes| read += bytes;
    let mut weights = Weights::new(&checkpoint, LoadDtype::AsStored, shard, &mut count);
    for (tensor, shape) in [
        ("self_attn.q_proj.weight", &[64, 64][..]),
        ("self_attn.q_proj.bias", &[64]),
        ("self_attn.o_proj.weight", &[64, 64]),
        ("self_attn.o_proj.bias", &[64]),
        ("input_layernorm.weight", &[64]),
    ] {
        assert_eq!(weights.tensor(&format!("model.layers.0.{tensor}")).unwrap().shape(), shape, "{tensor}");
    }
    // Of three groups of 64 columns the second rank has two.
    let Weight::Quantised(weight) = weights.weight("model.layers.0.mlp.down_proj").unwrap() else {
        panic!("it is packed");
    };
    let shapes = [&weight.packed, &weight.scales, weight.biases.as_ref().unwrap()].map(Array::shape);
    assert_eq!(shapes, [&[64, 16][..], &[64, 2], &[64, 2]]);
    let packed = 4 * 64 * 16 + 2 * 64 * (2 + 2);
    assert_eq!(read, 4 * (64 * 64 + 64 + 64 * 64 + 64 + 64) + packed);
}

#[test]
fn bytes_of_a_rank_are_those_it_reads() {
    let mut all = tensors();
    all.retain(|tensor| !tensor.0.contains("down_proj"));
    all.push(("model.layers.0.mlp.down_proj.weight".into(), "BF16", vec![64, 192]));
    let checkpoint = open(&config(), &[(SINGLE, safetensors(&all))]).unwrap();
    let total: u64 = safetensors(&all).len() as u64;
    let bytes = |size: u32, rank| {
        let partition = Partition::with_tensor(vec![1; size as usize], size, 1).unwrap();
        checkpoint.bytes(&partition.part(rank).unwrap()).unwrap()
    };
    let whole = bytes(1, 0);
    assert!(whole < total && whole > total - 4096, "everything but the header");
    // Norms, the bias of the output and the embedding are whole on both; the final norm is rank 0's.
    let [norms, embedding, final_norm] = [4 * 3 * 64, 4 * 8 * 64, 4 * 64];
    let shared = whole - norms - embedding - final_norm;
    assert_eq!(bytes(2, 0), norms + embedding + final_norm + shared / 2);
    assert_eq!(bytes(2, 1), norms + embedding + shared / 2);
}
