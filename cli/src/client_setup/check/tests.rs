//! Tests of checks against a server that records what was sent and says what a gateway would say.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, Uri};
use axum::response::IntoResponse as _;
use serde_json::json;

use super::*;
use crate::client_setup::clients;
use crate::client_setup::endpoint::{GatewayEndpoint, http_client, parse_models};

/// What arrived: method, path and query, key, and body.
type ReceivedRequest = (Method, String, Option<String>, Value);

/// A client, of which `main` has chosen the TLS provider.
fn http() -> reqwest::Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    http_client().unwrap()
}

/// A server on loopback, with what it answers to each path and query.
struct StubGateway {
    url: String,
    received: Arc<Mutex<Vec<ReceivedRequest>>>,
}

impl StubGateway {
    async fn start(answer: fn(&str) -> (u16, String)) -> Self {
        let received = Arc::new(Mutex::new(Vec::new()));
        let handler = move |State(received): State<Arc<Mutex<Vec<ReceivedRequest>>>>,
                            method: Method,
                            uri: Uri,
                            headers: HeaderMap,
                            body: Bytes| async move {
            let path = uri.to_string();
            let key = headers.get("authorization").map(|value| value.to_str().unwrap().to_owned());
            let body = serde_json::from_slice(&body).unwrap_or_default();
            received.lock().unwrap().push((method, path.clone(), key, body));
            let (status, body) = answer(&path);
            (StatusCode::from_u16(status).unwrap(), body).into_response()
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new().fallback(handler).with_state(received.clone());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { url, received }
    }

    async fn check(&self, client: &str, key: Option<&str>) -> Vec<CheckResult> {
        let list = json!({"data": [{"id": "smoke", "context_length": 4096,
            "russet": {"ready": true, "message": "", "deployments": ["default/smoke"]}}]});
        let key = key.map(str::to_owned);
        let endpoint =
            GatewayEndpoint::new(self.url.clone(), key.clone(), parse_models(&list), None).unwrap();
        let http = http();
        let mut results = Vec::new();
        for request in (clients::find(client).unwrap().setup)(&endpoint).requests {
            let timeout = Duration::from_secs(30);
            results.push(send(&http, &self.url, key.as_deref(), "smoke", &request, timeout).await);
        }
        results
    }
}

fn good(path: &str) -> (u16, String) {
    let body = match path {
        "/" => "",
        "/v1/models" | "/v1/models?limit=1000" => r#"{"object": "list", "data": [{"id": "smoke"}]}"#,
        "/api/tags" => r#"{"models": [{"name": "smoke:latest"}]}"#,
        "/v1/messages?beta=true" => {
            "event: message_start\ndata: {\"type\": \"message_start\"}\n\nevent: ping\ndata: {\"type\": \"ping\"}\n\n\
             event: message_stop\ndata: {\"type\": \"message_stop\"}\n\n"
        }
        "/v1/responses" => {
            "event: response.created\ndata: {\"type\": \"response.created\", \"response\": {\"error\": null}}\n\n\
             event: response.incomplete\ndata: {\"type\": \"response.incomplete\"}\n\n"
        }
        "/v1/chat/completions" => {
            ": alive\n\ndata: {\"choices\": [{\"delta\": {\"content\": \"hi\"}}]}\n\ndata: [DONE]\n\n"
        }
        "/api/chat" => "{\"message\": {\"content\": \"\"}, \"done\": false}\n{\"done\": true}\n",
        _ => return (404, r#"{"error": {"message": "there is no such path"}}"#.to_owned()),
    };
    (200, body.to_owned())
}

#[tokio::test]
async fn every_client_passes_at_a_gateway_that_answers_well() {
    for client in clients::ALL {
        let stub = StubGateway::start(good).await;
        let results = stub.check(client.name, Some("rk-1")).await;
        for result in &results {
            assert!(result.is_good && result.line.starts_with("✓ "), "{}: {}", client.name, result.line);
        }
        let received = stub.received.lock().unwrap();
        assert_eq!(received.len(), results.len());
        assert!(
            received.iter().all(|(_, _, key, _)| key.as_deref() == Some("Bearer rk-1")),
            "{}",
            client.name
        );
    }
}

#[tokio::test]
async fn requests_are_those_of_the_client() {
    let paths = |stub: &StubGateway| -> Vec<String> {
        stub.received.lock().unwrap().iter().map(|(method, path, ..)| format!("{method} {path}")).collect()
    };
    for (client, expected) in [
        ("claude-code", vec!["HEAD /", "GET /v1/models?limit=1000", "POST /v1/messages?beta=true"]),
        ("codex", vec!["POST /v1/responses"]),
        ("hermes", vec!["GET /api/v1/models", "GET /api/tags", "POST /v1/chat/completions"]),
        ("open-webui", vec!["GET /v1/models", "POST /v1/chat/completions"]),
        ("home-assistant", vec!["GET /api/tags", "POST /api/chat"]),
    ] {
        let stub = StubGateway::start(good).await;
        stub.check(client, None).await;
        assert_eq!(paths(&stub), expected);
        let received = stub.received.lock().unwrap();
        let (_, _, key, body) = received.last().unwrap();
        assert_eq!(*key, None);
        let name = if client == "home-assistant" { "smoke:latest" } else { "smoke" };
        assert_eq!((&body["model"], &body["stream"]), (&json!(name), &json!(true)), "{client}");
    }
}

#[tokio::test]
async fn refusals_name_the_remedy() {
    let stub = StubGateway::start(|_| {
        (401, r#"{"error": {"message": "the request has no key", "code": "invalid_api_key"}}"#.to_owned())
    })
    .await;
    let results = stub.check("codex", None).await;
    assert_eq!(
        results[0].line,
        "✗ POST /v1/responses: 401 Unauthorized: the request has no key; create a key with `russet key create NAME`, \
         and give it with --key or in RUSSET_KEY"
    );
    assert!(!results[0].is_good && !results[0].is_unreachable);

    let stub = StubGateway::start(|_| (200, "{}".to_owned())).await;
    let results = stub.check("hermes", None).await;
    assert_eq!(results[0].line, "✗ GET /api/v1/models: 200 OK, where the client expects 404");
    assert_eq!(results[1].line, "✗ GET /api/tags: a list without `models`: {}");
    assert!(results[2].line.contains("the stream has no end"), "{}", results[2].line);
}

#[tokio::test]
async fn a_gateway_that_is_not_there_is_unreachable() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let stub = StubGateway { url: url.clone(), received: Arc::default() };
    let results = stub.check("open-webui", None).await;
    assert!(results[0].is_unreachable && !results[0].is_good);
    assert!(results[0].line.contains(&format!("nothing answers at {url}")), "{}", results[0].line);
    assert!(results[0].line.contains("--url"), "{}", results[0].line);
    let http = http();
    let error = get_json(&http, &url, None, "/v1/models", Duration::from_secs(30)).await.unwrap_err();
    assert!(error.contains("russet up"), "{error}");
}

#[test]
fn streams_end_as_their_dialect_says_or_are_wrong() {
    for (body, expected) in [
        ("data: [DONE]\n", Ok("its end")),
        ("data: {\"type\": \"response.completed\", \"response\": {\"error\": null}}\n", Ok("its end")),
        ("{\"done\": true}\n", Ok("its end")),
        ("data: {\"error\": {\"message\": \"engine lost\"}}\n\ndata: [DONE]\n", Err("engine lost")),
        (
            "event: error\ndata: {\"type\": \"error\", \"error\": {\"message\": \"overloaded\"}}\n",
            Err("overloaded"),
        ),
        (
            "data: {\"type\": \"response.failed\", \"response\": {\"error\": {\"message\": \"poison\"}}}\n",
            Err("poison"),
        ),
        ("{\"error\": \"model 'x' not found\"}\n", Err("model 'x' not found")),
        ("data: {\"choices\": []}\n", Err("has no end")),
        ("", Err("nothing came")),
    ] {
        match (stream(body), expected) {
            (Ok(words), Ok(part)) | (Err(words), Err(part)) => assert!(words.contains(part), "{words}"),
            (found, _) => panic!("{body}: {found:?}"),
        }
    }
}

#[test]
fn what_strangers_say_is_cut_and_on_one_line() {
    let long = format!("<html>\n\u{1b}[31m{}</html>", "x".repeat(10_000));
    let words = refused(StatusCode::BAD_GATEWAY, &long);
    assert!(words.starts_with("502 Bad Gateway: <html> [31mxxx") && words.len() < 600, "{words}");
    assert_eq!(refused(StatusCode::BAD_GATEWAY, ""), "502 Bad Gateway: an empty response");
}
