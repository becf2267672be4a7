//! Providers outside of the cluster: which requests reach them, in both dialects; what becomes of their failures; and that a
//! request that stays at home reaches none, whichever way it takes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use russet_crds::{ModelPrice, ModelRoute, Money, ProviderApi, ProviderModel, TokenPrice, Zone};
use russet_gateway::audit::{AuditLog, AuditPeriod, UsageField, usage, verify};
use russet_gateway::request_log::{AttemptOutcome, RequestRecord};
use russet_gateway::response_store::ResponseStoreConfig;
use russet_gateway::routes::{DeploymentState, Provider, RoutingTable};
use russet_wire::event::FinishReason;
use serde_json::{Value, json};

use crate::harness::{GatewayLab, ScriptStep, TEST_TIMEOUT, access_key, finished, limits, started, token};
use crate::mock_provider::{MockProvider, Reply, openai, openai_begun};

fn working() -> DeploymentState {
    DeploymentState::Working("copying 3 of 9 GiB".into())
}

/// A route `auto` with this spec, these providers, and the deployments that are published already.
pub fn route(lab: &GatewayLab, providers: &[Provider], spec: Value) {
    let object = json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": "ModelRoute",
        "metadata": {"name": "auto", "namespace": "default"}, "spec": spec,
    });
    let route: ModelRoute = serde_json::from_value(object).unwrap();
    let aliases = RoutingTable::from_objects(&[], &[], &[route]).aliases;
    lab.change(|table| {
        table.synced = true;
        table.aliases = aliases;
        table.providers = providers.to_vec();
        table.namespace_zones = Some(BTreeMap::new());
    });
}

pub fn to_provider(name: &str) -> Value {
    json!({"providerRef": {"name": name}, "model": "org/big"})
}

fn to_deployment(name: &str) -> Value {
    json!({"deploymentRef": {"name": name}})
}

/// A spec with these targets that may leave as far as this.
pub fn spec(zone: &str, targets: Value) -> Value {
    json!({"models": ["auto"], "zone": zone, "targets": targets})
}

pub async fn why(lab: &GatewayLab, id: &str) -> RequestRecord {
    let response = lab.client.get(lab.url(&format!("/requests/{id}/why"))).send().await.unwrap();
    response.json().await.unwrap()
}

