//! Tiers against the embedded API server: dedicated nodes, through a restart of the operator.

use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use russet_crds::conditions::{Type, get};
use russet_crds::{ModelDeployment, ShardGroup, Sharding, Tier};
use serde_json::{Value, json};

use crate::harness::{ClusterHarness, GIB, deployment, model, until};
use crate::ready;

pub async fn apply_tier(cluster: &ClusterHarness, name: &str, spec: Value) -> Result<Tier, kube::Error> {
    let api: Api<Tier> = Api::all(cluster.admin.clone());
    let tier = json!({"apiVersion": "russet.dev/v1alpha1", "kind": "Tier", "metadata": {"name": name}, "spec": spec});
    api.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(tier)).await
}

/// Waits until a tier's groups have these nodes.
async fn groups(cluster: &ClusterHarness, name: &str, summary: &str) -> Tier {
    let api: Api<Tier> = Api::all(cluster.admin.clone());
    until(&format!("tier {name} has {summary}"), || async {
        let tier = api.get(name).await.ok()?;
        let status = tier.status.as_ref()?;
        let settled = status.observed_generation == tier.metadata.generation;
        (settled && status.summary.as_deref() == Some(summary)).then_some(tier)
    })
    .await
}

fn of_group(name: &str, group: &str) -> ModelDeployment {
    let mut deployment = deployment(name, "m", Sharding::default());
    deployment.spec.tier_ref = Some(russet_crds::LocalReference::new("daily"));
    deployment.spec.workload_group = Some(group.to_owned());
    deployment
}

pub async fn runs_on(cluster: &ClusterHarness, name: &str) -> String {
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    let found =
        until(&format!("{name} is ready"), || async { deployments.get(name).await.ok().filter(ready) }).await;
    found.status.and_then(|status| status.nodes).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workload_groups_have_nodes_of_their_own_and_keep_them() {
    let cluster = ClusterHarness::start(&[("a", 8 * GIB), ("b", 16 * GIB), ("c", 16 * GIB)]).await;
    cluster.create(model("m", "llama", 4, GIB)).await;
    let daily = json!({"mode": "Dedicated", "workloadGroups": ["chat", "code"], "priority": 100});
    apply_tier(&cluster, "daily", daily).await.unwrap();
    groups(&cluster, "daily", "chat: a; code: b").await;
    let error = apply_tier(&cluster, "wrong", json!({"mode": "Dedicated"})).await.unwrap_err().to_string();
    assert!(error.contains("a Dedicated tier names its workloadGroups"), "{error}");

    // Every deployment on its own nodes; the one without a tier would have taken the tightest fit.
    cluster.create(of_group("mine", "chat")).await;
    assert_eq!(runs_on(&cluster, "mine").await, "a");
    cluster.create(deployment("stranger", "m", Sharding::default())).await;
    assert_eq!(runs_on(&cluster, "stranger").await, "c");
    // A deployment that does not fit beside it gets the group the free node, or none: c has a foreign
    // replica.
    cluster.create(of_group("ours", "chat")).await;
    let api: Api<Tier> = Api::all(cluster.admin.clone());
    let found = until("chat lacks nodes", || async {
        let status = api.get("daily").await.ok()?.status?;
        let ready = get(&status.conditions, Type::Ready)?.clone();
        (ready.reason == "NodesMissing").then_some(ready.message)
    })
    .await;
    assert!(found.contains("workload group chat") && found.contains("add nodes to the pools"), "{found}");

    // The foreign replica is deleted, and the group grows; nothing else moves.
    let groups_before = names(&cluster, "mine").await;
    let deployments: Api<ModelDeployment> = Api::default_namespaced(cluster.admin.clone());
    deployments.delete("stranger", &Default::default()).await.unwrap();
    groups(&cluster, "daily", "chat: a c; code: b").await;
    assert_eq!(runs_on(&cluster, "ours").await, "c");
    assert_eq!(names(&cluster, "mine").await, groups_before);
}

async fn names(cluster: &ClusterHarness, deployment: &str) -> Vec<String> {
    let groups: Api<ShardGroup> = Api::default_namespaced(cluster.admin.clone());
    let all = groups.list(&Default::default()).await.unwrap();
    let own = all.iter().filter(|group| group.spec.deployment_ref.name == deployment);
    own.map(|group| group.name_any()).collect()
}
