//! Output formats that a client can request (whole objects, metadata only, or a Table), and the responses
//! with them.

use std::convert::Infallible;

use bytes::{Bytes, BytesMut};
use futures::stream;
use http::header::{ACCEPT, CONTENT_TYPE, HeaderValue, WARNING};
use http::{HeaderMap, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use serde_json::{Map, Value, json};

use crate::kinds::resource::Resource;
use crate::object;
use crate::schema::values::cut;
use crate::status::{ApiError, Result};
use crate::table::{self, Include};

/// Every response body of this server.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Bytes of a list that are passed to the connection at once.
const CHUNK_BYTES: usize = 64 * 1024;

/// The requested format of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Unchanged.
    Object,
    /// Only their metadata.
    Metadata,
    /// As rows.
    Table,
}

impl Shape {
    /// The first shape in an Accept header that this server can send.
    pub fn negotiate(accept: &str) -> Result<Self> {
        if accept.trim().is_empty() {
            return Ok(Self::Object);
        }
        for range in accept.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let media = parts.next().unwrap_or_default();
            let (mut kind, mut version, mut group) = ("", "v1", "meta.k8s.io");
            for parameter in parts {
                match parameter.split_once('=') {
                    Some(("as", value)) => kind = value,
                    Some(("v", value)) => version = value,
                    Some(("g", value)) => group = value,
                    _ => {}
                }
            }
            if !matches!(media, "application/json" | YAML | "*/*" | "application/*") {
                continue;
            }
            match kind {
                "" => return Ok(Self::Object),
                "Table" if version == "v1" && group == "meta.k8s.io" => return Ok(Self::Table),
                "PartialObjectMetadata" | "PartialObjectMetadataList" if version == "v1" => {
                    return Ok(Self::Metadata);
                }
                _ => {}
            }
        }
        Err(Self::not_acceptable())
    }

    /// 406: none of the requested formats is supported.
    pub fn not_acceptable() -> ApiError {
        ApiError::new(
            StatusCode::NOT_ACCEPTABLE,
            "NotAcceptable",
            "only the following media types are accepted: application/json, application/yaml (also as=Table or as=PartialObjectMetadata of meta.k8s.io/v1)",
        )
    }
}

/// The metadata of an object, with the object's own kind.
pub fn metadata_only(object: &Value) -> Value {
    json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"]})
}

/// `includeObject` of a Table request.
pub fn parse_include(text: &str) -> Include {
    match text {
        "None" => Include::None,
        "Object" => Include::Object,
        _ => Include::Metadata,
    }
}

/// One object in the requested format.
pub fn to_shape(
    resource: &Resource,
    object: &Value,
    shape: Shape,
    include_object: &str,
    headings: bool,
) -> Value {
    match shape {
        Shape::Object => object.clone(),
        Shape::Metadata => metadata_only(object),
        Shape::Table => {
            let metadata = json!({"resourceVersion": object::resource_version(object)});
            let now = jiff::Timestamp::now();
            table::render(
                &resource.columns,
                &[object],
                metadata,
                parse_include(include_object),
                headings,
                now,
            )
        }
    }
}

