//! The store against a misbehaving hub: stalled transfers, wrong bytes, refused requests. The test itself
//! serves the hub on loopback.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, whichever function of it does")]

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Response, StatusCode};
use axum::routing::get;
use russet_agent::store::{
    Context, Credentials, SourceScope, SourceSpec, Store, StoreError, TransferProgress, TransferStage,
};
use russet_crds::conditions::Reason;
use tokio::sync::watch;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const LATER: &str = "fedcba9876543210fedcba9876543210fedcba98";

/// What the hub serves and how it misbehaves.
#[derive(Default)]
struct HubServer {
    files: BTreeMap<String, Vec<u8>>,
    /// Bytes after which a response for this file breaks off, and how often.
    cut: Mutex<HashMap<String, (usize, u32)>>,
    /// Bytes after which a response stalls until this is cleared.
    stall: Mutex<Option<usize>>,
    /// Digest announced for a file instead of the true one.
    lie: Mutex<HashMap<String, String>>,
    /// Error statuses of the next transfers; the last one is used first.
    refusals: Mutex<Vec<StatusCode>>,
    /// Whether files redirect to themselves.
    circle: AtomicBool,
    /// Whether each resumed transfer finds another version of the file.
    changes: bool,
    /// Whether each answer comes from another backend with tags of its own, though the digest is announced.
    backends: AtomicU64,
    /// Header that says how long to wait, with refusals.
    wait: Option<(&'static str, &'static str)>,
    /// Encoding of all files.
    encoding: Option<&'static str>,
    /// Size that the listing says, by file.
    listed: BTreeMap<&'static str, u64>,
    /// Whether the first byte of resumed answers is told wrongly.
    shifted: AtomicBool,
    /// Whether files are served by another host, as large ones are.
    redirect: bool,
    token: Option<String>,
    /// The commit that `main` points to.
    head: Mutex<String>,
    /// Requested ranges, by file.
    ranges: Mutex<Vec<(String, String)>>,
    /// How often the second host received a token.
    leaked: AtomicU64,
    served: AtomicU64,
    cdn: Mutex<String>,
}

impl HubServer {
    async fn start(self) -> (Arc<Self>, String) {
        let hub = Arc::new(self);
        let router = Router::new()
            .route("/api/models/{owner}/{name}/revision/{revision}", get(revision))
            .route("/{owner}/{name}/resolve/{commit}/{file}", get(resolve))
            .route("/cdn/{file}", get(cdn))
            .with_state(hub.clone());
        // Two listeners are two origins: the second one acts as the host of the large files.
        let mut addresses = Vec::new();
        for _ in 0..2 {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            addresses.push(format!("http://{}", listener.local_addr().unwrap()));
            let router = router.clone();
            tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        }
        *hub.cdn.lock().unwrap() = addresses[1].clone();
        (hub, addresses[0].clone())
    }

    fn refuses(&self, headers: &HeaderMap) -> bool {
        let shown = headers.get("authorization").and_then(|value| value.to_str().ok());
        self.token.as_ref().is_some_and(|token| shown != Some(&format!("Bearer {token}")))
    }
}

fn plain(status: StatusCode) -> Response<Body> {
    Response::builder().status(status).body(Body::empty()).unwrap()
}

async fn revision(
    State(hub): State<Arc<HubServer>>,
    Path((_, _, revision)): Path<(String, String, String)>,
    headers: HeaderMap,
) -> Response<Body> {
    if hub.refuses(&headers) {
        return plain(StatusCode::UNAUTHORIZED);
    }
    let sha = match revision.as_str() {
        "main" => hub.head.lock().unwrap().clone(),
        COMMIT | LATER => revision,
        _ => return plain(StatusCode::NOT_FOUND),
    };
    let sibling = |name: &String| match hub.listed.get(name.as_str()) {
        Some(size) => serde_json::json!({
            "rfilename": name, "size": size, "lfs": {"sha256": announced(&hub, name), "size": size},
        }),
        None => serde_json::json!({"rfilename": name}),
    };
    let siblings: Vec<_> = hub.files.keys().map(sibling).collect();
    Response::new(Body::from(serde_json::json!({"sha": sha, "siblings": siblings}).to_string()))
}

