//! The API connection of the client commands: which kubeconfig, and requests for the server's own tables.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kube::{Client, Config};
use russet_rpc::kubeconfig::KubeconfigSource;
use serde_json::Value;

use crate::data_dir::DataDir;

/// Options that select the cluster.
#[derive(clap::Args, Clone, Debug)]
pub struct Connection {
    /// Kubeconfig file; default the files of $KUBECONFIG, then the one that `russet up` wrote.
    #[arg(long, global = true)]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig; default its current one.
    #[arg(long, global = true)]
    pub context: Option<String>,
    /// Data folder of a control plane on this machine.
    #[arg(long, global = true)]
    pub data_dir: Option<PathBuf>,
    /// Namespace; default that of the context, then `default`.
    #[arg(short, long, global = true)]
    namespace: Option<String>,
}

impl Connection {
    /// Connects; an error names the file and the remedy.
    pub async fn client(&self) -> Result<Client> {
        client_of(self.source()?, |_| {}).await
    }

    /// The same without client-side retries, which would silently wait for minutes while the server is
    /// unavailable.
    pub async fn client_without_retry(&self) -> Result<Client> {
        client_of(self.source()?, |config| config.default_retry = false).await
    }

    /// The namespace: as given, else that of the kubeconfig's context.
    pub fn namespace(&self) -> String {
        let of_context = || self.source().ok()?.namespace();
        self.namespace.clone().or_else(of_context).unwrap_or_else(|| "default".to_owned())
    }

    /// The folder of the kubeconfig; where `russet up` wrote it, its other files are in it too.
    pub fn folder(&self) -> Result<PathBuf> {
        Ok(self.source()?.first().parent().unwrap_or_else(|| Path::new(".")).to_owned())
    }

    fn source(&self) -> Result<KubeconfigSource> {
        let source =
            source(self.kubeconfig.as_deref(), self.data_dir.as_deref(), std::env::var_os("KUBECONFIG"))?;
        Ok(source.with_context(self.context.clone()))
    }
}

/// The kubeconfig that a person means: the one given, that of the data folder given, those of KUBECONFIG, or
/// the one of the default data folder.
fn source(
    kubeconfig: Option<&Path>,
    data_dir: Option<&Path>,
    variable: Option<OsString>,
) -> Result<KubeconfigSource> {
    if let Some(path) = kubeconfig {
        return Ok(KubeconfigSource::file(path));
    }
    if data_dir.is_none()
        && let Some(list) = variable.and_then(|variable| KubeconfigSource::list(&variable))
    {
        return Ok(list);
    }
    Ok(KubeconfigSource::file(DataDir::resolve(data_dir.map(Path::to_owned))?.admin_kubeconfig()))
}

/// A client for one kubeconfig file. If the file `servers` beside it lists several API servers, one per line,
/// the client fails over between them.
pub async fn client_from(path: &Path) -> Result<Client> {
    client_of(KubeconfigSource::file(path), |_| {}).await
}

/// A client for a kubeconfig.
pub async fn client_of(source: KubeconfigSource, tune: fn(&mut Config)) -> Result<Client> {
    let path = source.first().to_owned();
    russet_rpc::kube_client::client_of(source, tune).await.with_context(|| {
        format!(
            "no control plane is known here: cannot use {}; start one with `russet up` or name a kubeconfig with --kubeconfig",
            path.display()
        )
    })
}

/// A client with the ServiceAccount of this pod; the token is reloaded when the kubelet renews it.
pub fn client_in_pod() -> Result<Client> {
    russet_rpc::kube_client::client_in_pod().map_err(|error| anyhow::anyhow!(error)).context(
        "no API server is known: this is no pod with a ServiceAccount; name a kubeconfig with --kubeconfig",
    )
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubeconfig_is_the_one_that_is_named_most_closely() {
        let list = |text: &str| KubeconfigSource::list(text.as_ref()).unwrap();
        let file = |text: &str| KubeconfigSource::file(text);
        for (kubeconfig, data_dir, variable, expected) in [
            (Some("k"), Some("/d"), Some("a:b"), file("k")),
            (None, Some("/d"), Some("a:b"), file("/d/kubeconfig")),
            (None, None, Some("a:b"), list("a:b")),
            (None, None, Some(":a:"), list("a")),
        ] {
            let found =
                source(kubeconfig.map(Path::new), data_dir.map(Path::new), variable.map(OsString::from));
            assert_eq!(found.unwrap(), expected, "{kubeconfig:?} {data_dir:?} {variable:?}");
        }
        let fallback = |variable: Option<&str>| source(None, None, variable.map(OsString::from)).unwrap();
        assert_eq!(fallback(Some("")), fallback(None));
        assert_eq!(fallback(Some(":")), fallback(None));
    }
}
