//! Ollama's native API: chats, texts, vectors, and what its clients read of models.

use std::time::Duration;

use russet_gateway::dispatch::DispatchLimits;
use russet_gateway::routes::DeploymentState;
use russet_rpc::engine as pb;
use russet_wire::conversation::{Message, ToolCall};
use russet_wire::event::{Delta, FinishReason, GenerationEvent};
use russet_wire::request::{ContextOverflow, GenerationRequest, StructuredOutput};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::harness::{
    GatewayLab, ScriptStep, ScriptedEngine, access_key, finished, hello, limits, started, token,
};

/// Sends this body for the model `m`, unless it names another.
pub async fn post(lab: &GatewayLab, path: &str, body: Value) -> reqwest::Response {
    let mut all = json!({"model": "m"});
    for (name, value) in body.as_object().unwrap() {
        all[name] = value.clone();
    }
    lab.client.post(lab.url(path)).json(&all).send().await.unwrap()
}

pub async fn sent(lab: &GatewayLab, path: &str, body: Value) -> (u16, Value) {
    let response = post(lab, path, body).await;
    (response.status().as_u16(), response.json().await.unwrap())
}

pub fn hi() -> Value {
    json!([{"role": "user", "content": "hi"}])
}

/// The lines of a stream, without their times and durations, each of which is checked.
pub fn lines(text: &str) -> Vec<Value> {
    assert!(text.ends_with('\n'), "a line is cut off: {text:?}");
    text.lines().map(|line| plain(serde_json::from_str(line).unwrap())).collect()
}

/// Checks times and durations, and takes them out.
pub fn plain(mut value: Value) -> Value {
    let fields = value.as_object_mut().unwrap();
    if let Some(created) = fields.remove("created_at") {
        created.as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
    }
    let names = ["total_duration", "load_duration", "prompt_eval_duration", "eval_duration"];
    let durations = names.map(|name| fields.remove(name).map(|duration| duration.as_u64().unwrap()));
    if let [Some(total), Some(load), Some(prompt), Some(eval)] = durations {
        assert!(load == 0 && prompt > 0 && eval > 0 && total + 2 >= prompt + eval, "{durations:?}");
    }
    value
}

fn received(engine: &ScriptedEngine) -> GenerationRequest {
    engine.received.lock().unwrap().last().cloned().unwrap().into()
}

fn delta(delta: Delta) -> ScriptStep {
    ScriptStep::Say(GenerationEvent::Token { id: 1, delta })
}

#[tokio::test]
async fn a_chat_is_streamed_as_lines_with_counts_in_the_last() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let response = post(&lab, "/api/chat", json!({"messages": hi(), "keep_alive": "5m"})).await;
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "application/x-ndjson");
    assert_eq!(response.headers()["x-russet-ignored-parameters"], "keep_alive");
    let says = |content: &str| json!({"role": "assistant", "content": content});
    let part = |content: &str| json!({"model": "m", "message": says(content), "done": false});
    let last = json!({
        "model": "m", "message": says(""), "done": true, "done_reason": "stop",
        "prompt_eval_count": 7, "eval_count": 3,
    });
    let text = response.text().await.unwrap();
    assert_eq!(lines(&text), [part("Hello"), part(" there"), last]);
    assert_eq!(received(&engine).context_overflow, ContextOverflow::Shift);
}

#[tokio::test]
async fn a_whole_answer_is_one_object_with_counts() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(vec![started(), token("Hi"), finished(FinishReason::Length)]);
    let (status, answer) = sent(&lab, "/api/chat", json!({"messages": hi(), "stream": false})).await;
    let message = json!({"role": "assistant", "content": "Hi"});
    let expected = json!({
        "model": "m", "message": message, "done": true, "done_reason": "length",
        "prompt_eval_count": 7, "eval_count": 3,
    });
    assert_eq!((status, plain(answer)), (200, expected.clone()));
    let prompt = json!({"prompt": "hi", "system": "Be brief.", "stream": false});
    let (status, answer) = sent(&lab, "/api/generate", prompt).await;
    let mut text = expected;
    text.as_object_mut().unwrap().remove("message");
    text["response"] = json!("Hi");
    assert_eq!((status, plain(answer)), (200, text));
    assert_eq!(received(&engine).messages, [Message::new("system", "Be brief."), Message::new("user", "hi")]);
    let streamed =
        post(&lab, "/api/generate", json!({"prompt": "hi", "raw": true})).await.text().await.unwrap();
    assert_eq!(lines(&streamed)[0], json!({"model": "m", "response": "Hi", "done": false}));
    assert!(received(&engine).messages.is_empty() && received(&engine).raw_prompt.is_some());
}

