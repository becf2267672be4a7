//! Anthropic's dialect over HTTP: messages whole and streamed, tools, thinking, errors, keys and the list of models.

use std::time::Duration;

use futures::StreamExt as _;
use russet_gateway::dispatch::DispatchLimits;
use russet_gateway::routes::DeploymentState;
use russet_wire::conversation::ToolCall;
use russet_wire::event::{Delta, FailureKind, FinishReason, GenerationEvent, GenerationFailure};
use russet_wire::request::GenerationRequest;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::harness::{GatewayLab, ScriptStep, access_key, finished, hello, limits, started, token};

/// A request for a message of the model `m`, with additional fields.
fn message(lab: &GatewayLab, more: Value) -> reqwest::RequestBuilder {
    let mut body = json!({"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    let request = lab.client.post(lab.url("/v1/messages?beta=true")).json(&body);
    request.header("anthropic-version", "2023-06-01").header("anthropic-beta", "no-such-beta-2099-01-01")
}

fn add(delta: Delta) -> ScriptStep {
    ScriptStep::Say(GenerationEvent::Token { id: 1, delta })
}

fn thinking(reasoning: &str) -> ScriptStep {
    add(Delta { reasoning: reasoning.into(), ..Delta::default() })
}

fn calls(calls: &[(&str, &str)]) -> ScriptStep {
    let call = |(id, arguments): &(&str, &str)| ToolCall {
        id: (*id).into(),
        name: "weather".into(),
        arguments: (*arguments).into(),
    };
    add(Delta { tool_calls: calls.iter().map(call).collect(), ..Delta::default() })
}

fn fail(kind: FailureKind, message: &str) -> ScriptStep {
    ScriptStep::Say(GenerationEvent::Failed(GenerationFailure { kind, message: message.into() }))
}

/// The usage of every response, as its script finishes.
fn usage() -> Value {
    json!({
        "input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 3,
    })
}

/// The error of a response, checked for Anthropic's shape.
async fn error(response: reqwest::Response) -> (u16, String, String) {
    let status = response.status().as_u16();
    let id = response.headers()["request-id"].to_str().unwrap().to_owned();
    assert_eq!(response.headers()["x-request-id"], id.as_str());
    let body: Value = response.json().await.unwrap();
    assert_eq!((&body["type"], &body["request_id"]), (&json!("error"), &json!(id)), "{body}");
    let text = |name: &str| body["error"][name].as_str().unwrap().to_owned();
    (status, text("type"), text("message"))
}

#[tokio::test]
async fn a_whole_message_has_every_field() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    let response = message(&lab, json!({"metadata": {"user_id": "u"}})).send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["x-russet-ignored-parameters"], "metadata");
    assert!(response.headers()["request-id"].to_str().unwrap().starts_with("req_"));
    let mut body: Value = response.json().await.unwrap();
    assert!(body["id"].take().as_str().unwrap().starts_with("msg_"));
    assert_eq!(
        body,
        json!({
            "id": null, "type": "message", "role": "assistant", "model": "m",
            "content": [{"type": "text", "text": "Hello there"}],
            "stop_reason": "end_turn", "stop_sequence": null, "usage": usage(),
        })
    );
}

