//! Responses that are kept, over HTTP: continued, read, listed, cancelled and deleted, in the background and after a restart.

mod background;

use std::time::Duration;

use reqwest::Method;
use russet_gateway::dispatch::DispatchLimits;
use russet_gateway::response_store::ResponseStoreConfig;
use russet_wire::event::{FailureKind, FinishReason, GenerationEvent, GenerationFailure};
use russet_wire::request::GenerationRequest;
use serde_json::{Value, json};

use crate::harness::{
    GatewayLab, ScriptStep, ScriptedEngine, TEST_TIMEOUT, access_key, finished, hello, limits, started, token,
};
use crate::openai_responses::{agent, tools};

impl GatewayLab {
    /// A request about a kept response; its status and body.
    async fn kept(&self, method: Method, path: &str) -> (u16, Value) {
        let request = self.client.request(method, self.url(&format!("/v1/responses/{path}")));
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    async fn get(&self, path: &str) -> (u16, Value) {
        self.kept(Method::GET, path).await
    }

    /// The response once it has this status.
    async fn with_status(&self, id: &str, status: &str) -> Value {
        let reached = tokio::time::timeout(TEST_TIMEOUT, async {
            loop {
                let (code, response) = self.get(id).await;
                assert_eq!(code, 200, "{response}");
                if response["status"] == status {
                    return response;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        reached.await.unwrap_or_else(|_| panic!("{id} never was {status}"))
    }
}

fn id(response: &Value) -> &str {
    response["id"].as_str().unwrap()
}

/// The conversation that an engine got last, as `role: content`.
fn conversation(engine: &ScriptedEngine) -> Vec<String> {
    let request = GenerationRequest::from(engine.received.lock().unwrap().last().unwrap().clone());
    let shown =
        |message: &russet_wire::conversation::Message| format!("{}: {}", message.role, message.content);
    request.messages.iter().map(shown).collect()
}

fn not_found(id: &str) -> (u16, Value) {
    let error = json!({
        "message": format!("Response with id '{id}' not found."), "type": "invalid_request_error",
        "param": null, "code": "response_not_found",
    });
    (404, json!({"error": error}))
}

#[tokio::test]
async fn a_response_is_kept_unless_its_request_says_not() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let _engine = lab.only_engine(hello());
    for more in [json!({}), json!({"store": true}), json!({"store": null})] {
        let response = lab.respond(more).send().await.unwrap();
        assert!(!response.headers().contains_key("x-russet-ignored-parameters"));
        let response: Value = response.json().await.unwrap();
        assert_eq!(response["store"], true);
        assert_eq!(lab.get(id(&response)).await, (200, response.clone()));
        let deleted = json!({"id": id(&response), "object": "response", "deleted": true});
        assert_eq!(lab.kept(Method::DELETE, id(&response)).await, (200, deleted));
        for (method, path) in [
            (Method::GET, String::new()),
            (Method::DELETE, String::new()),
            (Method::GET, "/input_items".to_owned()),
            (Method::POST, "/cancel".to_owned()),
        ] {
            let path = format!("{}{path}", id(&response));
            assert_eq!(lab.kept(method, &path).await, not_found(id(&response)), "{path}");
        }
    }
    let response = lab.whole(json!({"store": false})).await;
    assert_eq!(response["store"], false);
    assert_eq!(lab.get(id(&response)).await, not_found(id(&response)));
}

#[tokio::test]
async fn a_stream_is_kept_before_its_last_event() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    for steps in [agent(), vec![started(), token("x"), finished(FinishReason::Length)]] {
        let _engine = lab.only_engine(steps);
        let events = lab.events(json!({"tools": tools()})).await;
        let last = &events.last().unwrap()["response"];
        assert_eq!(lab.get(id(last)).await, (200, last.clone()));
    }
    let failure = GenerationFailure { kind: FailureKind::Internal, message: "because".into() };
    let _engine =
        lab.only_engine(vec![started(), token("x"), ScriptStep::Say(GenerationEvent::Failed(failure))]);
    let events = lab.events(json!({})).await;
    let last = &events.last().unwrap()["response"];
    assert_eq!(last["status"], "failed");
    assert_eq!(lab.get(id(last)).await, (200, last.clone()));
    // Only those in the background have events and an end that can be chosen.
    for (method, path) in [(Method::GET, "?stream=true"), (Method::POST, "/cancel")] {
        let (status, error) = lab.kept(method, &format!("{}{path}", id(last))).await;
        assert_eq!(status, 400, "{error}");
        assert!(error["error"]["message"].as_str().unwrap().contains("background"), "{error}");
    }
}

#[tokio::test]
async fn a_request_continues_a_kept_conversation() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let engine = lab.engine("a", |request| match request.messages.last().unwrap().content.as_str() {
        "agent" => agent(),
        _ => hello(),
    });
    lab.publish(&[("m", russet_gateway::routes::DeploymentState::Ready, &[&engine])]);
    let first = lab.whole(json!({"instructions": "Be brief."})).await;
    let more = json!({"input": "agent", "previous_response_id": id(&first), "tools": tools()});
    let second = lab.whole(more).await;
    assert_eq!(second["previous_response_id"], first["id"]);
    // Instructions are those of each request.
    assert_eq!(conversation(&engine), ["user: hi", "assistant: Hello there", "user: agent"]);
    let results = json!([
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    ]);
    let more = json!({"input": results, "previous_response_id": id(&second), "instructions": "Go on."});
    let third = lab.whole(more).await;
    assert_eq!(
        conversation(&engine),
        [
            "system: Go on.",
            "user: hi",
            "assistant: Hello there",
            "user: agent",
            "assistant: So:",
            "tool: 42",
            "tool: done",
        ]
    );
    let request = GenerationRequest::from(engine.received.lock().unwrap().last().unwrap().clone());
    let turn = &request.messages[4];
    assert_eq!((turn.reasoning.as_str(), turn.tool_calls.len()), ("I add.", 2));
    assert_eq!(request.messages[6].name, "patch");
    // A branch, and one that is not kept itself.
    let more = json!({"input": "x", "previous_response_id": id(&first), "store": false});
    let branch = lab.whole(more).await;
    assert_eq!((&branch["status"], &branch["store"]), (&json!("completed"), &json!(false)));
    assert_eq!(conversation(&engine), ["user: hi", "assistant: Hello there", "user: x"]);

    let sent = engine.requests();
    lab.kept(Method::DELETE, id(&first)).await;
    for (previous, missing) in [("resp_none", "resp_none"), (id(&third), id(&first)), ("x'y", "x'y")] {
        let response = lab.respond(json!({"previous_response_id": previous})).send().await.unwrap();
        assert_eq!(response.status(), 400);
        let error = response.json::<Value>().await.unwrap()["error"].take();
        assert_eq!(error["code"], "previous_response_not_found");
        assert_eq!(error["param"], "previous_response_id");
        let words = format!("Previous response with id '{missing}' not found");
        assert!(error["message"].as_str().unwrap().starts_with(&words), "{error}");
    }
    assert_eq!(engine.requests(), sent);
}

#[tokio::test]
async fn another_callers_response_does_not_exist() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let _engine = lab.only_engine(hello());
    let unowned = lab.whole(json!({})).await;
    lab.keys(&[access_key("a", "s-a", |_| {}), access_key("b", "s-b", |_| {})]);
    let response: Value =
        lab.respond(json!({})).bearer_auth("s-a").send().await.unwrap().json().await.unwrap();
    let get = async |id: &str, path: &str, key: &str| {
        let url = lab.url(&format!("/v1/responses/{id}{path}"));
        let response = lab.client.get(url).bearer_auth(key).send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    assert_eq!(get(id(&response), "", "s-a").await, (200, response.clone()));
    for path in ["", "/input_items", "?stream=true"] {
        assert_eq!(get(id(&response), path, "s-b").await, not_found(id(&response)), "{path}");
        assert_eq!(get(id(&unowned), path, "s-b").await, not_found(id(&unowned)), "{path}");
    }
    let url = lab.url(&format!("/v1/responses/{}", id(&response)));
    assert_eq!(lab.client.delete(&url).bearer_auth("s-b").send().await.unwrap().status(), 404);
    let previous = json!({"previous_response_id": id(&response)});
    let refused = lab.respond(previous.clone()).bearer_auth("s-b").send().await.unwrap();
    assert_eq!(refused.status(), 400);
    assert_eq!(refused.json::<Value>().await.unwrap()["error"]["code"], "previous_response_not_found");
    assert_eq!(lab.respond(previous).bearer_auth("s-a").send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn input_items_are_listed_in_pages() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let _engine = lab.only_engine(hello());
    let input = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]);
    let response = lab.whole(json!({"input": input})).await;
    let (status, page) = lab.get(&format!("{}/input_items?order=asc&limit=2", id(&response))).await;
    assert_eq!((status, &page["object"], &page["has_more"]), (200, &json!("list"), &json!(true)));
    let texts = |page: &Value| -> Vec<Value> {
        let items = page["data"].as_array().unwrap().iter();
        items.map(|item| item["content"][0]["text"].clone()).collect()
    };
    assert_eq!(texts(&page), ["a", "b"]);
    let after = page["last_id"].as_str().unwrap();
    let (_, rest) = lab.get(&format!("{}/input_items?order=asc&after={after}", id(&response))).await;
    assert_eq!((texts(&rest), &rest["has_more"]), (vec![json!("c")], &json!(false)));
    let (status, error) = lab.get(&format!("{}/input_items?limit=0", id(&response))).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("limit")));
}