async fn resolve(
    State(hub): State<Arc<HubServer>>,
    Path((_, _, commit, file)): Path<(String, String, String, String)>,
    headers: HeaderMap,
) -> Response<Body> {
    assert!(commit == COMMIT || commit == LATER, "files come from commits, never from branches");
    if hub.refuses(&headers) {
        return plain(StatusCode::FORBIDDEN);
    }
    let Some(bytes) = hub.files.get(&file) else { return plain(StatusCode::NOT_FOUND) };
    if hub.circle.load(Ordering::SeqCst) {
        let here = format!("/acme/tiny/resolve/{commit}/{file}");
        return Response::builder().status(302).header("location", here).body(Body::empty()).unwrap();
    }
    let transfer = headers.get("range").is_none_or(|range| range.to_str().unwrap().ends_with('-'));
    if transfer && let Some(status) = hub.refusals.lock().unwrap().pop() {
        let (name, value) = hub.wait.unwrap_or(("retry-after", "1"));
        return Response::builder().status(status).header(name, value).body(Body::empty()).unwrap();
    }
    if !hub.redirect {
        return serve(&hub, &file, &headers);
    }
    Response::builder()
        .status(302)
        .header("location", format!("{}/cdn/{file}", hub.cdn.lock().unwrap()))
        .header("x-linked-size", bytes.len())
        .header("x-linked-etag", format!("\"{}\"", announced(&hub, &file)))
        .body(Body::empty())
        .unwrap()
}

async fn cdn(
    State(hub): State<Arc<HubServer>>,
    Path(file): Path<String>,
    headers: HeaderMap,
) -> Response<Body> {
    if headers.contains_key("authorization") {
        hub.leaked.fetch_add(1, Ordering::SeqCst);
    }
    serve(&hub, &file, &headers)
}

fn announced(hub: &HubServer, file: &str) -> String {
    let lie = hub.lie.lock().unwrap().get(file).cloned();
    lie.unwrap_or_else(|| sha256(&hub.files[file]))
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    hex::encode(sha2::Sha256::digest(bytes))
}

fn serve(hub: &HubServer, file: &str, headers: &HeaderMap) -> Response<Body> {
    let bytes = &hub.files[file];
    let range = headers.get("range").and_then(|range| range.to_str().ok()).map(str::to_owned);
    let (mut from, mut to) = (0, bytes.len());
    if let Some(range) = &range {
        hub.ranges.lock().unwrap().push((file.to_owned(), range.clone()));
        let (start, end) = range.trim_start_matches("bytes=").split_once('-').unwrap();
        from = start.parse().unwrap();
        to = end.parse::<usize>().map_or(bytes.len(), |end| (end + 1).min(bytes.len()));
    }
    let mut part = bytes[from..to].to_vec();
    let length = part.len();
    let mut broken = false;
    // Probes and headers are short reads; only transfers are interrupted.
    if let Some((after, times)) = hub.cut.lock().unwrap().get_mut(file)
        && *times > 0
        && length > *after
    {
        *times -= 1;
        part.truncate(*after);
        broken = true;
    }
    let stalled = hub.stall.lock().unwrap().filter(|after| length > *after);
    if let Some(after) = stalled {
        part.truncate(after);
    }
    hub.served.fetch_add(part.len() as u64, Ordering::SeqCst);
    let resumed = range.as_ref().is_some_and(|range| range.ends_with('-'));
    let tag = match hub.changes {
        true => if resumed { "\"later\"" } else { "\"at first\"" }.to_owned(),
        false => format!("\"{}\"", announced(hub, file)),
    };
    let tag = match hub.backends.load(Ordering::SeqCst) {
        0 => tag,
        _ => format!("\"backend {}\"", hub.backends.fetch_add(1, Ordering::SeqCst)),
    };
    let stream = async_stream(part, broken, stalled.is_some());
    let mut response = Response::builder();
    if let Some(encoding) = hub.encoding {
        response = response.header("content-encoding", encoding);
    }
    let from = if resumed && hub.shifted.load(Ordering::SeqCst) { from + 1 } else { from };
    response
        .status(if range.is_some() { 206 } else { 200 })
        .header("content-length", length)
        .header("content-range", format!("bytes {from}-{}/{}", to.max(1) - 1, bytes.len()))
        .header("etag", tag)
        .body(Body::from_stream(stream))
        .unwrap()
}

