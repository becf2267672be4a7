//! The real control plane on the near machine's address: etcd, kube-apiserver with RBAC and bootstrap tokens,
//! kube-controller-manager; both charts by Helm; operator and gateway as the chart's Deployments define them
//! ([`super::pod`]). There is no kubelet, so the Deployments' own pods never run.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::process::Command;

use super::PlaneProcess;
use super::pod::Pod;
use crate::processes::{SupervisedProcess, oracle, tail};
use crate::tool::Tool;

/// Address in the tests' values for the chart: everything listens on loopback.
const LOOPBACK: &str = "127.0.0.1";
/// Timeout until a process of the control plane responds for the first time.
const START_TIMEOUT: Duration = Duration::from_secs(90);
/// The administrator's bearer token; the server exists for one test on an unrouted address.
const TOKEN: &str = "russet-tests-administrator";

/// A running control plane with Russet installed.
pub struct KubernetesControlPlane {
    folder: PathBuf,
    url: String,
    metrics_port: u16,
    kubectl: Tool,
    helm: Tool,
    etcd: SupervisedProcess,
    apiserver: SupervisedProcess,
    controller_manager: SupervisedProcess,
    operator: Option<SupervisedProcess>,
    gateway: Option<SupervisedProcess>,
    agent: Option<SupervisedProcess>,
}

impl KubernetesControlPlane {
    /// Starts API server, controller manager and etcd, without Russet.
    pub async fn bare(address: IpAddr, api_port: u16, folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        let folder = folder.to_owned();
        let url = format!("https://{address}:{api_port}");
        let [client, peer, metrics_port] = free_ports()?;
        credentials(&folder, address, &url)?;

        let etcd = foreign(&folder, "etcd", oracle("RUSSET_ETCD")?, {
            let (client, peer) = (format!("http://{LOOPBACK}:{client}"), format!("http://{LOOPBACK}:{peer}"));
            vec![
                format!("--data-dir={}", folder.join("etcd").display()),
                format!("--listen-client-urls={client}"),
                format!("--advertise-client-urls={client}"),
                format!("--listen-peer-urls={peer}"),
                format!("--initial-advertise-peer-urls={peer}"),
                format!("--initial-cluster=default={peer}"),
                "--log-level=warn".into(),
            ]
        })?;
        let file = |name: &str| folder.join(name).display().to_string();
        let apiserver = foreign(&folder, "kube-apiserver", oracle("RUSSET_KUBE_APISERVER")?, {
            vec![
                format!("--etcd-servers=http://{LOOPBACK}:{client}"),
                format!("--bind-address={address}"),
                format!("--secure-port={api_port}"),
                format!("--tls-cert-file={}", file("apiserver.crt")),
                format!("--tls-private-key-file={}", file("apiserver.key")),
                format!("--service-account-key-file={}", file("accounts.pub")),
                format!("--service-account-signing-key-file={}", file("accounts.key")),
                "--service-account-issuer=https://kubernetes.default.svc".into(),
                "--service-cluster-ip-range=10.96.0.0/24".into(),
                "--authorization-mode=Node,RBAC".into(),
                "--enable-bootstrap-token-auth=true".into(),
                format!("--token-auth-file={}", file("tokens.csv")),
                "--endpoint-reconciler-type=none".into(),
            ]
        })?;
        let controller_manager =
            foreign(&folder, "kube-controller-manager", oracle("RUSSET_KUBE_CONTROLLER_MANAGER")?, {
                vec![
                    format!("--kubeconfig={}", file("kubeconfig")),
                    format!("--service-account-private-key-file={}", file("accounts.key")),
                    format!("--root-ca-file={}", file("ca.crt")),
                    "--use-service-account-credentials=true".into(),
                    "--leader-elect=false".into(),
                    "--controllers=*,bootstrapsigner,tokencleaner".into(),
                    "--secure-port=0".into(),
                ]
            })?;
        let tool = |variable: &str| -> Result<Tool> {
            Ok(Tool::new(oracle(variable)?, &folder.join("kubeconfig"), &folder))
        };
        let plane = Self {
            url,
            metrics_port,
            kubectl: tool("RUSSET_KUBECTL")?,
            helm: tool("RUSSET_HELM")?,
            etcd,
            apiserver,
            controller_manager,
            operator: None,
            gateway: None,
            agent: None,
            folder,
        };
        plane.until("the API server is ready", &["get", "--raw", "/readyz"]).await?;
        Ok(plane)
    }

