//! Leaving a cluster, on the machine itself: the node asks to be removed, waits until what runs on it
//! has moved away, stops its engines and forgets who it was. Model files stay unless they are to go.
//!
//! ```text
//! marked ─▶ InferenceNode deleted ─▶ drained and gone ─▶ agent ends ─▶ identity removed
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::api::DeleteParams;
use kube::{Api, Client};
use russet_crds::InferenceNode;
use thiserror::Error;

use crate::helper::reconcile::release;
use crate::join::identity::{self, NodeIdentity, IdentityError};
use crate::{agent_dir, lock, stop_engines};

/// Says that this machine is leaving: its agent keeps its hands off the model files.
const LEAVING_MARKER: &str = "leaving";
/// Says that this machine leaves whatever the cluster says: its agent ends at once.
const FORCED_MARKER: &str = "left";
/// The operator drains a node for five minutes before it lets it go anyway.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(360);
/// An agent whose node is gone ends within seconds.
const AGENT_EXIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Between two looks.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// An API server that hangs must not hang the leaving.
const READ_TIMEOUT: Duration = Duration::from_secs(20);

/// How to leave.
#[derive(Clone, Debug)]
pub struct LeaveConfig {
    /// Folder of this machine's state.
    pub data_dir: PathBuf,
    /// Whether to leave without asking the cluster.
    pub force: bool,
    /// Whether to remove the model files too.
    pub purge: bool,
    /// Socket of the root helper, which takes back what it did for the node.
    pub helper: PathBuf,
}

/// Why a machine could not leave.
#[derive(Debug, Error)]
pub enum LeaveError {
    /// There is no identity.
    #[error("{0} holds no identity of a node; this machine has not joined a cluster, or has left it")]
    NotJoined(PathBuf),
    /// Files.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// The cluster did not answer, or refused.
    #[error(
        "node {node} could not ask {server} to be removed; try again when it answers, or leave with --force and remove the node there: kubectl delete inferencenode {node}"
    )]
    Api {
        /// The node.
        node: String,
        /// The API server.
        server: String,
        /// Why.
        #[source]
        source: Box<kube::Error>,
    },
    /// The cluster has not let the node go.
    #[error(
        "node {node} is still being drained after {} s; run `russet leave` again, or leave with --force",
        DRAIN_TIMEOUT.as_secs()
    )]
    StillThere {
        /// The node.
        node: String,
    },
    /// The agent does not end.
    #[error("the agent that runs with {0} does not end; stop it and run `russet leave` again")]
    AgentRuns(PathBuf),
}

/// The file whose presence says that the machine is leaving.
pub(crate) fn leaving_marker(folder: &Path) -> PathBuf {
    folder.join(LEAVING_MARKER)
}

/// Waits until somebody insists on leaving.
pub(crate) async fn wait_forced(folder: &Path) {
    let left = folder.join(FORCED_MARKER);
    while !left.exists() {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Leaves; returns the name the node had.
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
        // The machine stays for now, and its agent minds its model files again.
        std::fs::remove_file(leaving_marker(&folder)).ok();
        return Err(error);
    }
    identity::write(&folder.join(FORCED_MARKER), "this machine has left its cluster\n")?;
    let held = wait_agent_exit(&folder).await?;
    stop_engines(&data_dir).await;
    // Its agent has done so where one ran.
    release(&helper, &identity.node).await;
    identity::remove(&folder)?;
    // Before what may fail or be interrupted: a mark that stayed would end the agent of the next joining.
    for name in ["joining.key", LEAVING_MARKER, FORCED_MARKER] {
        ignore_not_found(std::fs::remove_file(folder.join(name))).map_err(io(&folder.join(name)))?;
    }
    if purge {
        ignore_not_found(std::fs::remove_dir_all(folder.join("models"))).map_err(io(&folder.join("models")))?;
    }
    ignore_not_found(std::fs::remove_dir_all(folder.join("engines"))).map_err(io(&folder.join("engines")))?;
    drop(held);
    Ok(identity.node)
}

/// Asks the cluster to let the node go, and waits until it has.
async fn request_removal(identity: &NodeIdentity) -> Result<(), LeaveError> {
    let NodeIdentity { node, server, .. } = identity;
    let failed =
        |source| LeaveError::Api { node: node.clone(), server: server.clone(), source: Box::new(source) };
    let client: Client = identity.client(|config| config.read_timeout = Some(READ_TIMEOUT)).await?;
    let nodes: Api<InferenceNode> = Api::all(client);
    match nodes.delete(node, &DeleteParams::default()).await {
        Ok(_) => {}
        Err(error) if is_gone(&error) => return Ok(()),
        Err(error) => return Err(failed(error)),
    }
    let deadline = tokio::time::Instant::now() + DRAIN_TIMEOUT;
    loop {
        match nodes.get_opt(node).await {
            Ok(None) => return Ok(()),
            Err(error) if is_gone(&error) => return Ok(()),
            // Tried again: the request to leave was heard.
            Ok(Some(_)) | Err(_) if tokio::time::Instant::now() < deadline => {}
            Ok(Some(_)) => return Err(LeaveError::StillThere { node: node.clone() }),
            Err(error) => return Err(failed(error)),
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// A node that is gone is not found, and its ServiceAccount is nobody any more.
fn is_gone(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(answer) if matches!(answer.code, 401 | 404))
}

/// Waits until no agent holds the folder, and holds it.
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
