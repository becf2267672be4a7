//! The request log over HTTP: what it says of requests that were answered, held, sent to several engines, resumed and
//! refused; who may read it; and that no text of a prompt or an answer is in it.

use std::sync::Arc;
use std::time::Duration;

use russet_gateway::request_log::{AttemptOutcome, RequestEnd, RequestRecord};
use russet_gateway::routes::{DeploymentState, ModelAlias, RoutePolicy};
use russet_wire::event::{Delta, FailureKind, FinishReason, GenerationEvent, GenerationFailure, Usage};
use serde_json::{Value, json};

use crate::harness::{
    GatewayLab, ScriptStep, TEST_TIMEOUT, access_key, finished, hello, limits, started, token,
    wait_for_metric,
};

/// A word of every prompt and answer of this file; no record may have it.
const MARKER: &str = "XYZZY";

/// A chat whose prompt has the marker.
fn chat(lab: &GatewayLab, id: &str, more: Value) -> reqwest::RequestBuilder {
    let mut body = json!({"messages": [{"role": "user", "content": format!("say {MARKER}")}]});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    lab.chat(body).header("x-request-id", id)
}

async fn read(lab: &GatewayLab, id: &str) -> RequestRecord {
    let response = lab.client.get(lab.url(&format!("/requests/{id}/why"))).send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["cache-control"], "no-store");
    let text = response.text().await.unwrap();
    assert!(!text.contains(MARKER), "{text}");
    serde_json::from_str(&text).unwrap()
}

