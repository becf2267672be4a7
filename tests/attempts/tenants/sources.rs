//! Other tenants' models and credentials, and the machine's networks and folders.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, ensure};
use reqwest::Method;
use russet_tests::bucket::FakeBucket;
use russet_tests::cluster::{condition, is_ready_as_edited, repository};
use russet_tests::tenants::{HOSTILE, OTHER, RUSSET, TenantMachine};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::table;

use super::{BUCKETS, CLOSED, OPEN, SMOKE_FILES, collection, create, delete, path, reason, row, send};

/// A Model that every node fetches.
fn model(name: &str, uri: &str, secret: Option<&str>) -> Value {
    let mut model = table::model(name, uri);
    model["spec"]["preload"] = json!({"policy": "Always"});
    if let Some(secret) = secret {
        model["spec"]["source"]["secretRef"] = json!({ "name": secret });
    }
    model
}

fn secret(name: &str, values: &[(&str, &str)]) -> Value {
    let values: serde_json::Map<String, Value> =
        values.iter().map(|(key, value)| ((*key).to_owned(), (*value).into())).collect();
    json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": values})
}

/// Waits for the complete copy of a Model; returns the id of its content.
async fn content(machine: &TenantMachine, namespace: &str, name: &str) -> Result<String> {
    let own = |copies: &Value| {
        let copies = copies["items"].as_array()?;
        let copy = copies.iter().find(|copy| {
            copy["spec"]["modelRef"] == json!({"name": name, "namespace": namespace})
                && condition(copy, "Ready").is_some_and(|ready| ready["status"] == "True")
        })?;
        copy["status"]["content"].as_str().map(str::to_owned)
    };
    let what = format!("{namespace}/{name} has a complete copy");
    let copies =
        machine.until_object(&what, &format!("{RUSSET}/modelcopies"), |copies| own(copies).is_some()).await?;
    own(&copies).context("the copy went away")
}

/// S1: a bucket's name means another bucket at another endpoint.
pub async fn one_uri_is_each_tenants_own_bucket(machine: &TenantMachine) -> Result<()> {
    let folder = tempfile::tempdir()?;
    for file in std::fs::read_dir(repository().join(SMOKE_FILES))? {
        let file = file?;
        std::fs::copy(file.path(), folder.path().join(file.file_name()))?;
    }
    let weights = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&weights)?;
    *bytes.last_mut().context("weights without bytes")? ^= 1;
    std::fs::write(&weights, &bytes)?;
    let theirs = FakeBucket::start(BUCKETS, "other-id", "llama", &repository().join(SMOKE_FILES)).await?;
    let own = FakeBucket::start(BUCKETS, "hostile-id", "llama", folder.path()).await?;
    // The attacker is the first on this machine.
    for (namespace, id, bucket) in [(HOSTILE, "hostile-id", &own), (OTHER, "other-id", &theirs)] {
        let endpoint = bucket.endpoint();
        let values =
            [("AWS_ACCESS_KEY_ID", id), ("AWS_SECRET_ACCESS_KEY", "x"), ("AWS_ENDPOINT_URL", &endpoint)];
        create(machine, namespace, "secrets", secret("bucket", &values)).await?;
        create(machine, namespace, "models", model("llama", "s3://models/llama", Some("bucket"))).await?;
        content(machine, namespace, "llama").await?;
    }
    let mut sums = Vec::new();
    for namespace in [HOSTILE, OTHER] {
        let content = content(machine, namespace, "llama").await?;
        let file = machine.folder().join("agent/models").join(content).join("model.safetensors");
        sums.push(hex::encode(Sha256::digest(
            std::fs::read(&file).with_context(|| file.display().to_string())?,
        )));
    }
    let original = std::fs::read(repository().join(SMOKE_FILES).join("model.safetensors"))?;
    let expected = [&bytes, &original].map(|bytes| hex::encode(Sha256::digest(bytes)));
    ensure!(sums == expected, "the copies have {sums:?}, the buckets {expected:?}");
    row("be first on a machine with the name of another namespace's bucket", "apart");
    for namespace in [HOSTILE, OTHER] {
        delete(machine, namespace, "models", "llama").await?;
    }
    Ok(())
}

/// S2: what the machine has is not given to whoever knows its name.
pub async fn closed_weights_need_the_tenants_own_credential(machine: &TenantMachine) -> Result<()> {
    machine.hub.gate(CLOSED, "other-token");
    let uri = format!("hf://{CLOSED}");
    for (namespace, token) in [(OTHER, "other-token"), (HOSTILE, "hostile-token")] {
        create(machine, namespace, "secrets", secret("hub", &[("token", token)])).await?;
    }
    create(machine, OTHER, "models", model("closed", &uri, Some("hub"))).await?;
    content(machine, OTHER, "closed").await?;
    let commit = machine.get(&path(OTHER, "models", "closed")).await?["status"]["commit"].clone();
    for (what, secret, revision) in [
        ("take another namespace's closed weights without a credential", None, None),
        ("take them with a credential of its own", Some("hub"), None),
        ("take them by their commit", None, commit.as_str()),
    ] {
        let mut asked = model("closed", &uri, secret);
        if let Some(revision) = revision {
            asked["spec"]["source"]["revision"] = revision.into();
        }
        create(machine, HOSTILE, "models", asked).await?;
        let place = path(HOSTILE, "models", "closed");
        reason(machine, &place, "SourceForbidden").await?;
        ensure!(!is_ready_as_edited(&machine.get(&place).await?), "{what}");
        row(what, "refused");
        delete(machine, HOSTILE, "models", "closed").await?;
    }
    delete(machine, OTHER, "models", "closed").await
}

