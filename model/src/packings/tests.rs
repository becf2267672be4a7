//! Files of every packing, and what they become, number by number and in any parts.

mod refusals;

use std::io;

use serde_json::{Value, json};

use super::{layout::Runs, *};
use crate::{
    safetensors::{Dtype, Entry},
    testing::{headers, llama},
    value_type::ValueType,
};

/// Name, dtype, shape and bytes.
type PlayedTensor = (&'static str, &'static str, Vec<u64>, Vec<u8>);

/// A file of these tensors, and what it is converted to.
struct PlayedFile {
    bytes: Vec<u8>,
    converted: ConvertedWeights,
}

fn document(settings: &Value) -> Document {
    let mut config = llama(1);
    config["quantization_config"] = settings.clone();
    Document::parse(config.to_string().as_bytes()).unwrap()
}

fn conversion(settings: &Value, tensors: &[PlayedTensor]) -> Result<Option<ConvertedWeights>, Error> {
    let described: Vec<_> =
        tensors.iter().map(|(name, dtype, shape, _)| ((*name).to_owned(), *dtype, shape.clone())).collect();
    convert(&document(settings), &headers(&described))
}

fn play(settings: &Value, tensors: &[PlayedTensor]) -> PlayedFile {
    let converted = conversion(settings, tensors).unwrap().unwrap();
    let described: Vec<_> =
        tensors.iter().map(|(name, dtype, shape, _)| ((*name).to_owned(), *dtype, shape.clone())).collect();
    let (header, size) = crate::testing::header(&described);
    let mut bytes = vec![0xee; 8 + header.len()];
    tensors.iter().for_each(|tensor| bytes.extend(&tensor.3));
    assert_eq!(bytes.len() as u64, size);
    PlayedFile { bytes, converted }
}

impl PlayedFile {
    fn entry(&self, name: &str) -> &Entry {
        self.converted.headers.get(name).unwrap_or_else(|| panic!("no {name}"))
    }

