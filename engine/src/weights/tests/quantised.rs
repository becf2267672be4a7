//! Matrices of plain numbers that are packed while they are read: as MLX packs the whole, and for each rank its own share.

use mlx_rs::ops::concatenate;
use russet_model::load_quantization::LoadQuantization;

use super::{
    packed::{file, filled},
    *,
};

/// The plain numbers of the model's files, whose last projection is not packed.
fn folder() -> tempfile::TempDir {
    let mut all = tensors();
    all.retain(|tensor| !tensor.0.contains("down_proj"));
    all.push(("model.layers.0.mlp.down_proj.weight".into(), "BF16", vec![64, 192]));
    let filled: Vec<_> = all.into_iter().zip(1..).map(|(tensor, salt)| filled(tensor, salt)).collect();
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(CONFIG), config().to_string()).unwrap();
    std::fs::write(dir.path().join(SINGLE), file(&filled)).unwrap();
    dir
}

fn packed(checkpoint: &Checkpoint, path: &str, shard: TpShard) -> QuantizedWeight {
    let mut count = |_| {};
    let mut weights = Weights::new(checkpoint, LoadDtype::AsStored, shard, &mut count);
    match weights.weight(path).unwrap() {
        Weight::Quantised(weight) => weight,
        Weight::Plain(_) | Weight::QuantisedWide(_) => panic!("{path} is not packed"),
    }
}

fn parts(weight: &QuantizedWeight) -> [&Array; 3] {
    [&weight.packed, &weight.scales, weight.biases.as_ref().unwrap()]
}

#[test]
fn shares_packed_while_read_are_shares_of_the_whole() {
    let dir = folder();
    let plain = Checkpoint::open(dir.path()).unwrap();
    for (quantization, bits) in [(LoadQuantization::Int4, 4), (LoadQuantization::Int8, 8)] {
        let open = || Checkpoint::open_as(dir.path(), LoadDtype::AsStored, Some(quantization)).unwrap();
        let checkpoint = open();
        for (path, axis) in [
            ("model.embed_tokens", None),
            ("model.layers.0.self_attn.q_proj", Some(0)),
            ("model.layers.0.self_attn.o_proj", Some(1)),
            ("model.layers.0.mlp.up_proj", Some(0)),
            ("model.layers.0.mlp.down_proj", Some(1)),
        ] {
            let whole = packed(&checkpoint, path, TpShard::WHOLE);
            let mut count = |_| {};
            let mut weights = Weights::new(&plain, LoadDtype::AsStored, TpShard::WHOLE, &mut count);
            let numbers = weights.tensor(&format!("{path}.weight")).unwrap();
            assert_eq!((whole.quantization.bits, whole.quantization.group_size), (bits, 64));
            let expected = whole.quantization.quantize(&numbers).unwrap();
            let shares = [0, 1].map(|index| packed(&checkpoint, path, TpShard { index, count: 2 }));
            for (at, whole) in parts(&whole).into_iter().enumerate() {
                assert!(whole.eq_values(parts(&expected)[at]).unwrap(), "{path} {at}");
                let joined = match axis {
                    None => parts(&shares[0])[at].clone(),
                    Some(axis) => concatenate(&[parts(&shares[0])[at], parts(&shares[1])[at]], axis).unwrap(),
                };
                assert!(whole.eq_values(&joined).unwrap(), "{path} {at} of two ranks");
            }
        }
        // A row of 128 columns has two groups.
        let mut count = |_| {};
        let mut weights =
            Weights::new(&checkpoint, LoadDtype::AsStored, TpShard { index: 0, count: 4 }, &mut count);
        let error = weights.weight("model.layers.0.self_attn.o_proj").unwrap_err().to_string();
        assert!(error.contains("2 groups per row, which 4 ranks cannot share"), "{error}");
    }
}

#[test]
fn packed_files_refuse_to_be_packed_again() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(CONFIG), config().to_string()).unwrap();
    std::fs::write(dir.path().join(SINGLE), safetensors(&tensors())).unwrap();
    let opened = Checkpoint::open_as(dir.path(), LoadDtype::AsStored, Some(LoadQuantization::Int4));
    let error = opened.unwrap_err();
    assert!(error.is_refusal(), "{error}");
    let said =
        "down_proj.weight: it is packed already, as affine with 4 bits, and spec.engine.quantization is Int4";
    assert!(error.to_string().contains(said), "{error}");
}

#[test]
fn wide_products_are_those_of_float32_in_the_type_of_x() {
    let dir = folder();
    let open = |dtype| Checkpoint::open_as(dir.path(), dtype, Some(LoadQuantization::Int4)).unwrap();
    let (stored, wide) = (open(LoadDtype::AsStored), open(LoadDtype::AsStoredWide));
    let path = "model.layers.0.mlp.down_proj";
    let mut count = |_| {};
    let mut weights = Weights::new(&wide, LoadDtype::AsStoredWide, TpShard::WHOLE, &mut count);
    let wide = weights.weight(path).unwrap();
    assert!(matches!(wide, Weight::QuantisedWide(_)), "{wide:?}");
    let exact = packed(&stored, path, TpShard::WHOLE).dequantize(Some(Dtype::Float32)).unwrap();
    let x: Vec<f32> = (0..3 * 192).map(|at| ((at * 37 % 101) as f32 - 50.0) / 64.0).collect();
    let x = Array::from_slice(&x, &[3, 192]).as_dtype(Dtype::Bfloat16).unwrap();
    let expected = x.as_dtype(Dtype::Float32).unwrap().matmul(exact.swap_axes(-1, -2).unwrap()).unwrap();
    let found = wide.apply(&x).unwrap();
    assert_eq!((found.dtype(), found.shape()), (Dtype::Bfloat16, expected.shape()));
    // Both are rounded once, from float32: they differ by a unit in the last place at most, an eighth of a percent and twice that.
    let close = found.as_dtype(Dtype::Float32).unwrap().all_close(&expected, 0.008, 0.001, None).unwrap();
    assert!(close, "{found:?}\n{expected:?}");
    // The rows of an embedding are of the stored type, as ever.
    let rows = wide.rows(&Array::from_slice(&[1_i32], &[1])).unwrap();
    assert_eq!(rows.dtype(), Dtype::Bfloat16);
}
