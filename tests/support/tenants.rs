//! One machine with `russet up` and two tenants: a namespace each, and the token of an account that may edit there. The
//! namespace `other` serves a model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::cluster::{WAIT_TIMEOUT, condition, free_port, program};
use crate::control_plane::PlaneProcess;
use crate::control_plane::embedded::Embedded;
use crate::hub::FakeHub;
use crate::kubeconfig::KubeconfigClients;
use crate::processes::tail;
use anyhow::{Context, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

/// The namespace of the tenant that attacks.
pub const HOSTILE: &str = "hostile";
/// The namespace of the tenant that must be answered meanwhile; it has the deployment `smoke`.
pub const OTHER: &str = "other";
/// The kinds of Russet.
pub const RUSSET: &str = "/apis/russet.dev/v1alpha1";
/// No request may take longer than this.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(90);
/// A ClusterRole for Russet's kinds, as the chart's for people.
const KINDS_ROLE: &str = "tests-edit";
/// Resources that a tenant writes in its own namespace.
const TENANT_KINDS: [&str; 5] = ["models", "modeldeployments", "modelroutes", "accesskeys", "approvals"];
const APPLY: &str = "application/apply-patch+yaml";

/// How the machine is started.
#[derive(Default)]
pub struct MachineOptions<'a> {
    /// Repositories of the hub that it knows as Hugging Face.
    pub repositories: &'a [(&'a str, &'a Path)],
    /// Descriptors that each process may open; 0: as many as the system lets it.
    pub descriptors: usize,
    /// More arguments of `russet up`.
    pub arguments: &'a [&'a str],
}

/// The machine.
pub struct TenantMachine {
    up: Embedded,
    folder: PathBuf,
    clients: KubeconfigClients,
    tokens: BTreeMap<&'static str, String>,
    gateway_port: u16,
    /// The hub of its agent.
    pub hub: FakeHub,
}

