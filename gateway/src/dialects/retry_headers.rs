//! The headers by which the SDKs of OpenAI and Anthropic, which one generator makes, retry a request that failed.

use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;

/// Says on an error's response whether to retry, and after which time.
pub(super) fn set_retry_headers(response: &mut Response, retry_after: Option<Duration>) {
    let is_server_error = response.status().is_server_error();
    let headers = response.headers_mut();
    match retry_after {
        Some(wait) => {
            let ms = u64::try_from(wait.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(ms.div_ceil(1000).max(1)));
            // The SDKs prefer the header with milliseconds.
            headers.insert("retry-after-ms", HeaderValue::from(ms));
        }
        // The SDKs retry every 5xx without this header; here that would only delay the failure.
        None if is_server_error => {
            headers.insert(HeaderName::from_static("x-should-retry"), HeaderValue::from_static("false"));
        }
        None => {}
    }
}
