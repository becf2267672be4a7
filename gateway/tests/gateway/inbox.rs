//! Requests of the inbox over HTTP: accepted, answered later, answered twice for one key, deleted, and run again after a crash.

mod kills;
mod restart;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use futures::StreamExt as _;
use futures::future::join_all;
use reqwest::{Method, RequestBuilder};
use russet_gateway::response_store::ResponseStoreConfig;
use russet_gateway::routes::DeploymentState;
use russet_wire::event::{FailureKind, FinishReason, GenerationEvent, GenerationFailure};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::harness::{
    GatewayLab, ScriptStep, ScriptedEngine, TEST_TIMEOUT, access_key, finished, hello, limits, started,
    token, wait_for_metric,
};

trait InboxHeaders {
    /// With this idempotency key.
    fn key(self, key: &str) -> Self;
    /// The client does not wait.
    fn respond_async(self) -> Self;
}

impl InboxHeaders for RequestBuilder {
    fn key(self, key: &str) -> Self {
        self.header("idempotency-key", key)
    }

    fn respond_async(self) -> Self {
        self.header("prefer", "respond-async")
    }
}

impl GatewayLab {
    /// The request in the inbox with this id; its status and body.
    async fn inbox(&self, method: Method, path: &str) -> (u16, Value) {
        let request = self.client.request(method, self.url(&format!("/v1/inbox{path}"))).bearer_auth("s-a");
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    /// The request with this id once it has this status.
    async fn inbox_is(&self, id: &str, status: &str) -> Value {
        let reached = tokio::time::timeout(TEST_TIMEOUT, async {
            loop {
                let (code, request) = self.inbox(Method::GET, &format!("/{id}")).await;
                assert_eq!(code, 200, "{request}");
                if request["status"] == status {
                    return request;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        reached.await.unwrap_or_else(|_| panic!("{id} never was {status}"))
    }

    /// The answer in the inbox as it was given, byte by byte.
    async fn inbox_answer(&self, id: &str) -> String {
        let url = self.url(&format!("/v1/inbox/{id}/response"));
        self.client.get(url).bearer_auth("s-a").send().await.unwrap().text().await.unwrap()
    }
}

/// The id of an accepted request.
async fn accepted(request: RequestBuilder) -> String {
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 202);
    let location = response.headers()["location"].to_str().unwrap().to_owned();
    assert_eq!(response.headers()["preference-applied"], "respond-async");
    let body: Value = response.json().await.unwrap();
    assert_eq!((&body["object"], body.get("response")), (&json!("inbox.request"), None));
    let id = body["id"].as_str().unwrap();
    assert_eq!(location, format!("/v1/inbox/{id}"));
    id.to_owned()
}

/// The id of a request that is accepted, or that has its answer already: another one with the same key came first.
async fn accepted_or_answered(request: RequestBuilder) -> String {
    let response = request.send().await.unwrap();
    let header = |name: &str| response.headers()[name].to_str().unwrap().to_owned();
    match response.status().as_u16() {
        202 => header("location").trim_start_matches("/v1/inbox/").to_owned(),
        status => {
            assert_eq!((status, response.headers().contains_key("idempotency-replayed")), (200, true));
            header("x-russet-inbox-id")
        }
    }
}

/// Status, whether the answer was given before, and the text of a response.
async fn answered(request: RequestBuilder) -> (u16, bool, String) {
    let response = request.send().await.unwrap();
    let is_replayed = response.headers().get("idempotency-replayed").is_some();
    let id = response.headers().get("x-russet-inbox-id").map(|id| id.to_str().unwrap().to_owned());
    let length = response.content_length();
    let (status, text) = (response.status().as_u16(), response.text().await.unwrap());
    assert!(id.is_some_and(|id| id.starts_with("inbox_")), "{status} {text}");
    // What is kept has its length, by which a client sees where it is gone meanwhile.
    assert!(!is_replayed || length == Some(text.len() as u64), "{length:?} of {}", text.len());
    (status, is_replayed, text)
}

#[tokio::test]
async fn a_request_is_accepted_at_once_and_answered_later() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let end = CancellationToken::new();
    let engine = lab.only_engine([vec![ScriptStep::PrepareUntil(end.clone())], hello()].concat());
    let id = accepted(lab.chat(json!({})).respond_async()).await;
    engine.running(1).await;
    let running = lab.inbox_is(&id, "leased").await;
    assert_eq!((&running["attempts"], running.get("response")), (&json!(1), None));
    wait_for_metric(&lab, "russet_gateway_inbox_queue{state=\"leased\"} 1").await;
    end.cancel();
    let ended = lab.inbox_is(&id, "done").await;
    let response = &ended["response"];
    assert_eq!(response["status_code"], 200);
    assert_eq!(response["body"]["choices"][0]["message"]["content"], "Hello there");
    assert_eq!(ended["path"], "/v1/chat/completions");
    let whole: Value = serde_json::from_str(&lab.inbox_answer(&id).await).unwrap();
    assert_eq!(whole, response["body"]);
    wait_for_metric(&lab, "russet_gateway_inbox_request_total{outcome=\"done\"} 1").await;
    wait_for_metric(&lab, "russet_gateway_inbox_queue{state=\"leased\"} 0").await;
    // It is listed, and deleted once.
    let (_, list) = lab.inbox(Method::GET, "?status=done&limit=1").await;
    assert_eq!((&list["data"][0]["id"], &list["has_more"]), (&json!(id), &json!(false)));
    assert_eq!(lab.inbox(Method::GET, "?status=pending").await.1["data"], json!([]));
    assert_eq!(lab.inbox(Method::GET, "?status=lost").await.0, 400);
    let deleted = json!({"id": id, "object": "inbox.request", "deleted": true});
    assert_eq!(lab.inbox(Method::DELETE, &format!("/{id}")).await, (200, deleted));
    for method in [Method::GET, Method::DELETE] {
        assert_eq!(lab.inbox(method, &format!("/{id}")).await.0, 404);
    }
}

#[tokio::test]
async fn a_client_waits_as_long_as_it_says() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let end = CancellationToken::new();
    let _engine = lab.only_engine([vec![ScriptStep::PrepareUntil(end.clone())], hello()].concat());
    let waiting = lab.chat(json!({})).header("prefer", "respond-async, wait=60").send();
    let waiting = tokio::spawn(waiting);
    wait_for_metric(&lab, "russet_gateway_inbox_queue{state=\"leased\"} 1").await;
    let id = accepted(lab.chat(json!({})).header("prefer", "respond-async, wait=0")).await;
    let looked = lab.client.get(lab.url(&format!("/v1/inbox/{id}"))).header("prefer", "wait=60").send();
    let looked = tokio::spawn(looked);
    end.cancel();
    let response = waiting.await.unwrap().unwrap();
    assert_eq!(
        (response.status().as_u16(), response.text().await.unwrap().contains("Hello there")),
        (200, true)
    );
    let looked: Value = looked.await.unwrap().unwrap().json().await.unwrap();
    assert_eq!(looked["status"], "done", "{looked}");
}

#[tokio::test]
async fn one_key_stands_for_one_request() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let end = CancellationToken::new();
    let engine = lab.only_engine([vec![ScriptStep::PrepareUntil(end.clone())], hello()].concat());
    let ask = || tokio::spawn(answered(lab.chat(json!({})).key("k-1")));
    let first = ask();
    engine.running(1).await;
    let second = ask();
    let id = accepted(lab.chat(json!({})).key("k-1").respond_async()).await;
    end.cancel();
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    assert_eq!((first.0, first.1), (200, false));
    assert_eq!((&second.2, second.0), (&first.2, 200));
    assert_eq!(answered(lab.chat(json!({})).key("\"k-1\"")).await, (200, true, first.2.clone()));
    assert_eq!(lab.inbox_answer(&id).await, first.2);
    assert_eq!(engine.requests(), 1);
    // Another request needs another key, and another path is another request.
    let other = lab.chat(json!({"max_tokens": 9})).key("k-1").send().await.unwrap();
    assert_eq!(other.status(), 422);
    let error = other.json::<Value>().await.unwrap()["error"].take();
    assert_eq!(
        (&error["code"], &error["param"]),
        (&json!("idempotency_key_reused"), &json!("idempotency-key"))
    );
    assert!(error["message"].as_str().unwrap().contains(&id), "{error}");
    assert!(!answered(lab.chat(json!({})).key("k-2")).await.1);
    assert_eq!(engine.requests(), 2);
    let invalid = lab.chat(json!({})).header("idempotency-key", "a b").send().await.unwrap();
    assert_eq!(invalid.status(), 400);
}

#[tokio::test]
async fn a_request_that_failed_runs_again_for_its_key() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let failure = GenerationFailure { kind: FailureKind::Internal, message: "because".into() };
    let failed = lab.only_engine(vec![ScriptStep::Say(GenerationEvent::Failed(failure))]);
    let first = answered(lab.chat(json!({})).key("k")).await;
    assert_eq!((first.0, first.1), (500, false), "{}", first.2);
    let (_, list) = lab.inbox(Method::GET, "").await;
    assert_eq!(list["data"][0]["status"], "failed");
    let again = answered(lab.chat(json!({})).key("k")).await;
    assert_eq!((again.0, again.1, failed.requests()), (500, false, 2));
    let engine = lab.only_engine(hello());
    let good = answered(lab.chat(json!({})).key("k")).await;
    assert_eq!((good.0, good.1, engine.requests()), (200, false, 1));
    assert_eq!(answered(lab.chat(json!({})).key("k")).await, (200, true, good.2));
    // An error in the middle of a stream is one too.
    let failure = GenerationFailure { kind: FailureKind::Internal, message: "because".into() };
    let _engine =
        lab.only_engine(vec![started(), token("x"), ScriptStep::Say(GenerationEvent::Failed(failure))]);
    let stream = json!({"stream": true});
    let cut = answered(lab.chat(stream.clone()).key("s")).await;
    assert!(cut.0 == 200 && cut.2.contains("because"), "{cut:?}");
    let engine = lab.only_engine(hello());
    let whole = answered(lab.chat(stream).key("s")).await;
    assert!(whole.2.contains("there") && engine.requests() == 1, "{whole:?}");
}