    fn file(&self, file: usize, offset: u64, out: &mut [u8]) -> io::Result<()> {
        assert_eq!(file, 0);
        let begin = offset as usize;
        let bytes = self.bytes.get(begin..begin + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(bytes);
        Ok(())
    }

    /// These bytes of the converted files, in windows of some `piece` bytes.
    fn read(&self, runs: Runs, piece: u64) -> io::Result<Vec<u8>> {
        let mut out = vec![0; (runs.length * runs.count) as usize];
        let read = |file: usize, offset: u64, out: &mut [u8]| self.file(file, offset, out);
        let Some(tensor) = self.converted.layout.tensor(0, runs.begin) else {
            let outs = out.chunks_mut(runs.length.max(1) as usize);
            runs.starts().zip(outs).try_for_each(|(start, out)| read(0, start, out))?;
            return Ok(out);
        };
        let mut rest = &mut out[..];
        for window in tensor.windows(runs, piece)? {
            let (own, others) = rest.split_at_mut(tensor.bytes(&window) as usize);
            tensor.read(&window, own, &read)?;
            rest = others;
        }
        assert!(rest.is_empty());
        Ok(out)
    }

    fn whole(&self, name: &str) -> Vec<u8> {
        let entry = self.entry(name);
        assert_eq!(entry.elements() * entry.dtype.bytes().unwrap(), entry.bytes(), "{name}");
        self.read(Runs::one(entry.begin, entry.bytes()), 1 << 20).unwrap()
    }

    fn numbers(&self, name: &str) -> Vec<f32> {
        let value = ValueType::of(&self.entry(name).dtype).unwrap();
        self.whole(name).chunks(value.bytes()).map(|bytes| value.read(bytes)).collect()
    }

    /// What an affine matrix stands for, row by row.
    fn unpacked(&self, path: &str, bits: usize) -> Vec<f32> {
        let (weight, scales) = (format!("{path}.weight"), format!("{path}.scales"));
        let own = &self.entry(&weight).shape;
        assert_eq!(self.entry(&weight).dtype, Dtype::U32);
        let columns = own[1] as usize * 32 / bits;
        let group = columns / self.entry(&scales).shape[1] as usize;
        let (scales, biases) = (self.numbers(&scales), self.numbers(&format!("{path}.biases")));
        let bytes = self.whole(&weight);
        (0..own[0] as usize * columns)
            .map(|at| {
                let integer = bytes[at * bits / 8] >> (at * bits % 8) & ((1_u16 << bits) - 1) as u8;
                scales[at / group] * f32::from(integer) + biases[at / group]
            })
            .collect()
    }

    /// That any part of every converted tensor is that part of the whole.
    fn check_parts(&self) {
        for (name, entry) in self.converted.headers.iter() {
            let (whole, width) = (self.whole(name), entry.dtype.bytes().unwrap());
            for begin in (0..entry.bytes()).step_by((width * 5) as usize) {
                for length in [width, width * 7, width * 40, entry.bytes()] {
                    let length = length.min(entry.bytes() - begin);
                    for piece in [1, 24, 1 << 20] {
                        let part = self.read(Runs::one(entry.begin + begin, length), piece).unwrap();
                        let expected = &whole[begin as usize..(begin + length) as usize];
                        assert_eq!(part, expected, "{name} {begin} {length} {piece}");
                    }
                }
            }
            let &[rows, columns] = &entry.shape[..] else { continue };
            // Columns of a rank, and every second row.
            let (row, half) = (columns * width, columns / 2 * width);
            let column_runs =
                [0, half].map(|from| Runs { begin: from, length: half, stride: row, count: rows });
            let row_runs = Runs { begin: 0, length: row, stride: 2 * row, count: rows.div_ceil(2) };
            for runs in column_runs.into_iter().chain([row_runs]) {
                let expected: Vec<u8> = runs
                    .starts()
                    .flat_map(|start| whole[start as usize..(start + runs.length) as usize].to_vec())
                    .collect();
                let own = Runs { begin: entry.begin + runs.begin, ..runs };
                for piece in [1, 64, 1 << 20] {
                    assert_eq!(self.read(own, piece).unwrap(), expected, "{name} {runs:?} {piece}");
                }
            }
        }
    }
}

fn words(words: impl IntoIterator<Item = u32>) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

fn values(value: ValueType, numbers: impl IntoIterator<Item = f32>) -> Vec<u8> {
    let mut out = Vec::new();
    value.write(&numbers.into_iter().collect::<Vec<_>>(), &mut out).unwrap();
    out
}

/// Integers of so many bits in words, the first in these places.
fn pack(integers: &[u32], bits: u32, lanes: &[u32]) -> Vec<u8> {
    words(
        integers.chunks(lanes.len()).map(|own| {
            own.iter().zip(lanes).fold(0, |word, (integer, lane)| word | integer << (lane * bits))
        }),
    )
}

const AWQ_LANES: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// An integer of an input and an output, its zero point and its scale.
fn integer(input: u64, output: u64, bits: u32) -> u32 {
    ((input * 7 + output * 5 + input * output / 3) % (1 << bits)) as u32
}

fn zero(group: u64, output: u64, bits: u32) -> u32 {
    ((group * 3 + output) % ((1 << bits) - 1)) as u32 + 1
}

fn scale(group: u64, output: u64) -> f32 {
    (group + 1) as f32 * 0.125 + output as f32 * 0.25
}

/// Every pair, the first of it slowest.
fn pairs(outer: u64, inner: u64) -> impl Iterator<Item = (u64, u64)> + Clone {
    (0..outer).flat_map(move |x| (0..inner).map(move |y| (x, y)))
}

fn scales(groups: u64, outputs: u64) -> Vec<u8> {
    values(ValueType::F16, pairs(groups, outputs).map(|(group, output)| scale(group, output)))
}

/// What they stand for, output by output, with biases of this type.
fn expected(
    inputs: u64,
    outputs: u64,
    bits: u32,
    value: ValueType,
    zero: impl Fn(u64, u64) -> u32,
) -> Vec<f32> {
    let number = |(output, input): (u64, u64)| {
        let (group, scale) = (input / 32, scale(input / 32, output));
        scale * integer(input, output, bits) as f32 + value.round(-(zero(group, output) as f32) * scale)
    };
    pairs(outputs, inputs).map(number).collect()
}

/// That a matrix stands for these numbers, and has them in all its parts.
fn check(settings: &Value, tensors: &[PlayedTensor], bits: usize, expected: &[f32]) {
    let played = play(settings, tensors);
    assert_eq!(played.unpacked("a", bits), expected, "{settings}");
    played.check_parts();
}

#[test]
fn blocks_of_fp8_become_bf16() {
    let settings = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]});
    let (rows, columns) = (130, 260);
    let known = [(0x38, 1.0), (0x40, 2.0), (0xb8, -1.0), (0x02, 1.0 / 256.0), (0x7e, 448.0)];
    let block_scales = [0.5, 1.5, 2.0, 3.0, 4.0, 5.0];
    let at = |(row, column): (u64, u64)| known[((row + column) % 5) as usize];
    let own = |place: (u64, u64)| at(place).1 * block_scales[(place.0 / 128 * 3 + place.1 / 128) as usize];
    let played = play(
        &settings,
        &[
            (
                "a.weight",
                "F8_E4M3",
                vec![rows, columns],
                pairs(rows, columns).map(|place| at(place).0).collect(),
            ),
            ("a.weight_scale_inv", "F32", vec![2, 3], values(ValueType::F32, block_scales)),
            ("b.weight", "F8_E4M3", vec![1, 3], vec![0x38, 0xb8, 0x40]),
            ("b.weight_scale_inv", "BF16", vec![], values(ValueType::Bf16, [0.25])),
            ("c.experts", "F8_E4M3", vec![2, 1, 2], vec![0x38, 0x40, 0x38, 0x40]),
            ("c.experts_scale_inv", "BF16", vec![2, 1, 1], values(ValueType::Bf16, [1.0, 3.0])),
            ("norm.weight", "BF16", vec![2], values(ValueType::Bf16, [7.0, 8.0])),
        ],
    );
    assert!(played.converted.headers.get("a.weight_scale_inv").is_none());
    let rounded = pairs(rows, columns).map(|place| ValueType::Bf16.round(own(place)));
    assert_eq!(played.numbers("a.weight"), rounded.collect::<Vec<_>>());
    assert_eq!(played.numbers("b.weight"), [0.25, -0.25, 0.5]);
    assert_eq!(played.numbers("c.experts"), [1.0, 2.0, 3.0, 6.0]);
    assert_eq!(played.numbers("norm.weight"), [7.0, 8.0]);
    played.check_parts();
}

