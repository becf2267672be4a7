//! A full disk under a model's copy: nothing is placed where its files cannot fit, the shortage is reported
//! with the numbers, the API server and running groups are not disturbed, and the copy resumes when there is
//! space.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use russet_tests::chat;
use russet_tests::cluster::{TestCluster, condition};

use super::{DiskServer, MountedDisk, apply, free_port, russet};
use crate::faults::copies;

/// The reserve of an agent on a disk as small as this one.
const RESERVE_BYTES: u64 = 1 << 30;
/// Bytes of the disk: the reserve, and space for some small models.
const DISK_BYTES: u64 = RESERVE_BYTES + (64 << 20);

/// Too little space before the copy starts, then none in the middle of it, then enough.
pub async fn copy(cluster: &mut TestCluster) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("russet-disk-").tempdir()?;
    // Only the agent's files: the API server must be able to report the problem.
    let models = folder.path().join("agent/models");
    std::fs::create_dir_all(&models)?;
    let Some(disk) = MountedDisk::mount(&models, DISK_BYTES)? else { return Ok(()) };
    let (api_port, gateway_port) = (free_port()?.to_string(), free_port()?.to_string());
    let (data_dir, hub) = (folder.path().display().to_string(), cluster.hub.endpoint());
    let up = ["up", "--data-dir", &data_dir, "--api-port", &api_port, "--gateway-port", &gateway_port];
    let _up = DiskServer::start(&disk, &up, &[("HF_ENDPOINT", &hub)])?;
    let kubeconfig = folder.path().join("kubeconfig");
    until_ready(cluster, &kubeconfig, "inferencenodes").await?;

    let ballast = disk.fill_but(RESERVE_BYTES)?;
    cluster
        .until("the node says that models may take nothing", async |_| {
            let list = russet(&kubeconfig, &["get", "inferencenodes", "-o", "json"]).await?;
            let list: serde_json::Value = serde_json::from_str(&list)?;
            Ok(list["items"][0]["status"]["disk"]["modelsLimitBytes"] == 0)
        })
        .await?;
    apply(&kubeconfig, &copies::manifest()).await?;
    let lack =
        ["the model's files do not come to node", "more are needed", "lower the node's spec.disk.reserve"];
    until_says(cluster, &kubeconfig, "modeldeployments", &lack).await?;
    ensure!(copies::part(&disk.path()) == 0, "files are fetched for which there is no room");

    let held = cluster.hub.hold_transfers();
    fill_in_copy(cluster, &disk, &ballast).await?;
    drop(held);
    until_says(cluster, &kubeconfig, "modelcopies", &["DiskPressure", " has 0 B free"]).await?;
    // The model's own disk is full, and everything else works.
    russet(&kubeconfig, &["get", "modeldeployments"]).await?;

    std::fs::remove_file(&ballast)?;
    let freed = Instant::now();
    until_ready(cluster, &kubeconfig, "modeldeployments").await?;
    println!(
        "fault: disk full under a copy and freed, model is ready = {:.2} of 60",
        freed.elapsed().as_secs_f64()
    );
    let base = format!("http://127.0.0.1:{gateway_port}/v1");
    let answer = chat::answer(&base, "held", "What is 17 + 25?").await?;
    ensure!(answer.contains("42"), "17 + 25 is not \"{answer}\"");
    Ok(())
}

/// Frees space, waits until half of the file is present and takes all space away.
async fn fill_in_copy(cluster: &mut TestCluster, disk: &MountedDisk, ballast: &Path) -> Result<()> {
    std::fs::remove_file(ballast)?;
    let store = disk.path();
    let mut before = 0;
    cluster
        .until("half of the model is there, and no more comes", async |_| {
            let now = copies::part(&store);
            let still = now >= copies::MIN_WRITTEN_BYTES && now == before;
            before = now;
            Ok(still)
        })
        .await?;
    disk.fill_but(0).map(|_| ())
}

async fn until_ready(cluster: &mut TestCluster, kubeconfig: &Path, kind: &str) -> Result<()> {
    cluster
        .until("the small cluster is ready", async |_| {
            let Ok(list) = russet(kubeconfig, &["get", kind, "-o", "json"]).await else { return Ok(false) };
            let list: serde_json::Value = serde_json::from_str(&list)?;
            let ready = condition(&list["items"][0], "Ready").is_some_and(|ready| ready["status"] == "True");
            Ok(ready)
        })
        .await
}

/// Waits until the conditions of the only object of a kind mention every word.
async fn until_says(cluster: &mut TestCluster, kubeconfig: &Path, kind: &str, words: &[&str]) -> Result<()> {
    let mut last = String::new();
    let said = cluster
        .until("it says so", async |_| {
            let Ok(list) = russet(kubeconfig, &["get", kind, "-o", "json"]).await else {
                return Ok(false);
            };
            let list: serde_json::Value = serde_json::from_str(&list)?;
            last = list["items"][0]["status"]["conditions"].to_string();
            Ok(words.iter().all(|word| last.contains(word)))
        })
        .await;
    said.with_context(|| format!("{kind} say {last}, not {words:?}"))
}
