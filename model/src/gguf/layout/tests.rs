//! Converted bytes: any range of them is that range of the whole.

use super::*;
use crate::gguf::{architectures::ARCHITECTURES, block_type::ElementType};

fn conversion(architecture: &'static Architecture, value: ValueType) -> Conversion {
    Conversion { architecture, layers: 1, heads: None, value, anew: None }
}

fn tensor(kind: u32, shape: &[u64]) -> GgufTensor {
    let element = ElementType::of(kind).unwrap();
    let elements: u64 = shape.iter().product();
    let bytes = elements / element.block_elements() * element.block_bytes();
    GgufTensor { name: "blk.0.ffn_up.weight".to_owned(), shape: shape.to_vec(), element, begin: 32, bytes }
}

/// Bytes of a file, in which scales are of a usual size.
fn file(offset: u64, out: &mut [u8]) -> io::Result<()> {
    for (at, byte) in (offset..).zip(out) {
        *byte = ((at * at / 7 + at) % 64) as u8;
    }
    Ok(())
}

#[test]
fn ranges_are_those_of_the_whole() {
    for (kind, shape, value) in [
        (3, vec![4, 96], ValueType::Bf16),
        (2, vec![3, 64], ValueType::F32),
        (8, vec![5, 64], ValueType::F16),
        (6, vec![2, 64], ValueType::Bf16),
        (12, vec![2, 512], ValueType::Bf16),
        (14, vec![3, 256], ValueType::Bf16),
        (20, vec![2, 96], ValueType::F32),
        (39, vec![2, 96], ValueType::Bf16),
        (1, vec![2, 7], ValueType::Bf16),
        (0, vec![9], ValueType::F16),
    ] {
        let (layout, entries) =
            Layout::new(&conversion(&ARCHITECTURES[0], value), &[tensor(kind, &shape)]).unwrap();
        for (name, entry) in &entries {
            let mut whole = vec![0; entry.bytes() as usize];
            layout.read(entry.begin, &mut whole, &file).unwrap();
            let width = entry.dtype.bytes().unwrap();
            assert_eq!(entry.elements() * width, entry.bytes(), "{name}");
            let step = (width * 8).min(entry.bytes());
            for begin in (0..entry.bytes()).step_by(step as usize) {
                for end in [begin + step, entry.bytes()] {
                    let end = end.min(entry.bytes());
                    let mut part = vec![0; (end - begin) as usize];
                    layout.read(entry.begin + begin, &mut part, &file).unwrap();
                    assert_eq!(part, whole[begin as usize..end as usize], "{kind} {name} {begin}..{end}");
                }
            }
        }
        let end = entries.last().unwrap().1.end;
        assert!(layout.read(end, &mut [0], &file).is_err());
    }
}

