//! Responses when engines die, hang or reject requests, and cancellation in the engine when the client
//! disconnects.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::StreamExt as _;
use russet_gateway::dispatch::DispatchLimits;
use russet_gateway::routes::DeploymentState;
use russet_wire::event::{FailureKind, FinishReason, GenerationEvent, GenerationFailure};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::harness::{
    GatewayLab, ScriptStep, TEST_TIMEOUT, finished, hello, limits, started, token, transcript,
};

fn failed(kind: FailureKind) -> ScriptStep {
    ScriptStep::Say(GenerationEvent::Failed(GenerationFailure { kind, message: "because".into() }))
}

/// The events until the stream ends, and whether it ended cleanly.
async fn remaining_events(response: reqwest::Response) -> Vec<Value> {
    transcript(&response.text().await.expect("every stream ends by itself"))
}

#[tokio::test]
async fn disconnect_frees_the_slot_at_any_point_of_the_answer() {
    let lab = GatewayLab::start(limits()).await;
    // (streamed, tokens before the engine hangs)
    for (streamed, tokens) in [(true, 2), (true, 0), (false, 2), (false, 0)] {
        let mut steps = vec![started()];
        steps.extend((0..tokens).map(|_| token("x")));
        steps.push(ScriptStep::Hang);
        let engine = lab.only_engine(steps);
        let request = tokio::spawn(lab.chat(json!({"stream": streamed})).send());
        engine.running(1).await;
        if streamed && tokens > 0 {
            let mut body = request.await.unwrap().unwrap().bytes_stream();
            let first = body.next().await.unwrap().unwrap();
            assert!(first.starts_with(b"data: "), "{first:?}");
            drop(body);
        } else {
            request.abort();
        }
        engine.running(0).await;
    }
    let metrics = lab.metrics().await;
    assert!(metrics.contains("russet_gateway_request_cancelled_total{model_name=\"m\"} 4"), "{metrics}");
}

