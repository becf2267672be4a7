//! Misbehaving buckets on loopback with the API of S3.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use russet_crds::conditions::Reason;
use tokio::sync::watch;

use super::*;
use crate::store::{SourceScope, Store, TransferProgress};

/// A bucket, and its misbehaviour.
#[derive(Default)]
struct BucketServer {
    objects: Mutex<BTreeMap<String, Vec<u8>>>,
    /// Error response to all requests.
    refusal: Mutex<Option<(StatusCode, &'static str)>>,
    /// Bytes after which transfers of `model.safetensors` break off, once.
    cut: Mutex<Option<usize>>,
    /// Whether that file is replaced after the interruption.
    replaced: AtomicBool,
    /// Bytes that the listing adds to each size.
    lie: Mutex<u64>,
    /// Leading spaces of its listings.
    padding: usize,
    /// Its region, if it checks that.
    region: Option<&'static str>,
    /// `Authorization` and `Range` headers of all requests.
    requests: Mutex<Vec<(Option<String>, Option<String>)>>,
}

fn tag(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    format!("\"{}-1\"", hex::encode(&sha2::Sha256::digest(bytes)[..16]))
}

fn answer(status: StatusCode, body: impl Into<Body>) -> Response {
    Response::builder().status(status).body(body.into()).unwrap()
}

async fn serve(State(served): State<Arc<BucketServer>>, request: Request) -> Response {
    let text = |name: &str| request.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    let (authorization, range) = (text("authorization"), text("range"));
    served.requests.lock().unwrap().push((authorization.clone(), range.clone()));
    if let Some((status, code)) = *served.refusal.lock().unwrap() {
        let mut answer = answer(status, format!("<Error><Code>{code}</Code></Error>"));
        answer.headers_mut().insert("retry-after", "7".parse().unwrap());
        answer.headers_mut().insert("location", "http://elsewhere.invalid/".parse().unwrap());
        return answer;
    }
    if let Some(region) = served.region
        && !authorization.unwrap_or_default().contains(&format!("/{region}/s3/"))
    {
        let mut answer =
            answer(StatusCode::BAD_REQUEST, "<Error><Code>AuthorizationHeaderMalformed</Code></Error>");
        answer.headers_mut().insert("x-amz-bucket-region", region.parse().unwrap());
        return answer;
    }
    let uri = request.uri();
    if uri.path() == "/models" {
        return answer(StatusCode::OK, listing(&served, uri.query().unwrap_or_default()));
    }
    let name = uri.path().strip_prefix("/models/").unwrap_or_default();
    object(&served, name, range.as_deref(), request.headers())
}

/// A page of two objects.
fn listing(served: &BucketServer, query: &str) -> String {
    let query: BTreeMap<_, _> =
        reqwest::Url::parse(&format!("http://x/?{query}")).unwrap().query_pairs().into_owned().collect();
    assert_eq!(query["delimiter"], "/", "folders below are not asked for");
    let objects = served.objects.lock().unwrap();
    let after = query.get("continuation-token").cloned().unwrap_or_default();
    let mut left =
        objects.iter().filter(|(key, _)| **key > after && key.starts_with(&query["prefix"])).peekable();
    let mut text = " ".repeat(served.padding) + "<ListBucketResult>";
    let mut last = String::new();
    for (key, bytes) in left.by_ref().take(2) {
        let (size, tag) = (bytes.len() as u64 + *served.lie.lock().unwrap(), tag(bytes));
        let (time, before) = ("2026-11-24T12:00:00.000Z", text.len());
        write!(
            text,
            "<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>{time}</LastModified><ETag>{tag}</ETag></Contents>"
        )
        .unwrap();
        last.clone_from(key);
        // Deeper objects appear as a common prefix.
        if let Some((folder, _)) = key[query["prefix"].len()..].split_once('/') {
            text.truncate(before);
            let prefix = &query["prefix"];
            write!(text, "<CommonPrefixes><Prefix>{prefix}{folder}/</Prefix></CommonPrefixes>").unwrap();
        }
    }
    if left.peek().is_some() {
        write!(text, "<NextContinuationToken>{last}</NextContinuationToken>").unwrap();
    }
    text + "</ListBucketResult>"
}

fn object(served: &BucketServer, name: &str, range: Option<&str>, headers: &HeaderMap) -> Response {
    let mut objects = served.objects.lock().unwrap();
    let Some(bytes) = objects.get_mut(name) else { return answer(StatusCode::NOT_FOUND, "") };
    if headers.get("if-match").is_some_and(|expected| expected.to_str().unwrap() != tag(bytes)) {
        return answer(StatusCode::PRECONDITION_FAILED, "");
    }
    let (from, to) = range.unwrap().trim_start_matches("bytes=").split_once('-').unwrap();
    let (from, to): (usize, usize) = (from.parse().unwrap(), to.parse().unwrap());
    let part = bytes[from..bytes.len().min(to + 1)].to_vec();
    let response = Response::builder()
        .status(StatusCode::PARTIAL_CONTENT)
        .header("etag", tag(bytes))
        .header("last-modified", "Tue, 24 Nov 2026 12:00:00 GMT")
        .header("content-length", part.len())
        .header("content-range", format!("bytes {from}-{}/{}", from + part.len() - 1, bytes.len()));
    let mut cut = served.cut.lock().unwrap();
    let body = match cut.filter(|after| name.ends_with("model.safetensors") && part.len() > *after) {
        Some(after) => {
            *cut = None;
            if served.replaced.load(Ordering::SeqCst) {
                bytes.iter_mut().rev().take(8).for_each(|byte| *byte ^= 1);
            }
            let first = futures::stream::iter([Ok(part[..after].to_vec())]);
            Body::from_stream(first.chain(futures::stream::once(async {
                tokio::task::yield_now().await;
                Err(std::io::Error::other("cut"))
            })))
        }
        None => part.into(),
    };
    response.body(body).unwrap()
}

/// A bucket with a tiny model, whose weight has `elements` values.
fn bucket(elements: usize) -> BucketServer {
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
    let objects = [
        ("tiny/config.json", config.as_bytes().to_vec()),
        ("tiny/model.safetensors", weights),
        ("tiny/run.py", b"import os".to_vec()),
        ("tiny/tokenizer.json", b"{}".to_vec()),
        ("tiny.json", b"of another folder".to_vec()),
    ];
    let objects = objects.map(|(name, bytes)| (name.to_owned(), bytes)).into();
    BucketServer { objects: Mutex::new(objects), ..BucketServer::default() }
}

struct BucketFixture {
    served: Arc<BucketServer>,
    spec: SourceSpec,
    store: Store,
    _folder: tempfile::TempDir,
}

async fn open(served: BucketServer, secret: &[(&str, &str)]) -> BucketFixture {
    rustls::crypto::ring::default_provider().install_default().ok();
    let served = Arc::new(served);
    let router = axum::Router::new().fallback(serve).with_state(served.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    let secret = secret.iter().copied().chain([("AWS_ENDPOINT_URL", endpoint.as_str())]);
    let credentials = Credentials::new(secret.map(|(key, value)| (key.to_owned(), value.into())));
    let folder = tempfile::tempdir().unwrap();
    let context = Context::new("http://127.0.0.1:1", vec![]).unwrap();
    let mut context = context.with_private_sources(&["127.0.0.0/8".parse().unwrap()]).unwrap();
    context.retry = std::time::Duration::from_millis(10);
    let store = Store::open(folder.path().join("models"), context).unwrap();
    BucketFixture {
        served,
        spec: SourceSpec { uri: "s3://models/tiny".into(), credentials, ..SourceSpec::default() },
        store,
        _folder: folder,
    }
}

impl BucketFixture {
    async fn fetch(&self) -> Result<crate::store::Published, StoreError> {
        self.store.fetch(&self.spec, &watch::Sender::new(TransferProgress::default())).await
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        self.served.objects.lock().unwrap()[&format!("tiny/{name}")].clone()
    }
}

const SIGNED: &[(&str, &str)] = &[("AWS_ACCESS_KEY_ID", "AKID"), ("AWS_SECRET_ACCESS_KEY", "top secret")];

#[tokio::test]
async fn object_folder_downloads_whole_and_resumes() {
    let open = open(bucket(100_000), SIGNED).await;
    *open.served.cut.lock().unwrap() = Some(150_000);
    let published = open.fetch().await.unwrap();
    let names: Vec<&str> = published.manifest.files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(names, ["config.json", "model.safetensors", "tokenizer.json"]);
    for name in names {
        assert_eq!(std::fs::read(published.path.join(name)).unwrap(), open.bytes(name), "{name}");
    }
    let asked = open.served.requests.lock().unwrap();
    let signed = |shown: &Option<String>| {
        shown.as_ref().is_some_and(|text| text.starts_with("AWS4-HMAC-SHA256 Credential=AKID/"))
    };
    assert!(asked.iter().all(|(shown, _)| signed(shown)));
    let resumed = |range: &str| {
        range.starts_with("bytes=") && !range.starts_with("bytes=0-") && !range.starts_with("bytes=8-")
    };
    assert!(asked.iter().any(|(_, range)| range.as_deref().is_some_and(resumed)), "{asked:?}");
}

#[tokio::test]
async fn object_replaced_mid_download_is_relisted_never_mixed() {
    let open = open(bucket(100_000), SIGNED).await;
    *open.served.cut.lock().unwrap() = Some(150_000);
    open.served.replaced.store(true, Ordering::SeqCst);
    let error = open.fetch().await.unwrap_err();
    assert!(
        matches!(&error, StoreError::Replaced { what } if what == "s3://models/tiny/model.safetensors"),
        "{error}"
    );
    let published = open.fetch().await.unwrap();
    let name = "model.safetensors";
    assert_eq!(std::fs::read(published.path.join(name)).unwrap(), open.bytes(name));
}

#[tokio::test]
async fn one_uri_of_two_accounts_is_two_models() {
    let (one, other) = (open(bucket(10), SIGNED).await, open(bucket(20), SIGNED).await);
    let of = |bucket: &BucketFixture, namespace: &str, content: Option<&str>| SourceSpec {
        scope: SourceScope { namespace: namespace.into(), secret: Some("bucket".into()) },
        content: content.map(str::to_owned),
        ..bucket.spec.clone()
    };
    // One node.
    let store = &one.store;
    let fetch = async |spec: &SourceSpec| {
        let published = store.fetch(spec, &watch::Sender::new(TransferProgress::default())).await.unwrap();
        (published.id, std::fs::read(published.path.join("model.safetensors")).unwrap())
    };
    let (first, second) = (of(&one, "a", None), of(&other, "b", None));
    assert_eq!(store.key(&first).zip(store.key(&second)).map(|(first, second)| first == second), Some(false));
    let (id_a, bytes_a) = fetch(&first).await;
    let (id_b, bytes_b) = fetch(&second).await;
    assert!(bytes_a == one.bytes("model.safetensors") && bytes_b == other.bytes("model.safetensors"));
    assert_ne!(id_a, id_b);
    for (spec, id) in [(&first, &id_a), (&second, &id_b)] {
        assert_eq!(store.published(spec).map(|it| it.id).as_ref(), Some(id), "without a request");
        // As an agent looks after a restart, before it reads any Secret.
        let offline = SourceSpec { credentials: Credentials::default(), ..spec.clone() };
        assert_eq!(store.published(&offline), None);
        let known = SourceSpec { content: Some(id.clone()), ..offline };
        assert_eq!(store.published(&known).map(|it| it.id).as_ref(), Some(id));
    }
    // The Secret of `a` names the other server now.
    let moved = of(&other, "a", None);
    assert_eq!(store.published(&moved), None);
    let (id, bytes) = fetch(&moved).await;
    assert!(id == id_b && bytes == bytes_b);
    assert_eq!(fetch(&second).await.0, id_b);
}

#[tokio::test]
async fn requests_without_credentials_are_unsigned() {
    let open = open(bucket(10), &[]).await;
    open.fetch().await.unwrap();
    assert!(open.served.requests.lock().unwrap().iter().all(|(shown, _)| shown.is_none()));
    let endpoint = open.spec.credentials.get("AWS_ENDPOINT_URL").unwrap();
    for (uri, key) in
        [("gs://models/tiny", "STORAGE_EMULATOR_HOST"), ("az://models/tiny", "AZURE_STORAGE_ENDPOINT")]
    {
        let secret = [(key, endpoint), ("AZURE_STORAGE_ACCOUNT_NAME", "somebody")];
        let credentials = Credentials::new(secret.map(|(key, value)| (key.to_owned(), value.into())));
        let spec = SourceSpec { uri: uri.into(), credentials, ..SourceSpec::default() };
        // Their protocols differ from this bucket's; the test checks the credentials they send.
        open.store.headers(&spec).await.unwrap_err();
    }
    let asked = open.served.requests.lock().unwrap();
    assert!(asked.iter().all(|(shown, _)| shown.is_none()) && asked.len() > 5, "{asked:?}");
}

#[tokio::test]
async fn a_bucket_in_another_region_is_found_there() {
    let elsewhere = BucketServer { region: Some("eu-west-1"), ..bucket(10) };
    open(elsewhere, SIGNED).await.fetch().await.unwrap();
    let named = [SIGNED, &[("AWS_REGION", "us-west-2")]].concat();
    let elsewhere = BucketServer { region: Some("eu-west-1"), ..bucket(10) };
    let error = open(elsewhere, &named).await.fetch().await.unwrap_err();
    assert!(error.chain().contains("AuthorizationHeaderMalformed"), "{error}");
    let hostile = BucketServer { region: Some("evil.example/"), ..bucket(10) };
    let error = open(hostile, SIGNED).await.fetch().await.unwrap_err();
    assert_eq!(error.reason(), Reason::SourceUnreachable);
}

#[tokio::test]
async fn every_refusal_is_a_reason_and_shows_no_key() {
    let cases = [
        (StatusCode::FORBIDDEN, "SignatureDoesNotMatch", Reason::SourceForbidden, 0),
        (StatusCode::BAD_REQUEST, "ExpiredToken", Reason::SourceForbidden, 0),
        (StatusCode::NOT_FOUND, "NoSuchBucket", Reason::SourceNotFound, 0),
        (StatusCode::TOO_MANY_REQUESTS, "SlowDown", Reason::SourceUnreachable, 7),
        (StatusCode::SERVICE_UNAVAILABLE, "SlowDown", Reason::SourceUnreachable, 7),
        (StatusCode::INTERNAL_SERVER_ERROR, "InternalError", Reason::SourceUnreachable, 0),
        (StatusCode::TEMPORARY_REDIRECT, "TemporaryRedirect", Reason::SourceUnreachable, 0),
    ];
    for (status, code, reason, after) in cases {
        // Another server each: one that asks for a pause is not asked again.
        let open = open(bucket(10), SIGNED).await;
        *open.served.refusal.lock().unwrap() = Some((status, code));
        let error = open.store.headers(&open.spec).await.unwrap_err();
        assert_eq!((error.reason(), error.retry_after().as_secs()), (reason, after), "{error}");
        assert!(error.chain().contains(code) && error.chain().contains("s3://models/tiny"), "{error}");
        assert!(!error.chain().contains("secret ") && !error.chain().contains("http://"), "{error}");
    }
}

#[tokio::test]
async fn wrong_object_sizes_and_folders_without_model_are_refused() {
    let open = open(bucket(10), SIGNED).await;
    *open.served.lie.lock().unwrap() = 5;
    let error = open.store.headers(&open.spec).await.unwrap_err();
    assert!(matches!(error, StoreError::Replaced { .. }), "{error}");
    let nowhere = SourceSpec { uri: "s3://models/nothing".into(), ..open.spec.clone() };
    assert_eq!(open.store.headers(&nowhere).await.unwrap_err().reason(), Reason::SourceNotFound);
}

#[tokio::test]
async fn a_listing_without_end_is_not_read_to_its_end() {
    open(BucketServer { padding: 1 << 20, ..bucket(10) }, SIGNED).await.fetch().await.unwrap();
    let error =
        open(BucketServer { padding: 17 << 20, ..bucket(10) }, SIGNED).await.fetch().await.unwrap_err();
    assert_eq!(error.reason(), Reason::SourceUnreachable, "{error}");
    assert!(error.chain().contains("16777216 bytes"), "{error}");
}

#[tokio::test]
async fn object_names_outside_the_folder_are_never_written() {
    for (key, fetched) in [
        ("tiny/..", false),
        ("tiny//config.json", false),
        ("tiny/..\\config.json", true),
        ("tiny/%2e%2e%2fconfig.json", true),
        ("tiny/CONFIG.json", false),
        ("tiny/.hidden.json", true),
        ("tiny/line\nfeed.json", false),
        ("tiny/config.json/", true),
    ] {
        let open = open(bucket(10), SIGNED).await;
        open.served.objects.lock().unwrap().insert(key.into(), b"hostile".to_vec());
        let outcome = open.fetch().await;
        assert_eq!(outcome.is_ok(), fetched, "{key}: {outcome:?}");
        let published = match outcome {
            Ok(published) => published,
            Err(error) => {
                assert_eq!(error.reason(), Reason::InvalidSpec, "{key}: {error}");
                continue;
            }
        };
        let names: Vec<&str> = published.manifest.files.iter().map(|file| file.name.as_str()).collect();
        assert_eq!(names, ["config.json", "model.safetensors", "tokenizer.json"], "{key}");
        assert_eq!(std::fs::read(published.path.join("config.json")).unwrap(), open.bytes("config.json"));
    }
}

#[tokio::test]
async fn checksum_file_serves_as_the_folder_listing() {
    let open = open(bucket(10), SIGNED).await;
    let sum = |name: &str| {
        use sha2::Digest as _;
        format!("{}  {name}\n", hex::encode(sha2::Sha256::digest(open.bytes(name))))
    };
    let good = sum("config.json") + &sum("model.safetensors") + &sum("run.py");
    let put = |text: String| {
        open.served.objects.lock().unwrap().insert("tiny/SHA256SUMS".into(), text.into_bytes());
    };
    put(good.clone() + &format!("{}  gone.json\n", "ab".repeat(32)));
    assert_eq!(open.fetch().await.unwrap_err().reason(), Reason::SourceNotFound);
    put(good.replace("  config.json", "  tokenizer.json") + &sum("config.json"));
    assert_eq!(open.fetch().await.unwrap_err().reason(), Reason::DigestMismatch);
    put(good);
    let published = open.fetch().await.unwrap();
    let names: Vec<&str> = published.manifest.files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(names, ["config.json", "model.safetensors"]);
}

#[test]
fn only_plain_names_are_buckets_and_folders() {
    for (uri, expected) in [
        ("s3://models/a/b", Some("a/b")),
        ("gs://models/a/", Some("a")),
        ("az://models", Some("")),
        ("s3://m/a", None),
        ("s3://models/../other", None),
        ("s3://models/a//b", None),
        ("s3://mod els/a", None),
        ("s3://user@models/a", None),
        ("s3://models:80/a", None),
        ("s3://..s/a", None),
    ] {
        assert_eq!(
            BucketPrefix::parse(uri).ok().map(|folder| folder.path.to_string()).as_deref(),
            expected,
            "{uri}"
        );
    }
}

#[tokio::test]
async fn unusable_secrets_are_refused_before_any_request() {
    let context = Context::new("http://127.0.0.1:1", vec![]).unwrap();
    for (uri, secret, said) in [
        ("s3://models/a", vec![("AWS_ACCESS_KEY_ID", "x")], "add the other"),
        ("s3://models/a", vec![("AWS_ENDPOINT_URL", "store:9000")], "AWS_ENDPOINT_URL"),
        ("s3://models/a", vec![("AWS_ENDPOINT_URL", "ftp://store")], "https://"),
        ("gs://models/a", vec![("STORAGE_EMULATOR_HOST", "http://10.0.0.1:1")], "https://"),
        ("gs://models/a", vec![("GOOGLE_SERVICE_ACCOUNT", "{}")], "Secret"),
        ("az://models/a", vec![], "AZURE_STORAGE_ACCOUNT_NAME"),
        (
            "az://models/a",
            vec![("AZURE_STORAGE_ACCOUNT_NAME", "a"), ("AZURE_STORAGE_ACCOUNT_KEY", "not base 64 !")],
            "Secret",
        ),
    ] {
        let credentials =
            Credentials::new(secret.iter().map(|(key, value)| ((*key).to_owned(), (*value).into())));
        let spec = SourceSpec { uri: uri.into(), credentials, ..SourceSpec::default() };
        let Err(error) = list(&context, &spec).await else { panic!("{uri} {secret:?}") };
        assert_eq!(error.reason(), Reason::InvalidSpec, "{error}");
        assert!(error.chain().contains(said), "{error}");
    }
}
