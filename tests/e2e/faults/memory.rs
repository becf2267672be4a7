//! Whether memory was granted twice: the grants of each machine's running engines, summed from their agents'
//! records, against the owner's limit.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use russet_tests::cluster::TestCluster;
use russet_tests::processes::processes;
use serde_json::Value;

/// Every Shard has one running engine and every engine is recorded; each machine's grants add up to what its
/// agent reports, and stay within its limit.
pub async fn is_granted_once(cluster: &mut TestCluster) -> Result<()> {
    let mut living = 0;
    for (node, folder) in [("node-a", cluster.near_dir()), ("node-b", cluster.far_dir())] {
        let (mut last, mut running) = (String::new(), 0);
        let settled = cluster
            .until("engines, records and grants agree", async |cluster| {
                // An engine that is being stopped may take a moment to exit, and a sum to be reported.
                let (records, engines) = (records(&folder), engines(&folder));
                let memory = &cluster.get(&format!("inferencenodes {node}")).await?["status"]["memory"];
                let sum: u64 = records.iter().map(|(_, bytes)| bytes).sum();
                last = format!("engines {engines:?}, records {records:?} of {sum} bytes, reported {memory}");
                running = engines.len();
                let pids: Vec<i32> = records.iter().filter_map(|(pid, _)| *pid).collect();
                let limit = memory["servingLimitBytes"].as_u64();
                Ok(engines.iter().all(|engine| pids.contains(engine))
                    && memory["grantedBytes"].as_u64() == Some(sum)
                    && limit.is_some_and(|limit| sum <= limit))
            })
            .await;
        settled.with_context(|| format!("{node}: {last}"))?;
        living += running;
    }
    let shards = cluster.get("shards").await?["items"].as_array().map_or(0, Vec::len);
    ensure!(living == shards && living > 0, "{living} engines run for {shards} Shards");
    Ok(())
}

/// Engine and bytes of every recorded grant.
fn records(folder: &Path) -> Vec<(Option<i32>, u64)> {
    let folders = std::fs::read_dir(folder.join("agent/engines")).into_iter().flatten().flatten();
    folders
        .filter_map(|entry| {
            let text = std::fs::read(entry.path().join("state.json")).ok()?;
            let record: Value = serde_json::from_slice(&text).ok()?;
            Some((record["process"]["pid"].as_i64().map(|pid| pid as i32), record["reserved"].as_u64()?))
        })
        .collect()
}

/// Engines that run from that data directory.
fn engines(folder: &Path) -> Vec<i32> {
    let folder = folder.display().to_string();
    let ours = |arguments: &[String]| {
        arguments.first().is_some_and(|program| program.ends_with("russet-engine"))
            && arguments.iter().any(|word| word.contains(&folder))
    };
    processes().into_iter().filter(|process| ours(&process.arguments)).map(|process| process.pid).collect()
}
