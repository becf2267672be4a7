//! Client of the API server that outlives its credentials: when the kubeconfig or a file it references was
//! renewed, the next request uses a new client. Open watches keep their connection. With several API servers
//! it stays with one until that one is unreachable.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kube::client::Body;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use thiserror::Error;
use tokio::sync::Mutex;

use crate::tls::{FileVersion, identity_dir};

/// Why there is no client.
#[derive(Debug, Error)]
pub enum ApiError {
    /// The file is missing or invalid.
    #[error("{path} is not a usable kubeconfig")]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: Box<KubeconfigError>,
    },
    /// The client cannot be built from it.
    #[error("{path} does not make a client of the API server")]
    Client {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: Box<kube::Error>,
    },
}

/// Read timeout of a connection. Watches last 60 s or get a bookmark as often, so it ends only connections
/// whose other end is gone.
const READ_TIMEOUT: Duration = Duration::from_secs(90);
/// Connect timeout of one of several servers.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Sets options that a kubeconfig lacks, such as timeouts.
type TuneConfig = dyn Fn(&mut Config) + Send + Sync;

/// The kubeconfig, and the client built from its last version.
struct ReloadingClient {
    path: PathBuf,
    tune: Box<TuneConfig>,
    current: Mutex<CurrentClient>,
}

struct CurrentClient {
    versions: Vec<FileVersion>,
    /// Index of the current server.
    server_index: usize,
    client: Client,
}

/// A client for the kubeconfig at `path`, for as long as the process runs.
pub async fn client(
    path: &Path,
    tune: impl Fn(&mut Config) + Send + Sync + 'static,
) -> Result<Client, ApiError> {
    // Version first, then read: a change in between is read again, never missed.
    let stamps = file_versions(path);
    let (first, namespace) = connect(path, &tune, 0).await?;
    let made = Mutex::new(CurrentClient { versions: stamps, server_index: 0, client: first });
    let renewing = Arc::new(ReloadingClient { path: path.to_owned(), tune: Box::new(tune), current: made });
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let renewing = renewing.clone();
        async move { renewing.send(request).await }
    });
    Ok(Client::new(service, namespace))
}

impl ReloadingClient {
    /// Sends a request to the current server, and to the others as long as none is reachable.
    async fn send(&self, mut request: http::Request<Body>) -> Result<http::Response<Body>, kube::Error> {
        for _ in 1..servers(&self.path).len() {
            let Some(again) = clone_request(&request) else { break };
            let (turn, client) = self.current().await;
            match client.send(request).await {
                Err(error) if never_sent(&error) => {
                    self.use_next_server(turn).await;
                    request = again;
                }
                answer => return self.next_on_failure(turn, answer).await,
            }
        }
        let (turn, client) = self.current().await;
        let answer = client.send(request).await;
        self.next_on_failure(turn, answer).await
    }

    /// Moves to the next server after a failure that another server might not have: no response, or an
    /// unreachable store behind the server.
    async fn next_on_failure(
        &self,
        turn: usize,
        answer: Result<http::Response<Body>, kube::Error>,
    ) -> Result<http::Response<Body>, kube::Error> {
        let failed = match &answer {
            Err(_) => true,
            Ok(response) => matches!(response.status().as_u16(), 503 | 504),
        };
        if failed {
            self.use_next_server(turn).await;
        }
        answer
    }

    async fn current(&self) -> (usize, Client) {
        let stamps = file_versions(&self.path);
        let mut made = self.current.lock().await;
        if made.versions != stamps {
            let turn = made.server_index;
            self.reconnect(&mut made, stamps, turn).await;
        }
        (made.server_index, made.client.clone())
    }

    /// Moves to the next server, unless another request has done so since `turn`.
    async fn use_next_server(&self, turn: usize) {
        if servers(&self.path).len() < 2 {
            return;
        }
        let stamps = file_versions(&self.path);
        let mut made = self.current.lock().await;
        if made.server_index == turn {
            self.reconnect(&mut made, stamps, turn.wrapping_add(1)).await;
        }
    }

