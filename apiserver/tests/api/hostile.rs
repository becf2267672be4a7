//! Malformed bodies: every one gets a response, and none an internal error.

use http::{Method, Request};
use serde_json::{Value, json};

use super::support::TestServer;

/// Sends a body and returns the status code, and the response for the message of a failed assertion.
async fn send(
    client: &kube::Client,
    method: &Method,
    path: &str,
    media: &str,
    body: &Value,
) -> (u16, String) {
    let request = Request::builder().method(method).uri(path).header("content-type", media);
    let request = request.body(kube::client::Body::from(body.to_string().into_bytes())).unwrap();
    let (parts, body) = client.send(request).await.unwrap().into_parts();
    (parts.status.as_u16(), String::from_utf8_lossy(&body.collect_bytes().await.unwrap()).into_owned())
}

fn set(object: &mut Value, path: &str, value: Value) {
    let mut place = object;
    for part in path.split('.') {
        if !place.is_object() {
            *place = json!({});
        }
        place = &mut place[part];
    }
    *place = value;
}

#[tokio::test]
async fn no_body_makes_the_server_fail() {
    let cluster = TestServer::start().await;
    let client = cluster.client();
    let rbac = "/apis/rbac.authorization.k8s.io/v1";
    let resources = [
        "/api/v1/namespaces".to_string(),
        "/api/v1/namespaces/default/configmaps".into(),
        "/api/v1/namespaces/default/secrets".into(),
        "/api/v1/namespaces/default/serviceaccounts".into(),
        "/api/v1/namespaces/default/events".into(),
        "/apis/events.k8s.io/v1/namespaces/default/events".into(),
        "/apis/coordination.k8s.io/v1/namespaces/default/leases".into(),
        format!("{rbac}/clusterroles"),
        format!("{rbac}/namespaces/default/rolebindings"),
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions".into(),
        "/apis/certificates.k8s.io/v1/certificatesigningrequests".into(),
    ];
    let fields = [
        "metadata",
        "metadata.labels",
        "metadata.annotations",
        "metadata.ownerReferences",
        "metadata.finalizers",
        "metadata.managedFields",
        "metadata.generateName",
        "metadata.creationTimestamp",
        "spec",
        "spec.names",
        "spec.names.shortNames",
        "spec.versions",
        "spec.conversion",
        "spec.request",
        "spec.finalizers",
        "status",
        "status.conditions",
        "data",
        "stringData",
        "type",
        "immutable",
        "rules",
        "roleRef",
        "subjects",
        "aggregationRule",
        "involvedObject",
        "series",
        "apiVersion",
        "kind",
    ];
    let values = [
        json!(null),
        json!("x"),
        json!(-1),
        json!(1.5),
        json!([]),
        json!([1]),
        json!([{}]),
        json!({"a": 1}),
        json!(true),
    ];
    let mut sent = 0;
    for resource in &resources {
        let target = format!("{resource}/target");
        let plain = json!({"metadata": {"name": "target"}, "spec": {"request": "eA==", "signerName": "a.b/c"},
            "roleRef": {"kind": "Role", "name": "r"}});
        send(&client, &Method::POST, resource, "application/json", &plain).await;
        for field in fields {
            for value in &values {
                let mut body = json!({"metadata": {"name": "hostile"}});
                set(&mut body, field, value.clone());
                let mut patch = json!({});
                set(&mut patch, field, value.clone());
                let hostile = format!("{resource}/hostile?fieldManager=test&force=true");
                for (method, path, media, body) in [
                    (Method::POST, format!("{resource}?dryRun=All"), "application/json", &body),
                    (Method::PATCH, hostile, "application/apply-patch+yaml", &body),
                    (Method::PATCH, target.clone(), "application/merge-patch+json", &patch),
                    (Method::PATCH, format!("{target}/status"), "application/merge-patch+json", &patch),
                    (Method::PATCH, target.clone(), "application/strategic-merge-patch+json", &patch),
                ] {
                    let (code, answer) = send(&client, &method, &path, media, body).await;
                    assert!(code < 500, "{method} {path} of {body} as {media}: {answer}");
                    sent += 1;
                }
            }
        }
    }
    assert!(sent > 10_000, "{sent} bodies were sent");
    cluster.stop().await;
}
