//! The two control planes, started as users start them, on loopback.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::Error;

/// A control plane that is not ready within this time is broken.
const READY_TIMEOUT: Duration = Duration::from_secs(120);

/// A running control plane; its processes are killed on drop.
pub struct RunningPlane {
    /// The administrator's client.
    pub client: Client,
    /// Seconds from the start of the first process until `/readyz` said ok.
    pub ready: f64,
    processes: Vec<Child>,
    _folder: tempfile::TempDir,
}

/// `russet serve`: API server and operator in one process, objects in a file.
pub struct RussetPlane(pub RunningPlane);

/// kube-apiserver, etcd and kube-controller-manager.
pub struct KubernetesPlane(pub RunningPlane);

impl Drop for RunningPlane {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl RunningPlane {
    /// Resident memory of all processes, in MB.
    pub fn resident(&self) -> Result<f64, Error> {
        let mut sum = 0.0;
        for process in &self.processes {
            let status = std::fs::read_to_string(format!("/proc/{}/status", process.id()))?;
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
            sum += line.trim().trim_end_matches("kB").trim().parse::<f64>()? * 1024.0 / 1e6;
        }
        Ok(sum)
    }
}

impl RussetPlane {
    /// Starts it and waits until it is ready.
    pub async fn start(russet: &Path) -> Result<Self, Error> {
        let folder = tempfile::tempdir()?;
        let [port] = free_ports()?;
        let started = Instant::now();
        let serve = Command::new(russet)
            .args(["serve", "--exit-with-parent", "--api-port", &port.to_string(), "--data-dir"])
            .arg(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(folder.path().join("log"))?)
            .spawn()?;
        let mut processes = vec![serve];
        let ready = ready(port, started, &mut processes).await?;
        let kubeconfig = folder.path().join("kubeconfig");
        while !kubeconfig.exists() && started.elapsed() < READY_TIMEOUT {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let client = client(Kubeconfig::read_from(kubeconfig)?).await?;
        Ok(Self(RunningPlane { client, ready, processes, _folder: folder }))
    }
}

impl KubernetesPlane {
    /// Starts all three and waits until the API server is ready.
    pub async fn start(etcd: &Path, apiserver: &Path, manager: &Path) -> Result<Self, Error> {
        let folder = tempfile::tempdir()?;
        let file = |name: &str| folder.path().join(name);
        let [port, client_port, peer_port] = free_ports()?;
        std::fs::write(file("tokens.csv"), "bench-token,admin,admin,system:masters\n")?;
        let accounts = rcgen::KeyPair::generate()?;
        std::fs::write(file("accounts.key"), accounts.serialize_pem())?;
        std::fs::write(file("accounts.pub"), accounts.public_key_pem())?;
        std::fs::write(file("kubeconfig"), kubeconfig(port))?;
        let start = |name: &str, program: &Path, arguments: &[String]| -> Result<Child, Error> {
            let log = std::fs::File::create(file(&format!("{name}.log")))?;
            Ok(Command::new(program)
                .args(arguments)
                .stdin(Stdio::null())
                .stdout(log.try_clone()?)
                .stderr(log)
                .spawn()?)
        };
        let (client_url, peer_url) =
            (format!("http://127.0.0.1:{client_port}"), format!("http://127.0.0.1:{peer_port}"));
        let path = |name: &str| file(name).display().to_string();
        let started = Instant::now();
        let etcd = start(
            "etcd",
            etcd,
            &[
                format!("--data-dir={}", path("etcd")),
                format!("--listen-client-urls={client_url}"),
                format!("--advertise-client-urls={client_url}"),
                format!("--listen-peer-urls={peer_url}"),
                format!("--initial-advertise-peer-urls={peer_url}"),
                format!("--initial-cluster=default={peer_url}"),
                "--log-level=warn".into(),
            ],
        )?;
        let mut processes = vec![etcd];
        processes.push(start(
            "kube-apiserver",
            apiserver,
            &[
                format!("--etcd-servers={client_url}"),
                "--bind-address=127.0.0.1".into(),
                format!("--secure-port={port}"),
                format!("--cert-dir={}", path("certificates")),
                format!("--service-account-key-file={}", path("accounts.pub")),
                format!("--service-account-signing-key-file={}", path("accounts.key")),
                "--service-account-issuer=https://kubernetes.default.svc".into(),
                "--service-cluster-ip-range=10.0.0.0/24".into(),
                "--authorization-mode=RBAC".into(),
                format!("--token-auth-file={}", path("tokens.csv")),
                "--endpoint-reconciler-type=none".into(),
            ],
        )?);
        processes.push(start(
            "kube-controller-manager",
            manager,
            &[
                format!("--kubeconfig={}", path("kubeconfig")),
                format!("--service-account-private-key-file={}", path("accounts.key")),
                "--use-service-account-credentials=true".into(),
                "--leader-elect=false".into(),
                "--secure-port=0".into(),
            ],
        )?);
        let ready = ready(port, started, &mut processes).await?;
        let client = client(Kubeconfig::read_from(file("kubeconfig"))?).await?;
        Ok(Self(RunningPlane { client, ready, processes, _folder: folder }))
    }
}

fn kubeconfig(port: u16) -> String {
    format!(
        "apiVersion: v1
kind: Config
clusters:
- name: bench
  cluster: {{server: \"https://127.0.0.1:{port}\", insecure-skip-tls-verify: true}}
users:
- name: admin
  user: {{token: bench-token}}
contexts:
- name: bench
  context: {{cluster: bench, user: admin}}
current-context: bench
"
    )
}

async fn client(kubeconfig: Kubeconfig) -> Result<Client, Error> {
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

/// Seconds until `/readyz` returns ok for an anonymous client.
async fn ready(port: u16, started: Instant, processes: &mut [Child]) -> Result<f64, Error> {
    let mut config = Config::new(format!("https://127.0.0.1:{port}").parse()?);
    config.accept_invalid_certs = true;
    config.default_retry = false;
    let client = Client::try_from(config)?;
    loop {
        let request = http::Request::get("/readyz").body(Vec::new())?;
        if client.request_text(request).await.is_ok_and(|text| text == "ok") {
            return Ok(started.elapsed().as_secs_f64());
        }
        for process in processes.iter_mut() {
            if let Some(status) = process.try_wait()? {
                return Err(format!("a process of the control plane ended: {status}").into());
            }
        }
        if started.elapsed() > READY_TIMEOUT {
            return Err("the control plane never became ready".into());
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn free_ports<const N: usize>() -> Result<[u16; N], Error> {
    let held: Vec<TcpListener> =
        (0..N).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<std::io::Result<_>>()?;
    let ports: Vec<u16> =
        held.iter().map(|held| Ok(held.local_addr()?.port())).collect::<std::io::Result<_>>()?;
    ports.try_into().map_err(|_| "no ports".into())
}
