//! A registry on loopback that requires authentication, redirects for blobs, and misbehaves.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use axum::routing::get;
use russet_crds::conditions::Reason;
use tokio::sync::watch;

use super::*;
use crate::store::{Credentials, Store, TransferProgress};

const LOGIN: &str = "Basic bWU6c2VjcmV0";

#[derive(Default)]
struct RegistryServer {
    manifest: Mutex<Vec<u8>>,
    blobs: Mutex<BTreeMap<String, Vec<u8>>>,
    /// Whether a token is required, which is valid for that many requests.
    private: Option<u64>,
    left: AtomicU64,
    /// Logins and scopes that the realm received.
    logins: Mutex<Vec<(Option<String>, String)>>,
    /// How often the blob host received credentials.
    leaked: AtomicU64,
    realm: Mutex<String>,
    elsewhere: Mutex<String>,
}

fn answer(status: StatusCode, body: impl Into<Body>) -> Response {
    Response::builder().status(status).body(body.into()).unwrap()
}

impl RegistryServer {
    /// The error response to a request, if it is to fail.
    fn refuses(&self, headers: &HeaderMap) -> Option<Response> {
        let good = self.private?;
        let shown = headers.get("authorization").map(|value| value.to_str().unwrap());
        let fresh = |left: u64| left.checked_sub(1);
        if shown == Some("Bearer granted")
            && self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fresh).is_ok()
        {
            return None;
        }
        self.left.store(good, Ordering::SeqCst);
        let challenge = format!(
            r#"Bearer realm="{}",service="here",scope="repository:all:*""#,
            self.realm.lock().unwrap()
        );
        let refusal = Response::builder().status(401).header("www-authenticate", challenge);
        Some(refusal.body(Body::empty()).unwrap())
    }
}

async fn manifest(State(served): State<Arc<RegistryServer>>, headers: HeaderMap) -> Response {
    assert!(headers["accept"].to_str().unwrap().contains("application/vnd.oci.image.manifest.v1+json"));
    served
        .refuses(&headers)
        .unwrap_or_else(|| answer(StatusCode::OK, served.manifest.lock().unwrap().clone()))
}

async fn blob(
    State(served): State<Arc<RegistryServer>>,
    Path(digest): Path<String>,
    headers: HeaderMap,
) -> Response {
    served.refuses(&headers).unwrap_or_else(|| {
        let there = format!("{}/bytes/{digest}", served.elsewhere.lock().unwrap());
        Response::builder().status(307).header("location", there).body(Body::empty()).unwrap()
    })
}

async fn bytes(
    State(served): State<Arc<RegistryServer>>,
    Path(digest): Path<String>,
    headers: HeaderMap,
) -> Response {
    served.leaked.fetch_add(u64::from(headers.contains_key("authorization")), Ordering::SeqCst);
    match served.blobs.lock().unwrap().get(&digest) {
        Some(bytes) => answer(StatusCode::OK, bytes.clone()),
        None => answer(StatusCode::NOT_FOUND, ""),
    }
}

async fn token(State(served): State<Arc<RegistryServer>>, request: axum::extract::Request) -> Response {
    let shown = request.headers().get("authorization").map(|value| value.to_str().unwrap().to_owned());
    let query = request.uri().query().unwrap_or_default().to_owned();
    served.logins.lock().unwrap().push((shown.clone(), query));
    match shown.as_deref() {
        Some(LOGIN) => answer(StatusCode::OK, r#"{"token": "granted", "expires_in": 60}"#),
        _ => answer(StatusCode::UNAUTHORIZED, "{}"),
    }
}

/// Puts a layer into the registry; returns its digest.
fn put(served: &RegistryServer, title: &str, content: &[u8]) -> serde_json::Value {
    let digest = format!("sha256:{}", hex::encode(Sha256::digest(content)));
    served.blobs.lock().unwrap().insert(digest.clone(), content.to_vec());
    serde_json::json!({
        "mediaType": "application/vnd.oci.image.layer.v1.tar",
        "digest": digest, "size": content.len(), "annotations": {TITLE: title},
    })
}

fn config() -> &'static [u8] {
    br#"{"model_type":"llama","num_hidden_layers":1,"hidden_size":4,"num_attention_heads":2,"vocab_size":2}"#
}

fn weights() -> Vec<u8> {
    let header = serde_json::json!({
        "model.embed_tokens.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        "model.layers.0.w.weight": {"dtype": "F32", "shape": [10], "data_offsets": [32, 72]},
    });
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[7; 72]].concat()
}

impl RegistryServer {
    fn publish(&self, layers: &[serde_json::Value]) {
        let manifest = serde_json::json!({"schemaVersion": 2, "layers": layers});
        *self.manifest.lock().unwrap() = manifest.to_string().into_bytes();
    }

    /// A tiny model, with other layers that users push.
    fn with_model(self) -> Self {
        let layers = [
            put(&self, "config.json", config()),
            put(&self, "model.safetensors", &weights()),
            put(&self, "../../etc/passwd.json", b"hostile"),
            put(&self, "sub/config.json", b"hostile"),
            put(&self, "run.py", b"hostile"),
        ];
        self.publish(&layers);
        self
    }
}

