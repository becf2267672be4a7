//! A model from the machines that have it to this one, over every way between them at once. Each connection asks for
//! the next piece as soon as it has one, so that each way carries what it can; every chunk is held against the
//! manifest, and the manifest against the id that the operator names, so that no machine has to be trusted.
//!
//! ```text
//! ways ─▶ connections ─▶ board: which piece next ─▶ write ─▶ read again, check ─▶ publish
//! ```

mod board;
mod connection;
mod way;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::seq::SliceRandom as _;
use russet_rpc::tls::Connector;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use self::board::Board;
pub use self::way::Way;
pub(crate) use self::way::ways;
use crate::pace::Pace;
use crate::peers::dial::{DialError, Peer};
use crate::peers::models;
use crate::store::{Manifest, Progress, Published, Receiving, Stage, Store, StoreError, Wanted};

/// Connections of one way: enough that one always has bytes on the way while another one asks.
const CONNECTIONS: usize = 3;
/// Between two looks which ways there are.
const LOOK: Duration = Duration::from_secs(1);
/// Without a byte for so long, the machines that should have the model are given up for now.
const SILENCE: Duration = Duration::from_secs(20);
/// Most bytes of a manifest: one of a trillion parameters has some five.
const MANIFEST: usize = 64 << 20;

/// Brings models from other machines.
#[derive(Clone)]
pub struct Puller {
    /// Where they go.
    pub store: Store,
    /// What this machine shows the others.
    pub connector: Connector,
    /// How fast bytes may come from other machines.
    pub pace: Pace,
}

/// What the connections of one transfer share.
struct Transfer {
    id: String,
    receiving: Receiving,
    pace: Pace,
    board: Mutex<Board>,
    /// Something may be asked for again, or the end is reached.
    changed: Notify,
    /// Connections over ways that are not spare, by machine.
    answering: Mutex<BTreeMap<String, usize>>,
    trouble: Mutex<Trouble>,
    /// Machines that sent what is not in the manifest.
    liars: Mutex<BTreeSet<String>>,
    progress: watch::Sender<Progress>,
}

struct Trouble {
    /// When bytes came last.
    heard: Instant,
    last: Option<String>,
    /// The disk, with which nothing goes on.
    fatal: Option<StoreError>,
}

impl Puller {
    /// Receives the model with these bytes over the ways that there are, and publishes it as `wanted`. Goes on where
    /// an earlier try stopped.
    ///
    /// # Errors
    ///
    /// [`StoreError::Peers`] where no machine gives it, and whatever the disk does.
    pub async fn pull(
        &self,
        wanted: &Wanted,
        id: &str,
        ways: impl Fn() -> BTreeSet<Way> + Send,
        progress: &watch::Sender<Progress>,
    ) -> Result<Published, StoreError> {
        if let Some(published) = self.store.adopt(wanted, id).await? {
            return Ok(published);
        }
        progress.send_modify(|state| state.stage = Stage::Resolving);
        let manifest = self.manifest(id, &ways()).await?;
        let (store, asked) = (self.store.clone(), wanted.clone());
        let opened = tokio::task::spawn_blocking(move || store.receive(&asked, manifest)).await;
        let receiving = opened.map_err(|error| StoreError::io(id)(std::io::Error::other(error)))??;
        let transfer = Arc::new(Transfer::new(id, receiving, self.pace.clone(), progress.clone()));
        self.carry(&transfer, ways).await?;
        progress.send_modify(|state| state.stage = Stage::Verifying);
        self.store.received(wanted, &transfer.receiving).await
    }

    /// What the files are, from the first machine that says so rightly.
    async fn manifest(&self, id: &str, ways: &BTreeSet<Way>) -> Result<Manifest, StoreError> {
        let mut trouble = None;
        for way in ways {
            let asked = async {
                let mut peer = Peer::connect(&self.connector, &way.peer, way.from, way.to).await?;
                peer.get(&models::manifest(id), MANIFEST).await
            };
            match asked.await.map(|parts| serde_json::from_slice::<Manifest>(&parts.concat())) {
                Ok(Ok(manifest)) if manifest.is_of(id) => return Ok(manifest),
                Ok(_) => trouble = Some(format!("node {} says something else of it", way.peer)),
                Err(error) => trouble = Some(format!("node {}: {error}", way.peer)),
            }
        }
        Err(peers(id, trouble))
    }

