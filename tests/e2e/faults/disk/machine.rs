//! A full disk under a whole `russet up`, logs included: what answers goes on answering, no process ends, a killed engine
//! comes back once there is room, and so do heartbeats, without a hand.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use russet_tests::SMOKE;
use russet_tests::chat;
use russet_tests::cluster::{TestCluster, WAIT_TIMEOUT, condition, kill};
use russet_tests::control_plane::PlaneProcess;
use russet_tests::control_plane::embedded::child_pid;
use serde_json::Value;

use super::{DiskServer, MountedDisk, apply, free_port, russet};

/// Bytes of the disk: the smoke model, the store, logs and a little.
const DISK_BYTES: u64 = 128 << 20;
/// Requests on the full disk: each writes log lines in several processes.
const REQUESTS: usize = 20;
/// Models may take all but this: by default a reserve of gigabytes is kept.
const SMALL_RESERVE: &str = "apiVersion: russet.dev/v1alpha1\nkind: InferenceNode\nmetadata: {name: small}\nspec: {disk: {reserve: 1Mi}}\n";
const QUESTION: &str = "17 + 25";
/// How long the disk stays full after the engine was killed: every process logs and tries several times.
const FULL_FOR: Duration = Duration::from_secs(8);

async fn get(kubeconfig: &Path, what: &[&str]) -> Result<Value> {
    let arguments = [&["get"], what, &["-o", "json"]].concat();
    Ok(serde_json::from_str(&russet(kubeconfig, &arguments).await?)?)
}

/// Asks the smoke model, which needs no store.
async fn answers(base_url: &str) -> Result<()> {
    let text = chat::answer(base_url, "smoke", QUESTION).await?;
    ensure!(text.contains("42"), "it said \"{text}\"");
    Ok(())
}

/// Everything of one machine on a disk that fills up and is emptied.
pub async fn machine(cluster: &mut TestCluster) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("russet-disk-").tempdir()?;
    let Some(disk) = MountedDisk::mount(folder.path(), DISK_BYTES)? else { return Ok(()) };
    let (port, gateway_port) = (free_port()?, free_port()?);
    let [api, gateway] = [port, gateway_port].map(|port| port.to_string());
    let data_dir = folder.path().display().to_string();
    let up = [
        "up",
        "--api-port",
        &api,
        "--gateway-port",
        &gateway,
        "--data-dir",
        &data_dir,
        "--node-name",
        "small",
    ];
    let server = DiskServer::start(&disk, &up, &[])?;
    let (kubeconfig, base_url) =
        (disk.path().join("kubeconfig"), format!("http://127.0.0.1:{gateway_port}/v1"));
    let objects = format!("{SMALL_RESERVE}---\n{SMOKE}");
    cluster
        .until("the machine takes a model", async |_| Ok(apply(&kubeconfig, &objects).await.is_ok()))
        .await?;
    cluster.until("it answers", async |_| Ok(answers(&base_url).await.is_ok())).await?;
    let processes = || -> Result<Vec<i32>> {
        let roles = [PlaneProcess::Serve, PlaneProcess::Gateway, PlaneProcess::Agent];
        roles.iter().map(|role| child_pid(server.child.id(), *role)).collect()
    };
    let before = processes()?;
    let engine = async || -> Result<Option<i32>> {
        let shards = get(&kubeconfig, &["shards"]).await?;
        Ok(shards["items"][0]["status"]["enginePid"].as_i64().map(|pid| pid as i32))
    };
    let first = engine().await?.context("no engine runs")?;

    let ballast = disk.fill_but(0)?;
    for number in 0..REQUESTS {
        answers(&base_url).await.with_context(|| format!("request {number} on the full disk"))?;
    }
    kill(first);
    // Nothing can be recorded now, so no new engine is placed. What the processes log of it goes nowhere, and ends none
    // of them. A request waits.
    let url = base_url.clone();
    let waiting = tokio::spawn(async move { answers(&url).await });
    tokio::time::sleep(FULL_FOR).await;
    ensure!(processes()? == before, "of serve, gateway and agent {before:?} there are {:?}", processes()?);
    std::fs::remove_file(ballast)?;
    let back = Instant::now();
    tokio::time::timeout(WAIT_TIMEOUT, waiting)
        .await
        .context("the request that waited got no answer")???;
    println!(
        "fault: disk of a machine with room again, it answers = {:.2} of 60",
        back.elapsed().as_secs_f64()
    );
    cluster
        .until("the node is Ready, and says its new engine", async |_| {
            let node = get(&kubeconfig, &["inferencenodes", "small"]).await?;
            let is_ready = condition(&node, "Ready").is_some_and(|ready| ready["status"] == "True");
            Ok(is_ready && engine().await?.is_some_and(|pid| pid != first))
        })
        .await?;
    ensure!(processes()? == before, "of serve, gateway and agent {before:?} there are {:?}", processes()?);
    Ok(())
}
