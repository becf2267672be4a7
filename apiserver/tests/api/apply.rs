//! Server-side apply and dry runs through the whole server.

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use kube::discovery::ApiResource;
use serde_json::json;

use super::support::{TestServer, code};
use super::{thing, thing_api, things};

fn config(data: serde_json::Value) -> Patch<serde_json::Value> {
    Patch::Apply(json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": data}))
}

#[tokio::test]
async fn managers_own_fields_and_conflict_over_them() {
    let cluster = TestServer::start().await;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "default");
    let one = PatchParams::apply("one");
    let two = PatchParams::apply("two");
    let first = maps.patch("a", &one, &config(json!({"x": "1", "y": "1"}))).await.unwrap();
    assert_eq!(first.metadata.managed_fields.as_ref().unwrap().len(), 1);
    let again = maps.patch("a", &one, &config(json!({"x": "1", "y": "1"}))).await.unwrap();
    assert_eq!(again.metadata.resource_version, first.metadata.resource_version, "nothing changed");
    assert_eq!(code(maps.patch("a", &two, &config(json!({"x": "2"}))).await), 409);
    let forced = maps.patch("a", &two.clone().force(), &config(json!({"x": "2"}))).await.unwrap();
    assert_eq!(forced.data.unwrap()["x"], "2");
    let dropped = maps.patch("a", &one, &config(json!({}))).await.unwrap();
    assert_eq!(dropped.data.unwrap().into_iter().collect::<Vec<_>>(), [("x".to_string(), "2".to_string())]);
    cluster.stop().await;
}

#[tokio::test]
async fn a_dry_run_shows_the_outcome_and_leaves_no_trace() {
    let cluster = TestServer::start().await;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "default");
    let shown =
        maps.patch("a", &PatchParams::apply("one").dry_run(), &config(json!({"x": "1"}))).await.unwrap();
    assert!(shown.metadata.uid.is_some());
    assert_eq!(code(maps.get("a").await), 404);
    let generated = json!({"metadata": {"generateName": "made-"}});
    let made =
        maps.create(&PostParams::default(), &serde_json::from_value(generated).unwrap()).await.unwrap();
    let name = made.metadata.name.unwrap();
    assert!(name.starts_with("made-") && name.len() == 10, "{name}");
    cluster.stop().await;
}

#[tokio::test]
async fn applying_the_same_manifest_again_writes_nothing() {
    let cluster = TestServer::start().await;
    let manifests = [
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}, "stringData": {"x": "1"}}),
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "a", "labels": {"x": "1"}}}),
        json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "a"},
            "spec": {"holderIdentity": "me", "renewTime": "2026-01-01T00:00:00.000000Z"}}),
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "a"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
            "subjects": [{"kind": "User", "name": "eve"}, {"kind": "ServiceAccount", "name": "a", "namespace": "default"}]}),
    ];
    for manifest in manifests {
        let kind = manifest["kind"].as_str().unwrap().to_string();
        let (group, version) = manifest["apiVersion"].as_str().unwrap().split_once('/').unwrap_or(("", "v1"));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &kind));
        let api: Api<DynamicObject> = Api::namespaced_with(cluster.client(), "default", &resource);
        let params = PatchParams::apply("test");
        let first = api.patch("a", &params, &Patch::Apply(&manifest)).await.unwrap();
        // The times in managedFields have a resolution of one second; within one second a change would not
        // show.
        let second_of = jiff::Timestamp::now().as_second();
        while jiff::Timestamp::now().as_second() == second_of {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        let second = api.patch("a", &params, &Patch::Apply(&manifest)).await.unwrap();
        assert_eq!(first.metadata.resource_version, second.metadata.resource_version, "{kind}");
    }
    cluster.stop().await;
}

#[tokio::test]
async fn two_writers_share_a_status_condition_by_condition() {
    let cluster = TestServer::start().await;
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client());
    definitions.create(&PostParams::default(), &things()).await.unwrap();
    let api = thing_api(&cluster);
    api.create(&PostParams::default(), &thing("a", json!({"size": 1}))).await.unwrap();
    let report = |kind: &str, status: &str, replicas: Option<i64>| {
        let mut status = json!({"conditions": [{"type": kind, "status": status}]});
        if let Some(replicas) = replicas {
            status["replicas"] = json!(replicas);
        }
        Patch::Apply(
            json!({"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "a"}, "status": status}),
        )
    };
    let (agent, operator) = (PatchParams::apply("agent").force(), PatchParams::apply("operator").force());
    api.patch_status("a", &agent, &report("Loaded", "True", None)).await.unwrap();
    let both = api.patch_status("a", &operator, &report("Ready", "False", Some(2))).await.unwrap();
    assert_eq!(both.data["status"]["conditions"].as_array().unwrap().len(), 2);
    assert_eq!(both.data["status"]["replicas"], 2);
    let again = api.patch_status("a", &agent, &report("Loaded", "True", None)).await.unwrap();
    assert_eq!(again.metadata.resource_version, both.metadata.resource_version, "nothing changed");
    let moved = api.patch_status("a", &agent, &report("Joined", "True", None)).await.unwrap();
    let mut kinds: Vec<&str> = moved.data["status"]["conditions"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|entry| entry["type"].as_str())
        .collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["Joined", "Ready"], "what a writer stops saying goes");
    assert_eq!(moved.metadata.generation, Some(1));
    assert_eq!(moved.data["spec"]["size"], 1);

    let hold = |name: &str| {
        Patch::Apply(
            json!({"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "a", "finalizers": [name]}}),
        )
    };
    api.patch("a", &agent, &hold("example.com/one")).await.unwrap();
    let held = api.patch("a", &operator, &hold("example.com/two")).await.unwrap();
    assert_eq!(held.metadata.finalizers.unwrap().len(), 2);
    let released = api
        .patch(
            "a",
            &agent,
            &Patch::Apply(
                json!({"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "a"}}),
            ),
        )
        .await
        .unwrap();
    assert_eq!(released.metadata.finalizers.unwrap(), ["example.com/two"]);
    cluster.stop().await;
}
