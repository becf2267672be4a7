//! OpenAPI v2, as far as kubectl still needs it: a document without definitions.
//!
//! kubectl looks a kind up in v3 first. Only for an unknown kind it requests v2, in protobuf, and an error
//! there hides its real message (`no matches for kind …`). Schemas are served in v3 only.

/// The media type of the response. Clients send an `@` where this has a dot, because `@` is not allowed in
/// media types.
pub const PROTOBUF: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";

/// An empty document in protobuf. Field numbers are those of gnostic's `openapi.v2` Document (swagger 1, info
/// 2, paths 8) and Info (title 1, version 2).
pub fn document(version: &str) -> Vec<u8> {
    let info = [field(1, b"Kubernetes"), field(2, version.as_bytes())].concat();
    [field(1, b"2.0"), field(2, &info), field(8, b"")].concat()
}

/// A length-delimited field; every number and length here fits one byte.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![number << 3 | 2, bytes.len().min(127) as u8];
    out.extend_from_slice(&bytes[..bytes.len().min(127)]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_is_protobuf_with_the_fields_a_parser_demands() {
        assert_eq!(document("v1"), b"\x0a\x032.0\x12\x10\x0a\x0aKubernetes\x12\x02v1\x42\x00");
    }
}
