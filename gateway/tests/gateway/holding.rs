//! Requests for a model that is not ready: held until it is, up to the hold time of its route, within limits,
//! and visible in metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use russet_gateway::demand::HoldLimits;
use russet_gateway::dispatch::DispatchLimits;
use russet_gateway::routes::{DeploymentState, ModelAlias, RoutePolicy};
use russet_wire::event::{FailureKind, GenerationEvent, GenerationFailure};
use serde_json::{Value, json};

use crate::harness::{
    GatewayLab, ScriptStep, ScriptedEngine, TEST_TIMEOUT, hello, limits, transcript, wait_for_metric,
};

fn scaled_to_zero() -> DeploymentState {
    DeploymentState::Working("it is scaled to zero".into())
}

/// The only name of a ModelRoute, for the model `m`.
fn route(hold: Option<Duration>) -> Vec<ModelAlias> {
    let policy = Arc::new(RoutePolicy::to(["m"]).holding(hold));
    let (pattern, route) = ("best".into(), "default/usual".into());
    vec![ModelAlias { pattern, route, namespace: "default".into(), policy, cache_ttl: None }]
}

fn waiting_metric(count: usize) -> String {
    format!("russet_gateway_num_requests_waiting{{name=\"m\",namespace=\"default\"}} {count}\n")
}

async fn error(response: reqwest::Response) -> (u16, String, String) {
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    assert!(headers.contains_key("retry-after"), "{headers:?}");
    let error = response.json::<Value>().await.unwrap()["error"].clone();
    let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
    (status, text("code"), text("message"))
}

#[tokio::test]
async fn request_is_held_and_counted_until_a_replica_is_ready() {
    let lab = GatewayLab::start(limits()).await;
    lab.publish(&[("m", scaled_to_zero(), &[])]);
    let requests: Vec<_> = (0..3).map(|_| tokio::spawn(lab.chat(json!({})).send())).collect();
    wait_for_metric(&lab, &waiting_metric(3)).await;
    let engine = lab.engine("a", |_| hello());
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    for request in requests {
        assert_eq!(request.await.unwrap().unwrap().status(), 200);
    }
    wait_for_metric(&lab, &waiting_metric(0)).await;
    let held = "russet_gateway_request_queue_time_seconds_count{name=\"m\",namespace=\"default\"} 3";
    wait_for_metric(&lab, held).await;
    wait_for_metric(&lab, "russet_gateway_num_requests_running{name=\"m\",namespace=\"default\"} 0").await;
}

#[tokio::test]
async fn a_route_says_how_long_a_request_is_held_and_whether_at_all() {
    let lab = GatewayLab::start(limits()).await;
    for (hold, words) in [
        (Some(Duration::from_millis(100)), "it is scaled to zero"),
        (None, "its ModelRoute does not hold requests: it is scaled to zero"),
    ] {
        lab.publish_with(&[("m", scaled_to_zero(), &[])], route(hold));
        let (status, code, message) = error(lab.chat(json!({"model": "best"})).send().await.unwrap()).await;
        assert_eq!((status, code.as_str()), (503, "model_not_ready"), "{hold:?}");
        assert!(message.contains(words), "{message}");
    }
    // A change of the route applies at once to requests that are held.
    lab.publish_with(&[("m", scaled_to_zero(), &[])], route(Some(TEST_TIMEOUT)));
    let held = tokio::spawn(lab.chat(json!({"model": "best"})).send());
    wait_for_metric(&lab, &waiting_metric(1)).await;
    lab.publish_with(&[("m", scaled_to_zero(), &[])], route(None));
    assert_eq!(held.await.unwrap().unwrap().status(), 503);
    // A model that will never become ready is not waited for.
    lab.publish_with(&[("m", scaled_to_zero(), &[])], route(Some(TEST_TIMEOUT)));
    let held = tokio::spawn(lab.chat(json!({"model": "best"})).send());
    wait_for_metric(&lab, &waiting_metric(1)).await;
    lab.publish_with(&[("m", DeploymentState::Halted("needs 9 GiB".into()), &[])], route(Some(TEST_TIMEOUT)));
    let response = held.await.unwrap().unwrap();
    assert_eq!(
        (response.status().as_u16(), &response.headers()["x-should-retry"]),
        (503, &"false".parse().unwrap())
    );
    assert!(response.text().await.unwrap().contains("needs 9 GiB"));
}

#[tokio::test]
async fn held_requests_are_limited_and_a_disconnect_frees_a_place() {
    let holding =
        HoldLimits { max_requests: 8, max_per_deployment: 1, max_bytes_per_deployment: 1024 * 1024 };
    let lab = GatewayLab::start(DispatchLimits { holding, ..limits() }).await;
    lab.publish(&[("m", scaled_to_zero(), &[])]);
    let first = tokio::spawn(lab.chat(json!({})).send());
    wait_for_metric(&lab, &waiting_metric(1)).await;
    let (status, code, message) = error(lab.chat(json!({})).send().await.unwrap()).await;
    assert_eq!((status, code.as_str()), (503, "gateway_full"));
    assert!(message.contains("already holds 1 of 1 requests and 0 of 1 MiB for it"), "{message}");
    first.abort();
    wait_for_metric(&lab, &waiting_metric(0)).await;
    let again = tokio::spawn(lab.chat(json!({})).send());
    wait_for_metric(&lab, &waiting_metric(1)).await;
    let engine = lab.engine("a", |_| hello());
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    assert_eq!(again.await.unwrap().unwrap().status(), 200);
}

#[tokio::test]
async fn held_stream_sends_keep_alive_comments() {
    let interval = Duration::from_millis(20);
    let lab =
        GatewayLab::start(DispatchLimits { headers_timeout: interval, heartbeat: interval, ..limits() })
            .await;
    lab.publish(&[("m", scaled_to_zero(), &[])]);
    let mut response = lab.chat(json!({"stream": true})).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let mut text = String::new();
    while text.matches(": still working\n\n").count() < 3 {
        text.push_str(std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap());
    }
    let engine = lab.engine("a", |_| hello());
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    text.push_str(&response.text().await.unwrap());
    let events = transcript(&text);
    assert_eq!(events.last().unwrap(), &json!("[DONE]"), "{events:?}");
    assert!(text.contains(" there"), "{text}");
}

/// More requests may be held than a replica admits at once: those it rejects stay held.
#[tokio::test]
async fn held_requests_survive_an_overloaded_replica() {
    let lab =
        GatewayLab::start(DispatchLimits { endpoint_backoff: Duration::from_millis(5), ..limits() }).await;
    lab.publish(&[("m", scaled_to_zero(), &[])]);
    let requests: Vec<_> = (0..4).map(|_| tokio::spawn(lab.chat(json!({})).send())).collect();
    wait_for_metric(&lab, &waiting_metric(4)).await;
    let attempts = AtomicUsize::new(0);
    let engine: ScriptedEngine = lab.engine("a", move |_| match attempts.fetch_add(1, Ordering::Relaxed) {
        0..9 => {
            let (kind, message) = (FailureKind::Overloaded, "full".into());
            vec![ScriptStep::Say(GenerationEvent::Failed(GenerationFailure { kind, message }))]
        }
        _ => hello(),
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    for request in requests {
        assert_eq!(request.await.unwrap().unwrap().status(), 200);
    }
    assert_eq!(engine.requests(), 13);
}
