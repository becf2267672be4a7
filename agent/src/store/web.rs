//! HTTP client of the store: ranges, redirects followed manually so that a token never leaves its own host,
//! and statuses converted into actionable errors.

use std::sync::Arc;
use std::time::Duration;

use reqwest::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_RANGE, ETAG, HeaderMap, HeaderValue,
    IF_RANGE, LOCATION, RANGE,
};
use reqwest::{Method, Request, Response, StatusCode, Url};

use super::StoreError;
use super::oci::Registry;
use super::source_client::{SourceClient, asked_pause, unreachable};
use super::verify::Digest;

/// Bytes that are skipped of a file that is sent whole: enough for headers.
const MAX_SKIPPED_BYTES: u64 = 1 << 20;
/// Maximum number of redirects; hubs use one or two.
const MAX_REDIRECTS: usize = 10;

/// A client with the credentials for one origin.
#[derive(Clone)]
pub(super) struct WebClient {
    client: SourceClient,
    home: Url,
    auth: WebAuth,
}

/// Credentials for an origin.
#[derive(Clone)]
enum WebAuth {
    /// The same header for every request, if any.
    Fixed(Option<HeaderValue>),
    /// A registry's challenge-response authentication.
    Registry(Arc<Registry>),
}

/// Options of a request.
#[derive(Clone, Copy, Default)]
struct RequestOptions<'a> {
    /// First byte, and last byte or the end.
    range: Option<(u64, Option<u64>)>,
    if_range: Option<&'a str>,
    accept: Option<&'a str>,
}

/// A response with a body, after all redirects.
pub(super) struct WebResponse {
    pub response: Response,
    /// Digest and size of the linked file, announced by any redirect.
    pub linked: LinkedFile,
}

/// A hub's announcement of the file behind a redirect.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct LinkedFile {
    pub size: Option<u64>,
    pub digest: Option<Digest>,
}

impl WebClient {
    /// A client that sends `token` to the origin of `home` only.
    pub fn new(client: &SourceClient, token: Option<&str>, home: &Url) -> Self {
        // A token that is not a valid header value is left out, and the origin reports the missing access.
        let auth = WebAuth::Fixed(token.and_then(|token| secret(&format!("Bearer {token}"))));
        Self { client: client.clone(), home: home.clone(), auth }
    }

    /// A client with credentials for the registry at `home`.
    pub fn registry(client: &SourceClient, registry: Registry, home: &Url) -> Self {
        Self { client: client.clone(), home: home.clone(), auth: WebAuth::Registry(Arc::new(registry)) }
    }

    /// GET, optionally of a range from `range.0` to `range.1` inclusive or to the end.
    pub async fn get(
        &self,
        url: &Url,
        range: Option<(u64, Option<u64>)>,
        if_range: Option<&str>,
    ) -> Result<WebResponse, StoreError> {
        self.request(url, RequestOptions { range, if_range, accept: None }).await
    }

    /// A whole document of at most `limit` bytes.
    pub async fn document(
        &self,
        url: &Url,
        accept: Option<&str>,
        limit: usize,
    ) -> Result<Vec<u8>, StoreError> {
        read_body(
            url,
            self.request(url, RequestOptions { accept, ..RequestOptions::default() }).await?.response,
            limit,
        )
        .await
    }

