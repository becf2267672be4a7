//! Damaged and mismatched model folders: each one is an error that names its object.

use std::path::Path;

use super::*;

/// A safetensors file with the given tensors, filled with zeros.
fn safetensors(tensors: &[(&str, &str, &[usize], usize)]) -> Vec<u8> {
    let mut offset = 0;
    let mut header = serde_json::Map::new();
    for (name, dtype, shape, bytes) in tensors {
        let entry =
            serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + bytes]});
        header.insert((*name).to_owned(), entry);
        offset += bytes;
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(vec![0; offset]);
    file
}

fn load(dir: &Path, dtype: LoadDtype, tensor: &str, shape: &[usize]) -> Result<(Array, u64), WeightsError> {
    let mut read = 0;
    let mut count = |bytes| read += bytes;
    let mut checkpoint = Checkpoint::open(dir)?;
    let array = Weights::new(&mut checkpoint, dtype, TpShard::WHOLE, &mut count).tensor(tensor, shape)?;
    Ok((array, read))
}

#[test]
fn only_the_requested_tensor_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let file = safetensors(&[("a", "F32", &[2], 8), ("b", "BF16", &[3, 2], 12)]);
    std::fs::write(dir.path().join(SINGLE), file).unwrap();
    let (array, read) = load(dir.path(), LoadDtype::AsStored, "b", &[3, 2]).unwrap();
    assert_eq!((array.dtype(), read), (Dtype::Bfloat16, 12));
    let (array, _) = load(dir.path(), LoadDtype::Float32, "b", &[3, 2]).unwrap();
    assert_eq!(array.dtype(), Dtype::Float32);
}

#[test]
fn damaged_files_are_errors_that_name_them() {
    let good = safetensors(&[("a", "F32", &[2], 8)]);
    let mut long = good.clone();
    long[7] = 0xff;
    for (file, said) in [
        (good[..good.len() - 1].to_vec(), "claims bytes 0..8 of 7"),
        (good[..20].to_vec(), "but its header needs"),
        (vec![1, 2, 3], "the file has 3 bytes, but its header needs 8"),
        (long, "more than the limit"),
        (safetensors(&[("b", "F32", &[2], 8)]), "tensor a is missing from"),
        (safetensors(&[("a", "F32", &[3], 12)]), "has shape [3], but config.json calls for [2]"),
        (safetensors(&[("a", "F64", &[2], 16)]), "element type F64"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(SINGLE), file).unwrap();
        let error = load(dir.path(), LoadDtype::AsStored, "a", &[2]).unwrap_err().to_string();
        assert!(error.contains(said), "{said}: {error}");
        assert!(error.contains(SINGLE), "{error}");
    }
}

#[test]
fn an_index_leads_to_plain_file_names_only() {
    for (index, said) in [
        (r#"{"weight_map":{"a":"../../etc/passwd"}}"#, "not a plain file name"),
        (r#"{"weight_map":{"a":"x.safetensors"}}"#, "x.safetensors"),
        (r#"{"weight_map":{}}"#, "tensor a is missing"),
        (r#"{}"#, "missing field"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(INDEX), index).unwrap();
        let error = load(dir.path(), LoadDtype::AsStored, "a", &[2]).unwrap_err().to_string();
        assert!(error.contains(said), "{index}: {error}");
    }
}

#[test]
fn packing_follows_from_the_shapes() {
    let entry =
        |dtype: &str, shape: &[usize]| Entry { dtype: dtype.into(), shape: shape.to_vec(), begin: 0, end: 0 };
    for (packed, scales, expected) in [
        ([8, 16], [8, 2], Some((64, 4))),
        ([8, 32], [8, 4], Some((32, 8))),
        ([8, 12], [8, 1], Some((128, 3))),
        ([8, 16], [8, 8], None),
        ([9, 16], [8, 2], None),
        ([8, 17], [8, 2], None),
        ([8, 16], [8, 0], None),
    ] {
        let found = packing("w", &entry("U32", &packed), &entry("F16", &scales), 8, 128).ok();
        assert_eq!(found, expected, "{packed:?} {scales:?}");
    }
    assert!(packing("w", &entry("U32", &[8, 16]), &entry("U8", &[8, 4]), 8, 128).is_err());
}

#[test]
fn rank_reads_its_shard_of_projections_and_whole_other_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let file = safetensors(&[
        ("l.q_proj.weight", "F32", &[4, 2], 32),
        ("l.q_proj.bias", "F32", &[4], 16),
        ("l.o_proj.weight", "F32", &[4, 4], 64),
        ("l.o_proj.bias", "F32", &[4], 16),
        ("m.o_proj.weight", "U32", &[8, 24], 768),
        ("m.o_proj.scales", "F16", &[8, 3], 48),
        ("m.o_proj.biases", "F16", &[8, 3], 48),
        ("n.up_proj.weight", "F32", &[3, 2], 24),
    ]);
    std::fs::write(dir.path().join(SINGLE), file).unwrap();
    let mut checkpoint = Checkpoint::open(dir.path()).unwrap();
    let slice = TpShard { index: 1, count: 2 };
    for (tensor, bytes) in
        [("l.q_proj.weight", 16), ("l.q_proj.bias", 8), ("l.o_proj.weight", 32), ("l.o_proj.bias", 16)]
    {
        assert_eq!(checkpoint.bytes(tensor, slice).unwrap(), bytes, "{tensor}");
    }
    let mut read = 0;
    let mut count = |bytes| read += bytes;
    let mut weights = Weights::new(&mut checkpoint, LoadDtype::AsStored, slice, &mut count);
    assert_eq!(weights.tensor("l.q_proj.weight", &[4, 2]).unwrap().shape(), [2, 2]);
    assert_eq!(weights.tensor("l.o_proj.weight", &[4, 4]).unwrap().shape(), [4, 2]);
    assert_eq!(weights.tensor("l.o_proj.bias", &[4]).unwrap().shape(), [4]);
    for (path, rows, columns, said) in [
        ("m.o_proj", 8, 192, "tensor m.o_proj.scales in"),
        ("m.o_proj", 8, 192, "3 groups per row, which 2 ranks cannot share evenly"),
        ("n.up_proj", 3, 2, "3 rows, which 2 ranks cannot share evenly; use a tensor size that divides 3"),
    ] {
        let error = weights.weight(path, rows, columns).unwrap_err().to_string();
        assert!(error.contains(said), "{said}: {error}");
    }
    assert_eq!(read, 64);
}
