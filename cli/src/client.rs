//! The API connection of the people's verbs: which kubeconfig, and requests that answer with the
//! server's own tables.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kube::Client;
use serde_json::Value;

use crate::layout::Layout;

/// How a verb finds its cluster.
#[derive(clap::Args, Clone, Debug)]
pub struct Connection {
    /// Kubeconfig file; else $KUBECONFIG, else the one `russet up` wrote.
    #[arg(long, global = true)]
    pub kubeconfig: Option<PathBuf>,
    /// Folder of a control plane on this machine.
    #[arg(long, global = true)]
    pub data_dir: Option<PathBuf>,
    /// Namespace.
    #[arg(short, long, global = true, default_value = "default")]
    pub namespace: String,
}

impl Connection {
    /// Connects, naming the file and the remedy when it cannot.
    pub async fn client(&self) -> Result<Client> {
        let path = match (&self.kubeconfig, &self.data_dir, std::env::var_os("KUBECONFIG")) {
            (Some(path), _, _) => path.clone(),
            (None, None, Some(path)) if !path.is_empty() => PathBuf::from(path),
            (None, data_dir, _) => Layout::at(data_dir.clone())?.admin_kubeconfig(),
        };
        client_from(&path).await
    }
}

/// A client for one kubeconfig file. Where the file `servers` beside it lists several API servers, one a
/// line, each is asked in turn when another cannot be reached.
pub async fn client_from(path: &Path) -> Result<Client> {
    russet_rpc::api::client(path, |_| {}).await.with_context(|| {
        format!(
            "no control plane is known here: cannot use {}; start one with `russet up` or name a kubeconfig with --kubeconfig",
            path.display()
        )
    })
}

/// GET with an Accept header; JSON back.
pub async fn get_json(client: &Client, path: &str, accept: &str) -> Result<Value> {
    let request = http::Request::get(path)
        .header("accept", accept)
        .body(Vec::new())
        .context("the request path is not valid")?;
    Ok(client.request(request).await?)
}

/// The Accept header that asks for a table.
pub const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
