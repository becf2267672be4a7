//! User errors, and whether the messages say what is wrong, where, and how to fix it.

use anyhow::{Context, Result, ensure};
use russet_tests::chat;
use russet_tests::cluster::{TestCluster, condition, repository};
use serde_json::json;

use crate::path::{answers, delete_and_wait, delete_object, serves};

/// The hub's name of the model of [`damaged_model`].
pub const DAMAGED: &str = "russet/damaged";

/// The smoke model's folder without its weights, and where those are.
fn smoke_without_weights() -> Result<(tempfile::TempDir, std::path::PathBuf)> {
    let folder = tempfile::tempdir()?;
    let smoke = repository().join("engine/smoke/model");
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(smoke.join(name), folder.path().join(name))?;
    }
    Ok((folder, smoke.join("model.safetensors")))
}

/// The smoke model with bytes of its own, by the lowest bits of its first weight: agents fetch no file twice whose digest
/// they have, under whatever name.
pub fn own_model(number: u8) -> Result<tempfile::TempDir> {
    let (folder, weights) = smoke_without_weights()?;
    let mut bytes = std::fs::read(weights)?;
    let length: [u8; 8] = bytes.first_chunk().copied().context("no header")?;
    let data = 8 + usize::try_from(u64::from_le_bytes(length))?;
    bytes[data] ^= number & 0b111;
    std::fs::write(folder.path().join("model.safetensors"), bytes)?;
    Ok(folder)
}

/// A model folder whose last norm is NaN: it loads like any other, and gives no valid output.
pub fn damaged_model() -> Result<tempfile::TempDir> {
    let (folder, weights) = smoke_without_weights()?;
    let mut bytes = std::fs::read(weights)?;
    let length: [u8; 8] = bytes.first_chunk().copied().context("no header")?;
    let data = 8 + usize::try_from(u64::from_le_bytes(length))?;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..data])?;
    let [from, to] = serde_json::from_value(header["model.norm.weight"]["data_offsets"].clone())?;
    let (from, to): (usize, usize) = (from, to);
    bytes[data + from..data + to].fill(0xFF);
    std::fs::write(folder.path().join("model.safetensors"), bytes)?;
    Ok(folder)
}