#[tokio::test]
async fn calls_and_thoughts_of_a_whole_message_are_blocks() {
    let lab = GatewayLab::start(limits()).await;
    let steps = vec![
        started(),
        thinking("Look."),
        calls(&[("c1", r#"{"b": 1, "a": 2.0}"#)]),
        finished(FinishReason::Stop),
    ];
    let _engine = lab.only_engine(steps);
    let body: Value = message(&lab, json!({})).send().await.unwrap().json().await.unwrap();
    assert_eq!(
        (&body["stop_reason"], &body["content"]),
        (
            &json!("tool_use"),
            &json!([
                {"type": "thinking", "thinking": "Look.", "signature": "cnVzc2V0"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"b": 1, "a": 2.0}},
            ])
        )
    );
}

#[tokio::test]
async fn engine_receives_a_turn_of_an_agent() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let more = json!({
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.36; cch=1;"},
            {"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [{"name": "weather", "input_schema": {"type": "object", "properties": {"z": {}, "a": {}}}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Look.", "signature": "cnVzc2V0"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"z": 1, "a": 2}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "hot"}]},
                {"type": "text", "text": "And now?"},
            ]},
        ],
    });
    let response = message(&lab, more).send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(!response.headers().contains_key("x-russet-ignored-parameters"));
    let received = engine.received.lock().unwrap().remove(0);
    let request = GenerationRequest::from(received);
    let turns: Vec<(&str, &str)> =
        request.messages.iter().map(|one| (one.role.as_str(), one.content.as_str())).collect();
    let expected =
        [("system", "You code."), ("user", "hi"), ("assistant", ""), ("tool", "hot"), ("user", "And now?")];
    assert_eq!(turns, expected);
    assert_eq!(request.messages[2].reasoning, "Look.");
    assert_eq!(request.messages[2].tool_calls[0].arguments, r#"{"z":1,"a":2}"#);
    assert_eq!((request.messages[3].name.as_str(), request.single_tool_call), ("weather", true));
    let schema = r#"{"type":"object","properties":{"z":{},"a":{}}}"#;
    assert_eq!(request.tools[0].parameters.as_deref(), Some(schema));
    assert_eq!((request.thinking_budget, request.max_tokens), (Some(2000), Some(64)));
    assert_eq!(request.template_arguments, r#"{"enable_thinking":true,"thinking":true}"#);
}

#[tokio::test]
async fn every_refusal_has_anthropics_shape_and_status() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let image = json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]});
    for (more, status, kind, words) in [
        (json!({"max_tokens": null}), 400, "invalid_request_error", "`max_tokens` is missing"),
        (image, 400, "invalid_request_error", "`messages[0].content[0].type` is \"image\""),
        (json!({"container": "c"}), 400, "invalid_request_error", "`container` is not supported"),
        (json!({"model": "nix"}), 404, "not_found_error", "nix"),
    ] {
        let (found, name, text) = error(message(&lab, more).send().await.unwrap()).await;
        assert_eq!((found, name.as_str()), (status, kind), "{text}");
        assert!(text.contains(words), "{text}");
    }
    for (method, path, status, kind) in [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/nix", 404, "not_found_error"),
        ("GET", "/v1/messages/batches", 404, "not_found_error"),
    ] {
        let request = lab.client.request(method.parse().unwrap(), lab.url(path));
        let (found, name, text) = error(request.send().await.unwrap()).await;
        assert_eq!((found, name.as_str()), (status, kind), "{method} {path}: {text}");
    }
    assert_eq!(engine.requests(), 0, "no engine saw any of these");
}

#[tokio::test]
async fn failures_of_engines_have_anthropics_shape() {
    let lab = GatewayLab::start(limits()).await;
    let overflow = "This model's maximum context length is 64 tokens. However, your messages resulted in 70 tokens. Shorten the conversation.";
    for (failure, status, kind, words) in [
        (
            fail(FailureKind::ContextLengthExceeded, overflow),
            400,
            "invalid_request_error",
            "prompt is too long: 70 tokens > 64 maximum",
        ),
        (fail(FailureKind::InvalidRequest, "no such role"), 400, "invalid_request_error", "no such role"),
        (fail(FailureKind::Internal, "a bug"), 500, "api_error", "a bug"),
        (fail(FailureKind::DeadlineExceeded, "too late"), 504, "timeout_error", "too late"),
    ] {
        let _engine = lab.only_engine(vec![failure]);
        let response = message(&lab, json!({})).send().await.unwrap();
        assert_eq!(response.headers().contains_key("x-should-retry"), status >= 500, "{words}");
        let (found, name, text) = error(response).await;
        assert_eq!((found, name.as_str()), (status, kind), "{text}");
        assert!(text.starts_with(words), "{text}");
    }
    lab.publish(&[("m", DeploymentState::Halted("the Model is missing".into()), &[])]);
    let (status, kind, text) = error(message(&lab, json!({})).send().await.unwrap()).await;
    assert_eq!((status, kind.as_str()), (529, "overloaded_error"), "{text}");
    assert!(text.contains("the Model is missing"), "{text}");
}

