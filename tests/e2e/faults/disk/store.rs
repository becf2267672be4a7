//! A full disk under the API server's store: writes fail with a message, reads continue, and no acknowledged
//! write is lost, even when the server is killed in that state.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use russet_tests::cluster::{TestCluster, kill};

use super::{DiskServer, MountedDisk, apply, free_port, russet};

/// Bytes of the disk.
const DISK_BYTES: u64 = 64 << 20;
/// Bytes that are left once the ballast is written.
const FREE_BYTES: u64 = 6 << 20;
/// Objects of 100 kB, enough to fill the disk.
const MAX_WRITES: usize = 1_000;

async fn write(kubeconfig: &Path, name: &str) -> Result<()> {
    let padding = "x".repeat(100_000);
    let text = format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}, namespace: default}}\ndata: {{padding: {padding}}}\n"
    );
    apply(kubeconfig, &text).await
}

/// The server's readiness.
async fn readiness(port: u16) -> Result<String> {
    let client = reqwest::Client::builder().no_proxy().danger_accept_invalid_certs(true).build()?;
    Ok(client.get(format!("https://127.0.0.1:{port}/readyz")).send().await?.text().await?)
}

/// The store's disk fills up, is emptied, and the server is killed.
pub async fn store(cluster: &mut TestCluster) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("russet-disk-").tempdir()?;
    let Some(disk) = MountedDisk::mount(folder.path(), DISK_BYTES)? else { return Ok(()) };
    let (port, kubeconfig) = (free_port()?, disk.path().join("kubeconfig"));
    let (api_port, data_dir) = (port.to_string(), folder.path().display().to_string());
    let serve = ["serve", "--api-port", &api_port, "--data-dir", &data_dir];
    let server = DiskServer::start(&disk, &serve, &[])?;
    let answers = async |_: &mut TestCluster| Ok(russet(&kubeconfig, &["get", "configmaps"]).await.is_ok());
    cluster.until("the server on the small disk answers", answers).await?;
    let ballast = disk.fill_but(FREE_BYTES)?;

    let mut acknowledged = Vec::new();
    for number in 0..MAX_WRITES {
        let name = format!("kept-{number}");
        if write(&kubeconfig, &name).await.is_err() {
            break;
        }
        acknowledged.push(name);
    }
    ensure!(
        acknowledged.len() > 2 && acknowledged.len() < MAX_WRITES,
        "{} objects were kept",
        acknowledged.len()
    );
    let text = readiness(port).await?;
    ensure!(text.contains("No space left on device"), "the server does not say what is wrong: {text}");
    all_there(&kubeconfig, &acknowledged).await.context("with the disk full")?;

    // Killed in that state and given space, it restarts with all data and accepts writes.
    kill(server.child.id() as i32);
    drop(server);
    std::fs::remove_file(ballast)?;
    let struck = Instant::now();
    let _server = DiskServer::start(&disk, &serve, &[])?;
    let answers = async |_: &mut TestCluster| Ok(russet(&kubeconfig, &["get", "configmaps"]).await.is_ok());
    cluster.until("the server answers after the kill", answers).await?;
    println!("fault: serve killed on a full disk, API back = {:.2}", struck.elapsed().as_secs_f64());
    all_there(&kubeconfig, &acknowledged).await.context("after the kill")?;
    write(&kubeconfig, "again").await.context("with room again")?;
    all_there(&kubeconfig, &["again".to_owned()]).await
}

async fn all_there(kubeconfig: &Path, acknowledged: &[String]) -> Result<()> {
    let list = russet(kubeconfig, &["get", "configmaps", "-o", "json"]).await?;
    let list: serde_json::Value = serde_json::from_str(&list)?;
    let names: Vec<&str> = list["items"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|item| item["metadata"]["name"].as_str())
        .collect();
    for name in acknowledged {
        ensure!(names.contains(&name.as_str()), "{name} was acknowledged and is not there");
    }
    Ok(())
}
