//! A hub that serves model folders as Hugging Face does: revisions resolve to a commit, files come
//! with ranges and digests. It can be told to misbehave, so that tests see what an agent
//! does with a cut connection, and to stop in the middle of a file, so that they can strike there.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use axum::body::Body;
use axum::extract::{Path as UrlPath, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures::StreamExt as _;
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;

/// Transfers of more bytes are the ones that are cut, held and written down.
const LARGE: usize = 256 * 1024;

/// Whose models are answered only with [`TOKEN`].
pub const CLOSED: &str = "closed";
/// The token that opens them.
pub const TOKEN: &str = "hf_of_the_tests";

/// A running hub.
pub struct Hub {
    /// Where it listens.
    pub address: SocketAddr,
    state: Arc<Served>,
    task: tokio::task::JoinHandle<()>,
}

struct Served {
    repositories: BTreeMap<String, PathBuf>,
    /// Connections to cut after half a file, each once.
    cuts: AtomicU64,
    /// Whether large transfers stop in the middle.
    held: watch::Sender<bool>,
    /// At which byte of its file each large transfer began, since the last hold.
    begun: Mutex<Vec<usize>>,
    /// Bytes of files that each model's answers had.
    given: Mutex<BTreeMap<String, u64>>,
}

impl Hub {
    /// Serves each `(owner/name, folder)` on a free port of `address`.
    pub async fn start(address: IpAddr, repositories: &[(&str, &Path)]) -> Result<Self> {
        let state = Arc::new(Served {
            repositories: repositories
                .iter()
                .map(|(name, folder)| ((*name).to_owned(), (*folder).to_owned()))
                .collect(),
            cuts: AtomicU64::new(0),
            held: watch::Sender::new(false),
            begun: Mutex::default(),
            given: Mutex::default(),
        });
        let app = Router::new()
            .route("/api/models/{owner}/{name}/revision/{revision}", get(revision))
            .route("/{owner}/{name}/resolve/{revision}/{*file}", get(resolve))
            .with_state(state.clone());
        let listener = tokio::net::TcpListener::bind((address, 0)).await.context("the hub cannot listen")?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(async move {
            let _ = axum::serve(listener, app).await;
        });
        Ok(Self { address, state, task })
    }

    /// What `HF_ENDPOINT` should say.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Cuts the next `count` file transfers in the middle.
    pub fn cut_next(&self, count: u64) {
        self.state.cuts.store(count, Ordering::SeqCst);
    }

    /// Large transfers stop in the middle for as long as what is returned is kept.
    pub fn hold(&self) -> Held {
        locked(&self.state.begun).clear();
        self.state.held.send_replace(true);
        Held(self.state.clone())
    }

    /// At which byte of its file each large transfer began, since the last [`Hub::hold`].
    pub fn begun(&self) -> Vec<usize> {
        locked(&self.state.begun).clone()
    }

    /// Bytes of a model's files that were given so far, to whomever.
    pub fn given(&self, model: &str) -> u64 {
        locked(&self.state.given).get(model).copied().unwrap_or(0)
    }

    /// Cuts still due.
    pub fn cuts_left(&self) -> u64 {
        self.state.cuts.load(Ordering::SeqCst)
    }
}

/// Large transfers stop in the middle until this is dropped.
pub struct Held(Arc<Served>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.held.send_replace(false);
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Served {
    fn folder(&self, owner: &str, name: &str) -> Option<&PathBuf> {
        self.repositories.get(&format!("{owner}/{name}"))
    }
}

/// A commit made of the folder's contents, so that it changes when they do.
fn commit(folder: &Path) -> Result<(String, Vec<String>)> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder)?.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    let mut hash = Sha256::new();
    for name in &names {
        hash.update(name);
        hash.update(std::fs::read(folder.join(name))?);
    }
    Ok((hex::encode(&hash.finalize()[..20]), names))
}

/// Whether who asks may have what this owner has.
fn is_open(owner: &str, headers: &HeaderMap) -> bool {
    owner != CLOSED || headers.get(header::AUTHORIZATION).is_some_and(|it| *it == format!("Bearer {TOKEN}"))
}

async fn revision(
    State(served): State<Arc<Served>>,
    UrlPath((owner, name, _revision)): UrlPath<(String, String, String)>,
    headers: HeaderMap,
) -> Response {
    if !is_open(&owner, &headers) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let Some(folder) = served.folder(&owner, &name) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    match commit(folder) {
        Ok((sha, names)) => {
            let siblings: Vec<_> =
                names.iter().map(|name| serde_json::json!({ "rfilename": name })).collect();
            Json(serde_json::json!({ "id": format!("{owner}/{name}"), "sha": sha, "siblings": siblings }))
                .into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn resolve(
    State(served): State<Arc<Served>>,
    UrlPath((owner, name, _revision, file)): UrlPath<(String, String, String, String)>,
    headers: HeaderMap,
) -> Response {
    if !is_open(&owner, &headers) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let Some(folder) = served.folder(&owner, &name) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    if file.contains("..") {
        return StatusCode::BAD_REQUEST.into_response();
    }
    let Ok(bytes) = std::fs::read(folder.join(&file)) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let etag = format!("\"{}\"", hex::encode(Sha256::digest(&bytes)));
    let total = bytes.len();
    let range = headers.get(header::RANGE).and_then(|range| range.to_str().ok()).and_then(parse_range);
    let (status, start, end) = match range {
        Some((start, end)) if start < total => {
            (StatusCode::PARTIAL_CONTENT, start, end.map_or(total, |end| (end + 1).min(total)))
        }
        Some(_) => return StatusCode::RANGE_NOT_SATISFIABLE.into_response(),
        None => (StatusCode::OK, 0, total),
    };
    let body = bytes[start..end].to_vec();
    let mut response = Response::builder()
        .status(status)
        .header(header::ETAG, &etag)
        .header("x-linked-etag", &etag)
        .header("x-linked-size", total)
        .header(header::ACCEPT_RANGES, "bytes")
        .header(header::CONTENT_LENGTH, body.len());
    if status == StatusCode::PARTIAL_CONTENT {
        response = response.header(header::CONTENT_RANGE, format!("bytes {start}-{}/{total}", end - 1));
    }
    let large = body.len() > LARGE;
    if large {
        locked(&served.begun).push(start);
    }
    let cut = large
        && served.cuts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
    let half = body[..body.len() / 2].to_vec();
    let given = if cut { half.len() } else { body.len() };
    *locked(&served.given).entry(format!("{owner}/{name}")).or_default() += given as u64;
    let body = if cut {
        Body::from_stream(futures::stream::iter([
            Ok(half),
            Err(std::io::Error::new(std::io::ErrorKind::ConnectionReset, "cut")),
        ]))
    } else if large {
        let (rest, mut held) = (body[half.len()..].to_vec(), served.held.subscribe());
        let rest = futures::stream::once(async move {
            let _ = held.wait_for(|held| !held).await;
            Ok::<_, std::io::Error>(rest)
        });
        Body::from_stream(futures::stream::iter([Ok(half)]).chain(rest))
    } else {
        Body::from(body)
    };
    response.body(body).unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())
}

/// `bytes=a-b` or `bytes=a-`.
fn parse_range(text: &str) -> Option<(usize, Option<usize>)> {
    let (start, end) = text.strip_prefix("bytes=")?.split_once('-')?;
    let end = if end.is_empty() { None } else { Some(end.parse().ok()?) };
    Some((start.parse().ok()?, end))
}
