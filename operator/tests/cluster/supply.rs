//! Source selection of copies against the embedded API server.

use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{Type, get};
use russet_crds::{CopyPeer, CopySource, LocalReference, Model, ModelCopy, Preload, PreloadPolicy, names};
use russet_operator::node_accounts::Credential;
use russet_rpc::tls;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::harness::{ClusterHarness, GIB, model, until};
use crate::stub_agent::{PEER_PORT, content};

fn object<K: DeserializeOwned>(value: Value) -> K {
    serde_json::from_value(value).unwrap()
}

/// Waits until the copy on a node has this supply and this reason.
async fn wait_copy(
    cluster: &ClusterHarness,
    node: &str,
    supply: Option<&CopySource>,
    reason: &str,
) -> ModelCopy {
    let api: Api<ModelCopy> = Api::all(cluster.admin.clone());
    until(&format!("the copy on {node} has the supply {supply:?} and says {reason}"), || async {
        let copy = api.get(&names::model_copy("default", "m", node)).await.ok()?;
        let ready = get(&copy.status.as_ref()?.conditions, Type::Ready)?;
        (copy.spec.supply.as_ref() == supply && ready.reason == reason).then_some(copy.clone())
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_node_fetches_another_takes_over_and_peers_follow() {
    let mut cluster = ClusterHarness::start(&[("a", 32 * GIB), ("b", 32 * GIB)]).await;
    for node in ["a", "b"] {
        cluster.agent(node).limit_disk(10 * GIB);
        cluster.agent(node).stall_source(true);
    }
    let mut model = model("m", "llama", 4, GIB);
    model.spec.source.uri = model.spec.source.uri.replace("file:///", "hf://");
    model.spec.preload = Some(Preload { policy: PreloadPolicy::Always, ..Preload::default() });
    cluster.create(model).await;
    let waits = CopySource::default();
    wait_copy(&cluster, "a", None, "Downloading").await;
    let copy = wait_copy(&cluster, "b", Some(&waits), "WaitingForPeer").await;
    assert_eq!(copy.labels()[names::LABEL_NODE], "b");
    let api: Api<Model> = Api::default_namespaced(cluster.admin.clone());
    until("the Model says that its files come", || async {
        let status = api.get("m").await.ok()?.status?;
        (get(&status.conditions, Type::Preloaded)?.reason == "Downloading").then_some(())
    })
    .await;

    // Its power is cut: the other copy fetches, and completes.
    cluster.stop_agent("a");
    wait_copy(&cluster, "b", None, "Downloading").await;
    cluster.agent("b").stall_source(false);
    wait_copy(&cluster, "b", None, "Verified").await;

    // When it is back, it has to download from there.
    let b = CopyPeer { node_name: "b".to_owned(), address: format!("127.0.0.1:{PEER_PORT}") };
    let receives = CopySource { content: Some(content()), from: vec![b] };
    wait_copy(&cluster, "a", Some(&receives), "Downloading").await;
    cluster.start_agent("a", 32 * GIB).await;
    let copy = wait_copy(&cluster, "a", Some(&receives), "Verified").await;

    // The manager that requests files sets no supply, and removes none.
    let copies: Api<ModelCopy> = Api::all(cluster.admin.clone());
    let asked = json!({"apiVersion": "russet.dev/v1alpha1", "kind": "ModelCopy",
                       "metadata": {"name": copy.name_any()}, "spec": copy.spec.agent_work()});
    let operator = PatchParams::apply(names::OPERATOR_MANAGER).force();
    let copy = copies.patch(&copy.name_any(), &operator, &Patch::Apply(asked)).await.unwrap();
    assert_eq!(copy.spec.supply.as_ref(), Some(&receives));
    let managers = copy.managed_fields().iter().filter(|entry| {
        let fields = entry.fields_v1.as_ref().map(|fields| fields.0.to_string()).unwrap_or_default();
        fields.contains("f:supply")
    });
    let managers: Vec<&str> = managers.filter_map(|entry| entry.manager.as_deref()).collect();
    assert_eq!(managers, [names::SUPPLY_MANAGER]);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fetching_node_may_read_the_source_secret_until_done() {
    let cluster =
        ClusterHarness::start_with(Credential::Certificate, &[("a", 32 * GIB), ("b", 32 * GIB)]).await;
    for node in ["a", "b"] {
        cluster.agent(node).limit_disk(10 * GIB);
        cluster.agent(node).stall_source(true);
    }
    for name in ["hub", "other"] {
        let secret: Secret = object(json!({"metadata": {"name": name}, "stringData": {"token": "t"}}));
        cluster.create(secret).await;
    }
    let role: Role = object(json!({
        "metadata": {"name": names::SOURCES_ROLE},
        "rules": [{"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["hub"], "verbs": ["get"]}],
    }));
    cluster.create(role).await;
    let mut model = model("m", "llama", 4, GIB);
    model.spec.source.uri = model.spec.source.uri.replace("file:///", "hf://");
    model.spec.source.secret_ref = Some(LocalReference { name: "hub".to_owned() });
    model.spec.preload = Some(Preload { policy: PreloadPolicy::Always, ..Preload::default() });
    cluster.create(model).await;

    // One node fetches and may read the Secret; the other one waits, and may not.
    wait_copy(&cluster, "a", None, "Downloading").await;
    wait_copy(&cluster, "b", Some(&CopySource::default()), "WaitingForPeer").await;
    let mut secrets: Vec<Api<Secret>> = Vec::new();
    for node in ["a", "b"] {
        let user = cluster.client(&tls::node_user(node), tls::NODES_GROUP).await;
        secrets.push(Api::default_namespaced(user));
    }
    let sees = async |secret: &str| {
        let (a, b) = (secrets[0].get(secret).await.is_ok(), secrets[1].get(secret).await.is_ok());
        [a, b]
    };
    until("a alone reads the Secret", || async { (sees("hub").await == [true, false]).then_some(()) }).await;
    assert_eq!(sees("other").await, [false, false], "the Role does not name it");

    cluster.agent("a").stall_source(false);
    wait_copy(&cluster, "a", None, "Verified").await;
    let bindings: Api<RoleBinding> = Api::default_namespaced(cluster.admin.clone());
    until("nobody may read it any more", || async {
        let there = bindings.get_opt(&names::source_binding("m")).await.ok()?;
        (there.is_none() && sees("hub").await == [false, false]).then_some(())
    })
    .await;

    // The permission to bind that Role gives the operator no other.
    let operator = cluster.client(tls::OPERATOR_USER, "russet:components").await;
    let (own, read): (Api<RoleBinding>, Api<Secret>) =
        (Api::default_namespaced(operator.clone()), Api::default_namespaced(operator));
    let node = json!({"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "russet:node:a"});
    let itself = json!({"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": tls::OPERATOR_USER});
    let role =
        |kind: &str, name: &str| json!({"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name});
    for (story, name, role_ref, subject, words) in [
        ("itself", "russet-sources-m", role("Role", "russet-sources"), &itself, "may bind nodes to the Role"),
        ("another name", "m", role("Role", "russet-sources"), &node, "may bind nodes to the Role"),
        ("its own role", "russet-sources-m", role("ClusterRole", "russet-node"), &node, "forbidden"),
        (
            "too much",
            "russet-sources-m",
            role("ClusterRole", "cluster-admin"),
            &node,
            "permissions not currently held",
        ),
    ] {
        let binding: RoleBinding =
            object(json!({"metadata": {"name": name}, "roleRef": role_ref, "subjects": [subject]}));
        let error = own.create(&Default::default(), &binding).await.unwrap_err().to_string();
        assert!(error.contains(words), "{story}: {error}");
    }
    assert!(read.get("hub").await.is_err(), "the operator reads no Secret of a source");
    cluster.stop().await;
}
