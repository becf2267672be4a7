//! HTTP client of the store in the form that `object_store` requires. HTTP errors leave it as errors of their
//! own type, before they are retried or a message contains a signed URL. Redirects are not followed, because
//! a signed request is meant for the host it names.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use http_body_util::{BodyExt as _, Limited};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService,
};
use reqwest::header::{HeaderMap, RANGE};
use reqwest::{Method, StatusCode, Url};

use crate::store::source_client::{SourceClient, asked_pause};
use crate::store::web::loopback;
use crate::store::{Context, StoreError, web};

/// Bytes of an error response that are read for its code.
const MAX_ERROR_BYTES: usize = 16 << 10;
/// Maximum size of a response other than an object's range: a page of a listing has a thousand names of at
/// most 1 KB.
const MAX_PAGE_BYTES: usize = 16 << 20;

/// A client for one bucket.
#[derive(Clone, Debug)]
pub(super) struct ObjectHttpClient {
    client: SourceClient,
    /// Whether the user chose plain HTTP.
    allow_plain_http: bool,
}

/// An HTTP error response.
#[derive(Clone, Debug)]
struct HttpStatusError {
    status: StatusCode,
    headers: HeaderMap,
    /// Time for which the store wants no requests.
    pause: Duration,
    /// The store's error code, such as `NoSuchBucket`.
    code: Option<String>,
    /// Whether a token request failed, not a request for bytes.
    token: bool,
}

/// No connection.
#[derive(Debug)]
struct ConnectError(String);

impl fmt::Display for HttpStatusError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = self.code.as_deref().unwrap_or_default();
        write!(out, "HTTP {} {code}", self.status)
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl Error for HttpStatusError {}
impl Error for ConnectError {}

impl ObjectHttpClient {
    pub fn new(context: &Context, allow_plain_http: bool) -> Self {
        Self { client: context.client.clone(), allow_plain_http }
    }
}

impl HttpConnector for ObjectHttpClient {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for ObjectHttpClient {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let unreached = |detail: String| HttpError::new(HttpErrorKind::Unknown, ConnectError(detail));
        let (parts, body) = request.into_parts();
        let url = Url::parse(&parts.uri.to_string()).map_err(|error| unreached(error.to_string()))?;
        if url.scheme() != "https" && !self.allow_plain_http && !loopback(&url) {
            return Err(unreached(format!("{} is not encrypted", url.host_str().unwrap_or_default())));
        }
        let token = parts.method == Method::POST;
        let ranged = parts.headers.contains_key(RANGE);
        let mut asked = reqwest::Request::new(parts.method, url);
        *asked.headers_mut() = parts.headers;
        *asked.body_mut() = body.as_bytes().cloned().map(reqwest::Body::from);
        let sent = self.client.send(asked, false).await;
        let mut answer = sent.map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        let (status, pause) = (answer.status(), asked_pause(&answer));
        if !status.is_success() {
            let mut text = Vec::new();
            while let Ok(Some(chunk)) = answer.chunk().await {
                text.extend_from_slice(&chunk);
                if text.len() >= MAX_ERROR_BYTES {
                    break;
                }
            }
            let (headers, code) = (answer.headers().clone(), code(&String::from_utf8_lossy(&text)));
            return Err(HttpError::new(
                HttpErrorKind::Unknown,
                HttpStatusError { status, headers, pause, code, token },
            ));
        }
        let (parts, body) = http::Response::<reqwest::Body>::from(answer).into_parts();
        let broken = |detail: String| HttpError::new(HttpErrorKind::Interrupted, ConnectError(detail));
        let body = match ranged {
            true => HttpResponseBody::new(body.map_err(move |error| broken(web::causes(&error)))),
            false => HttpResponseBody::new(Limited::new(body, MAX_PAGE_BYTES).map_err(move |error| {
                broken(format!("{error} (of the {MAX_PAGE_BYTES} bytes that are read of such an answer)"))
            })),
        };
        Ok(HttpResponse::from_parts(parts, body))
    }
}

/// The code in `<Code>NoSuchBucket</Code>`, which all three providers use.
fn code(text: &str) -> Option<String> {
    let (_, rest) = text.split_once("<Code>")?;
    let (code, _) = rest.split_once("</Code>")?;
    let plain = !code.is_empty() && code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    plain.then(|| code.to_owned())
}

fn find_source<'a, T: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a T> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        cause = error.source();
    }
    None
}

/// The last cause, which alone contains no URL with its credentials.
pub(super) fn error_text(error: &(dyn Error + 'static)) -> String {
    let mut last = error;
    while let Some(cause) = last.source() {
        last = cause;
    }
    last.to_string()
}

/// The bucket's region according to S3, if that is why the request failed.
pub(super) fn region(error: &object_store::Error) -> Option<String> {
    let refusal: &HttpStatusError = find_source(error)?;
    let wrong = matches!(refusal.status, StatusCode::MOVED_PERMANENTLY | StatusCode::BAD_REQUEST);
    let region = refusal.headers.get("x-amz-bucket-region").filter(|_| wrong)?.to_str().ok()?;
    // It becomes part of a host name.
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (!region.is_empty() && region.bytes().all(plain)).then(|| region.to_owned())
}

/// Converts an error about `what`.
pub(super) fn store_error(what: &str, error: &object_store::Error) -> StoreError {
    let what = what.to_owned();
    if let Some(name) = find_source::<object_store::path::Error>(error) {
        let problem = format!("a name in its listing is no path ({name}); remove that object");
        return StoreError::BadUri { uri: what, problem };
    }
    match find_source::<StoreError>(error) {
        Some(StoreError::PrivateAddress { what }) => {
            return StoreError::PrivateAddress { what: what.clone() };
        }
        Some(StoreError::Busy { detail, after, .. }) => {
            return StoreError::busy(what, detail.clone(), *after);
        }
        // Its URL is left out: it may be signed.
        Some(StoreError::Unreachable { detail, .. }) => {
            return StoreError::Unreachable { what, detail: detail.clone() };
        }
        _ => {}
    }
    let Some(refusal) = find_source::<HttpStatusError>(error) else {
        return StoreError::Unreachable { what, detail: error_text(error) };
    };
    let detail = refusal.to_string().trim_end().to_owned();
    // Providers send these codes with statuses of another meaning.
    let forbidden = refusal.token && refusal.status.is_client_error()
        || matches!(
            refusal.code.as_deref(),
            Some("ExpiredToken" | "InvalidToken" | "TokenRefreshRequired" | "PublicAccessNotPermitted")
        );
    match refusal.status {
        _ if forbidden => StoreError::Forbidden { what, detail },
        StatusCode::PRECONDITION_FAILED => StoreError::Replaced { what },
        status => web::status_error(what, detail, status, refusal.pause),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_of_a_refusal_is_a_plain_word() {
        for (text, expected) in [
            ("<?xml?><Error><Code>NoSuchBucket</Code><Message>x</Message></Error>", Some("NoSuchBucket")),
            ("<Code></Code>", None),
            ("<Code>a b</Code>", None),
            ("<Code>endless", None),
            ("", None),
        ] {
            assert_eq!(code(text).as_deref(), expected, "{text}");
        }
    }
}
