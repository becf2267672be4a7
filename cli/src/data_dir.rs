//! Paths under a data directory. No other module of the binary contains them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// URL of the gateway of `russet up`, unless its flags say otherwise.
const DEFAULT_GATEWAY: &str = "http://127.0.0.1:52415";

/// A machine's Russet folder.
#[derive(Clone, Debug)]
pub struct DataDir {
    root: PathBuf,
}

impl DataDir {
    /// The folder given on the command line, else `~/.russet`; created (0700) if missing.
    pub fn open(root: Option<PathBuf>) -> Result<Self> {
        let layout = Self::resolve(root)?;
        make_private(&layout.root)?;
        Ok(layout)
    }

    /// The same without touching the disk.
    pub fn resolve(root: Option<PathBuf>) -> Result<Self> {
        let root = match root {
            Some(root) => std::path::absolute(&root).with_context(|| format!("{}", root.display()))?,
            None => std::env::home_dir()
                .context("cannot tell the home folder; name one with --data-dir")?
                .join(".russet"),
        };
        Ok(Self { root })
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Store and keys of the API server.
    pub fn serve(&self) -> PathBuf {
        self.root.join("serve")
    }

    /// File with the address of the control plane's metrics, `ip:port`.
    pub fn metrics_address(&self) -> PathBuf {
        self.serve().join("metrics-address")
    }

    /// Kubeconfig of the cluster's administrator.
    pub fn admin_kubeconfig(&self) -> PathBuf {
        self.root.join("kubeconfig")
    }

    /// Identity of the gateway.
    pub fn gateway(&self) -> PathBuf {
        self.root.join("gateway")
    }

    /// Responses that the gateway keeps.
    pub fn gateway_responses(&self) -> PathBuf {
        self.gateway().join("responses.db")
    }

    /// What requests of the gateway reserved and used of Budgets.
    pub fn gateway_budgets(&self) -> PathBuf {
        self.gateway().join("budgets.db")
    }

    /// The audit log of the gateway.
    pub fn gateway_audit(&self) -> PathBuf {
        self.gateway().join("audit")
    }

    /// File with the gateway's URL, there only while the gateway answers; the gateway writes it for `up`.
    pub fn gateway_answers(&self) -> PathBuf {
        self.gateway().join("answers")
    }

    /// File with the gateway's URL for programs on this machine; `up` writes it for `run`.
    pub fn gateway_address(&self) -> PathBuf {
        self.gateway().join("address")
    }

    /// URL of the gateway of the `russet up` of this folder, else the default of `russet up`.
    pub fn nearest_gateway(&self) -> String {
        let address = std::fs::read_to_string(self.gateway_address());
        address.map_or_else(|_| DEFAULT_GATEWAY.to_owned(), |address| address.trim().to_owned())
    }

    /// Identity, models and engines of the agent.
    pub fn agent(&self) -> PathBuf {
        self.root.join("agent")
    }

    /// Logs of the processes that `up` supervises.
    pub fn logs(&self) -> PathBuf {
        self.root.join("logs")
    }
}

/// Creates a folder that only its owner can enter.
pub fn make_private(folder: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .with_context(|| format!("cannot make the folder {}", folder.display()))
}