#[tokio::test]
async fn keys_of_messages_are_accepted_in_both_headers() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    lab.keys(&[
        access_key("one", "s-one", |spec| spec.requests_per_minute = Some(60)),
        access_key("other", "s-other", |spec| spec.models = vec!["other".into()]),
    ]);
    let with = |name: &'static str, value: &'static str| message(&lab, json!({})).header(name, value).send();
    for (name, value) in [("x-api-key", "s-one"), ("authorization", "Bearer s-one")] {
        let response = with(name, value).await.unwrap();
        assert_eq!(response.status(), 200, "{name}");
        let headers = response.headers();
        assert_eq!(headers["anthropic-ratelimit-requests-limit"], "60");
        let remaining = headers["anthropic-ratelimit-requests-remaining"].to_str().unwrap();
        assert!(remaining.parse::<u32>().unwrap() < 60, "{remaining}");
        let reset = headers["anthropic-ratelimit-requests-reset"].to_str().unwrap();
        assert!(reset.parse::<jiff::Timestamp>().is_ok() && reset.ends_with('Z'), "{reset}");
    }
    for (name, value, status, kind) in [
        ("x-api-key", "s-wrong", 401, "authentication_error"),
        ("accept", "*/*", 401, "authentication_error"),
        ("x-api-key", "s-other", 403, "permission_error"),
    ] {
        let (found, name, text) = error(with(name, value).await.unwrap()).await;
        assert_eq!((found, name.as_str()), (status, kind), "{text}");
    }
}

#[tokio::test]
async fn a_stream_of_a_slow_engine_has_pings() {
    let lab = GatewayLab::start(DispatchLimits {
        headers_timeout: Duration::from_millis(10),
        heartbeat: Duration::from_millis(10),
        ..limits()
    })
    .await;
    let go = CancellationToken::new();
    let steps = [vec![started(), ScriptStep::Until(go.clone())], hello()[1..].to_vec()].concat();
    let _engine = lab.only_engine(steps);
    let mut body = message(&lab, json!({"stream": true})).send().await.unwrap().bytes_stream();
    let mut text = String::new();
    while text.matches("event: ping\ndata: {\"type\":\"ping\"}\n\n").count() < 2 {
        text.push_str(std::str::from_utf8(&body.next().await.unwrap().unwrap()).unwrap());
    }
    assert!(text.starts_with("event: message_start\n"), "{text}");
    go.cancel();
    while let Some(bytes) = body.next().await {
        text.push_str(std::str::from_utf8(&bytes.unwrap()).unwrap());
    }
    assert!(text.contains("Hello") && text.ends_with("data: {\"type\":\"message_stop\"}\n\n"), "{text}");
}

#[tokio::test]
async fn a_client_that_leaves_a_message_frees_its_slot() {
    let lab = GatewayLab::start(limits()).await;
    for streamed in [true, false] {
        let engine = lab.only_engine(vec![started(), token("x"), ScriptStep::Hang]);
        let request = tokio::spawn(message(&lab, json!({"stream": streamed})).send());
        engine.running(1).await;
        if streamed {
            let mut body = request.await.unwrap().unwrap().bytes_stream();
            let first = body.next().await.unwrap().unwrap();
            assert!(first.starts_with(b"event: message_start\n"), "{first:?}");
            drop(body);
        } else {
            request.abort();
        }
        engine.running(0).await;
    }
}

