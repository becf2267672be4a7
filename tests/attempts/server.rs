//! The control plane under test: an administrator's kubeconfig, and requests as any user.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use reqwest::{Method, StatusCode};
use russet_tests::cluster::{WAIT_TIMEOUT, free_port, program, repository};
use russet_tests::control_plane::embedded::Embedded;
use russet_tests::control_plane::kubernetes::KubernetesControlPlane;
use russet_tests::control_plane::{ControlPlane, PlaneKind};
use russet_tests::kubeconfig::KubeconfigClients;
use russet_tests::processes::tail;
use serde_json::{Value, json};

/// Where the servers listen.
const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// The Content-Type of server-side apply; JSON is accepted, too.
pub const APPLY: &str = "application/apply-patch+yaml";
/// The Content-Type of a merge patch.
pub const MERGE: &str = "application/merge-patch+json";
/// The Content-Type of whole objects.
pub const JSON: &str = "application/json";

/// A server, and its administrator's client.
pub struct AttemptServer {
    clients: KubeconfigClients,
    /// The control plane started for the test; `None` if the server existed.
    started: Option<ControlPlane>,
}

/// The user of a request.
#[derive(Clone, Debug)]
pub enum RequestIdentity {
    /// The administrator.
    Admin,
    /// A user that the administrator impersonates.
    User(String, Vec<String>),
    /// The user of this token.
    Token(String),
}

impl RequestIdentity {
    /// Its name in the table of attempts.
    pub fn name(&self) -> &str {
        match self {
            Self::Admin => "administrator",
            Self::User(name, _) => name,
            Self::Token(_) => "service account",
        }
    }
}

/// One request.
#[derive(Clone, Debug)]
pub struct Request {
    /// The method.
    pub method: Method,
    /// Path and query.
    pub path: String,
    /// The Content-Type of the body.
    pub media: &'static str,
    /// The body; null for none.
    pub body: Value,
    /// A user in the impersonation header.
    pub pretend: Option<&'static str>,
}

impl AttemptServer {
    /// The server of `KUBECONFIG`, with Russet's kinds and rules installed as by an administrator; without
    /// one, the server that `RUSSET_CONTROL_PLANE` names, started in `folder`: the real one with the charts,
    /// or an embedded one.
    pub async fn start(folder: &Path) -> Result<Self> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        if let Some(kubeconfig) = std::env::var_os("KUBECONFIG").filter(|path| !path.is_empty()) {
            let server = Self::open(&PathBuf::from(kubeconfig))?;
            for path in ["manifests/crds", "manifests/rbac.yaml", "manifests/admission.yaml"] {
                server.install(&repository().join(path)).await?;
            }
            return Ok(server);
        }
        match PlaneKind::from_environment()? {
            PlaneKind::Embedded => Self::start_embedded(folder).await,
            PlaneKind::Etcd => {
                bail!("what is stored where makes no difference here; there is embedded and kubernetes")
            }
            PlaneKind::Kubernetes => {
                let plane = KubernetesControlPlane::bare(LOOPBACK, free_port(LOOPBACK)?, folder).await?;
                plane.install(&repository().join("charts"), free_port(LOOPBACK)?).await?;
                let server = Self::open(&plane.kubeconfig())?;
                let begin = Instant::now();
                while !server.ready().await {
                    ensure!(begin.elapsed() < WAIT_TIMEOUT, "the charts' kinds and policies are not there");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Ok(Self { started: Some(ControlPlane::Kubernetes(Box::new(plane))), ..server })
            }
        }
    }

    /// Whether it is a `russet up` that was started for the test.
    pub fn is_embedded(&self) -> bool {
        matches!(self.started, Some(ControlPlane::Embedded(_)))
    }

    /// Stops the control plane, and waits until it has exited: its folder is deleted next.
    pub async fn stop(self) -> Result<()> {
        match self.started {
            Some(plane) => plane.stop().await,
            None => Ok(()),
        }
    }

