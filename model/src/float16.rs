//! Numbers of 16 bits, as bits: IEEE 754's half (F16) and the upper half of a number of 32 bits (BF16).

/// The number of these bits of a half.
pub fn from_f16(bits: u16) -> f32 {
    let (sign, exponent, fraction) =
        (u32::from(bits >> 15), u32::from(bits >> 10 & 31), u32::from(bits & 1023));
    match exponent {
        // Subnormal: a whole number of 2⁻²⁴.
        0 => {
            let value = fraction as f32 / 16_777_216.0;
            if sign == 1 { -value } else { value }
        }
        31 => f32::from_bits(sign << 31 | 255 << 23 | fraction << 13),
        _ => f32::from_bits(sign << 31 | (exponent + 112) << 23 | fraction << 13),
    }
}

/// The nearest half, the even one of two; what is too large becomes infinite.
pub fn to_f16(value: f32) -> u16 {
    let sign = (value.to_bits() >> 16 & 0x8000) as u16;
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return sign | 0x7e00;
    }
    // Halfway between the largest half, 65504, and the one after it that there is not.
    if magnitude >= 65_520.0 {
        return sign | 0x7c00;
    }
    // Below the smallest normal number 2⁻¹⁴ halves are whole numbers of 2⁻²⁴.
    if magnitude < 1.0 / 16_384.0 {
        return sign | (magnitude * 16_777_216.0).round_ties_even() as u16;
    }
    let bits = magnitude.to_bits() - (112 << 23);
    // To the nearest, and a carry goes into the exponent as it should.
    let rounded = bits + 0xfff + (bits >> 13 & 1);
    sign | (rounded >> 13) as u16
}

/// The number of these bits of a BF16.
pub fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest BF16, the even one of two.
pub fn to_bf16(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7fc0;
    }
    let bits = value.to_bits();
    // A number near the largest carries into infinity.
    (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_the_way_there_and_back() {
        for bits in 0..=u16::MAX {
            let value = from_f16(bits);
            if value.is_nan() {
                assert!(from_f16(to_f16(value)).is_nan());
            } else {
                assert_eq!(to_f16(value), bits, "{value}");
            }
            let value = from_bf16(bits);
            assert!(value.is_nan() || to_bf16(value) == bits, "{value}");
        }
    }

    #[test]
    fn numbers_round_to_the_nearest_and_ties_to_even() {
        for (value, expected) in [
            (1.0 + 1.0 / 2048.0, 0x3c00),
            (1.0 + 3.0 / 2048.0, 0x3c02),
            (1.0 + 1.01 / 2048.0, 0x3c01),
            (65_519.0, 0x7bff),
            (65_520.0, 0x7c00),
            (-1e9, 0xfc00),
            (2.9e-8, 0x0000),
            (3.0e-8, 0x0001),
            (6.1e-5, 0x03ff),
        ] {
            assert_eq!(to_f16(value), expected, "{value}");
        }
        assert_eq!(to_bf16(1.0 + 1.0 / 256.0), 0x3f80);
        assert_eq!(to_bf16(1.0 + 3.0 / 256.0), 0x3f82);
        assert_eq!(from_bf16(to_bf16(f32::MAX)), f32::INFINITY);
    }
}