#[tokio::test]
async fn a_stream_is_followed_by_two_and_replayed_to_a_third() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let end = CancellationToken::new();
    let mut steps = vec![started(), token("Hello"), ScriptStep::Until(end.clone())];
    // More than is kept in memory.
    steps.extend((0..1000).map(|number| token(&format!(" {number}"))));
    steps.push(finished(FinishReason::Stop));
    let engine = lab.only_engine(steps);
    let ask = || lab.chat(json!({"stream": true})).key("k");
    let response = ask().send().await.unwrap();
    assert!(response.headers()["content-type"].to_str().unwrap().starts_with("text/event-stream"));
    let mut body = response.bytes_stream();
    let mut first = String::new();
    while !first.contains("Hello") {
        first.push_str(std::str::from_utf8(&body.next().await.unwrap().unwrap()).unwrap());
    }
    // It comes as it is generated, to a second client too, and goes on when one leaves.
    let second = tokio::spawn(answered(ask()));
    drop(body);
    end.cancel();
    let second = second.await.unwrap();
    assert!(second.2.starts_with(&first) && second.2.ends_with("data: [DONE]\n\n"));
    assert!(second.2.len() > 100_000, "{} bytes are kept in one piece", second.2.len());
    assert_eq!(answered(ask()).await, (200, true, second.2.clone()));
    assert_eq!(engine.requests(), 1);
    let (_, list) = lab.inbox(Method::GET, "").await;
    let id = list["data"][0]["id"].as_str().unwrap();
    assert_eq!(lab.inbox_is(id, "done").await["response"]["body"], second.2);
}

