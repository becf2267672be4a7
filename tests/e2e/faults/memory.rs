//! Whether memory was given twice: what the living engines of each machine may use, added up from the
//! records their agents keep, against what the machine's owner gives.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use russet_tests::cluster::Cluster;
use russet_tests::processes::processes;
use serde_json::Value;

/// Every living engine is on record, and each machine's engines together stay within its limit.
pub async fn is_given_once(cluster: &mut Cluster) -> Result<()> {
    let machines = [("node-a", cluster.near_dir()), ("node-b", cluster.far_dir())];
    for (node, folder) in machines {
        // An engine that is being ended may take a moment to be gone.
        let mut strays = Vec::new();
        let settled = cluster
            .until("every engine is on record", async |_| {
                let recorded = recorded(&folder);
                strays = engines(&folder).into_iter().filter(|pid| !recorded.contains_key(pid)).collect();
                Ok(strays.is_empty())
            })
            .await;
        settled.with_context(|| format!("engines {strays:?} of {node} use memory nobody granted"))?;
        let recorded = recorded(&folder);
        let used: u64 = engines(&folder).iter().filter_map(|pid| recorded.get(pid)).sum();
        let memory = cluster.get(&format!("inferencenodes {node}")).await?["status"]["memory"].clone();
        let limit = memory["servingLimitBytes"].as_u64().context("a node without a limit")?;
        ensure!(used <= limit, "engines of {node} were given {used} of {limit} bytes: {recorded:?}");
        let granted = memory["grantedBytes"].as_u64().context("a node without a sum of grants")?;
        ensure!(granted <= limit, "{node} says that {granted} of {limit} bytes are granted");
    }
    Ok(())
}

/// Bytes granted by the pid of the engine they were granted to.
fn recorded(folder: &Path) -> BTreeMap<i32, u64> {
    let folders = std::fs::read_dir(folder.join("agent/engines")).into_iter().flatten().flatten();
    folders
        .filter_map(|entry| {
            let text = std::fs::read(entry.path().join("state.json")).ok()?;
            let record: Value = serde_json::from_slice(&text).ok()?;
            Some((record["process"]["pid"].as_i64()? as i32, record["reserved"].as_u64()?))
        })
        .collect()
}

/// Engines that run out of that data directory.
fn engines(folder: &Path) -> Vec<i32> {
    let folder = folder.display().to_string();
    let ours = |arguments: &[String]| {
        arguments.first().is_some_and(|program| program.ends_with("russet-engine"))
            && arguments.iter().any(|word| word.contains(&folder))
    };
    processes().into_iter().filter(|process| ours(&process.arguments)).map(|process| process.pid).collect()
}
