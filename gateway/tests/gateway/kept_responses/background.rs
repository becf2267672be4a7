//! Responses that run in the background: polled, cancelled, deleted and followed.

use std::time::Duration;

use futures::StreamExt as _;
use reqwest::Method;
use russet_gateway::dispatch::DispatchLimits;
use russet_gateway::response_store::ResponseStoreConfig;
use russet_wire::event::FinishReason;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::{id, not_found};
use crate::harness::{GatewayLab, ScriptStep, TEST_TIMEOUT, finished, limits, started, token};
use crate::openai_responses::{events, names};

#[tokio::test]
async fn a_response_in_the_background_is_polled() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let (begin, end) = (CancellationToken::new(), CancellationToken::new());
    let engine = lab.only_engine(vec![
        ScriptStep::PrepareUntil(begin.clone()),
        started(),
        token("Hello"),
        ScriptStep::Until(end.clone()),
        token(" there"),
        finished(FinishReason::Stop),
    ]);
    let response = lab.whole(json!({"background": true})).await;
    assert_eq!((&response["status"], &response["output"]), (&json!("queued"), &json!([])));
    assert_eq!((&response["background"], &response["store"]), (&json!(true), &json!(true)));
    assert_eq!(lab.get(id(&response)).await, (200, response.clone()));
    let refused = lab.respond(json!({"previous_response_id": id(&response)})).send().await.unwrap();
    assert_eq!(refused.status(), 400);
    assert!(refused.text().await.unwrap().contains("has not ended"));
    begin.cancel();
    lab.with_status(id(&response), "in_progress").await;
    end.cancel();
    let ended = lab.with_status(id(&response), "completed").await;
    assert_eq!(ended["output"][0]["content"][0]["text"], "Hello there");
    assert_eq!(ended["usage"]["total_tokens"], 10);
    engine.running(0).await;
    // One that has ended is as it is.
    let cancelled = lab.kept(Method::POST, &format!("{}/cancel", id(&response))).await;
    assert_eq!(cancelled, (200, ended.clone()));
    let next = lab.whole(json!({"previous_response_id": id(&response), "background": false})).await;
    assert_eq!(next["previous_response_id"], response["id"]);
    let refused = lab.respond(json!({"background": true, "store": false})).send().await.unwrap();
    assert_eq!(refused.status(), 400);
    let error = refused.json::<Value>().await.unwrap()["error"].take();
    assert_eq!(error["param"], "background");
}

#[tokio::test]
async fn a_response_in_the_background_is_cancelled_and_deleted() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    for first in [vec![ScriptStep::Prepare], vec![started(), token("Hello"), ScriptStep::Hang]] {
        let engine = lab.only_engine(first);
        let response = lab.whole(json!({"background": true})).await;
        engine.running(1).await;
        let (status, cancelled) = lab.kept(Method::POST, &format!("{}/cancel", id(&response))).await;
        assert_eq!((status, &cancelled["status"]), (200, &json!("cancelled")));
        engine.running(0).await;
        assert_eq!(lab.get(id(&response)).await, (200, cancelled));
        let events = lab.followed(id(&response), "").await;
        let last = events.last().unwrap();
        assert_eq!(
            (&last["type"], &last["response"]["status"]),
            (&json!("response.incomplete"), &json!("cancelled"))
        );

        let response = lab.whole(json!({"background": true})).await;
        engine.running(1).await;
        let (status, _) = lab.kept(Method::DELETE, id(&response)).await;
        assert_eq!(status, 200);
        engine.running(0).await;
        assert_eq!(lab.get(id(&response)).await, not_found(id(&response)));
    }
}