#[tokio::test]
async fn tools_and_thoughts_come_as_objects_and_go_back() {
    let lab = GatewayLab::start(limits()).await;
    let call = ToolCall {
        id: "a1b2c3d4e".into(),
        name: "add".into(),
        arguments: "{\n \"b\": 25, \"a\": 17}".into(),
    };
    let thought = Delta { reasoning: "I add.".into(), ..Delta::default() };
    let calls = Delta { tool_calls: vec![call.clone()], ..Delta::default() };
    let engine = lab.only_engine(vec![started(), delta(thought), delta(calls), finished(FinishReason::Stop)]);
    let parameters =
        json!({"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}});
    let tools = json!([{"type": "function", "function": {"name": "add", "parameters": parameters}}]);
    let chat = json!({"messages": hi(), "tools": tools, "think": "high"});
    let streamed = post(&lab, "/api/chat", chat.clone()).await.text().await.unwrap();
    let streamed = lines(&streamed);
    assert_eq!(streamed[0]["message"], json!({"role": "assistant", "content": "", "thinking": "I add."}));
    let function = json!({"index": 0, "name": "add", "arguments": {"b": 25, "a": 17}});
    assert_eq!(streamed[1]["message"]["tool_calls"], json!([{"id": "a1b2c3d4e", "function": function}]));
    assert_eq!(streamed[2]["done_reason"], "stop");
    let request = received(&engine);
    assert_eq!(request.tools[0].name, "add");
    let arguments: Value = serde_json::from_str(&request.template_arguments).unwrap();
    assert_eq!(arguments, json!({"enable_thinking": true, "thinking": true, "reasoning_effort": "high"}));
    let mut whole = chat;
    whole["stream"] = json!(false);
    let (_, answer) = sent(&lab, "/api/chat", whole).await;
    // As a client sends it back: without the id of the call, of which the result has the tool's name.
    let mut message = answer["message"].clone();
    message["tool_calls"][0].as_object_mut().unwrap().remove("id");
    let history = json!([hi()[0], message, {"role": "tool", "tool_name": "add", "content": "42"}]);
    let _ = post(&lab, "/api/chat", json!({"messages": history})).await.text().await.unwrap();
    let messages = received(&engine).messages;
    assert_eq!(messages[1].reasoning, "I add.");
    let id = &messages[1].tool_calls[0].id;
    assert_eq!((messages[2].tool_call_id.as_str(), messages[2].name.as_str()), (id.as_str(), "add"));
    let sent_back: Value = serde_json::from_str(&messages[1].tool_calls[0].arguments).unwrap();
    assert_eq!(sent_back, json!({"a": 17, "b": 25}));
}

#[tokio::test]
async fn format_and_options_reach_the_engine() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let schema = json!({"type": "object", "properties": {"answer": {"type": "integer"}}});
    let options = json!({"temperature": 0, "seed": 3, "num_predict": 5, "stop": ["END"], "num_ctx": 2048});
    let chat =
        json!({"messages": hi(), "stream": false, "format": schema, "options": options, "truncate": false});
    let response = post(&lab, "/api/chat", chat).await;
    assert_eq!(response.headers()["x-russet-ignored-parameters"], "options.num_ctx");
    assert_eq!(response.status(), 200);
    let request = received(&engine);
    assert_eq!(request.structured_output, Some(StructuredOutput::JsonSchema(schema.to_string())));
    assert_eq!((request.sampling.temperature, request.sampling.seed), (0.0, Some(3)));
    assert_eq!((request.max_tokens, request.stop), (Some(5), vec!["END".to_owned()]));
    assert_eq!(request.context_overflow, ContextOverflow::Refuse);
    let json = post(&lab, "/api/generate", json!({"prompt": "hi", "format": "json"})).await;
    assert_eq!(json.status(), 200);
    let _ = json.bytes().await.unwrap();
    assert_eq!(received(&engine).structured_output, Some(StructuredOutput::JsonObject));
}

#[tokio::test]
async fn a_request_without_a_prompt_asks_no_engine() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let message = json!({"role": "assistant", "content": ""});
    for (path, body, mut expected) in [
        ("/api/chat", json!({}), json!({"message": message, "done_reason": "load"})),
        (
            "/api/chat",
            json!({"messages": [], "keep_alive": 0}),
            json!({"message": message, "done_reason": "unload"}),
        ),
        ("/api/generate", json!({"prompt": ""}), json!({"response": "", "done_reason": "load"})),
        ("/api/generate", json!({"keep_alive": "0s"}), json!({"response": "", "done_reason": "unload"})),
    ] {
        expected["model"] = json!("m");
        expected["done"] = json!(true);
        let (status, answer) = sent(&lab, path, body.clone()).await;
        assert_eq!((status, plain(answer)), (200, expected), "{path} {body}");
    }
    let (status, answer) = sent(&lab, "/api/chat", json!({"model": "nix"})).await;
    assert_eq!((status, answer), (404, json!({"error": "model 'nix' not found; existing models: m"})));
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn errors_are_texts_with_a_status_and_reach_no_engine() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let image = json!([{"role": "user", "content": "hi", "images": ["aGk="]}]);
    for (path, body, status, words) in [
        ("/api/chat", json!({"model": "nix", "messages": hi()}), 404, "model 'nix' not found"),
        ("/api/chat", json!({"messages": image}), 400, "messages[0].images"),
        ("/api/chat", json!({"messages": hi(), "options": {"mirostat": 1}}), 400, "`mirostat`"),
        ("/api/chat", json!({"messages": hi(), "format": "xml"}), 400, "`format`"),
        ("/api/chat", json!({"messages": hi(), "think": "some"}), 400, "`think`"),
        ("/api/generate", json!({"prompt": "hi", "suffix": "end"}), 400, "`suffix`"),
        ("/api/generate", json!({"prompt": "hi", "context": [1]}), 400, "`context`"),
        ("/api/embed", json!({"input": ""}), 400, "`input`"),
        ("/api/embed", json!({"input": "a", "model": "nix"}), 404, "model 'nix' not found"),
        ("/api/embeddings", json!({"input": "a"}), 400, "`prompt`"),
        ("/api/show", json!({"model": "nix"}), 404, "model 'nix' not found"),
        ("/api/show", json!({"model": 7}), 400, "`model`"),
        ("/api/pull", json!({"model": "nix"}), 400, "russet run nix"),
        ("/api/push", json!({}), 400, "/api/push is not supported"),
        ("/api/create", json!({"from": "m"}), 400, "kubectl"),
        ("/api/copy", json!({}), 400, "ModelRoute"),
        ("/api/blobs/sha256:00", json!({}), 400, "/api/blobs is not supported"),
        ("/api/nothing", json!({}), 404, "no such path: POST /api/nothing"),
        ("/ollama/api/nothing", json!({}), 404, "no such path"),
        ("/api/tags", json!({}), 405, "POST is not allowed"),
    ] {
        let (got, answer) = sent(&lab, path, body.clone()).await;
        let error = answer["error"].as_str().unwrap();
        assert!(got == status && error.contains(words), "{path} {body}: {got} {answer}");
        assert_eq!(answer.as_object().unwrap().len(), 1, "{answer}");
    }
    let delete = lab.client.delete(lab.url("/api/delete")).json(&json!({"model": "m"})).send().await.unwrap();
    assert_eq!(delete.status(), 400);
    assert!(delete.json::<Value>().await.unwrap()["error"].as_str().unwrap().contains("russet delete"));
    let broken = lab.client.post(lab.url("/api/chat")).body("{").send().await.unwrap();
    assert_eq!(broken.status(), 400);
    assert!(broken.json::<Value>().await.unwrap()["error"].as_str().unwrap().contains("not JSON"));
    // What LM Studio has there, which clients probe for.
    for path in ["/api/v0/models", "/api/v1/models"] {
        assert_eq!(lab.client.get(lab.url(path)).send().await.unwrap().status(), 404, "{path}");
    }
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn a_long_wait_has_empty_lines_and_can_end_in_an_error() {
    let interval = Duration::from_millis(20);
    let lab =
        GatewayLab::start(DispatchLimits { headers_timeout: interval, heartbeat: interval, ..limits() })
            .await;
    let go = CancellationToken::new();
    let broken = ScriptStep::Break(tonic::Code::Internal, "a bug");
    let _engine = lab.only_engine(vec![started(), ScriptStep::Until(go.clone()), token("x"), broken]);
    let mut response = post(&lab, "/api/chat", json!({"messages": hi()})).await;
    let mut text = std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap().to_owned();
    go.cancel();
    text.push_str(&response.text().await.unwrap());
    let lines = lines(&text);
    let keep_alive = json!({"model": "m", "message": {"role": "assistant", "content": ""}, "done": false});
    assert_eq!(lines[0], keep_alive);
    let last = lines.last().unwrap().as_object().unwrap();
    assert!(last.len() == 1 && last["error"].is_string(), "{last:?}");
}

#[tokio::test]
async fn a_client_that_leaves_frees_the_slot() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(vec![started(), token("x"), ScriptStep::Hang]);
    let mut response = post(&lab, "/api/chat", json!({"messages": hi()})).await;
    assert!(response.chunk().await.unwrap().unwrap().ends_with(b"\n"));
    engine.running(1).await;
    drop(response);
    engine.running(0).await;
    assert_eq!(engine.requests(), 1);
}