/// A model folder whose weights file has a header longer than the file.
pub fn broken_model() -> Result<tempfile::TempDir> {
    let (folder, _) = smoke_without_weights()?;
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

pub async fn apply(cluster: &TestCluster, text: &str) -> Result<()> {
    let file = write(text)?;
    cluster.russet(&["apply", "-f", &file.path().display().to_string()]).await.map(|_| ())
}

/// Waits until a condition of an object contains every word.
pub async fn until_message(
    cluster: &mut TestCluster,
    object: &str,
    kind: &str,
    words: &[&str],
) -> Result<()> {
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

/// A model name that is not served, and a deployment whose Model does not exist.
pub async fn unknown_model(cluster: &mut TestCluster) -> Result<()> {
    let response = chat::client()?
        .post(format!("{}/chat/completions", cluster.base_url()))
        .json(&chat::question("nosuch", "hi", json!({"stream": false})))
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
    until_message(cluster, "modeldeployments orphan", "Ready", &["False", "ModelNotFound", "nosuch"]).await?;
    delete_object(cluster, "modeldeployments/orphan").await
}

/// The API server rejects typos, by name.
pub async fn unknown_field(cluster: &mut TestCluster) -> Result<()> {
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
pub async fn fits_nowhere(cluster: &mut TestCluster) -> Result<()> {
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

/// Waits until the node's agent reports this limit: from then on the planner knows it.
pub async fn until_limit(cluster: &mut TestCluster, node: &str, bytes: u64) -> Result<()> {
    cluster
        .until("the agent reports the owner's limit", async |cluster| {
            let node = cluster.get(&format!("inferencenodes {node}")).await?;
            Ok(node["status"]["memory"]["servingLimitBytes"].as_u64() == Some(bytes))
        })
        .await
}

async fn giant_is_refused(cluster: &mut TestCluster, sharding: &str, words: &[&str]) -> Result<()> {
    let text = format!(
        "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: giant}}\nspec:\n  modelRef: {{name: smoke}}\n  sharding: {sharding}\n"
    );
    apply(cluster, &text).await?;
    let mut expected = vec!["\"status\":\"False\"", "NothingFits"];
    expected.extend(words);
    let outcome = until_message(cluster, "modeldeployments giant", "Ready", &expected).await;
    delete_object(cluster, "modeldeployments/giant").await?;
    outcome
}

/// A header longer than its file.
pub async fn corrupt_header(cluster: &mut TestCluster) -> Result<()> {
    apply(cluster, "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {name: broken}\nspec: {source: {uri: 'hf://russet/broken'}}\n").await?;
    until_message(
        cluster,
        "models broken",
        "Ready",
        &["False", "CorruptModel", "model.safetensors", "1099511627776"],
    )
    .await?;
    delete_object(cluster, "models/broken").await
}

/// A ready deployment is edited to a model with NaN output, on one rank and then on two: the old one serves
/// all along, and the status says why.
pub async fn no_numbers(cluster: &mut TestCluster) -> Result<()> {
    let smoke = repository().join("manifests/samples/quickstart/model.yaml");
    cluster.russet(&["apply", "-f", &smoke.display().to_string()]).await?;
    let model = format!(
        "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {{name: damaged}}\nspec: {{source: {{uri: 'hf://{DAMAGED}'}}}}\n"
    );
    apply(cluster, &model).await?;
    let edit = async |cluster: &TestCluster, model: &str, mode: &str| {
        let text = format!(
            "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: steady}}\nspec: {{modelRef: {{name: {model}}}, sharding: {{{mode}, kv: {{contextTokens: 256, maxSequences: 1}}}}}}\n"
        );
        apply(cluster, &text).await
    };
    edit(cluster, "smoke", "mode: Single").await?;
    serves(cluster, "steady").await?;
    for mode in ["mode: Single", "mode: Pipeline, ranks: 2"] {
        edit(cluster, "damaged", mode).await?;
        let mut last = String::new();
        let outcome = cluster
            .until("the edit is taken back", async |cluster| {
                answers(cluster, "steady").await.with_context(|| format!("beside {mode}"))?;
                let steady = cluster.get("modeldeployments steady").await?;
                last = condition(&steady, "Ready").map_or_else(String::new, ToString::to_string);
                let failed = steady["status"]["rollout"]["failed"]["message"].as_str().unwrap_or_default();
                let seen = steady["status"]["observedGeneration"] == steady["metadata"]["generation"];
                let words = ["smoke prompt was not answered", "some logits are no finite numbers"];
                Ok(seen && last.contains("RolledBack") && words.iter().all(|word| failed.contains(word)))
            })
            .await;
        let rollout = cluster.get("modeldeployments steady").await?["status"]["rollout"].clone();
        outcome
            .map_err(|error| error.context(format!("{mode}: Ready says {last}, of the rollout {rollout}")))?;
        println!("  {mode}: {last}");
        edit(cluster, "smoke", "mode: Single").await?;
        serves(cluster, "steady").await?;
    }
    let events = cluster.get("events").await?;
    let said: Vec<&str> = events["items"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|event| event["reason"] == "SmokeFailed")
        .filter_map(|event| event["note"].as_str().or(event["message"].as_str()))
        .collect();
    ensure!(said.iter().any(|note| note.contains("rank 0")), "no event says SmokeFailed of rank 0: {said:?}");
    delete_and_wait(cluster, "steady").await?;
    delete_object(cluster, "models/damaged").await
}

/// A connection that breaks in the middle of a file.
pub async fn cut_download(cluster: &mut TestCluster) -> Result<()> {
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

/// A second `up` on a port in use.
pub async fn port_in_use(cluster: &mut TestCluster) -> Result<()> {
    let folder = tempfile::tempdir()?;
    // In use on loopback, whatever the control plane.
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
