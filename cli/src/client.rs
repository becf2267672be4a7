//! The API connection of the client commands: which kubeconfig, and requests for the server's own tables.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kube::{Client, Config};
use serde_json::Value;

use crate::data_dir::DataDir;

/// Options that select the cluster.
#[derive(clap::Args, Clone, Debug)]
pub struct Connection {
    /// Kubeconfig file; default $KUBECONFIG, then the one that `russet up` wrote.
    #[arg(long, global = true)]
    pub kubeconfig: Option<PathBuf>,
    /// Data folder of a control plane on this machine.
    #[arg(long, global = true)]
    pub data_dir: Option<PathBuf>,
    /// Namespace.
    #[arg(short, long, global = true, default_value = "default")]
    pub namespace: String,
}

impl Connection {
    /// Connects; an error names the file and the remedy.
    pub async fn client(&self) -> Result<Client> {
        client_from(&self.path()?).await
    }

    /// The same without client-side retries, which would silently wait for minutes while the server is
    /// unavailable.
    pub async fn client_without_retry(&self) -> Result<Client> {
        client_with_config(&self.path()?, |config| config.default_retry = false).await
    }

    /// The folder of the kubeconfig; where `russet up` wrote it, its other files are in it too.
    pub fn folder(&self) -> Result<PathBuf> {
        Ok(self.path()?.parent().unwrap_or_else(|| Path::new(".")).to_owned())
    }

    fn path(&self) -> Result<PathBuf> {
        Ok(match (&self.kubeconfig, &self.data_dir, std::env::var_os("KUBECONFIG")) {
            (Some(path), _, _) => path.clone(),
            (None, None, Some(path)) if !path.is_empty() => PathBuf::from(path),
            (None, data_dir, _) => DataDir::resolve(data_dir.clone())?.admin_kubeconfig(),
        })
    }
}

/// A client for one kubeconfig file. If the file `servers` beside it lists several API servers, one per line,
/// the client fails over between them.
pub async fn client_from(path: &Path) -> Result<Client> {
    client_with_config(path, |_| {}).await
}

async fn client_with_config(path: &Path, tune: fn(&mut Config)) -> Result<Client> {
    russet_rpc::kube_client::client(path, tune).await.with_context(|| {
        format!(
            "no control plane is known here: cannot use {}; start one with `russet up` or name a kubeconfig with --kubeconfig",
            path.display()
        )
    })
}

/// A client with the ServiceAccount of this pod; the token is reloaded when the kubelet renews it.
pub fn client_in_pod() -> Result<Client> {
    let mut config = Config::incluster().context(
        "no API server is known: this is no pod with a ServiceAccount; name a kubeconfig with --kubeconfig",
    )?;
    russet_rpc::kube_client::set_timeouts(&mut config);
    Client::try_from(config).context("cannot set up the API client")
}

/// GET with an Accept header; returns JSON.
pub async fn get_json(client: &Client, path: &str, accept: &str) -> Result<Value> {
    let request = http::Request::get(path)
        .header("accept", accept)
        .body(Vec::new())
        .context("the request path is not valid")?;
    Ok(client.request(request).await?)
}

/// The Accept header that asks for a table.
pub const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
