//! The named string formats of schemas.
//!
//! Not here: number formats, which limit the range.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::LazyLock;

use base64::Engine as _;
use regex::Regex;

/// Whether `text` matches `format`; unknown formats match everything.
pub fn holds(format: &str, text: &str) -> bool {
    match format {
        "date-time" | "datetime" => text.parse::<jiff::Timestamp>().is_ok(),
        "date" => text.len() == 10 && text.parse::<jiff::civil::Date>().is_ok(),
        "duration" => is_go_duration(text),
        "byte" => base64::engine::general_purpose::STANDARD.decode(text).is_ok(),
        "ipv4" => text.parse::<Ipv4Addr>().is_ok(),
        "ipv6" => text.parse::<Ipv6Addr>().is_ok(),
        "cidr" => is_cidr(text),
        "hostname" => text.len() <= 255 && text.trim_end_matches('.').split('.').all(is_host_label),
        "k8s-short-name" => text.len() <= 63 && is_name(text, false),
        "k8s-long-name" => text.len() <= 253 && text.split('.').all(|label| is_name(label, false)),
        "uri" => URI.is_match(text),
        "email" => EMAIL.is_match(text),
        "mac" => MAC.is_match(text),
        "uuid" | "uuid3" | "uuid4" | "uuid5" => UUID.is_match(text),
        "hexcolor" => HEX_COLOR.is_match(text),
        "bsonobjectid" => text.len() == 24 && text.bytes().all(|byte| byte.is_ascii_hexdigit()),
        _ => true,
    }
}

macro_rules! pattern {
    ($name:ident, $source:literal) => {
        static $name: LazyLock<Regex> = LazyLock::new(|| {
            Regex::new($source).expect("a literal pattern compiles; the tests use every one")
        });
    };
}

pattern!(URI, r"^([A-Za-z][A-Za-z0-9+.-]*:|/)\S*$");
pattern!(EMAIL, r"^[^@\s]+@[^@\s]+$");
pattern!(MAC, r"^([0-9A-Fa-f]{2}[:-]){5}([0-9A-Fa-f]{2}[:-]){0,2}[0-9A-Fa-f]{2}$");
pattern!(UUID, r"^[0-9A-Fa-f]{8}-?[0-9A-Fa-f]{4}-?[0-9A-Fa-f]{4}-?[0-9A-Fa-f]{4}-?[0-9A-Fa-f]{12}$");
pattern!(HEX_COLOR, r"^#?([0-9A-Fa-f]{3}|[0-9A-Fa-f]{6})$");

fn is_host_label(label: &str) -> bool {
    is_name(&label.to_ascii_lowercase(), true)
}

/// An RFC 1123 label.
fn is_name(label: &str, underscore: bool) -> bool {
    let edge = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let inner = |byte: u8| edge(byte) || byte == b'-' || (underscore && byte == b'_');
    let bytes = label.as_bytes();
    match (bytes.first(), bytes.last()) {
        (Some(first), Some(last)) => {
            label.len() <= 63 && edge(*first) && edge(*last) && bytes.iter().all(|byte| inner(*byte))
        }
        _ => false,
    }
}

fn is_cidr(text: &str) -> bool {
    let Some((address, bits)) = text.split_once('/') else { return false };
    let Ok(bits) = bits.parse::<u8>() else { return false };
    (address.parse::<Ipv4Addr>().is_ok() && bits <= 32)
        || (address.parse::<Ipv6Addr>().is_ok() && bits <= 128)
}

/// Go's notation: a sign, then numbers with units (`1h30m`, `1.5s`), or a bare zero.
fn is_go_duration(text: &str) -> bool {
    let mut rest = text.strip_prefix(['+', '-']).unwrap_or(text);
    if rest == "0" {
        return true;
    }
    while !rest.is_empty() {
        let digits = rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
        let number = &rest[..rest.len() - digits.len()];
        if number.parse::<f64>().is_err() {
            return false;
        }
        let unit = ["ns", "us", "µs", "μs", "ms", "s", "m", "h", "d", "w"].into_iter().find(|unit| {
            digits.strip_prefix(*unit).is_some_and(|after| !after.starts_with(char::is_alphabetic))
        });
        let Some(unit) = unit else { return false };
        rest = &digits[unit.len()..];
    }
    !text.is_empty() && !matches!(text, "+" | "-")
}

#[cfg(test)]
mod tests {
    use super::holds;

    #[test]
    fn each_format_knows_its_spelling() {
        for (format, good, bad) in [
            ("date-time", "2026-11-21T08:00:00Z", "2026-11-21 08h"),
            ("date", "2026-11-21", "21.11.2026"),
            ("duration", "1h30m", "90"),
            ("duration", "1.5s", "h"),
            ("byte", "aGk=", "a*"),
            ("ipv4", "10.0.0.1", "10.0.0.256"),
            ("ipv6", "fe80::1", "fe80:::1"),
            ("cidr", "10.0.0.0/8", "10.0.0.0/33"),
            ("hostname", "node-1.example.com", "-node"),
            ("k8s-short-name", "node-1", "Node"),
            ("k8s-long-name", "a.b-c", "a..b"),
            ("uri", "https://example.com/a", "example com"),
            ("email", "a@b.c", "a b"),
            ("mac", "00:1b:44:11:3a:b7", "00:1b"),
            ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123"),
            ("hexcolor", "#ff00aa", "red"),
            ("bsonobjectid", "507f1f77bcf86cd799439011", "507f"),
        ] {
            assert!(holds(format, good), "{format} takes {good}");
            assert!(!holds(format, bad), "{format} refuses {bad}");
        }
        assert!(holds("no-such-format", "anything"));
    }
}
