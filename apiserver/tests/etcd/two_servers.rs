//! Two servers on one etcd act as one control plane: each sees what the other acknowledged.

use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, ServiceAccount};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use serde_json::json;

use crate::api::support::{DataLocation, SharedEtcd, TestServer, code};

/// Two servers.
async fn pair() -> (TestServer, TestServer) {
    let etcd = SharedEtcd::with_members(1, false);
    (
        TestServer::start_in(DataLocation::in_etcd(etcd.clone())).await,
        TestServer::start_in(DataLocation::in_etcd(etcd)).await,
    )
}

fn maps(cluster: &TestServer) -> Api<ConfigMap> {
    Api::namespaced(cluster.client(), "default")
}

pub fn map(name: &str, value: &str) -> ConfigMap {
    serde_json::from_value(json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"key": value},
    }))
    .unwrap()
}

#[tokio::test]
async fn acknowledged_write_is_visible_at_the_other_server() {
    let (one, other) = pair().await;
    let (here, there) = (maps(&one), maps(&other));
    for round in 0..50 {
        let name = format!("m{round}");
        let made = here.create(&PostParams::default(), &map(&name, "one")).await.unwrap();
        assert_eq!(there.get(&name).await.unwrap().metadata.resource_version, made.metadata.resource_version);
        let listed = there.list(&ListParams::default()).await.unwrap().items;
        let ours =
            listed.iter().filter(|map| map.metadata.name.as_deref().is_some_and(|it| it.starts_with('m')));
        assert_eq!(ours.count(), round + 1);
        // A revision from one server is a valid precondition at the other.
        let mut changed = made.clone();
        changed.data = Some([("key".to_string(), "two".to_string())].into());
        there.replace(&name, &PostParams::default(), &changed).await.unwrap();
        assert_eq!(code(here.replace(&name, &PostParams::default(), &changed).await), 409);
        assert_eq!(here.get(&name).await.unwrap().data.unwrap()["key"], "two");
    }
    there.delete("m0", &DeleteParams::default()).await.unwrap();
    assert_eq!(code(here.get("m0").await), 404);
    one.stop().await;
    other.stop().await;
}

#[tokio::test]
async fn watch_resumes_at_the_other_server() {
    let (one, other) = pair().await;
    let (here, there) = (maps(&one), maps(&other));
    let from = here.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    let mut last = from.clone();
    let mut seen = Vec::new();
    // Half of the watch at one server, half at the other; both write.
    for (half, watched) in [&here, &there].into_iter().enumerate() {
        for index in 0..10 {
            let writer = if index % 2 == 0 { &here } else { &there };
            writer.create(&PostParams::default(), &map(&format!("w{half}-{index}"), "x")).await.unwrap();
        }
        let mut events = watched.watch(&WatchParams::default(), &last).await.unwrap().boxed();
        while seen.len() < 10 * (half + 1) {
            match tokio::time::timeout(Duration::from_secs(60), events.try_next())
                .await
                .unwrap()
                .unwrap()
                .unwrap()
            {
                WatchEvent::Added(map) => {
                    last = map.metadata.resource_version.unwrap();
                    // Every namespace also gets default objects.
                    seen.extend(map.metadata.name.filter(|name| name.starts_with('w')));
                }
                WatchEvent::Bookmark(_) => {}
                event => panic!("{event:?}"),
            }
        }
    }
    let expected: Vec<String> =
        (0..2).flat_map(|half| (0..10).map(move |index| format!("w{half}-{index}"))).collect();
    assert_eq!(seen, expected, "every change once and in order");
    one.stop().await;
    other.stop().await;
}

#[tokio::test]
async fn concurrent_writes_at_two_servers_are_never_lost_or_doubled() {
    let (one, other) = pair().await;
    let attempts = (0..20).map(|index| {
        let api = maps(if index % 2 == 0 { &one } else { &other });
        async move { code(api.create(&PostParams::default(), &map("only", "x")).await) }
    });
    let outcomes = futures::future::join_all(attempts).await;
    assert_eq!(outcomes.iter().filter(|code| **code == 0).count(), 1, "{outcomes:?}");
    assert_eq!(outcomes.iter().filter(|code| **code == 409).count(), 19, "{outcomes:?}");

    let count = Arc::new(map("count", "0"));
    maps(&one).create(&PostParams::default(), &count).await.unwrap();
    let increments = (0..10).map(|index| {
        let api = maps(if index % 2 == 0 { &one } else { &other });
        async move {
            loop {
                let mut current = api.get("count").await.unwrap();
                let data = current.data.as_mut().unwrap();
                let next = data["key"].parse::<u32>().unwrap() + 1;
                data.insert("key".into(), next.to_string());
                match code(api.replace("count", &PostParams::default(), &current).await) {
                    0 => return,
                    409 => {}
                    other => panic!("{other}"),
                }
            }
        }
    });
    futures::future::join_all(increments).await;
    assert_eq!(maps(&other).get("count").await.unwrap().data.unwrap()["key"], "10");
    one.stop().await;
    other.stop().await;
}

