//! A workload group with its own machine: which replicas may run there, what it gets when it grows, and that
//! nothing is left of it.

use anyhow::{Result, ensure};
use russet_tests::cluster::{TestCluster, condition, repository};
use serde_json::Value;

use crate::mistakes::apply;
use crate::path::{answers, delete_and_wait, delete_object, nodes_of, serves};

fn deployment(name: &str, more: &str) -> String {
    format!(
        "---\napiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: {name}}}\n\
         spec: {{modelRef: {{name: smoke}}, sharding: {{mode: Single, kv: {{contextTokens: 1024}}}}{more}}}\n"
    )
}

/// Of two machines the group owns one; other deployments run on the other, whatever the planner would choose.
pub async fn tiers(cluster: &mut TestCluster) -> Result<()> {
    let model = repository().join("manifests/samples/quickstart/model.yaml");
    cluster.russet(&["apply", "-f", &model.display().to_string()]).await?;
    let tier = "apiVersion: russet.dev/v1alpha1\nkind: Tier\nmetadata: {name: daily}\n\
                spec: {mode: Dedicated, workloadGroups: [chat], priority: 100}\n";
    let own = ", tierRef: {name: daily}, workloadGroup: chat";
    apply(cluster, &format!("{tier}{}", deployment("mine", own))).await?;
    serves(cluster, "mine").await?;
    let tier = cluster.get("tiers daily").await?;
    let nodes = &tier["status"]["workloadGroups"][0]["nodes"];
    ensure!(nodes.as_array().map(Vec::len) == Some(1), "chat has {nodes}");
    let mine = nodes_of(cluster, "mine").await?;
    ensure!(nodes[0] == mine.as_str(), "mine runs on {mine}, chat has {nodes}");

    // Two other deployments: both on the other machine, though each would fit on the first.
    for name in ["stranger", "other"] {
        apply(cluster, &deployment(name, "")).await?;
        serves(cluster, name).await?;
        let node = nodes_of(cluster, name).await?;
        ensure!(node != mine, "{name} runs on {node}, which is chat's own");
    }
    // A second deployment of the group shares its machine.
    apply(cluster, &deployment("ours", own)).await?;
    serves(cluster, "ours").await?;
    ensure!(nodes_of(cluster, "ours").await? == mine, "ours is not where its group is");
    for name in ["mine", "ours", "stranger"] {
        answers(cluster, name).await?;
    }
    let table = cluster.russet(&["get", "tiers"]).await?;
    ensure!(["daily", "Dedicated", "100", "True"].iter().all(|word| table.contains(word)), "{table}");

    // The message for a typo lists existing names; deleting a tier stops no running replica.
    apply(cluster, &deployment("typo", ", tierRef: {name: daily}, workloadGroup: cook")).await?;
    cluster
        .until("typo says which groups there are", async |cluster| {
            let typo = cluster.get("modeldeployments typo").await?;
            let said = condition(&typo, "Ready").map(|ready| ready["message"].clone());
            Ok(said
                .as_ref()
                .and_then(Value::as_str)
                .is_some_and(|text| text.contains("no group \"cook\"; it has chat")))
        })
        .await?;
    delete_object(cluster, "tiers/daily").await?;
    cluster
        .until("mine says that its tier is gone", async |cluster| {
            let mine = cluster.get("modeldeployments mine").await?;
            Ok(condition(&mine, "Ready").is_some_and(|ready| ready["reason"] == "TierNotFound"))
        })
        .await?;
    answers(cluster, "mine").await?;
    for name in ["typo", "mine", "ours", "stranger", "other"] {
        delete_and_wait(cluster, name).await?;
    }
    Ok(())
}