    /// Installs both charts as a user would.
    pub async fn install(&self, charts: &Path, gateway_port: u16) -> Result<()> {
        let chart = |name: &str| charts.join(name).display().to_string();
        self.helm(&["upgrade", "--install", "russet-crds", &chart("russet-crds"), "--create-namespace"])
            .await?;
        self.kubectl.until_established().await?;
        let [metrics, gateway] = [self.metrics_port.to_string(), gateway_port.to_string()];
        let [health] = free_ports()?;
        self.helm(&[
            "upgrade",
            "--install",
            "russet",
            &chart("russet"),
            &format!("--set-string=operator.metrics.address={LOOPBACK},gateway.metrics.address={LOOPBACK}"),
            &format!(
                "--set=operator.metrics.port={metrics},gateway.port={gateway},gateway.metrics.port={health}"
            ),
            // It keeps responses and batches and writes an audit log, as the gateways of the other control planes do.
            "--set=gateway.replicas=1,gateway.responsesStore.enabled=true,gateway.auditLog.enabled=true",
        ])
        .await?;
        Ok(())
    }

    /// Runs the pods of the chart's Deployments.
    pub async fn run_pods(&mut self, programs: &Path) -> Result<()> {
        self.operator = Some(self.run_pod("operator", programs).await?);
        self.gateway = Some(self.run_pod("gateway", programs).await?);
        Ok(())
    }

    /// Adds the near machine's agent, which the cluster starts, to the control plane.
    pub fn set_agent(&mut self, agent: SupervisedProcess) {
        self.agent = Some(agent);
    }

    async fn run_pod(&self, component: &str, programs: &Path) -> Result<SupervisedProcess> {
        let name = format!("russet-{component}");
        let text = self.kubectl(&["-n", "russet-system", "get", "deployment", &name, "-o", "json"]).await?;
        let deployment: Value = serde_json::from_str(&text)?;
        let account = deployment["spec"]["template"]["spec"]["serviceAccountName"].as_str();
        let account = account.context("the Deployment names no ServiceAccount")?;
        let (host, port) = self.url.trim_start_matches("https://").rsplit_once(':').context("no port")?;
        let pod_name = format!("{name}-0");
        let pod = Pod::new(&deployment, &pod_name, &self.folder.join(&pod_name), (host, port.parse()?))?;
        let token =
            self.kubectl(&["-n", "russet-system", "create", "token", account, "--duration=2h"]).await?;
        pod.identify(token.trim(), &std::fs::read_to_string(self.folder.join("ca.crt"))?)?;
        let programs = programs.to_owned();
        SupervisedProcess::start(component, &self.log(component), move || pod.command(&programs))
    }