#[tokio::test]
async fn field_managers_conflict_across_servers() {
    let (one, other) = pair().await;
    let apply = |cluster: &TestServer, manager: &str, data: serde_json::Value| {
        let api = maps(cluster);
        let params = PatchParams::apply(manager);
        let expected =
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "shared"}, "data": data});
        async move { api.patch("shared", &params, &Patch::Apply(&expected)).await }
    };
    apply(&one, "a", json!({"a": "1"})).await.unwrap();
    let both = apply(&other, "b", json!({"b": "2"})).await.unwrap();
    assert_eq!(both.data.unwrap().len(), 2);
    assert_eq!(code(apply(&other, "b", json!({"a": "9", "b": "2"})).await), 409);
    let without = apply(&one, "a", json!({})).await.unwrap();
    assert_eq!(without.data.unwrap().into_keys().collect::<Vec<_>>(), ["b"]);
    one.stop().await;
    other.stop().await;
}

#[tokio::test]
async fn kinds_rights_and_credentials_of_one_hold_at_the_other() {
    let (one, other) = pair().await;
    let definition: CustomResourceDefinition = serde_json::from_value(json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "things.example.com"},
        "spec": {
            "group": "example.com", "scope": "Namespaced",
            "names": {"plural": "things", "singular": "thing", "kind": "Thing"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object"}}}],
        },
    }))
    .unwrap();
    Api::all(one.client()).create(&PostParams::default(), &definition).await.unwrap();
    let get = |cluster: &TestServer, path: &str| {
        let (client, request) = (cluster.client(), http::Request::get(path).body(Vec::new()).unwrap());
        async move { client.request_text(request).await.is_ok() }
    };
    other
        .eventually("the kind is served at the other", || {
            get(&other, "/apis/example.com/v1/namespaces/default/things")
        })
        .await;

    // A certificate of one server's CA, and permissions written at that server.
    let alice = one.client_as("alice", &[]).await;
    let at_other = other.client_for("alice", &one).await;
    let allowed = |client: &kube::Client| {
        let api: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
        async move { code(api.list(&ListParams::default()).await) }
    };
    assert_eq!((allowed(&alice).await, allowed(&at_other).await), (403, 403));
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "alice"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "alice"}],
    });
    let bindings: Api<k8s_openapi::api::rbac::v1::ClusterRoleBinding> = Api::all(one.client());
    bindings.create(&PostParams::default(), &serde_json::from_value(binding).unwrap()).await.unwrap();
    assert_eq!(allowed(&alice).await, 0);
    other.eventually("the right holds at the other", || async { allowed(&at_other).await == 0 }).await;

    // A token signed by one server.
    let accounts: Api<ServiceAccount> = Api::namespaced(one.client(), "default");
    one.eventually("the account is there", || async { accounts.get("default").await.is_ok() }).await;
    let request: TokenRequest = serde_json::from_value(json!({"spec": {"audiences": []}})).unwrap();
    let token = accounts.create_token_request("default", &PostParams::default(), &request).await.unwrap();
    let bearer = other.client_with_token(&token.status.unwrap().token.unwrap()).await;
    assert_eq!(allowed(&bearer).await, 403, "it is known and has no rights");
    one.stop().await;
    other.stop().await;
}

#[tokio::test]
async fn two_garbage_collectors_delete_only_unowned_objects() {
    let (one, other) = pair().await;
    for round in 0..5 {
        let (here, there) =
            if round % 2 == 0 { (maps(&one), maps(&other)) } else { (maps(&other), maps(&one)) };
        let owner = here.create(&PostParams::default(), &map("owner", "x")).await.unwrap();
        let heir = there.create(&PostParams::default(), &map("heir", "x")).await.unwrap();
        let owned_by = |name: &str, owner: &ConfigMap| {
            let mut child = map(name, "x");
            child.metadata.owner_references = Some(vec![
                serde_json::from_value(json!({
                    "apiVersion": "v1", "kind": "ConfigMap", "name": owner.metadata.name, "uid": owner.metadata.uid,
                }))
                .unwrap(),
            ]);
            child
        };
        there.create(&PostParams::default(), &owned_by("gone", &owner)).await.unwrap();
        there.create(&PostParams::default(), &owned_by("kept", &owner)).await.unwrap();
        // The owner changes at one server while the old owner is deleted at the other.
        let references = owned_by("kept", &heir).metadata.owner_references;
        let hands_over = Patch::Merge(json!({"metadata": {"ownerReferences": references}}));
        there.patch("kept", &PatchParams::default(), &hands_over).await.unwrap();
        here.delete("owner", &DeleteParams::default()).await.unwrap();
        one.eventually("the dependent is gone", || async { code(here.get("gone").await) == 404 }).await;
        assert_eq!(code(there.get("kept").await), 0, "round {round}: it has another owner");
        there.delete("heir", &DeleteParams::default()).await.unwrap();
        one.eventually("the heir's dependent is gone", || async { code(here.get("kept").await) == 404 })
            .await;
    }
    let namespaces: Api<Namespace> = Api::all(one.client());
    let namespace = serde_json::from_value(json!({"metadata": {"name": "short"}})).unwrap();
    namespaces.create(&PostParams::default(), &namespace).await.unwrap();
    let inside: Api<ConfigMap> = Api::namespaced(other.client(), "short");
    inside.create(&PostParams::default(), &map("a", "x")).await.unwrap();
    namespaces.delete("short", &DeleteParams::default()).await.unwrap();
    one.eventually("the namespace is gone", || async { code(namespaces.get("short").await) == 404 }).await;
    assert_eq!(code(inside.get("a").await), 404);
    one.stop().await;
    other.stop().await;
}
