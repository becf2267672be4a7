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

/// A definition of Holders, whose status has this default.
fn holders(default: Value) -> Value {
    let mut status = json!({"type": "object", "properties": {"observedGeneration": {"type": "integer"}, "note": {"type": "string"}}});
    if !default.is_null() {
        status["default"] = default;
    }
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "holders.example.com"},
        "spec": {
            "group": "example.com", "scope": "Namespaced", "names": {"plural": "holders", "kind": "Holder"},
            "versions": [{
                "name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {
                    "spec": {"type": "object", "properties": {
                        "count": {"type": "integer", "format": "int32"},
                        "host": {"type": "string", "pattern": "^([^\\[\\]:[]+)$"},
                    }},
                    "status": status,
                }}},
            }],
        },
    })
}

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const HOLDERS: &str = "/apis/example.com/v1/namespaces/default/holders";

fn holder(name: &str) -> Value {
    json!({"apiVersion": "example.com/v1", "kind": "Holder", "metadata": {"name": name}, "spec": {"count": 1}})
}

#[tokio::test]
async fn default_of_a_status_shows_until_a_controller_writes() {
    let cluster = TestServer::start().await;
    send(&cluster, Method::POST, DEFINITIONS, JSON.1, &holders(Value::Null)).await;
    send(&cluster, Method::POST, HOLDERS, JSON.1, &holder("before")).await;
    let merge = "application/merge-patch+json";
    let changed = json!({"spec": holders(json!({"observedGeneration": -1}))["spec"]});
    let (code, shown) =
        send(&cluster, Method::PATCH, &format!("{DEFINITIONS}/holders.example.com"), merge, &changed).await;
    assert_eq!(code, 200, "{shown}");
    let made = format!("{HOLDERS}?fieldManager=helm");
    let (_, created) = send(&cluster, Method::POST, &made, JSON.1, &holder("after")).await;
    let untouched = json!({"observedGeneration": -1});
    assert_eq!(created["status"], untouched, "{created}");
    assert!(!created["metadata"]["managedFields"].to_string().contains("f:status"), "{created}");
    let applied = format!("{HOLDERS}/applied?fieldManager=flux");
    let (code, created) =
        send(&cluster, Method::PATCH, &applied, "application/apply-patch+yaml", &holder("applied")).await;
    assert_eq!((code, &created["status"]), (201, &untouched), "{created}");
    let (_, _, list) = ask(&cluster, Method::GET, HOLDERS, &[], "").await;
    let items = list["items"].as_array().unwrap();
    assert!(items.len() == 3 && items.iter().all(|item| item["status"] == untouched), "{list}");
    let (_, _, events) =
        ask(&cluster, Method::GET, &format!("{HOLDERS}?watch=1&timeoutSeconds=1&resourceVersion=0"), &[], "")
            .await;
    let seen = events.as_str().unwrap_or_default().matches(r#""observedGeneration":-1"#).count();
    assert_eq!(seen, 3, "{events}");
    // Nobody owns it, so a controller needs no force.
    let status =
        json!({"apiVersion": "example.com/v1", "kind": "Holder", "status": {"observedGeneration": 1}});
    for name in ["before", "after", "applied"] {
        let path = format!("{HOLDERS}/{name}/status?fieldManager=controller");
        let (code, shown) =
            send(&cluster, Method::PATCH, &path, "application/apply-patch+yaml", &status).await;
        assert_eq!((code, &shown["status"]), (200, &json!({"observedGeneration": 1})), "{name}: {shown}");
    }
    cluster.stop().await;
}

#[tokio::test]
async fn terminating_namespace_and_definition_tell_what_remains() {
    let cluster = TestServer::start().await;
    let manifest = json!({"metadata": {"name": "n"}});
    send(&cluster, Method::POST, "/api/v1/namespaces", JSON.1, &manifest).await;
    let held = json!({"metadata": {"name": "held", "finalizers": ["example.com/hold"]}});
    send(&cluster, Method::POST, "/api/v1/namespaces/n/configmaps", JSON.1, &held).await;
    send(&cluster, Method::POST, DEFINITIONS, JSON.1, &holders(Value::Null)).await;
    let mut instance = holder("held");
    instance["metadata"]["finalizers"] = json!(["example.com/hold"]);
    send(&cluster, Method::POST, HOLDERS, JSON.1, &instance).await;

    let message = |object: &Value, kind: &str| {
        let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let condition = conditions.iter().find(|it| it["type"] == kind && it["status"] == "True").cloned();
        condition.map(|it| format!("{} {}", it["reason"], it["message"])).unwrap_or_default()
    };
    let definition = format!("{DEFINITIONS}/holders.example.com");
    for (path, kind, expected) in [
        (
            "/api/v1/namespaces/n",
            "NamespaceContentRemaining",
            r#""SomeResourcesRemain" "Some resources are remaining: configmaps has 1 resource instances""#,
        ),
        (
            "/api/v1/namespaces/n",
            "NamespaceFinalizersRemaining",
            r#""SomeFinalizersRemain" "Some content in the namespace has finalizers remaining: example.com/hold in 1 resource instances""#,
        ),
        (
            &definition,
            "Terminating",
            r#""InstanceDeletionInProgress" "CustomResource deletion is in progress: holders.example.com has 1 resource instances; finalizers: example.com/hold in 1 resource instances""#,
        ),
    ] {
        ask(&cluster, Method::DELETE, path, &[], "").await;
        cluster
            .eventually(expected, || async {
                let (_, _, shown) = ask(&cluster, Method::GET, path, &[], "").await;
                message(&shown, kind) == expected
            })
            .await;
    }
    let (code, status) = send(&cluster, Method::POST, HOLDERS, JSON.1, &holder("late")).await;
    assert_eq!((code, &status["reason"]), (405, &json!("MethodNotAllowed")), "{status}");
    let release = json!({"metadata": {"finalizers": null}});
    for path in ["/api/v1/namespaces/n/configmaps/held", &format!("{HOLDERS}/held")] {
        send(&cluster, Method::PATCH, path, "application/merge-patch+json", &release).await;
    }
    for path in ["/api/v1/namespaces/n", &definition] {
        cluster
            .eventually("it is gone", || async { ask(&cluster, Method::GET, path, &[], "").await.0 == 404 })
            .await;
    }
    cluster.stop().await;
}

#[tokio::test]
async fn requests_are_judged_as_kube_apiserver_does() {
    let cluster = TestServer::start().await;
    let (code, status) = send(&cluster, Method::POST, DEFINITIONS, JSON.1, &holders(Value::Null)).await;
    assert_eq!(code, 201, "a bracket within a class: {status}");
    let core = "/api/v1/namespaces/default";
    let (maps, secrets) = (format!("{core}/configmaps"), format!("{core}/secrets"));
    let rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/default";
    let lease = "/apis/coordination.k8s.io/v1/namespaces/default/leases/made";
    let reviews = "/apis/authorization.k8s.io/v1";
    let apply = "application/apply-patch+yaml";
    let map = |name: &str, more: Value| {
        let mut map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}});
        map.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        map
    };
    let owned = |name: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": name, "controller": true});
    let mut numbers = holder("numbers");
    numbers["spec"]["count"] = json!(2.0);
    let mut huge = holder("huge");
    huge["spec"]["count"] = json!(1e300);
    let token = format!("{core}/serviceaccounts/default/token");
    for (method, path, media, body, expected, shows) in [
        (
            Method::POST,
            secrets.clone(),
            JSON.1,
            json!({"metadata": {"name": "lines"}, "data": {"a": "aGVs\nbG8=\n"}}),
            201,
            "\"aGVsbG8=\"",
        ),
        (
            Method::POST,
            maps.clone(),
            JSON.1,
            map("null", json!({"data": {"a": null}})),
            201,
            r#""data":{"a":""}"#,
        ),
        (Method::POST, format!("{maps}?dryRun="), JSON.1, map("dry", json!({})), 422, "dryRun"),
        (Method::POST, HOLDERS.into(), JSON.1, numbers, 201, r#""count":2}"#),
        (Method::POST, HOLDERS.into(), JSON.1, huge, 422, "spec.count"),
        (
            Method::PUT,
            lease.into(),
            JSON.1,
            json!({"metadata": {"name": "made", "uid": "of-a-deleted-one"}}),
            409,
            "UID in precondition: of-a-deleted-one",
        ),
        (
            Method::PUT,
            lease.into(),
            JSON.1,
            json!({"metadata": {"name": "made", "resourceVersion": "7"}, "spec": {"leaseTransitions": 1}}),
            201,
            "\"made\"",
        ),
        (
            Method::PUT,
            lease.into(),
            JSON.1,
            json!({"metadata": {"name": "made", "resourceVersion": "0"}, "spec": {"leaseTransitions": 2}}),
            200,
            r#""leaseTransitions":2"#,
        ),
        (
            Method::PUT,
            lease.into(),
            JSON.1,
            json!({"metadata": {"name": "made"}, "spec": {"leaseDurationSeconds": 0}}),
            422,
            "leaseDurationSeconds",
        ),
        (Method::PUT, format!("{maps}/nowhere"), JSON.1, map("nowhere", json!({})), 404, "nowhere"),
        (
            Method::PATCH,
            format!("{maps}/applied?fieldManager=t"),
            apply,
            json!({"apiVersion": "v1", "metadata": {"name": "applied"}}),
            400,
            "kind",
        ),
        (
            Method::PATCH,
            format!("{maps}/applied?fieldManager=t"),
            apply,
            json!({"apiVersion": "v1", "kind": "ConfigMap"}),
            422,
            "metadata.name",
        ),
        (
            Method::PATCH,
            format!("{maps}/applied?fieldManager=t"),
            apply,
            map("applied", json!({"spec": 1})),
            400,
            "field not declared in schema",
        ),
        (
            Method::POST,
            maps.clone(),
            JSON.1,
            json!({"metadata": {"name": "a", "annotations": {"a": "x".repeat(300_000)}}}),
            422,
            "metadata.annotations",
        ),
        (
            Method::POST,
            maps.clone(),
            JSON.1,
            map("big", json!({"data": {"a": "x".repeat(1_100_000)}})),
            422,
            "1048576",
        ),
        (
            Method::POST,
            maps.clone(),
            JSON.1,
            json!({"metadata": {"name": "f", "finalizers": ["unqualified"]}}),
            422,
            "metadata.finalizers",
        ),
        (
            Method::POST,
            maps.clone(),
            JSON.1,
            json!({"metadata": {"name": "twice", "finalizers": ["a.b/c", "a.b/c"]}}),
            201,
            r#"["a.b/c"]"#,
        ),
        (
            Method::POST,
            maps.clone(),
            JSON.1,
            json!({"metadata": {"name": "l", "labels": {"Example.com/a": "b"}}}),
            422,
            "metadata.labels",
        ),
        (
            Method::POST,
            maps.clone(),
            JSON.1,
            json!({"metadata": {"name": "o", "ownerReferences": [owned("x"), owned("y")]}}),
            422,
            "Controller set to true",
        ),
        (
            Method::POST,
            secrets.clone(),
            JSON.1,
            json!({"metadata": {"name": "t"}, "type": "kubernetes.io/tls", "data": {"tls.crt": ""}}),
            422,
            "data[tls.key]",
        ),
        (
            Method::POST,
            format!("{rbac}/roles"),
            JSON.1,
            json!({"metadata": {"name": "r"}, "rules": [{"apiGroups": [""], "resources": ["x"]}]}),
            422,
            "rules[0].verbs",
        ),
        (
            Method::POST,
            format!("{rbac}/rolebindings"),
            JSON.1,
            json!({"metadata": {"name": "r"}, "roleRef": {"kind": "Role", "name": "r"}, "subjects": [{"kind": "Robot", "name": "x"}]}),
            422,
            "subjects[0].kind",
        ),
        (
            Method::POST,
            format!("{reviews}/selfsubjectaccessreviews"),
            JSON.1,
            json!({"spec": {}}),
            422,
            "exactly one of",
        ),
        (
            Method::POST,
            format!("{reviews}/selfsubjectaccessreviews"),
            JSON.1,
            json!({"spec": {"resourceAttributes": 5}}),
            400,
            "resourceAttributes",
        ),
        (
            Method::POST,
            format!("{reviews}/subjectaccessreviews"),
            JSON.1,
            json!({"spec": {"resourceAttributes": {"verb": "get"}}}),
            422,
            "spec.user",
        ),
        (
            Method::POST,
            "/apis/authentication.k8s.io/v1/tokenreviews".into(),
            JSON.1,
            json!({"spec": {}}),
            400,
            "token is required",
        ),
        (Method::POST, token.clone(), JSON.1, json!({"spec": {"expirationSeconds": 599}}), 422, "10 minutes"),
        (Method::POST, token, JSON.1, json!({"spec": {"audiences": 5}}), 400, "audiences"),
        (
            Method::GET,
            "/api/v1/watch/namespaces/default/configmaps?timeoutSeconds=1&resourceVersion=0&fieldSelector=metadata.name%3Dnull".to_owned(),
            JSON.1,
            json!({}),
            200,
            "\"ADDED\"",
        ),
        (Method::GET, format!("{maps}?timeoutSeconds=abc"), JSON.1, json!({}), 400, "timeoutSeconds"),
        (Method::GET, "/openid/v1/jwks".into(), JSON.1, json!({}), 200, "\"P-256\""),
        (Method::GET, "/.well-known/openid-configuration".into(), JSON.1, json!({}), 200, "/openid/v1/jwks"),
    ] {
        let (code, answer) = send(&cluster, method.clone(), &path, media, &body).await;
        let text = answer.as_str().map_or_else(|| answer.to_string(), str::to_owned);
        assert_eq!(code, expected, "{method} {path} of {body:.300}: {text:.500}");
        assert!(text.contains(shows), "{method} {path} of {body:.300}: no {shows} in {text:.500}");
    }
    let yaml = [("accept", "application/yaml")];
    let (code, headers, text) = ask(&cluster, Method::GET, &format!("{maps}/null"), &yaml, "").await;
    assert_eq!((code, headers["content-type"].to_str().unwrap()), (200, "application/yaml"));
    assert!(text.as_str().unwrap().contains("kind: ConfigMap\n"), "{text}");
    cluster.stop().await;
}
