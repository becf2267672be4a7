//! Models that clients of Ollama's API pull, copy and delete, as objects of the cluster, where key and gateway may.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use russet_gateway::GatewayConfig;
use russet_gateway::managed_models::{CatalogModel, FindCatalogModel};
use serde_json::{Value, json};
use sha2::Digest as _;
use tokio_util::sync::CancellationToken;

use crate::harness::{Certificates, ScriptedEngine, TEST_TIMEOUT, hello, limits, script_engine};
use crate::object_server::{StoredObjects, api_server, model_copy, until_ready};
use crate::sdk::run_script;

/// A gateway that manages models, its API server and an engine.
struct LibraryLab {
    objects: StoredObjects,
    certificates: Certificates,
    url: String,
    client: reqwest::Client,
    engine: ScriptedEngine,
    stop: CancellationToken,
    gateway: tokio::task::JoinHandle<Result<(), russet_gateway::Error>>,
    server: tokio::runtime::Runtime,
}

/// An AccessKey whose secret is its name.
fn access_key(name: &str, spec: Value) -> Value {
    let mut key = json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "AccessKey",
        "metadata": {"namespace": "default", "name": name, "resourceVersion": "1"},
        "spec": {"secretSha256": hex::encode(sha2::Sha256::digest(name))},
    });
    for (field, value) in spec.as_object().unwrap() {
        key["spec"][field] = value.clone();
    }
    key
}

/// An object that a person or Git made.
fn theirs(kind: &str, name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": kind,
        "metadata": {
            "namespace": "default", "name": name, "uid": "u", "resourceVersion": "1",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": spec,
    })
}

/// A catalogue of one model.
fn catalog() -> FindCatalogModel {
    Arc::new(|name| match name {
        "qwen3-4b-4bit" | "qwen3:4b" => Ok(CatalogModel {
            name: "qwen3-4b-4bit".into(),
            repository: "mlx-community/Qwen3-4B-4bit".into(),
        }),
        _ => Err(format!("none of the entries of the catalogue is named {name}")),
    })
}

impl LibraryLab {
    /// A gateway with these keys.
    async fn start(keys: &[Value]) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let certificates = Certificates::new();
        let objects = StoredObjects::default();
        for key in keys {
            objects.apply("accesskeys", key.clone());
        }
        let free = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (api, listen) = (free(), free());
        let config = kube::Config::new(format!("http://{api}").parse().unwrap());
        let server = api_server(api, objects.clone());
        let (ready, stop) = (Arc::new(AtomicBool::new(false)), CancellationToken::new());
        let config = GatewayConfig {
            dispatch: limits(),
            model_management: Some(catalog()),
            ..GatewayConfig::new(kube::Client::try_from(config).unwrap(), certificates.gateway(), listen)
        };
        let gateway = tokio::spawn(russet_gateway::run(
            config,
            prometheus::Registry::new(),
            ready.clone(),
            stop.clone().cancelled_owned(),
        ));
        until_ready(&ready).await;
        let client = reqwest::Client::builder().timeout(TEST_TIMEOUT).no_proxy().build().unwrap();
        let engine = script_engine(&certificates, "a", |_| hello());
        Self { objects, certificates, url: format!("http://{listen}"), client, engine, stop, gateway, server }
    }

    /// The status and the text of a response to this key; an empty one is none.
    async fn send(&self, method: &str, path: &str, key: &str, body: Value) -> (u16, String) {
        let request = self.client.request(method.parse().unwrap(), format!("{}{path}", self.url)).json(&body);
        let request = if key.is_empty() { request } else { request.bearer_auth(key) };
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    }

    async fn pull(&self, key: &str, model: &str) -> (u16, String) {
        self.send("POST", "/api/pull", key, json!({"model": model, "stream": false})).await
    }

    async fn delete(&self, key: &str, model: &str) -> (u16, String) {
        self.send("DELETE", "/api/delete", key, json!({"model": model})).await
    }

    async fn copy(&self, key: &str, source: &str, destination: &str) -> (u16, String) {
        self.send("POST", "/api/copy", key, json!({"source": source, "destination": destination})).await
    }

    async fn chat(&self, key: &str, model: &str) -> (u16, String) {
        let messages = json!([{"role": "user", "content": "hi"}]);
        self.send("POST", "/api/chat", key, json!({"model": model, "stream": false, "messages": messages}))
            .await
    }

    /// An agent has so many of 100 bytes of a Model.
    fn fetched(&self, model: &str, bytes: u64) {
        self.objects.apply("modelcopies", model_copy(model, bytes));
    }

    /// A replica of the deployment answers.
    fn serves(&self, deployment: &str) {
        self.objects.apply("shardgroups", json!({
            "apiVersion": "russet.dev/v1alpha1", "kind": "ShardGroup",
            "metadata": {"namespace": "default", "name": format!("{deployment}-0"), "resourceVersion": "3"},
            "spec": {
                "deploymentRef": {"name": deployment}, "modelRef": {"name": deployment}, "replica": 0, "epoch": 1,
                "plan": {"hash": "x", "backend": "None", "members": [], "contextTokens": 64, "maxSequences": 1},
            },
            "status": {
                "servedEpoch": 1,
                "endpoint": {"address": self.engine.address.to_string(), "nodeName": "a"},
                "conditions": [{
                    "type": "Ready", "status": "True", "reason": "Serving", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }],
            },
        }));
    }

    /// Models, ModelDeployments and ModelRoutes.
    fn counts(&self) -> [usize; 3] {
        ["models", "modeldeployments", "modelroutes"].map(|plural| self.objects.names(plural).len())
    }

    async fn stop(self) {
        self.stop.cancel();
        assert!(tokio::time::timeout(TEST_TIMEOUT, self.gateway).await.unwrap().unwrap().is_ok());
        self.server.shutdown_background();
    }
}

