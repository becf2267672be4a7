//! Malformed bodies: every one gets a response, and none an internal error.

use http::{Method, Request};
use serde_json::{Value, json};

use super::protocol::ask;
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

/// Patches that are no object, and JSON patches that make the object something else.
#[tokio::test]
async fn patch_that_leaves_no_object_is_refused() {
    let cluster = TestServer::start().await;
    let client = cluster.client();
    let definition = serde_json::to_value(super::things()).unwrap();
    let definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    send(&client, &Method::POST, definitions, "application/json", &definition).await;
    let made = [
        ("/api/v1/namespaces/default/configmaps", json!({"metadata": {"name": "x"}})),
        ("/api/v1/namespaces", json!({"metadata": {"name": "x"}})),
        (
            "/apis/certificates.k8s.io/v1/certificatesigningrequests",
            json!({"metadata": {"name": "x"}, "spec": {"request": "eA==", "signerName": "a.b/c", "usages": ["client auth"]}}),
        ),
        (
            "/apis/example.com/v1/namespaces/default/things",
            json!({"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "x"}, "spec": {"size": 1}}),
        ),
    ];
    for (resource, object) in made {
        let (code, answer) = send(&client, &Method::POST, resource, "application/json", &object).await;
        assert_eq!(code, 201, "{resource}: {answer}");
        for value in
            [json!("notjson"), json!(5), json!(true), json!(null), json!([]), json!([{"op": "remove"}])]
        {
            let root = |op: &str| json!([{"op": op, "path": "", "value": value}]);
            let metadata = json!([{"op": "add", "path": "/metadata", "value": value}]);
            for (media, patch) in [
                ("application/merge-patch+json", value.clone()),
                ("application/strategic-merge-patch+json", value.clone()),
                ("application/json-patch+json", value.clone()),
                ("application/json-patch+json", root("replace")),
                ("application/json-patch+json", root("add")),
                ("application/json-patch+json", metadata.clone()),
                ("application/merge-patch+json", json!({"metadata": value})),
                ("application/apply-patch+yaml", value.clone()),
            ] {
                for subresource in ["", "/status", "/scale", "/approval"] {
                    let path = format!("{resource}/x{subresource}?fieldManager=t");
                    let path = if media.contains("apply") { path + "&force=true" } else { path };
                    let (code, answer) = send(&client, &Method::PATCH, &path, media, &patch).await;
                    // Null metadata is none, and the empty JSON patch does nothing.
                    let harmless =
                        value.is_null() && patch != value && patch != root("replace") && patch != root("add")
                            || (patch == json!([]) && media.contains("json-patch"));
                    let refused = (400..500).contains(&code);
                    assert!(
                        refused || (harmless && code < 300),
                        "{path} of {patch} as {media}: {code} {answer}"
                    );
                    if media.contains("merge") && patch == json!([]) && subresource.is_empty() && code == 400
                    {
                        assert!(answer.contains("cannot unmarshal array into Go value"), "{answer}");
                    }
                }
            }
        }
    }
    cluster.stop().await;
}

/// Bodies of a megabyte whose work would grow with their square, or beyond memory, if it were not bounded.
#[tokio::test]
async fn bodies_that_mean_endless_work_are_answered() {
    let cluster = TestServer::start().await;
    let configmaps = "/api/v1/namespaces/default/configmaps";
    let target = format!("{configmaps}/target");
    let plain = json!({"metadata": {"name": "target"}, "data": {"a": "b"}});
    let json_media = [("content-type", "application/json")];
    assert_eq!(ask(&cluster, Method::POST, configmaps, &json_media, &plain.to_string()).await.0, 201);
    let finalizers = |object: &str, name: &dyn Fn(usize) -> String| json!({"metadata": {"name": object, "finalizers": (0..20_000).map(name).collect::<Vec<_>>()}});
    let entries = |count: usize| {
        let data: serde_json::Map<String, serde_json::Value> =
            (0..count).map(|n| (n.to_string(), json!(""))).collect();
        let metadata = json!({"name": format!("entries-{count}")});
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}).to_string()
    };
    let nested = |levels: usize| (0..levels).fold(json!({}), |inner, _| json!({ "x": inner }));
    let leaves = vec!["0"; 1000].join(",");
    let aliases = format!("a: &a [{leaves}]\nb: [{}]\n", vec!["*a"; 1000].join(","));
    for (what, method, path, media, body, expected) in [
        (
            "many finalizers",
            Method::POST,
            configmaps,
            "application/json",
            finalizers("many", &|n| format!("a/{n}")).to_string(),
            201,
        ),
        (
            "one finalizer many times",
            Method::POST,
            configmaps,
            "application/json",
            finalizers("same", &|_| "a/b".into()).to_string(),
            201,
        ),
        ("entries", Method::POST, configmaps, "application/json", entries(29_990), 201),
        ("more entries", Method::POST, configmaps, "application/json", entries(30_010), 400),
        (
            "entries applied",
            Method::PATCH,
            "/api/v1/namespaces/default/configmaps/entries-30010?fieldManager=t",
            "application/apply-patch+yaml",
            entries(30_010),
            400,
        ),
        ("aliases", Method::POST, configmaps, "application/yaml", aliases.clone(), 400),
        (
            "aliases applied",
            Method::PATCH,
            "/api/v1/namespaces/default/configmaps/x?fieldManager=t",
            "application/apply-patch+yaml",
            aliases,
            400,
        ),
        (
            "values",
            Method::POST,
            configmaps,
            "application/json",
            json!({"x": vec![0; 250_000]}).to_string(),
            400,
        ),
        ("levels", Method::POST, configmaps, "application/json", nested(100).to_string(), 400),
        (
            "levels by a patch",
            Method::PATCH,
            &target,
            "application/merge-patch+json",
            nested(80).to_string(),
            400,
        ),
    ] {
        let (code, _, answer) = ask(&cluster, method, path, &[("content-type", media)], &body).await;
        let answer = answer.to_string();
        assert_eq!(code, expected, "{what}: {answer:.300}");
        assert!(code < 300 || answer.len() < 10_000, "{what}: {} bytes", answer.len());
    }
    cluster.stop().await;
}

#[tokio::test]
async fn methods_that_nobody_knows_are_one_label() {
    let cluster = TestServer::start().await;
    for number in 0..200 {
        for path in ["/x", "/api/v1/namespaces/default/configmaps"] {
            let method = Method::from_bytes(format!("MADEUP{number}").as_bytes()).unwrap();
            let (code, ..) = ask(&cluster, method, path, &[], "").await;
            assert_eq!(code, 405, "{path}");
        }
    }
    let (_, _, metrics) = ask(&cluster, Method::GET, "/metrics", &[], "").await;
    let text = metrics.as_str().unwrap();
    assert!(!text.to_lowercase().contains("madeup"), "{text:.2000}");
    let others = text.lines().filter(|line| line.contains(r#"verb="other""#)).count();
    assert!((1..100).contains(&others), "{others} series");
    cluster.stop().await;
}

#[tokio::test]
async fn a_watch_may_ask_for_any_timeout() {
    let cluster = TestServer::start().await;
    let path = format!("/api/v1/namespaces?watch=true&timeoutSeconds={}", u64::MAX);
    let request = Request::get(path).body(kube::client::Body::empty()).unwrap();
    assert_eq!(cluster.client().send(request).await.unwrap().status(), 200);
    cluster.stop().await;
}
