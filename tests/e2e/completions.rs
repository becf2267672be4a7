//! Completions, models without a chat template, and what a deployment sets; the OpenAI SDK's own tests of its resources.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, bail, ensure};
use russet_tests::cluster::{TestCluster, repository};
use serde_json::{Value, json};
use tokio::process::Command;

use super::mistakes::apply;
use super::path::{delete_object, quickstart, serves};

/// A model without a chat template continues texts; what a deployment sets is told and acts at once.
pub async fn completions(cluster: &mut TestCluster) -> Result<()> {
    let smoke = repository().join("engine/smoke/model");
    let folder = tempfile::tempdir()?;
    for entry in std::fs::read_dir(&smoke)? {
        let entry = entry?;
        let name = entry.file_name();
        match name.to_str() {
            Some("generation_config.json") => {
                let config = json!({"eos_token_id": 2, "temperature": 0.01, "top_k": 1});
                std::fs::write(folder.path().join(name), config.to_string())?;
            }
            Some("tokenizer_config.json" | "chat_template.jinja") => {}
            _ => drop(std::fs::copy(entry.path(), folder.path().join(name))?),
        }
    }
    cluster.hub.add("plain/base", folder.path());
    let objects = |engine: &str| {
        format!(
            "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {{name: base}}\n\
             spec: {{source: {{uri: 'hf://plain/base'}}}}\n---\n\
             apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: base}}\n\
             spec: {{modelRef: {{name: base}}, sharding: {{mode: Single}}, engine: {engine}}}\n"
        )
    };
    apply(cluster, &objects("{}")).await?;
    serves(cluster, "base").await?;
    let deployment = cluster.get("modeldeployments base").await?;
    ensure!(
        deployment["status"]["generationConfig"] == json!({"temperature": 0.01, "topK": 1}),
        "the status has {}",
        deployment["status"]["generationConfig"]
    );
    let model = cluster.get("models base").await?;
    let said = model["status"]["conditions"].to_string();
    ensure!(said.contains("no chat template"), "the Model says {said}");

    let ask = async |path: &str, body: Value| -> Result<(u16, Value)> {
        let answer = reqwest::Client::new().post(format!("{}/{path}", cluster.base_url())).json(&body);
        let answer = answer.send().await?;
        Ok((answer.status().as_u16(), answer.json().await?))
    };
    let asked = json!({"model": "base", "prompt": ["What is 17", [5, 6, 7]], "max_tokens": 4, "logprobs": 1, "ignore_eos": true});
    let (status, first) = ask("completions", asked.clone()).await?;
    ensure!(status == 200, "completions of texts and tokens: {first}");
    let choices = first["choices"].as_array().context("no choices")?;
    ensure!(
        choices.len() == 2 && first["usage"]["completion_tokens"] == 8,
        "two choices of four tokens: {first}"
    );
    for choice in choices {
        let tokens = choice["logprobs"]["tokens"].as_array().context("no tokens")?;
        ensure!(tokens.len() == 4, "four tokens with log-probabilities: {choice}");
    }
    // Of one token there is no choice, whatever the seed.
    let (_, again) = ask("completions", asked).await?;
    ensure!(
        again["choices"] == first["choices"],
        "top_k 1 says {} and {}",
        first["choices"],
        again["choices"]
    );
    let echo = json!({"model": "base", "prompt": "What is", "max_tokens": 1, "echo": true});
    let (_, echoed) = ask("completions", echo).await?;
    let text = echoed["choices"][0]["text"].as_str().unwrap_or_default();
    ensure!(text.starts_with("What is"), "an echo is {text:?}");
    // As evaluations score texts: the prompt with log-probabilities, an answer behind it or none.
    let mut lists = Vec::new();
    for max_tokens in [1, 0] {
        let scored = json!({"model": "base", "prompt": [[5, 6, 7], [8, 9]], "max_tokens": max_tokens, "echo": true,
                            "logprobs": 1, "temperature": 0, "seed": 1234});
        let (status, scored) = ask("completions", scored).await?;
        ensure!(status == 200, "a scored prompt: {scored}");
        for (choice, prompt) in [(0, 3), (1, 2)] {
            let numbers = scored["choices"][choice]["logprobs"]["token_logprobs"].as_array();
            let numbers = numbers.context("no log-probabilities")?;
            ensure!(numbers.len() == prompt + max_tokens && numbers[0].is_null(), "numbers: {scored}");
            ensure!(numbers[1..].iter().all(Value::is_f64), "numbers: {scored}");
            lists.push(numbers[..prompt].to_vec());
        }
    }
    ensure!(lists[..2] == lists[2..], "a prompt has other numbers without an answer: {lists:?}");
    let chat = json!({"model": "base", "messages": [{"role": "user", "content": "Hi"}]});
    let (status, refused) = ask("chat/completions", chat).await?;
    let message = refused["error"]["message"].as_str().unwrap_or_default();
    ensure!(status == 400 && message.contains("/v1/completions"), "a chat is {status}: {refused}");

    // An edit of what requests are told replaces nothing.
    let group = cluster.get("shardgroups").await?["items"][0]["metadata"]["uid"].clone();
    apply(cluster, &objects("{generationConfig: {temperature: 0, topP: 0.5}}")).await?;
    cluster
        .until("the status has the spec's temperature", async |cluster| {
            let deployment = cluster.get("modeldeployments base").await?;
            let status = &deployment["status"]["generationConfig"];
            // Kubernetes writes 0.0 as 0.
            let numbers = ["temperature", "topK", "topP"].map(|name| status[name].as_f64());
            Ok(numbers == [Some(0.0), Some(1.0), Some(0.5)])
        })
        .await?;
    let same = cluster.get("shardgroups").await?["items"][0]["metadata"]["uid"].clone();
    ensure!(same == group, "the replica was replaced");
    delete_object(cluster, "modeldeployments/base").await?;
    delete_object(cluster, "models/base").await
}

