//! A bucket on loopback with the part of S3's API that an agent uses: a listing, and objects by ranges, for requests signed
//! with one access key id. Signatures are not verified.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::{Path as UrlPath, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use sha2::{Digest as _, Sha256};

/// A running bucket, named `models`.
pub struct FakeBucket {
    /// Where it listens.
    pub address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

struct BucketState {
    access_key_id: String,
    objects: BTreeMap<String, Vec<u8>>,
}

impl FakeBucket {
    /// Serves the files of `folder` below `prefix` on a free port of `address`.
    pub async fn start(address: IpAddr, access_key_id: &str, prefix: &str, folder: &Path) -> Result<Self> {
        let mut objects = BTreeMap::new();
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let name = format!("{prefix}/{}", entry.file_name().to_string_lossy());
            objects.insert(name, std::fs::read(entry.path())?);
        }
        let state = Arc::new(BucketState { access_key_id: access_key_id.to_owned(), objects });
        let app = Router::new()
            .route("/models", get(list))
            .route("/models/{*object}", get(object))
            .with_state(state);
        let listener = tokio::net::TcpListener::bind((address, 0)).await.context("no bucket can listen")?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(async move {
            let _ = axum::serve(listener, app).await;
        });
        Ok(Self { address, task })
    }

    /// Value for `AWS_ENDPOINT_URL`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for FakeBucket {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl BucketState {
    fn check(&self, headers: &HeaderMap) -> Result<(), StatusCode> {
        let shown = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let own = format!("Credential={}/", self.access_key_id);
        shown.is_some_and(|shown| shown.contains(&own)).then_some(()).ok_or(StatusCode::FORBIDDEN)
    }
}

fn tag(bytes: &[u8]) -> String {
    format!("\"{}\"", hex::encode(&Sha256::digest(bytes)[..16]))
}

async fn list(
    State(served): State<Arc<BucketState>>,
    Query(query): Query<BTreeMap<String, String>>,
    headers: HeaderMap,
) -> Response {
    if let Err(refusal) = served.check(&headers) {
        return refusal.into_response();
    }
    let prefix = query.get("prefix").map(String::as_str).unwrap_or_default();
    let mut text = "<ListBucketResult>".to_owned();
    for (key, bytes) in served.objects.iter().filter(|(key, _)| key.starts_with(prefix)) {
        let (size, tag) = (bytes.len(), tag(bytes));
        let _ = write!(
            text,
            "<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>2026-11-24T12:00:00.000Z</LastModified><ETag>{tag}</ETag></Contents>"
        );
    }
    (text + "</ListBucketResult>").into_response()
}

async fn object(
    State(served): State<Arc<BucketState>>,
    UrlPath(name): UrlPath<String>,
    headers: HeaderMap,
) -> Response {
    if let Err(refusal) = served.check(&headers) {
        return refusal.into_response();
    }
    let Some(bytes) = served.objects.get(&name) else { return StatusCode::NOT_FOUND.into_response() };
    let range = headers.get(header::RANGE).and_then(|range| range.to_str().ok());
    let (start, end) = range.and_then(parse_range).unwrap_or((0, usize::MAX));
    let end = end.min(bytes.len().saturating_sub(1));
    let Some(part) = bytes.get(start..=end) else {
        return StatusCode::RANGE_NOT_SATISFIABLE.into_response();
    };
    let headers = [
        (header::ETAG, tag(bytes)),
        (header::LAST_MODIFIED, "Tue, 24 Nov 2026 12:00:00 GMT".to_owned()),
        (header::CONTENT_RANGE, format!("bytes {start}-{end}/{}", bytes.len())),
    ];
    (StatusCode::PARTIAL_CONTENT, headers, part.to_vec()).into_response()
}

/// `bytes=a-b`.
fn parse_range(text: &str) -> Option<(usize, usize)> {
    let (start, end) = text.strip_prefix("bytes=")?.split_once('-')?;
    Some((start.parse().ok()?, end.parse().ok()?))
}