    /// Runs kubectl as the administrator; returns its output.
    pub async fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        self.kubectl.run(arguments).await
    }

    /// The same with this standard input.
    pub async fn kubectl_with(&self, arguments: &[&str], input: &str) -> Result<String> {
        self.kubectl.with_input(arguments, input).await
    }

    /// Runs Helm as the administrator, in Russet's namespace; returns its output.
    pub async fn helm(&self, arguments: &[&str]) -> Result<String> {
        let mut all = vec!["--namespace", "russet-system"];
        all.extend(arguments);
        self.helm.run(&all).await
    }

    async fn until(&self, what: &str, arguments: &[&str]) -> Result<()> {
        let begin = Instant::now();
        while let Err(error) = self.kubectl(arguments).await {
            if begin.elapsed() > START_TIMEOUT {
                let logs = ["etcd", "kube-apiserver", "operator", "gateway"]
                    .map(|name| format!("--- {name}\n{}", tail(&self.log(name), 20)));
                bail!("not within {} s: {what}: {error:#}\n{}", START_TIMEOUT.as_secs(), logs.concat());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    /// The API server's URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.join("kubeconfig")
    }

    pub(super) fn metrics(&self) -> String {
        format!("http://{LOOPBACK}:{}", self.metrics_port)
    }

    pub(super) fn pids(&self, role: PlaneProcess) -> Result<Vec<i32>> {
        let pid = |process: &Option<SupervisedProcess>, name: &str| {
            process.as_ref().with_context(|| format!("{name} was not started"))?.pid()
        };
        Ok(match role {
            PlaneProcess::Serve => vec![self.apiserver.pid()?, pid(&self.operator, "the operator")?],
            PlaneProcess::Gateway => vec![pid(&self.gateway, "the gateway")?],
            PlaneProcess::Agent => vec![pid(&self.agent, "the near agent")?],
        })
    }

    pub(super) async fn stop(self) -> Result<()> {
        // Agents stop their engines at Ctrl-C.
        for agent in self.agent.into_iter() {
            agent.stop(Signal::INT).await?;
        }
        for process in [self.gateway, self.operator].into_iter().flatten() {
            process.stop(Signal::TERM).await?;
        }
        for process in [self.controller_manager, self.apiserver, self.etcd] {
            // Their state is not needed any more.
            process.stop(Signal::KILL).await?;
        }
        Ok(())
    }

    fn log(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.log"))
    }
}

fn foreign(folder: &Path, name: &str, program: PathBuf, arguments: Vec<String>) -> Result<SupervisedProcess> {
    SupervisedProcess::start(name, &folder.join(format!("{name}.log")), move || {
        // The process ends with this one, however this one ends.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(&program).args(&arguments);
        command
    })
}

/// A CA, the API server's certificate, the key of ServiceAccounts, the administrator.
fn credentials(folder: &Path, address: IpAddr, url: &str) -> Result<()> {
    let ca_key = KeyPair::generate()?;
    let mut ca = CertificateParams::default();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.distinguished_name.push(DnType::CommonName, "kubernetes");
    let ca_pem = ca.self_signed(&ca_key)?.pem();
    let key = KeyPair::generate()?;
    let names = [address.to_string(), LOOPBACK.into(), "kubernetes".into(), "kubernetes.default.svc".into()];
    let mut server = CertificateParams::new(names.to_vec())?;
    server.distinguished_name.push(DnType::CommonName, "kube-apiserver");
    let certificate = server.signed_by(&key, &Issuer::new(ca, ca_key))?.pem();
    let accounts = KeyPair::generate()?;
    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "admin",
        "clusters": [{"name": "kubernetes", "cluster": {"server": url, "certificate-authority": "ca.crt"}}],
        "users": [{"name": "admin", "user": {"token": TOKEN}}],
        "contexts": [{"name": "admin", "context": {"cluster": "kubernetes", "user": "admin"}}],
    });
    for (name, text) in [
        ("ca.crt", ca_pem),
        // Without its CA, as most servers send it.
        ("apiserver.crt", certificate),
        ("apiserver.key", key.serialize_pem()),
        ("accounts.key", accounts.serialize_pem()),
        ("accounts.pub", accounts.public_key_pem()),
        ("tokens.csv", format!("{TOKEN},admin,admin,system:masters\n")),
        ("kubeconfig", format!("{kubeconfig:#}\n")),
    ] {
        std::fs::write(folder.join(name), text)?;
    }
    Ok(())
}

/// Different ports, each free a moment ago.
fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let mut ports = [0; N];
    let mut held = Vec::new();
    for port in &mut ports {
        let listener = std::net::TcpListener::bind((LOOPBACK, 0))?;
        *port = listener.local_addr()?.port();
        held.push(listener);
    }
    Ok(ports)
}
