//! Whether this node and the deployments that it answers for are there, told to an MQTT broker and so to Home Assistant.
//! Nothing here is heard by anybody else of Russet: a broker that is away, slow or wrong costs a line of the log.
//!
//! ```text
//! supervise ─▶ which deployments answer here ─▶ one session each, and one for the node ─▶ broker
//! agent ends, is killed, its machine is lost ─▶ connections end ─▶ broker publishes each one's last will: offline
//! ```
//!
//! A connection has one last will, so everybody who is present has a connection of his own.

pub mod broker;
pub mod topics;
mod connection;
mod tls_bridge;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use self::broker::Broker;
use self::topics::TopicNames;
use self::connection::{MqttConnection, BrokerTransport};

/// So long a broker is given to take back what it was told of a node that is no more.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Whom presence is told, and how.
#[derive(Clone, Debug)]
pub struct MqttConfig {
    /// The broker.
    pub broker: Broker,
    /// How topics begin.
    pub names: TopicNames,
    /// After half as much time again the broker calls somebody silent lost.
    pub keep_alive: Duration,
}

/// A deployment by namespace and name.
pub type DeploymentKey = (String, String);

/// Where the supervisor says which deployments answer here. Nobody may listen.
#[derive(Clone, Debug)]
pub(crate) struct MqttHandle(Arc<watch::Sender<BTreeSet<DeploymentKey>>>);

impl MqttHandle {
    /// These answer here, and no others.
    pub fn set(&self, answering: BTreeSet<DeploymentKey>) {
        self.0.send_if_modified(|known| {
            let other = *known != answering;
            *known = answering;
            other
        });
    }
}

/// The presence of one node; it ends with this.
#[derive(Debug)]
pub struct MqttPresence {
    serving: Arc<watch::Sender<BTreeSet<DeploymentKey>>>,
    removed: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl MqttPresence {
    /// Tells that `node` is there, if anybody is to be told. The agent's own folder holds the socket of a connection
    /// over TLS.
    pub fn start(config: Option<MqttConfig>, node: &str, folder: &Path) -> Self {
        let (answering, wanted) = watch::channel(BTreeSet::new());
        let (removed, forget) = watch::channel(false);
        let mut tasks = JoinSet::new();
        if let Some(config) = config {
            let way = BrokerTransport::open(&config.broker, folder, &mut tasks);
            let names = &config.names;
            let own = MqttConnection::new(&config, names.node(node), way.clone());
            tasks.spawn(own.run(forget));
            tasks.spawn(run(config, node.to_owned(), way, wanted));
        }
        Self { serving: Arc::new(answering), removed, tasks }
    }

    /// Where to say which deployments answer here.
    pub(crate) fn handle(&self) -> MqttHandle {
        MqttHandle(self.serving.clone())
    }

    /// Says that these deployments answer here, and no others.
    pub fn set_serving(&self, deployments: BTreeSet<DeploymentKey>) {
        self.handle().set(deployments);
    }

    /// Ends. Of a node that was removed from its cluster nothing is left at the broker, where that can be reached; any
    /// other is offline, which its last will says.
    pub async fn end(mut self, removed: bool) {
        if removed && !self.tasks.is_empty() {
            self.removed.send_replace(true);
            // The node's own session ends first, by itself; nobody else does.
            tokio::time::timeout(DISCONNECT_TIMEOUT, self.tasks.join_next()).await.ok();
        }
        self.tasks.shutdown().await;
    }
}

/// Keeps a session for each deployment that answers here.
async fn run(
    config: MqttConfig,
    node: String,
    way: BrokerTransport,
    mut wanted: watch::Receiver<BTreeSet<DeploymentKey>>,
) {
    let mut sessions = JoinSet::new();
    let mut running: BTreeMap<DeploymentKey, AbortHandle> = BTreeMap::new();
    loop {
        let answering = wanted.borrow_and_update().clone();
        running.retain(|deployment, session| {
            let stays = answering.contains(deployment);
            if !stays {
                // Its connection ends without a farewell, and its last will is what is said of it.
                session.abort();
            }
            stays
        });
        for deployment in answering {
            let (namespace, name) = &deployment;
            let entity = config.names.deployment(namespace, name, &node);
            let session = MqttConnection::new(&config, entity, way.clone());
            let start = || sessions.spawn(session.run_until_dropped());
            running.entry(deployment).or_insert_with(start);
        }
        // Whoever ended has to be taken out of the set.
        while sessions.try_join_next().is_some() {}
        if wanted.changed().await.is_err() {
            return;
        }
    }
}
