//! Calls of tools: models that write what each family writes, a whole round through the real clients of OpenAI, Anthropic
//! and Ollama.

use std::path::Path;
use std::process::Output;

use anyhow::{Context as _, Result, ensure};
use russet_tests::chat;
use russet_tests::cluster::{TestCluster, repository};
use tokio::process::Command;

use super::mistakes::apply;
use super::path::{delete_object, serves};

/// A run of CI has one of so many parts of the families; all of them have them all.
const PARTS: usize = 3;

/// Every family's calls and reasoning arrive as such, whole and streamed, and its results are answered.
pub async fn rounds(cluster: &mut TestCluster) -> Result<()> {
    let (Some(python), Some(vocabularies)) =
        (std::env::var_os("RUSSET_PYTHON"), std::env::var_os("RUSSET_VOCABULARIES"))
    else {
        ensure!(std::env::var_os("CI").is_none(), "CI must set RUSSET_PYTHON and RUSSET_VOCABULARIES");
        println!("  RUSSET_PYTHON and RUSSET_VOCABULARIES are not set: `cargo xtask test` sets them");
        return Ok(());
    };
    let folder = tempfile::tempdir()?;
    let script = repository().join("tests/e2e/tools.py");
    let templates = Path::new(&vocabularies).join("templates");
    let made = Command::new(&python).arg(&script).arg("make").arg(templates).arg(folder.path()).output();
    let families = text(&made.await?)?;
    let families: Vec<&str> = families.lines().collect();
    ensure!(families.len() > 15, "only {} families", families.len());
    for family in shared(families)? {
        cluster.hub.add(&format!("scripted/{family}"), &folder.path().join(family));
        apply(cluster, &objects(family)).await?;
        serves(cluster, family).await?;
        let talk = Command::new(&python)
            .arg(&script)
            .args(["talk", &cluster.base_url(), family])
            .env("NO_PROXY", "*")
            .output();
        print!("    {}", text(&talk.await?).with_context(|| format!("tools of {family}"))?);
        delete_object(cluster, &format!("modeldeployments/{family}")).await?;
        delete_object(cluster, &format!("models/{family}")).await?;
    }
    refusals(cluster).await
}

/// The families of this run.
fn shared(families: Vec<&str>) -> Result<Vec<&str>> {
    let slice = std::env::var("RUSSET_SLICE").unwrap_or_else(|_| "all".to_owned());
    if slice == "all" {
        return Ok(families);
    }
    let number: usize = slice.parse().context("RUSSET_SLICE is a number or all")?;
    Ok(families.into_iter().skip(number % PARTS).step_by(PARTS).collect())
}

/// What a program wrote, if it did not fail.
fn text(output: &Output) -> Result<String> {
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn objects(family: &str) -> String {
    format!(
        "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {{name: {family}}}\n\
         spec: {{source: {{uri: 'hf://scripted/{family}'}}}}\n---\n\
         apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: {family}}}\n\
         spec: {{modelRef: {{name: {family}}}, sharding: {{mode: Single, kv: {{contextTokens: 32768, maxSequences: 2}}}}}}\n"
    )
}

/// What a template has no use for, and what cannot be a variable of one.
async fn refusals(cluster: &mut TestCluster) -> Result<()> {
    super::path::quickstart(cluster).await?;
    let question = |extra| {
        let mut body = chat::question("smoke", "What is 17 + 25?", extra);
        body["stream"] = false.into();
        body
    };
    for (extra, status, words) in [
        (serde_json::json!({"chat_template_kwargs": {"anything": [1, {"a": null}]}}), 200, "42"),
        (serde_json::json!({"enable_thinking": false, "reasoning_effort": "low"}), 200, "42"),
        // What the text has to be, in each way of asking.
        (
            serde_json::json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {
                "type": "object", "properties": {"sum": {"type": "integer", "minimum": 10, "maximum": 99}},
                "required": ["sum"], "additionalProperties": false}}}}),
            200,
            "\\\"sum\\\"",
        ),
        (serde_json::json!({"structured_outputs": {"choice": ["41", "42"]}}), 200, "\"content\":\"4"),
        (serde_json::json!({"guided_regex": "Sum: [0-9]{2}"}), 200, "\"content\":\"Sum: "),
        (serde_json::json!({"guided_json": {"not": {}}}), 400, "Unimplemented keys: [\\\"not\\\"]"),
        (serde_json::json!({"logprobs": true, "top_logprobs": 2}), 200, "\"top_logprobs\":[{"),
        (serde_json::json!({"n": 2, "seed": 5, "temperature": 1}), 200, "\"index\":1"),
        (serde_json::json!({"chat_template_kwargs": {"messages": []}}), 400, "cannot set `messages`"),
        (serde_json::json!({"tool_choice": "required", "tools": []}), 400, "`tool_choice`"),
        (
            serde_json::json!({"tools": [{"function": {"name": "f"}}]}),
            400,
            "does not tell the model of tools",
        ),
    ] {
        let sent = chat::client()?.post(format!("{}/chat/completions", cluster.base_url()));
        let response = sent.json(&question(extra.clone())).send().await?;
        let (got, body) = (response.status().as_u16(), response.text().await?);
        ensure!(got == status && body.contains(words), "{extra}: {got} {body}");
    }
    Ok(())
}
