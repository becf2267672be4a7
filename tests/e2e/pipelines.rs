//! A run of the sample Pipeline on real engines: it waits for a person, survives its gateway, sends what was approved once, and
//! goes with what it made.

use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use russet_tests::chat;
use russet_tests::cluster::{TestCluster, kill, repository};
use russet_tests::control_plane::PlaneProcess;
use serde_json::Value;

use crate::mistakes::{apply, until_message};
use crate::path::{delete_object, quickstart};

/// Calls of the endpoint: path, idempotency key and body.
pub type Calls = Arc<Mutex<Vec<(String, String, Value)>>>;

/// An endpoint on loopback; its port.
pub async fn endpoint(calls: Calls) -> Result<u16> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let answer = move |request: axum::extract::Request| {
        let calls = calls.clone();
        async move {
            let path = request.uri().path().to_owned();
            let key = request.headers().get("idempotency-key").and_then(|key| key.to_str().ok());
            let key = key.unwrap_or_default().to_owned();
            let body = axum::body::to_bytes(request.into_body(), 1 << 20).await.unwrap_or_default();
            let body = serde_json::from_slice(&body).unwrap_or_default();
            calls.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((path, key, body));
            "taken"
        }
    };
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(answer)).await });
    Ok(port)
}

/// The sample with this port in its endpoint.
pub fn sample(port: u16) -> Result<String> {
    let text = std::fs::read_to_string(repository().join("manifests/samples/pipeline/pipeline.yaml"))?;
    ensure!(text.contains(":8095/"), "the sample has another port");
    Ok(text.replace(":8095/", &format!(":{port}/")))
}

/// From `russet pipeline run` to the end, with a gateway that is killed while it waits.
pub async fn chain(cluster: &mut TestCluster) -> Result<()> {
    quickstart(cluster).await?;
    let calls = Calls::default();
    apply(cluster, &sample(endpoint(calls.clone()).await?)?).await?;
    cluster.russet(&["pipeline", "run", "brief", "--name", "tea", "--set", "topic=tea"]).await?;
    let run = "pipelineruns tea";
    until_message(cluster, run, "Ready", &["False", "AwaitingApproval"]).await?;
    let status = cluster.get(run).await?["status"].take();
    ensure!(status["progress"] == "3/4" && status["step"] == "deliver", "{status}");
    let approval = status["steps"][3]["approval"].as_str().context("no Approval")?.to_owned();
    until_message(cluster, &format!("approvals {approval}"), "Ready", &["False", "PipelineRun tea waits"])
        .await?;
    kill_gateways(cluster).await?;
    let base = cluster.base_url().trim_end_matches("/v1").to_owned();
    let at = ["--gateway", base.as_str()];
    // What was made before is there after: the artifact is shown before it is approved.
    until_shown(cluster, "tea", &at).await?;
    ensure!(calls.lock().is_ok_and(|calls| calls.is_empty()), "something was sent before it was approved");
    let approved = cluster.russet(&[&["pipeline", "approve", "tea", "--yes"][..], &at].concat()).await?;
    ensure!(
        approved.contains("/hooks/messages") && approved.contains("Send this to the list?"),
        "{approved}"
    );
    until_message(cluster, run, "Ready", &["True", "Finished"]).await?;
    let status = cluster.get(run).await?["status"].take();
    let sent = calls.lock().map(|calls| calls.clone()).unwrap_or_default();
    let uid = cluster.get(run).await?["metadata"]["uid"].as_str().context("no uid")?.to_owned();
    ensure!(sent.len() == 1, "{} calls: {sent:?}", sent.len());
    ensure!(sent[0].0 == "/hooks/messages" && sent[0].1 == format!("{uid}/deliver/0/0"), "{sent:?}");
    let draft = artifact(cluster, &status["steps"][1]["output"]).await?;
    ensure!(draft.0 == 200 && sent[0].2["text"] == draft.1.as_str(), "{sent:?} is not the draft {draft:?}");
    ensure!(sent[0].2["ok"].is_boolean() && sent[0].2["topic"] == "tea", "{sent:?}");
    ensure!(status["usage"]["completionTokens"].as_u64() > Some(0), "{status}");
    ensure!(status["steps"][3]["decidedBy"].is_string(), "{status}");
    println!("{}", cluster.russet(&[&["pipeline", "logs", "tea"][..], &at].concat()).await?);
    let table = cluster.russet(&["get", "pipelineruns"]).await?;
    println!("{table}");
    let words = ["PIPELINE", "STEPS", "AT", "READY", "REASON", "4/4", "Finished"];
    ensure!(words.iter().all(|word| table.contains(word)), "{words:?} are not all in\n{table}");
    rejected(cluster).await?;
    delete_object(cluster, "pipelinerun/tea").await?;
    cluster
        .until("what the run made is gone with it", async |cluster| {
            Ok(artifact(cluster, &status["steps"][1]["output"]).await?.0 == 404)
        })
        .await?;
    cluster
        .until("and its Approval", async |cluster| {
            let left = cluster.get("approvals").await?;
            Ok(!left.to_string().contains(&approval))
        })
        .await?;
    for object in ["pipeline/brief", "httpendpoint/hooks"] {
        delete_object(cluster, object).await?;
    }
    Ok(())
}

