//! The server over real TLS, with kube-rs's client. Not here: unit tests of the pure modules.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop where it is")]

mod access;
mod admission;
mod apply;
mod durability;
mod fairness;
mod fields;
mod gateway_models;
mod hostile;
mod protocol;
pub mod support;

use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{
    Api, DeleteParams, DynamicObject, ListParams, ObjectMeta, Patch, PatchParams, PostParams, WatchEvent,
    WatchParams,
};
use kube::core::GroupVersionKind;
use kube::discovery::ApiResource;
use serde_json::json;
use support::{TestServer, code};

fn config_map(name: &str, value: &str) -> ConfigMap {
    serde_json::from_value(
        json!({"metadata": {"name": name, "labels": {"app": value}}, "data": {"key": value}}),
    )
    .unwrap()
}

#[tokio::test]
async fn an_object_lives_from_create_to_delete() {
    let cluster = TestServer::start().await;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "default");
    let created = maps.create(&PostParams::default(), &config_map("a", "one")).await.unwrap();
    assert!(created.metadata.uid.is_some() && created.metadata.creation_timestamp.is_some());
    assert_eq!(code(maps.create(&PostParams::default(), &config_map("a", "one")).await), 409);

    let mut stale = created.clone();
    stale.data = Some([("key".to_string(), "two".to_string())].into());
    let updated = maps.replace("a", &PostParams::default(), &stale).await.unwrap();
    assert_ne!(updated.metadata.resource_version, created.metadata.resource_version);
    assert_eq!(code(maps.replace("a", &PostParams::default(), &stale).await), 409, "the revision is old");
    let same = maps.replace("a", &PostParams::default(), &updated).await.unwrap();
    assert_eq!(same.metadata.resource_version, updated.metadata.resource_version, "nothing changed");

    let patch = Patch::Merge(json!({"data": {"more": "x"}}));
    let patched = maps.patch("a", &PatchParams::default(), &patch).await.unwrap();
    assert_eq!(patched.data.unwrap().len(), 2);
    maps.delete("a", &DeleteParams::default()).await.unwrap();
    assert_eq!(code(maps.get("a").await), 404);
    let elsewhere: Api<ConfigMap> = Api::namespaced(cluster.client(), "nowhere");
    assert_eq!(code(elsewhere.create(&PostParams::default(), &config_map("a", "one")).await), 404);
    cluster.stop().await;
}

#[tokio::test]
async fn watch_sends_every_change_and_honours_its_selector() {
    let cluster = TestServer::start().await;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "default");
    let from = maps.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    let params = WatchParams::default().labels("app=x").timeout(60);
    let mut events = maps.watch(&params, &from).await.unwrap().boxed();
    maps.create(&PostParams::default(), &config_map("other", "y")).await.unwrap();
    maps.create(&PostParams::default(), &config_map("a", "x")).await.unwrap();
    let relabel = Patch::Merge(json!({"metadata": {"labels": {"app": "y"}}}));
    maps.patch("a", &PatchParams::default(), &relabel).await.unwrap();
    let back = Patch::Merge(json!({"metadata": {"labels": {"app": "x"}}}));
    maps.patch("a", &PatchParams::default(), &back).await.unwrap();
    maps.delete("a", &DeleteParams::default()).await.unwrap();
    let mut seen = Vec::new();
    while seen.len() < 4 {
        let event =
            tokio::time::timeout(Duration::from_secs(60), events.try_next()).await.unwrap().unwrap().unwrap();
        seen.push(match event {
            WatchEvent::Added(map) => format!("added {}", map.metadata.name.unwrap()),
            WatchEvent::Modified(map) => format!("modified {}", map.metadata.name.unwrap()),
            WatchEvent::Deleted(map) => format!("deleted {}", map.metadata.name.unwrap()),
            WatchEvent::Bookmark(_) => continue,
            WatchEvent::Error(error) => panic!("{error:?}"),
        });
    }
    assert_eq!(seen, ["added a", "deleted a", "added a", "deleted a"]);
    cluster.stop().await;
}