/// The record once it satisfies `condition`.
async fn read_until(lab: &GatewayLab, id: &str, condition: impl Fn(&RequestRecord) -> bool) -> RequestRecord {
    let reading = async {
        loop {
            let record = read(lab, id).await;
            if condition(&record) {
                return record;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, reading).await.unwrap()
}

fn stopped() -> Option<RequestEnd> {
    Some(RequestEnd::Finished { reason: Some("stop".into()) })
}

fn failure(kind: FailureKind, message: &str) -> Vec<ScriptStep> {
    vec![ScriptStep::Say(GenerationEvent::Failed(GenerationFailure { kind, message: message.into() }))]
}

/// Asserts that these times are there and in order.
fn assert_in_order(times: &[Option<f64>]) {
    let known: Vec<f64> = times.iter().flatten().copied().collect();
    assert!(known.len() == times.len() && known.is_sorted(), "{times:?}");
}

#[tokio::test]
async fn an_answered_request_has_its_engine_tokens_and_times() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(vec![started(), token(MARKER), finished(FinishReason::Stop)]);
    for streamed in [false, true] {
        let response = chat(&lab, "r1", json!({"stream": streamed, "max_tokens": 9})).send().await.unwrap();
        assert_eq!(response.headers()["x-request-id"], "r1");
        assert!(response.text().await.unwrap().contains(MARKER));
        let record =
            read_until(&lab, "r1", |record| record.streamed == streamed && record.end.is_some()).await;
        assert_eq!(
            (record.id.as_str(), record.dialect.as_str(), record.model.as_str()),
            ("r1", "openai", "m")
        );
        assert_eq!((record.caller, record.route, record.holds.len()), (None, None, 0));
        assert_eq!((record.responses, record.complete, record.end), (1, 1, stopped()));
        assert_eq!((record.prompt_tokens, record.cached_tokens, record.completion_tokens), (7, 2, 3));
        assert_eq!((record.limits.max_tokens, record.limits.timeout_ms), (Some(9), None));
        let [attempt] = record.attempts.as_slice() else { panic!("{:?}", record.attempts) };
        assert_eq!(
            (attempt.deployment.as_str(), &*attempt.node, &*attempt.group, attempt.epoch),
            ("default/m", "a", "default/m-0", 1)
        );
        assert_eq!(*attempt.address, engine.address.to_string());
        assert_eq!((attempt.prompt_tokens, attempt.cached_tokens), (Some(7), Some(2)));
        assert_eq!(attempt.outcome, Some(AttemptOutcome::Answered));
        let candidates: Vec<(&str, bool)> =
            attempt.candidates.iter().map(|one| (&*one.node, one.chosen)).collect();
        assert_eq!(candidates, [("a", true)]);
        assert_in_order(&[
            Some(attempt.sent_ms),
            attempt.prepared_ms,
            attempt.started_ms,
            attempt.first_token_ms,
            attempt.ended_ms,
            Some(record.total_ms),
        ]);
        assert_in_order(&[attempt.first_token_ms, record.first_token_ms, Some(record.total_ms)]);
        assert!(record.received_at.parse::<jiff::Timestamp>().is_ok(), "{}", record.received_at);
        let engine_id = engine.received.lock().unwrap().last().unwrap().id.clone();
        assert_eq!(record.engine_id, engine_id);
        assert_eq!(read(&lab, &format!("chatcmpl-{engine_id}")).await.id, "r1");
    }
}

#[tokio::test]
async fn a_held_request_says_what_it_waits_for_while_it_waits() {
    let lab = GatewayLab::start(limits()).await;
    let route = |pattern: &str| ModelAlias {
        pattern: pattern.into(),
        route: "default/usual".into(),
        namespace: "default".into(),
        policy: Arc::new(RoutePolicy::to(["m"]).holding(Some(TEST_TIMEOUT))),
        cache_ttl: None,
    };
    let working = |reason: &str| DeploymentState::Working(reason.into());
    lab.publish_with(&[("m", working("it is scaled to zero"), &[])], vec![route("best*")]);
    let request = tokio::spawn(chat(&lab, "r1", json!({"model": "best-one"})).send());
    wait_for_metric(&lab, "russet_gateway_num_requests_waiting{name=\"m\",namespace=\"default\"} 1\n").await;
    let held = read_until(&lab, "r1", |record| !record.holds.is_empty()).await;
    assert_eq!((held.end.clone(), held.holds[0].until_ms, held.attempts.len()), (None, None, 0));
    lab.publish_with(&[("m", working("copying"), &[])], vec![route("best*")]);
    read_until(&lab, "r1", |record| record.holds.len() == 2).await;
    let engine = lab.engine("a", |_| hello());
    lab.publish_with(&[("m", DeploymentState::Ready, &[&engine])], vec![route("best*")]);
    assert_eq!(request.await.unwrap().unwrap().status(), 200);
    let record = read(&lab, "r1").await;
    let reasons: Vec<(&str, &str)> =
        record.holds.iter().map(|hold| (hold.deployment.as_str(), hold.reason.as_str())).collect();
    assert_eq!(reasons, [("default/m", "it is scaled to zero"), ("default/m", "copying")]);
    let [first, second] = record.holds.as_slice() else { panic!("{:?}", record.holds) };
    assert_eq!((first.until_ms, second.until_ms), (Some(second.from_ms), Some(record.attempts[0].sent_ms)));
    let found = record.route.unwrap();
    assert_eq!((found.model_route.as_str(), found.pattern.as_str()), ("default/usual", "best*"));
    assert_eq!((found.targets, record.end), (vec!["m".to_owned()], stopped()));
}

#[tokio::test]
async fn a_busy_engine_and_the_one_that_answered_are_both_there() {
    let lab = GatewayLab::start(limits()).await;
    let busy = lab.engine("a", |_| failure(FailureKind::Overloaded, "64 requests wait"));
    let other = lab.engine("b", |_| hello());
    lab.publish(&[("m", DeploymentState::Ready, &[&busy, &other])]);
    assert_eq!(chat(&lab, "r1", json!({})).send().await.unwrap().status(), 200);
    let record = read(&lab, "r1").await;
    let [first, second] = record.attempts.as_slice() else { panic!("{:?}", record.attempts) };
    assert_eq!(first.outcome, Some(AttemptOutcome::Busy { message: "64 requests wait".into() }));
    assert_eq!((&*second.node, &second.outcome), ("b", &Some(AttemptOutcome::Answered)));
    let candidates: Vec<(&str, bool, bool)> =
        second.candidates.iter().map(|one| (&*one.node, one.chosen, one.backed_off)).collect();
    assert_eq!(candidates, [("b", true, false), ("a", false, true)]);
    assert_eq!((first.number, second.number, record.end), (1, 2, stopped()));
    assert_in_order(&[Some(first.sent_ms), first.ended_ms, Some(second.sent_ms), second.ended_ms]);
}

#[tokio::test]
async fn a_resumed_response_says_where_it_went_on() {
    let lab = GatewayLab::start(limits()).await;
    let token = |id| ScriptStep::Say(GenerationEvent::Token { id, delta: Delta::text(MARKER) });
    let lost = lab.engine("a", move |_| {
        vec![started(), token(10), token(11), ScriptStep::Break(tonic::Code::Unavailable, "rank 1 died")]
    });
    let other = lab.engine("b", move |request| {
        let emitted_tokens = request.emitted.len() as u32;
        let usage = Usage { prompt_tokens: 7, completion_tokens: 3, cached_tokens: 0 };
        vec![
            ScriptStep::Say(GenerationEvent::Started { prompt_tokens: 7, emitted_tokens }),
            token(12),
            ScriptStep::Say(GenerationEvent::Finished { reason: FinishReason::Length, usage }),
        ]
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&lost, &other])]);
    assert_eq!(chat(&lab, "r1", json!({})).send().await.unwrap().status(), 200);
    let record = read(&lab, "r1").await;
    let [first, second] = record.attempts.as_slice() else { panic!("{:?}", record.attempts) };
    let Some(AttemptOutcome::Lost { message, after_tokens: 2 }) = &first.outcome else {
        panic!("{:?}", first.outcome)
    };
    assert!(message.contains("node a") && message.contains("rank 1 died"), "{message}");
    assert_eq!(
        (first.resumed_after_tokens, second.resumed_after_tokens, record.completion_tokens),
        (0, 2, 3)
    );
    assert_eq!(record.first_token_ms, Some(record.first_token_ms.unwrap().min(first.ended_ms.unwrap())));
    assert_eq!(record.end, Some(RequestEnd::Finished { reason: Some("length".into()) }));
}

