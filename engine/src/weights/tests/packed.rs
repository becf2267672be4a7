//! Weights in packings of others: converted of several files, and for each rank its own share.

use mlx_rs::ops::concatenate;

use super::*;

/// Name, dtype, shape and bytes.
pub(super) type FilledTensor = (String, &'static str, Vec<u64>, Vec<u8>);

pub(super) fn file(tensors: &[FilledTensor]) -> Vec<u8> {
    let shapes =
        tensors.iter().map(|(name, dtype, shape, _)| (name.clone(), *dtype, shape.clone())).collect();
    let mut file = safetensors(&shapes);
    let data: usize = tensors.iter().map(|tensor| tensor.3.len()).sum();
    file.truncate(file.len() - data);
    tensors.iter().for_each(|tensor| file.extend(&tensor.3));
    file
}

pub(super) fn filled((name, dtype, shape): (String, &'static str, Vec<u64>), salt: u64) -> FilledTensor {
    let bytes = shape.iter().product::<u64>() * width(dtype);
    // Small halves and floats, whatever their type: the exponent's bits are in the last byte.
    let byte = |at: u64| match (dtype, at % width(dtype)) {
        ("F16" | "F32" | "BF16", at) if at + 1 == width(dtype) => 0x2c,
        _ => ((at * 31 + salt) % 120) as u8,
    };
    (name, dtype, shape, (0..bytes).map(byte).collect())
}

/// Files of a model whose attention's matrices are packed: `part` gives the tensors of each.
fn files(part: impl Fn(&str, [u64; 2]) -> Tensors) -> Vec<(&'static str, Vec<u8>)> {
    let mut all = Tensors::new();
    for (name, dtype, shape) in tensors() {
        if name.contains("down_proj") {
            continue;
        }
        match (name.strip_suffix(".weight"), &shape[..]) {
            (Some(path), &[rows, columns]) if name.contains("self_attn") => {
                all.extend(part(path, [rows, columns]))
            }
            _ => all.push((name, dtype, shape)),
        }
    }
    all.push(("model.layers.0.mlp.down_proj.weight".into(), "F32", vec![64, 192]));
    let filled: Vec<FilledTensor> =
        all.into_iter().zip(1..).map(|(tensor, salt)| filled(tensor, salt)).collect();
    // In turn, so that what belongs together is in both.
    let half = |own: usize| {
        filled
            .iter()
            .enumerate()
            .filter(|(at, _)| at % 2 == own)
            .map(|(_, own)| own.clone())
            .collect::<Vec<_>>()
    };
    vec![
        ("model-00001-of-00002.safetensors", file(&half(0))),
        ("model-00002-of-00002.safetensors", file(&half(1))),
    ]
}

/// What the engine has of this shard of a matrix.
fn arrays(checkpoint: &Checkpoint, name: &str, shard: TpShard) -> Vec<Array> {
    let mut count = |_| {};
    let mut weights = Weights::new(checkpoint, LoadDtype::AsStored, shard, &mut count);
    match weights.weight(&format!("model.layers.0.self_attn.{name}")).unwrap() {
        Weight::Plain(array) => vec![array],
        Weight::Quantised(weight) | Weight::QuantisedWide(weight) => {
            vec![weight.packed, weight.scales, weight.biases.unwrap()]
        }
    }
}

#[test]
fn ranks_convert_their_shares_of_matrices_in_several_files() {
    let fp8 = |path: &str, [rows, columns]: [u64; 2]| -> Tensors {
        let blocks = vec![rows.div_ceil(128), columns.div_ceil(128)];
        vec![
            (format!("{path}.weight"), "F8_E4M3", vec![rows, columns]),
            (format!("{path}.weight_scale_inv"), "F32", blocks),
        ]
    };
    let integers = |path: &str, [rows, columns]: [u64; 2]| -> Tensors {
        vec![
            (format!("{path}.weight_packed"), "I32", vec![rows, columns / 8]),
            (format!("{path}.weight_scale"), "BF16", vec![rows, columns / 32]),
            (format!("{path}.weight_zero_point"), "I32", vec![rows / 8, columns / 32]),
        ]
    };
    let awq = |path: &str, [rows, columns]: [u64; 2]| -> Tensors {
        vec![
            (format!("{path}.qweight"), "I32", vec![columns, rows / 8]),
            (format!("{path}.qzeros"), "I32", vec![columns / 32, rows / 8]),
            (format!("{path}.scales"), "F16", vec![columns / 32, rows]),
        ]
    };
    let gptq = |path: &str, [rows, columns]: [u64; 2]| -> Tensors {
        vec![
            (format!("{path}.qweight"), "I32", vec![columns / 8, rows]),
            (format!("{path}.qzeros"), "I32", vec![columns / 32, rows / 8]),
            (format!("{path}.scales"), "F16", vec![columns / 32, rows]),
        ]
    };
    let compressed = json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4}}}});
    for (settings, files, dtypes) in [
        (json!({"quant_method": "fp8"}), files(fp8), vec![Dtype::Bfloat16]),
        (compressed, files(integers), vec![Dtype::Uint32, Dtype::Bfloat16, Dtype::Bfloat16]),
        (json!({"quant_method": "awq"}), files(awq), vec![Dtype::Uint32, Dtype::Float16, Dtype::Float16]),
        (
            json!({"quant_method": "gptq", "bits": 4}),
            files(gptq),
            vec![Dtype::Uint32, Dtype::Float16, Dtype::Float16],
        ),
    ] {
        let mut config = config();
        config["quantization_config"] = settings.clone();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(CONFIG), config.to_string()).unwrap();
        files.iter().for_each(|(name, bytes)| std::fs::write(dir.path().join(name), bytes).unwrap());
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        for (name, axis) in [("q_proj", 0), ("k_proj", 0), ("o_proj", 1)] {
            let whole = arrays(&checkpoint, name, TpShard::WHOLE);
            let shares = [0, 1].map(|index| arrays(&checkpoint, name, TpShard { index, count: 2 }));
            assert_eq!(whole.iter().map(Array::dtype).collect::<Vec<_>>(), dtypes, "{settings} {name}");
            for (at, whole) in whole.iter().enumerate() {
                let joined = concatenate(&[&shares[0][at], &shares[1][at]], axis).unwrap();
                assert!(joined.eq_values(whole).unwrap(), "{settings} {name} {at}");
                assert!(
                    whole.abs().unwrap().max(None).unwrap().item_cast::<f32>() > 0.0,
                    "{settings} {name} {at}"
                );
            }
        }
    }
}