#[test]
fn numbers_beyond_the_type_and_cut_files_are_errors() {
    let (layout, _) =
        Layout::new(&conversion(&ARCHITECTURES[0], ValueType::F16), &[tensor(0, &[4])]).unwrap();
    let wild = |_: u64, out: &mut [u8]| {
        out.chunks_exact_mut(4).for_each(|four| four.copy_from_slice(&1e30_f32.to_le_bytes()));
        Ok(())
    };
    let error = layout.read(0, &mut [0; 8], &wild).unwrap_err().to_string();
    assert!(
        error.contains("blk.0.ffn_up.weight has a number or a scale, 1e30, that F16 has no value for"),
        "{error}"
    );
    let cut = |_: u64, _: &mut [u8]| Err(io::ErrorKind::UnexpectedEof.into());
    assert_eq!(layout.read(0, &mut [0; 8], &cut).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn norms_are_stored_as_the_family_reads_them() {
    let gemma = ARCHITECTURES.iter().find(|own| own.name == "gemma3").unwrap();
    let norm = GgufTensor { name: "output_norm.weight".to_owned(), ..tensor(0, &[2]) };
    let (layout, _) = Layout::new(&conversion(gemma, ValueType::F32), &[norm]).unwrap();
    let three = |_: u64, out: &mut [u8]| {
        out.chunks_exact_mut(4).for_each(|four| four.copy_from_slice(&3_f32.to_le_bytes()));
        Ok(())
    };
    let mut bytes = [0; 4];
    layout.read(4, &mut bytes, &three).unwrap();
    assert_eq!(f32::from_le_bytes(bytes), 2.0);
}

#[test]
fn numbers_of_mxfp4_are_kept_in_mlx_order() {
    let (layout, entries) =
        Layout::new(&conversion(&ARCHITECTURES[0], ValueType::Bf16), &[tensor(39, &[1, 32])]).unwrap();
    let shapes: Vec<_> =
        entries.iter().map(|(_, entry)| (entry.dtype.clone(), entry.shape.clone())).collect();
    assert_eq!(shapes, [(Dtype::U32, vec![1, 4]), (BYTE, vec![1, 1])]);
    // An exponent, then numbers 0 and 16, 1 and 17, and so on.
    let block = |offset: u64, out: &mut [u8]| {
        let bytes: Vec<u8> = [130].into_iter().chain((0..16).map(|at| at | (15 - at) << 4)).collect();
        out.copy_from_slice(&bytes[offset as usize - 32..][..out.len()]);
        Ok(())
    };
    let mut bytes = [0; 17];
    layout.read(0, &mut bytes[..16], &block).unwrap();
    layout.read(16, &mut bytes[16..], &block).unwrap();
    let numbers: Vec<u8> = bytes[..16].iter().flat_map(|byte| [byte & 15, byte >> 4]).collect();
    let expected: Vec<u8> = (0..16).chain((0..16).rev()).collect();
    assert_eq!((numbers, bytes[16]), (expected, 130));
}

#[test]
fn corrections_of_scores_stay_in_32_bits() {
    let of = |name: &str| GgufTensor { name: name.to_owned(), ..tensor(0, &[2]) };
    let tensors = [of("blk.0.exp_probs_b.bias"), of("blk.0.attn_norm.weight")];
    let (_, entries) = Layout::new(&conversion(&ARCHITECTURES[0], ValueType::Bf16), &tensors).unwrap();
    let types: Vec<_> = entries.into_iter().map(|(_, entry)| entry.dtype).collect();
    assert_eq!(types, [Dtype::F32, Dtype::BF16]);
}

#[test]
fn heads_in_another_order_are_read_where_they_lie() {
    let qwen = ARCHITECTURES.iter().find(|own| own.name == "qwen35").unwrap();
    // Twelve rows of two groups: six heads of two rows, the first of each key head before the second ones.
    let gate = GgufTensor { name: "blk.0.attn_gate.weight".to_owned(), ..tensor(3, &[12, 64]) };
    let in_order = conversion(qwen, ValueType::Bf16);
    let (as_stored, entries) = Layout::new(&in_order, std::slice::from_ref(&gate)).unwrap();
    let heads = Some(crate::gguf::delta_net::tests::TWO_BY_THREE);
    let (reordered, others) = Layout::new(&Conversion { heads, ..in_order }, &[gate]).unwrap();
    let sources = [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11];
    for ((name, entry), (other, _)) in entries.iter().zip(&others) {
        assert_eq!(name, other);
        let [mut stored, mut found] = [(); 2].map(|()| vec![0; entry.bytes() as usize]);
        as_stored.read(entry.begin, &mut stored, &file).unwrap();
        reordered.read(entry.begin, &mut found, &file).unwrap();
        let row = stored.len() / 12;
        let expected: Vec<u8> = sources.iter().flat_map(|&at| stored[at * row..][..row].to_vec()).collect();
        assert_eq!(found, expected, "{name}");
        // Any range, from within a row to within another head.
        let (from, to) = (row / 2, row * 7 + row / 2);
        let mut part = vec![0; to - from];
        reordered.read(entry.begin + from as u64, &mut part, &file).unwrap();
        assert_eq!(part, expected[from..to], "{name}");
    }
    // Of a matrix whose columns are heads, half a group would belong to another one.
    let back = GgufTensor { name: "blk.0.ssm_out.weight".to_owned(), ..tensor(3, &[2, 96]) };
    let error = Layout::new(&Conversion { heads, ..in_order }, &[back]).unwrap_err();
    assert!(error.to_string().contains("heads of 2 elements are not whole groups of 32"), "{error}");
}

#[test]
fn layers_that_predict_further_tokens_are_left_out() {
    let further = GgufTensor { name: "blk.1.ffn_up.weight".to_owned(), ..tensor(3, &[2, 64]) };
    let unknown = GgufTensor { name: "blk.1.nextn.eh_proj.weight".to_owned(), ..tensor(3, &[2, 64]) };
    let (_, entries) =
        Layout::new(&conversion(&ARCHITECTURES[0], ValueType::Bf16), &[further, unknown]).unwrap();
    assert!(entries.is_empty());
}