    async fn start_embedded(folder: &Path) -> Result<Self> {
        let mut russet = tokio::process::Command::new(program("russet")?);
        russet.env_remove("KUBECONFIG").stdin(std::process::Stdio::piped()).kill_on_drop(true);
        let log = folder.join("up.log");
        let port = free_port(LOOPBACK)?.to_string();
        let arguments = ["--no-agent", "--gateway-port", "0", "--api-port", &port].map(str::to_owned);
        let mut up = Embedded::start(russet, folder, std::fs::File::create(&log)?, &arguments)?;
        let kubeconfig = folder.join("kubeconfig");
        let begin = Instant::now();
        loop {
            up.check().with_context(|| tail(&log, 20))?;
            ensure!(begin.elapsed() < WAIT_TIMEOUT, "the control plane did not come up:\n{}", tail(&log, 20));
            if kubeconfig.exists()
                && let Ok(server) = Self::open(&kubeconfig)
                && server.ready().await
            {
                return Ok(Self { started: Some(ControlPlane::Embedded(Box::new(up))), ..server });
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn open(kubeconfig: &Path) -> Result<Self> {
        let clients = KubeconfigClients::open(kubeconfig, Duration::from_secs(30))?;
        Ok(Self { clients, started: None })
    }

    /// Whether Russet's kinds and policies are in force.
    async fn ready(&self) -> bool {
        let paths = [
            "/apis/russet.dev/v1alpha1/shards",
            "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/russet-nodes",
        ];
        for path in paths {
            let asked = self.send(&RequestIdentity::Admin, &Request::get(path)).await;
            if !asked.is_ok_and(|(code, _)| code == StatusCode::OK) {
                return false;
            }
        }
        true
    }

    /// Sends a request; returns the status code and body.
    pub async fn send(&self, who: &RequestIdentity, request: &Request) -> Result<(StatusCode, Value)> {
        let KubeconfigClients { url, admin, plain, admin_token } = &self.clients;
        let client = if matches!(who, RequestIdentity::Token(_)) { plain } else { admin };
        let mut asking = client.request(request.method.clone(), format!("{url}{}", request.path));
        let token = if let RequestIdentity::Token(token) = who { Some(token) } else { admin_token.as_ref() };
        if let Some(token) = token {
            asking = asking.bearer_auth(token);
        }
        if let RequestIdentity::User(name, groups) = who {
            asking = asking.header("Impersonate-User", name);
            for group in groups {
                asking = asking.header("Impersonate-Group", group);
            }
        }
        if let Some(pretend) = request.pretend {
            asking = asking.header("Impersonate-User", pretend);
        }
        if !request.body.is_null() {
            asking = asking.header("Content-Type", request.media).body(request.body.to_string());
        }
        let answer = asking.send().await.with_context(|| request.path.clone())?;
        let code = answer.status();
        let text = answer.text().await?;
        Ok((code, serde_json::from_str(&text).unwrap_or(Value::String(text))))
    }

    /// Sends a request as the administrator; it must succeed.
    pub async fn must(&self, request: &Request) -> Result<Value> {
        let (code, body) = self.send(&RequestIdentity::Admin, request).await?;
        ensure!(code.is_success(), "{} {}: {code} {body}", request.method, request.path);
        Ok(body)
    }

    /// Applies a file, or the files of a folder, as `kubectl apply --server-side` does.
    async fn install(&self, path: &Path) -> Result<()> {
        let mut files: Vec<PathBuf> = match std::fs::read_dir(path) {
            Ok(entries) => entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?,
            Err(_) => vec![path.to_owned()],
        };
        files.retain(|file| file.file_name().is_some_and(|name| name != "kustomization.yaml"));
        for file in files {
            let text = std::fs::read_to_string(&file)?;
            for document in text.split("\n---\n") {
                let object: Value = serde_norway::from_str(document)?;
                self.must(&Request::apply(&object_path(&object)?, object.clone())).await?;
            }
        }
        Ok(())
    }
}

/// Path of an object of `manifests/`.
fn object_path(object: &Value) -> Result<String> {
    let kind = object["kind"].as_str().unwrap_or_default();
    let plural = match kind {
        "ValidatingAdmissionPolicy" => "validatingadmissionpolicies".to_owned(),
        "" => bail!("an object of manifests/ has no kind"),
        other => format!("{}s", other.to_lowercase()),
    };
    let version = object["apiVersion"].as_str().unwrap_or_default();
    let root = if version.contains('/') { format!("/apis/{version}") } else { format!("/api/{version}") };
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    Ok(match object["metadata"]["namespace"].as_str() {
        Some(namespace) => format!("{root}/namespaces/{namespace}/{plural}/{name}"),
        None => format!("{root}/{plural}/{name}"),
    })
}

impl Request {
    fn new(method: Method, path: &str, media: &'static str, body: Value) -> Self {
        Self { method, path: path.to_owned(), media, body, pretend: None }
    }

    /// A GET request.
    pub fn get(path: &str) -> Self {
        Self::new(Method::GET, path, JSON, Value::Null)
    }

    /// A create request.
    pub fn create(path: &str, body: Value) -> Self {
        Self::new(Method::POST, path, JSON, body)
    }

    /// A replace request.
    pub fn replace(path: &str, body: Value) -> Self {
        Self::new(Method::PUT, path, JSON, body)
    }

    /// A merge patch.
    pub fn merge(path: &str, body: Value) -> Self {
        Self::new(Method::PATCH, path, MERGE, body)
    }

    /// A forced server-side apply, like all of Russet's writes.
    pub fn apply(path: &str, body: Value) -> Self {
        let join = if path.contains('?') { '&' } else { '?' };
        Self::new(Method::PATCH, &format!("{path}{join}fieldManager=attempts&force=true"), APPLY, body)
    }

    /// A delete request.
    pub fn delete(path: &str) -> Self {
        Self::new(Method::DELETE, path, JSON, json!({"kind": "DeleteOptions", "apiVersion": "v1"}))
    }

    /// The same with impersonation.
    pub fn impersonating(mut self, user: &'static str) -> Self {
        self.pretend = Some(user);
        self
    }
}
