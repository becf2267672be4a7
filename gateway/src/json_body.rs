//! Decodes JSON bodies within bounds. A body is scanned while it arrives, without building anything: it says how deep the
//! body nests, how many values it has, and so how much memory decoding takes. Not here: what the fields mean.

use std::borrow::Cow;

use axum::http::{HeaderMap, header};
use serde::Deserialize;
use serde_json::Value;

use crate::error::{ErrorKind, GatewayError};

/// Maximum levels of maps and lists. A conversation has four, and schemas of tools some ten more.
const MAX_DEPTH: usize = 64;
/// Maximum values (maps, lists and what is in them): some 60,000 messages, as many as the API server takes.
const MAX_VALUES: usize = 200_000;
/// Bytes of a value in memory: its place in a map, which may have twice as many as it needs, with the hash of its key and
/// its place in the order, and the least that the text of a key takes.
const VALUE_BYTES: usize = 2 * (size_of::<(u64, String, Value)>() + PLACE_BYTES) + 32;
/// Bytes of a map beside its values: the smallest one has room for three, and a little more.
const MAP_BYTES: usize = 3 * size_of::<(u64, String, Value)>() + 8 * PLACE_BYTES;
/// Bytes of a place in the table of a map.
const PLACE_BYTES: usize = 9;

/// What a body is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JsonScan {
    /// Bytes that its decoded values take at most.
    pub(crate) decoded_bytes: usize,
    /// Whether a string has half of a character outside the basic plane.
    lone_surrogates: bool,
}

/// Counts what a body is made of while it arrives.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct JsonBounds {
    position: Position,
    depth: usize,
    values: usize,
    maps: usize,
    /// Whether the last byte but for blanks opened a list or map.
    is_open: bool,
    is_begun: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Position {
    #[default]
    BetweenStrings,
    InString,
    AfterBackslash,
}

impl JsonBounds {
    /// Counts the next part; an error if the body is beyond the bounds, or is no JSON for a reason that its first bytes
    /// show. Whether it is JSON at all is seen when it is decoded.
    pub(crate) fn feed(&mut self, part: &[u8]) -> Result<(), GatewayError> {
        if !self.is_begun && !part.is_empty() {
            check_encoding(part)?;
            self.is_begun = true;
        }
        for byte in part {
            match (self.position, byte) {
                (Position::InString, b'"') => self.position = Position::BetweenStrings,
                (Position::InString, b'\\') => self.position = Position::AfterBackslash,
                (Position::InString, _) => {}
                (Position::AfterBackslash, _) => self.position = Position::InString,
                (Position::BetweenStrings, byte) => self.count(*byte)?,
            }
        }
        Ok(())
    }

    /// Counts a byte outside strings.
    fn count(&mut self, byte: u8) -> Result<(), GatewayError> {
        if byte.is_ascii_whitespace() {
            return Ok(());
        }
        let closes = matches!(byte, b']' | b'}');
        // The first value in a list or map; the others follow commas.
        self.values += usize::from(self.is_open && !closes);
        self.is_open = matches!(byte, b'[' | b'{');
        match byte {
            b'"' => self.position = Position::InString,
            b'[' | b'{' => {
                self.depth += 1;
                self.maps += usize::from(byte == b'{');
                if self.depth > MAX_DEPTH {
                    return Err(refused(format!(
                        "the body nests deeper than the {MAX_DEPTH} levels allowed"
                    )));
                }
            }
            _ if closes => self.depth = self.depth.saturating_sub(1),
            b',' => self.values += 1,
            _ => {}
        }
        // The body itself is one more.
        if self.values >= MAX_VALUES {
            return Err(refused(format!(
                "the body has more than the {MAX_VALUES} values allowed; send fewer, longer messages"
            )));
        }
        Ok(())
    }

    /// The scan of the whole body, every part of which was counted.
    pub(crate) fn finish(self, body: &[u8]) -> Result<JsonScan, GatewayError> {
        check_encoding(body)?;
        let decoded_bytes = (1 + self.values) * VALUE_BYTES + self.maps * MAP_BYTES + body.len();
        Ok(JsonScan { decoded_bytes, lone_surrogates: has_lone_surrogate(body) })
    }
}

impl JsonScan {
    /// Scans a body that is there.
    #[cfg(test)]
    pub(crate) fn new(body: &[u8]) -> Result<Self, GatewayError> {
        let mut bounds = JsonBounds::default();
        bounds.feed(body)?;
        bounds.finish(body)
    }