fn allowed(name: &str) -> Value {
    access_key(name, json!({"modelManagement": "Allowed"}))
}

#[tokio::test]
async fn a_client_pulls_chats_copies_and_deletes_a_model() {
    let lab = LibraryLab::start(&[allowed("may")]).await;
    let body = json!({"model": "qwen3:4b"});
    let request = lab.client.post(format!("{}/api/pull", lab.url)).bearer_auth("may").json(&body);
    let mut pull = request.header("x-request-id", "pull-1").send().await.unwrap();
    assert_eq!(pull.status(), 200);
    let mut text = String::new();
    let mut until = async |words: &str| {
        while !text.contains(words) {
            text.push_str(std::str::from_utf8(&pull.chunk().await.unwrap().expect(words)).unwrap());
        }
    };
    until("waiting: its headers are not read yet").await;
    let model = lab.objects.get("models", "qwen3-4b-4bit").unwrap();
    assert_eq!(model["spec"]["source"], json!({"uri": "hf://mlx-community/Qwen3-4B-4bit"}));
    assert_eq!(model["metadata"]["labels"], json!({"russet.dev/managed-by": "gateway"}));
    let annotations = json!({
        "russet.dev/requested-name": "qwen3:4b", "russet.dev/requested-by": "default/may",
    });
    assert_eq!(model["metadata"]["annotations"], annotations);
    let deployment = lab.objects.get("modeldeployments", "qwen3-4b-4bit").unwrap();
    assert_eq!(deployment["spec"]["autoscaling"]["minReplicas"], 0);
    lab.fetched("qwen3-4b-4bit", 30);
    until("\"completed\":30").await;
    lab.fetched("qwen3-4b-4bit", 100);
    until("{\"status\":\"success\"}").await;
    // No replica was started for it.
    assert!(lab.objects.applied.lock().unwrap().iter().all(|(_, status)| status["demand"].is_null()));
    let why = lab.send("GET", "/requests/pull-1/why", "may", Value::Null).await.1;
    let why: Value = serde_json::from_str(&why).unwrap();
    assert_eq!(why["changes"][0], "created Model default/qwen3-4b-4bit", "{why}");
    assert_eq!((&why["caller"], &why["end"]["kind"]), (&json!("default/may"), &json!("finished")));

    // The name that was pulled, with and without Ollama's tag, and again.
    lab.serves("qwen3-4b-4bit");
    for name in ["qwen3:4b", "qwen3-4b-4bit", "qwen3-4b-4bit:latest"] {
        let (code, answer) = lab.chat("may", name).await;
        assert!(code == 200 && answer.contains("Hello there"), "{name}: {answer}");
        assert_eq!(lab.pull("may", name).await.0, 200);
    }
    assert_eq!(lab.counts(), [1, 1, 1]);

    assert_eq!(lab.copy("may", "qwen3:4b", "fast").await, (200, String::new()));
    assert_eq!(lab.copy("may", "qwen3:4b", "fast:latest").await, (200, String::new()), "it is there");
    assert_eq!(lab.counts(), [1, 1, 2]);
    assert_eq!(lab.chat("may", "fast").await.0, 200);
    let (code, error) = lab.delete("may", "qwen3-4b-4bit").await;
    assert!(code == 403 && error.contains("(fast)"), "{code} {error}");
    assert_eq!(lab.delete("may", "fast").await, (200, String::new()));
    assert_eq!(lab.chat("may", "fast").await.0, 404);
    assert_eq!(lab.delete("may", "qwen3:4b").await, (200, String::new()));
    assert_eq!(lab.counts(), [0, 0, 0]);
    let (code, error) = lab.delete("may", "qwen3:4b").await;
    assert!(code == 404 && error.starts_with("{\"error\":\"model 'qwen3:4b' not found"), "{code} {error}");
    lab.stop().await;
}

