//! Requests that are invalid, too large or forbidden, sent as bytes where no HTTP client would.

use russet_gateway::dispatch::DispatchLimits;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_util::sync::CancellationToken;

use crate::harness::{GatewayLab, ScriptStep, TEST_TIMEOUT, access_key, hello, limits, started, token};

/// Sends `request` unchanged and returns status and body of the response.
async fn raw(lab: &GatewayLab, request: &[u8]) -> (u16, String) {
    let mut stream = tokio::net::TcpStream::connect(lab.address).await.unwrap();
    // The gateway may respond and close before it has read everything.
    let _ = stream.write_all(request).await;
    let mut answer = Vec::new();
    let read = tokio::time::timeout(TEST_TIMEOUT, stream.read_to_end(&mut answer)).await;
    assert!(read.is_ok(), "no end of {:?}", String::from_utf8_lossy(&answer));
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

#[tokio::test]
async fn every_refusal_has_openais_shape_and_the_right_status() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let chat = "/v1/chat/completions";
    for (method, path, host, body, status, code) in [
        ("POST", chat, "localhost", "{not json", 400, Value::Null),
        ("POST", chat, "localhost", "", 400, Value::Null),
        ("POST", chat, "localhost", r#"{"model":"m","messages":[]}"#, 400, Value::Null),
        (
            "POST",
            chat,
            "localhost",
            r#"{"model":"nix","messages":[{"role":"user","content":"hi"}]}"#,
            404,
            json!("model_not_found"),
        ),
        (
            "POST",
            chat,
            "localhost",
            &format!(
                r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],"stop":"{}"}}"#,
                "x".repeat(1025)
            ),
            400,
            Value::Null,
        ),
        ("GET", "/v1/models/nix", "localhost", "", 404, json!("model_not_found")),
        ("GET", "/v1/models/%ff", "localhost", "", 400, Value::Null),
        ("GET", "/v1/nix", "localhost", "", 404, json!("unknown_url")),
        ("GET", "/nix", "localhost", "", 404, json!("unknown_url")),
        // Clients that probe for vLLM and llama.cpp.
        ("GET", "/version", "localhost", "", 404, json!("unknown_url")),
        ("GET", "/v1/props", "localhost", "", 404, json!("unknown_url")),
        ("GET", chat, "localhost", "", 405, json!("method_not_allowed")),
        ("DELETE", "/v1/models", "localhost", "", 405, json!("method_not_allowed")),
        ("POST", chat, "evil.example", "{}", 403, json!("forbidden")),
        ("GET", "/metrics", "evil.example", "", 403, json!("forbidden")),
    ] {
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        let (got, answer) = raw(&lab, request.as_bytes()).await;
        assert_eq!(got, status, "{method} {path} {host} {body}: {answer}");
        let answer: Value =
            serde_json::from_str(&answer).unwrap_or_else(|_| panic!("{method} {path}: {answer}"));
        let error = answer["error"].as_object().unwrap();
        let mut fields: Vec<&str> = error.keys().map(String::as_str).collect();
        fields.sort_unstable();
        assert_eq!(fields, ["code", "message", "param", "type"], "{method} {path}");
        assert_eq!(error["code"], code, "{method} {path}");
        assert!(
            !error["message"].as_str().unwrap().is_empty() && error["type"].is_string(),
            "{method} {path}"
        );
    }
    assert_eq!(engine.requests(), 0, "no engine saw any of these");
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_refused_announced_or_not() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    let announced = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 99999999\r\n\r\n{";
    let (status, body) = raw(&lab, announced).await;
    assert_eq!((status, body.contains("request_too_large")), (413, true), "{body}");

    let mut chunked = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    for _ in 0..17 {
        chunked.extend_from_slice(b"100000\r\n");
        chunked.extend(std::iter::repeat_n(b' ', 0x10_0000));
        chunked.extend_from_slice(b"\r\n");
    }
    let (status, body) = raw_tolerant(&lab, &chunked).await;
    assert_eq!((status, body.contains("request_too_large")), (413, true), "{body}");

    let large = "x".repeat(8 * 1024 * 1024);
    let fits = lab.chat(json!({"messages": [{"role": "user", "content": large}]})).send().await.unwrap();
    // The fake engine keeps gRPC's own limit of 4 MiB; the gateway must have passed the body on.
    assert_ne!(fits.status(), 413);
}

