//! Pools against the embedded API server: labels from hardware, placement, and messages.

use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{Type, get, is_true};
use russet_crds::{InferenceNode, ModelDeployment, NodePool, ShardGroup, Sharding};
use russet_rpc::tls;
use serde_json::{Value, json};

use crate::harness::{ClusterHarness, GIB, deployment, model, until};
use crate::{ready, says};

async fn apply_pool(cluster: &ClusterHarness, name: &str, spec: Value) -> Result<NodePool, kube::Error> {
    let api: Api<NodePool> = Api::all(cluster.admin.clone());
    let pool = json!({"apiVersion": "russet.dev/v1alpha1", "kind": "NodePool", "metadata": {"name": name}, "spec": spec});
    api.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(pool)).await
}

/// Waits until a pool's Ready has this reason at its generation; returns the pool and the message.
async fn pool_says(cluster: &ClusterHarness, name: &str, reason: &str) -> (NodePool, String) {
    let api: Api<NodePool> = Api::all(cluster.admin.clone());
    until(&format!("pool {name} says {reason}"), || async {
        let pool = api.get(name).await.ok()?;
        let status = pool.status.as_ref()?;
        let ready = get(&status.conditions, Type::Ready)?;
        let message = ready.message.clone();
        (ready.reason == reason && status.observed_generation == pool.metadata.generation)
            .then_some((pool, message))
    })
    .await
}

