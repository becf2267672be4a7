//! Server-side apply and dry runs through the whole server.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use kube::discovery::ApiResource;
use serde_json::json;

use crate::support::{Cluster, code};

fn config(data: serde_json::Value) -> Patch<serde_json::Value> {
    Patch::Apply(json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": data}))
}

#[tokio::test]
async fn managers_own_fields_and_conflict_over_them() {
    let cluster = Cluster::start().await;
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
    let cluster = Cluster::start().await;
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
    let cluster = Cluster::start().await;
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
        let second = api.patch("a", &params, &Patch::Apply(&manifest)).await.unwrap();
        assert_eq!(first.metadata.resource_version, second.metadata.resource_version, "{kind}");
    }
    cluster.stop().await;
}
