//! An agent dies in the middle of a copy: its successor resumes the transfer.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, ensure};
use russet_tests::chat;
use russet_tests::cluster::{TestCluster, kill};
use russet_tests::control_plane::PlaneProcess;

use super::{check_invariants, kill_role, until_replaced};
use crate::{mistakes, path};

/// The hub's name of a model that only this scenario copies.
pub const MODEL: &str = "russet/held";
/// Bytes on disk at the fault: more than the buffer that is lost with the agent.
pub const MIN_WRITTEN_BYTES: u64 = 1 << 20;

/// That model, served by one rank.
pub fn manifest() -> String {
    format!(
        "apiVersion: russet.dev/v1alpha1\nkind: Model\nmetadata: {{name: held}}\n\
         spec: {{source: {{uri: 'hf://{MODEL}'}}}}\n---\n\
         apiVersion: russet.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: held}}\n\
         spec: {{modelRef: {{name: held}}, sharding: {{mode: Single, kv: {{contextTokens: 256, maxSequences: 1}}}}}}\n"
    )
}

/// Kill -9 of the agent that copies, with half a file present.
pub async fn killed(cluster: &mut TestCluster) -> Result<()> {
    let outcome = kill_and_check(cluster).await;
    // Whatever happened, the next scenario must find none of it.
    let _ = path::delete_object(cluster, "modeldeployments/held").await;
    let _ = path::delete_object(cluster, "models/held").await;
    outcome?;
    let stores = stores(cluster);
    cluster
        .until("ranks and files nobody wants are gone", async |cluster| {
            let shards = cluster.get("shards").await?["items"].as_array().map_or(0, Vec::len);
            Ok(shards == 2 && stores.iter().all(|store| !holds(store, MODEL)))
        })
        .await?;
    check_invariants(cluster).await
}

async fn kill_and_check(cluster: &mut TestCluster) -> Result<()> {
    path::quickstart(cluster).await?;
    let held = cluster.hub.hold_transfers();
    let (struck, written) = kill_during_copy(cluster).await?;
    drop(held);
    path::serves(cluster, "held").await?;
    println!("fault: agent killed in a copy, model answers = {:.2} of 30", struck.elapsed().as_secs_f64());
    let offsets = cluster.hub.hold_offsets();
    ensure!(
        offsets.len() > 1 && offsets[1..].iter().all(|start| *start as u64 >= written),
        "{written} bytes were there, and transfers began at {offsets:?}"
    );
    let answer = chat::answer(&cluster.base_url(), "held", "What is 17 + 25?").await?;
    ensure!(answer.contains("42"), "17 + 25 is not \"{answer}\"");
    Ok(())
}

/// Starts the copy and kills its agent; returns when, and the bytes on disk then.
async fn kill_during_copy(cluster: &mut TestCluster) -> Result<(Instant, u64)> {
    mistakes::apply(cluster, &manifest()).await?;
    let stores = stores(cluster);
    let (mut at, mut written) = (0, 0);
    cluster
        .until("half of the model is there", async |_| {
            let parts = stores.iter().map(|store| part(store)).enumerate();
            (at, written) = parts.max_by_key(|(_, bytes)| *bytes).unwrap_or_default();
            Ok(written >= MIN_WRITTEN_BYTES)
        })
        .await?;
    let struck = Instant::now();
    if at == 0 {
        let killed = kill_role(cluster, PlaneProcess::Agent)?;
        until_replaced(cluster, PlaneProcess::Agent, &killed).await?;
    } else {
        kill(cluster.far_agent()?);
        cluster.restart_far_agent().await?;
    }
    Ok((struck, written))
}

fn stores(cluster: &TestCluster) -> [PathBuf; 2] {
    [cluster.near_dir(), cluster.far_dir()].map(|folder| folder.join("agent/models"))
}

/// Bytes of the largest unfinished file below the folder.
pub fn part(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| {
        let path = entry.path();
        match path.extension().is_some_and(|extension| extension == "part") {
            true => entry.metadata().map_or(0, |metadata| metadata.len()),
            false => part(&path),
        }
    });
    sizes.max().unwrap_or(0)
}

/// Whether a published model in the store came from that source.
fn holds(store: &Path, model: &str) -> bool {
    let mut folders = std::fs::read_dir(store).into_iter().flatten().flatten();
    folders.any(|entry| {
        let manifest = std::fs::read_to_string(entry.path().join("MANIFEST.json"));
        manifest.is_ok_and(|text| text.contains(model))
    })
}
