//! Leaving a cluster, on the machine itself: requests the node's removal, waits until it is drained, stops
//! its engines and removes its identity. Model files stay unless they are to be removed.
//!
//! ```text
//! marked ─▶ InferenceNode deleted ─▶ drained and removed ─▶ agent exits ─▶ identity removed
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::api::DeleteParams;
use kube::{Api, Client};
use russet_crds::InferenceNode;
use thiserror::Error;

use crate::helper::reconcile::release;
use crate::join::identity::{self, IdentityError, NodeIdentity};
use crate::node::is_missing;
use crate::{agent_dir, lock, stop_engines};

/// Marker file: this machine is leaving, so its agent does not remove model files.
const LEAVING_MARKER: &str = "leaving";
/// Marker file: this machine leaves without the cluster's consent, so its agent exits at once.
const FORCED_MARKER: &str = "left";
/// Drain timeout. The operator drains a node for up to five minutes before it removes it anyway.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(360);
/// Exit timeout of the agent, which ends within seconds after its node was removed.
const AGENT_EXIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Poll interval.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Read timeout: an API server that hangs must not hang `russet leave`.
const READ_TIMEOUT: Duration = Duration::from_secs(20);

/// Configuration of `russet leave`.
#[derive(Clone, Debug)]
pub struct LeaveConfig {
    /// State directory of this machine.
    pub data_dir: PathBuf,
    /// Whether to leave without asking the cluster.
    pub force: bool,
    /// Whether to remove the model files too.
    pub purge: bool,
    /// Socket of the root helper, which undoes its changes for the node.
    pub helper: PathBuf,
}

/// Why a machine could not leave.
#[derive(Debug, Error)]
pub enum LeaveError {
    /// The machine has no identity.
    #[error("{0} holds no identity of a node; this machine has not joined a cluster, or has left it")]
    NotJoined(PathBuf),
    /// Files.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The identity's files cannot be used.
    #[error(
        "node {node} could not ask {server} to be removed; try again when it answers, or leave with --force and remove the node there: kubectl delete inferencenode {node}"
    )]
    Api {
        /// The node.
        node: String,
        /// The API server.
        server: String,
        /// Cause.
        #[source]
        source: Box<kube::Error>,
    },
    /// The node was not drained in time.
    #[error(
        "node {node} is still being drained after {} s; run `russet leave` again, or leave with --force",
        DRAIN_TIMEOUT.as_secs()
    )]
    StillThere {
        /// The node.
        node: String,
    },
    /// The agent does not exit.
    #[error("the agent that runs with {0} does not end; stop it and run `russet leave` again")]
    AgentRuns(PathBuf),
}

/// Path of the marker file of a leaving machine.
pub(crate) fn leaving_marker(folder: &Path) -> PathBuf {
    folder.join(LEAVING_MARKER)
}

/// Waits until a forced leave is requested.
pub(crate) async fn wait_forced(folder: &Path) {
    let left = folder.join(FORCED_MARKER);
    while !left.exists() {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Leaves the cluster; returns the name of the node.
pub async fn leave(config: LeaveConfig) -> Result<String, LeaveError> {
    let LeaveConfig { data_dir, force, purge, helper } = config;
    rustls::crypto::ring::default_provider().install_default().ok();
    let folder = agent_dir(&data_dir);
    let identity = NodeIdentity::load(&folder)?.ok_or_else(|| LeaveError::NotJoined(folder.clone()))?;
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| LeaveError::Identity(IdentityError::Io { path, source })
    };
    identity::write(&leaving_marker(&folder), "this machine leaves its cluster\n")?;
    if !force && let Err(error) = request_removal(&identity).await {
        // The machine stays for now, and its agent manages model files again.
        std::fs::remove_file(leaving_marker(&folder)).ok();
        return Err(error);
    }
    identity::write(&folder.join(FORCED_MARKER), "this machine has left its cluster\n")?;
    let held = wait_agent_exit(&folder).await?;
    stop_engines(&data_dir).await;
    // A running agent has done this already.
    release(&helper, &identity.node).await;
    identity::remove(&folder)?;
    // Before steps that may fail or be interrupted: a marker left behind would end the agent of the next
    // join.
    for name in ["joining.key", LEAVING_MARKER, FORCED_MARKER] {
        ignore_not_found(std::fs::remove_file(folder.join(name))).map_err(io(&folder.join(name)))?;
    }
    if purge {
        ignore_not_found(std::fs::remove_dir_all(folder.join("models")))
            .map_err(io(&folder.join("models")))?;
    }
    ignore_not_found(std::fs::remove_dir_all(folder.join("engines"))).map_err(io(&folder.join("engines")))?;
    drop(held);
    Ok(identity.node)
}

/// Requests the node's removal, and waits for it.
async fn request_removal(identity: &NodeIdentity) -> Result<(), LeaveError> {
    let NodeIdentity { node, server, .. } = identity;
    let failed =
        |source| LeaveError::Api { node: node.clone(), server: server.clone(), source: Box::new(source) };
    let client: Client = identity.client(|config| config.read_timeout = Some(READ_TIMEOUT)).await?;
    let nodes: Api<InferenceNode> = Api::all(client);
    match nodes.delete(node, &DeleteParams::default()).await {
        Ok(_) => {}
        // Not a 401: a server that lost its keys, or another one at this address, has removed nothing.
        Err(error) if is_missing(&error, node, false) => return Ok(()),
        Err(error) => return Err(failed(error)),
    }
    let deadline = tokio::time::Instant::now() + DRAIN_TIMEOUT;
    loop {
        match nodes.get(node).await {
            Err(error) if is_missing(&error, node, true) => return Ok(()),
            // Retried: the request to leave was accepted.
            Ok(_) | Err(_) if tokio::time::Instant::now() < deadline => {}
            Ok(_) => return Err(LeaveError::StillThere { node: node.clone() }),
            Err(error) => return Err(failed(error)),
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Waits until no agent holds the lock of the directory, and takes it.
async fn wait_agent_exit(folder: &Path) -> Result<std::fs::File, LeaveError> {
    let deadline = tokio::time::Instant::now() + AGENT_EXIT_TIMEOUT;
    loop {
        match lock(folder) {
            Ok(file) => return Ok(file),
            Err(_) if tokio::time::Instant::now() < deadline => tokio::time::sleep(POLL_INTERVAL).await,
            Err(_) => return Err(LeaveError::AgentRuns(folder.to_owned())),
        }
    }
}

fn ignore_not_found(result: std::io::Result<()>) -> std::io::Result<()> {
    match result {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