struct RegistryFixture {
    served: Arc<RegistryServer>,
    store: Store,
    host: String,
    _folder: tempfile::TempDir,
}

async fn open(served: RegistryServer) -> RegistryFixture {
    rustls::crypto::ring::default_provider().install_default().ok();
    let served = Arc::new(served);
    let router = axum::Router::new()
        .route("/v2/acme/tiny/manifests/{reference}", get(manifest))
        .route("/v2/acme/tiny/blobs/{digest}", get(blob))
        .route("/bytes/{digest}", get(bytes))
        .route("/token", get(token))
        .with_state(served.clone());
    // Three listeners are three origins: the registry, its realm, and the blob host.
    let mut hosts = Vec::new();
    for _ in 0..3 {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        hosts.push(listener.local_addr().unwrap().to_string());
        let router = router.clone();
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    }
    if served.realm.lock().unwrap().is_empty() {
        *served.realm.lock().unwrap() = format!("http://{}/token", hosts[1]);
    }
    *served.elsewhere.lock().unwrap() = format!("http://{}", hosts[2]);
    let folder = tempfile::tempdir().unwrap();
    let context = Context::new("http://127.0.0.1:1", vec![]).unwrap();
    let mut context = context.with_private_sources(&["127.0.0.0/8".parse().unwrap()]).unwrap();
    context.retry = std::time::Duration::from_millis(10);
    let store = Store::open(folder.path().join("models"), context).unwrap();
    RegistryFixture { served, store, host: hosts[0].clone(), _folder: folder }
}

impl RegistryFixture {
    fn source_spec(&self, secret: &[(&str, &str)]) -> SourceSpec {
        let secret = secret.iter().map(|(key, value)| ((*key).to_owned(), (*value).into()));
        let (uri, credentials) = (format!("oci://{}/acme/tiny:v1", self.host), Credentials::new(secret));
        SourceSpec { uri, credentials, ..SourceSpec::default() }
    }

    async fn fetch(&self, spec: &SourceSpec) -> Result<crate::store::Published, StoreError> {
        self.store.fetch(spec, &watch::Sender::new(TransferProgress::default())).await
    }
}

const SECRET: &[(&str, &str)] = &[("username", "me"), ("password", "secret")];

#[tokio::test]
async fn files_are_the_titled_layers_and_the_manifest_is_the_commit() {
    let open = open(RegistryServer::default().with_model()).await;
    let published = open.fetch(&open.source_spec(&[])).await.unwrap();
    let names: Vec<&str> = published.manifest.files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(names, ["config.json", "model.safetensors"]);
    assert_eq!(std::fs::read(published.path.join("model.safetensors")).unwrap(), weights());
    let digest = format!("sha256:{}", hex::encode(Sha256::digest(&*open.served.manifest.lock().unwrap())));
    assert_eq!(published.manifest.commit.as_ref(), Some(&digest));

    // A pin to the digest gets nothing else under the same tag.
    let pinned = SourceSpec { pinned: true, revision: Some(digest.clone()), ..open.source_spec(&[]) };
    assert!(open.store.published(&pinned).is_some());
    let by_digest =
        SourceSpec { uri: format!("oci://{}/acme/tiny@{digest}", open.host), ..SourceSpec::default() };
    open.store.headers(&by_digest).await.unwrap();
    open.served.publish(&[put(&open.served, "config.json", config())]);
    for spec in [pinned, by_digest] {
        assert_eq!(open.store.headers(&spec).await.unwrap_err().reason(), Reason::DigestMismatch);
    }
}