/// The bytes and, if `broken`, an error after them, or no end if `stalled`. The server sends only
/// what is available while the next part is pending.
fn async_stream(
    part: Vec<u8>,
    broken: bool,
    stalled: bool,
) -> impl futures::Stream<Item = std::io::Result<Vec<u8>>> {
    futures::stream::unfold((Some(part), broken), move |(part, broken)| async move {
        match (part, broken) {
            (Some(part), broken) => Some((Ok(part), (None, broken))),
            (None, true) => {
                tokio::task::yield_now().await;
                Some((Err(std::io::Error::other("cut")), (None, false)))
            }
            (None, false) if stalled => std::future::pending().await,
            (None, false) => None,
        }
    })
}

/// A tiny model: one layer whose weight has `elements` values.
fn model(elements: usize) -> BTreeMap<String, Vec<u8>> {
    let data = elements * 4;
    let header = serde_json::json!({
        "model.embed_tokens.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        "model.layers.0.w.weight": {"dtype": "F32", "shape": [elements], "data_offsets": [32, 32 + data]},
    })
    .to_string();
    let mut weights = (header.len() as u64).to_le_bytes().to_vec();
    weights.extend(header.as_bytes());
    weights.extend((0..32 + data).map(|index| (index * 7 % 251) as u8));
    let config = r#"{"model_type":"llama","num_hidden_layers":1,"hidden_size":4,"num_attention_heads":2,"vocab_size":2}"#;
    BTreeMap::from([
        ("config.json".to_owned(), config.as_bytes().to_vec()),
        ("model.safetensors".to_owned(), weights),
        ("tokenizer.json".to_owned(), b"{}".to_vec()),
        ("modeling_llama.py".to_owned(), b"import os".to_vec()),
        ("pytorch_model.bin".to_owned(), b"pickle".to_vec()),
    ])
}

fn hub() -> HubServer {
    HubServer { files: model(100_000), head: Mutex::new(COMMIT.into()), ..HubServer::default() }
}

fn store(folder: &tempfile::TempDir, endpoint: &str) -> Store {
    rustls::crypto::ring::default_provider().install_default().ok();
    let context = Context::new(endpoint, vec![]).unwrap();
    // The second host is another port of this machine.
    let mut context = context.with_private_sources(&["127.0.0.1".parse().unwrap()]).unwrap();
    context.retry = Duration::from_millis(10);
    Store::open(folder.path().join("models"), context).unwrap()
}

fn source_spec() -> SourceSpec {
    SourceSpec { uri: "hf://acme/tiny".into(), ..SourceSpec::default() }
}

fn progress() -> watch::Sender<TransferProgress> {
    watch::Sender::new(TransferProgress::default())
}

fn names(path: &PathBuf) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(path)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Number of rounds, by default one.
fn iterations() -> u64 {
    std::env::var("RUSSET_FAULT_ROUNDS").map_or(1, |rounds| rounds.parse().unwrap())
}

/// Prints a figure for `cargo xtask proof store`.
fn log(what: &str) {
    println!("{}", serde_json::json!({"what": what, "ours": iterations(), "unit": "times"}));
}

#[tokio::test]
async fn model_downloads_via_redirects_without_code_or_token_leak() {
    let (hub, endpoint) =
        HubServer { redirect: true, token: Some("hf_secret".into()), ..hub() }.start().await;
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder, &endpoint);
    let refused = store.headers(&source_spec()).await.unwrap_err();
    assert_eq!(refused.reason(), Reason::SourceForbidden);
    assert!(refused.to_string().contains("secretRef"));

    let spec = SourceSpec {
        credentials: Credentials::new([("token".to_owned(), b"hf_secret".to_vec())]),
        ..source_spec()
    };
    let headers = store.headers(&spec).await.unwrap();
    assert_eq!(headers.commit.as_deref(), Some(COMMIT));
    assert_eq!((headers.shape.layers, headers.shape.layer_bytes[0]), (1, 400_000));

    let progress = progress();
    let published = store.fetch(&spec, &progress).await.unwrap();
    assert_eq!(
        names(&published.path),
        ["MANIFEST.json", "config.json", "model.safetensors", "tokenizer.json"]
    );
    assert_eq!(
        std::fs::read(published.path.join("model.safetensors")).unwrap(),
        hub.files["model.safetensors"]
    );
    let state = progress.borrow().clone();
    assert_eq!((state.done, state.total), (headers.bytes_total, headers.bytes_total));
    assert_eq!(state.stage, TransferStage::Verifying);
    assert_eq!(hub.leaked.load(Ordering::SeqCst), 0, "the token went to another host");
}

