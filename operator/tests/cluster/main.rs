//! The operator against the embedded API server, with stub agents: they hold no models and start no engines,
//! but follow the same rules and have the same access rights as real ones.

#![allow(clippy::unwrap_used, reason = "a test ends where its world is not as it says")]

mod copies;
mod energy;
mod harness;
mod joining;
mod pipeline_approvals;
mod pipeline_runs;
mod pools;
mod preemption;
mod rollouts;
mod scaling;
mod strategies;
mod stub_agent;
mod supply;
mod tiers;

use harness::{ClusterHarness, GIB, deployment, model, until};
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{Type, get, is_true};
use russet_crds::{
    Backend, InferenceNode, Model, ModelCopy, ModelDeployment, ModelRoute, Shard, ShardGroup, Sharding,
    ShardingMode, Transport,
};
use serde_json::json;

fn ready(deployment: &ModelDeployment) -> bool {
    deployment.status.as_ref().is_some_and(|status| {
        status.observed_generation == deployment.metadata.generation
            && is_true(&status.conditions, Type::Ready)
    })
}

fn says(deployment: &ModelDeployment, kind: Type, reason: &str) -> bool {
    let conditions =
        deployment.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    get(conditions, kind)
        .is_some_and(|it| it.reason == reason && it.observed_generation == deployment.metadata.generation)
}

async fn replicas(cluster: &ClusterHarness, name: &str, replicas: i32) {
    let api: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
    api.patch_scale(name, &PatchParams::default(), &patch).await.unwrap();
}

