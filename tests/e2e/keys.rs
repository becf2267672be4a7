//! API keys of the gateway: from the first one on requests without a key are rejected, and loopback is open
//! again only after the last AccessKey is deleted.

use anyhow::{Result, ensure};
use russet_tests::chat;
use russet_tests::cluster::TestCluster;
use serde_json::json;

/// Status of a request with this key, and the error's `code`.
async fn status(cluster: &TestCluster, key: Option<&str>) -> Result<(u16, String)> {
    let body = chat::question("smoke", "What is 17 + 25?", json!({"stream": false, "max_tokens": 20}));
    let request = chat::client()?.post(format!("{}/chat/completions", cluster.base_url())).json(&body);
    let request = match key {
        Some(key) => request.bearer_auth(key),
        None => request,
    };
    let response = request.send().await?;
    let status = response.status().as_u16();
    let answer: serde_json::Value = response.json().await?;
    Ok((status, answer["error"]["code"].as_str().unwrap_or_default().to_owned()))
}

async fn until(cluster: &mut TestCluster, what: &str, key: Option<&str>, expected: u16) -> Result<()> {
    cluster.until(what, async |cluster| Ok(status(cluster, key).await?.0 == expected)).await
}

/// Create, use, exhaust, revoke, delete.
pub async fn keys(cluster: &mut TestCluster) -> Result<()> {
    crate::path::quickstart(cluster).await?;
    ensure!(status(cluster, None).await?.0 == 200, "loopback is open before there is a key");
    let key = cluster.russet(&["key", "create", "one"]).await?.trim().to_owned();
    let tried = used(cluster, &key).await;
    // Later scenarios send no key, whatever became of this one.
    for name in ["one", "few"] {
        let _ = cluster.russet(&["delete", &format!("accesskey/{name}")]).await;
    }
    tried?;
    until(cluster, "loopback is open again without keys", None, 200).await
}

async fn used(cluster: &mut TestCluster, key: &str) -> Result<()> {
    until(cluster, "nobody is answered without a key", None, 401).await?;
    let wrong = status(cluster, Some("sk-russet-wrong")).await?;
    ensure!(wrong == (401, "invalid_api_key".into()), "a wrong key got {wrong:?}");
    let right = status(cluster, Some(key)).await?;
    ensure!(right.0 == 200, "the key got {right:?}");
    let few = cluster.russet(&["key", "create", "few", "--requests-per-minute", "1"]).await?;
    let few = few.trim();
    until(cluster, "the new key is taken", Some(few), 200).await?;
    let over = status(cluster, Some(few)).await?;
    ensure!(over == (429, "rate_limit_exceeded".into()), "a second request in a minute got {over:?}");
    cluster
        .until("the gateway says of the key that it takes it and used it", async |cluster| {
            let key = cluster.get("accesskeys one").await?;
            let ready = key["status"]["conditions"][0]["status"] == "True";
            Ok(ready && key["status"]["lastUsed"].is_string())
        })
        .await?;
    cluster.russet(&["key", "revoke", "one"]).await?;
    until(cluster, "a revoked key is refused", Some(key), 401).await?;
    let keyless = status(cluster, None).await?;
    ensure!(keyless.0 == 401, "revoking must open nothing, but a request without a key got {keyless:?}");
    Ok(())
}