    /// Decodes the body that was scanned. Half a character becomes U+FFFD, as in a well-formed string of JavaScript:
    /// programs that cut texts by length send it, and it stays in their history.
    pub(crate) fn decode(self, body: &[u8]) -> Result<JsonBody<'_>, GatewayError> {
        let body = body.strip_prefix(UTF8_BOM).unwrap_or(body);
        let text =
            if self.lone_surrogates { Cow::Owned(replace_surrogates(body)) } else { Cow::Borrowed(body) };
        let value = serde_json::from_slice(&text);
        let value = value.map_err(|error| refused(format!("the body is not JSON: {error}")))?;
        Ok(JsonBody { value, text })
    }
}

/// A decoded body.
#[derive(Debug)]
pub(crate) struct JsonBody<'a> {
    /// Its values; the keys of maps are in the order of the body.
    pub(crate) value: Value,
    /// The JSON text that they are of.
    text: Cow<'a, [u8]>,
}

impl JsonBody<'_> {
    /// Reads the text again, for values that a model sees with their keys in the client's order.
    pub(crate) fn read<'a, T: Deserialize<'a>>(&'a self) -> Option<T> {
        serde_json::from_slice(&self.text).ok()
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

/// Whether a string has half of a character outside the basic plane.
fn has_lone_surrogate(body: &[u8]) -> bool {
    let mut at = 0;
    while let Some(next) = body.get(at..).and_then(|rest| rest.iter().position(|byte| *byte == b'\\')) {
        at += next;
        match surrogate(body, at) {
            Some(Surrogate::High) if matches!(surrogate(body, at + 6), Some(Surrogate::Low)) => at += 12,
            Some(_) => return true,
            None => at += 2,
        }
    }
    false
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
    use russet_tests::peak_memory;
    use serde_json::json;

    use super::*;

    fn decode(body: &[u8]) -> Result<Value, GatewayError> {
        JsonScan::new(body)?.decode(body).map(|body| body.value)
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
    fn bodies_in_parts_are_scanned_as_whole_ones() {
        let body = br#" {"a" : [ ] , "b\"]" : [1,[2 , {"c":"[,\\"}]], "d":{}} "#;
        let whole = JsonScan::new(body).unwrap();
        for size in 1..body.len() {
            let mut bounds = JsonBounds::default();
            body.chunks(size).for_each(|part| bounds.feed(part).unwrap());
            assert_eq!(bounds.finish(body).unwrap(), whole, "parts of {size} bytes");
        }
        // a, b, 1, a list, 2, a map, c, d, and the body.
        assert_eq!(whole.decoded_bytes, 9 * VALUE_BYTES + 3 * MAP_BYTES + body.len());
    }

    #[test]
    fn bodies_are_bounded_by_what_they_decode_to() {
        let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
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

    /// That a body decodes to no more bytes than were counted; in a process of its own, of this test.
    fn takes_no_more(test: &str, body: &str) {
        let test = format!("json_body::tests::{test}");
        let grown = peak_memory::growth(&test, || drop(std::hint::black_box(decode(body.as_bytes()))));
        let counted = JsonScan::new(body.as_bytes()).unwrap().decoded_bytes as u64;
        println!("{counted} bytes were counted");
        assert!(grown <= counted, "{} takes {grown} bytes, {counted} were counted", &body[..20]);
    }

    fn list(item: &str, count: usize) -> String {
        format!("[{}]", vec![item; count].join(","))
    }

    fn keyed(count: usize) -> String {
        let fields: Vec<String> = (0..count).map(|key| format!("\"{key:x}\":0")).collect();
        format!("{{{}}}", fields.join(","))
    }

    #[test]
    fn short_strings_take_no_more_than_was_counted() {
        takes_no_more("short_strings_take_no_more_than_was_counted", &list(r#""x""#, 190_000));
    }

    #[test]
    fn small_maps_take_no_more_than_was_counted() {
        takes_no_more("small_maps_take_no_more_than_was_counted", &list(r#"{"":1}"#, 90_000));
    }

    #[test]
    fn maps_of_five_take_no_more_than_was_counted() {
        takes_no_more("maps_of_five_take_no_more_than_was_counted", &list(&keyed(5), 30_000));
    }

    #[test]
    fn a_wide_map_takes_no_more_than_was_counted() {
        // Just past a power of two it has twice the room that it needs.
        takes_no_more("a_wide_map_takes_no_more_than_was_counted", &keyed(132_000));
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
