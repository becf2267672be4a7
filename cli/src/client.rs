//! The API connection of the people's verbs: which kubeconfig, and requests that answer with the
//! server's own tables.

use std::path::PathBuf;

use anyhow::{Context, Result};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
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

/// A client for one kubeconfig file.
pub async fn client_from(path: &PathBuf) -> Result<Client> {
    let kubeconfig = Kubeconfig::read_from(path).with_context(|| {
        format!(
            "no control plane is known here: cannot read {}; start one with `russet up` or name a kubeconfig with --kubeconfig",
            path.display()
        )
    })?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
        .await
        .with_context(|| format!("{} is not a usable kubeconfig", path.display()))?;
    Client::try_from(config).context("cannot set up the API client")
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
