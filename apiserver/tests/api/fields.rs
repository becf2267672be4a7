//! Fields whose form or whose writer the server decides, as Kubernetes does: times, finalizers of namespaces, decisions
//! of signing requests.

use http::Method;
use serde_json::{Value, json};

use super::protocol::ask;
use super::support::TestServer;

const JSON: (&str, &str) = ("content-type", "application/json");

async fn send(cluster: &TestServer, method: Method, path: &str, media: &str, body: &Value) -> (u16, Value) {
    let (code, _, answer) = ask(cluster, method, path, &[("content-type", media)], &body.to_string()).await;
    (code, answer)
}

#[tokio::test]
async fn times_that_go_cannot_read_are_never_stored() {
    let cluster = TestServer::start().await;
    let leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
    let lease = format!("{leases}/l");
    let applied = format!("{lease}?fieldManager=test&force=true");
    let whole = |time: &str| json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "l"}, "spec": {"renewTime": time}});
    let part = |time: &str| json!({"spec": {"renewTime": time}});
    let json_patch = |time: &str| json!([{"op": "add", "path": "/spec/renewTime", "value": time}]);
    let good = "2026-11-25T01:00:19.103456+01:00";
    let (code, made) = send(&cluster, Method::POST, leases, JSON.1, &whole(good)).await;
    assert_eq!((code, &made["spec"]["renewTime"]), (201, &json!("2026-11-25T00:00:19.103456Z")), "{made}");
    for time in [
        "2026-11-25T00:00:19Z",
        "2026-11-25T00:00:19.103Z",
        "2026-11-25T00:00:19.103456789Z",
        "2026-11-25 00:00:19.103456Z",
    ] {
        for (method, path, media, body) in [
            (
                Method::POST,
                leases,
                JSON.1,
                json!({"metadata": {"name": "other"}, "spec": {"renewTime": time}}),
            ),
            (Method::PUT, &lease, JSON.1, whole(time)),
            (Method::PATCH, &lease, "application/merge-patch+json", part(time)),
            (Method::PATCH, &lease, "application/strategic-merge-patch+json", part(time)),
            (Method::PATCH, &lease, "application/json-patch+json", json_patch(time)),
            (Method::PATCH, &applied, "application/apply-patch+yaml", whole(time)),
        ] {
            let (code, status) = send(&cluster, method.clone(), path, media, &body).await;
            assert_eq!(code, 400, "{method} {media} of {time}: {status}");
            assert!(status["message"].as_str().unwrap().contains(time), "{status}");
        }
    }
    let other = "2026-11-25T02:00:19.000001+01:00";
    for (method, path, media, body) in [
        (Method::PUT, &lease, JSON.1, whole(other)),
        (Method::PATCH, &lease, "application/merge-patch+json", part(good)),
        (Method::PATCH, &lease, "application/strategic-merge-patch+json", part(other)),
        (Method::PATCH, &lease, "application/json-patch+json", json_patch(good)),
        (Method::PATCH, &applied, "application/apply-patch+yaml", whole(other)),
    ] {
        let (code, shown) = send(&cluster, method, path, media, &body).await;
        let expected = if body.to_string().contains(good) {
            "2026-11-25T00:00:19.103456Z"
        } else {
            "2026-11-25T01:00:19.000001Z"
        };
        assert_eq!((code, &shown["spec"]["renewTime"]), (200, &json!(expected)), "{media}: {shown}");
    }
    let (_, again) =
        send(&cluster, Method::PATCH, &applied, "application/apply-patch+yaml", &whole(other)).await;
    let (_, once_more) =
        send(&cluster, Method::PATCH, &applied, "application/apply-patch+yaml", &whole(other)).await;
    assert_eq!(again, once_more, "the same time in another spelling is no change");
    cluster.stop().await;
}

