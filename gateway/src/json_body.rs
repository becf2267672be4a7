//! Decodes JSON bodies within bounds. A body is scanned first, without building anything: it says how deep the body
//! nests, how many values it has, and so how much memory decoding takes. Not here: what the fields mean.

use std::borrow::Cow;

use axum::http::{HeaderMap, header};
use serde_json::Value;

use crate::error::{ErrorKind, GatewayError};

/// Maximum levels of maps and lists. A conversation has four, and schemas of tools some ten more.
const MAX_DEPTH: usize = 64;
/// Maximum values (maps, lists and what is in them): some 60,000 messages, as many as the API server takes.
const MAX_VALUES: usize = 200_000;
/// Bytes of a value in memory, with its share of the list it is in, which may be twice as long as it has to be.
const VALUE_BYTES: usize = 2 * size_of::<Value>();
/// Bytes of a map beside its values: the smallest node of a tree has room for eleven fields.
const MAP_BYTES: usize = 11 * (size_of::<String>() + size_of::<Value>());

/// What a body is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JsonScan {
    /// Bytes that its decoded values take at most.
    pub(crate) decoded_bytes: usize,
    /// Whether a string has half of a character outside the basic plane.
    lone_surrogates: bool,
}

impl JsonScan {
    /// Scans a body; an error if it is beyond the bounds, or is no JSON for a reason that its first bytes show. Whether
    /// it is JSON at all is seen when it is decoded.
    pub(crate) fn new(body: &[u8]) -> Result<Self, GatewayError> {
        check_encoding(body)?;
        let (mut depth, mut values, mut maps) = (0_usize, 1_usize, 0_usize);
        let mut lone_surrogates = false;
        let mut at = 0;
        while let Some(byte) = body.get(at) {
            at += 1;
            match byte {
                b'"' => {
                    let (end, lone) = string_end(body, at);
                    (at, lone_surrogates) = (end, lone_surrogates || lone);
                }
                b'[' | b'{' => {
                    depth += 1;
                    let first = body[at..].iter().find(|byte| !byte.is_ascii_whitespace());
                    values += usize::from(!matches!(first, Some(b']' | b'}')));
                    maps += usize::from(*byte == b'{');
                    if depth > MAX_DEPTH {
                        return Err(refused(format!(
                            "the body nests deeper than the {MAX_DEPTH} levels allowed"
                        )));
                    }
                }
                b']' | b'}' => depth = depth.saturating_sub(1),
                b',' => values += 1,
                _ => {}
            }
            if values > MAX_VALUES {
                return Err(refused(format!(
                    "the body has more than the {MAX_VALUES} values allowed; send fewer, longer messages"
                )));
            }
        }
        let decoded_bytes = values * VALUE_BYTES + maps * MAP_BYTES + body.len();
        Ok(Self { decoded_bytes, lone_surrogates })
    }

    /// Decodes the body that was scanned. Half a character becomes U+FFFD, as in a well-formed string of JavaScript:
    /// programs that cut texts by length send it, and it stays in their history.
    pub(crate) fn decode(self, body: &[u8]) -> Result<Value, GatewayError> {
        let body = body.strip_prefix(UTF8_BOM).unwrap_or(body);
        let body =
            if self.lone_surrogates { Cow::Owned(replace_surrogates(body)) } else { Cow::Borrowed(body) };
        serde_json::from_slice(&body).map_err(|error| refused(format!("the body is not JSON: {error}")))
    }
}

/// Checks what the headers say of a body's encoding.
pub(crate) fn check_headers(headers: &HeaderMap) -> Result<(), GatewayError> {
    let text =
        |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("").to_ascii_lowercase();
    let encoding = text(header::CONTENT_ENCODING);
    if !["", "identity"].contains(&encoding.trim()) {
        return Err(unsupported(&format!("compressed ({encoding})")));
    }
    let charset = text(header::CONTENT_TYPE);
    let charset = charset.split_once("charset=").map_or("", |(_, charset)| charset.trim_matches('"'));
    if charset.starts_with("utf-16") || charset.starts_with("utf-32") {
        return Err(unsupported(&format!("in {charset}")));
    }
    Ok(())
}

fn unsupported(what: &str) -> GatewayError {
    let message = format!("the body is {what}; send JSON in UTF-8, not compressed");
    GatewayError::new(ErrorKind::UnsupportedMediaType, message)
}

fn refused(message: String) -> GatewayError {
    GatewayError::new(ErrorKind::InvalidRequest, message)
}

const UTF8_BOM: &[u8] = b"\xef\xbb\xbf";

/// JSON is UTF-8 (RFC 8259); a body that shows another encoding by its first bytes is told so.
fn check_encoding(body: &[u8]) -> Result<(), GatewayError> {
    match body {
        [0x1f, 0x8b, ..] => Err(unsupported("compressed (gzip)")),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Err(unsupported("compressed (zstd)")),
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] | [0, _, ..] | [_, 0, ..] => {
            Err(unsupported("in UTF-16 or UTF-32"))
        }
        _ => Ok(()),
    }
}