#[tokio::test]
async fn a_download_that_breaks_is_resumed_where_it_stopped() {
    for _ in 0..iterations() {
        let (hub, endpoint) = hub().start().await;
        hub.cut.lock().unwrap().insert("model.safetensors".into(), (150_000, 2));
        let folder = tempfile::tempdir().unwrap();
        let published = store(&folder, &endpoint).fetch(&source_spec(), &progress()).await.unwrap();
        assert_eq!(
            std::fs::read(published.path.join("model.safetensors")).unwrap(),
            hub.files["model.safetensors"]
        );
        let ranges: Vec<String> = hub
            .ranges
            .lock()
            .unwrap()
            .iter()
            .filter(|(file, range)| file == "model.safetensors" && range.ends_with('-'))
            .map(|(_, range)| range.clone())
            .collect();
        assert_eq!(ranges, ["bytes=150000-", "bytes=300000-"]);
    }
    log("a source cut twice in the middle, went on there");
}

#[tokio::test]
async fn download_of_an_aborted_agent_resumes_from_its_bytes() {
    let (hub, endpoint) = hub().start().await;
    hub.cut.lock().unwrap().insert("model.safetensors".into(), (150_000, u32::MAX));
    let folder = tempfile::tempdir().unwrap();
    let progress = progress();
    let mut state = progress.subscribe();
    let first = store(&folder, &endpoint);
    let task = tokio::spawn({
        let progress = progress.clone();
        async move { first.fetch(&source_spec(), &progress).await.map(|_| ()) }
    });
    let stalled = state.wait_for(|state| state.last_error.is_some());
    let trouble =
        tokio::time::timeout(Duration::from_secs(60), stalled).await.unwrap().unwrap().last_error.clone();
    assert_eq!(trouble.unwrap().0, Reason::Truncated);
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());

    let part =
        std::fs::read_dir(folder.path().join("models/.partial")).unwrap().next().unwrap().unwrap().path();
    let saved = std::fs::metadata(part.join("model.safetensors.part")).unwrap().len();
    assert!(saved >= 150_000, "{saved}");
    hub.cut.lock().unwrap().clear();
    hub.served.store(0, Ordering::SeqCst);
    let published = store(&folder, &endpoint).fetch(&source_spec(), &self::progress()).await.unwrap();
    assert_eq!(
        std::fs::read(published.path.join("model.safetensors")).unwrap(),
        hub.files["model.safetensors"]
    );
    let all: usize = hub.files.values().map(Vec::len).sum();
    assert!(hub.served.load(Ordering::SeqCst) < all as u64 - saved + 5_000, "bytes were fetched twice");
}

/// Kill -9 keeps the bytes on disk: a separate process is killed in the middle.
#[tokio::test]
async fn download_resumes_after_kill_9_from_bytes_on_disk() {
    let (hub, endpoint) = HubServer { files: model(1_000_000), ..hub() }.start().await;
    *hub.stall.lock().unwrap() = Some(3_000_000);
    let folder = tempfile::tempdir().unwrap();
    let models = folder.path().join("models");
    let own = std::env::current_exe().unwrap();
    let fetch = own.parent().unwrap().parent().unwrap().join("examples/fetch");
    assert!(fetch.exists(), "{} is missing; run the tests with cargo test", fetch.display());
    let mut child = std::process::Command::new(fetch)
        .args([endpoint.as_str(), "hf://acme/tiny"])
        .arg(&models)
        .spawn()
        .unwrap();
    let part_size = || {
        let partial = std::fs::read_dir(models.join(".partial")).ok()?.next()?.ok()?.path();
        std::fs::metadata(partial.join("model.safetensors.part")).ok().map(|part| part.len())
    };
    let grown = async {
        while part_size().unwrap_or(0) < 1 << 20 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let in_time = tokio::time::timeout(Duration::from_secs(60), grown).await;
    child.kill().unwrap();
    child.wait().unwrap();
    in_time.expect("a megabyte arrives");

    let saved = part_size().unwrap();
    *hub.stall.lock().unwrap() = None;
    hub.served.store(0, Ordering::SeqCst);
    let published = store(&folder, &endpoint).fetch(&source_spec(), &progress()).await.unwrap();
    assert_eq!(
        std::fs::read(published.path.join("model.safetensors")).unwrap(),
        hub.files["model.safetensors"]
    );
    let all: usize = hub.files.values().map(Vec::len).sum();
    assert!(hub.served.load(Ordering::SeqCst) < all as u64 - saved + 5_000, "bytes were fetched twice");
}

#[tokio::test]
async fn bytes_with_a_wrong_digest_are_never_published() {
    let (hub, endpoint) = hub().start().await;
    hub.lie.lock().unwrap().insert("model.safetensors".into(), "ab".repeat(32));
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder, &endpoint);
    let error = store.fetch(&source_spec(), &progress()).await.unwrap_err();
    assert_eq!(error.reason(), Reason::DigestMismatch);
    let message = error.to_string();
    assert!(message.contains("model.safetensors") && message.contains(&"ab".repeat(32)), "{message}");
    let pinned = SourceSpec { revision: Some(COMMIT.into()), pinned: true, ..source_spec() };
    assert_eq!(store.published(&pinned), None);

    hub.lie.lock().unwrap().clear();
    store.fetch(&source_spec(), &progress()).await.unwrap();
    assert!(store.published(&pinned).is_some());

    let sum = SourceSpec { sha256: Some("00".repeat(32)), ..source_spec() };
    let error = store.fetch(&sum, &progress()).await.unwrap_err();
    assert!(matches!(&error, StoreError::Digest { file, .. } if file == "the manifest"), "{error}");
}