#[tokio::test]
async fn a_refused_request_says_what_refused_it_and_quotes_nothing() {
    let lab = GatewayLab::start(limits()).await;
    let quoting = format!("the chat template refuses {MARKER}");
    let strict = lab.engine("b", {
        let quoting = quoting.clone();
        move |_| failure(FailureKind::InvalidRequest, &quoting)
    });
    // One that loses its engine after a token; the other one refuses to go on, and quotes.
    let lost = lab.engine("c", |request| match request.emitted.len() {
        0 => vec![started(), token(MARKER), ScriptStep::Break(tonic::Code::Unavailable, "rank 1 died")],
        _ => vec![],
    });
    let refusing = lab.engine("d", move |_| failure(FailureKind::InvalidRequest, &quoting));
    lab.publish(&[
        ("m", DeploymentState::Halted("needs 9 GiB".into()), &[]),
        ("strict", DeploymentState::Ready, &[&strict]),
        ("lossy", DeploymentState::Ready, &[&lost, &refusing]),
    ]);
    let end = |code: &'static str, message: Option<&str>, param: Option<&str>| {
        let (message, param) = (message.map(str::to_owned), param.map(str::to_owned));
        Some(RequestEnd::Failed { code: code.into(), message, param })
    };
    for (id, more, expected) in [
        ("field", json!({"temperature": MARKER}), end("invalid_request", None, Some("temperature"))),
        (
            "halted",
            json!({}),
            end("model_not_ready", Some("model `m` cannot serve requests: default/m: needs 9 GiB"), None),
        ),
        ("strict", json!({"model": "strict"}), end("invalid_request", None, None)),
        ("lossy", json!({"model": "lossy"}), end("engine_lost", None, None)),
    ] {
        let status = chat(&lab, id, more).send().await.unwrap().status();
        assert!(status.is_client_error() || status.is_server_error(), "{id}: {status}");
        let record = read(&lab, id).await;
        assert_eq!((record.end, record.complete), (expected, 0), "{id}");
    }
    let record = read(&lab, "strict").await;
    assert_eq!(record.attempts[0].outcome, Some(AttemptOutcome::Rejected { code: "invalid_request".into() }));
    let unknown = chat(&lab, "unknown", json!({"model": "none"})).send().await.unwrap();
    assert_eq!(unknown.status(), 404);
    let Some(RequestEnd::Failed { code, param, .. }) = read(&lab, "unknown").await.end else { panic!() };
    assert_eq!((code.as_ref(), param.as_deref()), ("model_not_found", Some("model")));
}

#[tokio::test]
async fn a_client_that_leaves_is_said_with_what_it_had() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(vec![started(), token(MARKER), token(MARKER), ScriptStep::Hang]);
    let mut response = chat(&lab, "r1", json!({"stream": true})).send().await.unwrap();
    let mut text = String::new();
    while text.matches(MARKER).count() < 2 {
        text.push_str(std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap());
    }
    let running = read(&lab, "r1").await;
    assert_eq!((running.end, running.completion_tokens, running.prompt_tokens), (None, 2, 7));
    drop(response);
    engine.running(0).await;
    let record = read_until(&lab, "r1", |record| record.end.is_some()).await;
    assert_eq!((record.end, record.completion_tokens), (Some(RequestEnd::ClientLeft), 2));
    assert_eq!(record.attempts[0].outcome, Some(AttemptOutcome::Cancelled));
}