    async fn request(&self, url: &Url, asked: RequestOptions<'_>) -> Result<WebResponse, StoreError> {
        let RequestOptions { range, if_range, accept } = asked;
        let from_hub = self.client.is_hub(url);
        let mut url = url.clone();
        let mut linked = LinkedFile::default();
        let mut answered = false;
        for _ in 0..MAX_REDIRECTS {
            let mut request = get(&url);
            let headers = request.headers_mut();
            let home = self.home.origin() == url.origin();
            let shown = match &self.auth {
                _ if !home => None,
                WebAuth::Fixed(authorization) => authorization.clone(),
                WebAuth::Registry(registry) => registry.authorization(),
            };
            if let Some(authorization) = shown {
                headers.insert(AUTHORIZATION, authorization);
            }
            let to = |to: Option<u64>| to.map(|to| to.to_string()).unwrap_or_default();
            let range = range.map(|(from, end)| format!("bytes={from}-{}", to(end)));
            for (name, value) in [(ACCEPT, accept), (RANGE, range.as_deref()), (IF_RANGE, if_range)] {
                if let Some(value) = value.and_then(|value| HeaderValue::from_str(value).ok()) {
                    headers.insert(name, value);
                }
            }
            let response = self.client.send(request, from_hub).await?;
            linked = linked.or(LinkedFile::from_headers(response.headers()));
            if let WebAuth::Registry(registry) = &self.auth
                && home
                && response.status() == StatusCode::UNAUTHORIZED
                && !std::mem::replace(&mut answered, true)
                && registry.answer_challenge(&self.client, &self.home, response.headers()).await?
            {
                continue;
            }
            if response.status().is_redirection() {
                url = next(&url, &response)?;
                continue;
            }
            check(&url, &response)?;
            check_encoding(&url, response.headers())?;
            return Ok(WebResponse { response, linked });
        }
        Err(StoreError::Unreachable {
            what: url.to_string(),
            detail: format!("more than {MAX_REDIRECTS} redirects"),
        })
    }

    /// `length` bytes from `offset` on, of a file that is listed with `size` bytes.
    pub async fn read(&self, url: &Url, offset: u64, length: u64, size: u64) -> Result<Vec<u8>, StoreError> {
        let range = Some((offset, Some(offset + length - 1)));
        let mut response = self.get(url, range, None).await?.response;
        check_size(url, &response, size)?;
        // A server without range support sends the whole file: skip to the requested part, unless that is most of it.
        if response.status() != StatusCode::PARTIAL_CONTENT && offset > MAX_SKIPPED_BYTES {
            return Err(StoreError::NoRanges { what: url.to_string() });
        }
        let mut skip = if response.status() == StatusCode::PARTIAL_CONTENT { 0 } else { offset };
        let mut bytes: Vec<u8> = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| unreachable(url, &error))? {
            let dropped = skip.min(chunk.len() as u64);
            skip -= dropped;
            let left = length - bytes.len() as u64;
            let part = &chunk[dropped as usize..];
            bytes.extend_from_slice(&part[..part.len().min(left as usize)]);
            if bytes.len() as u64 == length {
                return Ok(bytes);
            }
        }
        Err(StoreError::Truncated {
            file: url.to_string(),
            got: offset + bytes.len() as u64,
            expected: offset + length,
        })
    }

    /// Size and digest of a file whose listing lacks them.
    pub async fn probe(&self, url: &Url) -> Result<LinkedFile, StoreError> {
        let answer = self.get(url, Some((0, Some(0))), None).await?;
        let size = total(&answer.response).or(answer.linked.size).ok_or_else(|| StoreError::Unreachable {
            what: url.to_string(),
            detail: "the server does not tell the size of the file".into(),
        })?;
        Ok(LinkedFile { size: Some(size), digest: answer.linked.digest })
    }
}

impl LinkedFile {
    fn from_headers(headers: &HeaderMap) -> Self {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let tag = text("x-linked-etag").or_else(|| headers.get(ETAG).and_then(|tag| tag.to_str().ok()));
        Self {
            size: text("x-linked-size").and_then(|size| size.parse().ok()),
            digest: tag.and_then(Digest::from_etag),
        }
    }

    fn or(self, other: Self) -> Self {
        Self { size: self.size.or(other.size), digest: self.digest.or(other.digest) }
    }
}

/// A GET request for the bytes as they are.
pub(super) fn get(url: &Url) -> Request {
    let mut request = Request::new(Method::GET, url.clone());
    request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    request
}