#[tokio::test]
async fn a_pinned_commit_stays_when_the_branch_moves() {
    let (hub, endpoint) = hub().start().await;
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder, &endpoint);
    let commit = store.headers(&source_spec()).await.unwrap().commit.unwrap();
    *hub.head.lock().unwrap() = LATER.into();
    let pinned = SourceSpec { revision: Some(commit.clone()), pinned: true, ..source_spec() };
    assert_eq!(store.fetch(&pinned, &progress()).await.unwrap().manifest.commit, Some(commit));
    assert_eq!(store.headers(&source_spec()).await.unwrap().commit.as_deref(), Some(LATER));

    let nowhere = SourceSpec { revision: Some("no-such-branch".into()), ..source_spec() };
    let error = store.headers(&nowhere).await.unwrap_err();
    assert_eq!(error.reason(), Reason::SourceNotFound);
    assert!(error.to_string().contains("no-such-branch"), "{error}");
}

#[tokio::test]
async fn a_corrupt_header_is_named_with_its_number() {
    let mut hub = hub();
    let weights = hub.files.get_mut("model.safetensors").unwrap();
    weights[..8].copy_from_slice(&999_999_999_u64.to_le_bytes());
    let (_, endpoint) = hub.start().await;
    let folder = tempfile::tempdir().unwrap();
    let error = store(&folder, &endpoint).fetch(&source_spec(), &progress()).await.unwrap_err();
    assert_eq!(error.reason(), Reason::CorruptModel);
    let message = error.chain();
    assert!(message.contains("model.safetensors") && message.contains("999999999"), "{message}");
}

#[tokio::test]
async fn unreachable_source_error_names_address_and_cause() {
    let folder = tempfile::tempdir().unwrap();
    let unused = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = unused.local_addr().unwrap();
    drop(unused);
    let store = store(&folder, &format!("http://{address}"));
    let error = store.headers(&source_spec()).await.unwrap_err();
    assert_eq!(error.reason(), Reason::SourceUnreachable);
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    let error =
        store.headers(&SourceSpec { uri: "ftp://host/x".into(), ..SourceSpec::default() }).await.unwrap_err();
    assert!(error.to_string().contains("hf://"), "{error}");
}

#[tokio::test]
async fn local_folder_is_copied_verified_and_independent() {
    rustls::crypto::ring::default_provider().install_default().ok();
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    std::fs::create_dir(&source).unwrap();
    for (name, bytes) in model(10) {
        std::fs::write(source.join(name), bytes).unwrap();
    }
    let context = Context::new("https://huggingface.co", vec![folder.path().to_owned()]).unwrap();
    let store = Store::open(folder.path().join("models"), context).unwrap();
    let spec = SourceSpec { uri: format!("file://{}", source.display()), ..SourceSpec::default() };
    let published = store.fetch(&spec, &progress()).await.unwrap();
    std::fs::remove_dir_all(&source).unwrap();
    assert_eq!(store.fetch(&spec, &progress()).await.unwrap(), published);
    assert_eq!(published.manifest.shape.layers, 1);
}