    async fn reconnect(&self, made: &mut CurrentClient, stamps: Vec<FileVersion>, turn: usize) {
        match connect(&self.path, &*self.tune, turn).await {
            Ok((client, _)) => *made = CurrentClient { versions: stamps, server_index: turn, client },
            Err(error) => {
                tracing::warn!(%error, "the renewed credentials cannot be used yet; the former ones are");
            }
        }
    }
}

/// Sets bounded timeouts: a connection that was cut silently would hang forever.
pub fn set_timeouts(config: &mut Config) {
    config.read_timeout = Some(READ_TIMEOUT);
    // Counted from the request, not from the last use of its connection.
    config.reset_reader_on_write = true;
}

/// Whether a request never reached a server, so that it may be sent to another.
fn never_sent(error: &kube::Error) -> bool {
    let kube::Error::Service(error) = error else { return false };
    error.downcast_ref::<hyper_util::client::legacy::Error>().is_some_and(|error| error.is_connect())
}

/// A copy of the request, unless its body can be read only once.
fn clone_request(request: &http::Request<Body>) -> Option<http::Request<Body>> {
    let mut again = http::Request::new(request.body().try_clone()?);
    *again.method_mut() = request.method().clone();
    *again.uri_mut() = request.uri().clone();
    *again.headers_mut() = request.headers().clone();
    *again.extensions_mut() = request.extensions().clone();
    Some(again)
}

/// The addresses in the file beside the kubeconfig, if there are several.
fn servers(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path.with_file_name(identity_dir::SERVERS)).unwrap_or_default();
    text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// Versions of the kubeconfig and the files beside it: a renewed identity changes all of them.
fn file_versions(path: &Path) -> Vec<FileVersion> {
    let beside = |name: &str| FileVersion::read(&path.with_file_name(name));
    vec![FileVersion::read(path), beside(identity_dir::CERTIFICATE), beside(identity_dir::TOKEN)]
}

async fn connect(path: &Path, tune: &TuneConfig, turn: usize) -> Result<(Client, String), ApiError> {
    let wrong = |source| ApiError::Kubeconfig { path: path.to_owned(), source: Box::new(source) };
    let kubeconfig = Kubeconfig::read_from(path).map_err(wrong)?;
    let mut config =
        Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.map_err(wrong)?;
    let servers = servers(path);
    let server = servers.get(turn.checked_rem(servers.len()).unwrap_or(0));
    if let Some(server) = server.and_then(|server| server.parse().ok()) {
        config.cluster_url = server;
    }
    if servers.len() > 1 {
        // A lost host does not answer at all: try the next server soon.
        config.connect_timeout = Some(CONNECT_TIMEOUT);
    }
    set_timeouts(&mut config);
    tune(&mut config);
    let namespace = config.default_namespace.clone();
    let client = Client::try_from(config)
        .map_err(|source| ApiError::Client { path: path.to_owned(), source: Box::new(source) })?;
    Ok((client, namespace))
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn unresponsive_api_server_times_out() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(identity_dir::KUBECONFIG);
        let kubeconfig = format!(
            "{{clusters: [{{name: a, cluster: {{server: \"http://{}\"}}}}], contexts: [{{name: a, context: {{cluster: a, user: a}}}}], \
             users: [{{name: a, user: {{}}}}], current-context: a}}",
            listener.local_addr().unwrap()
        );
        std::fs::write(&path, kubeconfig).unwrap();
        // The same timeouts, only shorter; unbounded stays unbounded.
        let soon =
            |config: &mut Config| config.read_timeout = config.read_timeout.and(Some(CONNECT_TIMEOUT / 30));
        let client = client(&path, soon).await.unwrap();
        let silent = tokio::spawn(async move {
            let mut connections = Vec::new();
            loop {
                let (mut connection, _) = listener.accept().await.unwrap();
                assert!(connection.read(&mut [0; 1024]).await.unwrap() > 0);
                connections.push(connection);
            }
        });
        let request = http::Request::get("/version").body(Vec::new()).unwrap();
        let answered = tokio::time::timeout(Duration::from_secs(60), client.request_text(request)).await;
        assert!(
            matches!(answered, Ok(Err(kube::Error::Service(_) | kube::Error::HyperError(_)))),
            "{answered:?}"
        );
        silent.abort();
    }
}
