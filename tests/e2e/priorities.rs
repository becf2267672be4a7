//! Priorities, length limits and deadlines of requests, set by keys and headers, on an engine whose cache
//! holds one sequence although it has two slots.

use anyhow::{Context as _, Result, ensure};
use russet_tests::chat::{self, StreamEnd};
use russet_tests::cluster::{TestCluster, repository};
use serde_json::{Value, json};

use crate::mistakes::apply;
use crate::path::{delete_and_wait, serves, shards_of};

const NAME: &str = "turns";
const QUESTION: &str = "What is Russet?";
/// Tokens of a long answer: nearly the whole cache.
const LONG_ANSWER_TOKENS: u32 = 420;
/// Tokens after which a request can be preempted by one of higher priority (the engine's `TOKENS_BETWEEN`),
/// and some more.
const PREEMPT_AFTER_TOKENS: usize = 40;

/// A stream of a lower-priority key is preempted for one of a higher-priority key, and completes unchanged; a
/// deadline ends a waiting request; a key limits its requests.
pub async fn turns(cluster: &mut TestCluster) -> Result<()> {
    let model = repository().join("manifests/samples/quickstart/model.yaml");
    cluster.russet(&["apply", "-f", &model.display().to_string()]).await?;
    let deployment = "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: turns}\n\
                      spec: {modelRef: {name: smoke}, sharding: {mode: Single, \
                      kv: {contextTokens: 512, maxSequences: 2, kvTokens: 512}}}\n";
    let refused = apply(cluster, &deployment.replace("kvTokens: 512", "kvTokens: 511")).await;
    let refused = refused.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(refused.contains("it must be at least contextTokens"), "room for less than one: \"{refused}\"");
    apply(cluster, deployment).await?;
    serves(cluster, NAME).await?;
    let shards = shards_of(cluster, NAME).await?;
    ensure!(shards.iter().all(|shard| shard["spec"]["kvTokens"] == 512), "kvTokens of {shards:?}");
    let tried = with_keys(cluster).await;
    // Later scenarios send no key, whatever became of these.
    for name in ["low", "high"] {
        let _ = cluster.russet(&["delete", &format!("accesskey/{name}")]).await;
    }
    tried?;
    delete_and_wait(cluster, NAME).await
}

async fn with_keys(cluster: &mut TestCluster) -> Result<()> {
    let base = cluster.base_url();
    let question =
        |tokens: u32| chat::question(NAME, QUESTION, json!({"max_tokens": tokens, "ignore_eos": true}));
    let mut alone = chat::ask(&base, &question(LONG_ANSWER_TOKENS)).await?;
    ensure!(alone.finish().await == StreamEnd::Finished("length".into()), "alone it said \"{}\"", alone.text);
    let create = ["key", "create", "low", "--priority", "-50", "--max-tokens-per-request", "420"];
    let low = cluster.russet(&create).await?.trim().to_owned();
    let high = cluster.russet(&["key", "create", "high", "--priority", "50"]).await?.trim().to_owned();
    for key in [&low, &high] {
        cluster
            .until("the new key is taken", async |cluster| {
                let body = chat::question(NAME, QUESTION, json!({"max_tokens": 1}));
                Ok(chat::ask_by(key, &cluster.base_url(), &body).await.is_ok())
            })
            .await?;
    }
    preempts(&base, &low, &high, question, &alone.text).await?;
    expires(&base, &low, &high, question).await?;
    bounded(&base, &low).await
}

/// The lower-priority stream stalls until that of the higher-priority key, which came later, is complete.
async fn preempts(
    base: &str,
    low: &str,
    high: &str,
    question: impl Fn(u32) -> Value,
    undisturbed: &str,
) -> Result<()> {
    let mut lower = chat::ask_by(low, base, &question(LONG_ANSWER_TOKENS)).await?;
    while lower.pieces < PREEMPT_AFTER_TOKENS {
        let piece = lower.piece().await;
        ensure!(piece.is_ok(), "the lower stream ended with {piece:?} after {} pieces", lower.pieces);
    }
    let mut higher = chat::ask_by(high, base, &question(100)).await?;
    let lower_first = tokio::select! {
        biased;
        end = higher.finish() => {
            ensure!(end == StreamEnd::Finished("length".into()), "the higher stream ended with {end:?}");
            false
        }
        _ = lower.finish() => true,
    };
    ensure!(!lower_first, "the lower stream ended before the higher one; it sent {} pieces", lower.pieces);
    let end = lower.finish().await;
    ensure!(end == StreamEnd::Finished("length".into()), "the lower stream ended with {end:?}");
    ensure!(lower.text == undisturbed, "the text changed:\n{}\n{undisturbed}", lower.text);
    Ok(())
}

/// A request that waits behind one of higher priority ends at its own deadline, with a typed error.
async fn expires(base: &str, low: &str, high: &str, question: impl Fn(u32) -> Value) -> Result<()> {
    let mut higher = chat::ask_by(high, base, &question(LONG_ANSWER_TOKENS)).await?;
    let piece = higher.piece().await;
    ensure!(piece.is_ok(), "the higher stream ended with {piece:?}");
    let mut body = question(LONG_ANSWER_TOKENS);
    body["stream"] = false.into();
    let (status, error) = refusal(low, base, &body, Some("0.05")).await?;
    ensure!((status, &error["code"]) == (504, &json!("deadline_exceeded")), "{status}: {error}");
    let message = error["message"].as_str().context("no message")?;
    println!("  504: {message}");
    ensure!(
        message.contains("timeout of the request is 50ms") || message.contains("deadline of 50ms"),
        "{message}"
    );
    let end = higher.finish().await;
    ensure!(end == StreamEnd::Finished("length".into()), "the higher stream ended with {end:?}");
    Ok(())
}

/// A key's limit applies to a request that names none, and no request gets more.
async fn bounded(base: &str, low: &str) -> Result<()> {
    let body = chat::question(NAME, QUESTION, json!({"ignore_eos": true, "stream": false}));
    let (status, answer) = posted(low, base, &body, None).await?;
    let count = &answer["usage"]["completion_tokens"];
    ensure!(
        (status, count) == (200, &json!(LONG_ANSWER_TOKENS)),
        "an answer without a number: {status}: {answer}"
    );
    let body = chat::question(NAME, QUESTION, json!({"max_tokens": LONG_ANSWER_TOKENS + 1}));
    let (status, error) = refusal(low, base, &body, None).await?;
    ensure!((status, &error["param"]) == (400, &json!("max_tokens")), "{status}: {error}");
    let body = chat::question(NAME, QUESTION, json!({"priority": -1}));
    let (status, error) = refusal(low, base, &body, None).await?;
    let named = error["message"].as_str().is_some_and(|message| message.contains("from 0 to 50, not -1"));
    ensure!(status == 400 && named, "{status}: {error}");
    Ok(())
}

/// Status and error of a rejected request.
async fn refusal(key: &str, base: &str, body: &Value, timeout: Option<&str>) -> Result<(u16, Value)> {
    let (status, mut answer) = posted(key, base, body, timeout).await?;
    Ok((status, answer["error"].take()))
}

async fn posted(key: &str, base: &str, body: &Value, timeout: Option<&str>) -> Result<(u16, Value)> {
    let mut request = chat::client()?.post(format!("{base}/chat/completions")).bearer_auth(key).json(body);
    if let Some(timeout) = timeout {
        request = request.header("x-request-timeout", timeout);
    }
    let response = request.send().await?;
    let status = response.status().as_u16();
    let answer = response.json().await.with_context(|| format!("status {status} and no JSON"))?;
    Ok((status, answer))
}