/// Kills the gateways and waits for others.
pub async fn kill_gateways(cluster: &mut TestCluster) -> Result<()> {
    let gateways = cluster.pids(PlaneProcess::Gateway)?;
    gateways.iter().for_each(|gateway| kill(*gateway));
    cluster
        .until("another gateway runs", async |cluster| {
            let now = cluster.pids(PlaneProcess::Gateway).unwrap_or_default();
            Ok(!now.is_empty() && now.iter().all(|gateway| !gateways.contains(gateway)))
        })
        .await
}

/// Waits until the gateway shows what a run waits for a person to approve.
pub async fn until_shown(cluster: &mut TestCluster, run: &str, at: &[&str]) -> Result<()> {
    cluster
        .until("the gateway shows what will be done", async |cluster| {
            let logs = cluster.russet(&[&["pipeline", "logs", run][..], at].concat()).await?;
            Ok(logs.contains("AwaitingApproval") && !logs.contains("cannot be"))
        })
        .await
}

/// What a step made, as the gateway answers.
async fn artifact(cluster: &TestCluster, digest: &Value) -> Result<(u16, String)> {
    let digest = digest.as_str().context("no digest")?;
    let response = chat::client()?.get(format!("{}/artifacts/{digest}", cluster.base_url())).send().await?;
    Ok((response.status().as_u16(), response.text().await?))
}

/// Objects that nobody may write so.
async fn rejected(cluster: &mut TestCluster) -> Result<()> {
    let run = |spec: &str| {
        format!(
            "apiVersion: russet.dev/v1alpha1\nkind: PipelineRun\nmetadata: {{name: fixed}}\nspec: {spec}\n"
        )
    };
    let step = |step: &str| {
        format!(
            "apiVersion: russet.dev/v1alpha1\nkind: Pipeline\nmetadata: {{name: wrong}}\n\
             spec: {{steps: [{{name: a, {step}}}]}}\n"
        )
    };
    apply(cluster, &run("{pipelineRef: {name: nowhere}, attempt: 2}")).await?;
    until_message(cluster, "pipelineruns fixed", "Ready", &["False", "TargetNotFound", "nowhere"]).await?;
    let chat = "chat: {model: m, prompt: p}";
    for (text, expected) in [
        (run("{pipelineRef: {name: other}, attempt: 2}"), "runs as it was written"),
        (
            run("{pipelineRef: {name: nowhere}, attempt: 2, parameters: [{name: topic, value: x}]}"),
            "runs as it was written",
        ),
        (run("{pipelineRef: {name: nowhere}, attempt: 1}"), "attempt can only be raised"),
        (step(&format!("{chat}, http: {{endpointRef: {{name: h}}}}")), "a step does one thing"),
        (step("retries: 1"), "a step does one thing"),
        (
            "apiVersion: russet.dev/v1alpha1\nkind: HTTPEndpoint\nmetadata: {name: wrong}\n\
             spec: {url: \"http://example.com\", zone: Cloud}\n"
                .to_owned(),
            "needs https://",
        ),
        (
            "apiVersion: russet.dev/v1alpha1\nkind: Tier\nmetadata: {name: wrong}\n\
             spec: {mode: Dedicated, poolRefs: [{name: p}], approvals: [Step]}\n"
                .to_owned(),
            "Step is for Pipelines",
        ),
    ] {
        let error = apply(cluster, &text).await.err().map(|error| format!("{error:#}")).unwrap_or_default();
        ensure!(error.contains(expected), "{text}was not refused with {expected:?}: {error}");
    }
    delete_object(cluster, "pipelinerun/fixed").await
}
