//! A server in a temporary directory, and clients of it. Nothing here asserts anything but that things end.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use russet_apiserver::{Config, Running};

/// How long a test waits for what must happen: generous, because the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running server.
pub struct Cluster {
    running: Option<Running>,
    client: kube::Client,
    folder: tempfile::TempDir,
}

impl Cluster {
    /// Starts a server on a free port.
    pub async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self::start_in(folder).await
    }

    /// Starts a server on what an earlier one left.
    pub async fn start_in(folder: tempfile::TempDir) -> Self {
        Self::start_at(folder, ([127, 0, 0, 1], 0).into()).await
    }

    /// Starts a server on what an earlier one left, where that one listened.
    pub async fn start_at(folder: tempfile::TempDir, listen: SocketAddr) -> Self {
        let config = Config::new(folder.path()).listen(listen);
        let running = russet_apiserver::start(config).await.unwrap();
        let client = client_of(running.kubeconfig().to_path_buf()).await;
        Self { running: Some(running), client, folder }
    }

    /// The administrator's client.
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// The server.
    pub fn running(&self) -> &Running {
        self.running.as_ref().unwrap()
    }

    /// A client with this certificate.
    pub async fn client_as(&self, user: &str, groups: &[&str]) -> kube::Client {
        let (cert, key) = self.running().authority().issue_client(user, groups, 1).unwrap();
        let path = self.folder.path().join(format!("kubeconfig-{user}"));
        russet_apiserver::pki::write_kubeconfig(
            &path,
            &self.running().url(),
            self.running().ca_pem(),
            &cert,
            &key,
        )
        .unwrap();
        client_of(path).await
    }

    /// A client with this bearer token.
    pub async fn client_with_token(&self, token: &str) -> kube::Client {
        let text = std::fs::read_to_string(self.running().kubeconfig()).unwrap();
        let kept: Vec<&str> = text.lines().filter(|line| !line.contains("client-")).collect();
        let text =
            kept.join("\n").replace("  user:\ncontexts", &format!("  user:\n    token: {token}\ncontexts"));
        let path = self.folder.path().join("kubeconfig-token");
        std::fs::write(&path, text).unwrap();
        client_of(path).await
    }

    /// Waits until a condition holds.
    pub async fn eventually<F: Future<Output = bool>>(&self, what: &str, condition: impl Fn() -> F) {
        let holds = async {
            while !condition().await {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        assert!(tokio::time::timeout(PATIENCE, holds).await.is_ok(), "never happened: {what}");
    }

    /// Stops the server and hands back its directory.
    pub async fn stop(mut self) -> tempfile::TempDir {
        drop(self.client);
        if let Some(running) = self.running.take() {
            running.shutdown().await;
        }
        self.folder
    }
}

async fn client_of(kubeconfig: PathBuf) -> kube::Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
    let config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    kube::Client::try_from(config).unwrap()
}

/// The status code of a refusal; 0 for a success.
pub fn code<T>(outcome: Result<T, kube::Error>) -> u16 {
    match outcome {
        Ok(_) => 0,
        Err(kube::Error::Api(status)) => status.code,
        Err(other) => panic!("not an answer of the server: {other}"),
    }
}
