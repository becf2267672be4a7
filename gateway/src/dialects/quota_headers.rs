//! What is left of a caller's quota, in OpenAI's headers; clients of other dialects look for them too.

use axum::http::{HeaderMap, HeaderName, HeaderValue};

use crate::duration::short_text;
use crate::keys::Quota;

const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit-requests");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining-requests");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset-requests");

/// Sets the headers.
pub(super) fn set_quota_headers(quota: &Quota, headers: &mut HeaderMap) {
    headers.insert(LIMIT, HeaderValue::from(quota.limit));
    headers.insert(REMAINING, HeaderValue::from(quota.remaining));
    if let Ok(reset) = HeaderValue::from_str(&short_text(quota.reset)) {
        headers.insert(RESET, reset);
    }
}
