//! What became of a line: the response of its route, or that it did not run. A dialect writes it down.

use axum::body::Body;
use axum::http::StatusCode;
use axum::response::Response;
use http_body_util::{BodyExt as _, Limited};
use serde_json::value::RawValue;

/// Largest response that is kept: vectors of a full request in JSON.
const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// What became of a line.
#[derive(Debug)]
pub(crate) enum LineOutcome {
    /// Its route responded.
    Response {
        status: StatusCode,
        /// The id of the request.
        request_id: String,
        /// In one line.
        body: Box<RawValue>,
    },
    /// The batch was cancelled before.
    Cancelled,
    /// The time of the batch was over before.
    Expired,
}

impl LineOutcome {
    /// Whether the line has what it asked for.
    pub(super) fn is_success(&self) -> bool {
        matches!(self, Self::Response { status, .. } if status.is_success())
    }
}

/// A line and what became of it.
pub(crate) struct LineResult<'a> {
    /// Of the result itself.
    pub(crate) id: String,
    pub(crate) custom_id: &'a str,
    pub(crate) outcome: &'a LineOutcome,
}

/// Writes a result as a JSON text without line breaks.
pub(crate) type FormatResult = fn(&LineResult<'_>) -> Vec<u8>;

/// The response as it is kept.
pub(super) async fn outcome(response: Response, request_id: String) -> LineOutcome {
    let (parts, body) = response.into_parts();
    let (status, body) = match collect(body).await {
        Ok(body) => (parts.status, body),
        Err(message) => (StatusCode::INTERNAL_SERVER_ERROR, quoted(message)),
    };
    LineOutcome::Response { status, request_id, body }
}

async fn collect(body: Body) -> Result<Box<RawValue>, String> {
    let collected = Limited::new(body, MAX_RESPONSE_BYTES).collect().await.map_err(|_| {
        format!("the response is longer than the {} MiB that a batch keeps", MAX_RESPONSE_BYTES >> 20)
    })?;
    let bytes = collected.to_bytes();
    let value: Box<RawValue> =
        serde_json::from_slice(&bytes).map_err(|_| "the response is not JSON".to_owned())?;
    // In JSON line breaks stand between values alone.
    if value.get().contains(['\n', '\r']) {
        let text = value.get().replace(['\n', '\r'], " ");
        return RawValue::from_string(text).map_err(|error| error.to_string());
    }
    Ok(value)
}

fn quoted(message: String) -> Box<RawValue> {
    serde_json::value::to_raw_value(&serde_json::json!({"error": {"message": message}})).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_response_is_kept_as_one_line_of_json() {
        for (status, body, expected) in [
            (200, "{\"a\": \"x\\n\",\r\n \"b\": 1}", Ok("{\"a\": \"x\\n\",   \"b\": 1}")),
            (400, "{}", Ok("{}")),
            (200, "data: x", Err("not JSON")),
            (200, "", Err("not JSON")),
        ] {
            let response = Response::builder().status(status).body(Body::from(body)).unwrap();
            let LineOutcome::Response { status: kept, body, .. } = outcome(response, "r".into()).await else {
                panic!("{body}");
            };
            match expected {
                Ok(text) => assert_eq!((kept.as_u16(), body.get()), (status, text)),
                Err(words) => assert!(kept == 500 && body.get().contains(words), "{body}"),
            }
        }
    }
}