/// S3: `file://` needs the administrator, and even then neither reads what others have nor says what is there.
pub async fn folders_of_the_machine_are_closed(machine: &TenantMachine) -> Result<()> {
    let models = machine.folder().join("agent/models");
    let known = content(machine, OTHER, "smoke").await?;
    let known = models.join(known);
    ensure!(known.join("config.json").exists(), "{} is no model", known.display());
    let uri = |folder: &Path| format!("file://{}", folder.display());
    let place = collection(HOSTILE, "models");
    let asked = model("folder", &uri(&known), None);
    let (code, answer) = send(machine, HOSTILE, Method::POST, &place, &asked).await?;
    let says =
        answer["message"].as_str().is_some_and(|text| text.contains("may not name folders of machines"));
    ensure!(code == 403 && says, "{code} {answer}");
    row("name a folder of the machine", "refused");
    let namespace = |value: Value| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": HOSTILE, "labels": value}});
    let labels =
        async |labels| machine.apply(&format!("/api/v1/namespaces/{HOSTILE}"), namespace(labels)).await;
    labels(json!({"russet.dev/file-sources": "allowed"})).await?;
    let mut messages = Vec::new();
    for (what, folder) in [
        ("read another namespace's copy, though it may name folders", known.as_path()),
        ("learn whether /etc exists", Path::new("/etc")),
        ("learn whether /nowhere exists", Path::new("/nowhere")),
    ] {
        create(machine, HOSTILE, "models", model("folder", &uri(folder), None)).await?;
        let message = reason(machine, &path(HOSTILE, "models", "folder"), "SourceNotAllowed").await?;
        messages.push(message.replace(&folder.display().to_string(), "FOLDER"));
        row(what, "refused");
        delete(machine, HOSTILE, "models", "folder").await?;
    }
    ensure!(messages.iter().all(|message| *message == messages[0]), "they differ: {messages:?}");
    labels(json!({})).await
}

/// A listener that counts connections.
struct Listener {
    address: SocketAddr,
    count: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Listener {
    async fn start() -> Result<Self> {
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await?;
        let (address, count) = (listener.local_addr()?, Arc::new(AtomicUsize::new(0)));
        let counted = count.clone();
        let task = tokio::spawn(async move {
            while listener.accept().await.is_ok() {
                counted.fetch_add(1, Ordering::SeqCst);
            }
        });
        Ok(Self { address, count, task })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// S5: an agent sends no request into its own networks, whatever names them.
pub async fn sources_reach_no_private_address(machine: &TenantMachine) -> Result<()> {
    let listener = Listener::start().await?;
    let port = listener.address.port();
    let endpoint = |url: String| {
        [
            ("AWS_ACCESS_KEY_ID", "x".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "x".to_owned()),
            ("AWS_ENDPOINT_URL", url),
        ]
    };
    // By name: the hub leads to another name of this machine, which is not the one that its owner chose.
    machine.hub.redirect_to(&format!("localhost:{port}"));
    for (what, uri, values) in [
        ("reach a port of the machine as a registry", format!("oci://127.0.0.1:{port}/a/b:c"), None),
        ("reach it by a name that DNS leads there", format!("oci://localhost:{port}/a/b:c"), None),
        ("reach it as a web server", format!("https://127.0.0.1:{port}/folder"), None),
        (
            "reach it as the endpoint of a bucket",
            "s3://models/x".into(),
            Some(endpoint(format!("http://127.0.0.1:{port}"))),
        ),
        (
            "reach it by an IPv6 form of its address",
            "s3://models/x".into(),
            Some(endpoint(format!("http://[::ffff:127.0.0.1]:{port}"))),
        ),
        (
            "reach a cloud's metadata service",
            "s3://models/x".into(),
            Some(endpoint("http://169.254.169.254".into())),
        ),
        ("reach it by a redirect of the hub", format!("hf://{OPEN}"), None),
    ] {
        let secret_name = values.as_ref().map(|_| "endpoint");
        if let Some(values) = &values {
            let values: Vec<_> = values.iter().map(|(key, value)| (*key, value.as_str())).collect();
            create(machine, HOSTILE, "secrets", secret("endpoint", &values)).await?;
        }
        create(machine, HOSTILE, "models", model("private", &uri, secret_name)).await?;
        let message = reason(machine, &path(HOSTILE, "models", "private"), "SourceNotAllowed").await?;
        ensure!(message.contains("is not on the public internet"), "{message}");
        row(what, "refused");
        delete(machine, HOSTILE, "models", "private").await?;
        if secret_name.is_some() {
            delete(machine, HOSTILE, "secrets", "endpoint").await?;
        }
    }
    let count = listener.count.load(Ordering::SeqCst);
    ensure!(count == 0, "{count} connections were opened");
    Ok(())
}