#[tokio::test]
async fn a_compacted_conversation_goes_on_with_its_summary() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let engine = lab.only_engine(hello());
    let kept = lab.whole(json!({})).await;
    let compact = async |body: Value| {
        let request = lab.client.post(lab.url("/v1/responses/compact")).json(&body);
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    let input = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    for (body, expected) in [
        (
            json!({"model": "m", "previous_response_id": id(&kept)}),
            vec!["user: hi", "assistant: Hello there"],
        ),
        (
            json!({"model": "m", "input": input, "instructions": "Be brief."}),
            vec!["system: Be brief.", "user: a", "assistant: b"],
        ),
    ] {
        let (status, compacted) = compact(body).await;
        assert_eq!((status, &compacted["object"]), (200, &json!("response.compaction")), "{compacted}");
        assert_eq!(compacted["usage"]["total_tokens"], 10);
        let sent = conversation(&engine);
        assert_eq!(sent[..expected.len()], expected);
        assert!(sent.last().unwrap().starts_with("user: This conversation is about to be cut off"));
        let user = expected.iter().find_map(|message| message.strip_prefix("user: ")).unwrap();
        let mut input = compacted["output"].as_array().unwrap().clone();
        assert_eq!(input[0]["content"], json!([{"type": "input_text", "text": user}]));
        assert_eq!(input[1]["type"], "compaction");
        input.push(json!({"role": "user", "content": "go on"}));
        lab.whole(json!({"input": input})).await;
        let sent = conversation(&engine);
        assert_eq!(
            (sent[0].as_str(), sent[2].as_str(), sent.len()),
            (&*format!("user: {user}"), "user: go on", 3)
        );
        assert!(sent[1].starts_with("assistant: ") && sent[1].ends_with("\n\nHello there"), "{sent:?}");
    }
    for (body, param) in [(json!({"model": "m"}), "input"), (json!({"model": "m", "input": 7}), "input")] {
        let (status, error) = compact(body).await;
        assert_eq!((status, &error["error"]["param"]), (400, &json!(param)));
    }
    let _silent = lab.only_engine(vec![started(), token("x"), finished(FinishReason::Length)]);
    let (status, error) = compact(json!({"model": "m", "input": "hi"})).await;
    assert_eq!((status, &error["error"]["type"]), (500, &json!("server_error")));
}