#[tokio::test]
async fn busy_source_is_retried_after_its_retry_after() {
    for _ in 0..iterations() {
        let (hub, endpoint) = hub().start().await;
        let refusals =
            [StatusCode::BAD_GATEWAY, StatusCode::SERVICE_UNAVAILABLE, StatusCode::TOO_MANY_REQUESTS];
        *hub.refusals.lock().unwrap() = refusals.to_vec();
        let folder = tempfile::tempdir().unwrap();
        let (progress, began) = (progress(), std::time::Instant::now());
        let mut state = progress.subscribe();
        let store = store(&folder, &endpoint);
        let spec = source_spec();
        let (published, trouble) = tokio::join!(store.fetch(&spec, &progress), async {
            state.wait_for(|state| state.last_error.is_some()).await.unwrap().last_error.clone()
        });
        let trouble = trouble.unwrap();
        assert_eq!(trouble.0, Reason::SourceUnreachable);
        assert!(trouble.1.contains("asks to come back later") || trouble.1.contains("502"), "{trouble:?}");
        assert_eq!(
            std::fs::read(published.unwrap().path.join("model.safetensors")).unwrap(),
            hub.files["model.safetensors"]
        );
        assert!(hub.refusals.lock().unwrap().is_empty());
        // This store's backoff is 10 ms; the server asked for a second.
        assert!(began.elapsed() >= Duration::from_secs(1));
    }
    log("a source that answered 502, 503 and 429, asked again when it wants");
}

#[tokio::test]
async fn redirect_loop_ends_with_a_named_error() {
    for _ in 0..iterations() {
        let (hub, endpoint) = hub().start().await;
        hub.circle.store(true, Ordering::SeqCst);
        let folder = tempfile::tempdir().unwrap();
        let error = store(&folder, &endpoint).headers(&source_spec()).await.unwrap_err();
        assert_eq!(error.reason(), Reason::SourceUnreachable);
        assert!(error.to_string().contains("more than 10 redirects"), "{error}");
    }
    log("a source that redirects in a circle, named");
}

#[tokio::test]
async fn file_changed_at_its_source_is_fetched_from_the_start() {
    for _ in 0..iterations() {
        let (hub, endpoint) = HubServer { changes: true, ..hub() }.start().await;
        hub.cut.lock().unwrap().insert("model.safetensors".into(), (150_000, 1));
        let folder = tempfile::tempdir().unwrap();
        let published = store(&folder, &endpoint).fetch(&source_spec(), &progress()).await.unwrap();
        assert_eq!(
            std::fs::read(published.path.join("model.safetensors")).unwrap(),
            hub.files["model.safetensors"]
        );
        let ranges = hub.ranges.lock().unwrap().clone();
        let resumed = ranges.iter().filter(|(_, range)| range.ends_with('-')).count();
        assert_eq!(resumed, 1, "{ranges:?}");
        assert!(
            hub.served.load(Ordering::SeqCst) >= 400_000 + 150_000,
            "what was there is not what it is now"
        );
    }
    log("a file with another ETag, fetched from its beginning");
}

fn of_tenant(namespace: &str, token: Option<&str>) -> SourceSpec {
    let credentials = token.map(|token| ("token".to_owned(), token.into()));
    SourceSpec {
        scope: SourceScope { namespace: namespace.into(), secret: token.map(|_| "hub".into()) },
        credentials: Credentials::new(credentials),
        ..source_spec()
    }
}

/// Bytes of whole transfers so far, beside those of headers and samples.
fn transfers(hub: &HubServer) -> usize {
    hub.ranges.lock().unwrap().iter().filter(|(_, range)| range.ends_with('-')).count()
}

#[tokio::test]
async fn closed_model_is_given_to_no_namespace_without_a_login() {
    let (hub, endpoint) = HubServer { token: Some("hf_secret".into()), ..hub() }.start().await;
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder, &endpoint);
    let published = store.fetch(&of_tenant("a", Some("hf_secret")), &progress()).await.unwrap();

    let commit = |spec: SourceSpec| SourceSpec { pinned: true, revision: Some(COMMIT.into()), ..spec };
    for other in [
        of_tenant("b", None),
        commit(of_tenant("b", None)),
        commit(of_tenant("b", Some("hf_wrong"))),
        // Without a Secret the same namespace has no access either.
        commit(of_tenant("a", None)),
        // As after a restart: this copy was never complete with it.
        SourceSpec { content: Some("00".repeat(32)), ..commit(of_tenant("b", None)) },
    ] {
        for _ in 0..2 {
            assert_eq!(store.published(&other), None, "{other:?}");
            assert_eq!(store.headers(&other).await.unwrap_err().reason(), Reason::SourceForbidden);
            let error = store.fetch(&other, &progress()).await.unwrap_err();
            assert_eq!(error.reason(), Reason::SourceForbidden, "{error}");
        }
    }

    // Who has access shares the bytes, and fetches no file again.
    let before = hub.served.load(Ordering::SeqCst);
    let shared = store.fetch(&of_tenant("b", Some("hf_secret")), &progress()).await.unwrap();
    let read = hub.served.load(Ordering::SeqCst) - before;
    assert_eq!(shared, published);
    assert!(read < 20_000, "{read}");
    // From then on it is there without a request.
    assert_eq!(store.published(&commit(of_tenant("b", Some("hf_secret")))), Some(published));
}

