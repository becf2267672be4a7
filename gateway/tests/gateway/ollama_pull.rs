//! Pulling models by Ollama's API, and how long they stay loaded.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use russet_gateway::routes::{DeploymentState, IdleLimits, ModelDetails};
use serde_json::{Value, json};

use crate::harness::{GatewayLab, access_key, hello, limits, wait_for_metric};
use crate::ollama::{hi, lines, plain, post, sent};

const WAITING: &str = r#"russet_gateway_num_requests_waiting{name="m",namespace="default"}"#;

fn status(status: &str) -> Value {
    json!({"status": status})
}

/// The model `m` scales to zero after 600 s, or where a request says so after two hours.
pub fn scales_to_zero(lab: &GatewayLab) {
    let limits = IdleLimits { idle: Duration::from_secs(600), max_idle: Duration::from_secs(7200) };
    lab.change(|table| table.deployments[0].idle_limits = Some(limits));
}

fn working() -> DeploymentState {
    DeploymentState::Working("copying 3 of 9 GiB".into())
}

#[tokio::test]
async fn a_model_that_is_served_is_pulled_already() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    for base in ["/api", "/api/api", "/v1/api", "/ollama/api", "/ollama/api/api"] {
        let response = post(&lab, &format!("{base}/pull"), json!({"model": "m:latest"})).await;
        assert_eq!(
            (response.status().as_u16(), &response.headers()["content-type"]),
            (200, &"application/x-ndjson".parse().unwrap())
        );
        let steps =
            ["pulling manifest", "verifying sha256 digest", "writing manifest", "success"].map(status);
        assert_eq!(lines(&response.text().await.unwrap()), steps, "{base}");
    }
    let (got, answer) = sent(&lab, "/api/pull", json!({"name": "m", "stream": false})).await;
    assert_eq!((got, answer, engine.requests()), (200, status("success"), 0));
}

#[tokio::test]
async fn a_pull_wakes_a_model_and_waits_until_it_is_ready() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", |_| hello());
    lab.publish(&[("m", working(), &[])]);
    let mut response = post(&lab, "/api/pull", json!({})).await;
    let mut text = String::new();
    while text.lines().count() < 2 {
        text.push_str(std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap());
    }
    let first = lines(&text);
    assert_eq!(first[..2], [status("pulling manifest"), status("waiting: copying 3 of 9 GiB")]);
    wait_for_metric(&lab, &format!("{WAITING} 1")).await;
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    text.push_str(&response.text().await.unwrap());
    assert_eq!(lines(&text).last(), Some(&status("success")));
    wait_for_metric(&lab, &format!("{WAITING} 0")).await;
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn a_client_that_leaves_its_pull_waits_no_more() {
    let lab = GatewayLab::start(limits()).await;
    lab.publish(&[("m", working(), &[])]);
    let response = post(&lab, "/api/pull", json!({})).await;
    wait_for_metric(&lab, &format!("{WAITING} 1")).await;
    drop(response);
    wait_for_metric(&lab, &format!("{WAITING} 0")).await;
}

#[tokio::test]
async fn a_pull_that_cannot_end_says_why() {
    let lab = GatewayLab::start(limits()).await;
    lab.publish(&[("m", DeploymentState::Halted("needs 9 GiB".into()), &[])]);
    let text = post(&lab, "/api/pull", json!({})).await.text().await.unwrap();
    let last = lines(&text).pop().unwrap();
    assert!(last["error"].as_str().unwrap().contains("needs 9 GiB"), "{text}");
    let (status, answer) = sent(&lab, "/api/pull", json!({"stream": false})).await;
    assert_eq!((status, &answer), (503, &last));
    // A name that nothing has, and a Model whose files nothing asks for.
    lab.change(|table| {
        table.models = BTreeMap::from([(("default".into(), "alone".into()), ModelDetails::default())]);
    });
    for (model, words) in [("nix", "russet run nix"), ("other/alone", "russet run other/alone")] {
        let (status, answer) = sent(&lab, "/api/pull", json!({"model": model})).await;
        assert!(status == 400 && answer["error"].as_str().unwrap().contains(words), "{answer}");
    }
    // Its progress is unknown without an API server.
    let mut response = post(&lab, "/api/pull", json!({"model": "alone"})).await;
    let first = response.chunk().await.unwrap().unwrap();
    assert!(first.starts_with(b"{\"status\":\"pulling manifest\"}"), "{first:?}");
}

