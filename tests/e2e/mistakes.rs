//! What people get wrong, and whether they are told what, where and what to do.

use anyhow::{Result, ensure};
use russet_tests::ask;
use russet_tests::cluster::{Cluster, condition, repository};
use serde_json::json;

use crate::path::{answers, delete_object};

/// A model folder whose weights file has a header longer than the file.
pub fn broken_model() -> Result<tempfile::TempDir> {
    let folder = tempfile::tempdir()?;
    let smoke = repository().join("engine/smoke/model");
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(smoke.join(name), folder.path().join(name))?;
    }
    let mut bytes = (1_u64 << 40).to_le_bytes().to_vec();
    bytes.extend_from_slice(b"{\"model.norm.weight\":");
    std::fs::write(folder.path().join("model.safetensors"), bytes)?;
    Ok(folder)
}

pub fn write(text: &str) -> Result<tempfile::NamedTempFile> {
    use std::io::Write as _;
    let mut file = tempfile::Builder::new().suffix(".yaml").tempfile()?;
    file.write_all(text.as_bytes())?;
    Ok(file)
}

pub async fn apply(cluster: &Cluster, text: &str) -> Result<()> {
    let file = write(text)?;
    cluster.russet(&["apply", "-f", &file.path().display().to_string()]).await.map(|_| ())
}

/// Waits until a condition of an object mentions every word.
pub async fn until_says(cluster: &mut Cluster, object: &str, kind: &str, words: &[&str]) -> Result<()> {
    let mut last = String::new();
    let outcome = cluster
        .until("the condition says so", async |cluster| {
            let object = cluster.get(object).await?;
            last = condition(&object, kind).map_or_else(|| "no condition".into(), ToString::to_string);
            Ok(words.iter().all(|word| last.contains(word)))
        })
        .await;
    outcome.map_err(|error| error.context(format!("{object}: {kind} says {last}, not {words:?}")))
}

/// A model name nobody serves, and a deployment whose Model does not exist.
pub async fn unknown_model(cluster: &mut Cluster) -> Result<()> {
    let response = ask::client()?
        .post(format!("{}/chat/completions", cluster.base_url()))
        .json(&ask::question("nosuch", "hi", json!({"stream": false})))
        .send()
        .await?;
    let status = response.status().as_u16();
    let body: serde_json::Value = response.json().await?;
    ensure!(status == 404, "status {status}: {body}");
    let message = body["error"]["message"].as_str().unwrap_or("");
    ensure!(
        message.contains("nosuch") && message.contains("smoke"),
        "the message names neither model: {body}"
    );
    apply(cluster, "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: orphan}\nspec: {modelRef: {name: nosuch}}\n").await?;
    until_says(cluster, "modeldeployments orphan", "Ready", &["False", "ModelNotFound", "nosuch"]).await?;
    delete_object(cluster, "modeldeployments/orphan").await
}

/// Typos are refused by the API server, by name.
pub async fn unknown_field(cluster: &mut Cluster) -> Result<()> {
    for (text, words) in [
        (
            "kind: ModelDeployment\nmetadata: {name: typo}\nspec: {modelRef: {name: smoke}, replica: 1}",
            vec!["replica"],
        ),
        (
            "kind: ModelDeployment\nmetadata: {name: typo}\nspec: {modelRef: {name: smoke}, replicas: many}",
            vec![".spec.replicas", "expected numeric", "got string"],
        ),
        (
            "kind: ModelDeployment\nmetadata: {name: typo}\nspec: {modelRef: {name: smoke}, sharding: {mode: Diagonal}}",
            vec!["mode", "Diagonal"],
        ),
        ("kind: ModelDeploiment\nmetadata: {name: typo}\nspec: {}", vec!["ModelDeploiment"]),
        (
            "kind: ModelDeployment\nmetadata: {name: typo}\nspec: {modelRef: {name: smoke}, sharding: {mode: Single, ranks: 2}}",
            vec!["Single"],
        ),
    ] {
        let error = match apply(cluster, &format!("apiVersion: russet.dev/v1alpha1\n{text}\n")).await {
            Ok(()) => anyhow::bail!("this was accepted: {text}"),
            Err(error) => format!("{error:#}"),
        };
        for word in words {
            ensure!(error.contains(word), "the error for `{text}` does not name {word}: {error}");
        }
    }
    Ok(())
}

