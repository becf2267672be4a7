//! The basic path: apply, Ready, chat, inspect, delete.

use anyhow::{Context, Result, bail, ensure};
use russet_tests::chat::{self, StreamEnd};
use russet_tests::cluster::{TestCluster, is_ready_as_edited, repository};
use serde_json::{Value, json};

/// Applies the quickstart and waits for Ready, two ranks on two nodes.
pub async fn quickstart(cluster: &mut TestCluster) -> Result<()> {
    let samples = repository().join("manifests/samples/quickstart");
    cluster.russet(&["apply", "-f", &samples.display().to_string()]).await?;
    // An earlier scenario may have left another plan, whose ranks are still stopping.
    cluster
        .until("smoke is Ready and two shards are left", async |cluster| {
            let shards = cluster.get("shards").await?;
            Ok(is_ready(cluster, "smoke").await
                && shards["items"].as_array().is_some_and(|all| all.len() == 2))
        })
        .await?;
    let shards = cluster.get("shards").await?;
    let mut nodes: Vec<&str> = Vec::new();
    for shard in shards["items"].as_array().into_iter().flatten() {
        nodes.push(shard["spec"]["nodeName"].as_str().unwrap_or(""));
    }
    nodes.sort_unstable();
    ensure!(nodes == ["node-a", "node-b"], "two shards on two nodes are wanted, got {nodes:?}");
    let deployment = cluster.get("modeldeployments smoke").await?;
    let placement = &deployment["status"]["placement"];
    ensure!(
        placement["decision"].as_str().is_some_and(|text| text.contains("node-a") && text.contains("node-b")),
        "the placement does not name its nodes: {placement}"
    );
    Ok(())
}

/// Waits until the smoke deployment is Ready.
pub async fn ready(cluster: &mut TestCluster) -> Result<()> {
    cluster.until("smoke is Ready", async |cluster| Ok(is_ready(cluster, "smoke").await)).await
}

/// Whether a deployment is Ready as it was last edited.
async fn is_ready(cluster: &TestCluster, name: &str) -> bool {
    let deployment = cluster.get(&format!("modeldeployments {name}")).await;
    deployment.is_ok_and(|deployment| is_ready_as_edited(&deployment))
}

/// Prompts of the smoke model's own list, each with its one correct answer.
pub fn prompts() -> Result<Vec<(String, String)>> {
    let path = repository().join("engine/smoke/prompts.jsonl");
    let text = std::fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
    text.lines()
        .filter(|line| !line.trim().is_empty())
        .map(|line| {
            let entry: Value = serde_json::from_str(line)?;
            let question = entry["messages"][0]["content"].as_str().context("a prompt without content")?;
            let expect = entry["expect"].as_str().context("a prompt without expect")?;
            Ok((question.to_owned(), expect.to_owned()))
        })
        .collect()
}

/// Every smoke prompt is answered correctly, through both ranks.
pub async fn smoke_prompts(cluster: &mut TestCluster) -> Result<()> {
    quickstart(cluster).await?;
    let prompts = prompts()?;
    ensure!(prompts.len() >= 5, "only {} prompts", prompts.len());
    answers_right(cluster, "smoke", prompts).await
}

/// The model's output is what these prompts expect.
pub async fn answers_right(
    cluster: &TestCluster,
    name: &str,
    prompts: impl IntoIterator<Item = (String, String)>,
) -> Result<()> {
    for (question, expect) in prompts {
        let answer = chat::answer(&cluster.base_url(), name, &question).await?;
        ensure!(answer.trim() == expect.trim(), "\"{question}\" was answered \"{answer}\", not \"{expect}\"");
    }
    Ok(())
}

/// Health and metrics of every process.
pub async fn metrics(cluster: &mut TestCluster) -> Result<()> {
    quickstart(cluster).await?;
    answers(cluster, "smoke").await?;
    let client = chat::client()?;
    let gateway = format!("http://127.0.0.1:{}", cluster.gateway_port);
    let mut expected: Vec<(String, &str)> = vec![(gateway, "russet_gateway_request_total")];
    expected.extend(cluster.plane()?.metrics()?);
    let nodes = cluster.get("inferencenodes node-a").await?;
    let agent = nodes["status"]["metricsAddress"].as_str().context("node-a reports no metricsAddress")?;
    expected.push((format!("http://{agent}"), "russet_node_memory"));
    let shards = cluster.get("shards").await?;
    for shard in shards["items"].as_array().into_iter().flatten() {
        // Engine metrics are on the node's loopback; only the near machine's are readable from here.
        if shard["spec"]["nodeName"] == "node-a" {
            let address =
                shard["status"]["metricsAddress"].as_str().context("a shard reports no metricsAddress")?;
            let name = if shard["spec"]["rank"] == 0 { "vllm:generation_tokens_total" } else { "process_" };
            expected.push((format!("http://{address}"), name));
        }
    }
    for (base, metric) in expected {
        for path in ["/healthz", "/readyz"] {
            let status = client.get(format!("{base}{path}")).send().await?.status();
            ensure!(status.is_success(), "{base}{path} says {status}");
        }
        let text = client.get(format!("{base}/metrics")).send().await?.text().await?;
        ensure!(text.contains(metric), "{base}/metrics lacks {metric}:\n{text}");
    }
    Ok(())
}

