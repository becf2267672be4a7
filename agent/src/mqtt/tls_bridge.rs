//! TLS with a broker, spoken beside rumqttc: what it would bring for it is a second, older rustls-webpki and a crate for
//! PEM files that nobody maintains. rumqttc reaches a socket in the agent's own folder, and what comes there goes on to
//! the broker, one connection for each.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

use super::broker::{Broker, Trust};

/// A broker answers within this, or rumqttc gives up first.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// Between two tries to listen, and after a connection that could not be taken.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The way to a broker that speaks TLS.
#[derive(Clone, Debug)]
pub(super) struct TlsBridge {
    path: Arc<PathBuf>,
    last_error: Arc<Mutex<Option<String>>>,
}

impl TlsBridge {
    /// Listens for as long as `tasks` run; `None` where the broker speaks no TLS.
    pub fn open(broker: &Broker, folder: &Path, tasks: &mut JoinSet<()>) -> Option<Self> {
        let trust = broker.tls.clone()?;
        let path = Arc::new(crate::process::record::short_path(&folder.join("mqtt.sock")));
        let bridge = Self { path, last_error: Arc::default() };
        let target = (broker.host.trim_matches(['[', ']']).to_owned(), broker.port);
        tasks.spawn(bridge.clone().run(target, trust));
        Some(bridge)
    }

    /// Where rumqttc connects.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Why the last connection did not come to be; rumqttc only sees that it ended.
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
                Err(error) => self.set_last_error(Some(format!("no socket at {}: {error}", self.path.display()))),
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
        // An agent that was killed left it; another one cannot run in this folder.
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
                return self
                    .set_last_error(Some(format!("{host}:{port} did not answer within {} s", CONNECT_TIMEOUT.as_secs())));
            }
        };
        self.set_last_error(None);
        // However it ends, both ends end, and the broker says what its last will is.
        tokio::io::copy_bidirectional(&mut near, &mut far).await.ok();
    }
}