/// The whole body of a successful response, of at most `limit` bytes.
pub(super) async fn read_body(
    url: &Url,
    mut response: Response,
    limit: usize,
) -> Result<Vec<u8>, StoreError> {
    let mut bytes: Vec<u8> = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| unreachable(url, &error))? {
        if bytes.len() + chunk.len() > limit {
            let detail = format!("its answer has more than the {limit} bytes that are read of it");
            return Err(StoreError::Unreachable { what: url.to_string(), detail });
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

/// Whether a URL points to this machine itself.
pub(super) fn loopback(url: &Url) -> bool {
    match url.host_str() {
        Some("localhost") => true,
        Some(host) => {
            host.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
        }
        None => false,
    }
}

/// A sensitive header value, hidden in logs; `None` for invalid text.
pub(super) fn secret(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Total size of the file behind a response.
pub(super) fn total(response: &Response) -> Option<u64> {
    if matches!(response.status(), StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE) {
        let range = response.headers().get(CONTENT_RANGE)?.to_str().ok()?;
        return range.rsplit_once('/')?.1.parse().ok();
    }
    response.content_length()
}

/// Refuses a file of another size than listed.
pub(super) fn check_size(url: &Url, response: &Response, listed: u64) -> Result<(), StoreError> {
    match total(response) {
        Some(actual) if actual != listed => {
            Err(StoreError::WrongSize { what: url.to_string(), listed, actual })
        }
        _ => Ok(()),
    }
}

/// First byte of a partial response.
pub(super) fn start(response: &Response) -> Option<u64> {
    let range = response.headers().get(CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split_once('-')?.0.parse().ok()
}

fn next(url: &Url, response: &Response) -> Result<Url, StoreError> {
    let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
    let target = location.and_then(|location| url.join(location).ok());
    let refused = |detail: String| StoreError::Unreachable { what: url.to_string(), detail };
    let target = target.ok_or_else(|| refused("it redirects to nowhere".into()))?;
    if url.scheme() == "https" && target.scheme() != "https" {
        return Err(refused(format!("it redirects to {target}, which is not encrypted")));
    }
    Ok(target)
}

/// Refuses an error status.
pub(super) fn check(url: &Url, response: &Response) -> Result<(), StoreError> {
    match response.status() {
        StatusCode::OK | StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => Ok(()),
        status => {
            let pause = asked_pause(response);
            Err(status_error(url.to_string(), format!("HTTP {status}"), status, pause))
        }
    }
}

/// Refuses a body that is not the bytes of the file.
fn check_encoding(url: &Url, headers: &HeaderMap) -> Result<(), StoreError> {
    let encoding = headers.get(CONTENT_ENCODING).map(|encoding| String::from_utf8_lossy(encoding.as_bytes()));
    match encoding.filter(|encoding| !encoding.is_empty() && !encoding.eq_ignore_ascii_case("identity")) {
        None => Ok(()),
        Some(encoding) => Err(StoreError::Unreachable {
            what: url.to_string(),
            detail: format!(
                "it sends Content-Encoding {encoding:?} though the agent asks for identity; let the server send its files as they are"
            ),
        }),
    }
}

/// Converts an error status about `what`.
pub(super) fn status_error(what: String, detail: String, status: StatusCode, pause: Duration) -> StoreError {
    match status {
        StatusCode::NOT_FOUND | StatusCode::GONE => StoreError::NotFound { what, detail },
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => StoreError::Forbidden { what, detail },
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            StoreError::busy(what, detail, pause)
        }
        _ => StoreError::Unreachable { what, detail },
    }
}

/// The sources of an error of reqwest, whose own text contains the URL but not the reason.
pub(super) fn causes(error: &reqwest::Error) -> String {
    let detail = russet_telemetry::errors::with_sources("", error);
    match detail.is_empty() {
        true => "the request failed".to_owned(),
        false => detail,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_urls_count_as_local() {
        for (url, own) in [
            ("http://127.0.0.1:9000/x", true),
            ("http://[::1]:9000", true),
            ("http://localhost", true),
            ("http://127.0.0.1.example", false),
            ("http://192.168.0.1", false),
        ] {
            assert_eq!(loopback(&Url::parse(url).unwrap()), own, "{url}");
        }
    }
}