/// More ranks than nodes, and more memory than the owners of the nodes allow.
pub async fn fits_nowhere(cluster: &mut Cluster) -> Result<()> {
    giant_is_refused(cluster, "{mode: Pipeline, ranks: 3}", &["3", "2"]).await?;
    let limit = |text: &str| {
        ["node-a", "node-b"].map(|node| {
            format!(
                "apiVersion: russet.dev/v1alpha1\nkind: InferenceNode\nmetadata: {{name: {node}}}\nspec: {{memory: {text}}}\n"
            )
        })
    };
    apply(cluster, &limit("{servingLimit: 1Gi}").join("---\n")).await?;
    for node in ["node-a", "node-b"] {
        until_limit(cluster, node, 1 << 30).await?;
    }
    let sharding = "{mode: Single, kv: {contextTokens: 1024, maxSequences: 1024}}";
    let outcome = giant_is_refused(cluster, sharding, &["node-a", "node-b", "GiB"]).await;
    apply(cluster, &limit("{}").join("---\n")).await?;
    outcome
}

/// Waits until the node's agent reports that limit: from then on the planner knows it.
pub async fn until_limit(cluster: &mut Cluster, node: &str, bytes: u64) -> Result<()> {
    cluster
        .until("the agent reports the owner's limit", async |cluster| {
            let node = cluster.get(&format!("inferencenodes {node}")).await?;
            Ok(node["status"]["memory"]["servingLimitBytes"].as_u64() == Some(bytes))
        })
        .await
}

async fn giant_is_refused(cluster: &mut Cluster, sharding: &str, words: &[&str]) -> Result<()> {
    let text = format!(
        "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: giant}}\nspec:\n  modelRef: {{name: smoke}}\n  sharding: {sharding}\n"
    );
    apply(cluster, &text).await?;
    let mut wanted = vec!["\"status\":\"False\"", "NothingFits"];
    wanted.extend(words);
    let outcome = until_says(cluster, "modeldeployments giant", "Ready", &wanted).await;
    delete_object(cluster, "modeldeployments/giant").await?;
    outcome
}

/// A header longer than its file.
pub async fn corrupt_header(cluster: &mut Cluster) -> Result<()> {
    apply(cluster, "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {name: broken}\nspec: {source: {uri: 'hf://russet/broken'}}\n").await?;
    until_says(
        cluster,
        "models broken",
        "Ready",
        &["False", "CorruptModel", "model.safetensors", "1099511627776"],
    )
    .await?;
    delete_object(cluster, "models/broken").await
}

/// A connection that breaks in the middle of a file.
pub async fn cut_download(cluster: &mut Cluster) -> Result<()> {
    cluster.hub.cut_next(2);
    let text = "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {name: cut}\nspec: {source: {uri: 'hf://russet/cut'}}\n---\napiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: cut}\nspec: {modelRef: {name: cut}, sharding: {mode: Single, kv: {contextTokens: 256, maxSequences: 1}}}\n";
    apply(cluster, text).await?;
    cluster
        .until("cut is Ready in spite of two cut transfers", async |cluster| {
            let deployment = cluster.get("modeldeployments cut").await?;
            Ok(condition(&deployment, "Ready").is_some_and(|ready| ready["status"] == "True"))
        })
        .await?;
    ensure!(cluster.hub.cuts_left() == 0, "no transfer was cut: the test proved nothing");
    answers(cluster, "cut").await?;
    delete_object(cluster, "modeldeployments/cut").await?;
    delete_object(cluster, "models/cut").await
}

/// Another `up` on a port that is taken.
pub async fn port_in_use(cluster: &mut Cluster) -> Result<()> {
    let folder = tempfile::tempdir()?;
    // Taken on loopback, whichever control plane there is.
    let port = cluster.gateway_port.to_string();
    let error = cluster
        .russet(&[
            "up",
            "--no-agent",
            "--data-dir",
            &folder.path().display().to_string(),
            "--api-port",
            &port,
            "--gateway-port",
            "0",
        ])
        .await
        .err()
        .map_or_else(String::new, |error| format!("{error:#}"));
    ensure!(error.contains(&port), "the error does not name port {port}: {error}");
    ensure!(error.contains("--api-port") || error.contains("in use"), "no remedy: {error}");
    Ok(())
}