/// A list whose items are encoded one by one as the client reads them: thousands of objects are never in
/// memory as one text. A short list is a single chunk.
pub fn list(
    api_version: &str,
    kind: &str,
    metadata: Map<String, Value>,
    items: impl Iterator<Item = Bytes> + Send + 'static,
) -> Response<Body> {
    let head = format!(
        "{{\"kind\":{},\"apiVersion\":{},\"metadata\":{},\"items\":[",
        json!(kind),
        json!(api_version),
        Value::Object(metadata)
    );
    let mut pieces = ListChunks { text: BytesMut::from(head.as_bytes()), items, first: true, ended: false };
    let begin = pieces.next().unwrap_or_default();
    if pieces.ended {
        return bytes(StatusCode::OK, begin);
    }
    let pieces = std::iter::once(begin).chain(pieces).map(|piece| Ok(Frame::data(piece)));
    let mut response = Response::new(StreamBody::new(stream::iter(pieces)).boxed_unsync());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The text of a list, chunk by chunk.
struct ListChunks<I> {
    /// Encoded text that was not passed on yet.
    text: BytesMut,
    items: I,
    first: bool,
    ended: bool,
}

impl<I: Iterator<Item = Bytes>> Iterator for ListChunks<I> {
    type Item = Bytes;

    fn next(&mut self) -> Option<Bytes> {
        if self.ended {
            return None;
        }
        while self.text.len() < CHUNK_BYTES {
            let Some(item) = self.items.next() else {
                self.text.extend_from_slice(b"]}\n");
                self.ended = true;
                break;
            };
            if !std::mem::take(&mut self.first) {
                self.text.extend_from_slice(b",");
            }
            self.text.extend_from_slice(&item);
        }
        Some(self.text.split().freeze())
    }
}

/// A response of JSON bytes.
pub fn bytes(code: StatusCode, body: Bytes) -> Response<Body> {
    let mut response = Response::new(Full::new(body).boxed_unsync());
    *response.status_mut() = code;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A response of a JSON value.
pub fn value(code: StatusCode, value: &Value) -> Response<Body> {
    bytes(code, Bytes::from(format!("{value}\n")))
}

/// A response of plain text.
pub fn text(code: StatusCode, text: impl Into<String>) -> Response<Body> {
    let mut response = bytes(code, Bytes::from(text.into()));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

/// The media type of YAML.
const YAML: &str = "application/yaml";

/// Whether a client asks for YAML before anything else that this server sends.
pub fn wants_yaml(headers: &HeaderMap) -> bool {
    let accept = headers.get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media = accept.split(',').map(|range| range.split(';').next().unwrap_or_default().trim());
    media.into_iter().find(|media| matches!(*media, "application/json" | YAML | "*/*" | "application/*"))
        == Some(YAML)
}

/// The largest response in bytes that is converted to YAML: what it is decoded to takes many times as much.
const MAX_YAML_BYTES: usize = 4 << 20;

/// The largest one that is converted between other requests.
const MAX_INLINE_YAML_BYTES: usize = 16 * 1024;

/// A response of JSON as YAML; other responses stay as they are.
pub async fn to_yaml(response: Response<Body>) -> Result<Response<Body>> {
    if response.headers().get(CONTENT_TYPE).is_none_or(|media| media != "application/json") {
        return Ok(response);
    }
    let (mut parts, body) = response.into_parts();
    let Ok(collected) = body.collect().await;
    let json = collected.to_bytes();
    if json.len() > MAX_YAML_BYTES {
        let message = format!(
            "the response has {} bytes, and YAML at most {MAX_YAML_BYTES}; ask for JSON, or for fewer objects with limit",
            json.len()
        );
        return Err(ApiError::new(http::StatusCode::NOT_ACCEPTABLE, "NotAcceptable", message));
    }
    let convert = {
        let json = json.clone();
        move || serde_norway::to_string(&serde_json::from_slice::<Value>(&json).ok()?).ok()
    };
    let text = if json.len() > MAX_INLINE_YAML_BYTES {
        tokio::task::spawn_blocking(convert).await.ok().flatten()
    } else {
        convert()
    };
    let body = match text {
        Some(text) => {
            parts.headers.insert(CONTENT_TYPE, HeaderValue::from_static(YAML));
            Bytes::from(text)
        }
        None => json,
    };
    Ok(Response::from_parts(parts, Full::new(body).boxed_unsync()))
}

/// The response of an error.
pub fn error(error: &ApiError) -> Response<Body> {
    let mut response = value(error.code, &error.to_value());
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(http::header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

/// Maximum bytes of all warnings of a response, as in Kubernetes: clients bound the heads they read.
const MAX_WARNING_BYTES: usize = 4096;

/// Adds `Warning` headers, as many as fit.
pub fn warn(response: &mut Response<Body>, warnings: &[String]) {
    let mut left = MAX_WARNING_BYTES;
    for warning in warnings {
        let mut warning = warning.clone();
        cut(&mut warning, MAX_WARNING_BYTES / 4);
        let Some(rest) = left.checked_sub(warning.len()) else { return };
        left = rest;
        let quoted = warning.replace('\\', "\\\\").replace('"', "\\\"").replace(['\n', '\r'], " ");
        if let Ok(value) = HeaderValue::from_str(&format!("299 - \"{quoted}\"")) {
            response.headers_mut().append(WARNING, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_list_of_any_length_is_one_whole_text() {
        for count in [0_usize, 1, 2, 5000] {
            let items = (0..count)
                .map(|index| Bytes::from(json!({"index": index, "fill": "x".repeat(50)}).to_string()));
            let response = list("v1", "ThingList", Map::new(), items);
            let text = response.into_body().collect().await.unwrap().to_bytes();
            let read: Value = serde_json::from_slice(&text).unwrap();
            let indices: Vec<u64> =
                read["items"].as_array().unwrap().iter().filter_map(|item| item["index"].as_u64()).collect();
            assert_eq!(indices, (0..count as u64).collect::<Vec<_>>());
        }
    }

    #[test]
    fn warnings_fit_into_a_head() {
        let mut response = value(StatusCode::OK, &json!({}));
        warn(&mut response, &vec!["x".repeat(3000); 100]);
        let warnings: Vec<&HeaderValue> = response.headers().get_all(WARNING).iter().collect();
        assert_eq!(warnings.len(), 3);
        assert!(warnings.iter().all(|warning| warning.len() < 1100));
    }

    #[test]
    fn the_first_shape_we_can_send_wins() {
        let kubectl = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";
        assert_eq!(Shape::negotiate(kubectl).unwrap(), Shape::Table);
        assert_eq!(
            Shape::negotiate("application/vnd.kubernetes.protobuf,application/json").unwrap(),
            Shape::Object
        );
        assert_eq!(Shape::negotiate("").unwrap(), Shape::Object);
        assert_eq!(
            Shape::negotiate("application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1").unwrap(),
            Shape::Metadata
        );
        assert!(Shape::negotiate("application/com.github.proto-openapi.spec.v2@v1.0+protobuf").is_err());
    }
}
