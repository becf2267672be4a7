//! Priority, timeout and response length from keys and requests: what engines receive, and the error clients
//! get when the time is over, in every phase of the request.

use std::time::Duration;

use russet_gateway::dispatch::DispatchLimits;
use russet_gateway::routes::DeploymentState;
use russet_rpc::engine::GenerateRequest;
use russet_wire::event::{FailureKind, GenerationEvent, GenerationFailure};
use serde_json::{Value, json};

use crate::harness::{
    GatewayLab, ScriptStep, TEST_TIMEOUT, access_key, hello, limits, started, token, transcript,
    wait_for_metric,
};

const TIMEOUT: &str = "x-request-timeout";

/// Status, `code`, `param` and message of an error.
async fn error(response: reqwest::Response) -> (u16, Value, Value, String) {
    let status = response.status().as_u16();
    let error = response.json::<Value>().await.unwrap()["error"].take();
    (status, error["code"].clone(), error["param"].clone(), error["message"].as_str().unwrap().to_owned())
}

/// The error a stream ends with.
fn last_error(events: &[Value]) -> &Value {
    let last = &events.last().unwrap()["error"];
    assert!(last.is_object(), "{events:?}");
    last
}

#[tokio::test]
async fn engine_receives_the_limits_of_key_and_request() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let low = access_key("low", "s-low", |spec| {
        spec.priority = -5;
        spec.max_tokens_per_request = Some(50);
        spec.max_request_seconds = Some(20);
    });
    lab.keys(&[
        low,
        access_key("high", "s-high", |spec| spec.priority = 90),
        access_key("plain", "s", |_| {}),
    ]);
    for (secret, header, more, priority, max_tokens, milliseconds, tier) in [
        ("s", None, json!({}), 0, None, None, None),
        ("s", Some("30"), json!({"max_tokens": 70}), 0, Some(70), Some(30_000), None),
        ("s", None, json!({"service_tier": "flex"}), -30, None, None, Some("flex")),
        ("s-high", None, json!({}), 90, None, None, None),
        ("s-high", Some("0.5"), json!({"service_tier": "auto"}), 90, None, Some(500), Some("default")),
        ("s-high", None, json!({"priority": 40}), 50, None, None, None),
        ("s-low", None, json!({}), -5, Some(50), Some(20_000), None),
        ("s-low", Some("7.5"), json!({"max_tokens": 3, "priority": 1}), -6, Some(3), Some(7_500), None),
        ("s-low", Some("500"), json!({"max_completion_tokens": 50}), -5, Some(50), Some(20_000), None),
    ] {
        let mut request = lab.chat(more.clone()).bearer_auth(secret);
        if let Some(header) = header {
            request = request.header(TIMEOUT, header);
        }
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 200, "{secret} {more}");
        let body: Value = response.json().await.unwrap();
        assert_eq!(body["service_tier"].as_str(), tier, "{secret} {more}");
        let received = engine.received.lock().unwrap().pop().unwrap();
        assert_eq!((received.priority, received.max_tokens), (priority, max_tokens), "{secret} {more}");
        // Some of it passed on the way.
        match (received.deadline_milliseconds, milliseconds) {
            (None, None) => {}
            (Some(remaining), Some(total)) => {
                assert!(remaining <= total && remaining > 0, "{secret} {more}: {remaining} of {total}")
            }
            (remaining, total) => panic!("{secret} {more}: {remaining:?} of {total:?}"),
        }
    }
    for (more, expected) in [(json!({}), None), (json!({"service_tier": "flex"}), Some("flex"))] {
        let mut stream = json!({"stream": true});
        stream.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let text = lab.chat(stream).bearer_auth("s").send().await.unwrap().text().await.unwrap();
        let events = transcript(&text);
        let chunks = events.iter().filter(|event| event.is_object());
        assert!(chunks.clone().count() > 2);
        assert!(chunks.into_iter().all(|chunk| chunk["service_tier"].as_str() == expected), "{events:?}");
    }
    engine.received.lock().unwrap().clear();
    for (secret, header, more, param, words) in [
        (
            "s",
            None,
            json!({"priority": -1}),
            "priority",
            "from 0 to 100, not -1: 0 is this key's own priority (0)",
        ),
        (
            "s-low",
            None,
            json!({"priority": 96}),
            "priority",
            "from 0 to 95, not 96: 0 is this key's own priority (-5)",
        ),
        ("s-low", None, json!({"max_tokens": 51}), "max_tokens", "is 51, but this key allows at most 50"),
        ("s", None, json!({"service_tier": "express"}), "service_tier", "auto, default, flex or priority"),
        (
            "s",
            Some("soon"),
            json!({}),
            TIMEOUT,
            "more than 0 and at most 86400, such as 30 or 2.5, not `soon`",
        ),
        ("s", Some("0"), json!({}), TIMEOUT, "not `0`"),
    ] {
        let mut request = lab.chat(more.clone()).bearer_auth(secret);
        if let Some(header) = header {
            request = request.header(TIMEOUT, header);
        }
        let (status, code, field, message) = error(request.send().await.unwrap()).await;
        assert_eq!((status, code, field), (400, Value::Null, json!(param)), "{secret} {more}");
        assert!(message.contains(words), "{message}");
    }
    assert_eq!(engine.requests(), 0);
}