#[tokio::test]
async fn models_are_pages_for_clients_of_anthropic() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", |_| hello());
    lab.publish(&[("m", DeploymentState::Ready, &[&engine]), ("late", DeploymentState::Ready, &[])]);
    let get = |path: &str| lab.client.get(lab.url(path)).header("anthropic-version", "2023-06-01").send();
    let model = |id: &str| {
        json!({
            "type": "model", "id": id, "display_name": id, "created_at": "2023-11-14T22:13:20Z",
            "max_input_tokens": 8192,
        })
    };
    for (path, data, has_more) in [
        ("/v1/models", vec!["m", "late"], false),
        ("/v1/models?limit=1", vec!["m"], true),
        ("/v1/models?limit=1&after_id=m", vec!["late"], false),
    ] {
        let page: Value = get(path).await.unwrap().json().await.unwrap();
        let expected = json!({
            "data": data.iter().map(|id| model(id)).collect::<Value>(), "has_more": has_more,
            "first_id": data.first(), "last_id": data.last(),
        });
        assert_eq!(page, expected, "{path}");
    }
    let one: Value = get("/v1/models/default/m").await.unwrap().json().await.unwrap();
    assert_eq!(one, model("default/m"));
    for (path, status, kind) in [
        ("/v1/models/nix", 404, "not_found_error"),
        ("/v1/models/%ff", 400, "invalid_request_error"),
        ("/v1/models?limit=0", 400, "invalid_request_error"),
    ] {
        let (found, name, text) = error(get(path).await.unwrap()).await;
        assert_eq!((found, name.as_str()), (status, kind), "{path}: {text}");
    }
    lab.keys(&[access_key("one", "s-one", |_| {})]);
    let (status, kind, _) = error(get("/v1/models").await.unwrap()).await;
    assert_eq!((status, kind.as_str()), (401, "authentication_error"));
    let other = lab.client.get(lab.url("/v1/models")).send().await.unwrap();
    assert_eq!(other.json::<Value>().await.unwrap()["error"]["code"], "invalid_api_key");
}

#[tokio::test]
async fn a_probe_of_the_root_finds_a_server() {
    let lab = GatewayLab::start(limits()).await;
    for (method, path, status) in [("HEAD", "/", 200), ("GET", "/", 200), ("HEAD", "/nix", 404)] {
        let request = lab.client.request(method.parse().unwrap(), lab.url(path));
        assert_eq!(request.send().await.unwrap().status(), status, "{method} {path}");
    }
}

#[tokio::test]
async fn tokens_are_counted_by_an_engine_with_the_deployments_rest() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", |request| match request.messages[0].content.as_str() {
        "too long" => vec![fail(FailureKind::InvalidRequest, "the template refuses it")],
        _ => vec![],
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    let count = |body: Value| {
        let request = lab.client.post(lab.url("/v1/messages/count_tokens?beta=true")).json(&body);
        request.header("anthropic-version", "2023-06-01").send()
    };
    let say = |text: &str| json!([{"role": "user", "content": text}]);
    // No `max_tokens`, and what a message has: a system prompt, tools, thinking.
    let whole = json!({
        "model": "m", "system": "Be brief.", "messages": say("What is 17 + 25?"),
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "thinking": {"type": "enabled", "budget_tokens": 1024},
    });
    let response = count(whole).await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(
        response.json::<Value>().await.unwrap(),
        json!({"input_tokens": "Be brief.What is 17 + 25?".len()})
    );
    let (status, kind, message) =
        error(count(json!({"model": "m", "messages": say("too long")})).await.unwrap()).await;
    assert_eq!((status, kind.as_str()), (400, "invalid_request_error"));
    assert!(message.contains("the template refuses it"), "{message}");
    for (body, status, words) in [
        (json!({"model": "nobody", "messages": say("hi")}), 404, "nobody"),
        (json!({"model": "m"}), 400, "messages"),
        (json!({"model": "m", "messages": say("hi"), "container": "c"}), 400, "container"),
    ] {
        let (found, _, message) = error(count(body).await.unwrap()).await;
        assert!(found == status && message.contains(words), "{found}: {message}");
    }
}