impl GatewayLab {
    /// The events of a response in the background, from the one on that this query says.
    pub async fn followed(&self, id: &str, query: &str) -> Vec<Value> {
        let url = self.url(&format!("/v1/responses/{id}?stream=true{query}"));
        let response = self.client.get(url).send().await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
        let text = response.text().await.unwrap();
        let data = |event: &str| serde_json::from_str(event.split_once("data: ").unwrap().1).unwrap();
        text.split_terminator("\n\n").filter(|event| !event.starts_with(':')).map(data).collect()
    }
}

#[tokio::test]
async fn what_was_kept_outlives_the_gateway() {
    let folder = tempfile::tempdir().unwrap();
    let lab = GatewayLab::start_in(folder.path()).await;
    let engine = lab.engine("a", |request| match request.messages.last().unwrap().content.as_str() {
        "hang" => vec![started(), token("Hello"), ScriptStep::Hang],
        _ => hello(),
    });
    lab.publish(&[("m", russet_gateway::routes::DeploymentState::Ready, &[&engine])]);
    let kept = lab.whole(json!({})).await;
    let running = lab.whole(json!({"background": true, "input": "hang"})).await;
    lab.with_status(id(&running), "in_progress").await;
    lab.kill().await;

    let next = GatewayLab::start_in(folder.path()).await;
    let engine = next.only_engine(hello());
    assert_eq!(next.get(id(&kept)).await, (200, kept.clone()));
    // Nobody has had a part of the other one: it is generated again, with its id.
    let ended = next.with_status(id(&running), "completed").await;
    assert_eq!(ended["output"][0]["content"][0]["text"], "Hello there");
    assert_eq!(ended["created_at"], running["created_at"]);
    let events = next.followed(id(&running), "").await;
    assert_eq!(events.last().unwrap()["response"], ended);
    assert_eq!(conversation(&engine), ["user: hang"]);
    next.whole(json!({"previous_response_id": id(&kept), "input": "go on"})).await;
    assert_eq!(conversation(&engine), ["user: hi", "assistant: Hello there", "user: go on"]);
    next.kill().await;
    let last = GatewayLab::start_in(folder.path()).await;
    let engine = last.only_engine(vec![ScriptStep::Hang]);
    assert_eq!(last.get(id(&running)).await, (200, ended));
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn a_response_that_was_read_is_not_generated_again() {
    for at_once in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let lab = GatewayLab::start_in(folder.path()).await;
        let _engine = lab.only_engine(vec![started(), token("Hello"), ScriptStep::Hang]);
        let response = lab.respond(json!({"background": true, "stream": at_once}));
        let mut response = response.send().await.unwrap();
        let mut text = String::new();
        let mut read = async |response: &mut reqwest::Response, words: &str| {
            while !text.contains(words) {
                text.push_str(std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap());
            }
            text.split_once("\"id\":\"").unwrap().1.split('"').next().unwrap().to_owned()
        };
        let running = if at_once {
            read(&mut response, "Hello").await
        } else {
            let running = read(&mut response, "queued").await;
            let url = lab.url(&format!("/v1/responses/{running}?stream=true"));
            let mut followed = lab.client.get(url).send().await.unwrap();
            read(&mut followed, "Hello").await;
            running
        };
        lab.kill().await;
        let next = GatewayLab::start_in(folder.path()).await;
        let engine = next.only_engine(hello());
        let interrupted = next.with_status(&running, "failed").await;
        assert_eq!(interrupted["error"]["code"], "server_error");
        let message = interrupted["error"]["message"].as_str().unwrap();
        assert!(message.contains("the gateway ended before the response was complete"), "{message}");
        // A stream of it goes on where its client is, and ends.
        let events = next.followed(&running, "&starting_after=40").await;
        assert_eq!(events.len(), 1);
        assert_eq!(
            (&events[0]["type"], &events[0]["sequence_number"]),
            (&json!("response.failed"), &json!(41))
        );
        assert_eq!(events[0]["response"], interrupted);
        assert_eq!(engine.requests(), 0);
    }
}

