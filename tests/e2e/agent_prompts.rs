//! Long prompts of agents over two replicas: the next turn goes where the last one was read, and reads little of it again.

use anyhow::{Context as _, Result, ensure};
use russet_tests::chat;
use russet_tests::cluster::TestCluster;
use serde_json::{Value, json};

use crate::mistakes::{apply, own_model};
use crate::path::{delete_and_wait, delete_object, serves};

/// The largest share of a prompt that a second turn may read again.
const MAX_READ_AGAIN: f64 = 0.02;
/// Tokens of a prompt, at least. Of a longer one a turn reads a smaller share; 30,000 take minutes on two cores.
const PROMPT_TOKENS: u64 = 3_500;

/// Two agents with long prompts, by turns, as Claude Code sends them: with a line that changes every time.
pub async fn second_turns(cluster: &mut TestCluster) -> Result<()> {
    let folder = long_model()?;
    cluster.hub.add("russet/agents", folder.path());
    let objects = "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {name: agents}\n\
                   spec: {source: {uri: hf://russet/agents}}\n---\n\
                   apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: agents}\nspec:\n  \
                   modelRef: {name: agents}\n  replicas: 2\n  sharding:\n    mode: Single\n    \
                   kv: {contextTokens: 8192, maxSequences: 2}\n";
    apply(cluster, objects).await?;
    serves(cluster, "agents").await?;
    cluster
        .until("both replicas are ready", async |cluster| {
            let status = cluster.get("modeldeployments agents").await?["status"].take();
            Ok(status["readyReplicas"] == 2)
        })
        .await?;
    // No two parts are alike, so that no token is more than a few letters.
    let question =
        |agent: u32| (0..350).map(|number| format!("{agent}{number} + {number}? ")).collect::<String>();
    let mut conversations = [17, 18].map(|agent| vec![json!({"role": "user", "content": question(agent)})]);
    let mut nodes: [Vec<String>; 2] = Default::default();
    for turn in 0..3 {
        for (conversation, nodes) in conversations.iter_mut().zip(&mut nodes) {
            let answer = send(cluster, conversation, turn).await?;
            println!(
                "    turn {turn} of {} tokens at {}: {} read",
                answer.prompt_tokens, answer.node, answer.read_tokens
            );
            ensure!(answer.prompt_tokens >= PROMPT_TOKENS, "a prompt has {} tokens", answer.prompt_tokens);
            let share = answer.read_tokens as f64 / answer.prompt_tokens as f64;
            ensure!(turn == 0 || share < MAX_READ_AGAIN, "turn {turn} read {share} of its prompt");
            nodes.push(answer.node);
            // So far beyond what it was trained for the model says nothing sensible.
            conversation.push(json!({"role": "assistant", "content": "42"}));
            conversation.push(json!({"role": "user", "content": "And what is 3 + 4?"}));
        }
    }
    for nodes in &nodes {
        ensure!(nodes.iter().all(|node| *node == nodes[0]), "the turns of an agent went to {nodes:?}");
    }
    ensure!(
        nodes[0][0] != nodes[1][0],
        "both agents are at {}, and the other replica has nothing to do",
        nodes[0][0]
    );
    delete_and_wait(cluster, "agents").await?;
    delete_object(cluster, "models/agents").await
}

/// The smoke model with a context of 8,192 tokens.
fn long_model() -> Result<tempfile::TempDir> {
    let folder = own_model(3)?;
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
    config["max_position_embeddings"] = 8_192.into();
    std::fs::write(path, config.to_string())?;
    Ok(folder)
}

/// A turn's answer.
struct TurnAnswer {
    /// The node that answered.
    node: String,
    prompt_tokens: u64,
    /// Tokens of the prompt that were not cached.
    read_tokens: u64,
}

async fn send(cluster: &TestCluster, messages: &[Value], turn: u32) -> Result<TurnAnswer> {
    let body = json!({
        "model": "agents", "max_tokens": 16, "temperature": 0, "messages": messages,
        "system": format!("x-anthropic-billing-header: cc_version=2.1; cch={turn};\nYou add numbers."),
    });
    let url = cluster.base_url();
    let response = chat::client()?.post(format!("{url}/messages")).json(&body).send().await?;
    let id = response.headers().get("request-id").context("no request-id")?.to_str()?.to_owned();
    let (status, body) = (response.status(), response.text().await?);
    ensure!(status.is_success(), "HTTP {status}: {body}");
    let body: Value = serde_json::from_str(&body)?;
    let count = |name: &str| body["usage"][name].as_u64().with_context(|| format!("no {name} in {body}"));
    let read_tokens = count("input_tokens")?;
    let root = url.strip_suffix("/v1").context("the gateway's URL ends with /v1")?;
    let why: Value = chat::client()?.get(format!("{root}/requests/{id}/why")).send().await?.json().await?;
    let node = why["attempts"][0]["node"].as_str().with_context(|| format!("no attempt in {why}"))?;
    Ok(TurnAnswer {
        node: node.to_owned(),
        prompt_tokens: read_tokens + count("cache_read_input_tokens")?,
        read_tokens,
    })
}