#[tokio::test]
async fn finalizers_of_a_namespace_change_by_finalize_alone() {
    let cluster = TestServer::start().await;
    let namespace = "/api/v1/namespaces/n";
    let manifest = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}});
    send(&cluster, Method::POST, "/api/v1/namespaces", JSON.1, &manifest).await;
    let map = json!({"metadata": {"name": "inside"}});
    send(&cluster, Method::POST, "/api/v1/namespaces/n/configmaps", JSON.1, &map).await;
    let (emptied, null) = (json!({"spec": {"finalizers": []}}), json!({"spec": null}));
    for (method, media, body) in [
        (Method::PUT, JSON.1, &manifest),
        (Method::PATCH, "application/merge-patch+json", &emptied),
        (Method::PATCH, "application/merge-patch+json", &null),
        (Method::PATCH, "application/strategic-merge-patch+json", &emptied),
        (Method::PATCH, "application/json-patch+json", &json!([{"op": "remove", "path": "/spec"}])),
    ] {
        let (code, shown) = send(&cluster, method, namespace, media, body).await;
        assert_eq!((code, &shown["spec"]), (200, &json!({"finalizers": ["kubernetes"]})), "{media}: {shown}");
    }
    let applied = format!("{namespace}?fieldManager=t&force=true");
    let with_spec = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}, "spec": {"finalizers": ["a.b/c"]}});
    let (_, shown) =
        send(&cluster, Method::PATCH, &applied, "application/apply-patch+yaml", &with_spec).await;
    assert_eq!(shown["spec"]["finalizers"], json!(["kubernetes"]), "{shown}");

    let finalize = format!("{namespace}/finalize");
    let finalized = |names: Value| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}, "spec": {"finalizers": names}});
    for names in [json!(["x"]), json!(["kubernetes", "a/b/c"]), json!([""]), json!([5])] {
        let (code, status) = send(&cluster, Method::PUT, &finalize, JSON.1, &finalized(names.clone())).await;
        assert_eq!(code, 422, "{names}: {status}");
    }
    let (code, shown) =
        send(&cluster, Method::PUT, &finalize, JSON.1, &finalized(json!(["kubernetes", "example.com/hold"])))
            .await;
    assert_eq!((code, &shown["spec"]["finalizers"][1]), (200, &json!("example.com/hold")), "{shown}");
    let phase = json!({"status": {"phase": "Terminating"}});
    let (code, status) =
        send(&cluster, Method::PATCH, &format!("{namespace}/status"), "application/merge-patch+json", &phase)
            .await;
    assert_eq!(code, 422, "{status}");

    let (_, deleted) = send(&cluster, Method::DELETE, namespace, JSON.1, &json!({})).await;
    assert_eq!(deleted["status"]["phase"], "Terminating", "{deleted}");
    cluster
        .eventually("the contents are deleted", || async {
            let (_, shown) = send(&cluster, Method::GET, namespace, JSON.1, &json!({})).await;
            shown["spec"]["finalizers"] == json!(["example.com/hold"])
        })
        .await;
    let (code, ..) = ask(&cluster, Method::GET, "/api/v1/namespaces/n/configmaps/inside", &[], "").await;
    assert_eq!(code, 404);
    send(&cluster, Method::PUT, &finalize, JSON.1, &finalized(json!([]))).await;
    let (code, ..) = ask(&cluster, Method::GET, namespace, &[], "").await;
    assert_eq!(code, 404);
    cluster.stop().await;
}

#[tokio::test]
async fn signing_request_is_decided_by_approval_alone() {
    let cluster = TestServer::start().await;
    let requests = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
    let request = json!({"metadata": {"name": "r"}, "spec": {"request": "eA==", "signerName": "a.b/c", "usages": ["client auth"]}});
    let (code, made) = send(&cluster, Method::POST, requests, JSON.1, &request).await;
    assert_eq!(code, 201, "{made}");
    let condition = |kind: &str| json!({"type": kind, "status": "True", "reason": "R", "message": "m"});
    let conditions = |kinds: &[&str]| json!({"status": {"conditions": kinds.iter().map(|kind| condition(kind)).collect::<Vec<_>>()}});
    let merge = "application/merge-patch+json";
    let kinds = |shown: &Value| -> Vec<String> {
        let conditions = shown["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().map(|it| it["type"].as_str().unwrap_or_default().to_owned()).collect()
    };
    let (_, shown) = send(
        &cluster,
        Method::PATCH,
        &format!("{requests}/r/status"),
        merge,
        &conditions(&["Approved", "Failed"]),
    )
    .await;
    assert_eq!(kinds(&shown), ["Failed"], "{shown}");
    let (_, shown) = send(
        &cluster,
        Method::PATCH,
        &format!("{requests}/r/approval"),
        merge,
        &conditions(&["Denied", "Failed"]),
    )
    .await;
    assert_eq!(kinds(&shown), ["Denied", "Failed"], "{shown}");
    let (_, shown) = send(
        &cluster,
        Method::PATCH,
        &format!("{requests}/r/status"),
        merge,
        &json!({"status": {"conditions": null}}),
    )
    .await;
    assert_eq!(kinds(&shown), ["Denied"], "{shown}");
    cluster.stop().await;
}
