//! A small Llama in GGUF whose matrices are of different types: MLX unpacks the numbers that the blocks stand for.

use mlx_rs::Dtype;
use russet_model::gguf::{block_type::ElementType, blocks::decode};

use super::*;
use crate::{
    partition::TpShard,
    weights::{Checkpoint, Weight, Weights},
};

const HIDDEN: u64 = 256;
const WIDTH: u64 = 512;

/// A matrix of the layer: its names in the file and in the model, its type by number, columns and rows.
type Matrix = (&'static str, &'static str, u32, u64, u64);

/// Q4_0, Q4_K, Q5_0, Q5_K; Q6_K, IQ4_XS and IQ2_XXS are packed anew.
const MATRICES: [Matrix; 7] = [
    ("attn_q", "self_attn.q_proj", 2, HIDDEN, HIDDEN),
    ("attn_k", "self_attn.k_proj", 12, HIDDEN, HIDDEN),
    ("attn_v", "self_attn.v_proj", 6, HIDDEN, HIDDEN),
    ("attn_output", "self_attn.o_proj", 13, HIDDEN, HIDDEN),
    ("ffn_gate", "mlp.gate_proj", 14, HIDDEN, WIDTH),
    ("ffn_up", "mlp.up_proj", 23, HIDDEN, WIDTH),
    ("ffn_down", "mlp.down_proj", 16, WIDTH, HIDDEN),
];

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Bytes of blocks, with scales near 0.01 where the type has halves.
fn blocks(kind: u32, columns: u64, rows: u64) -> Vec<u8> {
    let element = ElementType::of(kind).unwrap();
    let halves: &[u64] = match kind {
        12 | 13 => &[0, 2],
        14 => &[208],
        _ => &[0],
    };
    let count = columns * rows / element.block_elements();
    (0..count * element.block_bytes())
        .map(|at| {
            let own = at % element.block_bytes();
            if halves.contains(&own) {
                (at / 7 % 256) as u8
            } else if own > 0 && halves.contains(&(own - 1)) {
                0x21
            } else {
                (at * at * 31 + at * 7 + at / 100) as u8
            }
        })
        .collect()
}

/// The file.
fn llama() -> Vec<u8> {
    let (mut keys, mut metadata) = (0_u64, Vec::new());
    let mut add = |key: &str, kind: u32, value: Vec<u8>| {
        keys += 1;
        metadata.extend([text(key), kind.to_le_bytes().to_vec(), value].concat());
    };
    add("general.architecture", 8, text("llama"));
    for (key, number) in [
        ("block_count", 1),
        ("context_length", 128),
        ("embedding_length", HIDDEN),
        ("feed_forward_length", WIDTH),
        ("attention.head_count", 4),
    ] {
        add(&format!("llama.{key}"), 4, (number as u32).to_le_bytes().to_vec());
    }
    add("llama.attention.layer_norm_rms_epsilon", 6, 1e-5_f32.to_le_bytes().to_vec());
    let (mut table, mut data, mut tensors) = (Vec::new(), Vec::new(), 0_u64);
    let mut tensor = |name: String, sizes: &[u64], kind: u32, bytes: Vec<u8>| {
        data.resize(data.len().next_multiple_of(32), 0);
        table.extend([text(&name), (sizes.len() as u32).to_le_bytes().to_vec()].concat());
        sizes.iter().for_each(|size| table.extend(size.to_le_bytes()));
        table.extend([kind.to_le_bytes().to_vec(), (data.len() as u64).to_le_bytes().to_vec()].concat());
        data.extend(bytes);
        tensors += 1;
    };
    tensor("token_embd.weight".to_owned(), &[HIDDEN, 8], 8, blocks(8, HIDDEN, 8));
    for name in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"] {
        let ones = (0..HIDDEN).flat_map(|_| 1_f32.to_le_bytes()).collect();
        tensor(format!("{name}.weight"), &[HIDDEN], 0, ones);
    }
    for (name, _, kind, columns, rows) in MATRICES {
        tensor(format!("blk.0.{name}.weight"), &[columns, rows], kind, blocks(kind, columns, rows));
    }
    let start = [b"GGUF".to_vec(), 3_u32.to_le_bytes().to_vec()].concat();
    let counts = [tensors.to_le_bytes(), keys.to_le_bytes()].concat();
    let mut file = [start, counts, metadata, table].concat();
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend(data);
    file
}

fn folder(file: &[u8]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("x.gguf"), file).unwrap();
    dir
}

#[test]
fn mlx_unpacks_what_blocks_of_every_kind_stand_for() {
    let dir = folder(&llama());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let mut count = |_| {};
    let mut weights = Weights::new(&checkpoint, LoadDtype::AsStored, TpShard::WHOLE, &mut count);
    for (_, name, kind, columns, rows) in MATRICES {
        let weight = weights.weight(&format!("model.layers.0.{name}")).unwrap();
        let Weight::Quantised(mut weight) = weight else { panic!("{name} is not packed") };
        let (scales, biases) = (weight.scales, weight.biases.unwrap());
        assert_eq!((scales.dtype(), biases.dtype()), (Dtype::Bfloat16, Dtype::Bfloat16), "{name}");
        let wide = |array: mlx_rs::Array| array.as_dtype(Dtype::Float32).unwrap();
        (weight.scales, weight.biases) = (wide(scales), Some(wide(biases)));
        let array = weight.dequantize(None).unwrap();
        let group_size = weight.quantization.group_size;
        assert_eq!(array.shape(), [rows as i32, columns as i32], "{name}");
        array.eval().unwrap();
        let found = array.as_slice::<f32>();
        let block = ElementType::of(kind).unwrap().block_type().unwrap();
        let mut expected = vec![0.0; (columns * rows) as usize];
        let raw = blocks(kind, columns, rows);
        for (raw, out) in
            raw.chunks_exact(block.block_bytes()).zip(expected.chunks_exact_mut(block.block_elements()))
        {
            decode(block, raw, out);
        }
        for (found, expected) in
            found.chunks_exact(group_size as usize).zip(expected.chunks_exact(group_size as usize))
        {
            // Half a step of eight bits, and what BF16 rounds of scale and bias.
            let largest = expected.iter().fold(0_f32, |largest, x| largest.max(x.abs()));
            let spread = expected.iter().fold(f32::MIN, |most, x| most.max(*x))
                - expected.iter().fold(f32::MAX, |least, x| least.min(*x));
            let most = spread / 500.0 + largest / 100.0 + 1e-6;
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() <= most, "{name}: {found} is not {expected} within {most}");
            }
        }
    }
}

#[test]
fn damaged_gguf_is_an_error_that_names_the_file() {
    let file = llama();
    let mut swapped = file.clone();
    swapped[4..8].copy_from_slice(&[0, 0, 0, 3]);
    for (file, said) in [
        (file[..file.len() - 1].to_vec(), "x.gguf is no usable GGUF file: tensor \"blk.0.ffn_down.weight\""),
        (file[..100].to_vec(), "ends beyond its 100 bytes"),
        (swapped, "it is big-endian"),
        (Vec::new(), "its magic of 4 bytes at 0 ends beyond its 0 bytes"),
    ] {
        let error = Checkpoint::open(folder(&file).path()).unwrap_err();
        assert!(error.is_refusal() && error.to_string().contains(said), "{said}: {error}");
    }
}
