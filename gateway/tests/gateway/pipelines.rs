//! PipelineRuns on a whole gateway, with an API server, an engine and an endpoint of the test: a chain with an approval, values
//! of a list, conditions, failures with compensation, what may not leave, and kills.

#[cfg(target_os = "linux")]
mod capture;
mod failures;
mod kills;
mod requested;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use russet_gateway::GatewayConfig;
use russet_gateway::audit::{AuditPeriod, UsageField, usage};
use russet_gateway::response_store::ResponseStoreConfig;
use russet_wire::event::FinishReason;
use serde_json::{Value, json};
use sha2::Digest as _;
use tokio_util::sync::CancellationToken;

use crate::cluster::{deployment, free_address, group};
use crate::harness::{
    Certificates, ScriptStep, ScriptedEngine, TEST_TIMEOUT, finished, limits, script_engine, started, token,
};
use crate::mock_provider::{MockProvider, Reply};
use crate::object_server::{StoredObjects, api_server};

/// Everything around a gateway, which comes and goes.
struct PipelineLab {
    certificates: Certificates,
    objects: StoredObjects,
    engine: ScriptedEngine,
    endpoint: MockProvider,
    folder: tempfile::TempDir,
    api: std::net::SocketAddr,
    listen: std::net::SocketAddr,
    client: reqwest::Client,
    server: Option<tokio::runtime::Runtime>,
}

impl Drop for PipelineLab {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.shutdown_background();
        }
    }
}

/// What the engine answers a prompt: the prompt in angle brackets, or a review of it.
fn answer(request: &russet_rpc::engine::GenerateRequest) -> Vec<ScriptStep> {
    let prompt = request.messages.last().map(|message| message.content.clone()).unwrap_or_default();
    let text = match prompt.strip_prefix("review ") {
        Some(_) => r#"{"ok": true, "score": 8}"#.to_owned(),
        None => format!("<{prompt}>"),
    };
    vec![started(), ScriptStep::Compute(10_000), token(&text), finished(FinishReason::Stop)]
}

impl PipelineLab {
    async fn start(
        answer: impl Fn(&russet_rpc::engine::GenerateRequest) -> Vec<ScriptStep> + Send + Sync + 'static,
        reply: impl Fn(&crate::mock_provider::ReceivedRequest) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let certificates = Certificates::new();
        let engine = script_engine(&certificates, "a", answer);
        let endpoint = MockProvider::start(reply).await;
        let objects = StoredObjects::default();
        objects.apply("modeldeployments", deployment());
        objects.apply("shardgroups", group(&engine, 1, 2));
        let (api, listen) = (free_address(), free_address());
        let server = Some(api_server(api, objects.clone()));
        let client = reqwest::Client::builder().timeout(TEST_TIMEOUT).no_proxy().build().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let lab = Self { certificates, objects, engine, endpoint, folder, api, listen, client, server };
        lab.object(
            "HTTPEndpoint",
            "hooks",
            json!({"url": format!("http://{}/hooks", lab.endpoint.address), "zone": "Local"}),
        );
        lab
    }

    /// Creates, or replaces, an object.
    fn object(&self, kind: &str, name: &str, spec: Value) {
        let plural = format!("{}s", kind.to_lowercase());
        let known = self.objects.get(&plural, name).unwrap_or_default();
        let version =
            known["metadata"]["resourceVersion"].as_str().map_or(1, |version| version.parse().unwrap());
        self.objects.apply(&plural, json!({
            "apiVersion": "russet.dev/v1alpha1", "kind": kind, "spec": spec, "status": known["status"],
            "metadata": {
                "namespace": "default", "name": name, "uid": format!("uid-of-{name}"),
                "resourceVersion": (version + 1_u64).to_string(), "creationTimestamp": "2026-01-01T00:00:00Z",
            },
        }));
    }

    fn run(&self, name: &str, spec: Value) {
        self.object("PipelineRun", name, spec);
    }

    /// A gateway of this process, until the token is cancelled.
    fn gateway(&self) -> (tokio::task::JoinHandle<()>, CancellationToken) {
        let stop = CancellationToken::new();
        let folder = self.folder.path().to_owned();
        let served = gateway(self.api, self.listen, self.certificates.gateway(), folder, stop.clone());
        (tokio::spawn(served), stop)
    }

