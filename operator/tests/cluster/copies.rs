//! Copies against the embedded API server: preloads, and evictions when space is short.

use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{Type, get};
use russet_crds::{
    Adapter, CopyMode, LocalReference, Model, ModelCopy, ModelDeployment, Preload, PreloadPolicy, Shard,
    ShardGroup, Sharding, ShardingMode,
};
use serde_json::{Value, json};

use crate::harness::{ClusterHarness, GIB, deployment, model, until};
use crate::ready;

fn preloaded(name: &str, gib: u32, policy: PreloadPolicy, copies: Option<u32>) -> Model {
    let mut model = model(name, "llama", gib, GIB);
    model.spec.preload = Some(Preload { policy, copies, ..Preload::default() });
    model
}

/// Waits until a Model's status has this preload and reason; returns the message.
async fn says(cluster: &ClusterHarness, name: &str, preloaded: &str, reason: &str) -> String {
    let api: Api<Model> = Api::default_namespaced(cluster.admin.clone());
    until(&format!("{name} shows {preloaded} {reason}"), || async {
        let model = api.get(name).await.ok()?;
        let status = model.status?;
        let condition = get(&status.conditions, Type::Preloaded)?;
        let current = condition.observed_generation == model.metadata.generation;
        let same = status.preloaded.as_deref() == Some(preloaded) && condition.reason == reason;
        (current && same).then(|| condition.message.clone())
    })
    .await
}

/// `m@a m@b …`: the wanted files, by node.
async fn files(cluster: &ClusterHarness) -> String {
    let api: Api<ModelCopy> = Api::all(cluster.admin.clone());
    let copies = api.list(&Default::default()).await.unwrap();
    let file_copies = copies.iter().filter(|copy| copy.spec.want == CopyMode::Files);
    let mut words: Vec<String> =
        file_copies.map(|copy| format!("{}@{}", copy.spec.model_ref.name, copy.spec.node_name)).collect();
    words.sort();
    words.join(" ")
}

async fn edit(cluster: &ClusterHarness, name: &str, spec: Value) {
    let api: Api<Model> = Api::default_namespaced(cluster.admin.clone());
    api.patch(name, &PatchParams::default(), &Patch::Merge(json!({"spec": spec}))).await.unwrap();
}

