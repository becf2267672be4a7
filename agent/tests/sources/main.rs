//! Sources written by other programs: the same folder put into a bucket by boto3, into a container by Azure's
//! SDK, into a registry by oras, and served by the tests' hub to PyPI's `huggingface_hub`. The agent's store
//! fetches it byte for byte. `cargo xtask oracle sources` installs the programs.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, whichever function of it does")]

mod peer;

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use russet_agent::store::{
    Context, Credentials, Published, SourceSpec, Store, StoreError, TransferProgress, is_allowed_file,
};
use russet_crds::conditions::Reason;
use russet_tests::hub::FakeHub;
use tokio::sync::watch;

use self::peer::{SourceServer, program, python};

/// The smoke model of this repository, beside files that no agent fetches.
struct SourceLab {
    folder: tempfile::TempDir,
    model: PathBuf,
    names: Vec<String>,
    store: Store,
}

impl SourceLab {
    fn new(endpoint: &str) -> Self {
        rustls::crypto::ring::default_provider().install_default().ok();
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("given/models/tiny");
        std::fs::create_dir_all(&model).unwrap();
        let smoke = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/smoke/model-4bit");
        let mut names = Vec::new();
        for file in std::fs::read_dir(smoke).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), model.join(file.file_name())).unwrap();
            names.push(file.file_name().into_string().unwrap());
        }
        std::fs::write(model.join("run.py"), "import os").unwrap();
        names.push("run.py".into());
        names.sort();
        let context = Context::new(endpoint, vec![]).unwrap();
        let context = context.with_private_sources(&["127.0.0.0/8".parse().unwrap()]).unwrap();
        let store = Store::open(folder.path().join("store"), context).unwrap();
        Self { folder, model, names, store }
    }

    async fn fetch(&self, spec: &SourceSpec) -> Result<Published, StoreError> {
        self.store.fetch(spec, &watch::Sender::new(TransferProgress::default())).await
    }

    /// Fetches and compares every byte.
    async fn assert_fetched(&self, spec: &SourceSpec) -> Published {
        let published = self.fetch(spec).await.unwrap();
        let names: Vec<&String> = self.names.iter().filter(|name| is_allowed_file(name)).collect();
        assert!(names.len() >= 5, "{names:?}");
        let fetched: Vec<&String> = published.manifest.files.iter().map(|file| &file.name).collect();
        assert_eq!(fetched, names);
        for name in names {
            let original = std::fs::read(self.model.join(name)).unwrap();
            assert!(std::fs::read(published.path.join(name)).unwrap() == original, "{name} differs");
        }
        published
    }

    async fn fetch_error(&self, spec: &SourceSpec) -> Reason {
        let error = self.store.headers(spec).await.unwrap_err();
        println!("{}", error.chain());
        error.reason()
    }
}

fn source_spec(uri: &str, secret: &[(&str, &str)]) -> SourceSpec {
    let secret = secret.iter().map(|(key, value)| ((*key).to_owned(), (*value).into()));
    SourceSpec { uri: uri.to_owned(), credentials: Credentials::new(secret), ..SourceSpec::default() }
}

const NO_ENDPOINT: &str = "http://127.0.0.1:1";

/// moto checks signatures once enabled; boto3 writes more objects than a page of a listing has.
const S3: &str = r#"
import boto3, json, os, sys, urllib.request
endpoint, folder = sys.argv[1:]
made = dict(endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
iam = boto3.client("iam", **made)
iam.create_user(UserName="me")
key = iam.create_access_key(UserName="me")["AccessKey"]
policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
iam.put_user_policy(UserName="me", PolicyName="all", PolicyDocument=json.dumps(policy))
guard = urllib.request.Request(endpoint + "/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"})
urllib.request.urlopen(guard).read()
made.update(aws_access_key_id=key["AccessKeyId"], aws_secret_access_key=key["SecretAccessKey"])
s3 = boto3.client("s3", **made)
s3.create_bucket(Bucket="models")
for name in os.listdir(folder):
    s3.upload_file(os.path.join(folder, name), "models", "family/tiny/" + name)
for number in range(1001):
    s3.put_object(Bucket="models", Key=f"family/tiny/note-{number:04}.md", Body=b"x")
s3.put_object(Bucket="models", Key="family/tiny/below/config.json", Body=b"x")
print(key["AccessKeyId"], key["SecretAccessKey"])
"#;

#[tokio::test(flavor = "multi_thread")]
async fn s3_bucket_written_by_boto3_is_fetched() {
    let Some(interpreter) = program("RUSSET_SOURCES_PYTHON") else { return };
    let moto = SourceServer::start(|port| {
        let mut command = std::process::Command::new(&interpreter);
        command.args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()]);
        command
    })
    .await;
    let lab = SourceLab::new(NO_ENDPOINT);
    let said = python(&interpreter, S3, &[&moto.url, lab.model.to_str().unwrap()]);
    let (id, secret) = said.trim().split_once(' ').unwrap();
    let (id, secret) = (("AWS_ACCESS_KEY_ID", id), ("AWS_SECRET_ACCESS_KEY", secret));
    let endpoint = ("AWS_ENDPOINT_URL", moto.url.as_str());

    lab.assert_fetched(&source_spec("s3://models/family/tiny", &[id, secret, endpoint])).await;
    let wrong = ("AWS_SECRET_ACCESS_KEY", "another");
    let refused = source_spec("s3://models/family/tiny", &[id, wrong, endpoint]);
    assert_eq!(lab.fetch_error(&refused).await, Reason::SourceForbidden);
    for uri in ["s3://others/family/tiny", "s3://models/family/none"] {
        assert_eq!(
            lab.fetch_error(&source_spec(uri, &[id, secret, endpoint])).await,
            Reason::SourceNotFound,
            "{uri}"
        );
    }
}

