//! A spec is edited in the middle of a stream: what runs ends right or typed, the new plan takes over.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use russet_tests::ask::End;
use russet_tests::cluster::{Cluster, condition};

use super::{TOKENS, answers_again, expected, sound};
use crate::path;

/// The context grows by a little or shrinks back, which is another plan every time.
pub async fn edit(cluster: &mut Cluster) -> Result<()> {
    let undisturbed = expected(cluster).await?;
    let before = cluster.get("modeldeployments smoke").await?;
    let context = before["spec"]["sharding"]["kv"]["contextTokens"].as_u64().context("no context")?;
    let wanted = if context == 1024 { 1088 } else { 1024 };
    let mut answer = path::endless(cluster, TOKENS).await?;
    let edited = format!(
        "apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: smoke}}\nspec:\n  \
         modelRef: {{name: smoke}}\n  sharding:\n    mode: Pipeline\n    ranks: 2\n    \
         kv: {{contextTokens: {wanted}, maxSequences: 4}}\n"
    );
    crate::mistakes::apply(cluster, &edited).await?;
    let struck = Instant::now();
    match answer.finish().await {
        End::Finished(_) => ensure!(answer.text == undisturbed, "the text changed:\n{}", answer.text),
        End::Failed(code) => {
            ensure!(!code.is_empty(), "an error without a code");
            ensure!(undisturbed.starts_with(&answer.text), "wrong tokens before the error:\n{}", answer.text);
        }
        End::Broken => bail!("the stream just ended"),
    }
    cluster
        .until("the edited plan serves", async |cluster| {
            let now = cluster.get("modeldeployments smoke").await?;
            let seen = now["status"]["observedGeneration"] == now["metadata"]["generation"];
            let groups = cluster.get("shardgroups").await?;
            let groups = groups["items"].as_array().map_or(0, Vec::len);
            let ready = condition(&now, "Ready").is_some_and(|ready| ready["status"] == "True");
            Ok(seen && ready && groups == 1)
        })
        .await?;
    answers_again(cluster).await?;
    println!("fault: spec edited, new plan answers = {:.2} of 60", struck.elapsed().as_secs_f64());
    sound(cluster).await
}