#[tokio::test]
async fn who_knows_digests_alone_gets_no_bytes() {
    let (_, endpoint) = HubServer { token: Some("hf_secret".into()), ..hub() }.start().await;
    let folder = tempfile::tempdir().unwrap();
    let good =
        store(&folder, &endpoint).fetch(&of_tenant("a", Some("hf_secret")), &progress()).await.unwrap();
    // Another server lists the same digests, sizes and headers, and has other bytes.
    let mut files = model(100_000);
    let digests = files.iter().map(|(name, bytes)| (name.clone(), sha256(bytes))).collect();
    let weights = files.get_mut("model.safetensors").unwrap();
    let data = weights.len() - 400_000;
    weights[data..].fill(0);
    let liar = HubServer {
        files,
        lie: Mutex::new(digests),
        head: Mutex::new(COMMIT.into()),
        ..HubServer::default()
    };
    let (_, endpoint) = liar.start().await;
    let error = store(&folder, &endpoint).fetch(&of_tenant("b", None), &progress()).await.unwrap_err();
    assert_eq!(error.reason(), Reason::DigestMismatch, "{error}");
    // The first one's is as it was.
    assert_eq!(
        std::fs::read(good.path.join("model.safetensors")).unwrap(),
        model(100_000)["model.safetensors"]
    );
}

#[tokio::test]
async fn model_of_an_earlier_release_is_probed_and_not_fetched_again() {
    let (hub, endpoint) = HubServer { token: Some("hf_secret".into()), ..hub() }.start().await;
    let folder = tempfile::tempdir().unwrap();
    let published =
        store(&folder, &endpoint).fetch(&of_tenant("a", Some("hf_secret")), &progress()).await.unwrap();
    // Earlier releases had one name for everybody.
    let names = folder.path().join("models/.names");
    for entry in std::fs::read_dir(&names).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    let spec = SourceSpec {
        pinned: true,
        revision: Some(COMMIT.into()),
        content: Some(published.id.clone()),
        ..of_tenant("a", Some("hf_secret"))
    };
    let store = store(&folder, &endpoint);
    let unscoped = store.keys(&spec).unwrap().into_iter().filter(|key| key.len() == 32);
    for key in unscoped.filter(|key| *key != store.key(&spec).unwrap()) {
        std::fs::write(names.join(key), &published.id).unwrap();
    }
    assert_eq!(store.published(&spec), None, "nobody knows for whom it was fetched");
    assert_eq!(store.published_unscoped(&spec), Some(published.clone()), "while its source does not answer");
    let stranger = SourceSpec { content: None, ..of_tenant("b", None) };
    assert_eq!(store.published_unscoped(&stranger), None);
    assert_eq!(store.fetch(&stranger, &progress()).await.unwrap_err().reason(), Reason::SourceForbidden);

    let before = transfers(&hub);
    assert!(store.collect(&store.keys(&spec).unwrap()).unwrap().is_empty());
    assert_eq!(store.fetch(&spec, &progress()).await.unwrap(), published);
    assert_eq!(transfers(&hub), before, "no file was fetched again");
    assert_eq!(store.published(&spec), Some(published));
}

