//! What a client gets when engines die, hang or say no, and what becomes of the engine when the
//! client leaves.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::StreamExt as _;
use russet_gateway::routes::State;
use russet_gateway::stream::Limits;
use russet_wire::event::{Event, Failure, FailureKind, FinishReason};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::lab::{Act, Lab, PATIENCE, finished, hello, limits, started, token, transcript};

fn failed(kind: FailureKind) -> Act {
    Act::Say(Event::Failed(Failure { kind, message: "because".into() }))
}

/// The events until the stream ends, and whether it ended cleanly.
async fn rest(response: reqwest::Response) -> Vec<Value> {
    transcript(&response.text().await.expect("a stream ends by itself, whatever happens"))
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_slot_wherever_its_answer_is() {
    let lab = Lab::start(limits()).await;
    // (streamed, tokens before the engine hangs)
    for (streamed, tokens) in [(true, 2), (true, 0), (false, 2), (false, 0)] {
        let mut acts = vec![started()];
        acts.extend((0..tokens).map(|_| token("x")));
        acts.push(Act::Hang);
        let engine = lab.only_engine(acts);
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
async fn an_engine_killed_within_an_answer_that_nobody_takes_up_ends_it_with_a_typed_error() {
    let lab = Lab::start(limits()).await;
    let mut engine = lab.only_engine(vec![started(), token("x"), Act::Hang]);
    let mut streamed = lab.chat(json!({"stream": true})).send().await.unwrap();
    let mut text = String::new();
    while !text.contains("\"content\":\"x\"") {
        text.push_str(std::str::from_utf8(&streamed.chunk().await.unwrap().unwrap()).unwrap());
    }
    let whole = tokio::spawn(lab.chat(json!({})).send());
    engine.running(2).await;
    // The whole answer must have its first token before the engine dies, or it would be sent again.
    let begun = tokio::time::timeout(PATIENCE, async {
        while !lab.metrics().await.contains("russet_gateway_request_ttft_seconds_count{model_name=\"m\"} 2") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    begun.await.unwrap();
    engine.kill();
    lab.publish(&[]);
    let events = rest(streamed).await;
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
    let lab = Lab::start(Limits { rest: Duration::from_millis(50), ..limits() }).await;
    for streamed in [true, false] {
        let mut first = lab.only_engine(vec![started(), Act::Hang]);
        let request = tokio::spawn(lab.chat(json!({"stream": streamed})).send());
        first.running(1).await;
        first.kill();
        // The group is away, then formed anew at another address.
        lab.publish(&[("m", State::Working("forming epoch 2".into()), &[])]);
        let again = lab.engine("b", |_| hello());
        lab.publish(&[("m", State::Ready, &[&again])]);
        let text = request.await.unwrap().unwrap().text().await.unwrap();
        assert!(text.contains(" there"), "{text}");
        assert_eq!((first.requests(), again.requests()), (1, 1));
    }
}

#[tokio::test]
async fn another_group_answers_when_one_cannot_be_reached() {
    let lab = Lab::start(limits()).await;
    let mut gone = lab.engine("a", |_| hello());
    let alive = lab.engine("b", |_| hello());
    gone.kill();
    lab.publish(&[("m", State::Ready, &[&gone, &alive])]);
    let response = lab.chat(json!({})).send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(alive.requests(), 1);
}

#[tokio::test]
async fn an_engine_that_stays_away_is_given_up_at_the_deadline() {
    let patience = Limits { hold: Duration::from_millis(300), rest: Duration::from_millis(50), ..limits() };
    let lab = Lab::start(patience).await;
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
async fn a_request_that_kills_every_engine_it_meets_is_not_sent_for_ever() {
    let lab = Lab::start(Limits { rest: Duration::ZERO, ..limits() }).await;
    let engine = lab.only_engine(vec![started(), Act::Break(tonic::Code::Unavailable, "rank 1 died")]);
    let response = lab.chat(json!({})).send().await.unwrap();
    assert_eq!(response.status(), 503);
    assert_eq!(response.headers()["x-should-retry"], "false");
    let error = response.json::<Value>().await.unwrap()["error"].clone();
    assert!(error["message"].as_str().unwrap().contains("3 engines were lost"), "{error}");
    assert_eq!(engine.requests(), 3);
}

#[tokio::test]
async fn an_engine_that_is_about_to_serve_is_asked_until_it_does() {
    let lab = Lab::start(Limits { rest: Duration::from_millis(1), ..limits() }).await;
    let asked = AtomicUsize::new(0);
    let engine = lab.engine("a", move |_| match asked.fetch_add(1, Ordering::Relaxed) {
        0..9 => vec![failed(FailureKind::Unavailable)],
        _ => hello(),
    });
    lab.publish(&[("m", State::Ready, &[&engine])]);
    assert_eq!(lab.chat(json!({})).send().await.unwrap().status(), 200);
    assert_eq!(engine.requests(), 10);
}

#[tokio::test]
async fn a_model_that_is_not_ready_says_why_or_answers_when_it_is() {
    let soon = Duration::from_millis(200);
    let lab = Lab::start(Limits { wait: soon, hold: soon, ..limits() }).await;
    // Before the cluster was read, no model can be called unknown.
    let response = lab.chat(json!({})).send().await.unwrap();
    assert_eq!((response.status().as_u16(), response.headers().contains_key("retry-after")), (503, true));

    lab.publish(&[("m", State::Working("copying 3 of 9 GiB".into()), &[])]);
    let response = lab.chat(json!({})).send().await.unwrap();
    assert_eq!((response.status().as_u16(), response.headers().contains_key("retry-after")), (503, true));
    let error = response.json::<Value>().await.unwrap()["error"].clone();
    assert_eq!(error["code"], "model_not_ready");
    assert!(error["message"].as_str().unwrap().contains("copying 3 of 9 GiB"), "{error}");

    lab.publish(&[("m", State::Halted("needs 9 GiB, 2 GiB are free".into()), &[])]);
    let response = lab.chat(json!({})).send().await.unwrap();
    assert_eq!((response.status().as_u16(), response.headers().contains_key("x-should-retry")), (503, true));
    assert!(response.text().await.unwrap().contains("needs 9 GiB, 2 GiB are free"));

    let lab = Lab::start(limits()).await;
    let request = tokio::spawn(lab.chat(json!({})).send());
    lab.publish(&[("m", State::Working("copying".into()), &[])]);
    let engine = lab.engine("a", |_| hello());
    lab.publish(&[("m", State::Ready, &[&engine])]);
    assert_eq!(request.await.unwrap().unwrap().status(), 200);
}

#[tokio::test]
async fn every_way_an_engine_says_no_has_its_status_before_and_its_code_within_an_answer() {
    let lab = Lab::start(Limits { hold: Duration::ZERO, rest: PATIENCE, ..limits() }).await;
    for (end, status, code) in [
        (vec![failed(FailureKind::InvalidRequest)], 400, Value::Null),
        (vec![failed(FailureKind::Overloaded)], 429, json!("rate_limit_exceeded")),
        (vec![failed(FailureKind::Unavailable)], 503, json!("engine_lost")),
        (vec![failed(FailureKind::DeadlineExceeded)], 504, json!("deadline_exceeded")),
        (vec![failed(FailureKind::Internal)], 500, json!("internal_error")),
        (vec![Act::Break(tonic::Code::InvalidArgument, "because")], 400, Value::Null),
        (vec![Act::Break(tonic::Code::ResourceExhausted, "because")], 429, json!("rate_limit_exceeded")),
        (vec![Act::Break(tonic::Code::FailedPrecondition, "because")], 503, json!("engine_lost")),
        (vec![Act::Break(tonic::Code::Internal, "because")], 500, json!("internal_error")),
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
        let events = rest(response).await;
        assert_eq!(events.last().unwrap()["error"]["code"], code, "{events:?}");
        assert!(!events.contains(&json!("[DONE]")), "{events:?}");
        let response = lab.chat(json!({})).send().await.unwrap();
        assert_eq!(response.status(), status, "{code}");
    }
}

#[tokio::test]
async fn a_full_engine_hands_its_request_to_another_group() {
    let lab = Lab::start(limits()).await;
    let full = lab.engine("a", |_| vec![failed(FailureKind::Overloaded)]);
    let free = lab.engine("b", |_| hello());
    lab.publish(&[("m", State::Ready, &[&full, &free])]);
    assert_eq!(lab.chat(json!({})).send().await.unwrap().status(), 200);
    assert_eq!((full.requests(), free.requests()), (1, 1));
}

#[tokio::test]
async fn a_long_wait_is_filled_with_comments_and_may_still_fail_in_shape() {
    let beat = Duration::from_millis(20);
    let lab = Lab::start(Limits { hold_headers: beat, heartbeat: beat, ..limits() }).await;
    let go = CancellationToken::new();
    let waiting = vec![started(), Act::Until(go.clone())];
    let _engine = lab.only_engine([waiting, vec![token("x"), failed(FailureKind::Internal)]].concat());
    let mut response = lab.chat(json!({"stream": true})).send().await.unwrap();
    let mut text = String::new();
    while !text.contains(": still working\n\n") {
        text.push_str(std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap());
    }
    go.cancel();
    let events = rest(response).await;
    assert_eq!(events.last().unwrap()["error"]["code"], "internal_error", "{events:?}");
}

#[tokio::test]
async fn an_engine_that_falls_silent_is_given_up() {
    let lab = Lab::start(Limits { silence: Duration::from_millis(100), ..limits() }).await;
    let engine = lab.only_engine(vec![started(), token("x"), Act::Hang]);
    let response = lab.chat(json!({"stream": true})).send().await.unwrap();
    // On a busy machine the silence may begin before the first token, which is no stream then.
    let last = match response.status().as_u16() {
        200 => rest(response).await.pop().unwrap(),
        status => {
            assert_eq!(status, 504);
            response.json().await.unwrap()
        }
    };
    assert_eq!(last["error"]["code"], "engine_silent", "{last}");
    engine.running(0).await;
}

#[tokio::test]
async fn a_shutdown_lets_answers_end_and_tells_those_it_cannot_wait_for() {
    let mut lab = Lab::start(Limits { grace: Duration::from_millis(500), ..limits() }).await;
    let go = CancellationToken::new();
    let quick = lab.engine("a", {
        let go = go.clone();
        move |_| vec![started(), token("x"), Act::Until(go.clone()), finished(FinishReason::Stop)]
    });
    let stuck = lab.engine("b", |_| vec![started(), token("x"), Act::Hang]);
    lab.publish(&[("m", State::Ready, &[&quick]), ("s", State::Ready, &[&stuck])]);
    let first = lab.chat(json!({"stream": true})).send().await.unwrap();
    let second = lab.chat(json!({"stream": true, "model": "s"})).send().await.unwrap();
    lab.stop.cancel();
    go.cancel();
    assert_eq!(rest(first).await.last().unwrap(), &json!("[DONE]"));
    assert_eq!(rest(second).await.last().unwrap()["error"]["code"], "shutting_down");
    let served = tokio::time::timeout(PATIENCE, lab.served.take().unwrap()).await.unwrap();
    assert!(served.unwrap().is_ok());
    assert!(lab.client.get(lab.url("/healthz")).send().await.is_err());
}
