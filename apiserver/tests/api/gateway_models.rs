//! What a gateway may do for clients that manage models, by the roles and policies that Russet installs, over their kinds.

use http::{Method, Request};
use serde::Deserialize as _;
use serde_json::{Value, json};

use super::protocol::ask;
use super::support::TestServer;

const RUSSET: &str = "/apis/russet.dev/v1alpha1/namespaces/default";
const JSON: (&str, &str) = ("content-type", "application/json");

/// Creates every object of a file.
async fn install(cluster: &TestServer, text: &str) {
    for document in serde_norway::Deserializer::from_str(text) {
        let object = Value::deserialize(document).unwrap();
        let group = object["apiVersion"].as_str().unwrap();
        let plural = match object["kind"].as_str().unwrap() {
            "Namespace" => continue,
            "CustomResourceDefinition" => "customresourcedefinitions",
            "ClusterRole" => "clusterroles",
            "ClusterRoleBinding" => "clusterrolebindings",
            "ValidatingAdmissionPolicy" => "validatingadmissionpolicies",
            "ValidatingAdmissionPolicyBinding" => "validatingadmissionpolicybindings",
            "Role" | "RoleBinding" => continue,
            other => panic!("{other}"),
        };
        let path = format!("/apis/{group}/{plural}");
        let (code, _, answer) = ask(cluster, Method::POST, &path, &[JSON], &object.to_string()).await;
        assert_eq!(code, 201, "{answer}");
    }
}

/// The status code, and the message of an error.
async fn send(client: &kube::Client, method: Method, path: &str, body: &Value) -> (u16, String) {
    let media = if method == Method::PATCH { "application/merge-patch+json" } else { JSON.1 };
    let text = if body.is_null() { String::new() } else { body.to_string() };
    let request = Request::builder().method(method).uri(path).header(JSON.0, media);
    let response =
        client.send(request.body(kube::client::Body::from(text.into_bytes())).unwrap()).await.unwrap();
    let (parts, body) = response.into_parts();
    let answer: Value = serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap_or_default();
    (parts.status.as_u16(), answer["message"].as_str().unwrap_or_default().to_owned())
}

fn object(kind: &str, name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "russet.dev/v1alpha1", "kind": kind,
        "metadata": {"name": name, "labels": {"russet.dev/managed-by": "gateway"}}, "spec": spec,
    })
}

fn model(name: &str) -> Value {
    object(
        "Model",
        name,
        json!({"source": {"uri": "hf://o/n"}, "preload": {"policy": "Always", "copies": 1}}),
    )
}

fn deployment(name: &str) -> Value {
    let autoscaling = json!({"minReplicas": 0, "maxReplicas": 1, "targetQueue": 4, "idleSeconds": 600});
    object(
        "ModelDeployment",
        name,
        json!({"modelRef": {"name": "n"}, "replicas": 0, "autoscaling": autoscaling}),
    )
}

fn route(name: &str) -> Value {
    object("ModelRoute", name, json!({"models": ["m"], "targets": [{"deploymentRef": {"name": "n"}}]}))
}

/// The object with another value in a field; without it where that is null.
fn with(mut object: Value, parent: &str, field: &str, value: Value) -> Value {
    let fields = object.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    match value {
        Value::Null => drop(fields.remove(field)),
        value => drop(fields.insert(field.to_owned(), value)),
    }
    object
}

