//! Scale to zero: without requests the model's memory is free, and the request that scales it up is held
//! until it is answered.

use anyhow::{Context as _, Result, ensure};
use russet_tests::chat;
use russet_tests::cluster::{TestCluster, condition, repository};

use crate::mistakes::apply;
use crate::path::{delete_and_wait, serves};

const QUESTION: &str = "What is 17 + 25?";

/// Scaled to zero after a few seconds, scaled up by a request, and the answer is unchanged.
pub async fn sleeper(cluster: &mut TestCluster) -> Result<()> {
    let model = repository().join("manifests/samples/quickstart/model.yaml");
    cluster.russet(&["apply", "-f", &model.display().to_string()]).await?;
    let deployment = "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: sleeper}\n\
                      spec: {modelRef: {name: smoke}, sharding: {mode: Single, kv: {contextTokens: 1024}}, \
                      autoscaling: {minReplicas: 0, maxReplicas: 1, idleSeconds: 3}}\n";
    apply(cluster, deployment).await?;
    serves(cluster, "sleeper").await?;
    let awake = chat::answer(&cluster.base_url(), "sleeper", QUESTION).await?;
    ensure!(awake.contains("42"), "awake it answered \"{awake}\"");

    for round in 1..=2 {
        cluster
            .until("nobody asks, so it sleeps and holds no memory", async |cluster| {
                let sleeper = cluster.get("modeldeployments sleeper").await?;
                let reason = |kind| condition(&sleeper, kind).map(|one| one["reason"].clone());
                let why = (reason("ScalingActive"), reason("Ready"));
                let shards = cluster.get("shards").await?["items"].as_array().cloned().unwrap_or_default();
                let empty = !shards.iter().any(|shard| shard["spec"]["servedModelName"] == "sleeper");
                Ok(sleeper["spec"]["replicas"] == 0
                    && why == (Some("Idle".into()), Some("Stopped".into()))
                    && empty)
            })
            .await?;
        // Applying the same file again scales nothing up: it does not set replicas.
        apply(cluster, deployment).await?;
        let sleeper = cluster.get("modeldeployments sleeper").await?;
        ensure!(sleeper["spec"]["replicas"] == 0, "applied again it has {}", sleeper["spec"]["replicas"]);
        let woken = chat::answer(&cluster.base_url(), "sleeper", QUESTION).await?;
        ensure!(woken == awake, "woken for the {round}. time it answered \"{woken}\", before \"{awake}\"");
    }
    let sleeper = cluster.get("modeldeployments sleeper").await?;
    let demand = sleeper["status"]["demand"].as_array().context("no gateway says what is asked")?;
    ensure!(
        demand.len() == 1 && demand[0]["lastRequestTime"].is_string(),
        "one gateway should have asked: {demand:?}"
    );
    delete_and_wait(cluster, "sleeper").await
}