#[tokio::test]
async fn a_response_that_a_stop_cuts_is_generated_by_the_next_gateway() {
    let folder = tempfile::tempdir().unwrap();
    let store = || ResponseStoreConfig::new(folder.path().join("responses.db"));
    let hurried = DispatchLimits { shutdown_grace: Duration::from_millis(100), ..limits() };
    let mut lab = GatewayLab::start_keeping(hurried, store()).await;
    let engine = lab.only_engine(vec![started(), token("Hello"), ScriptStep::Hang]);
    let running = lab.whole(json!({"background": true})).await;
    engine.running(1).await;
    lab.stop.cancel();
    lab.served.take().unwrap().await.unwrap().unwrap();
    drop(lab);
    let next = GatewayLab::start_keeping(limits(), store()).await;
    // It waits for a model that is busy.
    let full = next.engine("a", |_| {
        let failure = GenerationFailure { kind: FailureKind::Overloaded, message: "full".into() };
        vec![ScriptStep::Say(GenerationEvent::Failed(failure))]
    });
    next.publish(&[("m", russet_gateway::routes::DeploymentState::Ready, &[&full])]);
    full.requested(1).await;
    // Who follows it meanwhile sees no failure, and does not take it from anybody.
    let url = next.url(&format!("/v1/responses/{}?stream=true", id(&running)));
    let followed = tokio::spawn(next.client.get(url).send());
    full.requested(2).await;
    let _engine = next.only_engine(hello());
    let ended = next.with_status(id(&running), "completed").await;
    let text = followed.await.unwrap().unwrap().text().await.unwrap();
    assert!(text.contains("response.completed") && !text.contains("response.failed"), "{text}");
    assert_eq!(text.matches("event: response.queued").count(), 1, "{text}");
    assert_eq!(ended["created_at"], running["created_at"]);
}