#[tokio::test]
async fn a_pull_counts_towards_a_quota_and_within_a_key_s_models() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", |_| hello());
    lab.publish(&[("m", DeploymentState::Ready, &[&engine]), ("n", DeploymentState::Ready, &[&engine])]);
    lab.keys(&[access_key("one", "s", |spec| {
        spec.models = vec!["m".into()];
        spec.requests_per_minute = Some(2);
    })]);
    let pull = |model: &str| {
        let body = json!({"model": model, "stream": false});
        lab.client.post(lab.url("/api/pull")).bearer_auth("s").json(&body).send()
    };
    assert_eq!(pull("n").await.unwrap().status(), 403);
    assert_eq!(pull("m").await.unwrap().status(), 200);
    assert_eq!(pull("m").await.unwrap().status(), 429);
}

#[tokio::test]
async fn a_request_without_a_prompt_wakes_a_model_that_sleeps() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", |_| hello());
    for (path, empty) in [
        ("/api/generate", json!({"response": ""})),
        ("/api/chat", json!({"message": {"role": "assistant", "content": ""}})),
    ] {
        lab.publish(&[("m", DeploymentState::Working("it is scaled to zero".into()), &[])]);
        scales_to_zero(&lab);
        let (answered, ()) = tokio::join!(sent(&lab, path, json!({"keep_alive": -1})), async {
            wait_for_metric(&lab, &format!("{WAITING} 1")).await;
            lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
        });
        let mut expected = empty;
        for (name, value) in [("model", json!("m")), ("done", json!(true)), ("done_reason", json!("load"))] {
            expected[name] = value;
        }
        assert_eq!((answered.0, plain(answered.1)), (200, expected), "{path}");
    }
    assert_eq!(engine.requests(), 0);
    // One that cannot wake says why, and an unload wakes none.
    lab.publish(&[("m", DeploymentState::Halted("needs 9 GiB".into()), &[])]);
    let (status, answer) = sent(&lab, "/api/generate", json!({})).await;
    assert!(status == 503 && answer["error"].as_str().unwrap().contains("needs 9 GiB"), "{answer}");
    let (status, answer) = sent(&lab, "/api/generate", json!({"keep_alive": 0})).await;
    assert_eq!((status, &answer["done_reason"]), (200, &json!("unload")));
}

#[tokio::test]
async fn keep_alive_says_when_a_model_scales_to_zero() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    let left = async || {
        let ps = lab.client.get(lab.url("/api/ps")).send().await.unwrap().json::<Value>().await.unwrap();
        let expires: Timestamp = ps["models"][0]["expires_at"].as_str().unwrap().parse().unwrap();
        expires.duration_since(Timestamp::now())
    };
    let chat = async |keep_alive: Value| {
        let body = json!({"messages": hi(), "stream": false, "keep_alive": keep_alive});
        let response = post(&lab, "/api/chat", body).await;
        let ignored = response.headers().get("x-russet-ignored-parameters").cloned();
        assert_eq!(response.status(), 200);
        let _ = response.bytes().await.unwrap();
        ignored
    };
    // It stays, whatever a request says.
    assert_eq!(chat(json!("5m")).await.unwrap(), "keep_alive");
    assert!(left().await > SignedDuration::from_hours(24 * 365));
    scales_to_zero(&lab);
    let hour = SignedDuration::from_hours(1);
    for (keep_alive, least, most) in [
        (Value::Null, SignedDuration::from_mins(5), SignedDuration::from_mins(10)),
        (json!("1h30m"), hour, hour * 2),
        (json!(-1), hour, hour * 2),
        (json!(60), SignedDuration::ZERO, SignedDuration::from_mins(1)),
    ] {
        assert_eq!(chat(keep_alive.clone()).await, None);
        let left = left().await;
        assert!(left > least && left <= most, "{keep_alive}: {left:?}");
    }
    let (_, answer) = sent(&lab, "/api/generate", json!({"keep_alive": 0})).await;
    assert_eq!(answer["done_reason"], "unload");
    assert!(left().await <= SignedDuration::ZERO);
}

#[tokio::test]
async fn a_vector_keeps_its_model_as_an_answer_does() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(vec![]);
    for path in ["/api/embed", "/api/embeddings"] {
        let body = json!({"input": "a", "prompt": "a", "keep_alive": "1h"});
        let listed = post(&lab, path, body.clone()).await.headers()["x-russet-ignored-parameters"].clone();
        assert!(listed.to_str().unwrap().split(',').any(|name| name == "keep_alive"), "{listed:?}");
    }
    let (status, answer) = sent(&lab, "/api/embed", json!({"input": "a", "keep_alive": "soon"})).await;
    assert!(status == 400 && answer["error"].as_str().unwrap().contains("`keep_alive`"), "{answer}");
}
