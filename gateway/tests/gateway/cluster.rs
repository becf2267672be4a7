//! The whole gateway as `russet gateway` runs it, against an API server that goes away and comes back.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use russet_gateway::GatewayConfig;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::harness::{Certificates, ScriptedEngine, TEST_TIMEOUT, hello, limits, script_engine};
use crate::mock_provider::{MockProvider, Reply, openai};
use crate::object_server::{StoredObjects, api_server, model_copy, until_ready};

/// A whole gateway, as `russet gateway` runs it.
struct WholeGateway {
    ready: Arc<AtomicBool>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<Result<(), russet_gateway::Error>>,
}

impl WholeGateway {
    fn start(certificates: &Certificates, api: SocketAddr, listen: SocketAddr) -> Self {
        let client =
            kube::Client::try_from(kube::Config::new(format!("http://{api}").parse().unwrap())).unwrap();
        let (ready, stop) = (Arc::new(AtomicBool::new(false)), CancellationToken::new());
        let config = GatewayConfig {
            dispatch: limits(),
            ..GatewayConfig::new(client, certificates.gateway(), listen)
        };
        let registry = prometheus::Registry::new();
        let task = tokio::spawn(russet_gateway::run(
            config,
            registry,
            ready.clone(),
            stop.clone().cancelled_owned(),
        ));
        Self { ready, stop, task }
    }

    async fn stop(self) {
        self.stop.cancel();
        assert!(tokio::time::timeout(TEST_TIMEOUT, self.task).await.unwrap().unwrap().is_ok());
    }
}

/// An address of this machine that nobody uses.
pub fn free_address() -> SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

pub fn deployment() -> Value {
    json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "ModelDeployment",
        "metadata": {"namespace": "default", "name": "m", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"modelRef": {"name": "m"}},
        "status": {"demand": [{"gateway": "gone:1", "reportedAt": "2026-01-01T00:00:00Z", "waiting": 3}]},
    })
}

pub fn group(engine: &ScriptedEngine, epoch: i64, version: u64) -> Value {
    json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "ShardGroup",
        "metadata": {"namespace": "default", "name": "m-0-x", "resourceVersion": version.to_string()},
        "spec": {
            "deploymentRef": {"name": "m"}, "modelRef": {"name": "m"}, "replica": 0, "epoch": epoch,
            "plan": {"hash": "x", "backend": "None", "members": [], "contextTokens": 64, "maxSequences": 1},
        },
        "status": {
            "servedEpoch": epoch,
            "endpoint": {"address": engine.address.to_string(), "nodeName": "a"},
            "conditions": [{
                "type": "Ready", "status": "True", "reason": "Serving", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        },
    })
}