#[tokio::test]
async fn unanswered_requests_hold_a_bounded_number_of_bytes() {
    let lab =
        GatewayLab::start(DispatchLimits { max_total_body_bytes: 3 * 1024 * 1024 / 2, ..limits() }).await;
    let go = CancellationToken::new();
    // Another engine may have to resume a started response, so its body stays in memory.
    let engine =
        lab.only_engine([vec![started(), token("x"), ScriptStep::Until(go.clone())], hello()].concat());
    let ask = |bytes: usize| {
        let content = "x".repeat(bytes);
        lab.chat(json!({"messages": [{"role": "user", "content": content}]})).send()
    };
    let assert_full = |response: reqwest::Response| async move {
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()["retry-after"], "1");
        let error: Value = response.json::<Value>().await.unwrap()["error"].take();
        assert_eq!((&error["code"], &error["type"]), (&json!("gateway_full"), &json!("server_error")));
        assert!(error["message"].as_str().unwrap().contains("of 1 MiB"), "{error}");
    };
    assert_full(ask(2 * 1024 * 1024).await.unwrap()).await;
    let waiting = tokio::spawn(ask(700_000));
    engine.running(1).await;
    assert_full(ask(700_000).await.unwrap()).await;
    go.cancel();
    assert_eq!(waiting.await.unwrap().unwrap().status(), 200);
    assert_eq!(ask(700_000).await.unwrap().status(), 200, "the budget is free again");
    let counted = lab.metrics().await;
    assert!(counted.lines().any(|line| line.contains("gateway_full") && line.ends_with(" 2")), "{counted}");
}

#[tokio::test]
async fn one_key_cannot_use_the_byte_budget_of_others() {
    let lab = GatewayLab::start(DispatchLimits { max_total_body_bytes: 12 * 1024 * 1024, ..limits() }).await;
    lab.keys(&[access_key("one", "s-one", |_| {}), access_key("two", "s-two", |_| {})]);
    let go = CancellationToken::new();
    let engine = lab.only_engine([vec![started(), ScriptStep::Until(go.clone())], hello()].concat());
    let ask = |key: &'static str| {
        // While it is decoded, a body counts twice.
        let content = "x".repeat(if key == "s-two" { 1_500_000 } else { 1_900_000 });
        lab.chat(json!({"messages": [{"role": "user", "content": content}]})).bearer_auth(key).send()
    };
    let mut waiting = Vec::new();
    for running in 1..=3 {
        waiting.push(tokio::spawn(ask("s-one")));
        engine.running(running).await;
    }
    let rejected = ask("s-one").await.unwrap();
    assert_eq!(
        (rejected.status().as_u16(), &rejected.headers()["retry-after"]),
        (503, &"1".parse().unwrap())
    );
    let error: Value = rejected.json::<Value>().await.unwrap()["error"].take();
    let message = error["message"].as_str().unwrap();
    assert_eq!(error["code"], "gateway_full");
    assert!(
        message.contains("of 12 MiB, and this one does not fit; this key uses 7 MiB, and the last 3 MiB are reserved for other keys"),
        "{message}"
    );
    waiting.push(tokio::spawn(ask("s-two")));
    engine.running(4).await;
    go.cancel();
    for answer in waiting {
        assert_eq!(answer.await.unwrap().unwrap().status(), 200);
    }
    assert_eq!(ask("s-one").await.unwrap().status(), 200, "the budget is free again");
}

/// Like [`raw`], but reads while it writes: the response comes before the request is complete.
async fn raw_tolerant(lab: &GatewayLab, request: &[u8]) -> (u16, String) {
    let stream = tokio::net::TcpStream::connect(lab.address).await.unwrap();
    let (mut reader, mut writer) = stream.into_split();
    let write = async {
        let _ = writer.write_all(request).await;
    };
    let read = async {
        let mut answer = Vec::new();
        let mut buffer = [0; 4096];
        while !answer.windows(4).any(|window| window == b"}}\n" || window.ends_with(b"\"}}")) {
            match reader.read(&mut buffer).await {
                Ok(0) | Err(_) => break,
                Ok(count) => answer.extend_from_slice(&buffer[..count]),
            }
        }
        String::from_utf8_lossy(&answer).into_owned()
    };
    let (_, answer) = tokio::time::timeout(TEST_TIMEOUT, async { tokio::join!(write, read) }).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    (head.split(' ').nth(1).unwrap_or("0").parse().unwrap(), body.to_owned())
}

