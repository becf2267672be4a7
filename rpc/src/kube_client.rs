//! Client of the API server that outlives its credentials: when the kubeconfig or a file it references was
//! renewed, the next request uses a new client. Open watches keep their connection. With several API servers
//! it stays with one until that one is unreachable.

mod connection;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kube::client::Body;
use kube::config::KubeconfigError;
use kube::{Client, Config};
use thiserror::Error;
use tokio::runtime::Handle;
use tokio::sync::Mutex;

use crate::kubeconfig::KubeconfigSource;
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
    /// The proxy that the kubeconfig names cannot be used.
    #[error(
        "{path} names the proxy {proxy}, which cannot be used: proxy-url may be http://HOST:PORT, with a login or without, or socks5://HOST:PORT without one; change it, or remove it to reach the server directly"
    )]
    Proxy {
        /// The file.
        path: PathBuf,
        /// The proxy, without its login.
        proxy: String,
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
    source: KubeconfigSource,
    tune: Box<TuneConfig>,
    current: Mutex<CurrentClient>,
    /// Runs what clients need, which outlives the runtime of whoever sees first that they have to connect anew.
    runtime: Handle,
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
    client_of(KubeconfigSource::file(path), tune).await
}

/// A client for the context of one or more kubeconfigs, for as long as the process runs.
pub async fn client_of(
    source: KubeconfigSource,
    tune: impl Fn(&mut Config) + Send + Sync + 'static,
) -> Result<Client, ApiError> {
    // Version first, then read: a change in between is read again, never missed.
    let stamps = file_versions(&source);
    let runtime = Handle::current();
    let (first, namespace) = connect(&source, &tune, 0, &runtime).await?;
    let made = Mutex::new(CurrentClient { versions: stamps, server_index: 0, client: first });
    let renewing = Arc::new(ReloadingClient { source, tune: Box::new(tune), current: made, runtime });
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let renewing = renewing.clone();
        async move { renewing.send(request).await }
    });
    Ok(Client::new(service, namespace))
}