/// Suites of the SDK, and what of them this release does not serve: fields that it refuses by name, which the tests with
/// all parameters send, with `max_tokens: 0` and biases of no token; stored completions; the deletion of a model; and batches
/// and files of made-up ids.
const RESOURCES: [(&str, &[&str]); 4] = [
    ("chat/test_completions.py", &["with_all_params", "_retrieve", "_update", "_list", "_delete"]),
    ("test_completions.py", &["with_all_params"]),
    ("test_models.py", &["_delete"]),
    ("test_batches.py", &["with_all_params", "_create", "_retrieve", "_cancel"]),
];

/// The OpenAI SDK's own tests of chat, completions and models, against the gateway.
pub async fn openai_resources(cluster: &mut TestCluster) -> Result<()> {
    quickstart(cluster).await?;
    let route = "apiVersion: russet.dev/v1alpha1\nkind: ModelRoute\nmetadata: {name: openai}\n\
                 spec: {models: ['gpt-6-astra', 'gpt-3.5-turbo-instruct', 'ft:gpt-4o-mini:acemeco:suffix:abc123'], \
                 targets: [{deploymentRef: {name: smoke}}]}\n";
    apply(cluster, route).await?;
    for (file, unserved) in RESOURCES {
        passes(cluster, file, unserved).await?;
    }
    delete_object(cluster, "modelroutes/openai").await
}

/// Runs a suite of the SDK's own tests, which passes but for tests with these words in their names.
pub async fn passes(cluster: &TestCluster, file: &str, unserved: &[&str]) -> Result<()> {
    let (Some(python), Some(tests)) =
        (std::env::var_os("RUSSET_PYTEST"), std::env::var_os("RUSSET_OPENAI_TESTS"))
    else {
        ensure!(std::env::var_os("CI").is_none(), "CI must set RUSSET_PYTEST and RUSSET_OPENAI_TESTS");
        println!("  RUSSET_PYTEST and RUSSET_OPENAI_TESTS are not set: `cargo xtask test` sets them");
        return Ok(());
    };
    // The tests import each other from a package of this name.
    let folder = tempfile::tempdir()?;
    std::os::unix::fs::symlink(&tests, folder.path().join("tests"))?;
    let output = Command::new(&python)
        .args(["-m", "pytest", "-q", "-rA", "--tb=line", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"])
        .arg(format!("tests/api_resources/{file}"))
        .current_dir(folder.path())
        .env("TEST_API_BASE_URL", cluster.base_url())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("NO_PROXY", "*")
        .output()
        .await?;
    let text = String::from_utf8_lossy(&output.stdout);
    let of = |word: &str| -> BTreeSet<String> {
        let lines = text.lines().filter_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
        lines.filter_map(|line| Some(line.split(" - ").next()?.to_owned())).collect()
    };
    let (passed, failed) = (of("PASSED"), of("FAILED"));
    println!("    {file}: {} pass, {} do not, as is known", passed.len(), failed.len());
    if passed.is_empty() || !of("ERROR").is_empty() {
        bail!("{file}: {text}{}", String::from_utf8_lossy(&output.stderr));
    }
    let is_unserved = |test: &&String| unserved.iter().any(|part| test.contains(part));
    if let Some(wrong) = failed.iter().find(|test| !is_unserved(test)) {
        bail!("{wrong} failed: {text}");
    }
    Ok(())
}
