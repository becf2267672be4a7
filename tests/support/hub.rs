//! A hub that serves model folders like Hugging Face, as far as PyPI's `huggingface_hub` requires: revisions
//! resolve to a commit, weights have a SHA-256 and other files the hash of a git blob, files support ranges,
//! gated models need a token. Faults can be injected: cut connections, and stalls in the middle of a file,
//! for faults of the agent at that point.

#![allow(clippy::result_large_err, reason = "a refusal is a whole answer, and made once a request")]

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use axum::body::Body;
use axum::extract::{Path as UrlPath, Query, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures::StreamExt as _;
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;

/// Minimum size of a transfer that is cut, held and recorded.
const LARGE_TRANSFER_BYTES: usize = 256 * 1024;

/// A running hub.
pub struct FakeHub {
    /// Where it listens.
    pub address: SocketAddr,
    state: Arc<HubState>,
    task: tokio::task::JoinHandle<()>,
    /// Router of the other host, and whether there is one.
    bridge: Router,
    bridged: Option<tokio::task::JoinHandle<()>>,
}

struct HubState {
    repositories: Mutex<BTreeMap<String, PathBuf>>,
    /// Number of connections to cut after half a file, each once.
    cuts: AtomicU64,
    /// Whether large transfers stall in the middle.
    holding: watch::Sender<bool>,
    /// Start offset of each large transfer since the last hold.
    hold_offsets: Mutex<Vec<usize>>,
    /// Bytes served of each model's files.
    bytes_served: Mutex<BTreeMap<String, u64>>,
    /// Token of each gated model.
    tokens: Mutex<BTreeMap<String, String>>,
    /// Host and port that weights are redirected to, like those in Xet's storage.
    bridge: Mutex<Option<String>>,
}

impl FakeHub {
    /// Serves each `(owner/name, folder)` on a free port of `address`.
    pub async fn start(address: IpAddr, repositories: &[(&str, &Path)]) -> Result<Self> {
        let state = Arc::new(HubState {
            repositories: Mutex::new(
                repositories
                    .iter()
                    .map(|(name, folder)| ((*name).to_owned(), (*folder).to_owned()))
                    .collect(),
            ),
            cuts: AtomicU64::new(0),
            holding: watch::Sender::new(false),
            hold_offsets: Mutex::default(),
            bytes_served: Mutex::default(),
            tokens: Mutex::default(),
            bridge: Mutex::default(),
        });
        let app = Router::new()
            .route("/api/whoami-v2", get(whoami))
            .route("/api/models/{owner}/{name}", get(model))
            .route("/api/models/{owner}/{name}/revision/{revision}", get(revision))
            .route("/api/models/{owner}/{name}/tree/{revision}", get(tree))
            .route("/{owner}/{name}/resolve/{revision}/{*file}", get(resolve))
            .route("/bridge/{owner}/{name}/{*file}", get(bridge))
            .with_state(state.clone());
        let bridge = app.clone();
        let listener = tokio::net::TcpListener::bind((address, 0)).await.context("the hub cannot listen")?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(async move {
            let _ = axum::serve(listener, app).await;
        });
        Ok(Self { address, state, task, bridge, bridged: None })
    }

    /// Serves another folder as `owner/name` from now on.
    pub fn add(&self, name: &str, folder: &Path) {
        locked(&self.state.repositories).insert(name.to_owned(), folder.to_owned());
    }

    /// Redirects weights to another host from now on, like those in Xet's storage.
    pub async fn redirect(&mut self) -> Result<()> {
        let other = tokio::net::TcpListener::bind((self.address.ip(), 0)).await?;
        self.redirect_to(&other.local_addr()?.to_string());
        let app = self.bridge.clone();
        self.bridged = Some(tokio::spawn(async move {
            let _ = axum::serve(other, app).await;
        }));
        Ok(())
    }

    /// Redirects weights to this host and port from now on.
    pub fn redirect_to(&self, host: &str) {
        *locked(&self.state.bridge) = Some(host.to_owned());
    }

    /// Makes a model require this token from now on.
    pub fn gate(&self, model: &str, token: &str) {
        locked(&self.state.tokens).insert(model.to_owned(), token.to_owned());
    }

    /// Value for `HF_ENDPOINT`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Cuts the next `count` file transfers in the middle.
    pub fn cut_next(&self, count: u64) {
        self.state.cuts.store(count, Ordering::SeqCst);
    }

    /// Stalls large transfers in the middle until the returned value is dropped.
    pub fn hold_transfers(&self) -> TransferHold {
        locked(&self.state.hold_offsets).clear();
        self.state.holding.send_replace(true);
        TransferHold(self.state.clone())
    }

    /// Start offset of each large transfer, since the last [`Hub::hold`].
    pub fn hold_offsets(&self) -> Vec<usize> {
        locked(&self.state.hold_offsets).clone()
    }

    /// Bytes of a model's files that were served so far, to all clients.
    pub fn bytes_served(&self, model: &str) -> u64 {
        locked(&self.state.bytes_served).get(model).copied().unwrap_or(0)
    }

    /// Cuts that have not happened yet.
    pub fn cuts_left(&self) -> u64 {
        self.state.cuts.load(Ordering::SeqCst)
    }
}

/// Large transfers stall in the middle until this is dropped.
pub struct TransferHold(Arc<HubState>);

impl Drop for TransferHold {
    fn drop(&mut self) {
        self.0.holding.send_replace(false);
    }
}

impl Drop for FakeHub {
    fn drop(&mut self) {
        self.task.abort();
        if let Some(bridged) = &self.bridged {
            bridged.abort();
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HubState {
    /// The folder of a model, if this request may access it.
    fn folder(&self, owner: &str, name: &str, headers: &HeaderMap) -> Result<PathBuf, Response> {
        let model = format!("{owner}/{name}");
        let folder = locked(&self.repositories)
            .get(&model)
            .cloned()
            .ok_or_else(|| error_response(StatusCode::NOT_FOUND, "RepoNotFound"))?;
        match locked(&self.tokens).get(&model) {
            Some(token) if token_of(headers) != Some(token) => {
                Err(error_response(StatusCode::UNAUTHORIZED, "GatedRepo"))
            }
            _ => Ok(folder),
        }
    }
}

/// The bearer token of a request.
fn token_of(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
}

/// An error with the code by which clients of hubs distinguish errors.
fn error_response(status: StatusCode, code: &'static str) -> Response {
    (status, [("x-error-code", code)], code).into_response()
}

/// A file as the hub stores it: weights by their SHA-256, in large storage, other files in git.
struct HubFile {
    size: usize,
    git: String,
    large: Option<String>,
}

impl HubFile {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let blob = |bytes: &[u8]| {
            let mut hash = ring::digest::Context::new(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY);
            hash.update(format!("blob {}\0", bytes.len()).as_bytes());
            hash.update(bytes);
            hex::encode(hash.finish())
        };
        if !name.ends_with(".safetensors") && !name.ends_with(".gguf") {
            return Self { size: bytes.len(), git: blob(bytes), large: None };
        }
        let sum = hex::encode(Sha256::digest(bytes));
        let git = blob(pointer(&sum, bytes.len()).as_bytes());
        Self { size: bytes.len(), git, large: Some(sum) }
    }

    fn tag(&self) -> String {
        format!("\"{}\"", self.large.as_ref().unwrap_or(&self.git))
    }
}

/// Git LFS pointer of a large file.
fn pointer(sum: &str, size: usize) -> String {
    format!("version https://git-lfs.github.com/spec/v1\noid sha256:{sum}\nsize {size}\n")
}

/// A commit id derived from the folder's contents, so that it changes with them.
fn commit(folder: &Path) -> Result<(String, Vec<String>)> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if entry.path().is_dir() {
            // Folders of modules, as repositories of sentence-transformers have them.
            let within = std::fs::read_dir(entry.path())?;
            let within = within.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
            names.extend(within.map(|file| format!("{name}/{file}")));
        } else {
            names.push(name);
        }
    }
    names.sort();
    let mut hash = Sha256::new();
    for name in &names {
        hash.update(name);
        hash.update(std::fs::read(folder.join(name))?);
    }
    Ok((hex::encode(&hash.finalize()[..20]), names))
}

/// Whether a revision exists: the branch, or a commit.
fn check_revision(revision: &str) -> Result<(), Response> {
    let commit = revision.len() == 40 && revision.bytes().all(|byte| byte.is_ascii_hexdigit());
    match revision == "main" || commit {
        true => Ok(()),
        false => Err(error_response(StatusCode::NOT_FOUND, "RevisionNotFound")),
    }
}

async fn whoami(State(served): State<Arc<HubState>>, headers: HeaderMap) -> Response {
    match token_of(&headers).filter(|token| locked(&served.tokens).values().any(|known| known == token)) {
        Some(_) => Json(serde_json::json!({"type": "user", "name": "tester", "orgs": []})).into_response(),
        None => StatusCode::UNAUTHORIZED.into_response(),
    }
}

type QueryParameters = Query<BTreeMap<String, String>>;

async fn model(
    state: State<Arc<HubState>>,
    UrlPath((owner, name)): UrlPath<(String, String)>,
    asked: QueryParameters,
    headers: HeaderMap,
) -> Response {
    revision(state, UrlPath((owner, name, "main".to_owned())), asked, headers).await
}

async fn revision(
    State(served): State<Arc<HubState>>,
    UrlPath((owner, name, revision)): UrlPath<(String, String, String)>,
    Query(asked): QueryParameters,
    headers: HeaderMap,
) -> Response {
    let blobs = asked.get("blobs").is_some_and(|blobs| blobs.eq_ignore_ascii_case("true"));
    let answer = || -> Result<Response, Response> {
        let folder = served.folder(&owner, &name, &headers)?;
        check_revision(&revision)?;
        let (sha, names) = commit(&folder).map_err(internal_error)?;
        let sibling = |name: &String| -> Result<serde_json::Value> {
            let mut sibling = serde_json::json!({ "rfilename": name });
            if blobs {
                let hub_file = HubFile::new(name, &std::fs::read(folder.join(name))?);
                sibling["size"] = hub_file.size.into();
                sibling["blobId"] = hub_file.git.into();
                if let Some(sum) = hub_file.large {
                    let pointer = pointer(&sum, hub_file.size).len();
                    sibling["lfs"] =
                        serde_json::json!({"sha256": sum, "size": hub_file.size, "pointerSize": pointer});
                }
            }
            Ok(sibling)
        };
        let siblings = names.iter().map(sibling).collect::<Result<Vec<_>>>().map_err(internal_error)?;
        let id = format!("{owner}/{name}");
        let about =
            serde_json::json!({"id": id, "modelId": id, "sha": sha, "siblings": siblings, "private": false});
        Ok(Json(about).into_response())
    };
    answer().unwrap_or_else(|refusal| refusal)
}

async fn tree(
    State(served): State<Arc<HubState>>,
    UrlPath((owner, name, revision)): UrlPath<(String, String, String)>,
    headers: HeaderMap,
) -> Response {
    let answer = || -> Result<Response, Response> {
        let folder = served.folder(&owner, &name, &headers)?;
        check_revision(&revision)?;
        let (_, names) = commit(&folder).map_err(internal_error)?;
        let entry = |name: &String| -> Result<serde_json::Value> {
            let HubFile { size, git, large } = HubFile::new(name, &std::fs::read(folder.join(name))?);
            let mut entry = serde_json::json!({"type": "file", "path": name, "size": size, "oid": git});
            if let Some(sum) = large {
                let pointer = pointer(&sum, size).len();
                entry["lfs"] = serde_json::json!({"oid": sum, "size": size, "pointerSize": pointer});
            }
            Ok(entry)
        };
        let entries = names.iter().map(entry).collect::<Result<Vec<_>>>().map_err(internal_error)?;
        Ok(Json(entries).into_response())
    };
    answer().unwrap_or_else(|refusal| refusal)
}

fn internal_error(error: anyhow::Error) -> Response {
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
}

async fn resolve(
    State(served): State<Arc<HubState>>,
    UrlPath((owner, name, revision, file)): UrlPath<(String, String, String, String)>,
    method: Method,
    headers: HeaderMap,
) -> Response {
    let found = || -> Result<_, Response> {
        let folder = served.folder(&owner, &name, &headers)?;
        check_revision(&revision)?;
        let commit =
            if revision == "main" { commit(&folder).map_err(internal_error)?.0 } else { revision.clone() };
        let missing = |_| error_response(StatusCode::NOT_FOUND, "EntryNotFound");
        Ok((std::fs::read(folder.join(plain(&file)?)).map_err(missing)?, commit))
    };
    let (bytes, commit) = match found() {
        Ok(found) => found,
        Err(refusal) => return refusal,
    };
    let hub_file = HubFile::new(&file, &bytes);
    let bridge = locked(&served.bridge).clone();
    let mut response = match bridge.filter(|_| hub_file.large.is_some()) {
        Some(bridge) => Response::builder()
            .status(StatusCode::FOUND)
            .header(header::LOCATION, format!("http://{bridge}/bridge/{owner}/{name}/{file}"))
            .body(Body::empty())
            .unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response()),
        None => serve(&served, &format!("{owner}/{name}"), &hub_file, bytes, &method, &headers),
    };
    let headers = [
        ("x-repo-commit", commit),
        ("x-linked-etag", hub_file.tag()),
        ("x-linked-size", hub_file.size.to_string()),
    ];
    for (name, value) in headers {
        if let Ok(value) = value.parse() {
            response.headers_mut().insert(name, value);
        }
    }
    response
}