impl ReloadingClient {
    /// Sends a request to the current server, and to the others as long as none is reachable.
    async fn send(&self, mut request: http::Request<Body>) -> Result<http::Response<Body>, kube::Error> {
        for _ in 1..servers(&self.source).len() {
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
        let stamps = file_versions(&self.source);
        let mut made = self.current.lock().await;
        if made.versions != stamps {
            let turn = made.server_index;
            self.reconnect(&mut made, stamps, turn).await;
        }
        (made.server_index, made.client.clone())
    }

    /// Moves to the next server, unless another request has done so since `turn`.
    async fn use_next_server(&self, turn: usize) {
        if servers(&self.source).len() < 2 {
            return;
        }
        let stamps = file_versions(&self.source);
        let mut made = self.current.lock().await;
        if made.server_index == turn {
            self.reconnect(&mut made, stamps, turn.wrapping_add(1)).await;
        }
    }

    async fn reconnect(&self, made: &mut CurrentClient, stamps: Vec<FileVersion>, turn: usize) {
        match connect(&self.source, &*self.tune, turn, &self.runtime).await {
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
fn servers(source: &KubeconfigSource) -> Vec<String> {
    let text =
        std::fs::read_to_string(source.first().with_file_name(identity_dir::SERVERS)).unwrap_or_default();
    text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// Versions of the kubeconfigs and the files beside the first: a renewed identity changes all of them.
fn file_versions(source: &KubeconfigSource) -> Vec<FileVersion> {
    let beside = |name: &str| FileVersion::read(&source.first().with_file_name(name));
    let mut versions = vec![beside(identity_dir::CERTIFICATE), beside(identity_dir::TOKEN)];
    versions.extend(source.paths().iter().map(|path| FileVersion::read(path)));
    versions
}

async fn connect(
    source: &KubeconfigSource,
    tune: &TuneConfig,
    turn: usize,
    runtime: &Handle,
) -> Result<(Client, String), ApiError> {
    let path = source.first();
    let mut config = source.config().await?;
    if let Some(proxy) = config.proxy_url.as_ref().filter(|proxy| !connection::is_supported(proxy)) {
        return Err(ApiError::Proxy { path: path.to_owned(), proxy: connection::without_login(proxy) });
    }
    let servers = servers(source);
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
    let entered = runtime.enter();
    let client = connection::client(&config);
    drop(entered);
    let client =
        client.map_err(|source| ApiError::Client { path: path.to_owned(), source: Box::new(source) })?;
    Ok((client, namespace))
}

/// A client with the ServiceAccount of this pod; the token is reloaded when the kubelet renews it.
pub fn client_in_pod() -> Result<Client, Box<dyn std::error::Error + Send + Sync>> {
    let mut config = Config::incluster()?;
    set_timeouts(&mut config);
    Ok(connection::client(&config)?)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    /// A server that accepts nothing yet, and a kubeconfig that names it, in a folder that lives as long as it is held.
    async fn server() -> (TcpListener, tempfile::TempDir, PathBuf) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(identity_dir::KUBECONFIG);
        let kubeconfig = format!(
            "{{clusters: [{{name: a, cluster: {{server: \"http://{}\"}}}}], contexts: [{{name: a, context: {{cluster: a, user: a}}}}], \
             users: [{{name: a, user: {{}}}}], current-context: a}}",
            listener.local_addr().unwrap()
        );
        std::fs::write(&path, kubeconfig).unwrap();
        (listener, folder, path)
    }

    /// The timer of a socket in `/proc/net/tcp`, by its local port: `02` is keepalive.
    #[cfg(target_os = "linux")]
    fn timer(port: u16) -> Option<String> {
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        table.lines().find_map(|line| {
            let columns: Vec<&str> = line.split_whitespace().collect();
            let (_, local) = columns.get(1)?.rsplit_once(':')?;
            let here = u16::from_str_radix(local, 16) == Ok(port) && *columns.get(3)? == "01";
            here.then(|| columns[5].to_owned())
        })
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn kernel_asks_whether_a_silent_server_is_there() {
        let (listener, _folder, path) = server().await;
        let client = client(&path, |_| {}).await.unwrap();
        let request = http::Request::get("/version").body(Vec::new()).unwrap();
        let asking = tokio::spawn(async move { client.request_text(request).await });
        let (mut connection, peer) = listener.accept().await.unwrap();
        assert!(connection.read(&mut [0; 1024]).await.unwrap() > 0);
        // Until the request's bytes are acknowledged, the timer is that of their retransmission.
        let probing = async {
            while timer(peer.port()).is_none_or(|timer| !timer.starts_with("02:")) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let found = tokio::time::timeout(Duration::from_secs(20), probing).await;
        assert!(found.is_ok(), "no keepalive: {:?}", timer(peer.port()));
        asking.abort();
    }

    #[tokio::test]
    async fn unresponsive_api_server_times_out() {
        let (listener, _folder, path) = server().await;
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

    #[tokio::test]
    async fn a_client_outlives_the_runtime_that_connected_anew() {
        let (listener, folder, path) = server().await;
        let server = tokio::spawn(async move {
            loop {
                let (mut connection, _) = listener.accept().await.unwrap();
                assert!(connection.read(&mut [0; 1024]).await.unwrap() > 0);
                let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok";
                connection.write_all(answer).await.unwrap();
            }
        });
        let client = client(&path, |_| {}).await.unwrap();
        let ask = |client: Client| async move {
            let request = http::Request::get("/version").body(Vec::new()).unwrap();
            tokio::time::timeout(Duration::from_secs(60), client.request_text(request)).await.unwrap()
        };
        assert_eq!(ask(client.clone()).await.unwrap(), "ok");
        // A newer version of the file, as of renewed credentials; who asks first is a runtime that ends then.
        let renewed = folder.path().join("renewed");
        std::fs::copy(&path, &renewed).unwrap();
        std::fs::rename(&renewed, &path).unwrap();
        let asking = ask(client.clone());
        let elsewhere = tokio::task::spawn_blocking(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(asking)
        });
        assert_eq!(elsewhere.await.unwrap().unwrap(), "ok");
        assert_eq!(ask(client).await.unwrap(), "ok");
        server.abort();
    }
}
