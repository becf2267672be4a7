//! A running broker: the small one, or a mosquitto. It can stop, and returns at the same ports.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::observer::TIMEOUT;
use super::small_broker::SmallBroker;

/// Variable with the path of a mosquitto.
const PROGRAM: &str = "RUSSET_MOSQUITTO";
const PASSWORD: &str = "not to be shown";

#[derive(Clone)]
pub enum BrokerKind {
    Small,
    Mosquitto(PathBuf),
}

/// Path of the mosquitto; prints a message if there is none.
pub fn mosquitto() -> Option<PathBuf> {
    let program = std::env::var_os(PROGRAM).map(PathBuf::from);
    if program.is_none() {
        assert!(std::env::var_os("RUSSET_ORACLES").is_none(), "{PROGRAM} names no mosquitto");
        println!("skipped: {PROGRAM} names no mosquitto; `cargo xtask oracle presence` fetches one");
    }
    program
}

pub struct RunningBroker {
    kind: BrokerKind,
    /// Its URL for agents.
    pub url: String,
    pub password: Option<PathBuf>,
    pub authority: Option<PathBuf>,
    /// Plain-text port, open to all clients.
    pub plain: u16,
    encrypted: Option<u16>,
    folder: TempDir,
    process: Option<BrokerProcess>,
    observers: AtomicU32,
}

/// Stops the broker when dropped.
enum BrokerProcess {
    Small(#[allow(dead_code, reason = "it is there to be dropped")] SmallBroker),
    Mosquitto(Child),
}

impl Drop for BrokerProcess {
    fn drop(&mut self) {
        if let Self::Mosquitto(child) = self {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

impl RunningBroker {
    pub async fn start(kind: BrokerKind) -> Self {
        let plain = free_port();
        let url = format!("mqtt://127.0.0.1:{plain}");
        let mut running = Self {
            kind,
            url,
            password: None,
            authority: None,
            plain,
            encrypted: None,
            folder: tempfile::tempdir().unwrap(),
            process: None,
            observers: AtomicU32::new(0),
        };
        running.restart().await;
        running
    }

    /// Agents use TLS and a password, observers do not.
    pub async fn start_encrypted(kind: BrokerKind) -> Self {
        let mut running = Self::start(kind).await;
        running.stop().await;
        let port = free_port();
        let at = |name: &str| running.folder.path().join(name);
        let key = rcgen::KeyPair::generate().unwrap();
        let mut authority = rcgen::CertificateParams::new(Vec::new()).unwrap();
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let issuer = authority.self_signed(&key).unwrap();
        std::fs::write(at("ca.crt"), issuer.pem()).unwrap();
        let own = rcgen::KeyPair::generate().unwrap();
        let named = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let signed = named.signed_by(&own, &rcgen::Issuer::new(authority, key)).unwrap();
        std::fs::write(at("tls.crt"), signed.pem()).unwrap();
        std::fs::write(at("tls.key"), own.serialize_pem()).unwrap();
        std::fs::write(at("password"), format!("{PASSWORD}\n")).unwrap();
        running.url = format!("mqtts://me@localhost:{port}");
        (running.password, running.authority) = (Some(at("password")), Some(at("ca.crt")));
        running.encrypted = Some(port);
        running.restart().await;
        running
    }

    /// A unique number for an observer.
    pub fn observers(&self) -> u32 {
        self.observers.fetch_add(1, Ordering::Relaxed)
    }

    /// Stops the broker and closes its connections.
    pub async fn stop(&mut self) {
        self.process = None;
        self.wait_listening("its port is closed", false).await;
    }

    pub async fn restart(&mut self) {
        let life = match &self.kind {
            BrokerKind::Small => BrokerProcess::Small(self.small().await),
            BrokerKind::Mosquitto(program) => BrokerProcess::Mosquitto(self.mosquitto(program)),
        };
        self.process = Some(life);
        self.wait_listening("it listens", true).await;
    }

    async fn small(&self) -> SmallBroker {
        let plain = TcpListener::bind(("127.0.0.1", self.plain)).await.unwrap();
        let Some(port) = self.encrypted else { return SmallBroker::start(plain, None) };
        let chain: Result<Vec<_>, _> =
            CertificateDer::pem_file_iter(self.folder.path().join("tls.crt")).unwrap().collect();
        let key = PrivateKeyDer::from_pem_file(self.folder.path().join("tls.key")).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain.unwrap(), key)
            .unwrap();
        let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        SmallBroker::start(plain, Some((listener, TlsAcceptor::from(Arc::new(config)), PASSWORD.to_owned())))
    }

    fn mosquitto(&self, program: &Path) -> Child {
        let folder = self.folder.path();
        let mut text = format!(
            "user root\npersistence false\nallow_anonymous true\nlistener {} 127.0.0.1\n",
            self.plain
        );
        if let Some(port) = self.encrypted {
            let file = |name: &str| folder.join(name).display().to_string();
            text.push_str(&format!(
                "listener {port} 127.0.0.1\ncafile {}\ncertfile {}\nkeyfile {}\n",
                file("ca.crt"),
                file("tls.crt"),
                file("tls.key"),
            ));
        }
        let config = folder.join("mosquitto.conf");
        std::fs::write(&config, text).unwrap();
        let log = std::fs::File::create(folder.join("log")).unwrap();
        let mut command = Command::new(program);
        command.arg("-c").arg(&config).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        command.spawn().unwrap()
    }

    async fn wait_listening(&self, what: &str, listens: bool) {
        let ports: Vec<u16> = [Some(self.plain), self.encrypted].into_iter().flatten().collect();
        let waiting = async {
            for port in ports {
                while TcpStream::connect(("127.0.0.1", port)).await.is_ok() != listens {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        };
        if tokio::time::timeout(TIMEOUT, waiting).await.is_err() {
            let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            panic!("waited {TIMEOUT:?} until {what}; its log:\n{log}");
        }
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}