/// Where the string that begins at `at` ends, after its quotation mark, and whether it has half a character.
fn string_end(body: &[u8], mut at: usize) -> (usize, bool) {
    let mut lone = false;
    while let Some(byte) = body.get(at) {
        at += 1;
        match byte {
            b'"' => break,
            b'\\' => match surrogate(body, at - 1) {
                Some(Surrogate::High) if matches!(surrogate(body, at + 5), Some(Surrogate::Low)) => at += 11,
                Some(_) => (at, lone) = (at + 5, true),
                None => at += 1,
            },
            _ => {}
        }
    }
    (at, lone)
}

enum Surrogate {
    High,
    Low,
}

/// The surrogate that the escape at `at` stands for.
fn surrogate(body: &[u8], at: usize) -> Option<Surrogate> {
    let escape = body.get(at..at + 6)?.strip_prefix(b"\\u")?;
    let unit = u16::from_str_radix(std::str::from_utf8(escape).ok()?, 16).ok()?;
    match unit {
        0xd800..=0xdbff => Some(Surrogate::High),
        0xdc00..=0xdfff => Some(Surrogate::Low),
        _ => None,
    }
}

/// The body with U+FFFD for every half of a character.
fn replace_surrogates(body: &[u8]) -> Vec<u8> {
    let mut body = body.to_vec();
    let mut at = 0;
    while at < body.len() {
        if body[at] != b'\\' {
            at += 1;
            continue;
        }
        match surrogate(&body, at) {
            Some(Surrogate::High) if matches!(surrogate(&body, at + 6), Some(Surrogate::Low)) => at += 12,
            Some(_) => {
                body[at..at + 6].copy_from_slice(b"\\ufffd");
                at += 6;
            }
            None => at += 2,
        }
    }
    body
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn decode(body: &[u8]) -> Result<Value, GatewayError> {
        JsonScan::new(body)?.decode(body)
    }

    #[test]
    fn half_a_character_becomes_the_replacement_character() {
        for (body, expected) in [
            (r#"["hi \ud83d"]"#, json!(["hi \u{fffd}"])),
            (r#"["\ud83d\ude00"]"#, json!(["😀"])),
            (r#"["\uD83D\uDE00 \ude00"]"#, json!(["😀 \u{fffd}"])),
            (r#"["\ud83d\ud83d\ude00"]"#, json!(["\u{fffd}😀"])),
            (r#"["\ude00\ud83d"]"#, json!(["\u{fffd}\u{fffd}"])),
            (r#"["\\ud83d"]"#, json!(["\\ud83d"])),
            (r#"["\\\ud83d\\"]"#, json!(["\\\u{fffd}\\"])),
            (r#"{"\udc00": "\ud83dx\n"}"#, json!({"\u{fffd}": "\u{fffd}x\n"})),
            ("\u{feff}[\"\\ud83d\"]", json!(["\u{fffd}"])),
        ] {
            assert_eq!(decode(body.as_bytes()), Ok(expected), "{body}");
        }
        for cut in [r#"["\ud83"#, r#"["\ud83d"#, r#"["\ud83d\"#, r#"["\ud83d\ud"#, r#"["\u+83d"]"#] {
            assert!(decode(cut.as_bytes()).is_err(), "{cut}");
        }
    }

    #[test]
    fn bodies_are_bounded_by_what_they_decode_to() {
        let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        let list = |item: &str, count: usize| format!("[{}]", vec![item; count].join(","));
        for (body, words) in [
            (nested(MAX_DEPTH), None),
            (nested(MAX_DEPTH + 1), Some("64 levels")),
            (r#"{"a":"#.repeat(MAX_DEPTH + 1), Some("64 levels")),
            (list("1", MAX_VALUES - 1), None),
            (list("1", MAX_VALUES), Some("200000 values")),
            (list("[]", MAX_VALUES), Some("200000 values")),
            (list(r#"{"":{}}"#, MAX_VALUES), Some("200000 values")),
            // What stands in a string is one value.
            (format!("[\"{}\"]", r#"[{,\""#.repeat(MAX_VALUES)), None),
        ] {
            let shown = &body[..body.len().min(20)];
            match (decode(body.as_bytes()), words) {
                (Ok(_), None) => {}
                (Err(error), Some(words)) => assert!(error.message.contains(words), "{shown}: {error}"),
                (got, words) => panic!("{shown}: {:?} {words:?}", got.map(|_| ())),
            }
        }
        let scan = |body: &str| JsonScan::new(body.as_bytes()).unwrap().decoded_bytes;
        let (maps, text) = (list(r#"{"":1}"#, 1000), format!("[\"{}\"]", "x".repeat(7000)));
        assert!(scan(&maps) > 1000 * MAP_BYTES && scan(&text) < 2 * text.len());
    }

    #[test]
    fn bodies_in_other_encodings_are_named() {
        let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
        for (body, word) in [
            (utf16("{\"a\": 1}"), "UTF-16"),
            ([&b"\xff\xfe"[..], &utf16("{}")].concat(), "UTF-16"),
            (b"\x1f\x8b\x08\x00".to_vec(), "gzip"),
        ] {
            let error = decode(&body).unwrap_err();
            assert_eq!(error.kind, ErrorKind::UnsupportedMediaType);
            assert!(error.message.contains(word), "{error}");
        }
        assert_eq!(decode(b"\xef\xbb\xbf{}"), Ok(json!({})));
    }
}