#[tokio::test]
async fn engine_loss_without_a_successor_ends_with_a_typed_error() {
    let lab = GatewayLab::start(limits()).await;
    let mut engine = lab.only_engine(vec![started(), token("x"), ScriptStep::Hang]);
    let mut streamed = lab.chat(json!({"stream": true})).send().await.unwrap();
    let mut text = String::new();
    while !text.contains("\"content\":\"x\"") {
        text.push_str(std::str::from_utf8(&streamed.chunk().await.unwrap().unwrap()).unwrap());
    }
    let whole = tokio::spawn(lab.chat(json!({})).send());
    engine.running(2).await;
    // The whole response must have its first token before the engine dies, or it would be retried.
    let first_tokens = tokio::time::timeout(TEST_TIMEOUT, async {
        while !lab.metrics().await.contains("russet_gateway_request_ttft_seconds_count{model_name=\"m\"} 2") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    first_tokens.await.unwrap();
    engine.kill();
    lab.publish(&[]);
    let events = remaining_events(streamed).await;
    let error = &events.last().unwrap()["error"];
    assert_eq!(
        (&error["code"], &error["type"]),
        (&json!("engine_lost"), &json!("server_error")),
        "{events:?}"
    );
    assert!(error["message"].as_str().unwrap().contains("node a"), "{error}");
    let whole = whole.await.unwrap().unwrap();
    assert_eq!(whole.status(), 503);
    assert_eq!(whole.headers()["retry-after"], "5");
    assert_eq!(whole.json::<Value>().await.unwrap()["error"]["code"], "engine_lost");
}

#[tokio::test]
async fn an_engine_lost_before_its_first_token_costs_only_time() {
    let lab =
        GatewayLab::start(DispatchLimits { endpoint_backoff: Duration::from_millis(50), ..limits() }).await;
    for streamed in [true, false] {
        let mut first = lab.only_engine(vec![started(), ScriptStep::Hang]);
        let request = tokio::spawn(lab.chat(json!({"stream": streamed})).send());
        first.running(1).await;
        first.kill();
        // The group is not ready, then re-formed at another address.
        lab.publish(&[("m", DeploymentState::Working("forming epoch 2".into()), &[])]);
        let again = lab.engine("b", |_| hello());
        lab.publish(&[("m", DeploymentState::Ready, &[&again])]);
        let text = request.await.unwrap().unwrap().text().await.unwrap();
        assert!(text.contains(" there"), "{text}");
        assert_eq!((first.requests(), again.requests()), (1, 1));
    }
}

#[tokio::test]
async fn another_group_answers_when_one_cannot_be_reached() {
    let lab = GatewayLab::start(limits()).await;
    let mut dead = lab.engine("a", |_| hello());
    let alive = lab.engine("b", |_| hello());
    dead.kill();
    lab.publish(&[("m", DeploymentState::Ready, &[&dead, &alive])]);
    let response = lab.chat(json!({})).send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(alive.requests(), 1);
}

#[tokio::test]
async fn request_to_an_absent_engine_fails_at_the_hold_timeout() {
    let short_hold = DispatchLimits {
        hold_timeout: Duration::from_millis(300),
        endpoint_backoff: Duration::from_millis(50),
        ..limits()
    };
    let lab = GatewayLab::start(short_hold).await;
    let mut engine = lab.only_engine(hello());
    engine.kill();
    let response = lab.chat(json!({})).send().await.unwrap();
    assert_eq!(
        (response.status().as_u16(), &response.headers()["retry-after"]),
        (503, &"5".parse().unwrap())
    );
    let error = response.json::<Value>().await.unwrap()["error"].clone();
    assert_eq!(error["code"], "engine_lost", "{error}");
}

#[tokio::test]
async fn request_that_kills_engines_is_retried_once() {
    let lab = GatewayLab::start(DispatchLimits { endpoint_backoff: Duration::ZERO, ..limits() }).await;
    let engine = lab.only_engine(vec![started(), ScriptStep::Break(tonic::Code::Unavailable, "rank 1 died")]);
    let response = lab.chat(json!({})).send().await.unwrap();
    assert_eq!(response.status(), 500);
    assert_eq!(response.headers()["x-should-retry"], "false");
    let error = response.json::<Value>().await.unwrap()["error"].clone();
    assert!(error["message"].as_str().unwrap().ends_with("rank 1 died"), "{error}");
    assert_eq!(engine.requests(), 2);
}

#[tokio::test]
async fn unavailable_engine_is_retried_until_it_serves() {
    let lab =
        GatewayLab::start(DispatchLimits { endpoint_backoff: Duration::from_millis(1), ..limits() }).await;
    let requests = AtomicUsize::new(0);
    let engine = lab.engine("a", move |_| match requests.fetch_add(1, Ordering::Relaxed) {
        0..9 => vec![failed(FailureKind::Unavailable)],
        _ => hello(),
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    assert_eq!(lab.chat(json!({})).send().await.unwrap().status(), 200);
    assert_eq!(engine.requests(), 10);
}

#[tokio::test]
async fn a_model_that_is_not_ready_says_why_or_answers_when_it_is() {
    let soon = Duration::from_millis(200);
    let lab = GatewayLab::start(DispatchLimits { sync_timeout: soon, hold_timeout: soon, ..limits() }).await;
    // Before the first list of the cluster, no model can be called unknown.
    let response = lab.chat(json!({})).send().await.unwrap();
    assert_eq!((response.status().as_u16(), response.headers().contains_key("retry-after")), (503, true));

    lab.publish(&[("m", DeploymentState::Working("copying 3 of 9 GiB".into()), &[])]);
    let response = lab.chat(json!({})).send().await.unwrap();
    assert_eq!((response.status().as_u16(), response.headers().contains_key("retry-after")), (503, true));
    let error = response.json::<Value>().await.unwrap()["error"].clone();
    assert_eq!(error["code"], "model_not_ready");
    assert!(error["message"].as_str().unwrap().contains("copying 3 of 9 GiB"), "{error}");

    lab.publish(&[("m", DeploymentState::Halted("needs 9 GiB, 2 GiB are free".into()), &[])]);
    let response = lab.chat(json!({})).send().await.unwrap();
    assert_eq!((response.status().as_u16(), response.headers().contains_key("x-should-retry")), (503, true));
    assert!(response.text().await.unwrap().contains("needs 9 GiB, 2 GiB are free"));

    let lab = GatewayLab::start(limits()).await;
    let request = tokio::spawn(lab.chat(json!({})).send());
    lab.publish(&[("m", DeploymentState::Working("copying".into()), &[])]);
    let engine = lab.engine("a", |_| hello());
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    assert_eq!(request.await.unwrap().unwrap().status(), 200);
}

#[tokio::test]
async fn every_engine_error_has_a_status_and_a_stream_error_code() {
    let lab = GatewayLab::start(DispatchLimits {
        hold_timeout: Duration::ZERO,
        endpoint_backoff: TEST_TIMEOUT,
        ..limits()
    })
    .await;
    for (end, status, code) in [
        (vec![failed(FailureKind::InvalidRequest)], 400, Value::Null),
        (vec![failed(FailureKind::ContextLengthExceeded)], 400, json!("context_length_exceeded")),
        (vec![failed(FailureKind::Overloaded)], 429, json!("rate_limit_exceeded")),
        (vec![failed(FailureKind::Unavailable)], 503, json!("engine_lost")),
        (vec![failed(FailureKind::DeadlineExceeded)], 504, json!("deadline_exceeded")),
        (vec![failed(FailureKind::Internal)], 500, json!("internal_error")),
        (vec![ScriptStep::Break(tonic::Code::InvalidArgument, "because")], 400, Value::Null),
        (
            vec![ScriptStep::Break(tonic::Code::ResourceExhausted, "because")],
            429,
            json!("rate_limit_exceeded"),
        ),
        (vec![ScriptStep::Break(tonic::Code::FailedPrecondition, "because")], 503, json!("engine_lost")),
        (vec![ScriptStep::Break(tonic::Code::Internal, "because")], 500, json!("internal_error")),
        (vec![finished(FinishReason::Cancelled)], 503, json!("engine_lost")),
        // The stream just ends.
        (vec![], 503, json!("engine_lost")),
    ] {
        let _engine = lab.only_engine([vec![started()], end.clone()].concat());
        let response = lab.chat(json!({"stream": true})).send().await.unwrap();
        assert_eq!(response.status(), status, "{code}");
        let error = response.json::<Value>().await.unwrap()["error"].clone();
        assert_eq!(error["code"], code, "{error}");

        let _engine = lab.only_engine([vec![started(), token("x")], end].concat());
        let response = lab.chat(json!({"stream": true})).send().await.unwrap();
        assert_eq!(response.status(), 200);
        let events = remaining_events(response).await;
        assert_eq!(events.last().unwrap()["error"]["code"], code, "{events:?}");
        assert!(!events.contains(&json!("[DONE]")), "{events:?}");
        let response = lab.chat(json!({})).send().await.unwrap();
        assert_eq!(response.status(), status, "{code}");
    }
}

#[tokio::test]
async fn overloaded_engine_makes_the_request_go_to_another_group() {
    let lab = GatewayLab::start(limits()).await;
    let full = lab.engine("a", |_| vec![failed(FailureKind::Overloaded)]);
    let free = lab.engine("b", |_| hello());
    lab.publish(&[("m", DeploymentState::Ready, &[&full, &free])]);
    assert_eq!(lab.chat(json!({})).send().await.unwrap().status(), 200);
    assert_eq!((full.requests(), free.requests()), (1, 1));
}

#[tokio::test]
async fn long_wait_sends_keep_alives_and_can_end_in_an_error() {
    let interval = Duration::from_millis(20);
    let lab =
        GatewayLab::start(DispatchLimits { headers_timeout: interval, heartbeat: interval, ..limits() })
            .await;
    let go = CancellationToken::new();
    let waiting = vec![started(), ScriptStep::Until(go.clone())];
    let _engine = lab.only_engine([waiting, vec![token("x"), failed(FailureKind::Internal)]].concat());
    let mut response = lab.chat(json!({"stream": true})).send().await.unwrap();
    let mut text = String::new();
    while !text.contains(": still working\n\n") {
        text.push_str(std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap());
    }
    go.cancel();
    let events = remaining_events(response).await;
    assert_eq!(events.last().unwrap()["error"]["code"], "internal_error", "{events:?}");
}

#[tokio::test]
async fn a_prompt_that_is_refused_late_has_its_own_status() {
    let refusal = |prepared: &CancellationToken| {
        vec![ScriptStep::PrepareUntil(prepared.clone()), failed(FailureKind::ContextLengthExceeded)]
    };
    let hasty = DispatchLimits { headers_timeout: Duration::ZERO, ..limits() };
    let lab = GatewayLab::start(DispatchLimits { prompt_timeout: TEST_TIMEOUT, ..hasty }).await;
    let prepared = CancellationToken::new();
    let engine = lab.only_engine(refusal(&prepared));
    let asked = tokio::spawn(lab.chat(json!({"stream": true})).send());
    engine.running(1).await;
    prepared.cancel();
    let response = asked.await.unwrap().unwrap();
    assert_eq!(response.status(), 400);
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "context_length_exceeded");
    // Without patience the headers come first.
    let lab = GatewayLab::start(hasty).await;
    let prepared = CancellationToken::new();
    let _engine = lab.only_engine(refusal(&prepared));
    let response = lab.chat(json!({"stream": true})).send().await.unwrap();
    assert_eq!(response.status(), 200);
    prepared.cancel();
    let events = remaining_events(response).await;
    assert_eq!(events.last().unwrap()["error"]["code"], "context_length_exceeded", "{events:?}");
}

#[tokio::test]
async fn a_prompt_that_is_too_long_is_named_by_its_field() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(vec![failed(FailureKind::ContextLengthExceeded)]);
    for (path, field, prompt) in [
        ("/v1/chat/completions", "messages", json!([{"role": "user", "content": "hi"}])),
        ("/v1/completions", "prompt", json!("hi")),
        ("/v1/responses", "input", json!("hi")),
    ] {
        let body = json!({"model": "m", field: prompt});
        let response = lab.client.post(lab.url(path)).json(&body).send().await.unwrap();
        assert_eq!(response.status(), 400, "{path}");
        let error = response.json::<Value>().await.unwrap();
        assert_eq!(error["error"]["param"], field, "{path}: {error}");
        assert_eq!(error["error"]["code"], "context_length_exceeded", "{path}: {error}");
    }
}

#[tokio::test]
async fn silent_engine_times_out() {
    let lab =
        GatewayLab::start(DispatchLimits { engine_timeout: Duration::from_millis(100), ..limits() }).await;
    let engine = lab.only_engine(vec![started(), token("x"), ScriptStep::Hang]);
    let response = lab.chat(json!({"stream": true})).send().await.unwrap();
    // On a busy machine the silence may begin before the first token; then there is no stream.
    let last = match response.status().as_u16() {
        200 => remaining_events(response).await.pop().unwrap(),
        status => {
            assert_eq!(status, 504);
            response.json().await.unwrap()
        }
    };
    assert_eq!(last["error"]["code"], "engine_silent", "{last}");
    engine.running(0).await;
}

#[tokio::test]
async fn shutdown_drains_answers_and_ends_the_rest_with_an_error() {
    let mut lab =
        GatewayLab::start(DispatchLimits { shutdown_grace: Duration::from_millis(500), ..limits() }).await;
    let go = CancellationToken::new();
    let quick = lab.engine("a", {
        let go = go.clone();
        move |_| vec![started(), token("x"), ScriptStep::Until(go.clone()), finished(FinishReason::Stop)]
    });
    let stuck = lab.engine("b", |_| vec![started(), token("x"), ScriptStep::Hang]);
    let endless = lab.engine("c", |_| vec![started(), ScriptStep::Babble]);
    lab.publish(&[
        ("m", DeploymentState::Ready, &[&quick]),
        ("s", DeploymentState::Ready, &[&stuck]),
        ("e", DeploymentState::Ready, &[&endless]),
    ]);
    let first = lab.chat(json!({"stream": true})).send().await.unwrap();
    let second = lab.chat(json!({"stream": true, "model": "s"})).send().await.unwrap();
    let third = lab.chat(json!({"stream": true, "model": "e"})).send().await.unwrap();
    lab.stop.cancel();
    go.cancel();
    assert_eq!(remaining_events(first).await.last().unwrap(), &json!("[DONE]"));
    for unfinished in [second, third] {
        assert_eq!(remaining_events(unfinished).await.last().unwrap()["error"]["code"], "shutting_down");
    }
    let served = tokio::time::timeout(TEST_TIMEOUT, lab.served.take().unwrap()).await.unwrap();
    assert!(served.unwrap().is_ok());
    assert!(lab.client.get(lab.url("/healthz")).send().await.is_err());
}
