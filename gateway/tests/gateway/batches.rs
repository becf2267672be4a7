//! Files and batches over HTTP: uploaded, run, read, cancelled and deleted, and after a restart.

mod messages;
mod restart;

use std::path::Path;
use std::time::Duration;

use reqwest::Method;
use russet_gateway::dispatch::DispatchLimits;
use russet_gateway::response_store::ResponseStoreConfig;
use russet_gateway::routes::DeploymentState;
use russet_wire::event::{FailureKind, GenerationEvent, GenerationFailure};
use serde_json::{Value, json};

use crate::harness::{
    GatewayLab, ScriptStep, ScriptedEngine, TEST_TIMEOUT, access_key, hello, limits, started, token,
};

/// A request of a chat that says this.
fn chat(content: &str) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": content}]})
}

/// A line of a batch.
fn line(id: &str, url: &str, body: Value) -> String {
    json!({"custom_id": id, "method": "POST", "url": url, "body": body}).to_string() + "\n"
}

/// Lines of chats that say these.
fn chats(contents: &[&str]) -> String {
    contents.iter().map(|content| line(content, "/v1/chat/completions", chat(content))).collect()
}

impl GatewayLab {
    /// A request; its status and body.
    async fn ask(&self, method: Method, path: &str, key: &str, body: Option<Value>) -> (u16, Value) {
        let mut request = self.client.request(method, self.url(path)).bearer_auth(key);
        if let Some(body) = body {
            request = request.json(&body);
        }
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    /// The body of a request that is answered.
    async fn done(&self, method: Method, path: &str, body: Option<Value>) -> Value {
        let (status, body) = self.ask(method, path, "any", body).await;
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    /// Uploads a form of these fields and this file.
    async fn form(&self, key: &str, fields: &[(&str, &str)], file: Option<&[u8]>) -> (u16, Value) {
        let mut body = Vec::new();
        for (name, value) in fields {
            body.extend(
                format!("--b\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n").bytes(),
            );
        }
        if let Some(file) = file {
            let head = "--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\r\n";
            body.extend([head.as_bytes(), file, b"\r\n"].concat());
        }
        body.extend(b"--b--\r\n");
        let request = self.client.post(self.url("/v1/files")).bearer_auth(key);
        let request = request.header("content-type", "multipart/form-data; boundary=b").body(body);
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    /// The id of an uploaded file.
    async fn upload(&self, key: &str, file: &[u8]) -> String {
        let (status, file) = self.form(key, &[("purpose", "batch")], Some(file)).await;
        assert_eq!(status, 200, "{file}");
        file["id"].as_str().unwrap().to_owned()
    }

    /// The id of a batch that begins over this file.
    async fn batch(&self, key: &str, endpoint: &str, file: &[u8]) -> String {
        let file = self.upload(key, file).await;
        let body = json!({"endpoint": endpoint, "input_file_id": file, "completion_window": "24h"});
        let (status, batch) = self.ask(Method::POST, "/v1/batches", key, Some(body)).await;
        assert_eq!((status, &batch["status"]), (200, &json!("validating")), "{batch}");
        batch["id"].as_str().unwrap().to_owned()
    }

    /// The object at this path once `is_reached` says so.
    async fn until(&self, path: &str, is_reached: impl Fn(&Value) -> bool) -> Value {
        let reached = tokio::time::timeout(TEST_TIMEOUT, async {
            loop {
                let (_, object) = self.ask(Method::GET, path, "s-a", None).await;
                if is_reached(&object) {
                    return object;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        match reached.await {
            Ok(object) => object,
            Err(_) => panic!("{path}: {}", self.ask(Method::GET, path, "s-a", None).await.1),
        }
    }

    async fn batch_is(&self, id: &str, status: &str) -> Value {
        self.until(&format!("/v1/batches/{id}"), |batch| batch["status"] == status).await
    }

    /// The lines of a result file; none where there is no file.
    async fn lines(&self, file: &Value) -> Vec<Value> {
        let Some(file) = file.as_str() else { return vec![] };
        let response = self.client.get(self.url(&format!("/v1/files/{file}/content"))).bearer_auth("s-a");
        let response = response.send().await.unwrap();
        assert_eq!(response.status(), 200);
        let text = response.text().await.unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn ids(lines: &[Value]) -> Vec<&str> {
    lines.iter().map(|line| line["custom_id"].as_str().unwrap()).collect()
}

/// An engine that answers every chat but those that say `hang`.
fn engine(lab: &GatewayLab) -> ScriptedEngine {
    let engine = lab.engine("a", |request| match request.messages.first() {
        Some(message) if message.content.starts_with("hang") => vec![started(), token("x"), ScriptStep::Hang],
        _ => hello(),
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    engine
}

/// What the engine was sent, in the order of their texts.
fn received(engine: &ScriptedEngine) -> Vec<String> {
    let received = engine.received.lock().unwrap();
    let mut contents: Vec<String> = received.iter().map(|one| one.messages[0].content.clone()).collect();
    contents.sort();
    contents
}

#[tokio::test]
async fn a_batch_answers_each_line_at_the_lowest_priority() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let engine = engine(&lab);
    let unknown = json!({"model": "nix", "messages": [{"role": "user", "content": "c"}]});
    let flex = json!({"model": "m", "service_tier": "flex", "messages": [{"role": "user", "content": "b"}]});
    let url = "/v1/chat/completions";
    let file =
        [line("1", url, chat("a")), line("2", url, flex), "\n".into(), line("ü", url, unknown)].concat();
    let id = lab.batch("s-a", url, file.trim_end().as_bytes()).await;
    let batch = lab.batch_is(&id, "completed").await;
    assert_eq!(batch["request_counts"], json!({"total": 3, "completed": 2, "failed": 1}));
    assert_eq!(
        (&batch["endpoint"], &batch["errors"], &batch["metadata"]),
        (&json!(url), &Value::Null, &Value::Null)
    );
    for time in ["created_at", "in_progress_at", "finalizing_at", "completed_at"] {
        assert!(batch[time].as_u64().unwrap() > 1_700_000_000, "{batch}");
    }
    assert_eq!(batch["expires_at"].as_u64().unwrap() - batch["created_at"].as_u64().unwrap(), 86_400);
    let output = lab.lines(&batch["output_file_id"]).await;
    assert_eq!(ids(&output), ["1", "2"]);
    for line in &output {
        let response = &line["response"];
        assert_eq!((&response["status_code"], &line["error"]), (&json!(200), &Value::Null));
        assert_eq!(response["body"]["choices"][0]["message"]["content"], "Hello there");
        assert!(line["id"].as_str().unwrap().starts_with("batch_req_"), "{line}");
        assert!(response["request_id"].as_str().unwrap().starts_with("req_"), "{line}");
    }
    let errors = lab.lines(&batch["error_file_id"]).await;
    assert_eq!(ids(&errors), ["ü"]);
    assert_eq!(errors[0]["response"]["status_code"], 404);
    assert_eq!(errors[0]["response"]["body"]["error"]["code"], "model_not_found");
    let priorities: Vec<i32> =
        engine.received.lock().unwrap().iter().map(|request| request.priority).collect();
    assert_eq!(priorities, [-100, -100]);
    // The log of requests has them like others.
    let request = output[0]["response"]["request_id"].as_str().unwrap();
    let why = lab.done(Method::GET, &format!("/requests/{request}/why"), None).await;
    assert_eq!(why["limits"]["priority"], -100);
}

#[tokio::test]
async fn every_endpoint_of_a_batch_is_served() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let _engine = engine(&lab);
    for (url, body, object) in [
        ("/v1/chat/completions", chat("a"), "chat.completion"),
        ("/v1/completions", json!({"model": "m", "prompt": "a"}), "text_completion"),
        ("/v1/embeddings", json!({"model": "m", "input": "a"}), "list"),
        ("/v1/responses", json!({"model": "m", "input": "a"}), "response"),
    ] {
        let id = lab.batch("s-a", url, line("1", url, body).as_bytes()).await;
        let batch = lab.batch_is(&id, "completed").await;
        let output = lab.lines(&batch["output_file_id"]).await;
        assert_eq!(output[0]["response"]["body"]["object"], object, "{output:?}");
        assert_eq!(batch["error_file_id"], Value::Null);
    }
}

#[tokio::test]
async fn files_are_listed_read_and_deleted() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let _engine = engine(&lab);
    let file = [chats(&["a", "b"]).into_bytes(), vec![b'\n'; 600 << 10]].concat();
    let fields =
        [("purpose", "batch"), ("expires_after[anchor]", "created_at"), ("expires_after[seconds]", "3600")];
    let (_, first) = lab.form("s-a", &fields, Some(&file)).await;
    assert_eq!(
        (&first["object"], &first["bytes"], &first["filename"], &first["purpose"], &first["status"]),
        (&json!("file"), &json!(file.len()), &json!("in.jsonl"), &json!("batch"), &json!("processed"))
    );
    assert_eq!(first["expires_at"].as_u64().unwrap() - first["created_at"].as_u64().unwrap(), 3600);
    let first = first["id"].as_str().unwrap();
    let id = lab.batch("s-a", "/v1/chat/completions", chats(&["a"]).as_bytes()).await;
    let batch = lab.batch_is(&id, "completed").await;
    let content = lab.client.get(lab.url(&format!("/v1/files/{first}/content"))).send().await.unwrap();
    assert_eq!(content.headers()["content-length"], file.len().to_string());
    assert!(content.bytes().await.unwrap() == file);

    let listed = async |query: &str| {
        let page = lab.done(Method::GET, &format!("/v1/files{query}"), None).await;
        let ids: Vec<String> = page["data"]
            .as_array()
            .unwrap()
            .iter()
            .map(|file| file["id"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(page["last_id"].as_str(), ids.last().map(String::as_str));
        (ids, page["has_more"] == true)
    };
    let [input, output] =
        ["input_file_id", "output_file_id"].map(|name| batch[name].as_str().unwrap().to_owned());
    let all = [first.to_owned(), input.clone(), output.clone()];
    assert_eq!(listed("?order=asc").await, (all.to_vec(), false));
    assert_eq!(listed("?limit=1").await, (vec![output.clone()], true));
    assert_eq!(listed(&format!("?after={output}&limit=1")).await, (vec![input.clone()], true));
    assert_eq!(listed("?purpose=batch_output").await, (vec![output.clone()], false));
    assert_eq!(listed("?purpose=vision").await, (vec![], false));
    let (status, error) = lab.ask(Method::GET, "/v1/files?after=nix", "any", None).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("after")));

    let deleted = lab.done(Method::DELETE, &format!("/v1/files/{first}"), None).await;
    assert_eq!(deleted, json!({"id": first, "object": "file", "deleted": true}));
    for (method, path) in [(Method::GET, ""), (Method::GET, "/content"), (Method::DELETE, "")] {
        let (status, error) = lab.ask(method, &format!("/v1/files/{first}{path}"), "any", None).await;
        assert_eq!((status, &error["error"]["code"]), (404, &json!("file_not_found")), "{error}");
    }
    assert_eq!(listed("").await.0.len(), 2);
}

#[tokio::test]
async fn a_file_that_no_batch_can_run_is_named_by_line() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let engine = engine(&lab);
    let url = "/v1/chat/completions";
    let good = chats(&["a"]);
    let streamed = json!({"model": "m", "messages": [], "stream": true});
    for (second, code, at, param) in [
        (b"{\n".to_vec(), "invalid_json_line", json!(2), Value::Null),
        (b"\"\xff\xfe\"\n".to_vec(), "invalid_json_line", json!(2), Value::Null),
        (good.clone().into_bytes(), "duplicate_custom_id", json!(2), json!("custom_id")),
        (line("b", "/v1/embeddings", chat("b")).into_bytes(), "invalid_url", json!(2), json!("url")),
        (line("b", url, streamed).into_bytes(), "invalid_body", json!(2), json!("body.stream")),
    ] {
        let id = lab.batch("s-a", url, &[good.as_bytes(), &second].concat()).await;
        let batch = lab.batch_is(&id, "failed").await;
        let error = &batch["errors"]["data"][0];
        assert_eq!((&error["code"], &error["line"], &error["param"]), (&json!(code), &at, &param), "{batch}");
        assert!(batch["failed_at"].is_u64() && batch["output_file_id"].is_null(), "{batch}");
    }
    let id = lab.batch("s-a", url, b"").await;
    let batch = lab.batch_is(&id, "failed").await;
    assert_eq!(batch["errors"]["data"][0]["code"], "empty_file");
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn an_upload_is_refused_by_field_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let config =
        ResponseStoreConfig { max_bytes: 100 << 20, ..ResponseStoreConfig::new(folder.path().join("r.db")) };
    let lab = GatewayLab::start_keeping(limits(), config).await;
    let batch = [("purpose", "batch")];
    let long = vec![b'x'; 17 << 20];
    let large = b"x\n".repeat(13 << 20);
    for (fields, file, status, param) in [
        (&[][..], Some(&b"{}"[..]), 400, json!("purpose")),
        (&[("purpose", "assistants")], Some(b"{}"), 400, json!("purpose")),
        (&batch, None, 400, json!("file")),
        (&[("purpose", "batch"), ("x", "y")], Some(b"{}"), 400, json!("x")),
        (&[("purpose", "batch"), ("expires_after[seconds]", "1")], Some(b"{}"), 400, json!("expires_after")),
        (&batch, Some(&long), 400, json!("file")),
        (&batch, Some(&large), 413, Value::Null),
    ] {
        let (found, error) = lab.form("any", fields, file).await;
        assert_eq!((found, &error["error"]["param"]), (status, &param), "{error}");
    }
    let request = lab.client.post(lab.url("/v1/files")).json(&json!({"purpose": "batch"}));
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 400);
    assert!(response.text().await.unwrap().contains("multipart/form-data"));
    let cut = "--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n{}";
    let request =
        lab.client.post(lab.url("/v1/files")).header("content-type", "multipart/form-data; boundary=b");
    assert_eq!(request.body(cut).send().await.unwrap().status(), 400);
    assert_eq!(lab.done(Method::GET, "/v1/files", None).await["data"], json!([]));
}

#[tokio::test]
async fn a_cancelled_batch_says_which_lines_did_not_run() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let engine = engine(&lab);
    let id = lab.batch("s-a", "/v1/chat/completions", chats(&["a", "hang 1", "hang 2"]).as_bytes()).await;
    let path = format!("/v1/batches/{id}");
    let running = lab.until(&path, |batch| batch["request_counts"]["completed"] == 1).await;
    assert_eq!((&running["status"], &running["output_file_id"]), (&json!("in_progress"), &Value::Null));
    engine.running(2).await;
    let input = running["input_file_id"].as_str().unwrap();
    let (status, error) = lab.ask(Method::DELETE, &format!("/v1/files/{input}"), "any", None).await;
    assert!(status == 400 && error["error"]["message"].as_str().unwrap().contains(&id), "{error}");

    let cancelled = lab.done(Method::POST, &format!("{path}/cancel"), None).await;
    assert!(["cancelling", "cancelled"].contains(&cancelled["status"].as_str().unwrap()), "{cancelled}");
    let batch = lab.batch_is(&id, "cancelled").await;
    engine.running(0).await;
    assert_eq!(batch["request_counts"], json!({"total": 3, "completed": 1, "failed": 0}));
    assert!(batch["cancelling_at"].is_u64() && batch["cancelled_at"].is_u64(), "{batch}");
    assert_eq!(ids(&lab.lines(&batch["output_file_id"]).await), ["a"]);
    let errors = lab.lines(&batch["error_file_id"]).await;
    assert_eq!(ids(&errors), ["hang 1", "hang 2"]);
    assert_eq!(
        (&errors[0]["error"]["code"], &errors[0]["response"]),
        (&json!("batch_cancelled"), &Value::Null)
    );
    let (status, error) = lab.ask(Method::POST, &format!("{path}/cancel"), "any", None).await;
    assert!(status == 400 && error["error"]["message"].as_str().unwrap().contains("has ended"), "{error}");
    lab.done(Method::DELETE, &format!("/v1/files/{input}"), None).await;
}

#[tokio::test]
async fn another_callers_files_and_batches_do_not_exist() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let _engine = engine(&lab);
    lab.keys(&[access_key("a", "s-a", |_| {}), access_key("b", "s-b", |_| {})]);
    let id = lab.batch("s-a", "/v1/chat/completions", chats(&["a"]).as_bytes()).await;
    let batch = lab.batch_is(&id, "completed").await;
    let file = batch["output_file_id"].as_str().unwrap();
    for (method, path) in [
        (Method::GET, format!("/v1/files/{file}")),
        (Method::GET, format!("/v1/files/{file}/content")),
        (Method::DELETE, format!("/v1/files/{file}")),
        (Method::GET, format!("/v1/batches/{id}")),
        (Method::POST, format!("/v1/batches/{id}/cancel")),
        // One of another dialect is none either.
        (Method::GET, format!("/v1/messages/batches/{id}")),
    ] {
        assert_eq!(lab.ask(method, &path, "s-b", None).await.0, 404, "{path}");
    }
    assert_eq!(lab.ask(Method::GET, &format!("/v1/messages/batches/{id}"), "s-a", None).await.0, 404);
    let body = json!({"endpoint": "/v1/chat/completions", "input_file_id": batch["input_file_id"], "completion_window": "24h"});
    let (status, error) = lab.ask(Method::POST, "/v1/batches", "s-b", Some(body)).await;
    assert_eq!((status, &error["error"]["code"]), (404, &json!("file_not_found")));
    for path in ["/v1/files", "/v1/batches"] {
        assert_eq!(lab.ask(Method::GET, path, "s-b", None).await.1["data"], json!([]), "{path}");
    }
    let (_, page) = lab.ask(Method::GET, "/v1/batches?limit=1", "s-a", None).await;
    assert_eq!((&page["data"][0], &page["has_more"]), (&batch, &json!(false)));
}

#[tokio::test]
async fn a_line_waits_while_every_engine_is_full() {
    let folder = tempfile::tempdir().unwrap();
    let config = ResponseStoreConfig::new(folder.path().join("responses.db"));
    let lab =
        GatewayLab::start_keeping(DispatchLimits { hold_timeout: Duration::ZERO, ..limits() }, config).await;
    let tries = std::sync::atomic::AtomicUsize::new(0);
    let engine = lab.engine("a", move |_| {
        let failure =
            GenerationFailure { kind: FailureKind::Overloaded, message: "the queue is full".into() };
        let first = tries.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 0;
        if first { vec![ScriptStep::Say(GenerationEvent::Failed(failure))] } else { hello() }
    });
    lab.publish(&[("m", DeploymentState::Ready, &[&engine])]);
    let id = lab.batch("s-a", "/v1/chat/completions", chats(&["a"]).as_bytes()).await;
    let batch = lab.batch_is(&id, "completed").await;
    assert_eq!(batch["request_counts"], json!({"total": 1, "completed": 1, "failed": 0}));
    assert!(engine.requests() > 1, "the line was sent again");
}

#[tokio::test]
async fn without_a_store_every_path_names_the_flag() {
    let lab = GatewayLab::start(limits()).await;
    for (method, path) in [
        (Method::POST, "/v1/files"),
        (Method::GET, "/v1/files"),
        (Method::GET, "/v1/files/f"),
        (Method::GET, "/v1/files/f/content"),
        (Method::DELETE, "/v1/files/f"),
        (Method::POST, "/v1/batches"),
        (Method::GET, "/v1/batches"),
        (Method::GET, "/v1/batches/b"),
        (Method::POST, "/v1/batches/b/cancel"),
        (Method::POST, "/v1/messages/batches"),
        (Method::GET, "/v1/messages/batches"),
        (Method::GET, "/v1/messages/batches/b"),
        (Method::GET, "/v1/messages/batches/b/results"),
        (Method::POST, "/v1/messages/batches/b/cancel"),
        (Method::DELETE, "/v1/messages/batches/b"),
    ] {
        let (status, error) = lab.ask(method.clone(), path, "any", None).await;
        assert_eq!(status, 404, "{method} {path}");
        assert!(error["error"]["message"].as_str().unwrap().contains("--responses-store"), "{path}: {error}");
        assert_eq!(error["type"] == "error", path.starts_with("/v1/messages"), "{path}: {error}");
    }
}