#[tokio::test]
async fn only_a_key_that_may_manages_the_models_it_names() {
    let some = json!({"modelManagement": "Allowed", "models": ["hf.co/o/*", "mine"]});
    let lab = LibraryLab::start(&[
        allowed("may"),
        access_key("may-not", json!({})),
        access_key("denied", json!({"modelManagement": "Denied"})),
        access_key("newer", json!({"modelManagement": "Sometimes"})),
        access_key("some", some),
    ])
    .await;
    for key in ["may-not", "denied", "newer"] {
        for (code, error) in [
            lab.pull(key, "qwen3:4b").await,
            lab.delete(key, "qwen3:4b").await,
            lab.copy(key, "qwen3:4b", "x").await,
        ] {
            assert!(code == 403 && error.contains("modelManagement: Allowed"), "{key}: {code} {error}");
        }
    }
    assert_eq!(lab.pull("", "qwen3:4b").await.0, 401);
    for (code, error) in [
        lab.pull("some", "qwen3:4b").await,
        lab.pull("some", "qwen3:4b:latest").await,
        lab.delete("some", "qwen3:4b").await,
        lab.copy("some", "mine", "other").await,
        lab.copy("some", "qwen3:4b", "mine").await,
    ] {
        assert!(code == 403 && error.contains("it allows: hf.co/o/*, mine"), "{code} {error}");
    }
    assert_eq!(lab.objects.writes.lock().unwrap().len(), 0);
    lab.fetched("n", 100);
    assert_eq!(lab.pull("some", "hf.co/o/n").await.0, 200);
    assert_eq!(lab.copy("some", "hf.co/o/n", "mine").await.0, 200);
    // A name of the namespace, by its full name.
    assert_eq!(lab.delete("may", "default/mine").await.0, 200);
    assert_eq!(lab.counts(), [1, 1, 1]);
    lab.stop().await;
}

#[tokio::test]
async fn callers_without_a_key_manage_no_models() {
    let lab = LibraryLab::start(&[]).await;
    for (code, error) in [
        lab.pull("", "qwen3:4b").await,
        lab.delete("", "qwen3:4b").await,
        lab.copy("", "qwen3:4b", "x").await,
    ] {
        assert!(code == 403 && error.contains("a caller without a key may not"), "{code} {error}");
    }
    assert_eq!(lab.objects.writes.lock().unwrap().len(), 0);
    lab.stop().await;
}

