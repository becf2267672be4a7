//! Tiers on four full nodes: an edit with scarce memory, a deployment of higher priority that needs approval,
//! a drain, and the original state again.

use anyhow::{Context, Result, ensure};
use russet_tests::cluster::{TestCluster, condition, repository};

use crate::mistakes::{apply, until_limit};
use crate::path::{answers, delete_and_wait, nodes_of, serves};

const NODES: [&str; 4] = ["node-a", "node-b", "node-c", "node-d"];

const TIERS: &str = "
apiVersion: russet.dev/v1alpha1
kind: Tier
metadata: {name: daily}
spec: {mode: Dedicated, workloadGroups: [chat], priority: 100}
---
apiVersion: russet.dev/v1alpha1
kind: Tier
metadata: {name: reasoning}
spec: {mode: Cluster, priority: 50, preemption: LowerPriority}
---
apiVersion: russet.dev/v1alpha1
kind: Tier
metadata: {name: spare}
spec: {mode: Cluster, priority: 10, minResidencySeconds: 0, approvals: [Preempt]}
";

fn deployment(name: &str, tier: &str, sharding: &str, context: u32) -> String {
    format!(
        "---\napiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: {name}}}\n\
         spec: {{modelRef: {{name: smoke}}, tierRef: {{name: {tier}}}, \
         sharding: {{{sharding}, kv: {{contextTokens: {context}}}}}{}}}\n",
        if tier == "daily" { ", workloadGroup: chat" } else { "" }
    )
}

/// Sets the serving limit on every node; `None` removes it.
async fn limit(cluster: &mut TestCluster, bytes: Option<u64>) -> Result<()> {
    let memory = bytes.map(|bytes| format!("{{servingLimit: \"{bytes}\"}}")).unwrap_or("{}".to_owned());
    let nodes = NODES.map(|node| {
        format!("apiVersion: russet.dev/v1alpha1\nkind: InferenceNode\nmetadata: {{name: {node}}}\nspec: {{memory: {memory}}}\n")
    });
    apply(cluster, &nodes.join("---\n")).await?;
    if let Some(bytes) = bytes {
        for node in NODES {
            until_limit(cluster, node, bytes).await?;
        }
    }
    Ok(())
}

/// Bytes reserved for a deployment's ranks.
async fn reserved(cluster: &TestCluster, name: &str) -> Result<u64> {
    let groups = cluster.get("shardgroups").await?["items"].as_array().cloned().unwrap_or_default();
    let group = groups.iter().find(|group| group["spec"]["deploymentRef"]["name"] == name);
    let members = group.context("no ShardGroup is there")?["spec"]["plan"]["members"].clone();
    let fields = ["weightBytes", "kvBytes", "overheadBytes"];
    let bytes = members
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|member| fields.map(|field| member[field].as_u64()));
    bytes.sum::<Option<u64>>().context("a member without sizes")
}

async fn until_reason(cluster: &mut TestCluster, name: &str, reason: &str) -> Result<String> {
    cluster
        .until(&format!("{name} says {reason}"), async |cluster| {
            let deployment = cluster.get(&format!("modeldeployments {name}")).await?;
            Ok(condition(&deployment, "Ready").is_some_and(|ready| ready["reason"] == reason))
        })
        .await?;
    let deployment = cluster.get(&format!("modeldeployments {name}")).await?;
    Ok(condition(&deployment, "Ready").map(|ready| ready["message"].to_string()).unwrap_or_default())
}

/// On four nodes, each with memory for one model.
pub async fn tiers(cluster: &mut TestCluster) -> Result<()> {
    for node in &NODES[2..] {
        cluster.add_agent(node).await?;
    }
    let outcome = full(cluster).await;
    limit(cluster, None).await?;
    cluster.remove_agents().await?;
    outcome
}

