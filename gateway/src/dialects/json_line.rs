//! JSON text without line breaks, for events and lines that end at one. What repeats JSON of others as it came, such as the
//! schema of a client or the arguments of a model's call, has their line breaks between its values; in texts they are escaped.

use serde::Serialize;

/// Such text.
pub(super) fn json_line(value: &impl Serialize) -> Vec<u8> {
    let mut out = Vec::new();
    write_json_line(&mut out, value);
    out
}

/// Appends such text.
pub(super) fn write_json_line(out: &mut Vec<u8>, value: &impl Serialize) {
    let start = out.len();
    // Strings, numbers, lists and JSON of others: serialising them into memory cannot fail.
    let _ = serde_json::to_writer(&mut *out, value);
    let written = out.get_mut(start..).unwrap_or_default();
    written.iter_mut().filter(|byte| matches!(**byte, b'\n' | b'\r')).for_each(|byte| *byte = b' ');
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;

    #[test]
    fn a_line_has_no_break_whatever_a_client_sent() {
        let raw = "{\r\n  \"a\"\r: \"x\\r\\n\",\n\"b\": [\n]}";
        let text = json_line(&RawValue::from_string(raw.to_owned()).unwrap());
        assert_eq!(String::from_utf8(text).unwrap(), "{    \"a\" : \"x\\r\\n\", \"b\": [ ]}");
    }
}