pub async fn body(request: reqwest::RequestBuilder) -> (u16, Value) {
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

pub fn text(body: &Value) -> &str {
    body["choices"][0]["message"]["content"].as_str().unwrap_or_default()
}

#[tokio::test]
async fn a_provider_answers_where_no_replica_is_ready() {
    let lab = GatewayLab::start(limits()).await;
    let provider = MockProvider::start(|_| Reply::Events(openai(&["Hel", "lo"]))).await;
    lab.publish(&[("m", working(), &[])]);
    route(
        &lab,
        &[provider.object("p", Zone::Local)],
        spec("Local", json!([to_deployment("m"), to_provider("p")])),
    );
    let request = json!({"model": "auto", "temperature": 0.5, "max_tokens": 20});
    let (status, answer) = body(lab.chat(request.clone()).header("x-request-id", "r1")).await;
    assert_eq!((status, text(&answer)), (200, "Hello"), "{answer}");
    assert_eq!(answer["model"], "auto");
    assert_eq!(answer["usage"]["prompt_tokens"], 11);
    let asked = provider.asked();
    assert_eq!(asked[0].path, "/v1/chat/completions");
    assert_eq!(
        asked[0].body,
        json!({
            "model": "org/big", "messages": [{"role": "user", "content": "hi"}], "stream": true,
            "stream_options": {"include_usage": true}, "max_tokens": 20, "temperature": 0.5,
        })
    );
    assert_eq!(asked[0].headers.get("authorization"), None);
    let record = why(&lab, "r1").await;
    let left = record.attempts[0].provider.as_ref().unwrap();
    assert_eq!((left.name.as_str(), left.model.as_str(), &*left.zone), ("default/p", "org/big", "Local"));
    assert_eq!(left.limit_by, "spec.zone of ModelRoute default/auto");
    assert_eq!(record.attempts[0].outcome, Some(AttemptOutcome::Answered));
    // A stream has the pieces as they come.
    let mut streamed = request;
    streamed["stream"] = json!(true);
    let stream = lab.chat(streamed).send().await.unwrap().text().await.unwrap();
    assert!(stream.contains(r#""content":"Hel""#) && stream.contains(r#""content":"lo""#), "{stream}");
    assert!(stream.ends_with("data: [DONE]\n\n"), "{stream}");
    // Back home as soon as a replica is ready.
    let engine = lab.engine("a", |_| vec![started(), token("home"), finished(FinishReason::Stop)]);
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    route(
        &lab,
        &[provider.object("p", Zone::Local)],
        spec("Local", json!([to_deployment("m"), to_provider("p")])),
    );
    assert_eq!(text(&body(lab.chat(json!({"model": "auto"}))).await.1), "home");
    assert_eq!(provider.asked().len(), 2);
}

#[tokio::test]
async fn tools_and_thinking_cross_both_dialects() {
    let lab = GatewayLab::start(limits()).await;
    let anthropic = MockProvider::start(|_| {
        let events = [
            json!({"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 1}}}),
            json!({"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}}),
            json!({"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}}),
            json!({"type": "content_block_stop", "index": 0}),
            json!({"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "t1", "name": "sum", "input": {}}}),
            json!({"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{\"a\":1}"}}),
            json!({"type": "content_block_stop", "index": 1}),
            json!({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}}),
            json!({"type": "message_stop"}),
        ];
        Reply::Events(events.map(|event| event.to_string()).to_vec())
    })
    .await;
    let openai_like = MockProvider::start(|_| {
        let events = [
            json!({"choices": [{"delta": {"reasoning_content": "hm"}}]}),
            json!({"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "t2", "function": {"name": "sum", "arguments": "{\"a\":2}"}}]}}]}),
            json!({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}),
        ];
        Reply::Events(events.map(|event| event.to_string()).to_vec())
    })
    .await;
    let mut claude = anthropic.object("claude", Zone::Local);
    claude.spec.api = ProviderApi::Anthropic;
    let providers = [claude, openai_like.object("open", Zone::Local)];
    // A client of OpenAI's API, answered by Anthropic's.
    route(&lab, &providers, spec("Local", json!([to_provider("claude")])));
    let parameters = json!({"type": "object", "properties": {"a": {"type": "number"}}});
    let tools = json!([{"type": "function", "function": {"name": "sum", "parameters": parameters}}]);
    let (status, answer) = body(lab.chat(json!({"model": "auto", "tools": tools}))).await;
    let message = &answer["choices"][0]["message"];
    assert_eq!(status, 200, "{answer}");
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "sum", "arguments": "{\"a\":1}"}));
    assert_eq!(
        (&message["reasoning_content"], &answer["choices"][0]["finish_reason"]),
        (&json!("hm"), &json!("tool_calls"))
    );
    let asked = &anthropic.asked()[0];
    assert_eq!(
        (asked.path.as_str(), &asked.headers["anthropic-version"]),
        ("/v1/messages", &"2023-06-01".parse().unwrap())
    );
    assert_eq!(asked.body["tools"], json!([{"name": "sum", "input_schema": parameters}]));
    // A client of Anthropic's API, answered by OpenAI's.
    route(&lab, &providers, spec("Local", json!([to_provider("open")])));
    let request = json!({
        "model": "auto", "max_tokens": 99, "tools": [{"name": "sum", "input_schema": parameters}],
        "messages": [{"role": "user", "content": "Sum."}],
    });
    let call = lab.client.post(lab.url("/v1/messages")).json(&request);
    let (status, answer) = body(call).await;
    assert_eq!(status, 200, "{answer}");
    let blocks = answer["content"].as_array().unwrap();
    let of = |kind: &str| blocks.iter().find(|block| block["type"] == kind);
    assert_eq!(of("tool_use").unwrap()["input"], json!({"a": 2}), "{answer}");
    assert_eq!(of("thinking").unwrap()["thinking"], "hm");
    assert_eq!(answer["stop_reason"], "tool_use");
    assert_eq!(openai_like.asked()[0].body["tools"], tools);
}

#[tokio::test]
async fn what_a_provider_does_wrong_leads_to_the_next_one() {
    let lab = GatewayLab::start(limits()).await;
    let good = MockProvider::saying("good").await;
    let faults = [
        (Reply::Status(500, None, "oops"), "500 Internal Server Error: oops"),
        (
            Reply::Status(429, Some(("retry-after", "60")), "{\"error\":{\"message\":\"slow down\"}}"),
            "slow down",
        ),
        (Reply::Status(401, None, "{\"error\":{\"message\":\"no key\"}}"), "no key"),
        (Reply::Status(402, None, "{\"error\":{\"message\":\"no credits\"}}"), "no credits"),
        (Reply::Status(302, Some(("location", "http://127.0.0.1:1/")), ""), "redirects are not followed"),
        (Reply::Status(200, None, "<html>hello</html>"), "ended its answer in the middle"),
        (Reply::Events(vec!["{".into()]), "no part of an answer"),
        (Reply::Events(vec![json!({"error": {"message": "upstream"}}).to_string()]), "it reports: upstream"),
        (Reply::Events(vec![]), "ended its answer in the middle"),
    ];
    for (number, (reply, code)) in faults.into_iter().enumerate() {
        let bad = MockProvider::start(move |_| reply.clone()).await;
        let providers = [bad.object("bad", Zone::Local), good.object("good", Zone::Local)];
        route(&lab, &providers, spec("Local", json!([to_provider("bad"), to_provider("good")])));
        let (status, answer) =
            body(lab.chat(json!({"model": "auto"})).header("x-request-id", format!("r{number}"))).await;
        assert_eq!((status, text(&answer)), (200, "good"), "{code}: {answer}");
        let record = why(&lab, &format!("r{number}")).await;
        let message = match &record.attempts[0].outcome {
            Some(AttemptOutcome::Lost { message, .. } | AttemptOutcome::Busy { message }) => message,
            other => panic!("{code}: {other:?}"),
        };
        assert!(message.contains(code), "{message}");
        // Alone it is an error that says the same.
        if !code.contains("slow") {
            route(&lab, &providers, spec("Local", json!([to_provider("bad")])));
            let (status, answer) = body(lab.chat(json!({"model": "auto"}))).await;
            assert_eq!((status, &answer["error"]["code"]), (502, &json!("provider_failed")), "{answer}");
        }
        // Each starts anew.
        lab.change(|table| table.providers.clear());
    }
}

#[tokio::test]
async fn a_provider_that_asks_for_a_pause_gets_it() {
    let lab = GatewayLab::start(limits()).await;
    let busy = MockProvider::start(|_| Reply::Status(429, Some(("retry-after", "60")), "")).await;
    route(&lab, &[busy.object("busy", Zone::Local)], spec("Local", json!([to_provider("busy")])));
    for _ in 0..5 {
        let response = lab.chat(json!({"model": "auto"})).send().await.unwrap();
        assert_eq!(response.status(), 429);
        assert_eq!(response.headers()["retry-after"], "5");
    }
    assert_eq!(busy.asked().len(), 1, "the others were not sent");
    // A request that is wrong is wrong for all: it says nothing of the provider.
    let strict = MockProvider::start(|_| {
        Reply::Status(400, None, "{\"error\":{\"message\":\"maximum context length is 8\"}}")
    })
    .await;
    route(&lab, &[strict.object("strict", Zone::Local)], spec("Local", json!([to_provider("strict")])));
    for _ in 0..5 {
        let (status, answer) = body(lab.chat(json!({"model": "auto"}))).await;
        assert_eq!((status, &answer["error"]["code"]), (400, &json!("context_length_exceeded")), "{answer}");
    }
    assert_eq!(strict.asked().len(), 5);
}

#[tokio::test]
async fn an_answer_that_began_is_never_continued_by_another() {
    let lab = GatewayLab::start(limits()).await;
    let cut = MockProvider::start(|_| Reply::Events(openai_begun(&["Half"]))).await;
    let other = MockProvider::saying("other").await;
    let providers = [cut.object("cut", Zone::Local), other.object("other", Zone::Local)];
    route(&lab, &providers, spec("Local", json!([to_provider("cut"), to_provider("other")])));
    let stream =
        lab.chat(json!({"model": "auto", "stream": true})).send().await.unwrap().text().await.unwrap();
    assert!(stream.contains(r#""content":"Half""#) && stream.contains("provider_failed"), "{stream}");
    assert!(!stream.contains("other"), "{stream}");
    assert_eq!(other.asked().len(), 0);
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_answer_of_a_provider() {
    let lab = GatewayLab::start(limits()).await;
    let slow = MockProvider::start(|_| Reply::Stall(openai_begun(&["Half"]))).await;
    route(&lab, &[slow.object("slow", Zone::Local)], spec("Local", json!([to_provider("slow")])));
    let mut response = lab.chat(json!({"model": "auto", "stream": true})).send().await.unwrap();
    assert!(response.chunk().await.unwrap().is_some());
    slow.running(1).await;
    drop(response);
    slow.running(0).await;
    // A deadline ends it too.
    let (status, answer) = body(lab.chat(json!({"model": "auto"})).header("x-request-timeout", "0.3")).await;
    assert_eq!(status, 504, "{answer}");
    slow.running(0).await;
}

#[tokio::test]
async fn requirements_beyond_an_api_stay_at_home() {
    let lab = GatewayLab::start(limits()).await;
    let provider = MockProvider::saying("far").await;
    let engine = lab.engine("a", |_| vec![started(), token("home"), finished(FinishReason::Stop)]);
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    route(
        &lab,
        &[provider.object("p", Zone::Local)],
        spec("Local", json!([to_provider("p"), to_deployment("m")])),
    );
    for (more, expected) in [
        (json!({"model": "auto"}), "far"),
        (json!({"model": "auto", "logit_bias": {"5": 1}}), "home"),
        (json!({"model": "auto", "min_tokens": 2}), "home"),
    ] {
        assert_eq!(text(&body(lab.chat(more.clone())).await.1), expected, "{more}");
    }
    // A name that leads to providers alone is in the list of models.
    route(&lab, &[provider.object("p", Zone::Local)], spec("Local", json!([to_provider("p")])));
    let list = lab.client.get(lab.url("/v1/models")).send().await.unwrap().json::<Value>().await.unwrap();
    let listed = list["data"].as_array().unwrap().iter().find(|one| one["id"] == "auto").unwrap();
    assert_eq!(
        (&listed["max_model_len"], &listed["russet"]["ready"]),
        (&json!(131_072), &json!(true)),
        "{listed}"
    );
    route(
        &lab,
        &[provider.object("p", Zone::Local)],
        spec("Local", json!([to_provider("p"), to_deployment("m")])),
    );
    // Vectors and counts of tokens are the deployments' own.
    let vectors = lab.client.post(lab.url("/v1/embeddings")).json(&json!({"model": "auto", "input": "x"}));
    assert_eq!(body(vectors).await.0, 200);
    assert_eq!(provider.asked().len(), 1);
}

/// The labels of a case: on the key, on the namespace, in the header.
const LABELED: [(Option<&str>, Option<&str>, Option<&str>); 6] = [
    (Some("Local"), None, None),
    (None, Some("Local"), None),
    (None, None, Some("Local")),
    (Some("Lan"), Some("Cloud"), Some("Cloud")),
    (None, Some("Lan"), Some("Cloud")),
    (Some("home"), None, Some("Cloud")),
];

#[tokio::test]
async fn no_way_leads_a_request_beyond_its_zone() {
    let folder = tempfile::tempdir().unwrap();
    let store = ResponseStoreConfig::new(folder.path().join("responses.db"));
    let lab = GatewayLab::start_keeping(limits(), store).await;
    let cloud = MockProvider::saying("far").await;
    for (key_zone, namespace_zone, header) in LABELED {
        let mut key = access_key("kid", "secret", |_| {});
        if let Some(zone) = key_zone {
            key.metadata.labels = Some(BTreeMap::from([("russet.dev/zone".to_owned(), zone.to_owned())]));
        }
        lab.keys(&[key]);
        let cached = json!({"models": ["auto"], "zone": "Cloud", "cache": {"ttlSeconds": 60}, "targets": [to_provider("far")]});
        route(&lab, &[cloud.object("far", Zone::Cloud)], cached);
        lab.change(|table| {
            let zone = |zone: &str| BTreeMap::from([("default".to_owned(), zone.to_owned())]);
            table.namespace_zones = Some(namespace_zone.map(zone).unwrap_or_default());
        });
        let send = |path: &str, body: Value| {
            let mut call = lab.client.post(lab.url(path)).bearer_auth("secret").json(&body);
            if let Some(zone) = header {
                call = call.header("x-russet-labels", format!("russet.dev/zone={zone}"));
            }
            call
        };
        let messages = json!([{"role": "user", "content": "hi"}]);
        let chat = json!({"model": "auto", "messages": messages});
        let case = format!("{key_zone:?} {namespace_zone:?} {header:?}");
        for (path, request) in [
            ("/v1/chat/completions", chat.clone()),
            ("/v1/chat/completions", json!({"model": "auto", "messages": messages, "stream": true})),
            ("/v1/chat/completions", json!({"model": "auto", "messages": messages, "n": 3})),
            ("/v1/chat/completions", json!({"model": "auto", "messages": messages, "temperature": 0})),
            ("/v1/chat/completions", json!({"model": "gone", "models": ["auto"], "messages": messages})),
            ("/v1/completions", json!({"model": "auto", "prompt": "hi"})),
            ("/v1/responses", json!({"model": "auto", "input": "hi"})),
            ("/v1/messages", json!({"model": "auto", "max_tokens": 9, "messages": messages})),
            ("/api/chat", json!({"model": "auto", "messages": messages})),
            ("/v1/embeddings", json!({"model": "auto", "input": "hi"})),
        ] {
            let response = send(path, request.clone()).send().await.unwrap();
            let status = response.status().as_u16();
            let said = response.text().await.unwrap();
            // Of several models the first is told of.
            let (expected, why) = match request["model"] == "gone" {
                true => (404, "does not exist"),
                false => (403, "stays in the zone"),
            };
            assert_eq!(status, expected, "{case} {path} {request}: {said}");
            assert!(said.contains(why), "{case} {path}: {said}");
        }
        // In the background and in a batch nobody waits for it, and it obeys all the same.
        let (_, begun) =
            body(send("/v1/responses", json!({"model": "auto", "input": "hi", "background": true}))).await;
        let read = async |path: &str| {
            let response = lab.client.get(lab.url(path)).bearer_auth("secret").send().await.unwrap();
            response.json::<Value>().await.unwrap()
        };
        let path = format!("/v1/responses/{}", begun["id"].as_str().unwrap());
        let ended = tokio::time::timeout(TEST_TIMEOUT, async {
            loop {
                let response = read(&path).await;
                if !["queued", "in_progress"].contains(&response["status"].as_str().unwrap()) {
                    return response;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        let response = ended.await.unwrap();
        assert_eq!(response["status"], "failed", "{case} {response}");
        let line =
            json!({"custom_id": "a", "params": {"model": "auto", "max_tokens": 9, "messages": messages}});
        let (_, batch) = body(send("/v1/messages/batches", json!({"requests": [line]}))).await;
        let path = format!("/v1/messages/batches/{}", batch["id"].as_str().unwrap());
        let ended = tokio::time::timeout(TEST_TIMEOUT, async {
            while read(&path).await["processing_status"] != "ended" {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        ended.await.unwrap();
        assert_eq!(read(&path).await["request_counts"]["errored"], 1, "{case}");
    }
    assert_eq!(cloud.asked().len(), 0, "{:?}", cloud.asked());
}

#[tokio::test]
async fn an_address_of_another_zone_is_not_connected_to() {
    let lab = GatewayLab::start(limits()).await;
    let provider = MockProvider::saying("here").await;
    for zone in [Zone::Lan, Zone::Cloud] {
        for host in ["127.0.0.1", "localhost"] {
            let mut object = provider.object("p", zone);
            let scheme = if zone == Zone::Cloud { "https" } else { "http" };
            object.spec.endpoint = format!("{scheme}://{host}:{}/v1", provider.address.port());
            route(&lab, &[object], spec("Cloud", json!([to_provider("p")])));
            let (status, answer) = body(lab.chat(json!({"model": "auto"}))).await;
            assert_eq!(status, 502, "{answer}");
            let message = answer["error"]["message"].as_str().unwrap();
            assert!(message.contains(&format!("no address in the zone {zone}")), "{message}");
        }
        lab.change(|table| table.providers.clear());
    }
    assert_eq!(provider.asked().len(), 0);
}

#[tokio::test]
async fn what_leaves_is_in_the_audit_log_before_it_does() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_owned();
    let report = || verify(&at, &AuditPeriod::default(), None);
    let lab = GatewayLab::start_audited(limits(), AuditLog::open(folder.path()).unwrap()).await;
    // When the provider gets the request, the log on the disk has it already.
    let (seen, path) = (Arc::new(Mutex::new(Vec::new())), at.clone());
    let noted = seen.clone();
    let provider = MockProvider::start(move |_| {
        let report = verify(&path, &AuditPeriod::default(), None).unwrap();
        noted.lock().unwrap().push(report.departures.values().sum::<u64>());
        Reply::Events(openai(&["far"]))
    })
    .await;
    let engine = lab.engine("a", |_| vec![started(), token("home"), finished(FinishReason::Stop)]);
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    let mut object = provider.object("p", Zone::Local);
    let tokens = json!({"input": "3", "cachedInput": "0.30", "output": "15"});
    let tokens: TokenPrice = serde_json::from_value(tokens).unwrap();
    let price = ModelPrice { tokens, request: "0.02".parse().unwrap() };
    let model = ProviderModel {
        name: "*".into(),
        price_per_million_tokens: Some(price.tokens),
        price_per_request: Some(price.request),
        ..Default::default()
    };
    object.spec.models = vec![model];
    route(&lab, &[object], spec("Local", json!([to_provider("p")])));
    assert_eq!(text(&body(lab.chat(json!({"model": "auto"}))).await.1), "far");
    assert_eq!(text(&body(lab.chat(json!({"model": "auto"}))).await.1), "far");
    assert_eq!(text(&body(lab.chat(json!({}))).await.1), "home");
    // Of what is counted alone nothing is computed.
    let counted = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let counted = lab.client.post(lab.url("/v1/messages/count_tokens")).json(&counted);
    assert_eq!(body(counted).await.0, 200);
    assert_eq!(body(lab.chat(json!({"model": "gone"}))).await.0, 404);
    assert_eq!(*seen.lock().unwrap(), [1, 2]);
    let ended = async {
        while report().unwrap().requests.values().sum::<u64>() < 5 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, ended).await.unwrap();
    let found = report().unwrap();
    assert_eq!(found.departures, BTreeMap::from([(("default/p".to_owned(), "Local".to_owned()), 2)]));
    assert!(found.stayed_in(Zone::Local) && found.entries == 8, "{found:?}");
    let lines = std::fs::read_to_string(folder.path().join("audit-00000001.log")).unwrap();
    assert!(!lines.contains("hi\\") && !lines.contains("far"), "{lines}");
    // What each used is there too, with what the provider costs, and what home would have cost there.
    let (fields, zone) = ([UsageField::Provider], jiff::tz::TimeZone::UTC);
    let used = usage(&at, &AuditPeriod::default(), &fields, &zone, Some(&price)).unwrap();
    let of = |name: &str| used.totals[&vec![name.to_owned()]];
    let (away, here) = (of("default/p"), of("here"));
    assert_eq!((away.requests, away.unpriced, here.requests), (2, 0, 3));
    let per_answer = price.of(away.prompt_tokens / 2, away.cached_tokens / 2, away.completion_tokens / 2);
    assert!(away.completion_tokens > 0 && away.cost == per_answer.plus(per_answer), "{away:?}");
    assert_eq!((here.prompt_tokens, here.cached_tokens, here.completion_tokens), (7, 2, 3));
    // Of the three here one computed something: a fee is for that one alone.
    assert_eq!((here.cost, here.elsewhere), (Money::ZERO, price.of(7, 2, 3)));
    let line = "russet_gateway_provider_cost_total{provider=\"default/p\"} ";
    let metrics = lab.metrics().await;
    let spent = metrics.lines().find_map(|found| found.strip_prefix(line)).expect("the metric of costs");
    let spent = (spent.parse::<f64>().unwrap() * 1e9).round() as u64;
    assert_eq!(spent, away.cost.nanos, "the metric says what the audit log says");
}

#[tokio::test]
async fn nothing_leaves_that_the_audit_log_cannot_have() {
    let folder = tempfile::tempdir().unwrap();
    let log = AuditLog::open(folder.path()).unwrap();
    let lab = GatewayLab::start_audited(limits(), log).await;
    let provider = MockProvider::saying("far").await;
    route(&lab, &[provider.object("p", Zone::Local)], spec("Local", json!([to_provider("p")])));
    // A file that is full is left for the next one, which cannot be made.
    let file = folder.path().join("audit-00000001.log");
    std::fs::write(folder.path().join("audit-00000002.log"), "").unwrap();
    std::fs::OpenOptions::new().append(true).open(&file).unwrap().set_len(65 << 20).unwrap();
    let (status, answer) = body(lab.chat(json!({"model": "auto"}))).await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert_eq!(status, 502, "{answer}");
    assert!(message.contains("the audit log cannot be written"), "{message}");
    assert_eq!(provider.asked().len(), 0);
}

#[tokio::test]
async fn an_engine_that_fails_leads_to_a_provider() {
    let lab = GatewayLab::start(limits()).await;
    let provider = MockProvider::saying("far").await;
    let engine = lab.engine("a", |_| vec![ScriptStep::Break(tonic::Code::Internal, "a bug")]);
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    let targets = json!([to_deployment("m"), to_provider("p")]);
    route(&lab, &[provider.object("p", Zone::Local)], spec("Local", targets.clone()));
    assert_eq!(text(&body(lab.chat(json!({"model": "auto"}))).await.1), "far");
    let mut strict = spec("Local", targets);
    strict["fallbackOn"] = json!(["Unavailable"]);
    route(&lab, &[provider.object("p", Zone::Local)], strict);
    let (status, answer) = body(lab.chat(json!({"model": "auto"}))).await;
    assert_eq!((status, &answer["error"]["code"]), (500, &json!("internal_error")), "{answer}");
    assert_eq!(provider.asked().len(), 1);
}

#[tokio::test]
async fn the_cheapest_target_is_asked_first() {
    let lab = GatewayLab::start(limits()).await;
    let (dear, cheap, unknown) = (
        MockProvider::saying("dear").await,
        MockProvider::saying("cheap").await,
        MockProvider::saying("?").await,
    );
    let priced = |mock: &MockProvider, name: &str, output: &str| {
        let mut object = mock.object(name, Zone::Local);
        let price = json!({"input": "1", "output": output});
        let price = Some(serde_json::from_value(price).unwrap());
        object.spec.models =
            vec![ProviderModel { name: "*".into(), price_per_million_tokens: price, ..Default::default() }];
        object
    };
    let mut nameless = unknown.object("u", Zone::Cloud);
    nameless.spec.models.clear();
    let providers = [priced(&dear, "d", "20"), priced(&cheap, "c", "2"), nameless];
    let mut by_price =
        spec("Cloud", json!([to_provider("u"), to_provider("d"), to_provider("c"), to_deployment("m")]));
    by_price["pick"] = json!("Cheapest");
    // At home it costs nothing.
    let engine = lab.only_engine(vec![started(), token("home"), finished(FinishReason::Stop)]);
    route(&lab, &providers, by_price.clone());
    assert_eq!(text(&body(lab.chat(json!({"model": "auto"}))).await.1), "home");
    drop(engine);
    lab.publish(&[("m", working(), &[])]);
    route(&lab, &providers, by_price);
    assert_eq!(text(&body(lab.chat(json!({"model": "auto"}))).await.1), "cheap");
    assert_eq!((dear.asked().len(), unknown.asked().len(), cheap.asked().len()), (0, 0, 1));
}
