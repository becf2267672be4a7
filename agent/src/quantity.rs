//! Byte counts as Kubernetes writes them: `64Gi`, `500M`, `1024`. Bytes only; no milli-units.

use thiserror::Error;

/// A text that is no byte count.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("`{0}` is no amount of bytes; write it like 64Gi, 1.5Ti or 500M")]
pub struct QuantityError(String);

/// Longest suffixes first, so that `Ki` is not read as `K`.
const UNITS: &[(&str, u64)] = &[
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("", 1),
];

/// The bytes of `64Gi` and the like.
pub fn parse(text: &str) -> Result<u64, QuantityError> {
    let wrong = || QuantityError(text.to_owned());
    let trimmed = text.trim();
    let (number, unit) = UNITS
        .iter()
        .find_map(|&(suffix, unit)| trimmed.strip_suffix(suffix).map(|number| (number, unit)))
        .ok_or_else(wrong)?;
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit).ok_or_else(wrong);
    }
    let plain = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let fraction: f64 = number.parse().map_err(|_| wrong())?;
    let bytes = fraction * unit as f64;
    if !plain || bytes >= u64::MAX as f64 {
        return Err(wrong());
    }
    Ok(bytes as u64)
}

/// Bytes for people: whole units where exact, else one decimal, such as `1.2Gi`.
pub fn format(bytes: u64) -> String {
    let (suffix, unit) = UNITS[..4]
        .iter()
        .rev()
        .find(|&&(_, unit)| bytes >= unit)
        .copied()
        .unwrap_or(("", 1));
    if bytes.is_multiple_of(unit) {
        format!("{}{suffix}", bytes / unit)
    } else {
        format!("{:.1}{suffix}", bytes as f64 / unit as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts_are_read_and_written_as_kubernetes_does() {
        for (text, bytes) in [
            ("64Gi", Some(64 << 30)),
            ("1.5Ki", Some(1536)),
            ("500M", Some(500_000_000)),
            ("12", Some(12)),
            ("", None),
            ("Gi", None),
            ("-1Gi", None),
            ("1e3Gi", None),
            ("inf", None),
            ("99999999999999Ti", None),
            ("64GB", None),
        ] {
            assert_eq!(parse(text).ok(), bytes, "{text}");
        }
        for (bytes, text) in [(0, "0"), (1023, "1023"), (64 << 30, "64Gi"), (1_300_000_000, "1.2Gi")] {
            assert_eq!(format(bytes), text);
        }
    }
}
