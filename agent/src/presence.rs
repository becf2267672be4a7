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
pub mod entity;
mod session;
mod tls;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use self::broker::Broker;
use self::entity::Names;
use self::session::{Session, Way};

/// So long a broker is given to take back what it was told of a node that is no more.
const FAREWELL: Duration = Duration::from_secs(5);

/// Whom presence is told, and how.
#[derive(Clone, Debug)]
pub struct PresenceConfig {
    /// The broker.
    pub broker: Broker,
    /// How topics begin.
    pub names: Names,
    /// After half as much time again the broker calls somebody silent lost.
    pub keep_alive: Duration,
}

/// A deployment by namespace and name.
pub type Deployment = (String, String);

/// Where the supervisor says which deployments answer here. Nobody may listen.
#[derive(Clone, Debug)]
pub(crate) struct Teller(Arc<watch::Sender<BTreeSet<Deployment>>>);

impl Teller {
    /// These answer here, and no others.
    pub fn set(&self, answering: BTreeSet<Deployment>) {
        self.0.send_if_modified(|known| {
            let other = *known != answering;
            *known = answering;
            other
        });
    }
}

/// The presence of one node; it ends with this.
#[derive(Debug)]
pub struct Presence {
    answering: Arc<watch::Sender<BTreeSet<Deployment>>>,
    removed: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl Presence {
    /// Tells that `node` is there, if anybody is to be told. The agent's own folder holds the socket of a connection
    /// over TLS.
    pub fn start(config: Option<PresenceConfig>, node: &str, folder: &Path) -> Self {
        let (answering, wanted) = watch::channel(BTreeSet::new());
        let (removed, forget) = watch::channel(false);
        let mut tasks = JoinSet::new();
        if let Some(config) = config {
            let way = Way::open(&config.broker, folder, &mut tasks);
            let names = &config.names;
            let own = Session::new(&config, names.node(node), way.clone());
            tasks.spawn(own.keep(forget));
            tasks.spawn(follow(config, node.to_owned(), way, wanted));
        }
        Self { answering: Arc::new(answering), removed, tasks }
    }

    /// Where to say which deployments answer here.
    pub(crate) fn teller(&self) -> Teller {
        Teller(self.answering.clone())
    }

    /// Says that these deployments answer here, and no others.
    pub fn answering(&self, deployments: BTreeSet<Deployment>) {
        self.teller().set(deployments);
    }

    /// Ends. Of a node that was removed from its cluster nothing is left at the broker, where that can be reached; any
    /// other is offline, which its last will says.
    pub async fn end(mut self, removed: bool) {
        if removed && !self.tasks.is_empty() {
            self.removed.send_replace(true);
            // The node's own session ends first, by itself; nobody else does.
            tokio::time::timeout(FAREWELL, self.tasks.join_next()).await.ok();
        }
        self.tasks.shutdown().await;
    }
}

/// Keeps a session for each deployment that answers here.
async fn follow(
    config: PresenceConfig,
    node: String,
    way: Way,
    mut wanted: watch::Receiver<BTreeSet<Deployment>>,
) {
    let mut sessions = JoinSet::new();
    let mut running: BTreeMap<Deployment, AbortHandle> = BTreeMap::new();
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
            let session = Session::new(&config, entity, way.clone());
            let start = || sessions.spawn(session.keep_online());
            running.entry(deployment).or_insert_with(start);
        }
        // Whoever ended has to be taken out of the set.
        while sessions.try_join_next().is_some() {}
        if wanted.changed().await.is_err() {
            return;
        }
    }
}