/// Before any text was sent, the deadline is a 504; after that it is the last event of the stream.
#[tokio::test]
async fn a_request_ends_at_its_deadline_wherever_it_is() {
    let timeout = "0.3";
    let interval = Duration::from_millis(20);
    let exceeded = |message: &str| {
        ScriptStep::Say(GenerationEvent::Failed(GenerationFailure {
            kind: FailureKind::DeadlineExceeded,
            message: message.into(),
        }))
    };
    for (case, steps, streamed_text, words) in [
        ("it is held", None, "", "the deadline of 300ms has passed: model `m`: it is scaled to zero"),
        (
            "the engine sends no event",
            Some(vec![ScriptStep::Hang]),
            "",
            "the engine on node a had not completed the response",
        ),
        (
            "the engine sends no further event",
            Some(vec![started(), token("Hel"), ScriptStep::Hang]),
            "Hel",
            "the engine on node a had not completed the response",
        ),
        (
            "the engine reports it",
            Some(vec![exceeded("cannot be met")]),
            "",
            "cannot be met (the timeout of the request is 300ms)",
        ),
        (
            "the engine reports it later",
            Some(vec![started(), token("Hel"), exceeded("has passed, with 1 tokens")]),
            "Hel",
            "has passed, with 1 tokens",
        ),
    ] {
        let lab = GatewayLab::start(DispatchLimits { headers_timeout: interval, ..limits() }).await;
        let engine = steps.map(|steps| lab.only_engine(steps));
        if engine.is_none() {
            lab.publish(&[("m", DeploymentState::Working("it is scaled to zero".into()), &[])]);
        }
        let response = lab.chat(json!({})).header(TIMEOUT, timeout).send().await.unwrap();
        assert_eq!(response.headers()["x-should-retry"], "false", "{case}");
        let (status, code, _, message) = error(response).await;
        assert_eq!((status, code), (504, json!("deadline_exceeded")), "{case}");
        assert!(message.contains(words), "{case}: {message}");
        let response = lab.chat(json!({"stream": true})).header(TIMEOUT, timeout).send().await.unwrap();
        let text = response.text().await.unwrap();
        // A failure before the headers are sent has its own status.
        if let Ok(body) = serde_json::from_str::<Value>(&text) {
            assert_eq!((&body["error"]["code"], streamed_text), (&json!("deadline_exceeded"), ""), "{case}");
        } else {
            let events = transcript(&text);
            let content: String =
                events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
            assert_eq!(content, streamed_text, "{case}");
            let error = last_error(&events);
            assert_eq!(
                (&error["code"], &error["type"]),
                (&json!("deadline_exceeded"), &json!("server_error"))
            );
            assert!(error["message"].as_str().unwrap().contains(words), "{case}: {error}");
        }
        if let Some(engine) = engine {
            engine.running(0).await;
        }
        let counted =
            "russet_gateway_request_error_total{error_code=\"deadline_exceeded\",model_name=\"m\"} 2\n";
        wait_for_metric(&lab, counted).await;
    }
}

/// A request that was held or is resumed has less time left.
#[tokio::test]
async fn every_engine_gets_the_remaining_deadline() {
    /// Time that passes while a request is held, and again during its response.
    const PASSING: Duration = Duration::from_millis(200);
    let lab = GatewayLab::start(limits()).await;
    lab.publish(&[("m", DeploymentState::Working("it is scaled to zero".into()), &[])]);
    let request = lab.chat(json!({"stream": true, "priority": 3})).header(TIMEOUT, "60");
    let response = tokio::spawn(async move { request.send().await.unwrap().text().await.unwrap() });
    let waiting = "russet_gateway_num_requests_waiting{name=\"m\",namespace=\"default\"}";
    wait_for_metric(&lab, &format!("{waiting} 1\n")).await;
    tokio::time::sleep(PASSING).await;
    let mut first = lab.engine("a", |_| vec![started(), token("Hel"), ScriptStep::Hang]);
    lab.publish(&[("m", DeploymentState::Ready, &[&first])]);
    first.running(1).await;
    tokio::time::sleep(PASSING).await;
    lab.publish(&[("m", DeploymentState::Working("it is being re-formed".into()), &[])]);
    first.kill();
    wait_for_metric(&lab, &format!("{waiting} 1\n")).await;
    let second = lab.engine("b", |request: &GenerateRequest| {
        let emitted_tokens = request.emitted.len() as u32;
        let started = GenerationEvent::Started { prompt_tokens: 7, emitted_tokens };
        [ScriptStep::Say(started)].into_iter().chain(hello().into_iter().skip(1)).collect()
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&second])]);
    assert!(response.await.unwrap().ends_with("data: [DONE]\n\n"));
    let received = [&first, &second].map(|engine| engine.received.lock().unwrap()[0].clone());
    let [first_left, second_left] = received.each_ref().map(|request| {
        assert_eq!(request.priority, -3);
        Duration::from_millis(request.deadline_milliseconds.unwrap())
    });
    assert_eq!(received[1].emitted, [1]);
    assert!(first_left <= Duration::from_secs(60) - PASSING, "{first_left:?}");
    assert!(second_left <= first_left - PASSING, "{second_left:?} after {first_left:?}");
}

#[tokio::test]
async fn interrupted_response_fails_at_its_deadline() {
    let lab = GatewayLab::start(DispatchLimits { hold_timeout: TEST_TIMEOUT, ..limits() }).await;
    let mut engine = lab.only_engine(vec![started(), token("Hel"), ScriptStep::Hang]);
    let request = lab.chat(json!({"stream": true})).header(TIMEOUT, "0.7");
    let mut response = request.send().await.unwrap();
    let mut text = String::new();
    while !text.contains("Hel") {
        text.push_str(std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap());
    }
    lab.publish(&[("m", DeploymentState::Working("it is being re-formed".into()), &[])]);
    engine.kill();
    let events = transcript(&(text + &response.text().await.unwrap()));
    let error = last_error(&events);
    assert_eq!(error["code"], "deadline_exceeded");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("the deadline of 700ms has passed: model `m`: it is being re-formed"),
        "{message}"
    );
}
