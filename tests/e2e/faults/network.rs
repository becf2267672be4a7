//! The cable between the two machines is pulled in the middle of a stream and put back.

use std::time::Instant;

use anyhow::{Result, ensure};
use russet_tests::ask::End;
use russet_tests::cluster::Cluster;

use super::{TOKENS, answers_again, expected, memory_is_given_once, still_right};
use crate::path;

/// Agent, engine and every connection of the far machine are cut off at once.
pub async fn cable(cluster: &mut Cluster) -> Result<()> {
    if let Some(why) = &cluster.lab.fallback {
        println!("  skipped: there is no cable to pull, because {why}");
        return Ok(());
    }
    let undisturbed = expected(cluster).await?;
    let mut answer = path::endless(cluster, TOKENS).await?;
    let cut = cluster.lab.cut()?;
    let struck = Instant::now();
    let end = answer.finish().await;
    println!("fault: cable pulled, stream ended = {:.2} of 20", struck.elapsed().as_secs_f64());
    ensure!(
        matches!(&end, End::Failed(code) if !code.is_empty()),
        "a pulled cable ended the stream with {end:?}"
    );
    ensure!(undisturbed.starts_with(&answer.text), "wrong tokens before the error:\n{}", answer.text);
    drop(cut);
    let back = Instant::now();
    answers_again(cluster).await?;
    println!("fault: cable back, group answers again = {:.2} of 30", back.elapsed().as_secs_f64());
    path::ready(cluster).await?;
    memory_is_given_once(cluster).await?;
    still_right(cluster).await
}