#[tokio::test]
async fn every_dialect_has_the_inbox() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let engine = lab.only_engine(hello());
    let messages = json!([{"role": "user", "content": "hi"}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"model": "m", "messages": messages})),
        ("/v1/completions", json!({"model": "m", "prompt": "hi"})),
        ("/v1/responses", json!({"model": "m", "input": "hi"})),
        ("/v1/messages", json!({"model": "m", "max_tokens": 9, "messages": messages})),
        ("/api/chat", json!({"model": "m", "messages": messages})),
        ("/api/generate", json!({"model": "m", "prompt": "hi", "stream": false})),
    ] {
        let before = engine.requests();
        let ask = || lab.client.post(lab.url(path)).json(&body);
        let first = answered(ask().key(path)).await;
        assert!(first.0 == 200 && first.2.contains("Hello"), "{path}: {first:?}");
        assert_eq!(answered(ask().key(path)).await, (200, true, first.2), "{path}");
        let id = accepted(ask().respond_async()).await;
        assert_eq!(lab.inbox_is(&id, "done").await["response"]["status_code"], 200, "{path}");
        assert_eq!(engine.requests(), before + 2, "{path}");
        // Its errors have the form of the dialect.
        let refused = lab.client.post(lab.url(path)).json(&json!({"model": "m", "n": "x"})).key(path);
        let (refused, plain) = (refused.send().await.unwrap(), lab.client.post(lab.url(path)).body("{"));
        assert_eq!(refused.status(), 422, "{path}");
        let keys = |value: Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let plain = plain.send().await.unwrap().json().await.unwrap();
        assert_eq!(keys(refused.json().await.unwrap()), keys(plain), "{path}");
    }
}