#[tokio::test]
async fn a_streaming_list_ends_with_its_bookmark() {
    let cluster = TestServer::start().await;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "default");
    for name in ["a", "b"] {
        maps.create(&PostParams::default(), &config_map(name, "x")).await.unwrap();
    }
    let params = WatchParams::default().initial_events().fields("metadata.name!=kube-root-ca.crt");
    let mut events = maps.watch(&params, "0").await.unwrap().boxed();
    let mut names = Vec::new();
    loop {
        match tokio::time::timeout(Duration::from_secs(60), events.try_next())
            .await
            .unwrap()
            .unwrap()
            .unwrap()
        {
            WatchEvent::Added(map) => names.push(map.metadata.name.unwrap()),
            WatchEvent::Bookmark(bookmark) => {
                assert_eq!(bookmark.metadata.annotations["k8s.io/initial-events-end"], "true");
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(names, ["a", "b"]);
    cluster.stop().await;
}

#[tokio::test]
async fn lists_page_and_stay_consistent() {
    let cluster = TestServer::start().await;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "kube-public");
    for index in 0..5 {
        maps.create(&PostParams::default(), &config_map(&format!("m{index}"), "page")).await.unwrap();
    }
    let only = ListParams::default().labels("app=page");
    let first = maps.list(&only.clone().limit(2)).await.unwrap();
    let token = first.metadata.continue_.clone().unwrap();
    maps.delete("m4", &DeleteParams::default()).await.unwrap();
    let rest = maps.list(&only.clone().continue_token(&token)).await.unwrap();
    let names: Vec<String> =
        first.items.into_iter().chain(rest.items).map(|map| map.metadata.name.unwrap()).collect();
    assert_eq!(names, ["m0", "m1", "m2", "m3", "m4"], "the second page is of the first page's revision");
    assert_eq!(maps.list(&only).await.unwrap().items.len(), 4);
    cluster.stop().await;
}

fn things() -> CustomResourceDefinition {
    serde_json::from_value(json!({
        "metadata": {"name": "things.example.com"},
        "spec": {
            "group": "example.com", "scope": "Namespaced",
            "names": {"plural": "things", "singular": "thing", "kind": "Thing", "shortNames": ["th"]},
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "subresources": {"status": {}, "scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}},
                "selectableFields": [{"jsonPath": ".spec.node"}],
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {
                    "spec": {"type": "object", "required": ["size"], "properties": {
                        "size": {"type": "integer", "minimum": 1}, "node": {"type": "string"},
                        "replicas": {"type": "integer", "default": 1},
                    }},
                    "status": {"type": "object", "properties": {"replicas": {"type": "integer"}, "conditions": {
                        "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"],
                        "items": {"type": "object", "required": ["type", "status"], "properties": {
                            "type": {"type": "string"}, "status": {"type": "string"},
                        }},
                    }}},
                }}},
            }],
        },
    })).unwrap()
}

fn thing(name: &str, spec: serde_json::Value) -> DynamicObject {
    serde_json::from_value(
        json!({"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": name}, "spec": spec}),
    )
    .unwrap()
}

fn thing_api(cluster: &TestServer) -> Api<DynamicObject> {
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("example.com", "v1", "Thing"));
    Api::namespaced_with(cluster.client(), "default", &kind)
}

