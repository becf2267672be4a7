//! Test harness: a server in a temporary directory, and clients. It asserts nothing except that waits end.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use russet_apiserver::store::etcd::EtcdConfig;
use russet_apiserver::{ApiServerConfig, RunningServer};

use self::etcd::Etcd;

#[path = "../../../tests/support/etcd.rs"]
pub mod etcd;

/// Timeout of every wait: generous, because the machine may be busy.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// The storage of a server, which outlives it.
pub struct DataLocation {
    folder: tempfile::TempDir,
    etcd: Option<Arc<SharedEtcd>>,
}

/// An etcd that servers share, each under a prefix.
pub struct SharedEtcd {
    etcd: Arc<Mutex<Etcd>>,
    prefix: String,
}

/// A running server.
pub struct TestServer {
    running: Option<RunningServer>,
    client: kube::Client,
    place: DataLocation,
}

impl DataLocation {
    /// A new location: a directory, and in the binary `etcd`, which runs the same tests, also a prefix in an
    /// etcd.
    pub fn create() -> Self {
        let etcd = (env!("CARGO_CRATE_NAME") == "etcd").then(|| Arc::new(SharedEtcd::of_one_member()));
        Self { folder: tempfile::tempdir().unwrap(), etcd }
    }

    /// A location that never uses etcd.
    pub fn embedded() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), etcd: None }
    }

    /// A location in this etcd.
    pub fn in_etcd(etcd: Arc<SharedEtcd>) -> Self {
        Self { folder: tempfile::tempdir().unwrap(), etcd: Some(etcd) }
    }

    /// The configuration of a server at this location.
    pub fn config(&self) -> ApiServerConfig {
        let config = ApiServerConfig::new(self.folder.path()).listen(([127, 0, 0, 1], 0).into());
        match &self.etcd {
            None => config,
            Some(shared) => config.etcd(shared.config()),
        }
    }
}

impl DataLocation {
    /// The configuration of a server with this directory and its objects in another etcd.
    pub fn moved_to(&self, etcd: &SharedEtcd) -> ApiServerConfig {
        self.config().etcd(etcd.config())
    }
}

impl SharedEtcd {
    /// A prefix in the single member that concurrent tests share; it stops with the last of them.
    fn of_one_member() -> Self {
        static ONE: Mutex<Weak<Mutex<Etcd>>> = Mutex::new(Weak::new());
        let mut one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let etcd = one.upgrade().unwrap_or_else(|| Self::started(1, false));
        *one = Arc::downgrade(&etcd);
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        Self { etcd, prefix: format!("/test-{}", NEXT.fetch_add(1, Ordering::Relaxed)) }
    }

    /// A separate etcd.
    pub fn with_members(members: usize, tls: bool) -> Arc<Self> {
        Arc::new(Self {
            etcd: Self::started(members, tls),
            prefix: russet_apiserver::store::etcd::PREFIX.into(),
        })
    }

    fn started(members: usize, tls: bool) -> Arc<Mutex<Etcd>> {
        if etcd::program().is_none() {
            assert!(std::env::var_os("RUSSET_ORACLES").is_none(), "{} names no etcd", etcd::PROGRAM);
            // No test in this binary can run, and one line says so.
            println!("skipped: {} names no etcd", etcd::PROGRAM);
            std::process::exit(0);
        }
        Arc::new(Mutex::new(Etcd::start(members, tls).unwrap()))
    }

    /// The etcd.
    pub fn etcd(&self) -> MutexGuard<'_, Etcd> {
        self.etcd.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection settings for servers.
    pub fn config(&self) -> EtcdConfig {
        let etcd = self.etcd();
        let tls = etcd.tls.as_ref();
        EtcdConfig {
            ca_file: tls.map(|tls| tls.ca.clone()),
            cert_file: tls.map(|tls| tls.cert.clone()),
            key_file: tls.map(|tls| tls.key.clone()),
            prefix: self.prefix.clone(),
            ..EtcdConfig::new(etcd.endpoints())
        }
    }
}

impl TestServer {
    /// Starts a server on a free port.
    pub async fn start() -> Self {
        Self::start_in(DataLocation::create()).await
    }

    /// Starts a server on the storage of an earlier one.
    pub async fn start_in(place: DataLocation) -> Self {
        let config = place.config();
        Self::start_with(place, config).await
    }

    /// Starts a server on the storage and the address of an earlier one.
    pub async fn start_at(place: DataLocation, listen: SocketAddr) -> Self {
        let config = place.config().listen(listen);
        Self::start_with(place, config).await
    }

    /// Starts a server with this configuration.
    pub async fn start_with(place: DataLocation, config: ApiServerConfig) -> Self {
        let running = russet_apiserver::start(config).await.unwrap();
        let client = client_of(running.kubeconfig().to_path_buf()).await;
        Self { running: Some(running), client, place }
    }

    /// The administrator's client.
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// The server.
    pub fn running(&self) -> &RunningServer {
        self.running.as_ref().unwrap()
    }

    /// A client with this certificate.
    pub async fn client_as(&self, user: &str, groups: &[&str]) -> kube::Client {
        let (cert, key) = self.running().authority().issue_client(user, groups, 1).unwrap();
        let path = self.place.folder.path().join(format!("kubeconfig-{user}"));
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

    /// A client of this server with a certificate that another server's CA issued.
    pub async fn client_for(&self, user: &str, issuer: &Self) -> kube::Client {
        let (cert, key) = issuer.running().authority().issue_client(user, &[], 1).unwrap();
        let path = self.place.folder.path().join(format!("kubeconfig-{user}"));
        let (url, ca) = (self.running().url(), self.running().ca_pem());
        russet_apiserver::pki::write_kubeconfig(&path, &url, ca, &cert, &key).unwrap();
        client_of(path).await
    }

    /// A client with this bearer token.
    pub async fn client_with_token(&self, token: &str) -> kube::Client {
        let text = std::fs::read_to_string(self.running().kubeconfig()).unwrap();
        let remaining: Vec<&str> = text.lines().filter(|line| !line.contains("client-")).collect();
        let text = remaining
            .join("\n")
            .replace("  user:\ncontexts", &format!("  user:\n    token: {token}\ncontexts"));
        let path = self.place.folder.path().join("kubeconfig-token");
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
        assert!(tokio::time::timeout(TEST_TIMEOUT, holds).await.is_ok(), "never happened: {what}");
    }

    /// Stops the server and returns its storage.
    pub async fn stop(mut self) -> DataLocation {
        drop(self.client);
        if let Some(running) = self.running.take() {
            running.shutdown().await;
        }
        self.place
    }
}

async fn client_of(kubeconfig: PathBuf) -> kube::Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
    let mut config =
        kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    // Tests see every response, including those that ask to retry.
    config.default_retry = false;
    kube::Client::try_from(config).unwrap()
}

/// The status code of an error; 0 for a success.
pub fn code<T>(outcome: Result<T, kube::Error>) -> u16 {
    match outcome {
        Ok(_) => 0,
        Err(kube::Error::Api(status)) => status.code,
        Err(other) => panic!("not an answer of the server: {other}"),
    }
}
