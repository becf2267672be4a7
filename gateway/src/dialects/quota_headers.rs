//! What is left of a caller's quota, in OpenAI's headers; clients of other dialects look for them too.

use axum::http::{HeaderMap, HeaderValue};

use crate::duration::short_text;
use crate::keys::Quota;

/// Sets the headers.
pub(super) fn set_quota_headers(quota: &Quota, headers: &mut HeaderMap) {
    headers.insert("x-ratelimit-limit-requests", HeaderValue::from(quota.limit));
    headers.insert("x-ratelimit-remaining-requests", HeaderValue::from(quota.remaining));
    if let Ok(reset) = HeaderValue::from_str(&short_text(quota.reset)) {
        headers.insert("x-ratelimit-reset-requests", reset);
    }
}