#[tokio::test]
async fn owners_see_their_own_and_ask_by_their_own_keys() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    lab.keys(&[access_key("a", "s-a", |_| {}), access_key("b", "s-b", |_| {})]);
    let engine = lab.only_engine(hello());
    let first = answered(lab.chat(json!({})).bearer_auth("s-a").key("k")).await;
    let other = answered(lab.chat(json!({})).bearer_auth("s-b").key("k")).await;
    assert!(!first.1 && !other.1 && engine.requests() == 2);
    let (_, list) = lab.inbox(Method::GET, "").await;
    assert_eq!(list["data"].as_array().unwrap().len(), 1);
    let id = list["data"][0]["id"].as_str().unwrap();
    for (method, path) in [
        (Method::GET, format!("/{id}")),
        (Method::DELETE, format!("/{id}")),
        (Method::GET, format!("/{id}/response")),
    ] {
        let url = lab.url(&format!("/v1/inbox{path}"));
        let asked = lab.client.request(method, url).bearer_auth("s-b").send().await.unwrap();
        assert_eq!(asked.status(), 404, "{path}");
    }
    let asked = lab.client.get(lab.url("/v1/inbox")).send().await.unwrap();
    assert_eq!(asked.status(), 401);
}

#[tokio::test]
async fn a_deleted_request_frees_its_engine() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let engine = lab.only_engine(vec![started(), token("x"), ScriptStep::Hang]);
    let response = lab.chat(json!({"stream": true})).key("k").send().await.unwrap();
    let id = response.headers()["x-russet-inbox-id"].to_str().unwrap().to_owned();
    engine.running(1).await;
    assert_eq!(lab.inbox(Method::DELETE, &format!("/{id}")).await.0, 200);
    engine.running(0).await;
    // A stream never just ends.
    let text = response.text().await.unwrap();
    assert!(text.contains("event: error\ndata: {") && text.ends_with("\n\n"), "{text}");
    assert_eq!(lab.inbox(Method::GET, &format!("/{id}")).await.0, 404);
    // The key is free again.
    let engine = lab.only_engine(hello());
    assert!(!answered(lab.chat(json!({})).key("k")).await.1);
    assert_eq!(engine.requests(), 1);
}

#[tokio::test]
async fn what_nobody_waits_for_waits_for_a_busy_model() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    lab.publish(&[("m", DeploymentState::Ready, &[])]);
    let awaited = lab.chat(json!({})).key("awaited").header("x-request-timeout", "0.2");
    // A client that waits gets the error, and its key another try.
    assert_eq!(answered(awaited).await.0, 504);
    let full = lab.engine("a", |_| {
        let failure = GenerationFailure { kind: FailureKind::Overloaded, message: "full".into() };
        vec![ScriptStep::Say(GenerationEvent::Failed(failure))]
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&full])]);
    let id = accepted(lab.chat(json!({})).respond_async()).await;
    full.requested(1).await;
    let engine = lab.only_engine(hello());
    assert_eq!(lab.inbox_is(&id, "done").await["attempts"], 1);
    assert_eq!(engine.requests(), 1);
}