/// The real OpenAI SDK against the gateway.
pub async fn openai_sdk(cluster: &mut TestCluster) -> Result<()> {
    quickstart(cluster).await?;
    let Some(python) = std::env::var_os("RUSSET_PYTHON") else {
        ensure!(std::env::var_os("CI").is_none(), "CI must set RUSSET_PYTHON; `cargo xtask test` does");
        println!("  RUSSET_PYTHON is not set: the SDK was not run; `cargo xtask test` sets it");
        return Ok(());
    };
    let script = repository().join("gateway/tests/openai_sdk.py");
    let output = tokio::process::Command::new(python)
        .arg(script)
        .args([cluster.base_url().as_str(), "smoke"])
        .output()
        .await?;
    let text = String::from_utf8_lossy(&output.stdout);
    print!("{}", text.lines().map(|line| format!("    {line}\n")).collect::<String>());
    ensure!(
        output.status.success(),
        "the SDK checks failed: {text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Tokens that each abandoned stream would still generate if the disconnect went unnoticed.
const ABANDONED_TOKENS: u32 = 900;

/// More clients than slots connect and disconnect; the engine stops their requests.
pub async fn disconnect(cluster: &mut TestCluster) -> Result<()> {
    quickstart(cluster).await?;
    let base = cluster.base_url();
    let engine = rank_0_metrics(cluster).await?;
    let before = metric(&engine, "vllm:generation_tokens_total").await?;
    let mut asked = 0.0;
    for _ in 0..3 {
        let mut streams = Vec::new();
        for _ in 0..4 {
            let body = json!({"max_tokens": ABANDONED_TOKENS, "ignore_eos": true});
            let mut answer = chat::ask(&base, &chat::question("smoke", "What is 1 + 2?", body)).await?;
            match answer.piece().await {
                Ok(_) => streams.push(answer),
                Err(end) => bail!("a long stream ended at once: {end:?}"),
            }
            asked += f64::from(ABANDONED_TOKENS);
        }
        // Dropping the answers closes the connections.
        drop(streams);
    }
    cluster
        .until("no request runs or waits", async |_| {
            let running = metric(&engine, "vllm:num_requests_running").await?;
            Ok(running + metric(&engine, "vllm:num_requests_waiting").await? == 0.0)
        })
        .await?;
    let worked = metric(&engine, "vllm:generation_tokens_total").await? - before;
    ensure!(
        worked > 0.0 && worked < asked / 2.0,
        "{worked} of {asked} tokens were generated for clients who left"
    );
    println!("  {worked} of {asked} tokens were generated for clients who left");
    let answer = chat::answer(&base, "smoke", "What is 17 + 25?").await?;
    ensure!(answer.contains("42"), "after the disconnects the answer was \"{answer}\"");
    Ok(())
}

/// Address of rank 0's metrics: its node's loopback, so it must be the near node's.
pub async fn rank_0_metrics(cluster: &TestCluster) -> Result<String> {
    let shards = cluster.get("shards").await?;
    let rank_0 = shards["items"].as_array().into_iter().flatten().find(|shard| shard["spec"]["rank"] == 0);
    let rank_0 = rank_0.context("no rank 0")?;
    ensure!(
        rank_0["spec"]["nodeName"] == "node-a",
        "rank 0 is expected on node-a, whose metrics can be read here"
    );
    let address = rank_0["status"]["metricsAddress"].as_str().context("rank 0 reports no metricsAddress")?;
    Ok(format!("http://{address}/metrics"))
}

/// Sum of a metric over its labels.
pub async fn metric(url: &str, name: &str) -> Result<f64> {
    let text = chat::client()?.get(url).send().await?.text().await?;
    let lines = text.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
    let values: Vec<f64> = lines.filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
    ensure!(!values.is_empty(), "{url} has no {name}");
    Ok(values.iter().sum())
}

/// Deleting the deployment stops its engines and deletes its objects.
pub async fn delete(cluster: &mut TestCluster) -> Result<()> {
    let engines = cluster.engines().await?;
    ensure!(engines.len() == 2, "two engines are wanted, got {engines:?}");
    delete_object(cluster, "modeldeployments/smoke").await?;
    cluster
        .until("groups, shards and engines are gone", async |cluster| {
            let none = |list: &Value| list["items"].as_array().is_some_and(Vec::is_empty);
            Ok(none(&cluster.get("shardgroups").await?)
                && none(&cluster.get("shards").await?)
                && engines.iter().all(|(_, pid)| !std::path::Path::new(&format!("/proc/{pid}")).exists()))
        })
        .await
}

/// Deletes one object.
pub async fn delete_object(cluster: &TestCluster, name: &str) -> Result<()> {
    cluster.russet(&["delete", name]).await.map(|_| ())
}

/// Starts a stream that does not end by itself: end-of-sequence banned, and reads its first chunk.
pub async fn long_answer(cluster: &TestCluster, tokens: u32) -> Result<chat::StreamedAnswer> {
    long_answer_of(cluster, "smoke", tokens).await
}

/// The same for another deployment.
pub async fn long_answer_of(cluster: &TestCluster, name: &str, tokens: u32) -> Result<chat::StreamedAnswer> {
    let body = chat::question(name, "What is Russet?", json!({"max_tokens": tokens, "ignore_eos": true}));
    let mut answer = chat::ask(&cluster.base_url(), &body).await?;
    match answer.piece().await {
        Ok(_) => Ok(answer),
        Err(StreamEnd::Failed(code)) => bail!("the stream failed before its first token: {code}"),
        Err(end) => bail!("the stream ended before its first token: {end:?}"),
    }
}

/// Tensor parallelism over both nodes: it becomes Ready, reports its backend, and answers correctly.
pub async fn tensor(cluster: &mut TestCluster) -> Result<()> {
    let deployment = "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: tensor}\n\
                      spec:\n  modelRef: {name: smoke}\n  sharding:\n    mode: Tensor\n    tensorSize: 2\n    \
                      kv: {contextTokens: 1024, maxSequences: 4}\n";
    apply_to_smoke(cluster, deployment).await?;
    serves(cluster, "tensor").await?;
    let decision = cluster.get("modeldeployments tensor").await?["status"]["placement"]["decision"].clone();
    let text = decision.as_str().unwrap_or("");
    ensure!(
        text.starts_with("tensor over 2 nodes (node-a, node-b), TCP ring: "),
        "the placement does not say how the nodes meet: {text}"
    );
    let shards = shards_of(cluster, "tensor").await?;
    ensure!(shards.len() == 2, "two shards are wanted, got {shards:?}");
    for shard in shards {
        let layers = &shard["status"]["layers"];
        ensure!(layers == "1/2 of 0-3 of 4", "a rank holds {layers}");
    }
    answers_right(cluster, "tensor", prompts()?).await?;
    delete_and_wait(cluster, "tensor").await
}

/// A cache or weights of 8 bits reserve less and answer correctly; as computed and stored it is another plan.
pub async fn quantised(cluster: &mut TestCluster) -> Result<()> {
    let deployment = |engine: &str| {
        format!(
            "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: packed}}\n\
             spec:\n  modelRef: {{name: smoke}}\n  engine: {engine}\n  sharding:\n    mode: Single\n    \
             kv: {{contextTokens: 1024, maxSequences: 4}}\n"
        )
    };
    let mut reserved = Vec::new();
    for engine in [json!({"kvCache": "Int8"}), json!({"quantization": "Int8"}), json!({})] {
        apply_to_smoke(cluster, &deployment(&engine.to_string())).await?;
        serves(cluster, "packed").await?;
        cluster
            .until("one shard keeps as was asked", async |cluster| {
                let shards = shards_of(cluster, "packed").await?;
                let options = |shard: &Value| shard["spec"].get("engine").cloned().unwrap_or(json!({}));
                Ok(shards.len() == 1 && options(&shards[0]) == engine)
            })
            .await?;
        answers_right(cluster, "packed", prompts()?.into_iter().take(8)).await?;
        let spec = shards_of(cluster, "packed").await?[0]["spec"].take();
        let bytes = |field: &str| spec[field].as_u64().with_context(|| format!("no {field} are reserved"));
        reserved.push((bytes("kvBytes")?, bytes("weightBytes")?));
    }
    // Heads of 32 in 16 bits are 64 bytes, and in 8 bits 32 and a scale and a bias of two bytes.
    let [cache, weights, plain] = reserved[..] else { bail!("{reserved:?} is reserved") };
    ensure!(
        cache.0 * 64 == plain.0 * 36 && cache.1 == plain.1,
        "{reserved:?} bytes are reserved with a cache of 8 bits, weights of 8 bits, and as computed"
    );
    // Almost all of the model is in matrices of 16 bits, which become 8 with four bytes for 64 values.
    ensure!(
        weights.0 == plain.0 && (weights.1 * 16).abs_diff(plain.1 * 17 / 2) < plain.1,
        "{reserved:?} bytes are reserved with a cache of 8 bits, weights of 8 bits, and as computed"
    );
    delete_and_wait(cluster, "packed").await
}

/// Replicas of a drained node move elsewhere; the node is empty then, and takes work again.
pub async fn drain(cluster: &mut TestCluster) -> Result<()> {
    let deployment = "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: mover}\n\
                      spec:\n  modelRef: {name: smoke}\n  sharding:\n    mode: Single\n    \
                      kv: {contextTokens: 1024, maxSequences: 4}\n";
    apply_to_smoke(cluster, deployment).await?;
    serves(cluster, "mover").await?;
    let before = nodes_of(cluster, "mover").await?;
    let text = cluster.russet(&["drain", &before, "--timeout-seconds", "110"]).await?;
    let after = nodes_of(cluster, "mover").await?;
    ensure!(after != before, "mover is still on {before}: {text}");
    ensure!(
        text.contains(" moved: mover runs as ") && text.contains(&format!("on {after}")),
        "drain does not say where mover went: {text}"
    );
    answers(cluster, "mover").await?;
    cluster.russet(&["uncordon", &before]).await?;
    delete_and_wait(cluster, "mover").await
}

/// Applies a deployment of the smoke model, and the Model, which earlier scenarios may not have left.
pub async fn apply_to_smoke(cluster: &TestCluster, deployment: &str) -> Result<()> {
    let model = repository().join("manifests/samples/quickstart/model.yaml");
    cluster.russet(&["apply", "-f", &model.display().to_string()]).await?;
    crate::mistakes::apply(cluster, deployment).await
}

/// Waits until a deployment is Ready.
pub async fn serves(cluster: &mut TestCluster, name: &str) -> Result<()> {
    cluster.until(&format!("{name} is Ready"), async |cluster| Ok(is_ready(cluster, name).await)).await
}

/// The Shards of a deployment.
pub async fn shards_of(cluster: &TestCluster, name: &str) -> Result<Vec<Value>> {
    let mut shards = cluster.get("shards").await?["items"].as_array().cloned().unwrap_or_default();
    shards.retain(|shard| shard["spec"]["servedModelName"] == name);
    Ok(shards)
}

/// The nodes of a deployment, comma separated.
pub async fn nodes_of(cluster: &TestCluster, name: &str) -> Result<String> {
    let deployment = cluster.get(&format!("modeldeployments {name}")).await?;
    Ok(deployment["status"]["nodes"].as_str().context("no nodes are named")?.to_owned())
}

/// Deletes a deployment and waits until its ranks are gone.
pub async fn delete_and_wait(cluster: &mut TestCluster, name: &str) -> Result<()> {
    delete_object(cluster, &format!("modeldeployments/{name}")).await?;
    cluster.until("its shards are gone", async |cluster| Ok(shards_of(cluster, name).await?.is_empty())).await
}

/// Sends a deployment a prompt with one correct answer.
pub async fn answers(cluster: &TestCluster, name: &str) -> Result<()> {
    let answer = chat::answer(&cluster.base_url(), name, "What is 17 + 25?").await?;
    ensure!(answer.contains("42"), "{name} says that 17 + 25 is \"{answer}\"");
    Ok(())
}

/// `doctor` finds no problem, and tests each machine and both together; its objects are deleted afterwards.
/// An unreachable machine is named.
pub async fn doctor(cluster: &mut TestCluster) -> Result<()> {
    let text = cluster.russet(&["doctor", "--prove"]).await?;
    for line in ["node-a", "node-b", "node-a + node-b"] {
        let found = text.lines().find(|shown| {
            shown
                .strip_prefix("✓ ")
                .and_then(|shown| shown.strip_prefix(line))
                .is_some_and(|rest| rest.starts_with("  "))
        });
        let found = found.with_context(|| format!("{line} is not proved:\n{text}"))?;
        println!("  {found}");
        ensure!(found.contains("answer"), "{found}");
    }
    ensure!(text.ends_with("nothing needs attention\n"), "{text}");
    for kind in ["models", "modeldeployments", "nodepools", "shards"] {
        let left = cluster.get(kind).await?.to_string();
        ensure!(!left.contains("doctor-"), "{kind} of the doctor are left: {left}");
    }
    cluster.russet(&["cordon", "node-b"]).await?;
    let text = cluster.russet(&["doctor"]).await;
    cluster.russet(&["uncordon", "node-b"]).await?;
    ensure!(text?.contains("✓ node node-b"), "a node that takes nothing new is well");
    Ok(())
}
