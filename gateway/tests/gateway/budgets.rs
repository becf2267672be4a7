//! Budgets over HTTP: two gateways share one, every dialect says what is left, and what was used is known when a gateway
//! starts again.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use russet_crds::Zone;
use russet_gateway::GatewayConfig;
use russet_wire::event::FinishReason;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::harness::{
    Certificates, ScriptStep, ScriptedEngine, TEST_TIMEOUT, finished, hello, limits, script_engine, started,
    token,
};
use crate::mock_provider::{MockProvider, Reply, openai};
use crate::object_server::{StoredObjects, api_server, until_ready};

/// Tokens that a scripted engine says it used.
const TOKENS_OF_HELLO: u64 = 10;

/// A cluster of objects in memory, with a deployment `m` and two keys.
struct BudgetLab {
    certificates: Certificates,
    objects: StoredObjects,
    api: std::net::SocketAddr,
    server: Option<tokio::runtime::Runtime>,
    client: reqwest::Client,
}

struct RunningGateway {
    url: String,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<Result<(), russet_gateway::Error>>,
}

fn free() -> std::net::SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn object(kind: &str, name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": kind, "spec": spec,
        "metadata": {
            "namespace": "default", "name": name, "resourceVersion": "1", "generation": 1, "uid": format!("uid-{name}"),
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
    })
}

impl BudgetLab {
    fn new() -> Self {
        use sha2::Digest as _;
        let _ = rustls::crypto::ring::default_provider().install_default();
        let objects = StoredObjects::default();
        objects.apply("modeldeployments", object("ModelDeployment", "m", json!({"modelRef": {"name": "m"}})));
        for (name, owner) in [("tablet", "mia"), ("laptop", "anna")] {
            let secret = hex::encode(sha2::Sha256::digest(name));
            objects.apply(
                "accesskeys",
                object("AccessKey", name, json!({"secretSha256": secret, "owner": owner})),
            );
        }
        let api = free();
        let server = Some(api_server(api, objects.clone()));
        let client = reqwest::Client::builder().timeout(TEST_TIMEOUT).no_proxy().build().unwrap();
        Self { certificates: Certificates::new(), objects, api, server, client }
    }