#[tokio::test]
async fn who_joins_a_request_that_waits_gets_its_error() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let full = lab.engine("a", |_| {
        let failure = GenerationFailure { kind: FailureKind::Overloaded, message: "full".into() };
        vec![ScriptStep::Say(GenerationEvent::Failed(failure))]
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&full])]);
    let id = accepted(lab.chat(json!({})).key("k").respond_async()).await;
    full.requested(1).await;
    let response = lab.chat(json!({})).key("k").send().await.unwrap();
    // With what says when to try again.
    assert!(response.status() == 429 && response.headers().contains_key("retry-after"), "{response:?}");
    assert_eq!(lab.inbox_is(&id, "failed").await["attempts"], 1);
}

#[tokio::test]
async fn retries_of_a_failed_key_at_once_run_once() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let failure = GenerationFailure { kind: FailureKind::Internal, message: "because".into() };
    let _failed = lab.only_engine(vec![ScriptStep::Say(GenerationEvent::Failed(failure))]);
    assert_eq!(answered(lab.chat(json!({})).key("k")).await.0, 500);
    let engine = lab.only_engine(hello());
    let all = join_all((0..20).map(|_| answered(lab.chat(json!({})).key("k")))).await;
    assert!(all.iter().all(|one| one.0 == 200 && one.2 == all[0].2), "{all:?}");
    assert_eq!(engine.requests(), 1);
    wait_for_metric(&lab, "russet_gateway_inbox_queue{state=\"leased\"} 0").await;
    wait_for_metric(&lab, "russet_gateway_inbox_queue{state=\"pending\"} 0").await;
}

#[tokio::test]
async fn what_waits_leaves_room_for_answers_and_for_others() {
    let folder = tempfile::tempdir().unwrap();
    let config =
        ResponseStoreConfig { max_bytes: 1 << 20, ..ResponseStoreConfig::new(folder.path().join("r.db")) };
    let lab = GatewayLab::start_keeping(limits(), config).await;
    lab.keys(&[access_key("a", "s-a", |_| {}), access_key("b", "s-b", |_| {})]);
    let end = CancellationToken::new();
    let _engine = lab.only_engine([vec![ScriptStep::PrepareUntil(end.clone())], hello()].concat());
    let large = || json!({"messages": [{"role": "user", "content": "x".repeat(100_000)}]});
    let ask = |key: &str| lab.chat(large()).bearer_auth(key).respond_async();
    let ids = [accepted(ask("s-a")).await, accepted(ask("s-a")).await];
    let refused = ask("s-a").send().await.unwrap();
    assert_eq!(refused.status(), 507);
    let text = refused.text().await.unwrap();
    assert!(text.contains("requests that have not ended") && text.contains("a quarter"), "{text}");
    accepted(ask("s-b")).await;
    end.cancel();
    for id in ids {
        lab.inbox_is(&id, "done").await;
    }
    accepted(ask("s-a")).await;
}

#[tokio::test]
async fn fifty_at_once_are_all_answered_once() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let engine = lab.engine("a", |request| {
        let text = request.messages[0].content.clone();
        vec![started(), token(&text), finished(FinishReason::Stop)]
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    let chat =
        |number: usize| lab.chat(json!({"messages": [{"role": "user", "content": format!("<{number}>")}]}));
    // Each is sent twice with its key, as by a client that tries again.
    let ids = join_all(
        (0..50)
            .flat_map(|number| [number, number])
            .map(|number| accepted_or_answered(chat(number).key(&format!("k{number}")).respond_async())),
    );
    let ids = ids.await;
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), 50);
    for (number, pair) in ids.chunks(2).enumerate() {
        assert_eq!(pair[0], pair[1]);
        let done = lab.inbox_is(&pair[0], "done").await;
        assert_eq!(done["response"]["body"]["choices"][0]["message"]["content"], format!("<{number}>"));
    }
    assert_eq!(received(&engine), (0..50).map(|number| format!("<{number}>")).collect::<BTreeSet<_>>());
    assert_eq!(engine.requests(), 50);
}

/// The different texts that the engine was sent.
fn received(engine: &ScriptedEngine) -> BTreeSet<String> {
    engine.received.lock().unwrap().iter().map(|one| one.messages[0].content.clone()).collect()
}

#[tokio::test]
async fn a_gateway_without_a_store_has_no_inbox() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    let refused = lab.chat(json!({})).key("k").send().await.unwrap();
    assert_eq!(refused.status(), 404);
    assert!(refused.text().await.unwrap().contains("--responses-store"));
    assert_eq!(lab.inbox(Method::GET, "").await.0, 404);
}