    /// Keeps connections over all ways until every chunk is here.
    async fn carry(
        &self,
        transfer: &Arc<Transfer>,
        ways: impl Fn() -> BTreeSet<Way> + Send,
    ) -> Result<(), StoreError> {
        let mut running: BTreeMap<Way, JoinSet<()>> = BTreeMap::new();
        let mut numbers = 0..;
        loop {
            let wanted = transfer.honest(ways());
            running.retain(|way, _| wanted.contains(way));
            for way in wanted {
                running.entry(way.clone()).or_insert_with(|| {
                    let mut connections = JoinSet::new();
                    for number in numbers.by_ref().take(CONNECTIONS) {
                        let (way, connector) = (way.clone(), self.connector.clone());
                        connections.spawn(connection::keep(number, way, connector, transfer.clone()));
                    }
                    connections
                });
            }
            transfer.forget(&running);
            if transfer.board().is_whole() {
                break;
            }
            transfer.is_hopeless(running.is_empty())?;
            tokio::time::timeout(LOOK, transfer.ended()).await.ok();
        }
        for connections in running.values_mut() {
            connections.shutdown().await;
        }
        Ok(())
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn peers(id: &str, trouble: Option<String>) -> StoreError {
    let detail = trouble.unwrap_or_else(|| "there is no way to any of them".to_owned());
    StoreError::Peers { id: id.chars().take(12).collect(), detail }
}

impl Transfer {
    fn new(id: &str, receiving: Receiving, pace: Pace, progress: watch::Sender<Progress>) -> Self {
        let held = receiving.held();
        let lengths: Vec<u64> = held.chunks().iter().map(|chunk| chunk.length).collect();
        let mut order: Vec<u64> = (0..lengths.len() as u64).collect();
        order.shuffle(&mut rand::rng());
        let board = Board::new(lengths, &held.whole(), order);
        let (done, manifest) = (receiving.done(), held.manifest().clone());
        progress.send_modify(|state| {
            state.stage = Stage::Downloading;
            (state.done, state.total) = (done, manifest.bytes());
            (state.commit, state.shape) = (manifest.commit.clone(), Some(manifest.shape.clone()));
        });
        let trouble = Trouble { heard: Instant::now(), last: None, fatal: None };
        Self {
            id: id.to_owned(),
            receiving,
            pace,
            board: Mutex::new(board),
            changed: Notify::new(),
            answering: Mutex::default(),
            trouble: Mutex::new(trouble),
            liars: Mutex::default(),
            progress,
        }
    }

    fn board(&self) -> MutexGuard<'_, Board> {
        locked(&self.board)
    }

    /// Ways to machines that did not lie.
    fn honest(&self, ways: BTreeSet<Way>) -> BTreeSet<Way> {
        let liars = locked(&self.liars);
        ways.into_iter().filter(|way| !liars.contains(&way.peer)).collect()
    }

    /// Forgets what machines have to which there is no way any more.
    fn forget(&self, running: &BTreeMap<Way, JoinSet<()>>) {
        let mut board = self.board();
        let gone = board.peers().filter(|peer| !running.keys().any(|way| way.peer == **peer));
        let gone: Vec<String> = gone.cloned().collect();
        for peer in gone {
            board.gone(&peer);
        }
    }

    /// Whether nothing comes any more, and why.
    fn is_hopeless(&self, alone: bool) -> Result<(), StoreError> {
        let mut trouble = locked(&self.trouble);
        if let Some(fatal) = trouble.fatal.take() {
            return Err(fatal);
        }
        let betrayed = alone && !locked(&self.liars).is_empty();
        if trouble.heard.elapsed() < SILENCE && !betrayed {
            return Ok(());
        }
        Err(peers(&self.id, trouble.last.take()))
    }

    /// Waits until the last chunk is here, the disk fails, or a machine is no longer asked.
    async fn ended(&self) {
        let liars = locked(&self.liars).len();
        loop {
            let changed = self.changed.notified();
            let fatal = locked(&self.trouble).fatal.is_some();
            if self.board().is_whole() || fatal || locked(&self.liars).len() > liars {
                return;
            }
            changed.await;
        }
    }

    fn failed(&self, way: &Way, error: &DialError) {
        let message = format!("node {} at {}: {error}", way.peer, way.to);
        tracing::debug!(message, "a way to a model failed");
        locked(&self.trouble).last = Some(message);
    }

    fn lied(&self, peer: String) {
        tracing::warn!(
            peer,
            id = self.id,
            "what a node gave of a model was not that; nothing more is asked of it"
        );
        let mut trouble = locked(&self.trouble);
        trouble.last =
            Some(format!("node {peer} gave bytes that are not those of the model; its disk may be failing"));
        drop(trouble);
        locked(&self.liars).insert(peer);
        self.changed.notify_waiters();
    }

    fn broken(&self, error: StoreError) {
        locked(&self.trouble).fatal = Some(error);
        self.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests;
