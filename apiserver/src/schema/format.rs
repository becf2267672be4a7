//! The named string formats of schemas.
//!
//! Not here: number formats, which limit the range.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::LazyLock;

use regex::Regex;

/// Whether `text` matches `format`, as kube-apiserver decides; unknown formats match everything.
pub fn holds(format: &str, text: &str) -> bool {
    match format {
        "date-time" | "datetime" => is_date_time(text),
        "date" => is_date(text),
        "duration" => is_go_duration(text) || has_amount_of_time(text),
        "byte" => is_base64(text),
        "ipv4" => is_ipv4(text),
        "ipv6" => text.parse::<Ipv6Addr>().is_ok(),
        "cidr" => is_cidr(text),
        "hostname" => is_hostname(text),
        "k8s-short-name" => text.len() <= 63 && is_name(text),
        "k8s-long-name" => text.len() <= 253 && text.split('.').all(is_name),
        "uri" => URI.is_match(text),
        "email" => EMAIL.is_match(text),
        "mac" => MAC.is_match(text),
        "uuid" | "uuid3" | "uuid4" | "uuid5" => is_uuid(text, format),
        "isbn" => is_isbn10(text) || is_isbn13(text),
        "isbn10" => is_isbn10(text),
        "isbn13" => is_isbn13(text),
        "creditcard" => is_card_number(text),
        "ssn" => SSN.is_match(text),
        "hexcolor" => HEX_COLOR.is_match(text),
        "rgbcolor" => RGB_COLOR.is_match(text),
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

pattern!(URI, r"^([A-Za-z][A-Za-z0-9+.-]*:|/)([^%?\x00-\x1f\x7f]|%[0-9A-Fa-f]{2})*(\?[^\x00-\x1f\x7f]*)?$");
// With a name before it or without.
pattern!(EMAIL, r"^([^@<>]*<[^@\s<>]+@[^@\s<>]+>|[^@\s<>]+@[^@\s<>]+)$");
pattern!(MAC, r"^([0-9A-Fa-f]{2}[:-]){5}([0-9A-Fa-f]{2}[:-]){0,2}[0-9A-Fa-f]{2}$");
pattern!(UUID, r"^[0-9A-Fa-f]{8}-?[0-9A-Fa-f]{4}-?[0-9A-Fa-f]{4}-?[0-9A-Fa-f]{4}-?[0-9A-Fa-f]{12}$");
pattern!(HEX_COLOR, r"^#?([0-9A-Fa-f]{3}|[0-9A-Fa-f]{6})$");
pattern!(SSN, r"^[0-9]{3}[- ]?[0-9]{2}[- ]?[0-9]{4}$");
pattern!(
    RGB_COLOR,
    r"^rgb\([\t\n\f\r ]*(0|[1-9][0-9]?|1[0-9]{2}|2[0-4][0-9]|25[0-5])([\t\n\f\r ]*,[\t\n\f\r ]*(0|[1-9][0-9]?|1[0-9]{2}|2[0-4][0-9]|25[0-5])){2}[\t\n\f\r ]*\)$"
);
// Any sign may stand before the fraction.
pattern!(CLOCK, r"^([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](.[0-9]+)?(z|[+-][0-9]{2}:[0-9]{2})$");
// A letter or a symbol of any script, or a digit.
pattern!(HOST_LETTER, r"^[0-9A-Za-z\p{S}\p{L}]$");
// The issuers' prefixes and lengths.
pattern!(
    CARD,
    r"^(4[0-9]{12}([0-9]{3})?|(5[1-5][0-9]{2}|222[1-9]|22[3-9][0-9]|2[3-6][0-9]{2}|27[01][0-9]|2720)[0-9]{12}|3[47][0-9]{13}|3(0[0-5]|[68][0-9])[0-9]{11}|6(011|5[0-9]{2}|22[0-9])[0-9]{12,15}|(2131|1800|35[0-9]{3})[0-9]{11}|6[27][0-9]{14})$"
);
pattern!(AMOUNT, r"([0-9]+)[\t\n\f\r ]*([A-Za-zµ]+)");

fn is_date(text: &str) -> bool {
    let digits = text.bytes().enumerate().all(|(at, byte)| matches!(at, 4 | 7) || byte.is_ascii_digit());
    text.len() == 10 && digits && text.parse::<jiff::civil::Date>().is_ok()
}

/// RFC 3339; letters in either case.
fn is_date_time(text: &str) -> bool {
    let lower = text.to_lowercase();
    let mut parts = lower.split('t');
    let (Some(date), Some(clock)) = (parts.next(), parts.next()) else { return false };
    is_date(date) && CLOCK.is_match(clock)
}

/// Groups of four characters, the last padded.
fn is_base64(text: &str) -> bool {
    let data = text.strip_suffix("==").or_else(|| text.strip_suffix('=')).unwrap_or(text);
    !text.is_empty()
        && text.len().is_multiple_of(4)
        && data.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/'))
}

/// Four numbers of up to 255, in which leading zeros do not count.
fn is_ipv4(text: &str) -> bool {
    let number = |part: &str| {
        let digits = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        digits && part.trim_start_matches('0').len() <= 3 && part.parse::<u32>().is_ok_and(|it| it <= 255)
    };
    text.split('.').count() == 4 && text.split('.').all(number)
}

/// Labels of letters, digits, symbols and hyphens. As kube-apiserver has it, a single label has a hyphen only behind its
/// first character, and the last of several labels has two characters or more.
fn is_hostname(text: &str) -> bool {
    if text.len() > 255 || text.split('.').any(|label| label.len() > 63) {
        return false;
    }
    let is_letter = |letter: &char| HOST_LETTER.is_match(letter.encode_utf8(&mut [0; 4]));
    let labels: Vec<Vec<char>> = text.split('.').map(|label| label.chars().collect()).collect();
    let begins = |label: &[char]| label.first().is_some_and(is_letter);
    let ends = |label: &[char]| label.last().is_some_and(is_letter);
    let inner = |label: &[char]| label.iter().all(|letter| *letter == '-' || is_letter(letter));
    match labels.as_slice() {
        [] => false,
        [only] => {
            let rest = only.get(1..).unwrap_or_default();
            let rest = if rest.first() == Some(&'-') { &rest[1..] } else { rest };
            begins(only) && rest.iter().all(is_letter)
        }
        [before @ .., last] => {
            before.iter().all(|label| begins(label) && ends(label) && inner(label))
                && last.len() >= 2
                && begins(last)
                && ends(last)
                && inner(last)
                && !last.windows(2).any(|pair| pair == ['-', '-'])
        }
    }
}

/// A UUID; of a version, the digits that say so.
fn is_uuid(text: &str, format: &str) -> bool {
    let digits: Vec<u8> = text.to_ascii_lowercase().bytes().filter(|byte| *byte != b'-').collect();
    let version = match format {
        "uuid3" => Some((b'3', false)),
        "uuid4" => Some((b'4', true)),
        "uuid5" => Some((b'5', true)),
        _ => None,
    };
    UUID.is_match(text)
        && version.is_none_or(|(digit, variant)| {
            digits.get(12) == Some(&digit)
                && (!variant || digits.get(16).is_some_and(|it| matches!(it, b'8' | b'9' | b'a' | b'b')))
        })
}

/// The characters of an ISBN: blanks and hyphens do not count.
fn isbn_characters(text: &str) -> Vec<char> {
    text.chars().filter(|letter| !matches!(letter, '-' | ' ' | '\t' | '\n' | '\r' | '\x0c')).collect()
}

/// Nine digits and a check digit, ten being X: their sum weighted by place is a multiple of eleven.
fn is_isbn10(text: &str) -> bool {
    let letters = isbn_characters(text);
    let value = |(at, letter): (usize, &char)| match letter {
        'X' if at == 9 => Some(10),
        letter => letter.to_digit(10),
    };
    let digits: Option<Vec<u32>> = letters.iter().enumerate().map(value).collect();
    letters.len() == 10
        && digits.is_some_and(|digits| {
            (1..).zip(digits).map(|(weight, it)| weight * it).sum::<u32>().is_multiple_of(11)
        })
}

/// Thirteen digits: their sum, every second one tripled, is a multiple of ten.
fn is_isbn13(text: &str) -> bool {
    let letters = isbn_characters(text);
    let digits: Option<Vec<u32>> = letters.iter().map(|letter| letter.to_digit(10)).collect();
    letters.len() == 13
        && digits.is_some_and(|digits| {
            [1, 3]
                .into_iter()
                .cycle()
                .zip(digits)
                .map(|(weight, it)| weight * it)
                .sum::<u32>()
                .is_multiple_of(10)
        })
}

/// A card's number: an issuer's, with Luhn's check digit. Only digits count.
fn is_card_number(text: &str) -> bool {
    let digits: String = text.chars().filter(char::is_ascii_digit).collect();
    let doubled = |(at, digit): (usize, char)| {
        let digit = digit.to_digit(10).unwrap_or_default();
        if at.is_multiple_of(2) { digit } else { digit * 2 / 10 + digit * 2 % 10 }
    };
    CARD.is_match(&digits) && digits.chars().rev().enumerate().map(doubled).sum::<u32>().is_multiple_of(10)
}

/// An RFC 1123 label.
fn is_name(label: &str) -> bool {
    let edge = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let inner = |byte: u8| edge(byte) || byte == b'-';
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
        let unit = ["ns", "us", "µs", "μs", "ms", "s", "m", "h"].into_iter().find(|unit| {
            digits.strip_prefix(*unit).is_some_and(|after| !after.starts_with(char::is_alphabetic))
        });
        let Some(unit) = unit else { return false };
        rest = &digits[unit.len()..];
    }
    !text.is_empty() && !matches!(text, "+" | "-")
}

/// Whether a number with a unit of time occurs: `3 weeks`, `P1D`. The last name of each unit may go on (`hours`).
fn has_amount_of_time(text: &str) -> bool {
    const UNITS: &[&[&str]] = &[
        &["ns", "nano"],
        &["us", "µs", "micro"],
        &["ms", "milli"],
        &["s", "sec"],
        &["m", "min"],
        &["h", "hr", "hour"],
        &["d", "day"],
        &["w", "wk", "week"],
    ];
    let mut found = false;
    for amount in AMOUNT.captures_iter(text) {
        if amount[1].parse::<i64>().is_err() {
            return false;
        }
        let unit = amount[2].to_lowercase();
        let is_unit = |names: &&[&str]| {
            names.contains(&unit.as_str()) || names.last().is_some_and(|last| unit.starts_with(last))
        };
        found |= UNITS.iter().any(is_unit);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::holds;

    #[test]
    fn each_format_knows_its_spelling() {
        for (format, good, bad) in [
            ("date-time", "2026-11-21T08:00:00Z", "2026-11-21 08h"),
            ("date-time", "2026-11-21t08:00:00.1234567890+23:00", "2026-11-21 08:00:00Z"),
            ("date-time", "9999-12-31T23:59:59Z", "2026-11-21T08:00:60Z"),
            ("datetime", "2026-02-28T00:00:00-00:00", "2026-02-29T00:00:00Z"),
            ("date", "2026-11-21", "21.11.2026"),
            ("date", "0001-01-01", "2026-11-31"),
            ("duration", "1h30m", "90"),
            ("duration", "1.5s", "h"),
            ("duration", "3 weeks", "3 fortnights"),
            ("duration", "P1D", "P1Y"),
            ("duration", "2d", ""),
            ("byte", "aGk=", "a*"),
            ("byte", "aGl=", "aGk=\n"),
            ("ipv4", "10.0.0.1", "10.0.0.256"),
            ("ipv4", "01.2.3.004", "1.2.3"),
            ("ipv4", "255.255.255.255", "1.2.3.4.5"),
            ("ipv6", "fe80::1", "fe80:::1"),
            ("cidr", "10.0.0.0/8", "10.0.0.0/33"),
            ("hostname", "node-1.example.com", "-node"),
            ("hostname", "1.2.example.co", "a_b.example.com"),
            ("hostname", "bücher.example", "node-"),
            ("hostname", "x", "a..b"),
            ("isbn", "978-3-16-148410-0", "978-3-16-148410-1"),
            ("isbn10", "0-306-40615-2", "0-306-40615-3"),
            ("isbn10", "080442957X", "X804429570"),
            ("isbn13", "9783161484100", "0306406152"),
            ("creditcard", "4111 1111 1111 1111", "4111 1111 1111 1112"),
            ("creditcard", "378282246310005", "1234567890123452"),
            ("ssn", "111-22-3333", "11-222-3333"),
            ("ssn", "111223333", "111-22-333"),
            ("rgbcolor", "rgb(0, 100,255)", "rgb(0,100,256)"),
            ("rgbcolor", "rgb( 1,2,3 )", "#010203"),
            ("uuid3", "123e4567-e89b-32d3-a456-426614174000", "123e4567-e89b-12d3-a456-426614174000"),
            ("uuid4", "123e4567e89b42d3a456426614174000", "123e4567e89b42d3c456426614174000"),
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
