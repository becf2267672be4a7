//! TLS bridge to a broker, outside rumqttc: its own TLS support would add a second, older rustls-webpki and
//! an unmaintained crate for PEM files. rumqttc connects to a unix socket in a directory of the process's own, and the
//! bridge forwards each connection to the broker.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use russet_telemetry::tasks::TaskSet;
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

use crate::broker::{Broker, Trust};

/// Connect timeout; rumqttc's own is longer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// Between two attempts to listen, and after a failed accept.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// TLS bridge to a broker.
#[derive(Clone, Debug)]
pub(super) struct TlsBridge {
    path: Arc<PathBuf>,
    last_error: Arc<Mutex<Option<String>>>,
}

impl TlsBridge {
    /// Listens for as long as `tasks` run; `None` where the broker does not use TLS.
    pub fn open(broker: &Broker, socket: impl FnOnce() -> PathBuf, tasks: &mut TaskSet) -> Option<Self> {
        let trust = broker.tls.clone()?;
        let path = Arc::new(socket());
        let bridge = Self { path, last_error: Arc::default() };
        let target = (broker.host.trim_matches(['[', ']']).to_owned(), broker.port);
        tasks.spawn("MQTT over TLS", bridge.clone().run(target, trust));
        Some(bridge)
    }

    /// Path of the unix socket for rumqttc.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Error of the last connection; rumqttc only sees that it ended.
    pub fn last_error(&self) -> Option<String> {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_last_error(&self, trouble: Option<String>) {
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    async fn run(self, target: (String, u16), trust: Trust) {
        let listener = loop {
            match self.listen() {
                Ok(listener) => break listener,
                Err(error) => {
                    self.set_last_error(Some(format!("no socket at {}: {error}", self.path.display())))
                }
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        };
        let mut connections = JoinSet::new();
        loop {
            match listener.accept().await {
                Ok((near, _)) => {
                    connections.spawn(self.clone().bridge(near, target.clone(), trust.clone()));
                }
                Err(error) => {
                    self.set_last_error(Some(format!("{}: {error}", self.path.display())));
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
            }
            while connections.try_join_next().is_some() {}
        }
    }

    fn listen(&self) -> std::io::Result<UnixListener> {
        // A stale socket of a process that was killed; no other one runs in this directory.
        match std::fs::remove_file(&*self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&*self.path)?;
        std::fs::set_permissions(&*self.path, std::fs::Permissions::from_mode(0o600))?;
        Ok(listener)
    }

    async fn bridge(self, mut near: UnixStream, (host, port): (String, u16), trust: Trust) {
        let Trust { name, client } = trust;
        let connecting = async {
            let stream = TcpStream::connect((host.as_str(), port)).await?;
            stream.set_nodelay(true)?;
            TlsConnector::from(client).connect(name, stream).await
        };
        let mut far = match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
            Ok(Ok(far)) => far,
            Ok(Err(error)) => return self.set_last_error(Some(error.to_string())),
            Err(_) => {
                return self.set_last_error(Some(format!(
                    "{host}:{port} did not answer within {} s",
                    CONNECT_TIMEOUT.as_secs()
                )));
            }
        };
        self.set_last_error(None);
        // However it ends, both sides close, and the broker publishes the last will.
        tokio::io::copy_bidirectional(&mut near, &mut far).await.ok();
    }
}
