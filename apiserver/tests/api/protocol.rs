//! The protocol below the typed clients: discovery, representations, errors.

use http::{Method, Request};
use serde_json::{Value, json};

use super::support::TestServer;

pub(crate) async fn ask(
    cluster: &TestServer,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> (u16, http::HeaderMap, Value) {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(kube::client::Body::from(body.as_bytes().to_vec())).unwrap();
    let response = cluster.client().send(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let bytes = body.collect_bytes().await.unwrap();
    let value = serde_json::from_slice(&bytes)
        .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).into_owned()));
    (parts.status.as_u16(), parts.headers, value)
}

async fn get(cluster: &TestServer, path: &str) -> (u16, Value) {
    let (code, _, value) = ask(cluster, Method::GET, path, &[], "").await;
    (code, value)
}

#[tokio::test]
async fn discovery_answers_old_and_new_clients() {
    let cluster = TestServer::start().await;
    let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";
    let (_, headers, list) = ask(&cluster, Method::GET, "/apis", &[("accept", accept)], "").await;
    assert_eq!(
        headers["content-type"],
        "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    );
    assert!(
        list["items"]
            .as_array()
            .unwrap()
            .iter()
            .any(|group| group["metadata"]["name"] == "coordination.k8s.io")
    );
    let etag = headers["etag"].to_str().unwrap().to_string();
    let (code, ..) =
        ask(&cluster, Method::GET, "/apis", &[("accept", accept), ("if-none-match", &etag)], "").await;
    assert_eq!(code, 304);
    let (_, plain) = get(&cluster, "/apis").await;
    assert_eq!(plain["kind"], "APIGroupList");
    let (_, core) = get(&cluster, "/api/v1").await;
    let token = core["resources"]
        .as_array()
        .unwrap()
        .iter()
        .find(|entry| entry["name"] == "serviceaccounts/token")
        .unwrap();
    assert_eq!((&token["kind"], &token["group"]), (&json!("TokenRequest"), &json!("authentication.k8s.io")));
    let (_, version) = get(&cluster, "/version").await;
    assert!(version["gitVersion"].as_str().unwrap().starts_with("v1."));
    for path in ["/healthz", "/livez", "/readyz"] {
        assert_eq!(get(&cluster, path).await, (200, json!("ok")));
    }
    let (_, index) = get(&cluster, "/openapi/v3").await;
    let url = index["paths"]["api/v1"]["serverRelativeURL"].as_str().unwrap().to_string();
    let (code, document) = get(&cluster, &url).await;
    assert_eq!((code, &document["openapi"]), (200, &json!("3.0.0")));
    let (_, metrics) = get(&cluster, "/metrics").await;
    assert!(metrics.as_str().unwrap().contains("apiserver_request_total{"), "{metrics}");
    cluster.stop().await;
}

#[tokio::test]
async fn tables_and_metadata_are_shown_on_request() {
    let cluster = TestServer::start().await;
    let path = "/api/v1/namespaces";
    let table = [("accept", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json")];
    let (_, _, shown) = ask(&cluster, Method::GET, path, &table, "").await;
    assert_eq!(shown["kind"], "Table");
    assert_eq!(shown["rows"].as_array().unwrap().len(), 5);
    let partial = [("accept", "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io")];
    let (_, _, shown) = ask(&cluster, Method::GET, path, &partial, "").await;
    assert_eq!(
        (&shown["kind"], &shown["items"][0]["spec"]),
        (&json!("PartialObjectMetadataList"), &Value::Null)
    );
    cluster.stop().await;
}

#[tokio::test]
async fn malformed_requests_get_the_right_status() {
    let cluster = TestServer::start().await;
    let maps = "/api/v1/namespaces/default/configmaps";
    let body = r#"{"metadata":{"name":"a"},"data":{"x":"1"},"nonsense":1}"#;
    let big = format!(r#"{{"metadata":{{"name":"big"}},"data":{{"x":"{}"}}}}"#, "x".repeat(4 << 20));
    let json = ("content-type", "application/json");
    for (method, path, header, body, expected, reason) in [
        (Method::GET, "/api/v1/nothings", json, "", 404, "NotFound"),
        (Method::GET, "/apis/no.such/v1/things", json, "", 404, "NotFound"),
        (Method::POST, maps, json, "{", 400, "BadRequest"),
        (Method::POST, maps, json, "[]", 400, "BadRequest"),
        (Method::POST, maps, json, r#"{"kind":"Secret","metadata":{"name":"a"}}"#, 400, "BadRequest"),
        (Method::POST, maps, json, r#"{"metadata":{"name":"A_b"}}"#, 422, "Invalid"),
        (Method::POST, maps, json, r#"{"metadata":{"name":"a","labels":"x"}}"#, 400, "BadRequest"),
        (Method::POST, maps, ("content-type", "text/html"), "<p>", 415, "UnsupportedMediaType"),
        (Method::POST, maps, json, &big, 413, "RequestEntityTooLarge"),
        (Method::POST, "/api/v1/nodes", json, "{}", 405, "MethodNotAllowed"),
        (Method::GET, "/api/v1/configmaps?labelSelector=a+in+(", json, "", 400, "BadRequest"),
        (Method::GET, "/api/v1/configmaps?fieldSelector=data.x%3D1", json, "", 400, "BadRequest"),
        (
            Method::POST,
            "/api/v1/namespaces/default/configmaps?fieldValidation=Strict",
            json,
            body,
            400,
            "BadRequest",
        ),
    ] {
        let (code, _, status) = ask(&cluster, method.clone(), path, &[header], body).await;
        assert_eq!((code, &status["reason"]), (expected, &json!(reason)), "{method} {path}: {status}");
    }
    let (code, headers, _) = ask(&cluster, Method::POST, maps, &[json], body).await;
    assert_eq!(code, 201);
    assert_eq!(headers["warning"], r#"299 - "unknown field \"nonsense\"""#);
    let preconditions = r#"{"preconditions":{"uid":"other"}}"#;
    let (code, ..) = ask(&cluster, Method::DELETE, &format!("{maps}/a"), &[json], preconditions).await;
    assert_eq!(code, 409);
    cluster.stop().await;
}

#[tokio::test]
async fn an_event_is_one_object_under_two_groups() {
    let cluster = TestServer::start().await;
    let event = json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": "e"}, "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "test", "reportingInstance": "t", "action": "Test", "reason": "Testing", "type": "Normal",
        "note": "hello", "regarding": {"kind": "Thing", "name": "x", "namespace": "default"},
    });
    let path = "/apis/events.k8s.io/v1/namespaces/default/events";
    let json_type = [("content-type", "application/json")];
    let (code, _, made) = ask(&cluster, Method::POST, path, &json_type, &event.to_string()).await;
    assert_eq!(code, 201, "{made}");
    let (_, list) =
        get(&cluster, "/api/v1/namespaces/default/events?fieldSelector=involvedObject.name%3Dx").await;
    assert_eq!(list["items"][0]["message"], "hello");
    let (_, again) = get(&cluster, &format!("{path}/e")).await;
    assert_eq!(again["note"], "hello");
    cluster.stop().await;
}

#[tokio::test]
async fn typed_writes_may_come_as_protobuf() {
    // k8s\0, then runtime.Unknown{typeMeta{v1, Namespace}, raw: Namespace{metadata{name: "pb"}}}.
    let mut body = b"k8s\0".to_vec();
    body.extend(b"\x0a\x0f\x0a\x02v1\x12\x09Namespace");
    body.extend(b"\x12\x06\x0a\x04\x0a\x02pb");
    let cluster = TestServer::start().await;
    let text = String::from_utf8(body).unwrap();
    let header = [("content-type", "application/vnd.kubernetes.protobuf")];
    let (code, _, made) = ask(&cluster, Method::POST, "/api/v1/namespaces", &header, &text).await;
    assert_eq!(code, 201, "{made}");
    assert_eq!(made["metadata"]["name"], "pb");
    cluster.stop().await;
}
