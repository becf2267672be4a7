//! Flux's kustomize-controller against a cluster under test, with a web server of one archive instead of its
//! source-controller: the result of a push to a repository.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};
use axum::Router;
use axum::routing::get;
use rustix::process::Signal;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::process::Command;

use crate::processes::SupervisedProcess;
use crate::tool::Tool;

const NAMESPACE: &str = "flux-system";
const SOURCES: &str = include_str!("flux/sources.yaml");

/// A running kustomize-controller.
pub struct Flux {
    kubectl: Tool,
    folder: PathBuf,
    archive: Arc<Mutex<Vec<u8>>>,
    url: String,
    revision: u32,
    controller: SupervisedProcess,
    server: tokio::task::JoinHandle<()>,
}

impl Flux {
    /// Installs the kinds and starts the controller; its log and the published archive are in `folder`.
    pub async fn start(program: PathBuf, kubectl: Tool, kubeconfig: &Path, folder: &Path) -> Result<Self> {
        let definition = program.with_file_name("kustomizations.yaml");
        kubectl.run(&["apply", "--server-side", "-f", &definition.display().to_string()]).await?;
        kubectl.with_input(&["apply", "--server-side", "-f", "-"], SOURCES).await?;
        kubectl.until_established().await?;
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
        kubectl.with_input(&["apply", "--server-side", "-f", "-"], &namespace.to_string()).await?;

        let archive = Arc::new(Mutex::new(Vec::new()));
        let served = archive.clone();
        let app = Router::new().route(
            "/archive.tar.gz",
            get(move || async move { served.lock().unwrap_or_else(PoisonError::into_inner).clone() }),
        );
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/archive.tar.gz", listener.local_addr()?);
        let server = tokio::spawn(async move {
            let _ = axum::serve(listener, app).await;
        });
        std::fs::create_dir_all(folder)?;
        let (kubeconfig, home) = (kubeconfig.to_owned(), folder.to_owned());
        let controller =
            SupervisedProcess::start("kustomize-controller", &folder.join("flux.log"), move || {
                // The process ends with this one, however this one ends.
                let mut command = Command::new("setpriv");
                command
                    .args(["--pdeathsig", "KILL"])
                    .arg(&program)
                    .args([
                        "--metrics-addr=127.0.0.1:0",
                        "--health-addr=127.0.0.1:0",
                        "--requeue-dependency=1s",
                    ])
                    .args(["--log-encoding=console", "--min-retry-delay=200ms", "--max-retry-delay=2s"])
                    .env("KUBECONFIG", &kubeconfig)
                    .env("HOME", &home)
                    .env("TMPDIR", &home)
                    .env("RUNTIME_NAMESPACE", NAMESPACE);
                command
            })?;
        Ok(Self { kubectl, folder: folder.to_owned(), archive, url, revision: 0, controller, server })
    }

    /// Publishes a folder as the next revision.
    pub async fn publish(&mut self, folder: &Path) -> Result<()> {
        let output = Command::new("tar").args(["-cz", "-C"]).arg(folder).arg(".").output().await?;
        ensure!(output.status.success(), "tar: {}", String::from_utf8_lossy(&output.stderr));
        let digest = format!("sha256:{}", hex::encode(Sha256::digest(&output.stdout)));
        let size = output.stdout.len();
        *self.archive.lock().unwrap_or_else(PoisonError::into_inner) = output.stdout;
        self.revision += 1;
        let source = json!({
            "apiVersion": "source.toolkit.fluxcd.io/v1",
            "kind": "GitRepository",
            "metadata": {"name": "samples", "namespace": NAMESPACE},
            "spec": {"interval": "1h", "url": "https://git.example/samples"},
        });
        self.kubectl.with_input(&["apply", "--server-side", "-f", "-"], &source.to_string()).await?;
        let status = json!({"status": {
            "observedGeneration": 1,
            "artifact": {
                "digest": digest, "path": "archive.tar.gz", "url": self.url, "size": size,
                "revision": self.revision(), "lastUpdateTime": "2026-01-01T00:00:00Z",
            },
            "conditions": [{
                "type": "Ready", "status": "True", "reason": "Succeeded", "message": "stored artifact",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        }});
        let patch =
            ["-n", NAMESPACE, "patch", "gitrepository", "samples", "--subresource=status", "--type=merge"];
        self.kubectl.run(&[&patch[..], &["-p", &status.to_string()]].concat()).await?;
        Ok(())
    }

    fn revision(&self) -> String {
        format!("main@sha1:{:040x}", self.revision)
    }

    /// Makes the controller reconcile a folder of the archive, with pruning and kstatus checks.
    pub async fn reconcile(&self, path: &str) -> Result<()> {
        let kustomization = json!({
            "apiVersion": "kustomize.toolkit.fluxcd.io/v1",
            "kind": "Kustomization",
            "metadata": {"name": "samples", "namespace": NAMESPACE},
            "spec": {
                "interval": "1h", "retryInterval": "2s", "timeout": "3m", "prune": true, "wait": true,
                "path": path, "targetNamespace": "default",
                "sourceRef": {"kind": "GitRepository", "name": "samples"},
            },
        });
        let said = self
            .kubectl
            .with_input(
                &["apply", "--server-side", "--force-conflicts", "-f", "-"],
                &kustomization.to_string(),
            )
            .await;
        said.map(|_| ())
    }

    /// Whether all objects of the current revision are Ready; an error if the controller gave up.
    pub async fn is_ready(&self) -> Result<bool> {
        let text =
            self.kubectl.run(&["-n", NAMESPACE, "get", "kustomization", "samples", "-o", "json"]).await?;
        let object: Value = serde_json::from_str(&text)?;
        let conditions = object["status"]["conditions"].as_array().context("no conditions yet");
        let Ok(conditions) = conditions else { return Ok(false) };
        let ready = conditions.iter().find(|condition| condition["type"] == "Ready");
        let Some(ready) = ready else { return Ok(false) };
        let current = ready["observedGeneration"] == object["metadata"]["generation"]
            && object["status"]["lastAttemptedRevision"] == self.revision();
        if current && ready["status"] == "False" && ready["reason"] != "DependencyNotReady" {
            bail!("Flux says: {}", ready["message"]);
        }
        let applied = object["status"]["lastAppliedRevision"] == self.revision();
        Ok(current && applied && ready["status"] == "True")
    }

    /// Deletes the Kustomization, and by its finalizer all that it applied.
    pub async fn remove(&self) -> Result<()> {
        let delete = ["-n", NAMESPACE, "delete", "kustomization", "samples", "--timeout=120s"];
        self.kubectl.run(&delete).await.map(|_| ())
    }

    /// Path of its log.
    pub fn log(&self) -> PathBuf {
        self.folder.join("flux.log")
    }

    /// Stops the controller and deletes its kinds.
    pub async fn stop(self) -> Result<()> {
        self.server.abort();
        self.controller.stop(Signal::KILL).await?;
        let kinds = [
            "kustomizations.kustomize",
            "gitrepositories.source",
            "ocirepositories.source",
            "buckets.source",
        ];
        let kinds = kinds.map(|kind| format!("{kind}.toolkit.fluxcd.io"));
        let mut delete = vec!["delete", "crd", "--timeout=60s"];
        delete.extend(kinds.iter().map(String::as_str));
        self.kubectl.run(&delete).await.map(|_| ())
    }
}
