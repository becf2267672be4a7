//! The factors by which a GGUF file stretches the frequencies of a rotary embedding, one for each pair of a head. Phi's are
//! those of config.json. Llama 3's rule has four numbers, of which the file has none: three are the same for all its
//! models, the fourth is the largest factor.

use serde_json::{Value, json};

use super::{architectures::ROPE_FACTORS, refuse};
use crate::error::Unsupported;

/// Most bytes of the factors: those of heads of 1024.
pub(super) const MAX_BYTES: u64 = 4 * 512;
/// The context that Llama 3 was trained with before it was stretched.
const ORIGINAL: f32 = 8192.0;
/// The original context over this is the shortest wavelength that is stretched whole.
const LOW: f32 = 1.0;
/// The original context over this is the longest wavelength that is left as it is.
const HIGH: f32 = 4.0;
/// The least factor of a pair that is not rotated: over a billion tokens it turns by less than a number can tell.
const UNROTATED: f32 = 1e20;
/// How far a factor may be from the rule's: the file's were computed in 32 bits, in another order.
const TOLERANCE: f32 = 1e-3;

/// The factors of these bytes.
pub(super) fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// The share of pairs that are rotated, which come first, where the others are as good as not by an immense factor.
pub(super) fn share(bytes: &[u8]) -> Result<f64, Unsupported> {
    let factors = numbers(bytes);
    let rotated = factors.iter().take_while(|own| **own == 1.0).count();
    if let Some((at, found)) =
        factors.iter().enumerate().skip(rotated).find(|(_, own)| own.is_nan() || **own < UNROTATED)
    {
        let reason = format!(
            "factor {at} is {found}, and factors of such heads are 1 first and then at least {UNROTATED:e}"
        );
        return Err(refuse(ROPE_FACTORS, reason));
    }
    Ok(rotated as f64 / factors.len().max(1) as f64)
}

/// The scaling of `config.json` that has these factors; `None` where they change nothing.
pub(super) fn llama3(factors: &[u8], base: f32, head_dim: u64) -> Result<Option<Value>, Unsupported> {
    let factors = numbers(factors);
    if factors.len() as u64 * 2 != head_dim {
        let reason = format!("it has {} factors for heads of {head_dim}", factors.len());
        return Err(refuse(ROPE_FACTORS, reason));
    }
    let factor = factors.iter().copied().fold(0.0, f32::max);
    if factors.iter().all(|own| *own == 1.0) {
        return Ok(None);
    }
    for (at, found) in factors.iter().enumerate() {
        let wavelength = std::f32::consts::TAU * base.powf(2.0 * at as f32 / head_dim as f32);
        let smooth = ((ORIGINAL / wavelength - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
        let expected = 1.0 / ((1.0 - smooth) / factor + smooth);
        let is_near = (found - expected).abs() <= TOLERANCE * expected;
        if !is_near {
            let reason = format!(
                "factor {at} is {found}, and Llama 3's rule with a factor of {factor} gives {expected}"
            );
            return Err(refuse(ROPE_FACTORS, reason));
        }
    }
    Ok(Some(
        json!({"rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH,
                   "original_max_position_embeddings": ORIGINAL}),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_of_llama_3_give_its_scaling_and_others_none() {
        let rule = |factor: f32| {
            (0..64).map(move |at| {
                let wavelength = std::f32::consts::TAU * 500_000_f32.powf(at as f32 / 64.0);
                match wavelength {
                    long if long > 8192.0 => factor,
                    short if short < 2048.0 => 1.0,
                    between => {
                        let smooth = (8192.0 / between - 1.0) / 3.0;
                        1.0 / ((1.0 - smooth) / factor + smooth)
                    }
                }
            })
        };
        let bytes =
            |factors: &mut dyn Iterator<Item = f32>| factors.flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
        for factor in [8.0, 32.0] {
            let found = llama3(&bytes(&mut rule(factor)), 5e5, 128).unwrap().unwrap();
            assert_eq!(found["factor"], factor);
        }
        assert_eq!(llama3(&bytes(&mut [1.0; 64].into_iter()), 5e5, 128), Ok(None));
        for (factors, said) in [
            (bytes(&mut rule(8.0).map(|own| own + 0.1)), "Llama 3's rule"),
            (bytes(&mut [f32::NAN; 64].into_iter()), "factor 0 is NaN"),
            (bytes(&mut [2.0; 8].into_iter()), "8 factors for heads of 128"),
        ] {
            let error = llama3(&factors, 5e5, 128).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn factors_of_ones_and_immense_ones_are_a_share_and_others_none() {
        let bytes = |factors: &[f32]| factors.iter().copied().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
        assert_eq!(share(&bytes(&[1.0, 1e30, 1e30, 1e30])), Ok(0.25));
        assert_eq!(share(&bytes(&[1.0; 4])), Ok(1.0));
        for factors in [[1.0, 2.0], [1e30, 1.0], [1.0, f32::NAN]] {
            assert!(share(&bytes(&factors)).is_err(), "{factors:?}");
        }
    }
}
