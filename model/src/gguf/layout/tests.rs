//! Converted bytes: any range of them is that range of the whole.

use super::*;
use crate::gguf::{block_type::ElementType, names::ARCHITECTURES};

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
        (1, vec![2, 7], ValueType::Bf16),
        (0, vec![9], ValueType::F16),
    ] {
        let (layout, entries) = Layout::new(&ARCHITECTURES[0], &[tensor(kind, &shape)], value, None).unwrap();
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
    let (layout, _) = Layout::new(&ARCHITECTURES[0], &[tensor(0, &[4])], ValueType::F16, None).unwrap();
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
    let (layout, _) = Layout::new(gemma, &[norm], ValueType::F32, None).unwrap();
    let three = |_: u64, out: &mut [u8]| {
        out.chunks_exact_mut(4).for_each(|four| four.copy_from_slice(&3_f32.to_le_bytes()));
        Ok(())
    };
    let mut bytes = [0; 4];
    layout.read(4, &mut bytes, &three).unwrap();
    assert_eq!(f32::from_le_bytes(bytes), 2.0);
}