#[test]
fn packed_integers_of_compressed_tensors_keep_their_numbers() {
    let (inputs, outputs, groups) = (64, 24, 2);
    for bits in [4, 8] {
        let (share, half) = (u64::from(32 / bits), 1 << (bits - 1));
        let lanes: Vec<u32> = (0..share as u32).collect();
        let settings = json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": bits, "type": "int", "group_size": 32}}}});
        let integers: Vec<u32> =
            pairs(outputs, inputs).map(|(output, input)| integer(input, output, bits)).collect();
        let own_scales = pairs(outputs, groups).map(|(output, group)| scale(group, output));
        let matrix = || -> Vec<PlayedTensor> {
            vec![
                ("a.weight_packed", "I32", vec![outputs, inputs / share], pack(&integers, bits, &lanes)),
                (
                    "a.weight_scale",
                    "BF16",
                    vec![outputs, groups],
                    values(ValueType::Bf16, own_scales.clone()),
                ),
                ("a.weight_shape", "I64", vec![2], vec![0; 16]),
            ]
        };
        check(
            &settings,
            &matrix(),
            bits as usize,
            &expected(inputs, outputs, bits, ValueType::Bf16, |_, _| half),
        );
        // Neighbouring outputs share words, group by group.
        let zeros = pairs(outputs / share, groups).map(|(word, group)| {
            let own = (0..share).map(|lane| zero(group, word * share + lane, bits) << (lane as u32 * bits));
            own.fold(0, |word, lane| word | lane)
        });
        let mut asymmetric = matrix();
        asymmetric.push(("a.weight_zero_point", "I32", vec![outputs / share, groups], words(zeros)));
        let own = expected(inputs, outputs, bits, ValueType::Bf16, |group, output| zero(group, output, bits));
        check(&settings, &asymmetric, bits as usize, &own);
    }
}