#[tokio::test]
async fn a_response_that_waits_to_run_again_is_followed_or_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let lab = GatewayLab::start_in(folder.path()).await;
    let engine = lab.only_engine(vec![ScriptStep::Prepare]);
    let waits = [lab.whole(json!({"background": true})).await, lab.whole(json!({"background": true})).await];
    engine.running(2).await;
    lab.kill().await;
    // Nothing is routed yet, so both wait.
    let next = GatewayLab::start_in(folder.path()).await;
    let [first, second] = waits.each_ref().map(|response| id(response).to_owned());
    assert_eq!(next.get(&first).await.1["status"], "queued");
    let (status, cancelled) = next.kept(Method::POST, &format!("{second}/cancel")).await;
    assert_eq!((status, cancelled["status"] != "queued"), (200, true), "{cancelled}");
    let url = next.url(&format!("/v1/responses/{first}?stream=true"));
    let followed = tokio::spawn(next.client.get(url).send());
    let engine = next.only_engine(hello());
    let text = followed.await.unwrap().unwrap().text().await.unwrap();
    assert!(text.contains("response.completed") && text.contains("there"), "{text}");
    assert_eq!(engine.requests(), 1);
    // They are no requests of the inbox.
    let list = next.client.get(next.url("/v1/inbox")).send().await.unwrap().json::<Value>().await.unwrap();
    assert_eq!(list["data"], json!([]));
    let read = next.client.get(next.url(&format!("/v1/inbox/{first}"))).send().await.unwrap();
    assert_eq!(read.status(), 404);
}

#[tokio::test]
async fn a_full_store_refuses_and_forgets_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let config =
        ResponseStoreConfig { max_bytes: 160 << 10, ..ResponseStoreConfig::new(folder.path().join("r.db")) };
    let lab = GatewayLab::start_keeping(limits(), config).await;
    let engine = lab.only_engine(hello());
    let kept = lab.whole(json!({})).await;
    let large = "x".repeat(200 << 10);
    for more in [json!({"input": large}), json!({"input": large, "background": true})] {
        let response = lab.respond(more).send().await.unwrap();
        assert_eq!(response.status(), 507);
        assert_eq!(response.headers()["x-should-retry"], "false");
        let error = response.json::<Value>().await.unwrap()["error"].take();
        assert_eq!((&error["code"], &error["type"]), (&json!("store_full"), &json!("server_error")));
        assert!(error["message"].as_str().unwrap().contains("store: false"), "{error}");
    }
    let events = lab.events(json!({"input": large})).await;
    let last = events.last().unwrap();
    assert_eq!(
        (&last["type"], &last["response"]["error"]["code"]),
        (&json!("response.failed"), &json!("server_error"))
    );
    let answered = lab.respond(json!({"input": large, "store": false})).send().await.unwrap();
    assert_eq!(answered.status(), 200);
    assert_eq!(lab.get(id(&kept)).await, (200, kept));
    engine.running(0).await;
}

#[tokio::test]
async fn a_store_that_cannot_be_opened_keeps_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let lab = GatewayLab::start_in(&folder.path().join("missing")).await;
    let _engine = lab.only_engine(hello());
    let response = lab.whole(json!({})).await;
    assert_eq!((&response["status"], &response["store"]), (&json!("completed"), &json!(false)));
    let (status, error) = lab.get("resp_1").await;
    assert_eq!(status, 404);
    assert!(error["error"]["message"].as_str().unwrap().contains("keeps no responses"), "{error}");
}
