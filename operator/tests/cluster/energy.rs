//! The energy of a group against the embedded API server: what owners declare and what agents measure of its nodes.

use kube::Api;
use kube::api::{Patch, PatchParams};
use russet_crds::{
    GroupEnergy, InferenceNode, MeasuredPower, PowerSource, ShardGroup, Sharding, ShardingMode,
};
use serde_json::{Value, json};

use crate::harness::{ClusterHarness, GIB, deployment, model, until};

/// Waits until the only group that is ready says this of its energy.
async fn wait_energy(cluster: &ClusterHarness, expected: Option<GroupEnergy>) {
    let api: Api<ShardGroup> = Api::default_namespaced(cluster.admin.clone());
    until(&format!("the group says {expected:?}"), || async {
        let groups = api.list(&Default::default()).await.ok()?.items;
        let mut served = groups.iter().filter_map(|group| group.status.as_ref());
        let status = served.find(|status| status.served_epoch.is_some())?;
        (status.energy == expected).then_some(())
    })
    .await;
}

/// Writes what the owner of a node says; the error is the server's.
async fn declare(cluster: &ClusterHarness, node: &str, energy: Value) -> Result<InferenceNode, kube::Error> {
    let api: Api<InferenceNode> = Api::all(cluster.admin.clone());
    let spec = json!({"spec": {"energy": energy}});
    api.patch(node, &PatchParams::default(), &Patch::Merge(spec)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn energy_of_a_group_follows_what_is_known_of_its_nodes() {
    let cluster = ClusterHarness::start(&[("a", 32 * GIB), ("b", 32 * GIB)]).await;
    cluster.create(model("m", "llama", 4, GIB)).await;
    let sharding = Sharding { mode: ShardingMode::Pipeline, ranks: Some(2), ..Sharding::default() };
    cluster.create(deployment("chat", "m", sharding)).await;
    wait_energy(&cluster, None).await;
    // One node of two says nothing to the sum of both.
    declare(&cluster, "a", json!({"idleWatts": 10, "busyWatts": 100, "pricePerKilowattHour": "0.30"}))
        .await
        .unwrap();
    let api: Api<InferenceNode> = Api::all(cluster.admin.clone());
    assert_eq!(api.get("a").await.unwrap().spec.energy.unwrap().busy_watts, Some(100));
    declare(&cluster, "b", json!({"busyWatts": 50})).await.unwrap();
    let declared = GroupEnergy { busy_watts: 150, source: PowerSource::Declared, price_per_hour: None };
    wait_energy(&cluster, Some(declared)).await;
    // What agents measure comes first, and the sum is measured once both do.
    let measured = |idle, busy| MeasuredPower { idle_watts: Some(idle), busy_watts: Some(busy) };
    cluster.agent("a").measure_power(measured(12, 80));
    wait_energy(&cluster, Some(GroupEnergy { busy_watts: 130, ..declared })).await;
    declare(&cluster, "b", json!({"pricePerKilowattHour": "0.50"})).await.unwrap();
    cluster.agent("b").measure_power(measured(8, 40));
    let price_per_hour = Some("0.044".parse().unwrap());
    let all = GroupEnergy { busy_watts: 120, source: PowerSource::Measured, price_per_hour };
    wait_energy(&cluster, Some(all)).await;
    // The server refuses what no machine draws.
    for (wrong, word) in [
        (json!({"idleWatts": 200}), "busyWatts is at least idleWatts"),
        (json!({"busyWatts": 0}), "busyWatts"),
        (json!({"pricePerKilowattHour": "cheap"}), "pricePerKilowattHour"),
        (json!({"hardware": {"price": "4000"}}), "lifetimeYears"),
    ] {
        let error = declare(&cluster, "a", wrong).await.unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    cluster.stop().await;
}