async fn full(cluster: &mut TestCluster) -> Result<()> {
    let model = repository().join("manifests/samples/quickstart/model.yaml");
    cluster.russet(&["apply", "-f", &model.display().to_string()]).await?;
    apply(cluster, TIERS).await?;
    apply(cluster, &deployment("mine", "daily", "mode: Single", 1024)).await?;
    serves(cluster, "mine").await?;
    let mine = nodes_of(cluster, "mine").await?;
    let one = reserved(cluster, "mine").await?;
    limit(cluster, Some(one + one / 4)).await?;
    for name in ["one", "two", "three"] {
        apply(cluster, &deployment(name, "spare", "mode: Single", 1024)).await?;
    }
    for name in ["one", "two", "three"] {
        serves(cluster, name).await?;
        ensure!(nodes_of(cluster, name).await? != mine, "{name} is on chat's own node");
    }

    // Rolled out without memory for old and new together.
    let before = cluster.get("modeldeployments mine").await?["status"]["placement"]["planHash"].clone();
    apply(cluster, &deployment("mine", "daily", "mode: Single", 512)).await?;
    cluster
        .until("mine answers by its new plan", async |cluster| {
            let deployment = cluster.get("modeldeployments mine").await?;
            let ready = condition(&deployment, "Ready").is_some_and(|ready| ready["status"] == "True");
            let settled = deployment["status"]["observedGeneration"] == deployment["metadata"]["generation"];
            Ok(ready && settled && deployment["status"]["placement"]["planHash"] != before)
        })
        .await?;
    ensure!(nodes_of(cluster, "mine").await? == mine, "mine left its node");
    answers(cluster, "mine").await?;

    // Two nodes for a deployment of higher priority, which needs approval.
    apply(cluster, &deployment("deep", "reasoning", "mode: Pipeline, ranks: 2", 1024)).await?;
    let message = until_reason(cluster, "deep", "AwaitingApproval").await?;
    ensure!(message.contains("fits if replicas of default/"), "{message}");
    let explained = cluster.russet(&["explain", "deep"]).await?;
    ensure!(
        ["needs", "reasoning, priority 50", "fits if"].iter().all(|words| explained.contains(words)),
        "{explained}"
    );
    let asked = cluster.russet(&["approve"]).await?;
    ensure!(asked.contains("deep-") && asked.contains("Preempt"), "{asked}");
    for name in ["one", "two", "three"] {
        answers(cluster, name).await?;
    }
    let text = cluster.russet(&["approve", "deep"]).await?;
    ensure!(text.contains(" approved by "), "{text}");
    serves(cluster, "deep").await?;
    answers(cluster, "deep").await?;
    let mut left = Vec::new();
    for name in ["one", "two", "three"] {
        let deployment = cluster.get(&format!("modeldeployments {name}")).await?;
        if deployment["status"]["readyReplicas"] == 1 {
            left.push(name);
        } else {
            until_reason(cluster, name, "NothingFits").await?;
        }
    }
    let [left] = left.as_slice() else { anyhow::bail!("of three one goes on, not {left:?}") };
    answers(cluster, left).await?;

    // The node of the remaining replica is drained; there is no other free node, so it reports that and
    // stays.
    let node = nodes_of(cluster, left).await?;
    let text = cluster.russet(&["drain", &node, "--timeout-seconds", "3"]).await;
    let text = text.err().context("a node was drained though nothing else has room")?.to_string();
    ensure!(text.contains(left), "drain does not say what keeps it: {text}");
    until_reason(cluster, left, "NothingFits").await?;
    answers(cluster, left).await?;
    cluster.russet(&["uncordon", &node]).await?;
    serves(cluster, left).await?;

    // The preempted replicas get their memory back.
    delete_and_wait(cluster, "deep").await?;
    for name in ["one", "two", "three"] {
        serves(cluster, name).await?;
        answers(cluster, name).await?;
    }
    for name in ["mine", "one", "two", "three"] {
        delete_and_wait(cluster, name).await?;
    }
    for tier in ["daily", "reasoning", "spare"] {
        cluster.russet(&["delete", &format!("tiers/{tier}")]).await?;
    }
    cluster
        .until("no node holds anything", async |cluster| {
            let nodes = cluster.get("inferencenodes").await?["items"].as_array().cloned().unwrap_or_default();
            Ok(nodes.iter().all(|node| node["status"]["memory"]["grantedBytes"].as_u64() == Some(0)))
        })
        .await
}