fn pipeline(ranks: u32) -> Sharding {
    Sharding { mode: ShardingMode::Pipeline, ranks: Some(ranks), ..Sharding::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipeline_forms_survives_a_rank_loss_and_cleans_up() {
    let cluster = ClusterHarness::start(&[("a", 8 * GIB), ("b", 8 * GIB)]).await;
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    let groups: Api<ShardGroup> = Api::default_namespaced(cluster.admin.clone());
    let shards: Api<Shard> = Api::default_namespaced(cluster.admin.clone());
    cluster.create(model("m", "llama", 4, GIB)).await;
    cluster.create(deployment("chat", "m", pipeline(2))).await;

    let chat = until("chat is ready", || async { deployments.get("chat").await.ok().filter(ready) }).await;
    let status = chat.status.unwrap();
    assert_eq!((status.nodes.as_deref(), status.summary.as_deref()), (Some("a,b"), Some("1/1")));
    assert_eq!(status.selector.as_deref(), Some("russet.dev/deployment=chat"));
    let placement = status.placement.unwrap();
    assert_eq!(placement.decision, "2 ranks on a, b: layers 2 + 2");
    for kind in [Type::Placed, Type::CopiesReady, Type::Available] {
        assert!(is_true(&status.conditions, kind), "{kind:?}");
    }
    let group = groups.list(&Default::default()).await.unwrap().items.remove(0);
    let endpoint = group.status.as_ref().unwrap().endpoint.clone().unwrap();
    assert_eq!(
        (endpoint.node_name.as_str(), group.spec.plan.hash.as_str()),
        ("a", placement.plan_hash.as_str())
    );
    let rank = shards.get(&format!("{}-1", group.name_any())).await.unwrap();
    assert_eq!(rank.spec.peers.len(), 2);
    assert_eq!(rank.spec.peers[0].rpc, endpoint.address);

    // A rank fails: all ranks restart at the next epoch, at other addresses, without a person.
    let start = std::time::Instant::now();
    cluster.agent("b").fail(&rank.name_any());
    let formed = until("the group serves at epoch 2", || async {
        let group = groups.get(&group.name_any()).await.ok()?;
        let status = group.status.clone()?;
        (status.served_epoch == Some(2) && status.endpoint.is_some()).then_some(group)
    })
    .await;
    println!("formed anew after {:?}", start.elapsed());
    assert_eq!((formed.spec.epoch, formed.status.as_ref().unwrap().restarts), (2, 1));
    assert_ne!(formed.status.unwrap().endpoint.unwrap().address, endpoint.address);
    until("chat is ready again", || async { deployments.get("chat").await.ok().filter(ready) }).await;

    // A Shard is deleted by hand: the group recovers.
    shards.delete(&rank.name_any(), &Default::default()).await.unwrap();
    until("the group serves at epoch 3", || async {
        let group = groups.get(&group.name_any()).await.ok()?;
        group.status.filter(|status| status.served_epoch == Some(3) && status.endpoint.is_some())
    })
    .await;

    // Events tell the story.
    let events: Api<k8s_openapi::api::events::v1::Event> = Api::default_namespaced(cluster.admin.clone());
    until("events for the placement and the loss", || async {
        let reasons: Vec<String> = events
            .list(&Default::default())
            .await
            .ok()?
            .items
            .into_iter()
            .filter_map(|it| it.reason)
            .collect();
        ["PlanFound", "EngineExited", "PeerLost", "Serving"]
            .iter()
            .all(|expected| reasons.iter().any(|it| it == expected))
            .then_some(())
    })
    .await;

    // Garbage collection: groups and Shards by their owners, the copies by the Model's finalizer.
    deployments.delete("chat", &Default::default()).await.unwrap();
    let models: Api<Model> = Api::default_namespaced(cluster.admin.clone());
    models.delete("m", &Default::default()).await.unwrap();
    let copies: Api<ModelCopy> = Api::all(cluster.admin.clone());
    until("nothing is left", || async {
        let left = groups.list(&Default::default()).await.ok()?.items.len()
            + shards.list(&Default::default()).await.ok()?.items.len()
            + copies.list(&Default::default()).await.ok()?.items.len()
            + models.list(&Default::default()).await.ok()?.items.len();
        (left == 0).then_some(())
    })
    .await;
    until("the agents hold nothing", || async {
        (cluster.granted("a").await + cluster.granted("b").await == 0).then_some(())
    })
    .await;
    let metrics = cluster.metrics();
    for text in [
        "russet_placement_attempts_total{reason=\"PlanFound\"}",
        "russet_shardgroup_formation_seconds_count",
        "russet_operator_reconciles_total{controller=\"group\",result=\"ok\"}",
    ] {
        assert!(metrics.contains(text), "{metrics}\nlacks {text}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensor_group_gets_rendezvous_and_leaves_a_draining_node() {
    let cluster = ClusterHarness::start(&[("a", 8 * GIB), ("b", 8 * GIB), ("c", 8 * GIB)]).await;
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    let shards: Api<Shard> = Api::default_namespaced(cluster.admin.clone());
    let nodes: Api<InferenceNode> = Api::all(cluster.admin.clone());
    cluster.create(model("m", "llama", 4, GIB)).await;
    let tensor = Sharding { mode: ShardingMode::Tensor, tensor_size: Some(2), ..Sharding::default() };
    cluster.create(deployment("chat", "m", tensor)).await;
    let chat = until("chat is ready", || async { deployments.get("chat").await.ok().filter(ready) }).await;
    let decision = chat.status.unwrap().placement.unwrap().decision;
    assert_eq!(
        decision,
        "tensor over 2 nodes (a, b), TCP ring: a and b have no RDMA link: the engine of node a does not offer jaccl"
    );
    let specs = |list: Vec<Shard>| list.into_iter().map(|shard| shard.spec).collect::<Vec<_>>();
    for spec in specs(shards.list(&Default::default()).await.unwrap().items) {
        assert_eq!((spec.tensor_size, spec.backend, spec.transport), (2, Backend::Ring, Transport::Tunnel));
        assert_eq!(spec.layers_per_rank, [4, 4]);
        assert!(spec.peers.iter().all(|peer| !peer.tensor.is_empty()) && spec.weight_bytes == 2 * GIB);
    }

    // Replicas on a draining node move to the free node; the node reports when it is empty.
    let drain = Patch::Merge(json!({"spec": {"scheduling": "Draining"}}));
    nodes.patch("b", &PatchParams::default(), &drain).await.unwrap();
    let drained = |node: &InferenceNode| {
        node.status.as_ref().is_some_and(|status| is_true(&status.conditions, Type::Drained))
    };
    until("b is empty", || async { nodes.get("b").await.ok().filter(drained) }).await;
    let left = specs(shards.list(&Default::default()).await.unwrap().items);
    let mut places: Vec<&str> = left.iter().map(|spec| spec.node_name.as_str()).collect();
    places.sort_unstable();
    assert_eq!(places, ["a", "c"]);
    until("chat is ready again", || async { deployments.get("chat").await.ok().filter(ready) }).await;
    let undrain = Patch::Merge(json!({"spec": {"scheduling": "Enabled"}}));
    nodes.patch("b", &PatchParams::default(), &undrain).await.unwrap();
    until("b says nothing of a drain any more", || async {
        let status = nodes.get("b").await.ok()?.status?;
        get(&status.conditions, Type::Drained).is_none().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deployments_scale_share_memory_and_explain_refusals() {
    let cluster = ClusterHarness::start(&[("a", 6 * GIB), ("b", 6 * GIB)]).await;
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    let groups: Api<ShardGroup> = Api::default_namespaced(cluster.admin.clone());
    cluster.create(model("m", "llama", 4, GIB)).await;
    cluster.create(deployment("chat", "m", Sharding::default())).await;
    until("chat is ready on one node", || async { deployments.get("chat").await.ok().filter(ready) }).await;

    replicas(&cluster, "chat", 2).await;
    let two = until("two replicas are ready", || async {
        deployments
            .get("chat")
            .await
            .ok()
            .filter(|chat| ready(chat) && chat.status.as_ref().is_some_and(|it| it.ready_replicas == 2))
    })
    .await;
    assert_eq!(two.status.unwrap().nodes.as_deref(), Some("a,b"), "replicas spread");

    // Nothing is left for another one, and its message has the numbers of every node.
    cluster.create(deployment("more", "m", Sharding::default())).await;
    let more = until("more fits nowhere", || async {
        deployments.get("more").await.ok().filter(|more| says(more, Type::Ready, "NothingFits"))
    })
    .await;
    let status = more.status.unwrap();
    let message = &get(&status.conditions, Type::Placed).unwrap().message;
    assert!(
        message.contains("node a: the whole model needs") && message.contains("1.8 GiB free of 6.0 GiB"),
        "{message}"
    );
    assert!(message.contains("free memory by deleting"), "{message}");
    assert!(is_true(&status.conditions, Type::Stalled) && status.placement.is_some());

    // Memory becomes free, and the replica is placed there without a further request.
    replicas(&cluster, "chat", 0).await;
    let stopped =
        until("chat is stopped", || async { deployments.get("chat").await.ok().filter(ready) }).await;
    assert!(says(&stopped, Type::Ready, "Stopped"));
    until("more is ready", || async { deployments.get("more").await.ok().filter(ready) }).await;

    // An edit that does not fit beside the running replica replaces it.
    replicas(&cluster, "chat", 1).await;
    until("chat is ready again", || async { deployments.get("chat").await.ok().filter(ready) }).await;
    let old: Vec<String> = names(&groups, "chat").await;
    let patch = Patch::Merge(json!({"spec": {"sharding": {"kv": {"maxSequences": 2}}}}));
    deployments.patch("chat", &PatchParams::default(), &patch).await.unwrap();
    until("chat is ready after the edit", || async {
        let chat = deployments.get("chat").await.ok().filter(ready)?;
        let now = names(&groups, "chat").await;
        (now.len() == 1 && now != old).then_some(chat)
    })
    .await;
    assert_eq!(cluster.refusals(), 0, "no agent was ever asked for more than it had");
    cluster.stop().await;
}

async fn names(groups: &Api<ShardGroup>, deployment: &str) -> Vec<String> {
    let all = groups.list(&Default::default()).await.unwrap().items;
    all.iter().filter(|it| it.spec.deployment_ref.name == deployment).map(|it| it.name_any()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conditions_explain_wrong_specs_cordons_and_routes() {
    let cluster = ClusterHarness::start(&[("a", 8 * GIB)]).await;
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    let nodes: Api<InferenceNode> = Api::all(cluster.admin.clone());
    let node = until("the node is ready", || async {
        nodes
            .get("a")
            .await
            .ok()
            .filter(|node| node.status.as_ref().is_some_and(|it| is_true(&it.conditions, Type::Ready)))
    })
    .await;
    assert_eq!(node.labels().get("russet.dev/memory").map(String::as_str), Some("8Gi"));
    assert_eq!(node.labels().get("russet.dev/chip").map(String::as_str), Some("Played-CPU"));

    cluster.create(deployment("ghost", "nobody", Sharding::default())).await;
    cluster.create(model("alien", "mamba", 4, GIB)).await;
    cluster.create(deployment("alien", "alien", Sharding::default())).await;
    cluster.create(model("m", "llama", 4, GIB)).await;
    let tensor = Sharding { mode: ShardingMode::Tensor, ranks: Some(3), ..Sharding::default() };
    cluster.create(deployment("tensor", "m", tensor)).await;
    cluster.create(deployment("wide", "m", pipeline(2))).await;
    for (name, reason, text) in [
        ("ghost", "ModelNotFound", "Model \"nobody\" does not exist"),
        ("alien", "UnsupportedArchitecture", "mamba"),
        ("tensor", "InvalidSpec", "4 KV heads cannot be cut into 3; use 1, 2 or 4"),
        ("wide", "NothingFits", "2 ranks need 2 nodes"),
    ] {
        let found = until(name, || async {
            deployments.get(name).await.ok().filter(|it| says(it, Type::Ready, reason))
        })
        .await;
        let status = found.status.unwrap();
        let message = &get(&status.conditions, Type::Ready).unwrap().message;
        assert!(message.contains(text), "{name}: {message}");
        assert!(is_true(&status.conditions, Type::Stalled), "{name}");
    }
    let models: Api<Model> = Api::default_namespaced(cluster.admin.clone());
    let alien = models.get("alien").await.unwrap().status.unwrap();
    assert!(is_true(&alien.conditions, Type::Resolved) && !is_true(&alien.conditions, Type::Supported));
    let known = models.get("m").await.unwrap().status.unwrap();
    assert_eq!((known.size.as_deref(), known.shape.map(|shape| shape.layers)), (Some("4Gi"), Some(4)));

    // A cordoned node keeps its replicas and gets no new ones.
    cluster.create(deployment("chat", "m", Sharding::default())).await;
    until("chat is ready", || async { deployments.get("chat").await.ok().filter(ready) }).await;
    let cordon = Patch::Merge(json!({"spec": {"scheduling": "Cordoned"}}));
    nodes.patch("a", &PatchParams::default(), &cordon).await.unwrap();
    replicas(&cluster, "chat", 2).await;
    let cordoned = until("the second replica has no place", || async {
        deployments.get("chat").await.ok().filter(|chat| says(chat, Type::Placed, "NoNodes"))
    })
    .await;
    let status = cordoned.status.unwrap();
    assert!(is_true(&status.conditions, Type::Available) && status.ready_replicas == 1);
    assert!(get(&status.conditions, Type::Placed).unwrap().message.contains("node a: cordoned"));

    let routes: Api<ModelRoute> = Api::default_namespaced(cluster.admin.clone());
    let route = |target: &str| {
        json!({"apiVersion": "russet.dev/v1alpha1", "kind": "ModelRoute", "metadata": {"name": "auto"},
               "spec": {"models": ["auto"], "targets": [{"deploymentRef": {"name": target}}]}})
    };
    for (target, ready, reason) in [("nothing", "False", "TargetNotFound"), ("chat", "True", "Serving")] {
        routes.patch("auto", &PatchParams::apply("test"), &Patch::Apply(route(target))).await.unwrap();
        until("the route is judged", || async {
            let status = routes.get("auto").await.ok()?.status?;
            get(&status.conditions, Type::Ready)
                .filter(|it| it.status == ready && it.reason == reason)
                .cloned()
        })
        .await;
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operator_restart_changes_nothing_and_skips_unreachable_nodes() {
    let mut cluster = ClusterHarness::start(&[("a", 16 * GIB), ("b", 16 * GIB)]).await;
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    let groups: Api<ShardGroup> = Api::default_namespaced(cluster.admin.clone());
    let shards: Api<Shard> = Api::default_namespaced(cluster.admin.clone());
    cluster.create(model("m", "llama", 4, GIB)).await;
    cluster.create(deployment("chat", "m", pipeline(2))).await;
    until("chat is ready", || async { deployments.get("chat").await.ok().filter(ready) }).await;

    let versions = || async {
        let mut all: Vec<String> = Vec::new();
        all.extend(
            groups
                .list(&Default::default())
                .await
                .unwrap()
                .items
                .iter()
                .filter_map(|it| it.resource_version()),
        );
        all.extend(
            shards
                .list(&Default::default())
                .await
                .unwrap()
                .items
                .iter()
                .filter_map(|it| it.resource_version()),
        );
        all.push(deployments.get("chat").await.unwrap().resource_version().unwrap());
        all
    };
    let before = versions().await;
    cluster.restart_operator().await;
    until("the new operator has looked at everything", || async {
        let metrics = cluster.metrics();
        ["deployment", "group", "model", "node"]
            .iter()
            .all(|it| metrics.contains(&format!("controller=\"{it}\",result=\"ok\"")))
            .then_some(())
    })
    .await;
    assert_eq!(versions().await, before, "nothing was written again");

    // Node b becomes unreachable: its replicas stay as they are, new work goes elsewhere.
    cluster.stop_agent("b");
    let nodes: Api<InferenceNode> = Api::all(cluster.admin.clone());
    until("b is unreachable", || async {
        let status = nodes.get("b").await.ok()?.status?;
        get(&status.conditions, Type::Reachable)
            .filter(|it| it.status == "False" && it.reason == "LeaseExpired")
            .cloned()
    })
    .await;
    cluster.create(deployment("more", "m", Sharding::default())).await;
    let more = until("more is ready", || async { deployments.get("more").await.ok().filter(ready) }).await;
    assert_eq!(more.status.unwrap().nodes.as_deref(), Some("a"));
    assert!(ready(&deployments.get("chat").await.unwrap()), "its agent may only have lost the API server");
    assert_eq!(
        groups.list(&Default::default()).await.unwrap().items.iter().map(|it| it.spec.epoch).max(),
        Some(1)
    );
    cluster.stop().await;
}
