//! Responses when nothing goes wrong.

use russet_gateway::routes::DeploymentState;
use russet_wire::event::FinishReason;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::harness::{
    GatewayLab, ScriptStep, chunk, finished, hello, limits, normalize, started, token, transcript,
};

/// The usage of every response of [`hello`], in OpenAI's format.
fn usage() -> Value {
    json!({
        "prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    })
}

#[tokio::test]
async fn a_stream_says_role_texts_and_finish_reason_in_openais_order() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    let response = lab.chat(json!({"stream": true})).send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(
        transcript(&response.text().await.unwrap()),
        [
            chunk(json!({"role": "assistant", "content": ""}), None),
            chunk(json!({"content": "Hello"}), None),
            chunk(json!({"content": " there"}), None),
            chunk(json!({}), Some("stop")),
            json!("[DONE]"),
        ]
    );
}

#[tokio::test]
async fn a_stream_ends_with_its_usage_when_asked() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(vec![started(), token("Hi"), finished(FinishReason::Length)]);
    let request = lab.chat(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let text = request.send().await.unwrap().text().await.unwrap();
    let with_usage = |mut chunk: Value, usage: Value| {
        chunk["usage"] = usage;
        chunk
    };
    let mut last = chunk(json!({}), None);
    last["choices"] = json!([]);
    let usage = usage();
    assert_eq!(
        transcript(&text),
        [
            with_usage(chunk(json!({"role": "assistant", "content": ""}), None), Value::Null),
            with_usage(chunk(json!({"content": "Hi"}), None), Value::Null),
            with_usage(chunk(json!({}), Some("length")), Value::Null),
            with_usage(last, usage),
            json!("[DONE]"),
        ]
    );
}

#[tokio::test]
async fn a_whole_answer_has_every_field() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    let response = lab.chat(json!({"store": true})).send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["x-russet-ignored-parameters"], "store");
    assert!(response.headers()["x-request-id"].to_str().unwrap().starts_with("req_"));
    assert_eq!(
        normalize(response.json().await.unwrap()),
        json!({
            "id": "ID", "object": "chat.completion", "created": 0, "model": "m",
            "choices": [{
                "index": 0, "logprobs": null, "finish_reason": "stop",
                "message": {"role": "assistant", "content": "Hello there", "refusal": null},
            }],
            "usage": usage(),
        })
    );
}

#[tokio::test]
async fn an_answer_without_a_token_is_still_an_answer() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(vec![started(), finished(FinishReason::Stop)]);
    let whole: Value = lab.chat(json!({})).send().await.unwrap().json().await.unwrap();
    assert_eq!(whole["choices"][0]["message"]["content"], "");
    let text = lab.chat(json!({"stream": true})).send().await.unwrap().text().await.unwrap();
    assert_eq!(transcript(&text).len(), 3, "{text}");
}

#[tokio::test]
async fn engine_receives_the_request_under_the_gateway_certificate() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let more = json!({
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "hé"}]}],
        "max_tokens": 5, "temperature": 0.5, "seed": 3, "stop": "END", "ignore_eos": true,
    });
    let response = lab.chat(more).header("x-request-id", "mine-1").send().await.unwrap();
    assert_eq!(
        (response.status().as_u16(), &response.headers()["x-request-id"]),
        (200, &"mine-1".parse().unwrap())
    );
    let _ = response.bytes().await.unwrap();
    let received = engine.received.lock().unwrap().clone();
    assert_eq!(received.len(), 1);
    let request = russet_wire::request::GenerationRequest::from(received[0].clone());
    assert_eq!(request.messages[1].content, "hé");
    assert_eq!(
        (request.max_tokens, request.sampling.temperature, request.sampling.seed),
        (Some(5), 0.5, Some(3))
    );
    assert_eq!((request.stop, request.ignore_eos), (vec!["END".to_owned()], true));
    assert_ne!(request.id, "mine-1", "two clients may choose the same id");
    assert_eq!(*engine.callers.lock().unwrap(), ["russet:gateway"]);
}

#[tokio::test]
async fn requests_go_to_the_least_busy_engine() {
    let lab = GatewayLab::start(limits()).await;
    let go = CancellationToken::new();
    let steps = |go: &CancellationToken| {
        let go = go.clone();
        move |_: &russet_rpc::engine::GenerateRequest| {
            vec![started(), ScriptStep::Until(go.clone()), token("x"), finished(FinishReason::Stop)]
        }
    };
    let (one, two) = (lab.engine("a", steps(&go)), lab.engine("b", steps(&go)));
    lab.publish(&[("m", DeploymentState::Ready, &[&one, &two])]);
    let first = tokio::spawn(lab.chat(json!({})).send());
    one.running(1).await;
    let second = tokio::spawn(lab.chat(json!({})).send());
    two.running(1).await;
    go.cancel();
    for response in [first, second] {
        assert_eq!(response.await.unwrap().unwrap().status(), 200);
    }
    assert_eq!((one.requests(), two.requests()), (1, 1));
}