#[tokio::test]
async fn vectors_counts_and_several_choices_have_records() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    assert_eq!(chat(&lab, "two", json!({"n": 2})).send().await.unwrap().status(), 200);
    let two = read(&lab, "two").await;
    assert_eq!((two.responses, two.complete, two.end), (2, 2, stopped()));
    assert_eq!((two.prompt_tokens, two.completion_tokens, two.attempts.len()), (7, 6, 2));
    let mut responses: Vec<u32> = two.attempts.iter().map(|attempt| attempt.response).collect();
    responses.sort_unstable();
    assert_eq!(responses, [0, 1]);
    let content = format!("say {MARKER}");
    let messages = json!([{"role": "user", "content": content.clone()}]);
    for (path, body, prompt_tokens) in [
        ("/v1/embeddings", json!({"model": "m", "input": [content.clone(), MARKER]}), 14),
        ("/v1/rerank", json!({"model": "m", "query": MARKER, "documents": [content.clone()]}), 9),
        ("/v1/messages/count_tokens", json!({"model": "m", "messages": messages}), 9),
    ] {
        let request = lab.client.post(lab.url(path)).header("x-request-id", "r1").json(&body);
        assert_eq!(request.send().await.unwrap().status(), 200, "{path}");
        let record = read(&lab, "r1").await;
        assert_eq!(record.end, Some(RequestEnd::Finished { reason: None }), "{path}");
        assert_eq!((record.prompt_tokens, record.completion_tokens), (prompt_tokens, 0), "{path}");
        assert_eq!(record.attempts[0].outcome, Some(AttemptOutcome::Answered), "{path}");
    }
}

#[tokio::test]
async fn a_record_is_its_keys_own_and_this_machines() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    lab.keys(&[
        access_key("one", "s-one", |spec| {
            spec.requests_per_minute = Some(2);
            spec.max_tokens_per_request = Some(50);
            spec.max_request_seconds = Some(30);
        }),
        access_key("two", "s-two", |_| {}),
    ]);
    let why = |url: String| lab.client.get(url);
    assert_eq!(chat(&lab, "r1", json!({})).bearer_auth("s-one").send().await.unwrap().status(), 200);
    // The same id of another key does not hide it.
    assert_eq!(chat(&lab, "r1", json!({})).bearer_auth("s-two").send().await.unwrap().status(), 200);
    assert_eq!(chat(&lab, "r2", json!({})).bearer_auth("s-one").send().await.unwrap().status(), 200);
    assert_eq!(chat(&lab, "r3", json!({})).bearer_auth("s-one").send().await.unwrap().status(), 429);
    for base in [lab.url("/requests"), lab.network_url("/requests")] {
        for (id, secret, owner) in [
            ("r1", "s-one", Some("default/one")),
            ("r1", "s-two", Some("default/two")),
            ("r2", "s-one", Some("default/one")),
            ("r2", "s-two", None),
            ("r9", "s-one", None),
        ] {
            let response = why(format!("{base}/{id}/why")).bearer_auth(secret).send().await.unwrap();
            let (status, body) = (response.status().as_u16(), response.json::<Value>().await.unwrap());
            match owner {
                Some(owner) => assert_eq!((status, &body["caller"]), (200, &json!(owner)), "{id} {secret}"),
                None => {
                    let error = &body["error"];
                    assert_eq!((status, &error["code"]), (404, &json!("request_not_found")), "{body}");
                    let message = error["message"].as_str().unwrap();
                    assert!(message.contains(id) && message.contains("10000 requests"), "{message}");
                }
            }
        }
        let refused = why(format!("{base}/r1/why")).bearer_auth("s-none").send().await.unwrap();
        assert_eq!(refused.status(), 401);
    }
    let record = read(&lab, "r3").await;
    let Some(RequestEnd::Failed { code, .. }) = &record.end else { panic!("{:?}", record.end) };
    assert_eq!((code.as_ref(), record.model.as_str()), ("quota_exceeded", ""));
    let limits = record.limits;
    assert_eq!((limits.requests_per_minute, limits.requests_remaining), (Some(2), Some(0)));
    assert_eq!((limits.key_max_tokens, limits.key_max_ms), (Some(50), Some(30_000.0)));
    assert_eq!(read(&lab, "r2").await.limits.timeout_ms, Some(30_000.0));
    // Other machines need a key, and pages of other sites may not ask this one.
    let network = why(lab.network_url("/requests/r1/why")).send().await.unwrap();
    assert_eq!(network.status(), 401);
    let page = why(lab.url("/requests/r1/why")).header("origin", "https://evil.example");
    assert!(page.send().await.unwrap().status().is_client_error());
}
