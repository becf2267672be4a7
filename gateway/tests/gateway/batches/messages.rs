//! Batches of Anthropic's messages.

use super::*;

const PATH: &str = "/v1/messages/batches";

fn request(id: &str, content: &str) -> Value {
    json!({"custom_id": id, "params": {
        "model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": content}],
    }})
}

impl GatewayLab {
    /// The id of a batch of these requests.
    async fn messages(&self, key: &str, requests: &[Value]) -> String {
        let body = json!({"requests": requests});
        let (status, batch) = self.ask(Method::POST, PATH, key, Some(body)).await;
        assert_eq!((status, &batch["type"]), (200, &json!("message_batch")), "{batch}");
        assert_eq!(
            (&batch["processing_status"], &batch["results_url"]),
            (&json!("in_progress"), &Value::Null)
        );
        assert_eq!(batch["request_counts"]["processing"], requests.len());
        batch["id"].as_str().unwrap().to_owned()
    }

    async fn ended(&self, id: &str) -> Value {
        self.until(&format!("{PATH}/{id}"), |batch| batch["processing_status"] == "ended").await
    }

    /// Status and text of the results.
    async fn results(&self, id: &str) -> (u16, String) {
        let response = self.client.get(self.url(&format!("{PATH}/{id}/results"))).bearer_auth("s-a");
        let response = response.send().await.unwrap();
        let (status, length) = (response.status().as_u16(), response.content_length());
        let text = response.text().await.unwrap();
        // A client sees by it where the batch was deleted while it was read.
        assert_eq!(length, Some(text.len() as u64), "{status} {text}");
        (status, text)
    }

    /// The type of each result by its id.
    async fn outcomes(&self, id: &str) -> Vec<(String, String)> {
        let (status, text) = self.results(id).await;
        assert_eq!(status, 200, "{text}");
        let outcome = |line: &str| {
            let line: Value = serde_json::from_str(line).unwrap();
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            (text(&line["custom_id"]), text(&line["result"]["type"]))
        };
        text.lines().map(outcome).collect()
    }
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(id, kind)| ((*id).to_owned(), (*kind).to_owned())).collect()
}

#[tokio::test]
async fn a_batch_of_messages_has_a_result_for_each() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let engine = engine(&lab);
    let invalid = json!({"custom_id": "b", "params": {"model": "m", "messages": []}});
    let id = lab.messages("s-a", &[request("a", "x"), invalid, request("c", "y")]).await;
    let batch = lab.ended(&id).await;
    assert_eq!(
        batch["request_counts"],
        json!({"processing": 0, "succeeded": 2, "errored": 1, "canceled": 0, "expired": 0})
    );
    assert_eq!(batch["results_url"], lab.url(&format!("{PATH}/{id}/results")));
    assert!(batch["ended_at"].as_str().unwrap().ends_with('Z'), "{batch}");
    let (_, text) = lab.results(&id).await;
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(ids(&lines), ["a", "c", "b"]);
    assert_eq!(lines[0]["result"]["message"]["content"][0]["text"], "Hello there");
    let error = &lines[2]["result"]["error"];
    assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("invalid_request_error")));
    assert!(engine.received.lock().unwrap().iter().all(|request| request.priority == -100));
    // It has no files that a list of OpenAI's shows, and no batch there.
    for path in ["/v1/files", "/v1/batches"] {
        assert_eq!(lab.done(Method::GET, path, None).await["data"], json!([]), "{path}");
    }
    let deleted = lab.done(Method::DELETE, &format!("{PATH}/{id}"), None).await;
    assert_eq!(deleted, json!({"id": id, "type": "message_batch_deleted"}));
    let (status, error) = lab.ask(Method::GET, &format!("{PATH}/{id}"), "any", None).await;
    assert_eq!((status, &error["error"]["type"]), (404, &json!("not_found_error")));
}

#[tokio::test]
async fn a_cancelled_batch_of_messages_keeps_its_results() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let engine = engine(&lab);
    let id = lab.messages("s-a", &[request("a", "hang"), request("b", "x"), request("c", "hang")]).await;
    engine.received("x").await;
    engine.running(2).await;
    for (method, path) in [(Method::GET, "/results"), (Method::DELETE, "")] {
        let (status, error) = lab.ask(method, &format!("{PATH}/{id}{path}"), "any", None).await;
        assert_eq!((status, &error["error"]["type"]), (400, &json!("invalid_request_error")), "{error}");
    }
    let cancelled = lab.done(Method::POST, &format!("{PATH}/{id}/cancel"), None).await;
    assert!(cancelled["cancel_initiated_at"].is_string(), "{cancelled}");
    let batch = lab.ended(&id).await;
    engine.running(0).await;
    let counts = &batch["request_counts"];
    assert_eq!(counts["succeeded"].as_u64().unwrap() + counts["canceled"].as_u64().unwrap(), 3);
    assert!(counts["canceled"].as_u64().unwrap() >= 2, "{counts}");
    let mut outcomes = lab.outcomes(&id).await;
    outcomes.sort();
    let middle = if counts["canceled"] == 2 { "succeeded" } else { "canceled" };
    assert_eq!(outcomes, pairs(&[("a", "canceled"), ("b", middle), ("c", "canceled")]));
    assert_eq!(lab.ask(Method::POST, &format!("{PATH}/{id}/cancel"), "any", None).await.0, 400);
}

#[tokio::test]
async fn batches_of_messages_are_listed_in_pages() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let _engine = engine(&lab);
    let mut made = Vec::new();
    for _ in 0..3 {
        let id = lab.messages("any", &[request("a", "x")]).await;
        lab.ended(&id).await;
        made.insert(0, id);
    }
    for (query, expected, has_more) in [
        (String::new(), &made[..], false),
        ("?limit=2".to_owned(), &made[..2], true),
        (format!("?after_id={}", made[1]), &made[2..], false),
        (format!("?before_id={}&limit=1", made[2]), &made[1..2], true),
        (format!("?before_id={}", made[1]), &made[..1], false),
    ] {
        let page = lab.done(Method::GET, &format!("{PATH}{query}"), None).await;
        let listed: Vec<&str> =
            page["data"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap()).collect();
        assert_eq!(
            (listed, page["has_more"] == true),
            (expected.iter().map(String::as_str).collect(), has_more),
            "{query}"
        );
        assert_eq!(page["first_id"].as_str(), expected.first().map(String::as_str));
        assert_eq!(page["last_id"].as_str(), expected.last().map(String::as_str));
    }
    for query in ["?limit=0", "?limit=1001", "?limit=x"] {
        assert_eq!(lab.ask(Method::GET, &format!("{PATH}{query}"), "any", None).await.0, 400, "{query}");
    }
}

#[tokio::test]
async fn requests_that_no_batch_takes_are_named() {
    let (_folder, lab) = GatewayLab::start_in_new_folder().await;
    let engine = engine(&lab);
    for (body, words) in [
        (json!({"requests": []}), "requests"),
        (json!({"requests": [request("a", "x"), request("a", "x")]}), "requests.1.custom_id"),
        (json!({"requests": [{"custom_id": "a", "params": {"stream": true}}]}), "requests.0.params.stream"),
    ] {
        let (status, error) = lab.ask(Method::POST, PATH, "any", Some(body)).await;
        assert_eq!((status, &error["error"]["type"]), (400, &json!("invalid_request_error")));
        assert!(error["error"]["message"].as_str().unwrap().contains(words), "{error}");
    }
    assert_eq!(lab.done(Method::GET, PATH, None).await["data"], json!([]));
    assert_eq!(engine.requests(), 0);
}