#[tokio::test]
async fn vectors_come_in_both_forms() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(vec![]);
    let (status, answer) =
        sent(&lab, "/api/embed", json!({"input": ["a", "bcd"], "dimensions": 2, "options": {}})).await;
    let vectors = json!([[1.0, 1.0], [3.0, 3.0]]);
    let expected = json!({"model": "m", "embeddings": vectors, "prompt_eval_count": 4});
    assert_eq!((status, plain(answer)), (200, expected));
    let (status, answer) = sent(&lab, "/api/embeddings", json!({"prompt": "ab"})).await;
    assert_eq!((status, answer), (200, json!({"embedding": [2.0, 2.0, 2.0]})));
    let (_, answer) = sent(&lab, "/api/embed", json!({"input": "abc", "truncate": false})).await;
    assert_eq!(answer["embeddings"], json!([[3.0, 3.0, 3.0]]));
    assert_eq!(engine.requests(), 3);
}

#[tokio::test]
async fn paths_that_clients_double_lead_to_the_same() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    for base in ["/api", "/api/api", "/v1/api", "/ollama/api", "/ollama/api/api"] {
        let chat = json!({"messages": hi(), "stream": false});
        let (status, answer) = sent(&lab, &format!("{base}/chat"), chat).await;
        assert_eq!((status, &answer["message"]["content"]), (200, &json!("Hello there")), "{base}");
        let tags = lab.client.get(lab.url(&format!("{base}/tags"))).send().await.unwrap();
        assert_eq!(tags.json::<Value>().await.unwrap()["models"][0]["name"], "m", "{base}");
        let (status, answer) = sent(&lab, &format!("{base}/nothing"), json!({})).await;
        assert!(status == 404 && answer["error"].is_string(), "{base}: {answer}");
    }
}