    /// The status of a run once this is true of it.
    async fn status(&self, run: &str, reached: impl Fn(&Value) -> bool) -> Value {
        let found = tokio::time::timeout(TEST_TIMEOUT, async {
            loop {
                let status = self.objects.get("pipelineruns", run).unwrap()["status"].clone();
                if reached(&status) {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        let now = || self.objects.get("pipelineruns", run).unwrap()["status"].to_string();
        found.await.unwrap_or_else(|_| panic!("{run} never came so far: {}", now()))
    }

    /// The status of a run that has ended, with this reason.
    async fn ended(&self, run: &str, reason: &str) -> Value {
        let attempt = self.objects.get("pipelineruns", run).unwrap()["spec"]["attempt"].as_u64().unwrap_or(1);
        let is_over = |status: &Value| status["finishedAt"].is_string() && status["attempt"] == attempt;
        let status = self.status(run, is_over).await;
        assert_eq!(ready(&status)["reason"], reason, "{status}");
        status
    }

    /// The Approval that a run waits for, and what it is for.
    async fn asked(&self, run: &str) -> (String, Vec<u8>) {
        let waits = |status: &Value| ready(status)["reason"] == "AwaitingApproval";
        let status = self.status(run, waits).await;
        let step =
            status["steps"].as_array().unwrap().iter().find(|step| step["state"] == "AwaitingApproval");
        let step = step.unwrap();
        let approval = step["approval"].as_str().unwrap().to_owned();
        let asked = tokio::time::timeout(TEST_TIMEOUT, async {
            loop {
                if let Some(found) = self.objects.get("approvals", &approval) {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        let asked = asked.await.unwrap();
        let actions = self.artifact(step["action"].as_str().unwrap()).await;
        // What is approved is what is shown.
        assert_eq!(asked["spec"]["planHash"], hex::encode(sha2::Sha256::digest(&actions)));
        assert_eq!(
            (&asked["spec"]["action"], &asked["spec"]["pipelineRunRef"]["name"]),
            (&json!("Step"), &json!(run))
        );
        assert_eq!(asked["metadata"]["ownerReferences"][0]["uid"], format!("uid-of-{run}"));
        (approval, actions)
    }

    fn decide(&self, approval: &str, decision: &str) {
        let mut object = self.objects.get("approvals", approval).unwrap();
        object["spec"]["decision"] = json!(decision);
        object["spec"]["decidedBy"] = json!("ada");
        self.objects.apply("approvals", object);
    }

    async fn artifact(&self, digest: &str) -> Vec<u8> {
        let url = format!("http://{}/v1/artifacts/{digest}", self.listen);
        let response = self.client.get(url).send().await.unwrap();
        assert_eq!(response.status(), 200, "{digest}");
        response.bytes().await.unwrap().to_vec()
    }

    /// The output of a step as text.
    async fn output(&self, status: &Value, step: &str) -> String {
        String::from_utf8(self.artifact(step_of(status, step)["output"].as_str().unwrap()).await).unwrap()
    }

    /// Idempotency keys of the calls of the endpoint.
    fn keys(&self) -> Vec<String> {
        let key = |request: crate::mock_provider::ReceivedRequest| {
            request.headers["idempotency-key"].to_str().unwrap().to_owned()
        };
        self.endpoint.asked().into_iter().map(key).collect()
    }
}

/// A whole gateway until `stop`.
async fn gateway(
    api: std::net::SocketAddr,
    listen: std::net::SocketAddr,
    tls: russet_rpc::tls::TlsFiles,
    folder: PathBuf,
    stop: CancellationToken,
) {
    let client = kube::Client::try_from(kube::Config::new(format!("http://{api}").parse().unwrap())).unwrap();
    let config = GatewayConfig {
        dispatch: limits(),
        responses: Some(ResponseStoreConfig::new(folder.join("responses.db"))),
        audit_log: Some(folder.join("audit")),
        ..GatewayConfig::new(client, tls, listen)
    };
    let ready = Arc::new(AtomicBool::new(false));
    russet_gateway::run(config, prometheus::Registry::new(), ready, stop.cancelled_owned()).await.unwrap();
}

fn ready(status: &Value) -> &Value {
    let conditions = status["conditions"].as_array();
    conditions.into_iter().flatten().find(|one| one["type"] == "Ready").unwrap_or(&Value::Null)
}

fn step_of<'a>(status: &'a Value, name: &str) -> &'a Value {
    status["steps"].as_array().unwrap().iter().find(|step| step["name"] == name).unwrap()
}

/// The endpoint says how often it was called with which key.
fn accept(_: &crate::mock_provider::ReceivedRequest) -> Reply {
    Reply::Status(200, Some(("content-type", "application/json")), r#"{"id": 7}"#)
}

/// Research, draft, review, and delivery once a person has approved it.
fn chain() -> Value {
    json!({
        "parameters": [{"name": "topic"}],
        "steps": [
            {"name": "research", "chat": {"model": "m", "prompt": "facts on $(parameters.topic)"}},
            {"name": "draft", "chat": {"model": "m", "system": "Write.", "prompt": "text from $(steps.research.output)"}},
            {
                "name": "review",
                "chat": {"model": "m", "prompt": "review $(steps.draft.output)"},
                "schema": {
                    "type": "object", "required": ["ok", "score"],
                    "properties": {"ok": {"type": "boolean"}, "score": {"type": "integer"}},
                },
            },
            {
                "name": "deliver",
                "when": [{"input": "$(steps.review.output.ok)", "operator": "In", "values": ["true"]}],
                "approval": {"message": "Send this to the list?"},
                "http": {
                    "endpointRef": {"name": "hooks"}, "path": "/messages?topic=$(parameters.topic)",
                    "json": {"text": "$(steps.draft.output)", "review": "$(steps.review.output)"},
                },
            },
        ],
    })
}

#[tokio::test]
async fn steps_follow_each_other_to_what_a_person_approved() {
    let lab = PipelineLab::start(answer, accept).await;
    let mut group = group(&lab.engine, 1, 3);
    group["status"]["energy"] = json!({"busyWatts": 5000, "source": "Declared", "pricePerHour": "1.80"});
    lab.objects.apply("shardgroups", group);
    lab.object("Pipeline", "brief", chain());
    lab.run(
        "r1",
        json!({"pipelineRef": {"name": "brief"}, "parameters": [{"name": "topic", "value": "green tea"}]}),
    );
    let (gateway, stop) = lab.gateway();
    let (approval, actions) = lab.asked("r1").await;
    let draft = "<text from <facts on green tea>>";
    let url = format!("http://{}/hooks/messages?topic=green%20tea", lab.endpoint.address);
    let actions: Value = serde_json::from_slice(&actions).unwrap();
    let sent = json!({"text": draft, "review": {"ok": true, "score": 8}});
    assert_eq!(actions[0]["http"]["url"], url);
    assert_eq!(serde_json::from_str::<Value>(actions[0]["http"]["body"].as_str().unwrap()).unwrap(), sent);
    assert!(lab.endpoint.asked().is_empty(), "nothing is sent before it is approved");
    lab.decide(&approval, "Approved");
    let status = lab.ended("r1", "Finished").await;
    assert_eq!((status["progress"].as_str(), &status["step"]), (Some("4/4"), &Value::Null));
    assert_eq!(lab.output(&status, "draft").await, draft);
    assert_eq!(lab.output(&status, "deliver").await, r#"{"id":7}"#);
    // Each answer is ten milliseconds at 5 kW.
    let used = |answers: u64, electricity: &str| {
        json!({
            "promptTokens": 7 * answers, "completionTokens": 3 * answers, "millijoules": 50_000 * answers,
            "electricity": electricity,
        })
    };
    assert_eq!(status["usage"], used(3, "0.000015"));
    assert_eq!(step_of(&status, "research")["usage"], used(1, "0.000005"));
    let audit = lab.folder.path().join("audit");
    let logged = async {
        loop {
            let (period, zone) = (AuditPeriod::default(), jiff::tz::TimeZone::UTC);
            let logged = usage(&audit, &period, &[UsageField::Step], &zone, None).unwrap();
            if logged.total().requests == 3 {
                return logged.totals;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let logged = tokio::time::timeout(TEST_TIMEOUT, logged).await.expect("three requests in the audit log");
    let draft = &logged[&vec!["default/brief/draft".to_owned()]];
    assert_eq!((draft.requests, draft.millijoules, draft.unmetered), (1, 50_000, 0));
    assert_eq!(step_of(&status, "deliver")["decidedBy"], "ada");
    let asked = lab.endpoint.asked();
    assert_eq!((asked.len(), &asked[0].body, asked[0].path.as_str()), (1, &sent, "/hooks/messages"));
    assert_eq!(lab.keys(), ["uid-of-r1/deliver/0/0"]);
    // No text of a model is in the objects.
    let seen = format!("{status}{}", lab.objects.get("approvals", &approval).unwrap());
    assert!(!seen.contains("facts on") && !seen.contains("<text"), "{seen}");
    // It is over: a gateway that starts again does nothing more, and what was made goes with the run.
    stop.cancel();
    gateway.await.unwrap();
    let (gateway, stop) = lab.gateway();
    lab.run("r2", json!({"pipelineRef": {"name": "brief"}, "parameters": [{"name": "topic", "value": "x"}]}));
    let (second, _) = lab.asked("r2").await;
    lab.decide(&second, "Denied");
    let status = lab.ended("r2", "Failed").await;
    assert_eq!(
        ready(&status)["message"],
        "step deliver: ada denied it; `russet pipeline resume r2` goes on with it"
    );
    assert_eq!(lab.endpoint.asked().len(), 1);
    let digest = step_of(&status, "draft")["output"].as_str().unwrap().to_owned();
    lab.artifact(&digest).await;
    lab.objects.delete("pipelineruns", "r2");
    let gone = tokio::time::timeout(TEST_TIMEOUT, async {
        let url = format!("http://{}/v1/artifacts/{digest}", lab.listen);
        loop {
            let response = lab.client.get(&url).send().await.unwrap();
            if response.status() == 404 {
                return response.json::<Value>().await.unwrap();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let error = gone.await.expect("what a deleted run made is deleted");
    assert_eq!(error["error"]["code"], "artifact_not_found");
    stop.cancel();
    gateway.await.unwrap();
}

#[tokio::test]
async fn a_step_is_done_for_each_value_of_a_list() {
    let lab = PipelineLab::start(answer, |request| {
        if request.path.ends_with("/list") {
            return Reply::Status(200, Some(("content-type", "application/json")), r#"["a", "b/c", "d"]"#);
        }
        Reply::Status(200, None, "noted")
    })
    .await;
    lab.object("Pipeline", "each", json!({"steps": [
        {"name": "list", "http": {"endpointRef": {"name": "hooks"}, "method": "GET", "path": "/list"}},
        {"name": "ask", "forEach": "$(steps.list.output)", "parallel": 2,
         "chat": {"model": "m", "prompt": "$(index): $(item)"}},
        {"name": "skipped", "when": [{"input": "$(steps.list.output.0)", "operator": "NotIn", "values": ["a"]}],
         "chat": {"model": "m", "prompt": "never"}},
        {"name": "note", "forEach": "$(steps.list.output)",
         "http": {"endpointRef": {"name": "hooks"}, "method": "PUT", "path": "/notes/$(item)",
                  "headers": {"X-Kind": "$(steps.skipped.output)note"}, "body": "$(steps.ask.output.1)"}},
    ]}));
    lab.run("r", json!({"pipelineRef": {"name": "each"}}));
    let (gateway, stop) = lab.gateway();
    let status = lab.ended("r", "Finished").await;
    assert_eq!(lab.output(&status, "ask").await, r#"["<0: a>","<1: b/c>","<2: d>"]"#);
    assert_eq!(
        (&step_of(&status, "ask")["items"], &step_of(&status, "note")["items"]),
        (&json!("3/3"), &json!("3/3"))
    );
    let skipped = step_of(&status, "skipped");
    assert_eq!(
        (&skipped["state"], &skipped["message"]),
        (&json!("Skipped"), &json!("$(steps.list.output.0) is not NotIn a"))
    );
    let calls: Vec<String> = lab.endpoint.asked().iter().map(|call| call.path.clone()).collect();
    assert_eq!(calls, ["/hooks/list", "/hooks/notes/a", "/hooks/notes/b%2Fc", "/hooks/notes/d"]);
    assert_eq!(lab.endpoint.asked()[1].headers["x-kind"], "note");
    assert_eq!(lab.keys()[1..], ["uid-of-r/note/0/0", "uid-of-r/note/1/0", "uid-of-r/note/2/0"]);
    stop.cancel();
    gateway.await.unwrap();
}