/// Azurite's documented account, and a signature that may read and list for an hour.
const AZURE: &str = r#"
import datetime, os, sys
from azure.storage.blob import BlobServiceClient, ContainerSasPermissions, generate_container_sas
endpoint, account, key, folder = sys.argv[1:]
service = BlobServiceClient(endpoint, credential={"account_name": account, "account_key": key})
container = service.create_container("models")
for name in os.listdir(folder):
    with open(os.path.join(folder, name), "rb") as file:
        container.upload_blob("family/tiny/" + name, file)
end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1)
print(generate_container_sas(account, "models", account_key=key, expiry=end,
                             permission=ContainerSasPermissions(read=True, list=True)))
"#;
const ACCOUNT: &str = "devstoreaccount1";
const ACCOUNT_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

#[tokio::test(flavor = "multi_thread")]
async fn azure_container_written_by_its_sdk_is_fetched() {
    let (Some(interpreter), Some(azurite)) = (program("RUSSET_SOURCES_PYTHON"), program("RUSSET_AZURITE"))
    else {
        return;
    };
    let azurite = SourceServer::start(|port| {
        let mut command = std::process::Command::new(&azurite);
        command.args(["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]);
        command.args(["--blobHost", "127.0.0.1", "--blobPort", &port.to_string()]);
        command
    })
    .await;
    let lab = SourceLab::new(NO_ENDPOINT);
    let url = format!("{}/{ACCOUNT}", azurite.url);
    let sas = python(&interpreter, AZURE, &[&url, ACCOUNT, ACCOUNT_KEY, lab.model.to_str().unwrap()]);
    let (account, endpoint) =
        (("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT), ("AZURE_STORAGE_ENDPOINT", url.as_str()));
    let uri = "az://models/family/tiny";

    let key = ("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY);
    lab.assert_fetched(&source_spec(uri, &[account, key, endpoint])).await;
    let sas = ("AZURE_STORAGE_SAS_TOKEN", sas.trim());
    SourceLab::new(NO_ENDPOINT).assert_fetched(&source_spec(uri, &[account, sas, endpoint])).await;
    let wrong = ("AZURE_STORAGE_ACCOUNT_KEY", "YW5vdGhlcg==");
    assert_eq!(
        lab.fetch_error(&source_spec(uri, &[account, wrong, endpoint])).await,
        Reason::SourceForbidden
    );
    let other = source_spec("az://others/family/tiny", &[account, key, endpoint]);
    assert_eq!(lab.fetch_error(&other).await, Reason::SourceNotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn google_bucket_is_fetched() {
    let Some(server) = program("RUSSET_FAKE_GCS") else { return };
    let lab = SourceLab::new(NO_ENDPOINT);
    let data = lab.folder.path().join("given");
    let google = SourceServer::start(|port| {
        let mut command = std::process::Command::new(&server);
        command.args(["-scheme", "http", "-host", "127.0.0.1", "-backend", "memory"]);
        command.args(["-port", &port.to_string(), "-public-host", &format!("127.0.0.1:{port}")]);
        command.arg("-data").arg(&data);
        command
    })
    .await;
    let endpoint = ("STORAGE_EMULATOR_HOST", google.url.as_str());
    lab.assert_fetched(&source_spec("gs://models/tiny", &[endpoint])).await;
    assert_eq!(lab.fetch_error(&source_spec("gs://models/none", &[endpoint])).await, Reason::SourceNotFound);
    // Where Google answers 404, this server answers 500.
    assert_eq!(
        lab.fetch_error(&source_spec("gs://others/tiny", &[endpoint])).await,
        Reason::SourceUnreachable
    );
}

/// `me` with the password `secret`, in htpasswd's format.
const LOGINS: &str = "me:$2b$05$WeKewBjiJbIqpmBnTmcReuWZEyfBP7F.9MDJv.bWMcqcQ0/5ljSY6\n";

#[tokio::test(flavor = "multi_thread")]
async fn oci_artifact_pushed_by_oras_is_fetched() {
    let (Some(server), Some(oras)) = (program("RUSSET_REGISTRY"), program("RUSSET_ORAS")) else { return };
    let lab = SourceLab::new(NO_ENDPOINT);
    let (root, config) = (lab.folder.path().join("registry"), lab.folder.path().join("registry.yml"));
    let logins = lab.folder.path().join("logins");
    std::fs::write(&logins, LOGINS).unwrap();
    let registry = SourceServer::start(|port| {
        let text = serde_json::json!({
            "version": "0.1",
            "storage": {"filesystem": {"rootdirectory": root}},
            "http": {"addr": format!("127.0.0.1:{port}"), "secret": "of this test"},
            "auth": {"htpasswd": {"realm": "here", "path": logins}},
        });
        std::fs::write(&config, text.to_string()).unwrap();
        let mut command = std::process::Command::new(&server);
        command.arg("serve").arg(&config).env("OTEL_TRACES_EXPORTER", "none");
        command
    })
    .await;
    let host = registry.url.trim_start_matches("http://").to_owned();
    let artifact = format!("{host}/family/tiny:v1");
    let mut push = std::process::Command::new(&oras);
    push.args(["push", "--plain-http", "--username", "me", "--password", "secret", &artifact]);
    push.args(lab.names.iter().map(|name| format!("{name}:application/octet-stream")));
    peer::run(push.current_dir(&lab.model).env("HOME", lab.folder.path()));

    let (uri, login) = (format!("oci://{artifact}"), [("username", "me"), ("password", "secret")]);
    let published = lab.assert_fetched(&source_spec(&uri, &login)).await;
    // By its digest, with a Secret in kubectl's format.
    let digest = published.manifest.commit.unwrap();
    let docker = serde_json::json!({"auths": {host.clone(): {"username": "me", "password": "secret"}}});
    let pinned = source_spec(
        &format!("oci://{host}/family/tiny@{digest}"),
        &[(".dockerconfigjson", &docker.to_string())],
    );
    SourceLab::new(NO_ENDPOINT).assert_fetched(&pinned).await;
    let wrong = source_spec(&uri, &[("username", "me"), ("password", "another")]);
    assert_eq!(lab.fetch_error(&wrong).await, Reason::SourceForbidden);
    assert_eq!(lab.fetch_error(&source_spec(&uri, &[])).await, Reason::SourceForbidden);
    let none = source_spec(&format!("oci://{host}/family/tiny:v2"), &login);
    assert_eq!(lab.fetch_error(&none).await, Reason::SourceNotFound);
}

/// A script of a user without Russet.
const HUB: &str = r#"
import sys
from huggingface_hub import snapshot_download, HfApi
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
folder, token = sys.argv[1:]
snapshot_download("russet/tiny", local_dir=folder + "/open", cache_dir=folder + "/cache")
print(snapshot_download("russet/tiny", cache_dir=folder + "/cache").rsplit("/", 1)[1])
assert HfApi().whoami(token=token)["name"] == "tester"
snapshot_download("russet/gated", token=token, local_dir=folder + "/gated")
for name, revision, error in [("russet/gated", None, GatedRepoError), ("russet/none", None, RepositoryNotFoundError),
                              ("russet/tiny", "none", RevisionNotFoundError)]:
    try:
        snapshot_download(name, revision=revision, token=False, local_dir=folder + "/none")
    except error:
        continue
    raise SystemExit(f"{name} {revision} was not refused")
"#;

#[tokio::test(flavor = "multi_thread")]
async fn stub_hub_serves_huggingface_hub_and_the_store_alike() {
    let Some(interpreter) = program("RUSSET_SOURCES_PYTHON") else { return };
    // Weights from the hub itself, then from the host that serves Xet's storage over plain HTTP.
    for redirected in [false, true] {
        let lab = SourceLab::new(NO_ENDPOINT);
        let models: [(&str, &Path); 2] = [("russet/tiny", &lab.model), ("russet/gated", &lab.model)];
        let mut hub = FakeHub::start(IpAddr::V4(Ipv4Addr::LOCALHOST), &models).await.unwrap();
        if redirected {
            hub.redirect().await.unwrap();
        }
        hub.gate("russet/gated", "hf_secret");
        let folder = lab.folder.path().join("downloaded");
        let (endpoint, text) = (hub.endpoint(), folder.to_str().unwrap().to_owned());
        let commit = tokio::task::block_in_place(|| {
            let mut command = peer::script(&interpreter, HUB, &[&text, "hf_secret"]);
            peer::run(command.env("HF_ENDPOINT", endpoint).env("HF_HOME", format!("{text}/home")))
        });
        for (theirs, name) in
            ["open", "gated"].into_iter().flat_map(|to| lab.names.iter().map(move |name| (to, name)))
        {
            let downloaded = std::fs::read(folder.join(theirs).join(name)).unwrap();
            assert!(downloaded == std::fs::read(lab.model.join(name)).unwrap(), "{theirs}/{name} differs");
        }

        let ours = SourceLab::new(&hub.endpoint());
        let published = ours.assert_fetched(&source_spec("hf://russet/tiny", &[])).await;
        assert_eq!(published.manifest.commit.as_deref(), Some(commit.trim()));
        ours.assert_fetched(&source_spec("hf://russet/gated", &[("token", "hf_secret")])).await;
        for secret in [&[("token", "another")][..], &[]] {
            let refused = source_spec("hf://russet/gated", secret);
            assert_eq!(ours.fetch_error(&refused).await, Reason::SourceForbidden);
        }
    }
}