#[tokio::test]
async fn the_tag_latest_leads_to_the_model_or_its_adapter() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    for adapter in ["", "latest"] {
        let (status, answer) =
            sent(&lab, "/api/chat", json!({"model": "m:latest", "messages": hi(), "stream": false})).await;
        assert_eq!((status, &answer["model"]), (200, &json!("m:latest")));
        assert_eq!(received(&engine).adapter, adapter);
        lab.change(|table| {
            let deployment = &mut table.deployments[0];
            deployment.adapters.insert("latest".into(), "latest-lora".into());
            deployment.endpoints[0].adapters = deployment.adapters.clone();
        });
    }
}

#[tokio::test]
async fn keys_and_quotas_hold_for_ollamas_clients_too() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.engine("a", |_: &pb::GenerateRequest| hello());
    lab.publish(&[("m", DeploymentState::Ready, &[&engine]), ("other", DeploymentState::Ready, &[&engine])]);
    lab.keys(&[access_key("one", "s-one", |spec| {
        spec.models = vec!["m".into()];
        spec.requests_per_minute = Some(1);
    })]);
    let chat = |model: &str, secret: &str| {
        let body = json!({"model": model, "messages": hi(), "stream": false});
        lab.client.post(lab.url("/api/chat")).bearer_auth(secret).json(&body).send()
    };
    let wrong = chat("m", "s-two").await.unwrap();
    assert_eq!(wrong.status(), 401);
    assert!(wrong.json::<Value>().await.unwrap()["error"].is_string());
    let tags = lab.client.get(lab.url("/api/tags")).bearer_auth("s-one").send().await.unwrap();
    let tags: Value = tags.json().await.unwrap();
    assert_eq!((tags["models"].as_array().unwrap().len(), &tags["models"][0]["name"]), (1, &json!("m")));
    let first = chat("m:latest", "s-one").await.unwrap();
    assert_eq!(first.status(), 200);
    assert_eq!(first.headers()["x-ratelimit-remaining-requests"], "0");
    let second = chat("m", "s-one").await.unwrap();
    assert!(second.status() == 429 && second.headers().contains_key("retry-after"));
    lab.keys(&[access_key("one", "s-one", |spec| spec.models = vec!["m".into()])]);
    assert_eq!(chat("other", "s-one").await.unwrap().status(), 403);
    assert_eq!(engine.requests(), 1);
}