#[tokio::test]
async fn models_are_listed_with_their_state_over_http_1_and_2() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", |_| hello());
    lab.publish(&[
        ("m", DeploymentState::Ready, &[&engine]),
        ("late", DeploymentState::Working("copying 3 of 9 GiB".into()), &[]),
    ]);
    let h2 = reqwest::Client::builder().http2_prior_knowledge().no_proxy().build().unwrap();
    for client in [&lab.client, &h2] {
        let list: Value = client.get(lab.url("/v1/models")).send().await.unwrap().json().await.unwrap();
        let model = |id: &str, ready: bool, message: &str| {
            json!({
                "id": id, "object": "model", "created": 1_700_000_000, "owned_by": "russet",
                "context_length": 8192, "max_model_len": 8192, "max_input_tokens": 8192,
                "meta": {"n_ctx_train": 8192},
                "russet": {"deployments": [format!("default/{id}")], "ready": ready, "message": message},
            })
        };
        let late = model("late", false, "copying 3 of 9 GiB");
        assert_eq!(list, json!({"object": "list", "data": [model("m", true, ""), late]}));
        let one: Value =
            client.get(lab.url("/v1/models/default/m")).send().await.unwrap().json().await.unwrap();
        assert_eq!(one["id"], "default/m");
    }
}

#[tokio::test]
async fn local_pages_may_send_requests_from_a_browser() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    let url = lab.url("/v1/chat/completions");
    let preflight =
        lab.client.request(reqwest::Method::OPTIONS, &url).header("origin", "http://localhost:3000");
    let preflight = preflight.send().await.unwrap();
    assert_eq!(
        (preflight.status().as_u16(), &preflight.headers()["access-control-allow-origin"]),
        (204, &"http://localhost:3000".parse().unwrap())
    );
    let response = lab.chat(json!({})).header("origin", "http://localhost:3000").send().await.unwrap();
    assert_eq!(
        (response.status().as_u16(), &response.headers()["access-control-allow-origin"]),
        (200, &"http://localhost:3000".parse().unwrap())
    );
}

#[tokio::test]
async fn requests_are_counted() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    let _ = lab.chat(json!({})).send().await.unwrap().bytes().await.unwrap();
    let _ = lab.chat(json!({"model": "nix"})).send().await.unwrap().bytes().await.unwrap();
    let metrics = lab.metrics().await;
    for line in [
        "russet_gateway_request_total{model_name=\"m\"} 1",
        "russet_gateway_request_total{model_name=\"unknown\"} 1",
        "russet_gateway_request_error_total{error_code=\"model_not_found\",model_name=\"unknown\"} 1",
        "russet_gateway_request_ttft_seconds_count{model_name=\"m\"} 1",
        "russet_gateway_generation_tokens_total{model_name=\"m\"} 3",
        "russet_gateway_flow_control_requests_total{outcome=\"dispatched\"} 1",
        "russet_gateway_request_running{model_name=\"m\"} 0",
    ] {
        assert!(metrics.lines().any(|one| one == line), "{line} is not in\n{metrics}");
    }
    for path in ["/healthz", "/readyz"] {
        assert_eq!(lab.client.get(lab.url(path)).send().await.unwrap().status(), 200);
    }
}

#[tokio::test]
async fn many_short_answers_share_a_connection_that_stays() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    // HTTP/2 servers close a connection on which too many streams were reset within a short time.
    for _ in 0..20 {
        let requests = (0..100).map(|_| lab.chat(json!({})).send());
        for response in futures::future::join_all(requests).await {
            assert_eq!(response.unwrap().status(), 200);
        }
    }
    let metrics = lab.metrics().await;
    assert!(!metrics.contains("russet_gateway_request_retry_total{"), "{metrics}");
}

#[tokio::test]
async fn the_adapter_behind_the_models_name_reaches_the_engine() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    lab.change(|table| {
        let deployment = &mut table.deployments[0];
        deployment.adapters.insert("pirate".into(), "pirate-lora".into());
        deployment.endpoints[0].adapters = deployment.adapters.clone();
    });
    for (model, adapter) in [("m:pirate", "pirate"), ("m", "")] {
        let response = lab.chat(json!({"model": model})).send().await.unwrap();
        let answer: Value = response.json().await.unwrap();
        assert_eq!(answer["model"], model, "{answer}");
        assert_eq!(engine.received.lock().unwrap().last().unwrap().adapter, adapter);
    }
    let models: Value = reqwest::get(lab.url("/v1/models")).await.unwrap().json().await.unwrap();
    let ids: Vec<&str> =
        models["data"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["m", "m:pirate"]);
    let unknown = lab.chat(json!({"model": "m:sailor"})).send().await.unwrap();
    assert_eq!(unknown.status(), 404);
}
