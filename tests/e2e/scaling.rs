//! Scale to zero: without requests the model's memory is free, and the request that scales it up is held
//! until it is answered. A queue that grows gets a second replica.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use russet_tests::chat::{self, StreamEnd};
use russet_tests::cluster::{TestCluster, condition, repository};
use serde_json::json;

use crate::faults::group_of;
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

/// Clients that ask at once, each again as soon as it has its answer.
const CLIENTS: usize = 20;
/// Requests that the deployment wants a replica to have.
const TARGET_QUEUE: usize = 4;

/// Twenty clients at one replica with four slots: demand adds the second one, both answer, and every answer is the one of a
/// request that runs alone.
pub async fn burst(cluster: &mut TestCluster) -> Result<()> {
    let model = repository().join("manifests/samples/quickstart/model.yaml");
    cluster.russet(&["apply", "-f", &model.display().to_string()]).await?;
    let deployment = format!(
        "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: burst}}\n\
         spec: {{modelRef: {{name: smoke}}, sharding: {{mode: Single, kv: {{contextTokens: 512, maxSequences: 4}}}}, \
         engine: {{maxWaitingRequests: 32}}, \
         autoscaling: {{minReplicas: 1, maxReplicas: 2, targetQueue: {TARGET_QUEUE}}}}}\n"
    );
    apply(cluster, &deployment).await?;
    serves(cluster, "burst").await?;
    let url = cluster.base_url();
    let body = chat::question("burst", QUESTION, json!({"max_tokens": 200, "ignore_eos": true}));
    let mut alone = chat::ask(&url, &body).await?;
    ensure!(alone.finish().await == StreamEnd::Finished("length".into()), "alone it ended early");

    let groups = Arc::<Mutex<BTreeSet<String>>>::default();
    let enough = Arc::<AtomicBool>::default();
    let clients = (0..CLIENTS).map(|_| {
        let (url, body, expected) = (url.clone(), body.clone(), alone.text.clone());
        let (groups, enough) = (groups.clone(), enough.clone());
        tokio::spawn(async move {
            let mut answers = 0;
            while !enough.load(Ordering::Relaxed) {
                let mut answer = chat::ask(&url, &body).await?;
                let end = answer.finish().await;
                ensure!(end == StreamEnd::Finished("length".into()), "an answer ended with {end:?}");
                ensure!(answer.text == expected, "\"{}\" instead of \"{expected}\"", answer.text);
                let group = group_of(&url, &answer.request_id).await?;
                groups.lock().unwrap_or_else(PoisonError::into_inner).insert(group);
                answers += 1;
            }
            Ok(answers)
        })
    });
    let clients: Vec<tokio::task::JoinHandle<Result<usize>>> = clients.collect();
    let grown = cluster
        .until("two replicas answer", async |cluster| {
            let burst = cluster.get("modeldeployments burst").await?;
            let two = burst["spec"]["replicas"] == 2 && burst["status"]["readyReplicas"] == 2;
            // A client that failed fails the scenario now.
            let failed = clients.iter().any(tokio::task::JoinHandle::is_finished);
            let groups = groups.lock().unwrap_or_else(PoisonError::into_inner).len();
            Ok(failed || (two && groups == 2))
        })
        .await;
    enough.store(true, Ordering::Relaxed);
    let mut answers = 0;
    for client in clients {
        answers += client.await??;
    }
    grown?;
    ensure!(answers >= CLIENTS, "{answers} answers for {CLIENTS} clients");
    println!("scaling: {answers} answers of 200 tokens until two replicas answered");
    let burst = cluster.get("modeldeployments burst").await?;
    let why = condition(&burst, "ScalingActive").map(|one| one["message"].to_string()).unwrap_or_default();
    ensure!(why.contains("from 1 to 2 replicas") && why.contains("4 a replica"), "{why}");
    delete_and_wait(cluster, "burst").await
}
