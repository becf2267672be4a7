//! Kubernetes quantities as whole bytes, and bytes as text. Not the full grammar: no exponents and no
//! fractions of a byte, because the schemas that use it allow neither.

use thiserror::Error;

/// A text that is not a quantity of bytes.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{text:?} is not a quantity of bytes; write a number and a unit, such as 64Gi or 500M")]
pub struct QuantityError {
    text: String,
}

const UNITS: [(&str, u64); 10] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("Pi", 1 << 50),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("P", 1_000_000_000_000_000),
];

/// Bytes of a quantity such as `64Gi`, `1.5Ti` or `1000`; fractions of a byte are dropped.
pub fn parse(text: &str) -> Result<u64, QuantityError> {
    let error = || QuantityError { text: text.to_owned() };
    let (number, unit) = UNITS
        .iter()
        .find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?, *unit)))
        .unwrap_or((text, 1));
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) || number.ends_with('.') {
        return Err(error());
    }
    // Nine digits after the point are a billionth of the unit; more would not change a realistic byte count,
    // and fewer would lose bytes of a fraction of a terabyte.
    let fraction = &fraction[..fraction.len().min(9)];
    let scale = 10_u128.pow(fraction.len() as u32);
    let whole: u128 = whole.parse().map_err(|_| error())?;
    let part: u128 = if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| error())? };
    let bytes = whole
        .checked_mul(u128::from(unit))
        .and_then(|bytes| bytes.checked_add(part * u128::from(unit) / scale))
        .ok_or_else(error)?;
    u64::try_from(bytes).map_err(|_| error())
}

/// Bytes as text: `14.2 GiB`.
pub fn show(bytes: u64) -> String {
    for (unit, name) in [(1_u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")] {
        if bytes >= unit {
            let tenths = (u128::from(bytes) * 10 + u128::from(unit) / 2) / u128::from(unit);
            return format!("{}.{} {name}", tenths / 10, tenths % 10);
        }
    }
    format!("{bytes} B")
}

/// Bytes as a Kubernetes quantity for display, with at most one decimal: `512Gi`, `1.5Gi`.
pub fn write(bytes: u64) -> String {
    for (unit, name) in [(1_u64 << 40, "Ti"), (1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")] {
        if bytes >= unit {
            let tenths = (u128::from(bytes) * 10 + u128::from(unit) / 2) / u128::from(unit);
            return match tenths % 10 {
                0 => format!("{}{name}", tenths / 10),
                tenth => format!("{}.{tenth}{name}", tenths / 10),
            };
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_exactly_or_refused() {
        for (text, bytes) in [
            ("0", Some(0)),
            ("1000", Some(1000)),
            ("64Gi", Some(64 << 30)),
            ("1.5Gi", Some(3 << 29)),
            ("0.5Ki", Some(512)),
            ("2k", Some(2000)),
            ("1T", Some(1_000_000_000_000)),
            ("16777215Ti", Some(16_777_215 << 40)),
            ("16777216Ti", None),
            ("", None),
            ("Gi", None),
            ("1.", None),
            (".5Gi", None),
            ("-1Gi", None),
            ("1e3", None),
            ("1 Gi", None),
            ("1.2.3Gi", None),
        ] {
            assert_eq!(parse(text).ok(), bytes, "{text:?}");
        }
    }

    #[test]
    fn bytes_are_shown_with_one_decimal() {
        for (bytes, shown, written) in [
            (0, "0 B", "0"),
            (1023, "1023 B", "1023"),
            (1536, "1.5 KiB", "1.5Ki"),
            (15_247_137_177, "14.2 GiB", "14.2Gi"),
            (512 << 30, "512.0 GiB", "512Gi"),
            (1 << 40, "1.0 TiB", "1Ti"),
        ] {
            assert_eq!(show(bytes), shown);
            assert_eq!(write(bytes), written);
        }
    }
}