async fn start() -> ClusterHarness {
    let cluster = ClusterHarness::start(&[("a", 32 * GIB), ("b", 32 * GIB)]).await;
    cluster.agent("a").limit_disk(10 * GIB);
    cluster.agent("b").limit_disk(10 * GIB);
    cluster
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preloaded_files_arrive_early_and_are_evicted_in_order() {
    let cluster = start().await;
    cluster.create(preloaded("m", 4, PreloadPolicy::Always, None)).await;
    assert_eq!(says(&cluster, "m", "2/2", "Settled").await, "2 of 2 nodes hold every file: a, b");

    // A deployment fetches its own files, and leaves them when it is deleted.
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    cluster.create(model("x", "llama", 3, GIB)).await;
    cluster.create(deployment("chat", "x", Sharding::default())).await;
    until("chat is ready", || async { deployments.get("chat").await.ok().filter(ready) }).await;
    let before = files(&cluster).await;
    assert!(["m@a m@b x@a", "m@a m@b x@b"].contains(&before.as_str()), "{before}");

    // While it runs, its files are protected; a node is short of space, and nothing is evicted in vain.
    cluster.create(preloaded("y", 4, PreloadPolicy::Pinned, None)).await;
    let said = says(&cluster, "y", "1/2", "DiskPressure").await;
    let short = "4.0 GiB more are needed, 3.0 GiB are free beyond the reserve and 0 B could go, of 10.0 GiB";
    assert!(said.contains(short), "{said}");
    assert!(files(&cluster).await.contains(&before[8..]), "the files of a replica were removed");

    // It is deleted, and its files are evicted, because their space is needed.
    deployments.delete("chat", &Default::default()).await.unwrap();
    says(&cluster, "y", "2/2", "Settled").await;
    assert_eq!(files(&cluster).await, "m@a m@b y@a y@b");
    let api: Api<ModelCopy> = Api::all(cluster.admin.clone());
    until("copies of y are pinned", || async {
        let copies = api.list(&Default::default()).await.ok()?;
        let mut own = copies.iter().filter(|copy| copy.spec.model_ref.name == "y");
        own.all(|copy| copy.spec.retention.unwrap_or_default().pinned).then_some(())
    })
    .await;

    // `Always` and pinned files are protected: a later request waits, with the numbers.
    cluster.create(preloaded("z", 4, PreloadPolicy::Always, Some(1))).await;
    let said = says(&cluster, "z", "0/1", "DiskPressure").await;
    assert!(said.contains("lower the node's spec.disk.reserve, or delete or unpin a Model"), "{said}");
    assert_eq!(files(&cluster).await, "m@a m@b y@a y@b");

    // One copy of m is enough now: the other one is evicted, and no more.
    edit(&cluster, "m", json!({"preload": {"policy": "Always", "copies": 1}})).await;
    says(&cluster, "z", "1/1", "Settled").await;
    says(&cluster, "m", "1/1", "Settled").await;
    assert_eq!(files(&cluster).await, "m@a y@a y@b z@b");

    // The server rejects a spec that contradicts itself.
    let wrong = preloaded("w", 1, PreloadPolicy::OnDemand, Some(1));
    let models: Api<Model> = Api::default_namespaced(cluster.admin.clone());
    let error = models.create(&Default::default(), &wrong).await.unwrap_err().to_string();
    assert!(error.contains("OnDemand preloads nothing"), "{error}");
    cluster.stop().await;
}

/// Waits until a deployment's placement message has these words.
async fn placed(cluster: &ClusterHarness, name: &str, words: &str) {
    let api: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    until(&format!("{name} says {words}"), || async {
        let status = api.get(name).await.ok()?.status?;
        get(&status.conditions, Type::Placed)?.message.contains(words).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draft_model_files_stay_on_rank_0s_node_while_in_use() {
    let cluster = start().await;
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    let models: Api<Model> = Api::default_namespaced(cluster.admin.clone());
    let groups: Api<ShardGroup> = Api::default_namespaced(cluster.admin.clone());
    let shards: Api<Shard> = Api::default_namespaced(cluster.admin.clone());
    cluster.create(model("m", "llama", 4, GIB)).await;
    let split = Sharding { mode: ShardingMode::Pipeline, ..Sharding::default() };
    let mut chat = deployment("chat", "m", split);
    chat.spec.draft_model_ref = Some(LocalReference::new("m"));
    let error = deployments.create(&Default::default(), &chat).await.unwrap_err().to_string();
    assert!(error.contains("a model is no draft model for itself"), "{error}");
    chat.spec.draft_model_ref = Some(LocalReference::new("d"));
    cluster.create(chat).await;
    placed(&cluster, "chat", "Model \"d\" does not exist in namespace default").await;

    cluster.create(model("d", "llama", 1, GIB)).await;
    until("chat is ready", || async { deployments.get("chat").await.ok().filter(ready) }).await;
    let plan = groups.list(&Default::default()).await.unwrap().items[0].spec.plan.clone();
    let first = plan.members[0].node_name.clone();
    assert_eq!(plan.members[0].weight_bytes - plan.members[1].weight_bytes, GIB, "{plan:?}");
    assert_eq!(files(&cluster).await, format!("d@{first} m@a m@b"));
    for shard in shards.list(&Default::default()).await.unwrap() {
        assert_eq!(shard.spec.draft_model_ref.is_some(), shard.spec.rank == 0);
    }

    // As with the model itself: a running group continues, and its files stay until it is gone.
    models.delete("d", &Default::default()).await.unwrap();
    placed(&cluster, "chat", "Model d is being deleted and waits for this deployment").await;
    assert_eq!(groups.list(&Default::default()).await.unwrap().items.len(), 1);
    assert_eq!(files(&cluster).await, format!("d@{first} m@a m@b"));
    let edit = Patch::Merge(json!({"spec": {"draftModelRef": null}}));
    deployments.patch("chat", &PatchParams::default(), &edit).await.unwrap();
    until("the draft model is gone", || async {
        let gone = models.get_opt("d").await.ok()?.is_none();
        (gone && files(&cluster).await == "m@a m@b").then_some(())
    })
    .await;
    until("chat is ready", || async { deployments.get("chat").await.ok().filter(ready) }).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adapter_files_are_on_every_node_while_in_use() {
    let cluster = start().await;
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    let models: Api<Model> = Api::default_namespaced(cluster.admin.clone());
    let shards: Api<Shard> = Api::default_namespaced(cluster.admin.clone());
    cluster.create(model("m", "llama", 4, GIB)).await;
    let split = Sharding { mode: ShardingMode::Pipeline, ..Sharding::default() };
    let mut chat = deployment("chat", "m", split);
    let adapter = |model: &str| Adapter { name: "pirate".to_owned(), model_ref: LocalReference::new(model) };
    chat.spec.adapters = vec![adapter("m")];
    let error = deployments.create(&Default::default(), &chat).await.unwrap_err().to_string();
    assert!(error.contains("a model is no adapter of itself"), "{error}");
    chat.spec.adapters = vec![adapter("x"), adapter("x")];
    let error = deployments.create(&Default::default(), &chat).await.unwrap_err().to_string();
    assert!(error.contains("Duplicate value"), "{error}");
    chat.spec.adapters = vec![adapter("x")];
    cluster.create(chat).await;
    placed(&cluster, "chat", "correct spec.adapters[pirate].modelRef.name").await;
    cluster.create(model("x", "lora", 4, GIB)).await;
    // It is ready like any Model, and no model.
    until("x is ready", || async {
        let status = models.get("x").await.ok()?.status?;
        let ready = get(&status.conditions, Type::Ready)?;
        (ready.status == "True" && ready.message.contains("LoRA")).then_some(())
    })
    .await;
    cluster.create(deployment("alone", "x", Sharding::default())).await;
    placed(&cluster, "alone", "Model x: it is an adapter; name it in spec.adapters").await;
    deployments.delete("alone", &Default::default()).await.unwrap();
    until("chat is ready", || async { deployments.get("chat").await.ok().filter(ready) }).await;
    assert_eq!(files(&cluster).await, "m@a m@b x@a x@b");
    for shard in shards.list(&Default::default()).await.unwrap() {
        assert_eq!(shard.spec.adapters, [adapter("x")]);
    }
    models.delete("x", &Default::default()).await.unwrap();
    placed(&cluster, "chat", "leave spec.adapters[pirate] out").await;
    // As with the model itself: a running group continues, and its files stay until it is gone.
    assert_eq!(files(&cluster).await, "m@a m@b x@a x@b");
    let edit = Patch::Merge(json!({"spec": {"adapters": null}}));
    deployments.patch("chat", &PatchParams::default(), &edit).await.unwrap();
    until("the adapter is gone", || async {
        let gone = models.get_opt("x").await.ok()?.is_none();
        (gone && files(&cluster).await == "m@a m@b").then_some(())
    })
    .await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_evicts_the_lowest_priority_files() {
    let cluster = start().await;
    let tier = json!({"apiVersion": "russet.dev/v1alpha1", "kind": "Tier", "metadata": {"name": "gold"},
                      "spec": {"mode": "Cluster", "priority": 100}});
    let tiers: Api<russet_crds::Tier> = Api::all(cluster.admin.clone());
    tiers.patch("gold", &PatchParams::apply("test").force(), &Patch::Apply(tier)).await.unwrap();
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    let groups: Api<ShardGroup> = Api::default_namespaced(cluster.admin.clone());
    let copies: Api<ModelCopy> = Api::all(cluster.admin.clone());

    // Both leave 4 GiB on every node, one of them for a tier with priority.
    for (name, tier) in [("gold", Some("gold")), ("plain", None)] {
        cluster.create(preloaded(name, 4, PreloadPolicy::Always, None)).await;
        says(&cluster, name, "2/2", "Settled").await;
        let mut deployment = deployment(name, name, Sharding::default());
        deployment.spec.tier_ref = tier.map(LocalReference::new);
        deployment.spec.replicas = 0;
        cluster.create(deployment).await;
    }
    until("gold's copies say that they matter", || async {
        let copies = copies.list(&Default::default()).await.ok()?;
        let mut own = copies.iter().filter(|copy| copy.spec.model_ref.name == "gold");
        own.all(|copy| copy.spec.retention.unwrap_or_default().priority == 100).then_some(())
    })
    .await;
    for name in ["gold", "plain"] {
        edit(&cluster, name, json!({"preload": null})).await;
    }
    cluster.create(model("new", "llama", 4, GIB)).await;
    cluster.create(deployment("chat", "new", Sharding::default())).await;
    until("chat is ready", || async { deployments.get("chat").await.ok().filter(ready) }).await;
    let node =
        groups.list(&Default::default()).await.unwrap().items[0].spec.plan.members[0].node_name.clone();
    let here: Vec<String> = files(&cluster)
        .await
        .split(' ')
        .filter(|copy| copy.ends_with(&format!("@{node}")))
        .map(str::to_owned)
        .collect();
    assert_eq!(here, [format!("gold@{node}"), format!("new@{node}")]);
    let gold = copies.get(&format!("default.gold.{node}")).await.unwrap();
    assert_eq!(gold.spec.retention.unwrap_or_default().priority, 100, "{}", gold.name_any());
    cluster.stop().await;
}
