//! A running `russet serve`, what it takes, and what is written to it.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::Error;
use crate::played::Agents;

/// What never becomes ready is broken.
const PATIENCE: Duration = Duration::from_secs(120);
/// Without a write for so long, all is at rest.
const REST: Duration = Duration::from_secs(5);

/// Dropped, it is killed.
pub struct Plane {
    /// An administrator.
    pub client: Client,
    process: Child,
    _folder: tempfile::TempDir,
}

impl Drop for Plane {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Plane {
    /// Starts it and waits until its administrator can speak to it.
    pub async fn start(russet: &Path) -> Result<Self, Error> {
        let folder = tempfile::tempdir()?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let process = Command::new(russet)
            .args(["serve", "--exit-with-parent", "--api-port", &port.to_string(), "--data-dir"])
            .arg(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(folder.path().join("log"))?)
            .spawn()?;
        let begun = Instant::now();
        let kubeconfig = folder.path().join("kubeconfig");
        while !kubeconfig.exists() {
            if begun.elapsed() > PATIENCE {
                return Err(std::fs::read_to_string(folder.path().join("log"))?.into());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        Ok(Self { client: Client::try_from(config)?, process, _folder: folder })
    }

    /// Resident memory, in MB.
    pub fn resident(&self) -> Result<f64, Error> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
        Ok(line.trim().trim_end_matches("kB").trim().parse::<f64>()? * 1024.0 / 1e6)
    }

    /// Waits until nobody writes any more; answers with how much the operator has written so far.
    pub async fn rest(&self, played: &Agents) -> Result<u64, Error> {
        let mut seen = (self.writes(played).await?, Instant::now());
        while seen.1.elapsed() < REST {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let now = self.writes(played).await?;
            if now != seen.0 {
                seen = (now, Instant::now());
            }
        }
        Ok(seen.0)
    }

    /// Writes that were asked for, less those of the bench itself; Leases and events left out.
    async fn writes(&self, played: &Agents) -> Result<u64, Error> {
        let request = http::Request::get("/metrics").body(Vec::new())?;
        let text = self.client.request_text(request).await?;
        let lines = text.lines().filter_map(|line| line.strip_prefix("apiserver_request_total{"));
        let counted = lines.filter_map(|line| {
            let (labels, count) = line.split_once("} ")?;
            let writes = ["create", "update", "patch", "delete"];
            let write = writes.iter().any(|verb| labels.contains(&format!("verb=\"{verb}\"")));
            let beside = ["leases", "events"];
            let beside = beside.iter().any(|kind| labels.contains(&format!("resource=\"{kind}\"")));
            (write && !beside).then(|| count.parse::<f64>().ok()).flatten()
        });
        let all: f64 = counted.sum();
        Ok((all as u64).saturating_sub(played.written()))
    }
}
