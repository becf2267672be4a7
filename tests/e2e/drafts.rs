//! A draft model beside a model: its files, memory and draft tokens, and the deletion of its Model.

use anyhow::{Result, ensure};
use russet_tests::chat;
use russet_tests::cluster::TestCluster;
use serde_json::{Value, json};

use crate::mistakes::{apply, until_message};
use crate::path::{
    answers, answers_right, apply_to_smoke, delete_and_wait, delete_object, prompts, rank_0_metrics, serves,
    shards_of,
};

/// A draft model is copied to the node of rank 0 and counted there, proposes tokens, and stays while it is
/// used; the output is the same.
pub async fn draft_model(cluster: &mut TestCluster) -> Result<()> {
    // Its metrics are readable from here.
    cluster.russet(&["cordon", "node-b"]).await?;
    let outcome = drafted(cluster).await;
    cluster.russet(&["uncordon", "node-b"]).await?;
    outcome
}

async fn drafted(cluster: &mut TestCluster) -> Result<()> {
    let deployment = |draft: &str| {
        format!(
            "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: drafted}}\n\
             spec:\n  modelRef: {{name: smoke}}\n{draft}  sharding:\n    mode: Single\n    \
             kv: {{contextTokens: 1024, maxSequences: 4}}\n"
        )
    };
    let (without, with) = (deployment(""), deployment("  draftModelRef: {name: drafter}\n"));
    apply_to_smoke(cluster, &with).await?;
    until_message(
        cluster,
        "modeldeployments drafted",
        "Ready",
        &["drafter", "does not exist", "correct spec.draftModelRef.name"],
    )
    .await?;
    // The same weights from another repository: copies of its own.
    let model = "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {name: drafter}\n\
                 spec: {source: {uri: hf://russet/cut}}\n";
    apply(cluster, model).await?;
    let mut reserved = Vec::new();
    for (deployment, draft) in [(&without, Value::Null), (&with, json!("drafter"))] {
        apply(cluster, deployment).await?;
        serves(cluster, "drafted").await?;
        cluster
            .until("one shard drafts as was requested", async |cluster| {
                let shards = shards_of(cluster, "drafted").await?;
                Ok(shards.len() == 1 && shards[0]["spec"]["draftModelRef"]["name"] == draft)
            })
            .await?;
        serves(cluster, "drafted").await?;
        answers_right(cluster, "drafted", prompts()?).await?;
        let shards = shards_of(cluster, "drafted").await?;
        reserved.push(["weightBytes", "kvBytes"].map(|bytes| shards[0]["spec"][bytes].as_u64().unwrap_or(0)));
    }
    let doubled = reserved[0].map(|bytes| 2 * bytes);
    ensure!(reserved[1] == doubled && doubled[0] > 0, "{reserved:?} bytes are reserved without and with it");
    let url = rank_0_metrics(cluster).await?;
    let text = chat::client()?.get(&url).send().await?.text().await?;
    let right = text.lines().find(|line| {
        line.starts_with("vllm:spec_decode_num_accepted_tokens_total") && line.contains("source=\"draft\"")
    });
    let right = right.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    ensure!(right.is_some_and(|right| right > 0.0), "no token of the draft model was accepted: {right:?}");
    let text = cluster.russet(&["explain", "drafted"]).await?;
    ensure!(text.contains("for the draft model drafter, beside rank 0"), "{text}");

    // A Model is deleted once no engine reads it any more.
    delete_object(cluster, "models/drafter").await?;
    let goes = cluster.get("models drafter").await?;
    ensure!(!goes["metadata"]["deletionTimestamp"].is_null(), "drafter is not on its way out: {goes}");
    answers(cluster, "drafted").await?;
    apply(cluster, &without).await?;
    cluster
        .until("drafter is gone with its copies", async |cluster| {
            let copies = cluster.get("modelcopies").await?;
            let named = |copy: &Value| copy["spec"]["modelRef"]["name"] == "drafter";
            let copies = copies["items"].as_array().is_some_and(|all| all.iter().any(named));
            Ok(!copies && cluster.get("models drafter").await.is_err())
        })
        .await?;
    serves(cluster, "drafted").await?;
    delete_and_wait(cluster, "drafted").await
}