#[tokio::test]
async fn what_git_made_survives_clients_that_may_delete() {
    let lab = LibraryLab::start(&[allowed("may")]).await;
    lab.objects.apply("models", theirs("Model", "git", json!({"source": {"uri": "hf://o/git"}})));
    lab.objects
        .apply("modeldeployments", theirs("ModelDeployment", "git", json!({"modelRef": {"name": "git"}})));
    let route = json!({"models": ["chat", "gpt-*"], "targets": [{"deploymentRef": {"name": "git"}}]});
    lab.objects.apply("modelroutes", theirs("ModelRoute", "usual", route));
    let listed = tokio::time::timeout(TEST_TIMEOUT, async {
        while !lab.send("GET", "/api/tags", "may", Value::Null).await.1.contains("\"chat\"") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    listed.await.expect("the objects are listed");
    for (name, object) in [("git", "ModelDeployment default/git"), ("chat", "ModelRoute default/usual")] {
        let (code, error) = lab.delete("may", name).await;
        assert!(code == 403 && error.contains(object) && error.contains("kubectl delete"), "{code} {error}");
    }
    assert_eq!(lab.delete("may", "gpt-4").await.0, 404, "no pattern is a name");
    for (destination, words) in
        [("git", "ModelDeployment default/git"), ("chat", "ModelRoute default/usual"), ("gpt-4", "pattern")]
    {
        let (code, error) = lab.copy("may", "chat", destination).await;
        // The same targets: it is that name already.
        match destination {
            "gpt-4" => assert!(code == 400 && error.contains(words), "{code} {error}"),
            _ => assert_eq!(code, 200, "{error}"),
        }
    }
    // A further name of it comes and goes, and so does a pull of its source by another name.
    assert_eq!(lab.copy("may", "git", "team/fast").await.0, 200);
    assert_eq!(lab.delete("may", "team/fast").await.0, 200);
    lab.fetched("git", 100);
    assert_eq!(lab.pull("may", "hf.co/o/git").await.0, 200);
    assert_eq!(lab.counts(), [1, 1, 2]);
    assert_eq!(lab.delete("may", "hf.co/o/git").await.0, 200);
    assert_eq!(lab.counts(), [1, 1, 1]);
    lab.stop().await;
}

#[tokio::test]
async fn names_that_are_no_models_are_refused_without_a_write() {
    let lab = LibraryLab::start(&[allowed("may")]).await;
    let long = "n".repeat(1000);
    for name in ["nix", "../../etc", "hf.co/a/../b", "file:///etc/passwd", "ü", "*", "a b", &long] {
        let (code, error) = lab.pull("may", name).await;
        assert!(code == 400 && error.contains("hf.co/OWNER/NAME"), "{name}: {code} {error}");
        assert_eq!(lab.delete("may", name).await.0, 404, "{name}");
        assert_eq!(lab.copy("may", name, "x").await.0, 404, "{name}");
    }
    let too_long = "n".repeat(1025);
    for (code, error) in [
        lab.pull("may", &too_long).await,
        lab.delete("may", &too_long).await,
        lab.copy("may", "m", &too_long).await,
        lab.copy("may", "m", "").await,
        lab.send("POST", "/api/copy", "may", json!({"source": "m"})).await,
        lab.send("DELETE", "/api/delete", "may", json!({})).await,
    ] {
        assert_eq!(code, 400, "{error}");
    }
    for (name, words) in
        [("create", "Modelfiles"), ("push", "nothing is published"), ("blobs/sha256:0", "source")]
    {
        let (code, error) = lab.send("POST", &format!("/api/{name}"), "may", json!({})).await;
        assert!(code == 400 && error.contains(words), "{name}: {error}");
    }
    assert_eq!(lab.objects.writes.lock().unwrap().len(), 0);
    lab.stop().await;
}

#[tokio::test]
async fn a_pull_that_the_api_server_refuses_leaves_nothing() {
    let lab = LibraryLab::start(&[allowed("may")]).await;
    *lab.objects.refused.lock().unwrap() = Some(("modeldeployments".into(), "exceeded quota: few".into()));
    let (code, error) = lab.pull("may", "qwen3:4b").await;
    assert_eq!(code, 403, "{error}");
    for words in ["ModelDeployment default/qwen3-4b-4bit", "exceeded quota: few", "--model-management"] {
        assert!(error.contains(words), "{error}");
    }
    assert_eq!(lab.counts(), [0, 0, 0]);
    let writes = ["create models qwen3-4b-4bit", "delete models qwen3-4b-4bit"];
    assert_eq!(*lab.objects.writes.lock().unwrap(), writes);
    lab.stop().await;
}

#[tokio::test]
async fn a_storm_of_pulls_creates_64_models_and_no_more() {
    let lab = LibraryLab::start(&[allowed("may")]).await;
    for number in 0..70 {
        lab.fetched(&format!("m{number}"), 100);
    }
    // Some are refused because too many wait; a client tries again.
    let pull = async |number: usize| {
        loop {
            let (code, error) = lab.pull("may", &format!("hf.co/o/m{number}")).await;
            match code {
                429 => tokio::time::sleep(Duration::from_millis(10)).await,
                200 => return true,
                _ => {
                    assert!(code == 400 && error.contains("64 models"), "{code} {error}");
                    return false;
                }
            }
        }
    };
    let pulls = futures::future::join_all((0..70).map(pull)).await;
    assert_eq!(pulls.into_iter().filter(|pulled| *pulled).count(), 64);
    assert_eq!(lab.counts(), [64, 64, 64]);
    lab.stop().await;
}

#[tokio::test]
async fn the_ollama_client_pulls_copies_and_deletes() {
    let lab = LibraryLab::start(&[allowed("may"), access_key("may-not", json!({}))]).await;
    lab.fetched("qwen3-4b-4bit", 100);
    lab.serves("qwen3-4b-4bit");
    run_script("ollama_library.py", lab.url.clone(), &lab.certificates).await;
    assert_eq!(lab.counts(), [0, 0, 0]);
    lab.stop().await;
}