#[tokio::test]
async fn pause_of_a_hub_holds_for_every_copy_of_the_node() {
    for wait in [("ratelimit", r#""api";r=0;t=600"#), ("retry-after", "600")] {
        let (hub, endpoint) = HubServer { wait: Some(wait), ..hub() }.start().await;
        *hub.refusals.lock().unwrap() = vec![StatusCode::TOO_MANY_REQUESTS; 9];
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder, &endpoint);
        let (spec, progress) = (source_spec(), progress());
        let mut state = progress.subscribe();
        let message = async {
            let state = state.wait_for(|state| state.last_error.is_some()).await.unwrap();
            state.last_error.clone().unwrap().1
        };
        let message = tokio::select! {
            message = message => message,
            done = store.fetch(&spec, &progress) => panic!("{done:?}"),
        };
        assert!(message.contains("until ") && message.contains(" UTC"), "{message}");
        // Another copy of the node does not ask at all.
        let other = SourceSpec { uri: "hf://acme/other".into(), ..source_spec() };
        let error = store.headers(&other).await.unwrap_err();
        assert!(error.retry_after() > Duration::from_secs(500), "{wait:?} {error}");
        // The hub would have listed it.
    }
}

#[tokio::test]
async fn encoding_that_nobody_asked_for_is_named() {
    let (_, endpoint) = HubServer { encoding: Some("gzip"), ..hub() }.start().await;
    let folder = tempfile::tempdir().unwrap();
    let error = store(&folder, &endpoint).headers(&source_spec()).await.unwrap_err();
    assert!(error.to_string().contains("Content-Encoding \"gzip\""), "{error}");
    let (_, endpoint) = HubServer { encoding: Some("identity"), ..hub() }.start().await;
    store(&folder, &endpoint).headers(&source_spec()).await.unwrap();
}

#[tokio::test]
async fn sizes_that_are_listed_wrongly_are_corrected() {
    for (name, size) in [
        ("config.json", 0),
        ("config.json", 7),
        ("model.safetensors", 0),
        ("model.safetensors", 400_000_000),
        ("tokenizer.json", 0),
        ("tokenizer.json", 3),
    ] {
        let (hub, endpoint) = HubServer { listed: BTreeMap::from([(name, size)]), ..hub() }.start().await;
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder, &endpoint);
        let total = store.headers(&source_spec()).await.unwrap().bytes_total;
        let published = store.fetch(&source_spec(), &progress()).await.unwrap();
        for (file, bytes) in &hub.files {
            let fetched = std::fs::read(published.path.join(file));
            assert!(fetched.is_err() || fetched.unwrap() == *bytes, "{name} {size}: {file}");
        }
        let bytes = published.manifest.bytes();
        assert!(total == bytes || name == "tokenizer.json", "{name} {size}: {total} {bytes}");
    }
}

#[tokio::test]
async fn download_goes_on_over_backends_with_tags_of_their_own() {
    // Only a listed digest tells which bytes are right.
    let listed = BTreeMap::from([("model.safetensors", model(100_000)["model.safetensors"].len() as u64)]);
    let (hub, endpoint) = HubServer { backends: AtomicU64::new(1), listed, ..hub() }.start().await;
    hub.cut.lock().unwrap().insert("model.safetensors".into(), (150_000, 2));
    let folder = tempfile::tempdir().unwrap();
    store(&folder, &endpoint).fetch(&source_spec(), &progress()).await.unwrap();
    let ranges = hub.ranges.lock().unwrap().clone();
    let resumed: Vec<&str> = ranges
        .iter()
        .filter(|(file, range)| file == "model.safetensors" && range.ends_with('-'))
        .map(|(_, range)| range.as_str())
        .collect();
    assert_eq!(resumed, ["bytes=150000-", "bytes=300000-"]);
    assert!(hub.served.load(Ordering::SeqCst) < 420_000, "bytes were fetched twice");
}

#[tokio::test]
async fn part_that_is_thrown_away_again_is_no_progress() {
    let (hub, endpoint) = hub().start().await;
    hub.shifted.store(true, Ordering::SeqCst);
    hub.cut.lock().unwrap().insert("model.safetensors".into(), (150_000, u32::MAX));
    let folder = tempfile::tempdir().unwrap();
    let context = Context::new(&endpoint, vec![]).unwrap();
    rustls::crypto::ring::default_provider().install_default().ok();
    let mut context = context.with_private_sources(&["127.0.0.1".parse().unwrap()]).unwrap();
    // Pauses of 25, 50, 100 … ms. When each fresh start reset them there were 13 resumed attempts in a second.
    context.retry = Duration::from_millis(25);
    let store = Store::open(folder.path().join("models"), context).unwrap();
    tokio::time::timeout(Duration::from_secs(1), store.fetch(&source_spec(), &progress())).await.unwrap_err();
    let resumed = transfers(&hub);
    assert!((2..10).contains(&resumed), "{resumed} attempts");
}