#[tokio::test]
async fn page_of_another_site_gets_a_refusal_it_can_read() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let evil = "https://evil.example";
    // Any key is as good as none while none exists.
    for request in [lab.chat(json!({})), lab.chat(json!({})).bearer_auth("sk-any")] {
        let response = request.header("origin", evil).send().await.unwrap();
        assert_eq!(response.status(), 403);
        assert_eq!(response.headers()["access-control-allow-origin"], evil);
        let error: Value = response.json::<Value>().await.unwrap()["error"].take();
        assert!(
            error["message"].as_str().unwrap().contains("--allow-origin https://evil.example"),
            "{error}"
        );
    }
    let preflight =
        lab.client.request(reqwest::Method::OPTIONS, lab.url("/v1/chat/completions")).header("origin", evil);
    assert_eq!(preflight.send().await.unwrap().status(), 204, "what follows a preflight is checked");
    let metrics = lab.client.get(lab.url("/metrics")).header("origin", evil).bearer_auth("sk-any");
    assert_eq!(metrics.send().await.unwrap().status(), 403);
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn an_accepted_key_needs_no_origin_or_host() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    lab.keys(&[access_key("one", "s-one", |_| {})]);
    for (name, value) in [("origin", "https://chat.example"), ("origin", "null"), ("host", "studio.example")]
    {
        for (secret, status) in [(Some("s-one"), 200), (Some("s-wrong"), 401), (None, 403)] {
            let request = lab.chat(json!({})).header(name, value);
            let request = match secret {
                Some(secret) => request.bearer_auth(secret),
                None => request,
            };
            assert_eq!(request.send().await.unwrap().status(), status, "{name} {value} {secret:?}");
        }
    }
    for host in ["host.docker.internal:52415", "studio.local"] {
        let request = lab.chat(json!({})).header("host", host).bearer_auth("s-one");
        assert_eq!(request.send().await.unwrap().status(), 200, "{host}");
    }
}

#[tokio::test]
async fn encodings_that_are_not_read_are_named() {
    let lab = GatewayLab::start(limits()).await;
    let engine = lab.only_engine(hello());
    let post = |body: Vec<u8>| lab.client.post(lab.url("/v1/chat/completions")).body(body);
    let chat = r#"{"model":"m","messages":[{"role":"user","content":"hi \ud83d"}]}"#;
    let utf16: Vec<u8> = chat.encode_utf16().flat_map(u16::to_le_bytes).collect();
    for (request, word) in [
        (post(b"\x1f\x8b".to_vec()).header("content-encoding", "gzip"), "gzip"),
        (post(b"\x1f\x8b".to_vec()), "gzip"),
        (post(utf16.clone()), "UTF-16"),
        (post(utf16).header("content-type", "application/json; charset=utf-16"), "utf-16"),
    ] {
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 415);
        let error: Value = response.json::<Value>().await.unwrap()["error"].take();
        assert_eq!(error["code"], "unsupported_media_type");
        assert!(error["message"].as_str().unwrap().contains(word), "{error}");
    }
    assert_eq!(engine.requests(), 0);
    let marked = ["\u{feff}".as_bytes(), chat.as_bytes()].concat();
    let read = post(marked).header("content-encoding", "identity");
    assert_eq!(read.send().await.unwrap().status(), 200, "a byte order mark is no encoding");
    engine.received("hi \u{fffd}").await;
}

#[tokio::test]
async fn a_head_that_is_too_large_is_refused_with_its_size() {
    let lab = GatewayLab::start(limits()).await;
    let request = lab.client.get(lab.url("/v1/models")).header("cookie", "x".repeat(70_000));
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 431);
    let error: Value = response.json::<Value>().await.unwrap()["error"].take();
    assert_eq!(error["code"], "headers_too_large");
    assert!(error["message"].as_str().unwrap().contains("at most 65536"), "{error}");
}

#[tokio::test]
async fn loopback_accepts_any_key_while_none_exists() {
    let lab = GatewayLab::start(limits()).await;
    let _engine = lab.only_engine(hello());
    for key in [None, Some("sk-anything"), Some("")] {
        let request = lab.chat(json!({}));
        let request = match key {
            Some(key) => request.bearer_auth(key),
            None => request,
        };
        assert_eq!(request.send().await.unwrap().status(), 200);
    }
}