#[tokio::test]
async fn a_custom_resource_is_served_as_soon_as_it_is_defined() {
    let cluster = TestServer::start().await;
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client());
    let defined = definitions.create(&PostParams::default(), &things()).await.unwrap();
    let conditions = defined.status.unwrap().conditions.unwrap();
    assert!(
        conditions.iter().any(|condition| condition.type_ == "Established" && condition.status == "True")
    );

    let api = thing_api(&cluster);
    let created =
        api.create(&PostParams::default(), &thing("a", json!({"size": 2, "node": "n1"}))).await.unwrap();
    assert_eq!(created.metadata.generation, Some(1));
    let selected = api.list(&ListParams::default().fields("spec.node=n1")).await.unwrap();
    assert_eq!(selected.items.len(), 1);
    assert_eq!(api.list(&ListParams::default().fields("spec.node=n2")).await.unwrap().items.len(), 0);

    let status = Patch::Merge(json!({"status": {"replicas": 3}, "spec": {"size": 9}}));
    let with_status = api.patch_status("a", &PatchParams::default(), &status).await.unwrap();
    assert_eq!(with_status.data["status"]["replicas"], 3);
    assert_eq!(with_status.data["spec"]["size"], 2, "status writes leave the spec alone");
    assert_eq!(with_status.metadata.generation, Some(1));
    let main = Patch::Merge(json!({"status": {"replicas": 8}, "spec": {"size": 4}}));
    let with_spec = api.patch("a", &PatchParams::default(), &main).await.unwrap();
    assert_eq!(with_spec.data["status"]["replicas"], 3, "spec writes leave the status alone");
    assert_eq!(with_spec.metadata.generation, Some(2));

    let scale = api
        .patch_scale("a", &PatchParams::default(), &Patch::Merge(json!({"spec": {"replicas": 5}})))
        .await
        .unwrap();
    assert_eq!(scale.spec.unwrap().replicas, Some(5));
    assert_eq!(scale.status.unwrap().replicas, 3);

    definitions.delete("things.example.com", &DeleteParams::default()).await.unwrap();
    cluster
        .eventually("the definition and its objects are gone", || async {
            code(definitions.get("things.example.com").await) == 404
        })
        .await;
    assert_eq!(code(thing_api(&cluster).get("a").await), 404);
    cluster.stop().await;
}

#[tokio::test]
async fn custom_object_that_violates_its_schema_names_the_field() {
    let cluster = TestServer::start().await;
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client());
    definitions.create(&PostParams::default(), &things()).await.unwrap();
    let refused =
        thing_api(&cluster).create(&PostParams::default(), &thing("a", json!({"size": "big"}))).await;
    let Err(kube::Error::Api(status)) = refused else { panic!("{refused:?}") };
    assert_eq!(status.code, 422);
    assert!(status.message.contains("spec.size"), "{}", status.message);
    cluster.stop().await;
}

#[tokio::test]
async fn a_finalizer_holds_an_object_until_it_is_removed() {
    let cluster = TestServer::start().await;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "default");
    let mut map = config_map("held", "x");
    map.metadata.finalizers = Some(vec!["example.com/hold".into()]);
    maps.create(&PostParams::default(), &map).await.unwrap();
    maps.delete("held", &DeleteParams::default()).await.unwrap();
    let held = maps.get("held").await.unwrap();
    assert!(held.metadata.deletion_timestamp.is_some());
    let release = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    maps.patch("held", &PatchParams::default(), &release).await.unwrap();
    assert_eq!(code(maps.get("held").await), 404);
    cluster.stop().await;
}

#[tokio::test]
async fn deleting_an_owner_or_namespace_deletes_its_objects() {
    let cluster = TestServer::start().await;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "default");
    let owner = maps.create(&PostParams::default(), &config_map("owner", "x")).await.unwrap();
    let mut child = config_map("child", "x");
    child.metadata.owner_references = Some(vec![serde_json::from_value(json!({
        "apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.metadata.uid, "blockOwnerDeletion": true,
    })).unwrap()]);
    maps.create(&PostParams::default(), &child).await.unwrap();
    maps.delete("owner", &DeleteParams::foreground()).await.unwrap();
    cluster
        .eventually("owner and child are gone", || async {
            code(maps.get("child").await) == 404 && code(maps.get("owner").await) == 404
        })
        .await;

    let namespaces: Api<Namespace> = Api::all(cluster.client());
    let namespace = Namespace {
        metadata: ObjectMeta { name: Some("short".into()), ..Default::default() },
        ..Default::default()
    };
    namespaces.create(&PostParams::default(), &namespace).await.unwrap();
    let inside: Api<ConfigMap> = Api::namespaced(cluster.client(), "short");
    inside.create(&PostParams::default(), &config_map("a", "x")).await.unwrap();
    namespaces.delete("short", &DeleteParams::default()).await.unwrap();
    cluster
        .eventually("the namespace is gone", || async { code(namespaces.get("short").await) == 404 })
        .await;
    assert_eq!(code(inside.get("a").await), 404);
    cluster.stop().await;
}