impl TenantMachine {
    /// Starts everything in `folder`.
    pub async fn start(folder: &Path, options: &MachineOptions<'_>) -> Result<Self> {
        let loopback = std::net::IpAddr::from([127, 0, 0, 1]);
        let hub = FakeHub::start(loopback, options.repositories).await?;
        let (api_port, gateway_port) = (free_port(loopback)?, free_port(loopback)?);
        let mut russet = tokio::process::Command::new("bash");
        let limit = match options.descriptors {
            0 => String::new(),
            descriptors => format!("ulimit -n {descriptors} && "),
        };
        russet
            .args(["-c", &format!("{limit}exec \"$0\" \"$@\"")])
            .arg(program("russet")?)
            .env("HF_ENDPOINT", hub.endpoint())
            .env_remove("KUBECONFIG")
            .stdin(std::process::Stdio::piped())
            .kill_on_drop(true);
        let log = folder.join("up.log");
        let arguments = [
            ("--api-port", api_port.to_string()),
            ("--gateway-port", gateway_port.to_string()),
            ("--node-name", "node-a".into()),
        ]
        .into_iter()
        .flat_map(|(flag, value)| [flag.to_owned(), value])
        .chain(options.arguments.iter().map(|argument| (*argument).to_owned()))
        .collect::<Vec<_>>();
        let mut up = Embedded::start(russet, folder, std::fs::File::create(&log)?, &arguments)?;
        let kubeconfig = folder.join("kubeconfig");
        let begin = Instant::now();
        let clients = loop {
            up.check().with_context(|| tail(&log, 20))?;
            ensure!(begin.elapsed() < WAIT_TIMEOUT, "the control plane did not come up:\n{}", tail(&log, 20));
            if let Ok(clients) = KubeconfigClients::open(&kubeconfig, REQUEST_TIMEOUT) {
                break clients;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        let mut fixture =
            Self { up, folder: folder.to_owned(), clients, tokens: BTreeMap::new(), gateway_port, hub };
        fixture.until("node-a is Ready", &format!("{RUSSET}/inferencenodes/node-a"), "Ready").await?;
        let rule = json!({"apiGroups": ["russet.dev"], "resources": TENANT_KINDS, "verbs": ["*"]});
        let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": KINDS_ROLE}, "rules": [rule]});
        fixture.apply(&format!("/apis/rbac.authorization.k8s.io/v1/clusterroles/{KINDS_ROLE}"), role).await?;
        for namespace in [HOSTILE, OTHER] {
            let token = fixture.tenant(namespace).await?;
            fixture.tokens.insert(namespace, token);
        }
        let served = format!("{RUSSET}/namespaces/{OTHER}");
        let api = "russet.dev/v1alpha1";
        fixture
            .apply(&format!("{served}/models/smoke"), json!({"apiVersion": api, "kind": "Model", "metadata": {"name": "smoke"}, "spec": {"source": {"uri": "builtin://smoke"}}}))
            .await?;
        let deployment = format!("{served}/modeldeployments/smoke");
        fixture
            .apply(&deployment, json!({"apiVersion": api, "kind": "ModelDeployment", "metadata": {"name": "smoke"}, "spec": {"modelRef": {"name": "smoke"}}}))
            .await?;
        fixture.until("the deployment smoke is Ready", &deployment, "Ready").await?;
        Ok(fixture)
    }

    /// A namespace with a ConfigMap, and the token of an account that may edit there.
    async fn tenant(&self, name: &str) -> Result<String> {
        let (core, rbac) = ("/api/v1/namespaces", "rbac.authorization.k8s.io");
        self.apply(
            &format!("{core}/{name}"),
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}),
        )
        .await?;
        self.apply(
            &format!("{core}/{name}/serviceaccounts/tenant"),
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "tenant"}}),
        )
        .await?;
        let subject = json!({"kind": "ServiceAccount", "name": "tenant", "namespace": name});
        for role in ["edit", KINDS_ROLE] {
            self.apply(
                &format!("/apis/{rbac}/v1/namespaces/{name}/rolebindings/tenant-{role}"),
                json!({"apiVersion": format!("{rbac}/v1"), "kind": "RoleBinding", "metadata": {"name": format!("tenant-{role}")},
                    "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": role}, "subjects": [subject]}),
            )
            .await?;
        }
        self.apply(
            &format!("{core}/{name}/configmaps/plain"),
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "plain"}, "data": {"a": "b"}}),
        )
        .await?;
        let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 7200}});
        let path = format!("{core}/{name}/serviceaccounts/tenant/token");
        let (code, answer) = self
            .send(None, Method::POST, &path, "application/json", request.to_string().into_bytes())
            .await?;
        let answer: Value = serde_json::from_slice(&answer)?;
        let token = answer["status"]["token"].as_str();
        Ok(token.with_context(|| format!("no token of {name}: {code} {answer}"))?.to_owned())
    }

    /// Sends a request to the API server as a tenant, or as the administrator.
    pub async fn send(
        &self,
        tenant: Option<&str>,
        method: Method,
        path: &str,
        media: &str,
        body: Vec<u8>,
    ) -> Result<(StatusCode, Vec<u8>)> {
        let url = format!("{}{path}", self.clients.url);
        let request = match tenant {
            Some(tenant) => {
                let token = self.tokens.get(tenant).with_context(|| format!("{tenant} has no token"))?;
                self.clients.plain.request(method, url).bearer_auth(token)
            }
            None => self.clients.admin.request(method, url),
        };
        let answer = request.header("Content-Type", media).body(body).send().await?;
        let code = answer.status();
        Ok((code, answer.bytes().await?.to_vec()))
    }

    /// Applies an object as the administrator.
    pub async fn apply(&self, path: &str, object: Value) -> Result<()> {
        let path = format!("{path}?fieldManager=tests&force=true");
        let (code, answer) =
            self.send(None, Method::PATCH, &path, APPLY, object.to_string().into_bytes()).await?;
        ensure!(code.is_success(), "{path}: {code} {}", String::from_utf8_lossy(&answer));
        Ok(())
    }

    /// A client of its own, without a credential.
    pub fn new_client(&self) -> Result<reqwest::Client> {
        Ok(KubeconfigClients::open(&self.folder.join("kubeconfig"), REQUEST_TIMEOUT)?.plain)
    }

    /// URL of the API server.
    pub fn url(&self) -> &str {
        &self.clients.url
    }

    /// A response of the API server to a tenant whose body is not read.
    pub async fn open(
        &self,
        client: &reqwest::Client,
        tenant: &str,
        path: &str,
    ) -> Result<reqwest::Response> {
        let token = self.tokens.get(tenant).with_context(|| format!("{tenant} has no token"))?;
        let url = format!("{}{path}", self.clients.url);
        Ok(client.get(url).bearer_auth(token).send().await?)
    }

    /// The bearer token of a new join token.
    pub async fn join_token(&self) -> Result<String> {
        let output = tokio::process::Command::new(program("russet")?)
            .args(["token", "create", "--quiet", "--data-dir"])
            .arg(&self.folder)
            .kill_on_drop(true)
            .output()
            .await?;
        ensure!(output.status.success(), "russet token create: {}", String::from_utf8_lossy(&output.stderr));
        // `rst1.` and JSON in Base64, see docs/joining.md.
        let text = String::from_utf8(output.stdout)?;
        let body = text.trim().strip_prefix("rst1.").context("no join token")?;
        let token: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(body)?)?;
        let part = |name: &str| token[name].as_str().with_context(|| format!("a join token without {name}"));
        Ok(format!("{}.{}", part("id")?, part("secret")?))
    }

    /// An object as the administrator reads it; null if there is none.
    pub async fn get(&self, path: &str) -> Result<Value> {
        let (code, answer) = self.send(None, Method::GET, path, "application/json", Vec::new()).await?;
        Ok(if code.is_success() { serde_json::from_slice(&answer)? } else { Value::Null })
    }

    /// Waits until a condition is True.
    async fn until(&self, what: &str, path: &str, kind: &str) -> Result<()> {
        let met = |object: &Value| condition(object, kind).is_some_and(|found| found["status"] == "True");
        self.until_object(what, path, met).await.map(drop)
    }

    /// Waits until an object is as it should be.
    pub async fn until_object(
        &self,
        what: &str,
        path: &str,
        is_met: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let begin = Instant::now();
        loop {
            let object = self.get(path).await?;
            if is_met(&object) {
                return Ok(object);
            }
            if begin.elapsed() > WAIT_TIMEOUT {
                bail!("not within {} s: {what}: {}", WAIT_TIMEOUT.as_secs(), object["status"]);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// The data folder of `russet up`.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Base URL of the gateway.
    pub fn gateway(&self) -> String {
        format!("http://127.0.0.1:{}", self.gateway_port)
    }

    /// Process id of a part of the control plane, or of the agent.
    pub fn pid(&self, process: PlaneProcess) -> Result<i32> {
        self.up.pid(process)
    }

    /// Process id of the engine of `smoke`.
    pub async fn engine(&self) -> Result<i32> {
        let shards = self.get(&format!("{RUSSET}/namespaces/{OTHER}/shards")).await?;
        let pid = shards["items"][0]["status"]["enginePid"].as_i64();
        pid.map(|pid| pid as i32).with_context(|| format!("no engine runs: {shards}"))
    }

    /// The last lines of every log.
    pub fn logs(&self) -> String {
        let mut text = tail(&self.folder.join("up.log"), 20);
        for name in ["serve", "gateway", "agent"] {
            text.push_str(&format!(
                "\n--- {name}\n{}",
                tail(&self.folder.join(format!("logs/{name}.log")), 20)
            ));
        }
        text
    }

    /// Stops it as Ctrl-C does.
    pub async fn stop(self) -> Result<()> {
        self.up.stop().await
    }
}
