//! The sample Pipeline with a small real model, SmolLM2, beside the smoke model: its gateway is killed while each of the steps
//! runs that take their time, while it waits for a person, and as soon as that person has answered.

use anyhow::{Context, Result, ensure};
use russet_tests::cluster::TestCluster;
use serde_json::Value;

use crate::mistakes::{apply, until_message};
use crate::path::{delete_object, quickstart, serves};
use crate::pipelines::{Calls, endpoint, kill_gateways, sample, until_shown};

const OBJECTS: &str = "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {name: smollm2}\n\
    spec: {source: {uri: 'hf://russet/smollm2'}}\n---\n\
    apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: smollm2}\n\
    spec: {modelRef: {name: smollm2}, sharding: {mode: Single, kv: {contextTokens: 1024, maxSequences: 1}}}\n";

const RUN: &str = "pipelineruns coffee";

/// From `russet pipeline run` to the end: what each step made is there once, and what was approved was sent as it was.
pub async fn kills(cluster: &mut TestCluster) -> Result<()> {
    let Some(file) = std::env::var_os("RUSSET_SMOLLM2").map(std::path::PathBuf::from) else {
        ensure!(std::env::var_os("CI").is_none(), "CI must set RUSSET_SMOLLM2");
        println!("  RUSSET_SMOLLM2 is not set: `cargo xtask test` sets it");
        return Ok(());
    };
    quickstart(cluster).await?;
    let folder = tempfile::tempdir()?;
    let name = file.file_name().context("RUSSET_SMOLLM2 names no file")?;
    std::os::unix::fs::symlink(&file, folder.path().join(name))?;
    cluster.hub.add("russet/smollm2", folder.path());
    apply(cluster, OBJECTS).await?;
    serves(cluster, "smollm2").await?;

    let calls = Calls::default();
    // The steps that write texts ask the real model, the one that judges asks the smoke model.
    let text = sample(endpoint(calls.clone()).await?)?;
    let text = ["Facts about", "Write a short text"].iter().try_fold(text, |text, prompt| {
        let asked = format!("chat: {{model: smoke, prompt: \"{prompt}");
        ensure!(text.contains(&asked), "the sample has another prompt than \"{prompt}\"");
        Ok(text.replace(&asked, &format!("chat: {{model: smollm2, prompt: \"{prompt}")))
    })?;
    apply(cluster, &text).await?;
    cluster.russet(&["pipeline", "run", "brief", "--name", "coffee", "--set", "topic=coffee"]).await?;
    for step in ["research", "draft"] {
        cluster
            .until(&format!("{step} runs"), async |cluster| {
                let status = cluster.get(RUN).await?["status"].take();
                ensure!(status["finishedAt"].is_null(), "{status}");
                Ok(state(&status, step) == "Running")
            })
            .await?;
        kill_gateways(cluster).await?;
    }
    until_message(cluster, RUN, "Ready", &["False", "AwaitingApproval"]).await?;
    kill_gateways(cluster).await?;
    ensure!(calls.lock().is_ok_and(|calls| calls.is_empty()), "something was sent before it was approved");
    let base = cluster.base_url().trim_end_matches("/v1").to_owned();
    let at = ["--gateway", base.as_str()];
    until_shown(cluster, "coffee", &at).await?;
    cluster.russet(&[&["pipeline", "approve", "coffee", "--yes"][..], &at].concat()).await?;
    kill_gateways(cluster).await?;
    until_message(cluster, RUN, "Ready", &["True", "Finished"]).await?;

    let status = cluster.get(RUN).await?["status"].take();
    ensure!(status["progress"] == "4/4" && status["attempt"] == 1, "{status}");
    let uid = cluster.get(RUN).await?["metadata"]["uid"].as_str().context("no uid")?.to_owned();
    let sent = calls.lock().map(|calls| calls.clone()).unwrap_or_default();
    // A call that was on its way when its gateway was killed is made again, with the same key and the same bytes.
    ensure!((1..=2).contains(&sent.len()), "{} calls: {sent:?}", sent.len());
    let key = format!("{uid}/deliver/0/0");
    ensure!(sent.iter().all(|call| call.1 == key && *call == sent[0]), "{sent:?}");
    let text = sent[0].2["text"].as_str().unwrap_or_default();
    ensure!(text.split_whitespace().count() > 5, "SmolLM2 wrote \"{text}\"");
    println!(
        "    4 kills, {} call(s); SmolLM2 wrote: {}",
        sent.len(),
        text.lines().next().unwrap_or_default()
    );
    println!("{}", cluster.russet(&[&["pipeline", "logs", "coffee"][..], &at].concat()).await?);
    for object in [
        "pipelinerun/coffee",
        "pipeline/brief",
        "httpendpoint/hooks",
        "modeldeployments/smollm2",
        "models/smollm2",
    ] {
        delete_object(cluster, object).await?;
    }
    Ok(())
}

/// How far a step is.
fn state<'a>(status: &'a Value, step: &str) -> &'a str {
    let steps = status["steps"].as_array().into_iter().flatten();
    let found = steps.filter(|one| one["name"] == step).find_map(|one| one["state"].as_str());
    found.unwrap_or_default()
}
