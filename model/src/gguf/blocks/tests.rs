//! Blocks of bytes that a formula gives, against the sums that PyPI's `gguf` 0.x decodes them to.

use super::*;

/// Type, where its halves stand, and first value, last value, sum, and sum weighted by position from 1 on.
type Case = (BlockType, &'static [usize], [f64; 4]);

const CASES: &[Case] = &[
    (BlockType::Q4_0, &[0], [-0.201416015625, 0.0, -1.74560546875, -29.541015625]),
    (BlockType::Q4_1, &[0, 2], [0.4285888671875, 0.2271728515625, 14.38623046875, 235.492919921875]),
    (BlockType::Q5_0, &[0], [0.067138671875, -1.07421875, -0.67138671875, -53.30810546875]),
    (BlockType::Q5_1, &[0, 2], [1.2342529296875, 0.6971435546875, 30.49951171875, 461.481689453125]),
    (BlockType::Q8_0, &[0], [-7.183837890625, -3.155517578125, -4.296875, -163.28125]),
    (BlockType::Q2K, &[80, 82], [2.215576171875, 1.0594482421875, 286.65283203125, 41609.093994140625]),
    (BlockType::Q3K, &[108], [5.438232421875, 1.07421875, -13.427734375, -7646.15478515625]),
    (BlockType::Q4K, &[0, 2], [17.1102294921875, 3.0457763671875, 3867.60546875, 433855.96484375]),
    (BlockType::Q5K, &[0, 2], [41.8172607421875, 6.6712646484375, 7867.99609375, 865305.18359375]),
    (BlockType::Q6K, &[208], [135.955810546875, 200.74462890625, 469.43359375, -22245.99609375]),
    (BlockType::Iq4Nl, &[0], [-2.349853515625, 0.067138671875, -21.820068359375, -394.10400390625]),
    (BlockType::Iq4Xs, &[0], [39.276123046875, -50.35400390625, -387.591552734375, -18866.7724609375]),
    (BlockType::Iq2Xxs, &[0], [-0.629425048828125, -1.007080078125, -38.7725830078125, -3702.336883544922]),
    (BlockType::Iq2Xs, &[0], [-0.738525390625, -3.969573974609375, -51.2603759765625, -5158.213806152344]),
    (BlockType::Iq2S, &[0], [-5.664825439453125, 1.678466796875, -117.43392944335938, -10175.025177001953]),
    (BlockType::Iq3Xxs, &[0], [-5.035400390625, -1.007080078125, -243.914794921875, -29947.036743164062]),
    (BlockType::Iq3S, &[0], [-9.063720703125, -4.632568359375, -498.30322265625, -50198.37646484375]),
    (BlockType::Iq1S, &[0], [0.830841064453125, -0.293731689453125, 13.6962890625, 1346.8017578125]),
    (BlockType::Iq1M, &[], [178.71875, 280.84375, -10825.25, 407478.75]),
    (BlockType::Mxfp4, &[], [0.125, 1.5, 1.0, -16.625]),
    (BlockType::F16, &[0], [0.067138671875, 0.067138671875, 0.067138671875, 0.067138671875]),
    (
        BlockType::Bf16,
        &[0],
        [2.8990143619012088e-12, 2.8990143619012088e-12, 2.8990143619012088e-12, 2.8990143619012088e-12],
    ),
];

#[test]
fn every_type_decodes_as_its_reference_does() {
    for &(kind, halves, expected) in CASES {
        let mut block: Vec<u8> = (0..kind.block_bytes()).map(|i| (i * i * 31 + i * 7 + 11) as u8).collect();
        for (number, &at) in halves.iter().enumerate() {
            (block[at], block[at + 1]) = (0x4c, if number == 0 { 0x2c } else { 0xa9 });
        }
        if kind == BlockType::Mxfp4 {
            block[0] = 125;
        }
        let mut out = vec![0.0; kind.block_elements()];
        decode(kind, &block, &mut out);
        let values = || out.iter().map(|&value| f64::from(value));
        let weighted = values().enumerate().map(|(at, value)| (at + 1) as f64 * value).sum::<f64>();
        let found = [f64::from(out[0]), f64::from(out[out.len() - 1]), values().sum::<f64>(), weighted];
        for (found, expected) in found.into_iter().zip(expected) {
            let near = (found - expected).abs() <= 1e-6 * expected.abs().max(1e-9);
            assert!(near, "{}: {found} is not {expected}", kind.name());
        }
    }
}

#[test]
fn numbers_of_64_bits_and_of_the_intermediate_type_decode() {
    let mut out = [0.0];
    decode(BlockType::F64, &1.5_f64.to_le_bytes(), &mut out);
    assert_eq!(out, [1.5]);
    let mut block = 0.5_f32.to_le_bytes().to_vec();
    block.extend((0..256).map(|at| at as u8));
    block.extend([0; 32]);
    let mut out = [0.0; 256];
    decode(BlockType::Q8K, &block, &mut out);
    assert_eq!((out[1], out[127], out[255]), (0.5, 63.5, -0.5));
}

#[test]
fn blocks_of_another_length_are_left_alone() {
    let mut out = [1.0; 32];
    decode(BlockType::Q8_0, &[0; 33], &mut out);
    decode(BlockType::Q8_0, &[0; 34], &mut out[..31]);
    assert_eq!(out, [1.0; 32]);
}
