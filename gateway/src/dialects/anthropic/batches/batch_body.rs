//! A batch as Anthropic shows it, and the URL of its results.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::header::HOST;
use axum::http::request::Parts;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::batches::{Batch, BatchStatus};
use crate::listen::Exposure;

/// Where the client sees this gateway: `https://host`. Empty where it does not say.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct BaseUrl(String);

impl<S: Sync> FromRequestParts<S> for BaseUrl {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self::of(parts))
    }
}

impl BaseUrl {
    fn of(parts: &Parts) -> Self {
        let text = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
        let Some(host) = text(HOST.as_str()).or_else(|| Some(parts.uri.authority()?.as_str())) else {
            return Self::default();
        };
        let scheme = match (text("x-forwarded-proto"), parts.extensions.get::<Exposure>()) {
            // A proxy of this machine says what its client speaks.
            (Some(scheme @ ("http" | "https")), _) => scheme,
            (_, Some(Exposure::Network)) => "https",
            (_, _) => "http",
        };
        Self(format!("{scheme}://{host}"))
    }
}

/// The batch in JSON.
pub(super) fn batch_body(batch: &Batch, BaseUrl(base): &BaseUrl) -> Value {
    let Batch { id, owner: _, dialect: _, input: _, output: _, errors: _, record } = batch;
    let time = |seconds: u64| {
        let time = Timestamp::from_second(seconds.cast_signed()).unwrap_or(Timestamp::UNIX_EPOCH);
        time.to_string()
    };
    let has_ended = record.status.has_ended();
    let of_end = |status: BatchStatus| if record.status == status { record.not_run() } else { 0 };
    // Anthropic counts the requests of a batch when it ends.
    let counts = if has_ended {
        json!({
            "processing": 0,
            "succeeded": record.completed,
            "errored": record.failed,
            "canceled": of_end(BatchStatus::Cancelled),
            "expired": of_end(BatchStatus::Expired),
        })
    } else {
        json!({"processing": record.total, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0})
    };
    json!({
        "id": id,
        "type": "message_batch",
        "processing_status": match record.status {
            _ if has_ended => "ended",
            BatchStatus::Cancelling => "canceling",
            _ => "in_progress",
        },
        "request_counts": counts,
        "created_at": time(record.created_at),
        "expires_at": time(record.expires_at),
        "ended_at": record.ended_at.filter(|_| has_ended).map(time),
        "cancel_initiated_at": record.cancelling_at.map(time),
        "archived_at": null,
        "results_url": has_ended.then(|| format!("{base}/v1/messages/batches/{id}/results")),
    })
}

#[cfg(test)]
mod tests {
    use axum::http::Request;

    use super::*;

    #[test]
    fn the_url_of_results_is_that_of_the_request() {
        for (headers, exposure, expected) in [
            (&[("host", "127.0.0.1:52415")][..], Exposure::Loopback, "http://127.0.0.1:52415"),
            (&[("host", "h:8443")], Exposure::Network, "https://h:8443"),
            (&[("host", "h"), ("x-forwarded-proto", "https")], Exposure::Loopback, "https://h"),
            (&[("host", "h"), ("x-forwarded-proto", "gopher")], Exposure::Loopback, "http://h"),
            (&[], Exposure::Network, ""),
        ] {
            let mut request = Request::builder().uri("/v1/messages/batches");
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            let (mut parts, ()) = request.extension(exposure).body(()).unwrap().into_parts();
            assert_eq!(BaseUrl::of(&parts), BaseUrl(expected.to_owned()), "{headers:?}");
            // HTTP/2 has the host in the URL.
            if headers.is_empty() {
                parts.uri = "https://h:1/v1/messages/batches".parse().unwrap();
                assert_eq!(BaseUrl::of(&parts), BaseUrl("https://h:1".to_owned()));
            }
        }
    }
}