#[tokio::test]
async fn registry_credentials_go_only_to_their_realm_and_registry() {
    // A token for two requests: it must be renewed in the middle.
    let open = open(RegistryServer { private: Some(2), ..RegistryServer::default().with_model() }).await;
    let error = open.store.headers(&open.source_spec(&[])).await.unwrap_err();
    assert_eq!(error.reason(), Reason::SourceForbidden, "{error}");
    open.served.logins.lock().unwrap().clear();

    open.fetch(&open.source_spec(SECRET)).await.unwrap();
    let logins = open.served.logins.lock().unwrap();
    assert!(logins.len() >= 2, "{logins:?}");
    let asked = "service=here&scope=repository%3Aacme%2Ftiny%3Apull";
    assert!(
        logins.iter().all(|(shown, query)| shown.as_deref() == Some(LOGIN) && query == asked),
        "{logins:?}"
    );
    assert_eq!(open.served.leaked.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn realm_without_tls_receives_no_credentials() {
    for realm in ["http://192.0.2.1/token", "ftp://127.0.0.1/token", "nowhere", ""] {
        let served = RegistryServer { private: Some(9), ..RegistryServer::default().with_model() };
        // An empty realm would be filled in.
        realm.clone_into(&mut served.realm.lock().unwrap());
        if realm.is_empty() {
            " ".clone_into(&mut served.realm.lock().unwrap());
        }
        let open = open(served).await;
        let error = open.store.headers(&open.source_spec(SECRET)).await.unwrap_err();
        assert_eq!(error.reason(), Reason::SourceUnreachable, "{error}");
        assert!(error.chain().contains("asks for a token from"), "{error}");
    }
}

#[tokio::test]
async fn corrupt_layers_and_non_model_manifests_are_refused() {
    let open = open(RegistryServer::default()).await;
    let spec = open.source_spec(&[]);
    let served = &open.served;
    let lying = |field: &str, value: serde_json::Value| {
        let mut layer = put(served, "config.json", config());
        layer[field] = value;
        layer
    };
    let whole = put(served, "model.safetensors", &weights());
    let other = format!("sha256:{}", "ab".repeat(32));
    served.blobs.lock().unwrap().insert(other.clone(), config().to_vec());
    for (layer, reason) in [
        (lying("digest", other.into()), Reason::DigestMismatch),
        (lying("digest", "sha512:00".into()), Reason::InvalidSpec),
        (lying("digest", "sha256:../../../x".into()), Reason::InvalidSpec),
        (lying("size", (-1).into()), Reason::SourceUnreachable),
        (lying("size", (config().len() + 1).into()), Reason::Truncated),
        (lying("size", u64::MAX.into()), Reason::CorruptModel),
        (lying("annotations", serde_json::json!({TITLE: "model.safetensors"})), Reason::InvalidSpec),
        (lying("annotations", serde_json::json!({TITLE: "MODEL.safetensors"})), Reason::InvalidSpec),
        (lying("annotations", serde_json::json!({})), Reason::CorruptModel),
        (
            lying("annotations", serde_json::json!({TITLE: "config.json", UNPACK: "true"})),
            Reason::CorruptModel,
        ),
    ] {
        served.publish(&[whole.clone(), layer.clone()]);
        let error = open.fetch(&spec).await.unwrap_err();
        assert_eq!(error.reason(), reason, "{layer}: {error}");
    }
    for (manifest, reason) in [
        (r#"{"manifests": [{"digest": "sha256:x"}]}"#, Reason::InvalidSpec),
        (r#"{"layers": []}"#, Reason::InvalidSpec),
        ("<html>", Reason::SourceUnreachable),
    ] {
        *served.manifest.lock().unwrap() = manifest.into();
        let error = open.store.headers(&spec).await.unwrap_err();
        assert_eq!(error.reason(), reason, "{manifest}: {error}");
    }
    *served.manifest.lock().unwrap() = vec![b' '; MAX_MANIFEST_BYTES + 1];
    let error = open.store.headers(&spec).await.unwrap_err();
    assert!(error.chain().contains(&MAX_MANIFEST_BYTES.to_string()), "{error}");
}

#[test]
fn a_uri_names_a_registry_an_artifact_and_which_of_it() {
    let digest = format!("sha256:{}", "0a".repeat(32));
    let by_digest = format!("oci://ghcr.io/a/b:v1@{digest}");
    let upper = format!("oci://ghcr.io/a/b@sha256:{}", "0A".repeat(32));
    for (uri, revision, pinned, expected) in [
        ("oci://ghcr.io/a/b:v1", None, false, Some(("https://ghcr.io", "a/b", "v1"))),
        ("oci://ghcr.io/a/b", None, false, Some(("https://ghcr.io", "a/b", "latest"))),
        ("oci://ghcr.io/a/b", Some("v2"), false, Some(("https://ghcr.io", "a/b", "v2"))),
        ("oci://ghcr.io/a/b:v1", Some("v2"), false, None),
        ("oci://ghcr.io/a/b:v1", Some(digest.as_str()), true, Some(("https://ghcr.io", "a/b", &digest))),
        (by_digest.as_str(), None, false, Some(("https://ghcr.io", "a/b", &digest))),
        ("oci://localhost:5000/a:v", None, false, Some(("http://localhost:5000", "a", "v"))),
        ("oci://[::1]:5000/a:v", None, false, Some(("http://[::1]:5000", "a", "v"))),
        ("oci://10.0.0.1:5000/a:v", None, false, Some(("https://10.0.0.1:5000", "a", "v"))),
        (upper.as_str(), None, false, None),
        ("oci://ghcr.io", None, false, None),
        ("oci://ghcr.io/", None, false, None),
        ("oci://ghcr.io/A/b", None, false, None),
        ("oci://ghcr.io/a/../b", None, false, None),
        ("oci://ghcr.io/a//b", None, false, None),
        ("oci://ghcr.io/a?x=y", None, false, None),
        ("oci://me@ghcr.io/a", None, false, None),
        ("oci://ghcr.io/a:v/1", None, false, None),
        ("oci://ghcr.io/a:", None, false, None),
        ("oci://ghcr.io/a@md5:00", None, false, None),
    ] {
        let revision = revision.map(str::to_owned);
        let asked = SourceSpec { uri: uri.to_owned(), revision, pinned, ..SourceSpec::default() };
        let url = Artifact::parse(&asked).and_then(|found| found.url(uri, "manifests", &found.reference));
        let expected =
            expected.map(|(host, name, reference)| format!("{host}/v2/{name}/manifests/{reference}"));
        assert_eq!(url.as_ref().map(Url::as_str).ok(), expected.as_deref(), "{uri}");
    }
}