#[tokio::test]
async fn a_gateway_makes_and_deletes_only_what_it_marks() {
    let cluster = TestServer::start().await;
    for text in [
        include_str!("../../../manifests/crds/models.yaml"),
        include_str!("../../../manifests/crds/modeldeployments.yaml"),
        include_str!("../../../manifests/crds/modelroutes.yaml"),
        include_str!("../../../manifests/rbac.yaml"),
        include_str!("../../../manifests/admission.yaml"),
    ] {
        install(&cluster, text).await;
    }
    let (admin, gateway) = (cluster.client(), cluster.client_as("russet:gateway", &[]).await);
    cluster
        .eventually("the kinds are served", || async {
            let path = |plural: &str| format!("{RUSSET}/{plural}");
            send(&admin, Method::GET, &path("models"), &Value::Null).await.0 == 200
                && send(&admin, Method::GET, &path("modeldeployments"), &Value::Null).await.0 == 200
                && send(&admin, Method::GET, &path("modelroutes"), &Value::Null).await.0 == 200
        })
        .await;
    let kinds = [("models", model("n")), ("modeldeployments", deployment("n")), ("modelroutes", route("n"))];
    // Without the role of gateway-models.yaml it only reads.
    for (plural, object) in &kinds {
        let path = format!("{RUSSET}/{plural}");
        let (code, message) = send(&gateway, Method::POST, &path, object).await;
        assert!(code == 403 && message.contains("cannot create resource"), "{plural}: {code} {message}");
        assert_eq!(send(&gateway, Method::GET, &path, &Value::Null).await.0, 200);
    }
    install(&cluster, include_str!("../../../manifests/gateway-models.yaml")).await;

    let label = "may make and delete only objects with the label russet.dev/managed-by=gateway";
    let owner = json!([{"apiVersion": "v1", "kind": "Namespace", "name": "default", "uid": "x"}]);
    for (plural, refused, words) in [
        ("models", with(model("x"), "/metadata", "labels", Value::Null), label),
        ("models", with(model("x"), "/metadata/labels", "russet.dev/managed-by", json!("flux")), label),
        ("models", with(model("x"), "/metadata", "finalizers", json!(["example.com/hold"])), "finalizers"),
        ("models", with(model("x"), "/metadata", "ownerReferences", owner), "finalizers or owners"),
        ("models", with(model("x"), "/spec/source", "uri", json!("file:///etc")), "Models of hf://"),
        ("models", with(model("x"), "/spec/source", "uri", json!("https://10.0.0.1/x")), "Models of hf://"),
        ("models", with(model("x"), "/spec/source", "secretRef", json!({"name": "s"})), "without a Secret"),
        ("modeldeployments", with(deployment("x"), "/metadata", "labels", Value::Null), label),
        ("modeldeployments", with(deployment("x"), "/spec", "autoscaling", Value::Null), "scale to zero"),
        (
            "modeldeployments",
            with(deployment("x"), "/spec/autoscaling", "minReplicas", json!(1)),
            "scale to zero",
        ),
        (
            "modeldeployments",
            with(deployment("x"), "/spec/autoscaling", "maxReplicas", json!(9)),
            "one replica",
        ),
        ("modeldeployments", with(deployment("x"), "/spec", "tierRef", json!({"name": "t"})), "without tier"),
        ("modelroutes", with(route("x"), "/metadata", "labels", Value::Null), label),
    ] {
        let (code, message) = send(&gateway, Method::POST, &format!("{RUSSET}/{plural}"), &refused).await;
        assert!(code == 403 && message.contains(words), "{words}: {code} {message}\n{refused}");
    }

    for (plural, object) in kinds {
        let path = format!("{RUSSET}/{plural}");
        // A person's, and that of somebody who marks it as another program's.
        for (name, labels) in [("person", Value::Null), ("flux", json!({"russet.dev/managed-by": "flux"}))] {
            let theirs =
                with(with(object.clone(), "/metadata", "labels", labels), "/metadata", "name", json!(name));
            assert_eq!(send(&admin, Method::POST, &path, &theirs).await.0, 201);
            let one = format!("{path}/{name}");
            let (code, message) = send(&gateway, Method::DELETE, &one, &Value::Null).await;
            assert!(code == 403 && message.contains(label), "{one}: {code} {message}");
            // It cannot mark it first.
            let mark = json!({"metadata": {"labels": {"russet.dev/managed-by": "gateway"}}});
            let (code, message) = send(&gateway, Method::PATCH, &one, &mark).await;
            assert!(code == 403 && message.contains("cannot patch resource"), "{one}: {code} {message}");
        }
        let (code, message) = send(&gateway, Method::DELETE, &path, &Value::Null).await;
        assert!(code == 403 && message.contains("cannot deletecollection resource"), "{code} {message}");
        let (code, message) = send(&gateway, Method::POST, &path, &object).await;
        assert_eq!(code, 201, "{message}");
        let (code, message) = send(&gateway, Method::DELETE, &format!("{path}/n"), &Value::Null).await;
        assert_eq!(code, 200, "{message}");
        for name in ["person", "flux"] {
            assert_eq!(send(&admin, Method::GET, &format!("{path}/{name}"), &Value::Null).await.0, 200);
        }
    }
    cluster.stop().await;
}
