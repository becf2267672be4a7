//! Search of the Hugging Face hub. Results are shown as the hub reports them: whether a model runs is certain
//! only once an agent has read its headers.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use reqwest::Url;
use russet_model::families;
use serde::Deserialize;

use crate::get::format_table;

/// The default hub; agents read mirrors from the same variable.
const ENDPOINT: &str = "https://huggingface.co";
/// Timeout of a search: a person waits for it.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of results.
const MAX_RESULTS: usize = 20;
/// Maximum characters of a repository name, so that the table fits 100 columns.
const MAX_REPOSITORY_WIDTH: usize = 56;

/// A repository as the hub's API describes it.
#[derive(Debug, Deserialize)]
struct HubModel {
    id: String,
    #[serde(default)]
    downloads: u64,
    #[serde(default)]
    likes: u64,
    #[serde(default)]
    tags: Vec<String>,
}

/// The search results as a table.
pub async fn search(words: &[String]) -> Result<String> {
    let endpoint = std::env::var("HF_ENDPOINT").unwrap_or_else(|_| ENDPOINT.to_owned());
    let url = query(&endpoint, words)?;
    let client = reqwest::Client::builder()
        .user_agent(concat!("russet/", env!("CARGO_PKG_VERSION")))
        .timeout(SEARCH_TIMEOUT)
        .build()
        .context("cannot set up an HTTP client")?;
    let response = client.get(url.clone()).send().await.with_context(|| {
        format!(
            "the hub {endpoint} cannot be reached; leave --hub out for the list that comes with russet, or name a \
             mirror in HF_ENDPOINT"
        )
    })?;
    let status = response.status();
    if !status.is_success() {
        bail!(
            "the hub {endpoint} answers {status} to a search; try again later, or name a mirror in HF_ENDPOINT"
        );
    }
    let found: Vec<HubModel> = response
        .json()
        .await
        .with_context(|| format!("what {endpoint} answers is not what a hub answers"))?;
    if found.is_empty() {
        bail!("the hub {endpoint} finds nothing for \"{}\"; use fewer words", words.join(" "));
    }
    Ok(table(&found))
}

fn query(endpoint: &str, words: &[String]) -> Result<Url> {
    let wrong = || format!("HF_ENDPOINT is {endpoint}; it must be a URL such as {ENDPOINT}");
    let mut url = Url::parse(endpoint).with_context(wrong)?;
    url.path_segments_mut().ok().with_context(wrong)?.pop_if_empty().extend(["api", "models"]);
    url.query_pairs_mut()
        .append_pair("search", &words.join(" "))
        .append_pair("limit", &MAX_RESULTS.to_string());
    Ok(url)
}

fn table(found: &[HubModel]) -> String {
    let mut lines = vec![["REPOSITORY", "DOWNLOADS", "LIKES", "RUNS"].map(str::to_owned).to_vec()];
    lines.extend(found.iter().map(|one| {
        // Untrusted text for a terminal.
        let id: String =
            one.id.chars().filter(|letter| letter.is_ascii_graphic()).take(MAX_REPOSITORY_WIDTH).collect();
        vec![id, one.downloads.to_string(), one.likes.to_string(), support_hint(&one.tags).to_owned()]
    }));
    format!("{}RUNS is what the hub's tags let expect. russet run hf://OWNER/NAME\n", format_table(&lines))
}

/// Support as far as tags tell: they name the architecture, and formats that our engines cannot read.
fn support_hint(tags: &[String]) -> &'static str {
    let has = |word: &str| tags.iter().any(|tag| tag == word);
    let known = families::model_types().any(has);
    match known && !["gguf", "gptq", "awq", "onnx", "exl2"].into_iter().any(has) {
        true => "perhaps",
        false => "no",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_become_one_query_of_the_hub_or_its_mirror() {
        let words = ["qwen3 8b".to_owned(), "mlx&x".to_owned()];
        for (endpoint, expected) in [
            ("https://huggingface.co", "https://huggingface.co/api/models?search=qwen3+8b+mlx%26x&limit=20"),
            ("http://10.0.0.1:80/hub/", "http://10.0.0.1/hub/api/models?search=qwen3+8b+mlx%26x&limit=20"),
        ] {
            assert_eq!(query(endpoint, &words).unwrap().as_str(), expected);
        }
        assert!(
            format!("{:#}", query("huggingface.co", &words).unwrap_err())
                .contains("HF_ENDPOINT is huggingface.co")
        );
    }

    #[test]
    fn hub_results_are_shown_without_control_characters() {
        let answer = r#"[
            {"id": "mlx-community/Qwen3-8B-4bit", "downloads": 12, "likes": 3, "tags": ["mlx", "qwen3"], "private": false},
            {"id": "a/b\u001b[2J", "tags": ["llama", "gguf"]},
            {"id": "c/d", "tags": ["clip"]}]"#;
        let found: Vec<HubModel> = serde_json::from_str(answer).unwrap();
        assert_eq!(
            table(&found),
            "\
REPOSITORY                    DOWNLOADS   LIKES   RUNS
mlx-community/Qwen3-8B-4bit   12          3       perhaps
a/b[2J                        0           0       no
c/d                           0           0       no
RUNS is what the hub's tags let expect. russet run hf://OWNER/NAME
"
        );
    }
}
