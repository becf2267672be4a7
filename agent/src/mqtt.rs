//! MQTT presence: publishes to a broker, and so to Home Assistant, whether this node and its deployments are
//! online. The rest of Russet does not depend on it: an unreachable, slow or faulty broker costs a log line.
//!
//! ```text
//! supervise ─▶ deployments served here ─▶ one connection each, and one for the node ─▶ broker
//! agent exits, is killed, its machine is lost ─▶ connections end ─▶ broker publishes each last will: offline
//! ```
//!
//! An MQTT connection has one last will, so every entity has its own connection.

mod connection;
pub mod topics;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use russet_mqtt::{Broker, BrokerTransport};
use russet_telemetry::tasks::{TaskEnded, TaskSet};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use self::connection::MqttConnection;
use self::topics::TopicNames;

/// Time for the broker to remove the retained messages of a removed node.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Configuration of the MQTT presence.
#[derive(Clone, Debug)]
pub struct MqttConfig {
    /// The broker.
    pub broker: Broker,
    /// Topic prefixes.
    pub names: TopicNames,
    /// MQTT keep-alive; the broker considers a client lost after one and a half times this.
    pub keep_alive: Duration,
}

/// A deployment by namespace and name.
pub type DeploymentKey = (String, String);

/// The supervisor's handle to set the deployments served here. There may be no broker.
#[derive(Clone, Debug)]
pub(crate) struct MqttHandle(Arc<watch::Sender<BTreeSet<DeploymentKey>>>);

impl MqttHandle {
    /// Sets the deployments served here.
    pub fn set(&self, answering: BTreeSet<DeploymentKey>) {
        self.0.send_if_modified(|known| {
            let other = *known != answering;
            *known = answering;
            other
        });
    }
}

/// Presence of one node; ends when dropped.
#[derive(Debug)]
pub struct MqttPresence {
    serving: Arc<watch::Sender<BTreeSet<DeploymentKey>>>,
    removed: watch::Sender<bool>,
    tasks: TaskSet,
}

impl MqttPresence {
    /// Starts the presence of `node`, if configured. The agent's directory holds the socket of a TLS
    /// connection.
    pub fn start(config: Option<MqttConfig>, node: &str, folder: &Path) -> Self {
        let (answering, desired) = watch::channel(BTreeSet::new());
        let (removed, forget) = watch::channel(false);
        let mut tasks = TaskSet::default();
        if let Some(config) = config {
            let transport = {
                let socket = || crate::process::record::short_path(&folder.join("mqtt.sock"));
                BrokerTransport::open(&config.broker, socket, &mut tasks)
            };
            let names = &config.names;
            let own = MqttConnection::new(&config, names.node(node), transport.clone());
            tasks.spawn("MQTT presence of the node", own.run(forget));
            tasks.spawn("MQTT presence", run(config, node.to_owned(), transport, desired));
        }
        Self { serving: Arc::new(answering), removed, tasks }
    }

    /// Handle to set the deployments served here.
    pub(crate) fn handle(&self) -> MqttHandle {
        MqttHandle(self.serving.clone())
    }

    /// Sets the deployments served here.
    pub fn set_serving(&self, deployments: BTreeSet<DeploymentKey>) {
        self.handle().set(deployments);
    }

    /// Waits until one of its tasks ends, which none does by itself.
    pub(crate) async fn ended(&mut self) -> TaskEnded {
        self.tasks.ended().await
    }

    /// Stops. Retained messages of a node that was removed from its cluster are removed from the broker, if
    /// reachable; any other node goes offline by its last will.
    pub async fn end(mut self, removed: bool) {
        if removed && !self.tasks.is_empty() {
            self.removed.send_replace(true);
            // The node's own connection ends first, by itself; the others are aborted.
            tokio::time::timeout(DISCONNECT_TIMEOUT, self.tasks.ended()).await.ok();
        }
        self.tasks.shutdown().await;
    }
}

/// Keeps a connection for each deployment served here.
async fn run(
    config: MqttConfig,
    node: String,
    transport: BrokerTransport,
    mut desired: watch::Receiver<BTreeSet<DeploymentKey>>,
) {
    let mut sessions = JoinSet::new();
    let mut running: BTreeMap<DeploymentKey, AbortHandle> = BTreeMap::new();
    loop {
        let answering = desired.borrow_and_update().clone();
        running.retain(|deployment, session| {
            let stays = answering.contains(deployment);
            if !stays {
                // Its connection ends without DISCONNECT, so the broker publishes its last will.
                session.abort();
            }
            stays
        });
        for deployment in answering {
            let (namespace, name) = &deployment;
            let entity = config.names.deployment(namespace, name, &node);
            let session = MqttConnection::new(&config, entity, transport.clone());
            let start = || sessions.spawn(session.run_until_dropped());
            running.entry(deployment).or_insert_with(start);
        }
        // Remove ended tasks from the set.
        while sessions.try_join_next().is_some() {}
        if desired.changed().await.is_err() {
            return;
        }
    }
}
