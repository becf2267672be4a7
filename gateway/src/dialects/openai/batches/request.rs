//! The body of `POST /v1/batches`.

use serde_json::{Map, Value};

use crate::dialects::openai::files::check_seconds;
use crate::dialects::values::shown;
use crate::error::{self, ErrorKind, GatewayError};

/// The paths that a batch may ask.
const ENDPOINTS: [&str; 4] = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"];
/// Limits of metadata: OpenAI's numbers.
const MAX_METADATA: usize = 16;
const MAX_METADATA_KEY_CHARS: usize = 64;
const MAX_METADATA_VALUE_CHARS: usize = 512;

/// What a batch is asked for.
#[derive(Debug, PartialEq)]
pub(super) struct BatchRequest {
    pub(super) endpoint: String,
    pub(super) input: String,
    pub(super) metadata: Option<Map<String, Value>>,
    pub(super) output_seconds: Option<u64>,
}

impl BatchRequest {
    pub(super) fn parse(body: Value) -> Result<Self, GatewayError> {
        let Value::Object(fields) = body else {
            return Err(GatewayError::new(ErrorKind::InvalidRequest, "the body must be a JSON object"));
        };
        let (mut endpoint, mut input, mut window) = (None, None, false);
        let (mut metadata, mut output_seconds) = (None, None);
        for (name, value) in fields {
            match (name.as_str(), value) {
                ("endpoint", Value::String(path)) if ENDPOINTS.contains(&path.as_str()) => {
                    endpoint = Some(path)
                }
                ("endpoint", value) => {
                    let message =
                        format!("`endpoint` must be one of {}, not {}", ENDPOINTS.join(", "), shown(&value));
                    return Err(GatewayError::field("endpoint", message));
                }
                ("input_file_id", Value::String(id)) if !id.is_empty() => input = Some(id),
                ("input_file_id", _) => {
                    return Err(GatewayError::field(
                        "input_file_id",
                        "`input_file_id` must be the id of a file",
                    ));
                }
                ("completion_window", Value::String(word)) if word == "24h" => window = true,
                ("completion_window", value) => {
                    let message = format!("`completion_window` must be 24h, not {}", shown(&value));
                    return Err(GatewayError::field("completion_window", message));
                }
                ("metadata" | "output_expires_after", Value::Null) => {}
                ("metadata", value) => metadata = Some(check_metadata(value)?),
                ("output_expires_after", value) => {
                    let seconds = value.get("seconds").and_then(Value::as_u64);
                    if value.get("anchor").is_none_or(|anchor| anchor != "created_at") {
                        let message = "`anchor` of `output_expires_after` must be created_at";
                        return Err(GatewayError::field("output_expires_after", message));
                    }
                    output_seconds = Some(check_seconds(seconds, "output_expires_after")?);
                }
                (_, _) => {
                    let shown = error::shown(&name);
                    let message = format!("`{shown}` is no field of a batch");
                    return Err(GatewayError::field(shown, message));
                }
            }
        }
        let missing = |field: &str| GatewayError::field(field, format!("`{field}` is missing"));
        let endpoint = endpoint.ok_or_else(|| missing("endpoint"))?;
        let input = input.ok_or_else(|| missing("input_file_id"))?;
        if !window {
            return Err(missing("completion_window"));
        }
        Ok(Self { endpoint, input, metadata, output_seconds })
    }
}

fn check_metadata(value: Value) -> Result<Map<String, Value>, GatewayError> {
    let invalid = || {
        let message = format!(
            "`metadata` must have at most {MAX_METADATA} texts of {MAX_METADATA_VALUE_CHARS} characters, with names of {MAX_METADATA_KEY_CHARS}"
        );
        GatewayError::field("metadata", message)
    };
    let Value::Object(fields) = value else { return Err(invalid()) };
    let fits = |(key, value): (&String, &Value)| {
        let is_text = value.as_str().is_some_and(|text| text.chars().count() <= MAX_METADATA_VALUE_CHARS);
        is_text && key.chars().count() <= MAX_METADATA_KEY_CHARS
    };
    if fields.len() <= MAX_METADATA && fields.iter().all(fits) { Ok(fields) } else { Err(invalid()) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_body_says_what_is_asked_or_is_refused_by_field() {
        let body = |more: Value| {
            let mut body =
                json!({"endpoint": "/v1/embeddings", "input_file_id": "f", "completion_window": "24h"});
            for (name, value) in more.as_object().unwrap() {
                body[name] = value.clone();
            }
            BatchRequest::parse(body)
        };
        let plain = || BatchRequest {
            endpoint: "/v1/embeddings".into(),
            input: "f".into(),
            metadata: None,
            output_seconds: None,
        };
        assert_eq!(body(json!({"metadata": null, "output_expires_after": null})), Ok(plain()));
        let metadata = json!({"a": "b"});
        let more =
            json!({"metadata": metadata, "output_expires_after": {"anchor": "created_at", "seconds": 3600}});
        let expected =
            BatchRequest { metadata: metadata.as_object().cloned(), output_seconds: Some(3600), ..plain() };
        assert_eq!(body(more), Ok(expected));
        for (more, field) in [
            (json!({"endpoint": "/v1/rerank"}), "endpoint"),
            (json!({"endpoint": null}), "endpoint"),
            (json!({"input_file_id": ""}), "input_file_id"),
            (json!({"input_file_id": 7}), "input_file_id"),
            (json!({"completion_window": "1h"}), "completion_window"),
            (json!({"metadata": {"a": 7}}), "metadata"),
            (json!({"metadata": {"a": "x".repeat(513)}}), "metadata"),
            (
                json!({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}),
                "output_expires_after",
            ),
            (json!({"output_expires_after": {"seconds": 3600}}), "output_expires_after"),
            (json!({"output_expires_after": 3600}), "output_expires_after"),
            (json!({"model": "m"}), "model"),
        ] {
            assert_eq!(body(more.clone()).unwrap_err().param.as_deref(), Some(field), "{more}");
        }
        for field in ["endpoint", "input_file_id", "completion_window"] {
            let mut body =
                json!({"endpoint": "/v1/embeddings", "input_file_id": "f", "completion_window": "24h"});
            body.as_object_mut().unwrap().remove(field);
            assert_eq!(BatchRequest::parse(body).unwrap_err().param.as_deref(), Some(field));
        }
    }
}