/// The other host, which checks no tokens: a redirected client has shown one.
async fn bridge(
    State(served): State<Arc<HubState>>,
    UrlPath((owner, name, file)): UrlPath<(String, String, String)>,
    method: Method,
    headers: HeaderMap,
) -> Response {
    if headers.contains_key(header::AUTHORIZATION) {
        return (StatusCode::BAD_REQUEST, "a token of the hub was shown to another host").into_response();
    }
    let model = format!("{owner}/{name}");
    let folder = locked(&served.repositories).get(&model).cloned();
    let folder = folder.filter(|_| plain(&file).is_ok());
    let Some(bytes) = folder.and_then(|folder| std::fs::read(folder.join(&file)).ok()) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    serve(&served, &model, &HubFile::new(&file, &bytes), bytes, &method, &headers)
}

fn plain(file: &str) -> Result<&str, Response> {
    if file.contains("..") { Err(StatusCode::BAD_REQUEST.into_response()) } else { Ok(file) }
}

/// A file or a range of it, cut or stalled if requested.
fn serve(
    served: &HubState,
    model: &str,
    hub_file: &HubFile,
    bytes: Vec<u8>,
    method: &Method,
    headers: &HeaderMap,
) -> Response {
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
        .header(header::ETAG, hub_file.tag())
        .header(header::ACCEPT_RANGES, "bytes")
        .header(header::CONTENT_LENGTH, body.len());
    if status == StatusCode::PARTIAL_CONTENT {
        response = response.header(header::CONTENT_RANGE, format!("bytes {start}-{}/{total}", end - 1));
    }
    if method == Method::HEAD {
        return response
            .body(Body::empty())
            .unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response());
    }
    let large = body.len() > LARGE_TRANSFER_BYTES;
    if large {
        locked(&served.hold_offsets).push(start);
    }
    let cut = large
        && served.cuts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
    let half = body[..body.len() / 2].to_vec();
    let given = if cut { half.len() } else { body.len() };
    *locked(&served.bytes_served).entry(model.to_owned()).or_default() += given as u64;
    let body = if cut {
        Body::from_stream(futures::stream::iter([
            Ok(half),
            Err(std::io::Error::new(std::io::ErrorKind::ConnectionReset, "cut")),
        ]))
    } else if large {
        let (rest, mut held) = (body[half.len()..].to_vec(), served.holding.subscribe());
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