#[tokio::test]
async fn objects_follow_their_definition_as_it_changes() {
    let cluster = TestServer::start().await;
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client());
    definitions.create(&PostParams::default(), &things()).await.unwrap();
    let api = thing_api(&cluster);
    api.create(&PostParams::default(), &thing("old", json!({"size": 1}))).await.unwrap();
    let mut changed = serde_json::to_value(things()).unwrap();
    let spec = &mut changed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
    spec["properties"]["color"] = json!({"type": "string", "default": "red"});
    let mut second = changed["spec"]["versions"][0].clone();
    second["name"] = json!("v2");
    second["storage"] = json!(false);
    changed["spec"]["versions"].as_array_mut().unwrap().push(second);
    let patch = Patch::Merge(json!({"spec": changed["spec"]}));
    definitions.patch("things.example.com", &PatchParams::default(), &patch).await.unwrap();

    assert_eq!(
        api.get("old").await.unwrap().data["spec"]["color"],
        "red",
        "new defaults show in old objects"
    );
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("example.com", "v2", "Thing"));
    let second: Api<DynamicObject> = Api::namespaced_with(cluster.client(), "default", &kind);
    let shown = second.list(&ListParams::default()).await.unwrap();
    assert_eq!(shown.items[0].types.as_ref().unwrap().api_version, "example.com/v2");
    let patch = Patch::Merge(json!({"spec": {"size": 5}}));
    second.patch("old", &PatchParams::default(), &patch).await.unwrap();
    let first = api.get("old").await.unwrap();
    assert_eq!(
        (&first.data["spec"]["size"], &first.types.unwrap().api_version[..]),
        (&json!(5), "example.com/v1")
    );
    let mut blind = first_without_revision(&api).await;
    blind.data["spec"]["size"] = json!(6);
    assert_eq!(code(api.replace("old", &PostParams::default(), &blind).await), 422);
    cluster.stop().await;
}

async fn first_without_revision(api: &Api<DynamicObject>) -> DynamicObject {
    let mut object = api.get("old").await.unwrap();
    object.metadata.resource_version = None;
    object
}

#[tokio::test]
async fn orphaned_dependents_stay_without_owner_reference() {
    let cluster = TestServer::start().await;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "default");
    let owner = maps.create(&PostParams::default(), &config_map("owner", "x")).await.unwrap();
    let mut child = config_map("child", "x");
    child.metadata.owner_references = Some(vec![
        serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.metadata.uid,
        }))
        .unwrap(),
    ]);
    maps.create(&PostParams::default(), &child).await.unwrap();
    maps.delete("owner", &DeleteParams::orphan()).await.unwrap();
    cluster.eventually("the owner is gone", || async { code(maps.get("owner").await) == 404 }).await;
    let child = maps.get("child").await.unwrap();
    assert_eq!(child.metadata.owner_references, None);
    assert_eq!(child.metadata.deletion_timestamp, None);
    cluster.stop().await;
}

#[tokio::test]
async fn default_objects_of_a_namespace_are_recreated() {
    let cluster = TestServer::start().await;
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "default");
    let root =
        || async { maps.get("kube-root-ca.crt").await.ok().and_then(|map| map.data).unwrap_or_default() };
    cluster.eventually("the certificate is there", || async { root().await.contains_key("ca.crt") }).await;
    let right = root().await;
    assert!(right["ca.crt"].starts_with("-----BEGIN CERTIFICATE"));
    let wrong = Patch::Merge(json!({"data": {"ca.crt": "mine"}}));
    maps.patch("kube-root-ca.crt", &PatchParams::default(), &wrong).await.unwrap();
    cluster.eventually("the change is undone", || async { root().await == right }).await;
    maps.delete("kube-root-ca.crt", &DeleteParams::default()).await.unwrap();
    cluster.eventually("the deletion is undone", || async { root().await == right }).await;
    let bad: ConfigMap =
        serde_json::from_value(json!({"metadata": {"name": "bad"}, "data": {"": "x"}})).unwrap();
    assert_eq!(code(maps.create(&PostParams::default(), &bad).await), 422);
    cluster.stop().await;
}
