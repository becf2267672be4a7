//! A running `russet serve` and `russet operator`, their resource use, and the number of writes.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Patch, PatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use russet_crds::names;
use russet_operator::leader::LEASE;
use serde_json::json;

use crate::Error;
use crate::stub_agents::StubAgents;

/// Timeout until it is ready.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Without a write for this long, it is quiet.
const QUIET_PERIOD: Duration = Duration::from_secs(5);

/// The operator's identity in leader election.
const IDENTITY: &str = "bench";
/// Number of Prometheus scrapes of the operator before its memory is measured: they cost memory, too.
const SCRAPES: usize = 3;

/// When dropped, both processes are killed.
pub struct BenchControlPlane {
    /// An administrator.
    pub client: Client,
    server: KillOnDrop,
    operator: KillOnDrop,
    metrics: SocketAddr,
    _folder: tempfile::TempDir,
}

struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl KillOnDrop {
    fn start(russet: &Path, arguments: &[&str], log: &Path) -> Result<Self, Error> {
        let mut command = Command::new(russet);
        command.args(arguments).arg("--exit-with-parent").stdin(Stdio::piped()).stdout(Stdio::null());
        Ok(Self(command.stderr(std::fs::File::create(log)?).spawn()?))
    }

    /// Resident memory, in MB.
    fn resident(&self) -> Result<f64, Error> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
        Ok(line.trim().trim_end_matches("kB").trim().parse::<f64>()? * 1024.0 / 1e6)
    }
}

impl BenchControlPlane {
    /// Starts an API server, and a separate operator that takes the Lease from the one beside the API server.
    pub async fn start(russet: &Path) -> Result<Self, Error> {
        let folder = tempfile::tempdir()?;
        let free = || std::net::TcpListener::bind("127.0.0.1:0")?.local_addr();
        let (port, metrics) = (free()?.port().to_string(), free()?);
        let (data, log) = (folder.path().display().to_string(), folder.path().join("serve.log"));
        let server = KillOnDrop::start(russet, &["serve", "--api-port", &port, "--data-dir", &data], &log)?;
        let started = Instant::now();
        let kubeconfig = folder.path().join("kubeconfig");
        while !kubeconfig.exists() {
            if started.elapsed() > START_TIMEOUT {
                return Err(std::fs::read_to_string(log)?.into());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        let client = Client::try_from(config)?;
        let own = folder.path().join("serve/operator/kubeconfig").display().to_string();
        let listen = metrics.to_string();
        let arguments =
            ["operator", "--identity", IDENTITY, "--kubeconfig", &own, "--metrics-listen", &listen];
        let operator = KillOnDrop::start(russet, &arguments, &folder.path().join("operator.log"))?;
        let plane = Self { client, server, operator, metrics, _folder: folder };
        plane.take_leadership().await?;
        Ok(plane)
    }

    /// Writes the benchmark's operator into the Lease until it says that it leads.
    async fn take_leadership(&self) -> Result<(), Error> {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), names::SYSTEM_NAMESPACE);
        let started = Instant::now();
        while !self.metrics_text().is_ok_and(|text| text.contains("russet_approvals")) {
            if started.elapsed() > START_TIMEOUT {
                return Err("the operator of the bench does not come to lead".into());
            }
            let spec = json!({"spec": {"holderIdentity": IDENTITY, "leaseDurationSeconds": 15,
                                       "renewTime": format!("{:.6}", Timestamp::now())}});
            // The Lease exists as soon as the first operator leads.
            let _ = leases.patch(LEASE, &PatchParams::default(), &Patch::Merge(spec)).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        Ok(())
    }

    /// The operator's metrics.
    fn metrics_text(&self) -> Result<String, Error> {
        let mut stream = TcpStream::connect(self.metrics)?;
        stream.set_read_timeout(Some(START_TIMEOUT))?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: operator\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    }

    /// Resident memory of the operator and of the API server, in MB, after the usual metrics scrapes.
    pub fn resident(&self) -> Result<(f64, f64), Error> {
        for _ in 0..SCRAPES {
            self.metrics_text()?;
        }
        Ok((self.operator.resident()?, self.server.resident()?))
    }

    /// Waits until there are no more writes; returns the number of the operator's writes so far.
    pub async fn wait_until_quiet(&self, played: &StubAgents) -> Result<u64, Error> {
        let mut seen = (self.writes(played).await?, Instant::now());
        while seen.1.elapsed() < QUIET_PERIOD {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let now = self.writes(played).await?;
            if now != seen.0 {
                seen = (now, Instant::now());
            }
        }
        Ok(seen.0)
    }

    /// Requested writes, minus those of the benchmark itself, without Leases and events.
    async fn writes(&self, played: &StubAgents) -> Result<u64, Error> {
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