#[tokio::test]
async fn a_stream_in_the_background_is_resumed() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let end = CancellationToken::new();
    let mut steps = vec![started(), token("Hello"), ScriptStep::Until(end.clone())];
    // More events than are kept in memory.
    steps.extend((0..500).map(|number| token(&format!(" {number}"))));
    steps.push(finished(FinishReason::Stop));
    let engine = lab.only_engine(steps);
    let request = lab.respond(json!({"background": true, "stream": true}));
    let mut body = request.send().await.unwrap().bytes_stream();
    let mut text = String::new();
    while !text.contains("Hello") {
        text.push_str(std::str::from_utf8(&body.next().await.unwrap().unwrap()).unwrap());
    }
    // The client leaves, and the response goes on.
    drop(body);
    let begun = events(&text);
    assert_eq!(names(&begun)[..4], ["created", "queued", "in_progress", "output_item.added"]);
    assert_eq!(begun[0]["response"]["status"], "queued");
    let response = id(&begun[0]["response"]).to_owned();
    let live = tokio::spawn({
        let url = lab.url(&format!("/v1/responses/{response}?stream=true"));
        lab.client.get(url).send()
    });
    let live = live.await.unwrap().unwrap();
    engine.running(1).await;
    end.cancel();
    let all = events(&live.text().await.unwrap());
    assert_eq!(all[..begun.len()], begun);
    let ended = lab.with_status(&response, "completed").await;
    assert_eq!(all.last().unwrap()["response"], ended);
    let deltas = all.iter().filter(|event| event["type"] == "response.output_text.delta");
    let deltas: String = deltas.map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(deltas, ended["output"][0]["content"][0]["text"].as_str().unwrap());
    for after in [0, 5, 130, 300, all.len() - 2] {
        let rest = lab.followed(&response, &format!("&starting_after={after}")).await;
        assert_eq!(rest, all[after + 1..], "{after}");
    }
    // A client that has them all is told the end again.
    let again = lab.followed(&response, &format!("&starting_after={}", all.len() - 1)).await;
    assert_eq!(again.len(), 1);
    assert_eq!(
        (&again[0]["type"], &again[0]["response"], &again[0]["sequence_number"]),
        (&json!("response.completed"), &ended, &json!(all.len()))
    );
}

#[tokio::test]
async fn a_gateway_that_stops_lets_the_background_end() {
    let (_folder, mut lab) = GatewayLab::start_in_new_folder().await;
    let end = CancellationToken::new();
    let engine = lab.only_engine(vec![
        started(),
        ScriptStep::Until(end.clone()),
        token("x"),
        finished(FinishReason::Stop),
    ]);
    let response = lab.whole(json!({"background": true})).await;
    assert_eq!(response["status"], "queued");
    engine.running(1).await;
    lab.stop.cancel();
    end.cancel();
    let served = tokio::time::timeout(TEST_TIMEOUT, lab.served.take().unwrap()).await;
    served.unwrap().unwrap().unwrap();
    let next = GatewayLab::start_in(_folder.path()).await;
    assert_eq!(next.get(id(&response)).await.1["status"], "completed");
}

#[tokio::test]
async fn a_waiting_follower_is_kept_open_by_comments() {
    let folder = tempfile::tempdir().unwrap();
    let config = ResponseStoreConfig::new(folder.path().join("r.db"));
    let limits = DispatchLimits { heartbeat: Duration::from_millis(1), ..limits() };
    let lab = GatewayLab::start_keeping(limits, config).await;
    let go = CancellationToken::new();
    let _engine = lab.only_engine(vec![
        started(),
        ScriptStep::Until(go.clone()),
        token("x"),
        finished(FinishReason::Stop),
    ]);
    let response = lab.whole(json!({"background": true})).await;
    let url = lab.url(&format!("/v1/responses/{}?stream=true", id(&response)));
    let mut body = lab.client.get(url).send().await.unwrap();
    let mut text = String::new();
    while !text.contains(": still working") {
        let part = tokio::time::timeout(TEST_TIMEOUT, body.chunk()).await.unwrap();
        text.push_str(std::str::from_utf8(&part.unwrap().unwrap()).unwrap());
    }
    go.cancel();
    text.push_str(&body.text().await.unwrap());
    assert_eq!(*names(&events(&text)).last().unwrap(), "completed");
}
