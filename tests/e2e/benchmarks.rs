//! Benchmarks: each runs once, one after the other, and leaves results; a deleted one sends no more requests.
//! The engine's own measurement is shown beside the prediction.

use anyhow::{Context, Result, ensure};
use russet_tests::cluster::{TestCluster, condition};
use serde_json::Value;

use crate::mistakes::{apply, until_message};
use crate::path::{delete_object, metric, quickstart, rank_0_metrics};

fn manifest(name: &str, deployment: &str, numbers: &str) -> String {
    format!(
        "apiVersion: russet.dev/v1alpha1\nkind: Benchmark\nmetadata: {{name: {name}}}\n\
         spec: {{deploymentRef: {{name: {deployment}}}, {numbers}}}\n"
    )
}

/// A number written as text.
fn number(value: &Value) -> Result<f64> {
    value.as_str().with_context(|| format!("{value} is no figure"))?.parse().context("a figure is a number")
}

/// Two of one deployment, one of a missing deployment, and one that is deleted while it runs.
pub async fn benchmarks(cluster: &mut TestCluster) -> Result<()> {
    quickstart(cluster).await?;
    let alone = "promptTokens: 300, outputTokens: 120, repetitions: 5";
    let two = "promptTokens: 100, outputTokens: 40, concurrency: 2, repetitions: 2";
    let all = [("alone", "smoke", alone), ("two", "smoke", two), ("lost", "nobody", two)];
    let texts: Vec<String> = all.iter().map(|(name, of, numbers)| manifest(name, of, numbers)).collect();
    apply(cluster, &texts.join("---\n")).await?;
    until_message(cluster, "benchmarks lost", "Stalled", &["True", "TargetNotFound", "nobody"]).await?;
    let mut seen = Vec::new();
    for (name, requests, prompt, answer) in [("alone", "5/5", 300, 120), ("two", "4/4", 100, 40)] {
        until_message(cluster, &format!("benchmarks {name}"), "Ready", &["True", "Finished"]).await?;
        let status = cluster.get(&format!("benchmarks {name}")).await?["status"].take();
        let result = &status["result"];
        ensure!(status["requests"] == requests, "{name}: {status}");
        let prompts = result["promptTokens"].as_i64().context("no promptTokens")?;
        ensure!((prompts - prompt).abs() <= 8, "{name} asked prompts of {prompts} tokens, not of {prompt}");
        ensure!(result["outputTokens"] == answer, "{name}: {result}");
        ensure!(result["nodes"] == 2 && result["model"] == "smoke", "{name}: {result}");
        for rate in ["tokensPerSecond", "totalTokensPerSecond", "promptTokensPerSecond"] {
            ensure!(number(&result[rate])? > 0.0, "{name}: {rate} in {result}");
        }
        for times in ["ttftMilliseconds", "interTokenMilliseconds"] {
            let [half, most, last] = ["p50", "p90", "p99"].map(|percent| number(&result[times][percent]));
            let (half, most, last) = (half?, most?, last?);
            ensure!(0.0 < half && half <= most && most <= last, "{name}: {times} in {result}");
        }
        seen.push(status);
    }
    let time = |status: &Value, field: &str| status[field].as_str().unwrap_or_default().to_owned();
    let (ended, started) = (time(&seen[0], "finishedAt"), time(&seen[1], "startedAt"));
    ensure!(
        !ended.is_empty() && ended <= started,
        "the second began {started}, before the first ended {ended}"
    );
    let table = cluster.russet(&["get", "benchmarks"]).await?;
    println!("{table}");
    let words = ["DEPLOYMENT", "TOK/S", "TTFT P50", "READY", "REASON", "AGE", "Finished", "TargetNotFound"];
    ensure!(words.iter().all(|word| table.contains(word)), "{words:?} are not all in\n{table}");
    let edited = apply(cluster, &manifest("alone", "smoke", "promptTokens: 301")).await;
    let refused = edited.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(refused.contains("a Benchmark runs once"), "an edit was not refused: {refused}");
    measured(cluster).await?;
    cancelled(cluster).await?;
    for (name, _, _) in all {
        delete_object(cluster, &format!("benchmarks/{name}")).await?;
    }
    Ok(())
}

/// There were enough requests for rank 0 to report its speed.
async fn measured(cluster: &mut TestCluster) -> Result<()> {
    cluster
        .until("the deployment shows what was measured", async |cluster| {
            let deployment = cluster.get("modeldeployments smoke").await?;
            let measured = &deployment["status"]["placement"]["measured"];
            let rates = ["tokensPerSecond", "promptTokensPerSecond"].map(|rate| number(&measured[rate]));
            Ok(measured["streams"] == 1
                && rates.iter().all(|rate| rate.as_ref().is_ok_and(|rate| *rate > 0.0)))
        })
        .await?;
    let group = cluster.get("shardgroups").await?["items"][0].take();
    ensure!(number(&group["status"]["measured"]["tokensPerSecond"])? > 0.0, "{}", group["status"]);
    let table = cluster.russet(&["get", "modeldeployments"]).await?;
    println!("{table}");
    ensure!(table.contains("TOK/S"), "{table}");
    Ok(())
}

/// A deleted Benchmark leaves no request running in the engine.
async fn cancelled(cluster: &mut TestCluster) -> Result<()> {
    let endless = "promptTokens: 50, outputTokens: 900, concurrency: 2, repetitions: 100";
    apply(cluster, &manifest("endless", "smoke", endless)).await?;
    until_message(cluster, "benchmarks endless", "Ready", &["False", "Running"]).await?;
    let engine = rank_0_metrics(cluster).await?;
    cluster
        .until("its requests run", async |_| Ok(metric(&engine, "vllm:num_requests_running").await? > 0.0))
        .await?;
    let running = cluster.get("benchmarks endless").await?;
    let reconciling = condition(&running, "Reconciling").context("no condition Reconciling")?;
    ensure!(reconciling["status"] == "True", "{reconciling}");
    delete_object(cluster, "benchmarks/endless").await?;
    cluster
        .until("nothing runs any more", async |_| {
            Ok(metric(&engine, "vllm:num_requests_running").await? == 0.0)
        })
        .await
}
