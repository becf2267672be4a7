//! JSON as Python's `json` writes and reads it, which is what the files around a model are written with: `NaN` and
//! `Infinity` are numbers there, and a byte order mark may stand in front. Headers of safetensors are plain JSON.

use std::borrow::Cow;

use serde::de::DeserializeOwned;

use crate::{error::FileError, lfs};

/// Numbers that JSON does not have, as Python writes them.
const NO_NUMBERS: [&str; 3] = ["NaN", "-Infinity", "Infinity"];
/// The byte order mark in UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Reads a JSON file of this name. What is no number becomes a text such as `"NaN"`: no reader takes it for one, and
/// where nothing reads it, it does no harm.
pub fn read<T: DeserializeOwned>(file: &str, bytes: &[u8]) -> Result<T, FileError> {
    if lfs::is_pointer(bytes) {
        return Err(FileError::LfsPointer { file: file.to_owned(), size: bytes.len() as u64 });
    }
    serde_json::from_slice(&plain(bytes)).map_err(|error| FileError::bad_json(file, &error.to_string()))
}

/// Plain JSON of the same values.
pub fn plain(bytes: &[u8]) -> Cow<'_, [u8]> {
    let bytes = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
    let mut out: Vec<u8> = Vec::new();
    // From here on nothing is copied yet.
    let (mut copied, mut at, mut in_text) = (0, 0, false);
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'\\' if in_text => at += 1,
            b'"' => in_text = !in_text,
            b'N' | b'I' | b'-' if !in_text => {
                let rest = &bytes[at..];
                if let Some(word) = NO_NUMBERS.iter().find(|word| rest.starts_with(word.as_bytes())) {
                    out.extend_from_slice(&bytes[copied..at]);
                    out.push(b'"');
                    out.extend_from_slice(word.as_bytes());
                    out.push(b'"');
                    at += word.len();
                    copied = at;
                    continue;
                }
            }
            _ => {}
        }
        at += 1;
    }
    if copied == 0 {
        return Cow::Borrowed(bytes);
    }
    out.extend_from_slice(&bytes[copied..]);
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn what_python_writes_is_read() {
        for (text, value) in [
            (
                r#"{"a": NaN, "b": [Infinity, -Infinity, -1]}"#,
                json!({"a": "NaN", "b": ["Infinity", "-Infinity", -1]}),
            ),
            ("\u{feff}{\"a\": 1}", json!({"a": 1})),
            (
                r#"{"NaN": "Infinity, \" NaN \\", "x": NaN}"#,
                json!({"NaN": "Infinity, \" NaN \\", "x": "NaN"}),
            ),
            (r#"{"I": "-Infinity"}"#, json!({"I": "-Infinity"})),
        ] {
            assert_eq!(read::<Value>("x", text.as_bytes()), Ok(value), "{text}");
        }
        assert!(matches!(plain(br#"{"a": "NaN"}"#), Cow::Borrowed(_)), "nothing to change");
    }

    #[test]
    fn what_python_refuses_is_refused() {
        for text in
            ["", "nan", "NaNa", "{\"a\": Infinit}", "\u{feff}\u{feff}{}", "{\"a\": NaN", "\"\\", "--Infinity"]
        {
            assert!(matches!(read::<Value>("x", text.as_bytes()), Err(FileError::BadJson { .. })), "{text}");
        }
        let pointer =
            read::<Value>("config.json", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n");
        assert!(matches!(pointer, Err(FileError::LfsPointer { .. })));
    }
}
