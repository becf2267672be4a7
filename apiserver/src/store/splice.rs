//! Reads and edits stored JSON bytes without decoding them: lists and watches of thousands of objects need no
//! more.

use std::borrow::Cow;

use bytes::{BufMut, Bytes, BytesMut};
use serde::Deserialize;

/// The object with this revision as its `metadata.resourceVersion`; `None` when it has no metadata.
pub(super) fn with_resource_version(value: &[u8], revision: u64) -> Option<Bytes> {
    let at = metadata(value)?;
    let field = format!("\"resourceVersion\":\"{revision}\"");
    let comma = if value.get(at) == Some(&b'}') { "" } else { "," };
    let mut whole = BytesMut::with_capacity(value.len() + field.len() + comma.len());
    whole.put_slice(value.get(..at)?);
    whole.put_slice(field.as_bytes());
    whole.put_slice(comma.as_bytes());
    whole.put_slice(value.get(at..)?);
    Some(whole.freeze())
}

/// The object's `apiVersion`; empty when it has none.
pub(super) fn api_version(value: &[u8]) -> Box<str> {
    #[derive(Deserialize)]
    struct Head<'a> {
        #[serde(borrow, rename = "apiVersion")]
        api_version: Cow<'a, str>,
    }
    serde_json::from_slice::<Head<'_>>(value).map(|head| head.api_version.into()).unwrap_or_default()
}

/// The offset of the fields of the top-level `metadata`.
fn metadata(value: &[u8]) -> Option<usize> {
    let (mut at, mut depth) = (0_usize, 0_usize);
    while let Some(byte) = value.get(at) {
        match byte {
            b'"' => {
                let end = after_string(value, at)?;
                let named = value.get(at..end) == Some(b"\"metadata\"".as_slice());
                if depth == 1 && named && value.get(end..end + 2) == Some(b":{".as_slice()) {
                    return Some(end + 2);
                }
                at = end;
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.checked_sub(1)?,
            _ => {}
        }
        at += 1;
    }
    None
}

/// The offset after the string that begins here.
fn after_string(value: &[u8], begin: usize) -> Option<usize> {
    let mut at = begin + 1;
    loop {
        match value.get(at)? {
            b'\\' => at += 2,
            b'"' => return Some(at + 1),
            _ => at += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn revision_is_spliced_into_the_objects_own_metadata_only() {
        for object in [
            json!({"apiVersion": "v1", "metadata": {"name": "a"}}),
            json!({"apiVersion": "v1", "metadata": {}}),
            json!({"a": {"metadata": {"name": "inner"}}, "b": [{"metadata": {}}], "metadata": {"name": "x"}}),
            json!({"data": {"k": "\"metadata\":{ \\ \\\" }"}, "kind": "metadata", "metadata": {"labels": {}}}),
        ] {
            let text = object.to_string();
            let whole: Value =
                serde_json::from_slice(&with_resource_version(text.as_bytes(), 7).unwrap()).unwrap();
            let mut expected = object;
            expected["metadata"]["resourceVersion"] = json!("7");
            assert_eq!(whole, expected);
        }
        for broken in ["{}", "[]", "12", "{\"metadata\":[]}", "{\"metadata", "}}", ""] {
            assert!(with_resource_version(broken.as_bytes(), 7).is_none(), "{broken}");
        }
    }

    #[test]
    fn the_version_is_read_without_the_rest() {
        for (text, version) in [
            (r#"{"kind":"A","apiVersion":"example.com/v1","x":[1,{"apiVersion":"no"}]}"#, "example.com/v1"),
            (r#"{"kind":"A"}"#, ""),
            ("12", ""),
        ] {
            assert_eq!(&*api_version(text.as_bytes()), version);
        }
    }
}