    fn engine(&self, steps: Vec<ScriptStep>) -> ScriptedEngine {
        let engine = script_engine(&self.certificates, "a", move |_| steps.clone());
        let mut group = object(
            "ShardGroup",
            "m-0-x",
            json!({
                "deploymentRef": {"name": "m"}, "modelRef": {"name": "m"}, "replica": 0, "epoch": 1,
                "plan": {"hash": "x", "backend": "None", "members": [], "contextTokens": 64, "maxSequences": 1},
            }),
        );
        group["status"] = json!({
            "servedEpoch": 1, "endpoint": {"address": engine.address.to_string(), "nodeName": "a"},
            "conditions": [{
                "type": "Ready", "status": "True", "reason": "Serving", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        });
        self.objects.apply("shardgroups", group);
        engine
    }

    /// Applies a Budget; what it is changed to is a newer version.
    fn budget(&self, name: &str, spec: Value) {
        let mut budget = object("Budget", name, spec);
        if let Some(stored) = self.objects.get("budgets", name) {
            let version: u64 = stored["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
            budget["metadata"]["resourceVersion"] = json!((version + 1).to_string());
            budget["status"] = stored["status"].clone();
        }
        self.objects.apply("budgets", budget);
    }

    async fn gateway(&self, journal: Option<&Path>) -> RunningGateway {
        let config = kube::Config::new(format!("http://{}", self.api).parse().unwrap());
        let (listen, ready, stop) = (free(), Arc::new(AtomicBool::new(false)), CancellationToken::new());
        let client = kube::Client::try_from(config).unwrap();
        let config = GatewayConfig {
            dispatch: limits(),
            budget_journal: journal.map(Path::to_owned),
            ..GatewayConfig::new(client, self.certificates.gateway(), listen)
        };
        let task = tokio::spawn(russet_gateway::run(
            config,
            prometheus::Registry::new(),
            ready.clone(),
            stop.clone().cancelled_owned(),
        ));
        until_ready(&ready).await;
        RunningGateway { url: format!("http://{listen}"), stop, task }
    }

    /// The request of a key in a dialect, for an answer of at most so many tokens.
    fn ask(
        &self,
        gateway: &RunningGateway,
        key: &str,
        path: &str,
        max_tokens: u32,
    ) -> reqwest::RequestBuilder {
        let messages = json!([{"role": "user", "content": "hi"}]);
        let body = match path {
            "/v1/responses" => json!({"model": "m", "input": "hi", "max_output_tokens": max_tokens}),
            "/api/chat" => {
                json!({"model": "m", "messages": messages, "stream": false, "options": {"num_predict": max_tokens}})
            }
            _ => json!({"model": "m", "messages": messages, "max_tokens": max_tokens}),
        };
        self.client.post(format!("{}{path}", gateway.url)).bearer_auth(key).json(&body)
    }

    async fn answer(&self, gateway: &RunningGateway, key: &str, path: &str) -> (u16, Value) {
        let response = self.ask(gateway, key, path, 20).send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    /// Waits until the status of a Budget says that so much was used.
    async fn used(&self, name: &str, field: &str, expected: Value) {
        let waited = tokio::time::timeout(TEST_TIMEOUT, async {
            loop {
                let budget = self.objects.get("budgets", name).unwrap();
                if budget["status"]["windows"][0]["used"][field] == expected {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        let budget = || self.objects.get("budgets", name).unwrap()["status"].to_string();
        assert!(waited.await.is_ok(), "{field} is never {expected}: {}", budget());
    }
}

impl Drop for BudgetLab {
    fn drop(&mut self) {
        self.server.take().unwrap().shutdown_background();
    }
}

impl RunningGateway {
    async fn end(self) {
        self.stop.cancel();
        assert!(tokio::time::timeout(TEST_TIMEOUT, self.task).await.unwrap().unwrap().is_ok());
    }
}

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn every_dialect_says_what_is_left_of_a_budget() {
    let lab = BudgetLab::new();
    let engine = lab.engine(hello());
    lab.budget(
        "children",
        json!({
            "scope": {"owners": ["mia"]}, "limits": [{"per": "Month", "requests": 4}],
        }),
    );
    let gateways = [lab.gateway(None).await, lab.gateway(None).await];
    let paths = [CHAT, "/v1/messages", "/api/chat", "/v1/responses"];
    for (number, path) in paths.into_iter().enumerate() {
        let (status, body) = lab.answer(&gateways[number % 2], "tablet", path).await;
        assert_eq!(status, 200, "{path}: {body}");
    }
    for gateway in &gateways {
        for (path, pointer, word) in [
            (CHAT, "/error/code", "insufficient_quota"),
            ("/v1/messages", "/error/type", "billing_error"),
            ("/v1/responses", "/error/code", "insufficient_quota"),
        ] {
            let (status, body) = lab.answer(gateway, "tablet", path).await;
            assert_eq!((status, &body.pointer(pointer)), (402, &Some(&json!(word))), "{path}: {body}");
            let message = body["error"]["message"].as_str().unwrap();
            assert!(
                message.contains("Budget default/children allows 4 requests per Month: 4 are used"),
                "{message}"
            );
            assert!(message.contains("0 are left, and this request may need 1"), "{message}");
        }
        let (status, body) = lab.answer(gateway, "tablet", "/api/chat").await;
        assert!(status == 402 && body["error"].as_str().unwrap().contains("0 are left"), "{body}");
        // Nobody else's.
        assert_eq!(lab.answer(gateway, "laptop", CHAT).await.0, 200);
    }
    assert_eq!(engine.requests(), 6);
    lab.used("children", "requests", json!(4)).await;
    lab.used("children", "tokens", json!(4 * TOKENS_OF_HELLO)).await;
    let status = lab.objects.get("budgets", "children").unwrap()["status"].clone();
    assert_eq!(status["used"], "4 of 4 requests per Month");
    let metrics =
        lab.client.get(format!("{}/metrics", gateways[0].url)).send().await.unwrap().text().await.unwrap();
    let line = r#"russet_gateway_budget_request_total{budget="default/children",outcome="refused"} 4"#;
    assert!(metrics.contains(line), "{metrics}");
    // A gateway that ends gives back what it was granted.
    for gateway in gateways {
        gateway.end().await;
    }
    let window = lab.objects.get("budgets", "children").unwrap()["status"]["windows"][0].clone();
    for share in window["gateways"].as_array().unwrap() {
        assert_eq!(share["granted"]["requests"], share["used"]["requests"], "{window}");
    }
}

#[tokio::test]
async fn joules_are_counted_where_they_are_measured() {
    const TURN: u64 = 20_000;
    let lab = BudgetLab::new();
    let engine = lab.engine(vec![
        started(),
        ScriptStep::Compute(TURN),
        token("a"),
        ScriptStep::Compute(2 * TURN),
        finished(FinishReason::Stop),
    ]);
    // 40 ms at 3 kW: 120 J a request.
    let mut group = lab.objects.get("shardgroups", "m-0-x").unwrap();
    group["metadata"]["resourceVersion"] = json!("2");
    group["status"]["energy"] = json!({"busyWatts": 3000, "source": "Declared"});
    lab.objects.apply("shardgroups", group);
    lab.budget("power", json!({"limits": [{"per": "Day", "joules": 300}]}));
    let gateway = lab.gateway(None).await;
    for (number, path) in [CHAT, "/v1/messages", "/api/chat"].into_iter().enumerate() {
        let (status, body) = lab.answer(&gateway, "tablet", path).await;
        assert_eq!(status, 200, "{number}: {body}");
        lab.used("power", "millijoules", json!(120_000 * (number + 1))).await;
    }
    let (status, body) = lab.answer(&gateway, "tablet", CHAT).await;
    assert_eq!(status, 402, "{body}");
    let message = body["error"]["message"].as_str().unwrap();
    assert!(
        message.contains("Budget default/power allows 300 joules per Day: 360 are used, 0 are left"),
        "{message}"
    );
    assert_eq!(engine.requests(), 3);
    gateway.end().await;
}

#[tokio::test]
async fn a_client_that_leaves_pays_for_what_it_got() {
    let lab = BudgetLab::new();
    let mut steps = vec![started()];
    steps.extend((0..5).map(|_| token("word ")));
    steps.push(ScriptStep::Hang);
    let engine = lab.engine(steps);
    lab.budget("all", json!({"limits": [{"per": "Day", "tokens": 1000}]}));
    let gateway = lab.gateway(None).await;
    let mut body = lab
        .ask(&gateway, "tablet", CHAT, 900)
        .json(&json!({
            "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 900, "stream": true,
        }))
        .send()
        .await
        .unwrap();
    let mut text = String::new();
    while text.matches("word").count() < 5 {
        text.push_str(&String::from_utf8_lossy(&body.chunk().await.unwrap().unwrap()));
    }
    // While it runs, nobody gets what it reserved.
    let response = lab.ask(&gateway, "laptop", CHAT, 500).send().await.unwrap();
    assert_eq!(response.status(), 402);
    let error: Value = response.json().await.unwrap();
    assert!(
        error["error"]["message"].as_str().unwrap().contains("are reserved by requests that run"),
        "{error}"
    );
    drop(body);
    engine.running(0).await;
    lab.used("all", "tokens", json!(7 + 5)).await;
    lab.used("all", "requests", json!(1)).await;
    // A request that says nothing of its length may have what is left, and is told to its engine.
    let open = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": true});
    let running = lab
        .client
        .post(format!("{}{CHAT}", gateway.url))
        .bearer_auth("laptop")
        .json(&open)
        .send()
        .await
        .unwrap();
    let sent = engine.received.lock().unwrap().last().unwrap().max_tokens;
    assert!(sent.is_some_and(|most| (900..=988).contains(&most)), "{sent:?}");
    drop(running);
    gateway.end().await;
}

#[tokio::test]
async fn what_was_used_is_known_after_a_restart() {
    let lab = BudgetLab::new();
    let _engine = lab.engine(hello());
    let folder = tempfile::tempdir().unwrap();
    let journal = folder.path().join("budgets.sqlite");
    lab.budget("all", json!({"limits": [{"per": "Month", "tokens": 100}]}));
    let gateway = lab.gateway(Some(&journal)).await;
    assert_eq!(lab.answer(&gateway, "tablet", CHAT).await.0, 200);
    // Its tasks end where they are, as those of a process that is killed.
    gateway.task.abort();
    let _ = gateway.task.await;
    let gateway = lab.gateway(Some(&journal)).await;
    lab.used("all", "tokens", json!(TOKENS_OF_HELLO)).await;
    let share = lab.objects.get("budgets", "all").unwrap()["status"]["windows"][0]["gateways"].clone();
    assert_eq!(share.as_array().unwrap().len(), 1, "it has the name that it had: {share}");
    gateway.end().await;
}

#[tokio::test]
async fn money_decides_which_provider_answers() {
    let lab = BudgetLab::new();
    let _engine = lab.engine(vec![started(), finished(FinishReason::Stop)]);
    let dear = MockProvider::start(|_| Reply::Events(openai(&["dear"]))).await;
    let cheap = MockProvider::start(|_| Reply::Events(openai(&["cheap"]))).await;
    let provider = |mock: &MockProvider, price: Value, fee: &str| {
        let mut spec = serde_json::to_value(mock.object("p", Zone::Local).spec).unwrap();
        spec["models"] = json!([{
            "name": "org/*", "contextTokens": 4000, "pricePerMillionTokens": price, "pricePerRequest": fee,
        }]);
        spec
    };
    let prices = (json!({"input": "100", "output": "1000"}), json!({"input": "1", "output": "10"}));
    lab.objects.apply("modelproviders", object("ModelProvider", "dear", provider(&dear, prices.0, "0.001")));
    lab.objects.apply("modelproviders", object("ModelProvider", "cheap", provider(&cheap, prices.1, "0")));
    let target = |name: &str| json!({"providerRef": {"name": name}, "model": "org/big"});
    lab.objects.apply(
        "modelroutes",
        object(
            "ModelRoute",
            "auto",
            json!({
                "models": ["auto"], "zone": "Cloud", "targets": [target("dear"), target("cheap")],
            }),
        ),
    );
    lab.objects.apply(
        "namespaces",
        json!({
            "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default", "resourceVersion": "1"},
        }),
    );
    lab.budget("money", json!({"limits": [{"per": "Month", "money": "0.05"}]}));
    let gateway = lab.gateway(None).await;
    let ask = async |max_tokens: u32, words: usize| {
        let body = json!({
            "model": "auto", "messages": [{"role": "user", "content": "word ".repeat(words)}], "max_tokens": max_tokens,
        });
        let request = lab.client.post(format!("{}{CHAT}", gateway.url)).bearer_auth("laptop").json(&body);
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    let text = |body: &Value| body["choices"][0]["message"]["content"].clone();
    // 40 tokens of the first would cost 0.04 and a fee, which is there; what it used is 11 + 2 tokens and that fee.
    let (status, body) = ask(40, 1).await;
    assert_eq!((status, text(&body)), (200, json!("dear")), "{body}");
    lab.used("money", "money", json!("0.0041")).await;
    // 48 tokens cost more than is left, and at the second a hundredth.
    let (status, body) = ask(48, 1).await;
    assert_eq!((status, text(&body)), (200, json!("cheap")), "{body}");
    lab.used("money", "money", json!("0.004131")).await;
    let (status, body) = ask(3900, 1).await;
    assert_eq!((status, text(&body)), (200, json!("cheap")), "{body}");
    let (status, body) = ask(3900, 1000).await;
    assert_eq!(status, 502, "{body}");
    assert!(body["error"]["message"].as_str().unwrap().contains("the model's context has 4000"), "{body}");
    // With less left than any of them costs, nobody is asked.
    lab.budget("money", json!({"limits": [{"per": "Month", "money": "0.02"}]}));
    let waited = tokio::time::timeout(TEST_TIMEOUT, async {
        loop {
            let (status, body) = ask(3900, 1).await;
            if status == 402 {
                return body;
            }
        }
    });
    let body = waited.await.unwrap();
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.contains("default/dear") && message.contains("default/cheap"), "{message}");
    assert!(message.contains("allows 0.02 money per Month"), "{message}");
    // With less than is used, the Budget itself refuses.
    lab.budget("money", json!({"limits": [{"per": "Month", "money": "0.00001"}]}));
    let waited = tokio::time::timeout(TEST_TIMEOUT, async {
        loop {
            let (status, body) = ask(40, 1).await;
            let message = body["error"]["message"].as_str().unwrap_or_default().to_owned();
            if message.contains("allows 0.00001 money per Month") && !message.contains("default/dear") {
                return (status, message);
            }
        }
    });
    let (status, message) = waited.await.unwrap();
    assert_eq!(status, 402, "{message}");
    assert!(message.contains("0.00 are left; the next"), "{message}");
    gateway.end().await;
}