#[tokio::test]
async fn the_gateway_follows_the_cluster_and_outlives_its_api_server() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let certificates = Certificates::new();
    let objects = StoredObjects::default();
    let (api, listen) = (free_address(), free_address());

    let gateway = WholeGateway::start(&certificates, api, listen);
    let client = reqwest::Client::builder().timeout(TEST_TIMEOUT).no_proxy().build().unwrap();
    let chat = || {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        client.post(format!("http://{listen}/v1/chat/completions")).json(&body).send()
    };

    // The gateway starts before the API server, and before there is a model.
    let mut first = script_engine(&certificates, "a", |_| hello());
    objects.apply("modeldeployments", deployment());
    let server = api_server(api, objects.clone());
    until_ready(&gateway.ready).await;
    let waiting = tokio::spawn(chat());
    // A request is held, and its demand is reported.
    let reported = tokio::time::timeout(TEST_TIMEOUT, async {
        loop {
            let applied = objects.applied.lock().unwrap().clone();
            if let Some((manager, status)) = applied.iter().find(|(_, status)| status["demand"].is_array()) {
                return (manager.clone(), status["demand"][0].clone());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    let (manager, entry) = reported.await.expect("a request that waits is reported");
    assert_eq!((&entry["waiting"], &entry["active"]), (&json!(1), &json!(0)), "{entry}");
    let gateway_name = entry["gateway"].as_str().unwrap();
    assert!(gateway_name.ends_with(&format!(":{}", listen.port())), "{gateway_name}");
    assert_eq!(manager, format!("russet-gateway-{gateway_name}"));
    // The entry of a gateway that has been gone for months is removed.
    let removed = tokio::time::timeout(TEST_TIMEOUT, async {
        let remove = json!({"op": "remove", "path": "/status/demand/0"});
        while !objects.applied.lock().unwrap().iter().any(|(_, patch)| patch[1] == remove) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    removed.await.expect("its entry is removed");
    objects.apply("shardgroups", group(&first, 1, 2));
    assert_eq!(waiting.await.unwrap().unwrap().status(), 200);

    // The API server is lost: the gateway keeps routing by the last table.
    server.shutdown_background();
    assert_eq!(chat().await.unwrap().status(), 200);
    assert_eq!(first.requests(), 2);

    // The engine is lost too; when the server is back it lists another one.
    first.kill();
    let second = script_engine(&certificates, "a", |_| hello());
    let waiting = tokio::spawn(chat());
    objects.apply("shardgroups", group(&second, 2, 3));
    let server = api_server(api, objects.clone());
    assert_eq!(waiting.await.unwrap().unwrap().status(), 200);
    assert_eq!(second.requests(), 1);

    let ready = gateway.ready.clone();
    gateway.stop().await;
    assert!(!ready.load(Ordering::Acquire));
    // The final report: no requests wait here any more.
    let applied = objects.applied.lock().unwrap().clone();
    let last = applied.iter().rev().find(|(_, status)| status["demand"].is_array()).unwrap();
    let last = &last.1["demand"][0];
    assert_eq!((&last["waiting"], &last["active"]), (&json!(0), &json!(0)), "{last}");
    server.shutdown_background();
}

fn access_key(secret: &str, state: &str, version: u64) -> Value {
    use sha2::Digest as _;
    json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "AccessKey",
        "metadata": {"namespace": "default", "name": "one", "resourceVersion": version.to_string()},
        "spec": {"secretSha256": hex::encode(sha2::Sha256::digest(secret)), "state": state},
    })
}

#[tokio::test]
async fn keys_reload_without_restart_and_survive_an_api_outage() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let certificates = Certificates::new();
    let objects = StoredObjects::default();
    let (api, listen) = (free_address(), free_address());
    let gateway = WholeGateway::start(&certificates, api, listen);
    let client = reqwest::Client::builder().timeout(TEST_TIMEOUT).no_proxy().build().unwrap();
    let list = |secret: &'static str| {
        let client = client.clone();
        async move {
            let response = client.get(format!("http://{listen}/v1/models")).bearer_auth(secret).send().await;
            // Before the gateway listens there is no status.
            response.map_or(0, |response| response.status().as_u16())
        }
    };
    let until = |secret: &'static str, expected: u16| {
        let list = &list;
        async move {
            let waited = tokio::time::timeout(TEST_TIMEOUT, async {
                while list(secret).await != expected {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            });
            assert!(waited.await.is_ok(), "{secret} was never answered with {expected}");
        }
    };
    let server = api_server(api, objects.clone());
    until("any", 200).await;
    objects.apply("accesskeys", access_key("s-one", "Enabled", 2));
    until("any", 401).await;
    assert_eq!(list("s-one").await, 200);

    // The API server is lost: accepted keys stay accepted, rejected keys stay rejected.
    server.shutdown_background();
    assert_eq!((list("s-one").await, list("any").await), (200, 401));

    // Revoked while the server is away: rejected once it is back.
    objects.apply("accesskeys", access_key("s-one", "Disabled", 3));
    let server = api_server(api, objects.clone());
    until("s-one", 401).await;
    // A key that cannot be decoded still counts as a key.
    let mut broken = access_key("s-one", "Enabled", 4);
    broken["spec"]["models"] = json!(7);
    objects.apply("accesskeys", broken);
    assert_eq!((list("s-one").await, list("any").await), (401, 401));

    gateway.stop().await;
    server.shutdown_background();
}

#[tokio::test]
async fn a_pull_tells_the_bytes_that_the_agents_report() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let certificates = Certificates::new();
    let objects = StoredObjects::default();
    let (api, listen) = (free_address(), free_address());
    let digest = "ab".repeat(32);
    let source = json!({"uri": "hf://owner/m", "sha256": digest});
    objects.apply("models", json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "Model",
        "metadata": {"namespace": "default", "name": "m", "resourceVersion": "1"}, "spec": {"source": source},
    }));
    objects.apply("modeldeployments", deployment());
    objects.apply("modelcopies", model_copy("m", 30));
    let server = api_server(api, objects.clone());
    let gateway = WholeGateway::start(&certificates, api, listen);
    let client = reqwest::Client::builder().timeout(TEST_TIMEOUT).no_proxy().build().unwrap();
    // Until it knows the Model, which its routing does not wait for.
    let listed = tokio::time::timeout(TEST_TIMEOUT, async {
        loop {
            let tags = client.get(format!("http://{listen}/api/tags")).send().await;
            if let Ok(tags) = tags
                && tags.json::<Value>().await.unwrap()["models"][0]["digest"] == digest
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    listed.await.expect("the Model is listed");
    let mut pull =
        client.post(format!("http://{listen}/api/pull")).json(&json!({"model": "m"})).send().await.unwrap();
    let mut text = String::new();
    while !text.contains("\"completed\":30") {
        text.push_str(std::str::from_utf8(&pull.chunk().await.unwrap().unwrap()).unwrap());
    }
    objects.apply("modelcopies", model_copy("m", 100));
    text.push_str(&pull.text().await.unwrap());
    let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    lines.dedup();
    let layer = |completed: u64| {
        let digest = format!("sha256:{digest}");
        json!({"status": "pulling abababababab", "digest": digest, "total": 100, "completed": completed})
    };
    let status = |status: &str| json!({"status": status});
    let expected = [
        status("pulling manifest"),
        layer(30),
        layer(100),
        status("verifying sha256 digest"),
        status("writing manifest"),
        status("success"),
    ];
    assert_eq!(lines, expected);
    gateway.stop().await;
    server.shutdown_background();
}

#[tokio::test]
async fn the_status_of_a_provider_says_whether_it_answers() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let certificates = Certificates::new();
    let objects = StoredObjects::default();
    let (api, listen) = (free_address(), free_address());
    let is_ill = Arc::new(AtomicBool::new(false));
    let ill = is_ill.clone();
    let outside = MockProvider::start(move |_| match ill.load(Ordering::Acquire) {
        true => Reply::Status(402, None, r#"{"error": {"message": "you said: a secret"}}"#),
        false => Reply::Events(openai(&["from", " outside"])),
    })
    .await;
    let object = |kind: &str, name: &str, spec: Value| {
        json!({
            "apiVersion": "russet.dev/v1alpha1", "kind": kind, "spec": spec,
            "metadata": {"namespace": "default", "name": name, "resourceVersion": "1", "generation": 1},
        })
    };
    let endpoint = json!({"endpoint": format!("http://{}/v1", outside.address), "zone": "Local"});
    objects.apply("modelproviders", object("ModelProvider", "p", endpoint));
    let target = json!({"models": ["m"], "targets": [{"providerRef": {"name": "p"}, "model": "theirs"}]});
    objects.apply("modelroutes", object("ModelRoute", "m", target));
    let server = api_server(api, objects.clone());
    let gateway = WholeGateway::start(&certificates, api, listen);
    until_ready(&gateway.ready).await;
    let written = |reason: &'static str| {
        let objects = objects.clone();
        async move {
            let found = tokio::time::timeout(TEST_TIMEOUT, async {
                loop {
                    let applied = objects.applied.lock().unwrap().clone();
                    let is = |status: &&Value| status["conditions"][0]["reason"] == reason;
                    if let Some(status) = applied.iter().map(|(_, status)| status).find(is) {
                        return status.clone();
                    }
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            });
            found.await.unwrap_or_else(|_| panic!("{reason} was never written"))
        }
    };
    assert_eq!(written("NotAsked").await["lastAnswered"], Value::Null);
    let client = reqwest::Client::builder().timeout(TEST_TIMEOUT).no_proxy().build().unwrap();
    let chat = || {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        client.post(format!("http://{listen}/v1/chat/completions")).json(&body).send()
    };
    assert_eq!(chat().await.unwrap().status(), 200);
    assert!(written("Answering").await["lastAnswered"].is_string());
    is_ill.store(true, Ordering::Release);
    assert!(chat().await.unwrap().status().is_server_error());
    let status = written("NotAnswering").await;
    let message = "it answers 402; `russet why` of a request says more";
    assert_eq!(status["conditions"][0]["message"], message);
    let [pause] = &status["pauses"].as_array().unwrap()[..] else { panic!("{status}") };
    assert_eq!((&pause["scope"], &pause["reason"]), (&json!("Paid"), &json!("NoCredits")));
    assert!(pause["until"].as_str().unwrap().parse::<jiff::Timestamp>().unwrap() > jiff::Timestamp::now());
    gateway.stop().await;
    server.shutdown_background();
}
