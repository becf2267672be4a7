//! OpenAI's Responses API over HTTP, and what Codex asks for beside it.

use std::time::Duration;

use futures::StreamExt as _;
use russet_gateway::dispatch::DispatchLimits;
use russet_gateway::routes::DeploymentState;
use russet_wire::conversation::ToolCall;
use russet_wire::event::{Delta, FailureKind, FinishReason, GenerationEvent, GenerationFailure};
use russet_wire::request::{GenerationRequest, StructuredOutput};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::harness::{
    GatewayLab, ScriptStep, ScriptedEngine, TEST_TIMEOUT, finished, hello, limits, started, token,
};

fn delta(delta: Delta) -> ScriptStep {
    ScriptStep::Say(GenerationEvent::Token { id: 1, delta })
}

fn call(id: &str, name: &str, arguments: &str) -> ScriptStep {
    let call = ToolCall { id: id.into(), name: name.into(), arguments: arguments.into() };
    delta(Delta { tool_calls: vec![call], ..Delta::default() })
}

/// Thinks, says something, and calls two tools.
pub fn agent() -> Vec<ScriptStep> {
    vec![
        started(),
        delta(Delta { reasoning: "I ".into(), ..Delta::default() }),
        delta(Delta { reasoning: "add.".into(), ..Delta::default() }),
        token("So:"),
        call("c1", "add", r#"{"a": 17}"#),
        call("c2", "patch", r#"{"input": "*** x\n"}"#),
        finished(FinishReason::Stop),
    ]
}

/// The tools of [`agent`], and two that only OpenAI has.
pub fn tools() -> Value {
    json!([
        {"type": "function", "name": "add", "description": "Adds.", "strict": false,
         "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}},
        {"type": "custom", "name": "patch", "description": "Edits."},
        {"type": "web_search"},
        {"type": "namespace", "name": "mcp", "tools": []},
    ])
}

impl GatewayLab {
    /// A request for a response of the model `m`, with additional fields.
    pub fn respond(&self, more: Value) -> reqwest::RequestBuilder {
        let mut body = json!({"model": "m", "input": "hi"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.client.post(self.url("/v1/responses")).json(&body)
    }

    pub async fn whole(&self, more: Value) -> Value {
        self.respond(more).send().await.unwrap().json().await.unwrap()
    }

    pub async fn events(&self, more: Value) -> Vec<Value> {
        let mut more = more;
        more["stream"] = true.into();
        events(&self.respond(more).send().await.unwrap().text().await.unwrap())
    }
}

/// The events of a complete stream, each named by its type, with the numbers 0, 1, 2, …; comments are left out.
pub fn events(text: &str) -> Vec<Value> {
    assert!(text.ends_with("\n\n"), "an event is cut off: {text:?}");
    let events = text.split_terminator("\n\n").filter(|event| !event.starts_with(':'));
    let event = |(number, event): (usize, &str)| {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let event: Value = serde_json::from_str(data).unwrap();
        assert_eq!((&event["type"], &event["sequence_number"]), (&name.into(), &number.into()));
        event
    };
    events.enumerate().map(event).collect()
}

pub fn names(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap().strip_prefix("response.").unwrap()).collect()
}

/// The response without what differs from one to the next.
fn normalized(response: &Value) -> Value {
    let mut response = response.clone();
    let id = response["id"].as_str().unwrap().strip_prefix("resp_").unwrap().to_owned();
    assert_eq!(id.len(), 24, "{id}");
    for time in ["created_at", "completed_at"] {
        if !response[time].is_null() {
            assert!(response[time].as_u64().unwrap() > 1_700_000_000, "{response}");
            response[time] = 0.into();
        }
    }
    serde_json::from_str(&response.to_string().replace(&id, "ID")).unwrap()
}

fn received(engine: &ScriptedEngine) -> GenerationRequest {
    GenerationRequest::from(engine.received.lock().unwrap().last().unwrap().clone())
}

#[tokio::test]
async fn a_whole_response_has_every_field() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let request = lab.respond(json!({"instructions": "Be brief.", "store": true, "metadata": {"a": "b"}}));
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["x-russet-ignored-parameters"], "store");
    assert_eq!(
        normalized(&response.json().await.unwrap()),
        json!({
            "id": "resp_ID", "object": "response", "created_at": 0, "completed_at": 0, "status": "completed",
            "incomplete_details": null, "error": null, "model": "m",
            "output": [{
                "type": "message", "id": "msg_ID_0", "status": "completed", "role": "assistant",
                "content": [{"type": "output_text", "text": "Hello there", "annotations": [], "logprobs": []}],
            }],
            "usage": {
                "input_tokens": 7, "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
                "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 10,
            },
            "instructions": "Be brief.", "max_output_tokens": null, "max_tool_calls": null,
            "metadata": {"a": "b"}, "parallel_tool_calls": true, "previous_response_id": null,
            "store": false, "background": false, "prompt_cache_key": null, "safety_identifier": null,
            "user": null, "reasoning": {"effort": null, "summary": null}, "service_tier": "default",
            "temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "top_logprobs": 0, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
            "truncation": "disabled",
        })
    );
    let messages: Vec<(String, String)> =
        received(&engine).messages.into_iter().map(|message| (message.role, message.content)).collect();
    assert_eq!(messages, [("system".into(), "Be brief.".into()), ("user".into(), "hi".into())]);
}

#[tokio::test]
async fn a_stream_ends_with_the_whole_response() {
    let lab = GatewayLab::start(limits()).await;
    for steps in [
        hello(),
        agent(),
        vec![started(), finished(FinishReason::Stop)],
        vec![started(), token("x"), finished(FinishReason::Length)],
    ] {
        let _engine = lab.only_engine(steps);
        let more = json!({"tools": tools(), "max_output_tokens": 5});
        let whole = lab.whole(more.clone()).await;
        let events = lab.events(more).await;
        assert_eq!(names(&events)[..2], ["created", "in_progress"]);
        let begun = &events[0]["response"];
        assert_eq!((&begun["status"], &begun["output"]), (&json!("in_progress"), &json!([])));
        assert_eq!(*names(&events).last().unwrap(), whole["status"]);
        assert_eq!(normalized(&events.last().unwrap()["response"]), normalized(&whole));
    }
}

#[tokio::test]
async fn thinking_and_calls_are_items_of_their_own() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(agent());
    let more = json!({"tools": tools(), "reasoning": {"effort": "low"}, "parallel_tool_calls": true});
    let response = lab.respond(more.clone()).send().await.unwrap();
    assert_eq!(response.headers()["x-russet-ignored-parameters"], "tools.web_search");
    let response = normalized(&response.json().await.unwrap());
    assert_eq!(
        response["output"],
        json!([
            {
                "type": "reasoning", "id": "rs_ID_0", "status": "completed",
                "summary": [{"type": "summary_text", "text": "I add."}],
            },
            {
                "type": "message", "id": "msg_ID_1", "status": "completed", "role": "assistant",
                "content": [{"type": "output_text", "text": "So:", "annotations": [], "logprobs": []}],
            },
            {
                "type": "function_call", "id": "fc_ID_2", "status": "completed", "call_id": "c1",
                "name": "add", "arguments": r#"{"a": 17}"#,
            },
            {
                "type": "custom_tool_call", "id": "ctc_ID_3", "status": "completed", "call_id": "c2",
                "name": "patch", "input": "*** x\n",
            },
        ])
    );
    assert_eq!(response["usage"]["output_tokens_details"], json!({"reasoning_tokens": 2}));
    let request = received(&engine);
    let names: Vec<&str> = request.tools.iter().map(|tool| tool.name.as_str()).collect();
    assert_eq!(names, ["add", "patch"]);
    assert_eq!(
        request.tools[0].parameters.as_deref(),
        Some(r#"{"type":"object","properties":{"z":{},"a":{}}}"#),
        "keys keep the client's order"
    );
    assert!(request.template_arguments.contains(r#""reasoning_effort":"low""#), "{request:?}");

    // What was answered goes back as it came, with the results of the calls.
    let mut input = vec![json!({"role": "user", "content": "hi"})];
    input.extend(response["output"].as_array().unwrap().iter().cloned());
    input.push(json!({"type": "function_call_output", "call_id": "c1", "output": "42"}));
    input.push(json!({"type": "custom_tool_call_output", "call_id": "c2", "output": "done"}));
    let again = lab.respond(json!({"input": input, "tools": tools()})).send().await.unwrap();
    assert_eq!(again.status(), 200);
    let messages = received(&engine).messages;
    let roles: Vec<&str> = messages.iter().map(|message| message.role.as_str()).collect();
    assert_eq!(roles, ["user", "assistant", "tool", "tool"]);
    let turn = &messages[1];
    assert_eq!((turn.reasoning.as_str(), turn.content.as_str()), ("I add.", "So:"));
    let calls: Vec<&str> = turn.tool_calls.iter().map(|call| call.arguments.as_str()).collect();
    assert_eq!(calls, [r#"{"a": 17}"#, r#"{"input":"*** x\n"}"#]);
    assert_eq!((messages[3].name.as_str(), messages[3].content.as_str()), ("patch", "done"));
}

#[tokio::test]
async fn a_json_schema_reaches_the_engine_as_it_is_written() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let schema = r#"{"type": "object", "properties": {"z": {}, "a": {"const": 1.0}}}"#;
    let body = format!(
        r#"{{"model": "m", "input": "hi", "text": {{"format": {{"type": "json_schema", "name": "n", "strict": true, "schema": {schema}}}}}}}"#
    );
    let request = lab.client.post(lab.url("/v1/responses")).header("content-type", "application/json");
    let response: Value = request.body(body).send().await.unwrap().json().await.unwrap();
    assert_eq!(received(&engine).structured_output, Some(StructuredOutput::JsonSchema(schema.to_owned())));
    assert_eq!(response["text"]["format"]["name"], "n");
    assert_eq!(response["text"]["format"]["schema"]["properties"]["a"], json!({"const": 1.0}));
}

#[tokio::test]
async fn errors_have_openais_shape_and_name_the_field() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    for (more, status, param, words) in [
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), 400, "input[0].type", "send the item"),
        (json!({"previous_response_id": "resp_1"}), 400, "previous_response_id", "no response is kept"),
        (json!({"background": true}), 400, "background", "no response is kept"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
            400,
            "input[0].content[0].type",
            "input_image",
        ),
        (json!({"model": "nix"}), 404, "model", "nix"),
    ] {
        let response = lab.respond(more.clone()).send().await.unwrap();
        assert_eq!(response.status(), status, "{more}");
        let error = response.json::<Value>().await.unwrap()["error"].take();
        assert_eq!((&error["param"], &error["type"]), (&json!(param), &json!("invalid_request_error")));
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn kept_responses_are_not_found() {
    let lab = GatewayLab::start(limits()).await;
    for (method, path) in
        [("GET", "resp_1"), ("DELETE", "resp_1"), ("GET", "resp_1/input_items"), ("POST", "resp_1/cancel")]
    {
        let url = lab.url(&format!("/v1/responses/{path}"));
        let request = lab.client.request(method.parse().unwrap(), url).json(&json!({"model": "m"}));
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 404, "{method} {path}");
        let error = response.json::<Value>().await.unwrap()["error"].take();
        assert!(error["message"].as_str().unwrap().contains("keeps no responses"), "{error}");
    }
    let response = lab.client.get(lab.url("/v1/responses")).send().await.unwrap();
    assert_eq!(response.status(), 405);
}

#[tokio::test]
async fn an_error_in_a_stream_is_a_failed_response() {
    // The headers go out before the engine begins, so even an early error is told in the stream.
    let lab =
        GatewayLab::start(DispatchLimits { headers_timeout: Duration::from_millis(1), ..limits() }).await;
    let failure = |kind| {
        ScriptStep::Say(GenerationEvent::Failed(GenerationFailure { kind, message: "because".into() }))
    };
    for (said, kind, code) in [
        (None, FailureKind::ContextLengthExceeded, "context_length_exceeded"),
        (None, FailureKind::InvalidRequest, "invalid_prompt"),
        (Some(token("x")), FailureKind::Internal, "server_error"),
    ] {
        let go = CancellationToken::new();
        let mut steps = vec![started(), ScriptStep::Until(go.clone())];
        let is_said = said.is_some();
        steps.extend(said);
        steps.push(failure(kind));
        let _engine = lab.only_engine(steps);
        let response = lab.respond(json!({"stream": true})).send().await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
        go.cancel();
        let events = events(&response.text().await.unwrap());
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.failed");
        assert_eq!(last["response"]["status"], "failed");
        let error = &last["response"]["error"];
        assert_eq!(error["code"], code);
        assert!(error["message"].as_str().unwrap().contains("because"), "{error}");
        assert_eq!(last["response"]["output"].as_array().unwrap().len(), usize::from(is_said));
    }
}

#[tokio::test]
async fn a_waiting_stream_is_kept_open_by_comments() {
    let lab = GatewayLab::start(DispatchLimits {
        headers_timeout: Duration::from_millis(1),
        heartbeat: Duration::from_millis(1),
        ..limits()
    })
    .await;
    let go = CancellationToken::new();
    let steps = vec![started(), ScriptStep::Until(go.clone()), token("x"), finished(FinishReason::Stop)];
    let _engine = lab.only_engine(steps);
    let mut response = lab.respond(json!({"stream": true})).send().await.unwrap();
    let mut text = String::new();
    while !text.contains(": still working") {
        let part = tokio::time::timeout(TEST_TIMEOUT, response.chunk()).await.unwrap();
        text.push_str(std::str::from_utf8(&part.unwrap().unwrap()).unwrap());
    }
    go.cancel();
    text.push_str(&response.text().await.unwrap());
    assert_eq!(*names(&events(&text)).last().unwrap(), "completed");
}

#[tokio::test]
async fn a_client_that_leaves_frees_the_slot() {
    let lab = GatewayLab::start(limits()).await;
    for streamed in [true, false] {
        let engine = lab.only_engine(vec![started(), token("x"), ScriptStep::Hang]);
        let request = tokio::spawn(lab.respond(json!({"stream": streamed})).send());
        engine.running(1).await;
        if streamed {
            let mut body = request.await.unwrap().unwrap().bytes_stream();
            let first = body.next().await.unwrap().unwrap();
            assert!(first.starts_with(b"event: response.created\n"), "{first:?}");
        } else {
            request.abort();
        }
        engine.running(0).await;
    }
}

#[tokio::test]
async fn codex_gets_the_list_of_models_under_its_own_key() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    lab.publish(&[
        ("m", DeploymentState::Ready, &[&engine]),
        ("late", DeploymentState::Working("copying 3 of 9 GiB".into()), &[]),
    ]);
    let list = async |query: &str| -> Value {
        lab.client.get(lab.url(&format!("/v1/models{query}"))).send().await.unwrap().json().await.unwrap()
    };
    let plain = list("").await;
    assert_eq!(plain.get("models"), None);
    let codex = list("?client_version=0.169.0").await;
    assert_eq!(codex["data"], plain["data"]);
    let models = codex["models"].as_array().unwrap();
    let slugs: Vec<&Value> = models.iter().map(|model| &model["slug"]).collect();
    assert_eq!(slugs, ["m", "late"]);
    assert_eq!(models[0]["context_window"], 8192);
    assert_eq!(models[1]["description"], "copying 3 of 9 GiB");
    // Codex reads no list without them.
    for field in ["base_instructions", "supported_reasoning_levels", "truncation_policy", "shell_type"] {
        assert!(!models[0][field].is_null(), "{field}");
    }
}