fn in_pools(name: &str, pools: &[&str]) -> ModelDeployment {
    let mut deployment = deployment(name, "m", Sharding::default());
    deployment.spec.pool_refs = pools.iter().map(|pool| russet_crds::LocalReference::new(*pool)).collect();
    deployment
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deployment_runs_in_its_pool_and_stays_if_its_node_leaves() {
    let cluster = ClusterHarness::start(&[("a", 8 * GIB), ("b", 16 * GIB)]).await;
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    let groups: Api<ShardGroup> = Api::default_namespaced(cluster.admin.clone());
    let nodes: Api<InferenceNode> = Api::all(cluster.admin.clone());
    cluster.create(model("m", "llama", 4, GIB)).await;

    // A deployment names a pool before it exists; creating the pool is enough.
    cluster.create(in_pools("chat", &["large"])).await;
    let found = until("chat misses its pool", || async {
        deployments.get("chat").await.ok().filter(|chat| says(chat, Type::Ready, "PoolNotFound"))
    })
    .await;
    let status = found.status.unwrap();
    assert!(is_true(&status.conditions, Type::Stalled));
    let message = &get(&status.conditions, Type::Placed).unwrap().message;
    assert!(message.contains("NodePool \"large\" does not exist; there are no NodePools"), "{message}");

    let memory = |size: &str| json!({"selector": {"matchLabels": {"russet.dev/memory": size}}});
    apply_pool(&cluster, "large", memory("16Gi")).await.unwrap();
    let chat = until("chat is ready", || async { deployments.get("chat").await.ok().filter(ready) }).await;
    // The tightest fit alone would have been a.
    assert_eq!(chat.status.unwrap().nodes.as_deref(), Some("b"));
    let (pool, message) = pool_says(&cluster, "large", "Settled").await;
    assert_eq!(message, "its one node takes work");
    assert_eq!(pool.status.as_ref().unwrap().summary.as_deref(), Some("1/1"));
    until("the pool shows what is promised", || async {
        let memory = pool_says(&cluster, "large", "Settled").await.0.status?.memory?;
        let all = memory.committed_bytes + memory.free_bytes;
        (memory.committed_bytes > 4 * GIB && all == 16 * GIB).then_some(())
    })
    .await;

    // The message for a wrong selector lists existing values.
    apply_pool(&cluster, "typo", memory("16")).await.unwrap();
    let (pool, message) = pool_says(&cluster, "typo", "NoNodes").await;
    assert!(message.contains("russet.dev/memory is 16Gi, 8Gi on the nodes there are"), "{message}");
    assert!(is_true(&pool.status.unwrap().conditions, Type::Stalled));
    let rule =
        json!({"selector": {"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]}});
    let error = apply_pool(&cluster, "wrong", rule).await.unwrap_err().to_string();
    assert!(error.contains("In and NotIn need values"), "{error}");

    // The pool selects another node now: the ready replica stays and reports it.
    let before: Vec<String> =
        groups.list(&Default::default()).await.unwrap().iter().map(|it| it.name_any()).collect();
    apply_pool(&cluster, "large", memory("8Gi")).await.unwrap();
    let outside = until("chat stays outside", || async {
        deployments.get("chat").await.ok().filter(|chat| says(chat, Type::Placed, "OutsidePools"))
    })
    .await;
    let status = outside.status.clone().unwrap();
    let placed = get(&status.conditions, Type::Placed).unwrap();
    assert!(
        placed.status == "True" && placed.message.contains("stays on b, which NodePool large no longer has")
    );
    assert!(ready(&outside));

    // A spec that names another pool moves the replica.
    cluster.create(in_pools("other", &["large"])).await;
    let other = until("other is ready", || async { deployments.get("other").await.ok().filter(ready) }).await;
    assert_eq!(other.status.unwrap().nodes.as_deref(), Some("a"));
    deployments.delete("other", &Default::default()).await.unwrap();
    let now: Vec<String> = until("the groups of chat alone are there", || async {
        let names: Vec<String> =
            groups.list(&Default::default()).await.ok()?.iter().map(|it| it.name_any()).collect();
        (names.len() == 1).then_some(names)
    })
    .await;
    assert_eq!(now, before, "nothing moved");
    groups.delete(&before[0], &Default::default()).await.unwrap();
    until("chat is placed anew in its pool", || async {
        let chat = deployments.get("chat").await.ok().filter(ready)?;
        (chat.status.as_ref()?.nodes.as_deref() == Some("a") && says(&chat, Type::Placed, "PlanFound"))
            .then_some(())
    })
    .await;

    // An edit of the references moves it: the old replica serves until the new one is ready.
    apply_pool(&cluster, "big", memory("16Gi")).await.unwrap();
    let patch = Patch::Merge(json!({"spec": {"poolRefs": [{"name": "big"}]}}));
    deployments.patch("chat", &PatchParams::default(), &patch).await.unwrap();
    until("chat has moved", || async {
        let chat = deployments.get("chat").await.ok().filter(ready)?;
        (chat.status.as_ref()?.nodes.as_deref() == Some("b")).then_some(())
    })
    .await;

    // A pool does not count a node that takes no work.
    let cordon = Patch::Merge(json!({"spec": {"scheduling": "Cordoned"}}));
    nodes.patch("b", &PatchParams::default(), &cordon).await.unwrap();
    let (pool, message) = pool_says(&cluster, "big", "WaitingForAgent").await;
    assert!(is_true(&pool.status.unwrap().conditions, Type::Reconciling), "{message}");
    assert_eq!(cluster.refusals(), 0);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_labels_are_set_by_the_operator_only() {
    let cluster = ClusterHarness::start(&[("a", 8 * GIB)]).await;
    let labelled = |node: &InferenceNode| node.labels().get("russet.dev/memory").cloned();
    let nodes: Api<InferenceNode> = Api::all(cluster.admin.clone());
    until("the node is labelled", || async { labelled(&nodes.get("a").await.ok()?) }).await;

    let own: Api<InferenceNode> = Api::all(cluster.client(&tls::node_user("a"), tls::NODES_GROUP).await);
    let labels = json!({"russet.dev/memory": "512Gi", "russet.dev/chip": "M3-Ultra"});
    let lie = Patch::Merge(json!({"metadata": {"labels": labels}}));
    let error = own.patch("a", &PatchParams::default(), &lie).await.unwrap_err().to_string();
    assert!(error.contains("forbidden"), "{error}");
    // Through the status it may write its status only.
    let smuggled = Patch::Merge(json!({"metadata": {"labels": labels}, "status": {"os": "smuggled"}}));
    own.patch_status("a", &PatchParams::default(), &smuggled).await.unwrap();
    let node = nodes.get("a").await.unwrap();
    assert_eq!(node.status.as_ref().unwrap().os.as_deref(), Some("smuggled"));
    assert_eq!(labelled(&node).as_deref(), Some("8Gi"));

    // A person's own label stays, and one that imitates a measured one is corrected.
    let person = Patch::Merge(json!({"metadata": {"labels": {"rack": "a", "russet.dev/memory": "512Gi"}}}));
    nodes.patch("a", &PatchParams::default(), &person).await.unwrap();
    until("the label is what was measured", || async {
        let node = nodes.get("a").await.ok()?;
        let rack = node.labels().get("rack").cloned();
        (labelled(&node).as_deref() == Some("8Gi")).then_some(rack)
    })
    .await
    .unwrap();

    // The operator may not write users' specs.
    let operator = cluster.client(tls::OPERATOR_USER, "russet:components").await;
    apply_pool(&cluster, "all", json!({"selector": {}})).await.unwrap();
    pool_says(&cluster, "all", "Settled").await;
    let pools: Api<NodePool> = Api::all(operator);
    let widen = Patch::Merge(json!({"spec": {"selector": {"matchLabels": {"x": "y"}}}}));
    let error = pools.patch("all", &PatchParams::default(), &widen).await.unwrap_err().to_string();
    assert!(error.contains("forbidden"), "{error}");
    cluster.stop().await;
}