#[test]
fn awq_is_transposed_and_put_in_order() {
    let (inputs, outputs, groups) = (64, 16, 2);
    let integers: Vec<u32> =
        pairs(inputs, outputs).map(|(input, output)| integer(input, output, 4)).collect();
    let zeros: Vec<u32> = pairs(groups, outputs).map(|(group, output)| zero(group, output, 4)).collect();
    let settings = json!({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM"});
    let mut tensors = vec![
        ("a.qweight", "I32", vec![inputs, outputs / 8], pack(&integers, 4, &AWQ_LANES)),
        ("a.scales", "F16", vec![groups, outputs], scales(groups, outputs)),
        ("norm.weight", "BF16", vec![3], values(ValueType::Bf16, [1.0, -2.5, 3.0])),
    ];
    check(&settings, &tensors, 4, &expected(inputs, outputs, 4, ValueType::F16, |_, _| 8));
    tensors.push(("a.qzeros", "I32", vec![groups, outputs / 8], pack(&zeros, 4, &AWQ_LANES)));
    check(
        &settings,
        &tensors,
        4,
        &expected(inputs, outputs, 4, ValueType::F16, |group, output| zero(group, output, 4)),
    );
    // What is not packed is of the type of the scales.
    let played = play(&settings, &tensors);
    assert_eq!(played.entry("norm.weight").dtype, Dtype::F16);
    assert_eq!(played.numbers("norm.weight"), [1.0, -2.5, 3.0]);
    tensors[2] = ("norm.weight", "F32", vec![1], values(ValueType::F32, [1e6]));
    let played = play(&settings, &tensors);
    let entry = played.entry("norm.weight");
    let error = played.read(Runs::one(entry.begin, 2), 64).unwrap_err().to_string();
    assert!(error.contains("norm.weight has a number or a scale, 1e6, that F16 has no value for"), "{error}");
}

#[test]
fn gptq_is_transposed_and_its_zeros_raised() {
    let (inputs, outputs, groups) = (64, 16, 2);
    for (bits, format, raised) in
        [(4, json!(null), 1), (8, json!("gptq"), 1), (4, json!("gptq_v2"), 0), (8, json!("gptq_v2"), 0)]
    {
        let share = u64::from(32 / bits);
        let lanes: Vec<u32> = (0..share as u32).collect();
        let packed = pairs(inputs / share, outputs).map(|(word, output)| {
            let own =
                (0..share).map(|lane| integer(word * share + lane, output, bits) << (lane as u32 * bits));
            own.fold(0, |word, lane| word | lane)
        });
        let zeros: Vec<u32> =
            pairs(groups, outputs).map(|(group, output)| zero(group, output, bits) - raised).collect();
        let order = |flip: u32| words((0..inputs as u32).map(move |input| (input / 32) ^ flip));
        let settings = json!({"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": false,
            "checkpoint_format": format});
        let mut tensors = vec![
            ("a.qweight", "I32", vec![inputs / share, outputs], words(packed)),
            (
                "a.scales",
                "F32",
                vec![groups, outputs],
                values(ValueType::F32, pairs(groups, outputs).map(|(group, output)| scale(group, output))),
            ),
            ("a.qzeros", "I32", vec![groups, outputs / share], pack(&zeros, bits, &lanes)),
            ("a.g_idx", "I32", vec![inputs], order(0)),
        ];
        let numbers =
            expected(inputs, outputs, bits, ValueType::F32, |group, output| zero(group, output, bits));
        check(&settings, &tensors, bits as usize, &numbers);
        tensors[3].3 = order(1);
        let played = play(&settings, &tensors);
        let begin = played.entry("a.weight").begin;
        let error = played.read(Runs::one(begin, 4), 64).unwrap_err().to_string();
        assert!(error.contains("a.weight has input 0 in group 1 (g_idx), not in group 0"), "{error}");
    }
}

#[test]
fn files_of_another_packing_are_as_they_are() {
    let plain = [("a.weight", "BF16", vec![2], vec![0; 4])];
    assert_eq!(conversion(&json!({"quant_method": "mxfp4"}), &plain), Ok(None));
    let mut config = llama(1);
    config["quantization_config"] = json!({"quant_method": "fp8"});
    config["quantization"] = json!({"bits": 4, "group_size": 32});
    let document = Document::parse(config.to_string().as_bytes()).unwrap();
    let described = [("a.weight".to_owned(), "BF16", vec![2])];
    assert_eq!(convert(&document, &headers(&described)), Ok(None));
    let played = play(&json!({"quant_method": "fp8"}), &plain);
    assert_eq!(played.whole("a.weight"), [0; 4]);
}

#[test]
fn reads_that_are_no_whole_elements_are_errors() {
    let settings = json!({"quant_method": "fp8"});
    let mut played = play(
        &settings,
        &[
            ("a.weight", "F8_E4M3", vec![2, 2], vec![0x38; 4]),
            ("a.weight_scale_inv", "F32", vec![], values(ValueType::F32, [1e38])),
        ],
    );
    let begin = played.entry("a.weight").begin;
    for (runs, said) in [
        (Runs::one(begin + 1, 2), "no whole elements of a.weight"),
        (Runs::one(begin, 10), "no whole elements"),
        (Runs { begin, length: 2, stride: u64::MAX, count: 3 }, "no whole elements"),
        (Runs::one(begin, 4), "a.weight has a number or a scale, 1e38, that BF16 has no value for"),
    ] {
        let error = played.read(Runs { length: runs.length, ..runs }, 64).unwrap_err().to_string();
        assert!(error.contains(said), "{runs:?}: {error}");
    }
    played.bytes.truncate(begin as usize - 8);
    assert_eq!(played.read(Runs::one(begin, 4), 64).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}
