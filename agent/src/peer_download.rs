//! Peer download: a model from other nodes to this one, over all paths between them at once. Each connection
//! requests the next piece as soon as it has one, so that each path carries what it can. Every chunk is
//! verified against the manifest, and the manifest against the content id from the operator, so that no peer
//! has to be trusted.
//!
//! ```text
//! paths ─▶ connections ─▶ piece picker ─▶ write ─▶ read again, verify ─▶ publish
//! ```

mod connection;
mod path;
mod piece_picker;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::seq::SliceRandom as _;
use russet_rpc::tls::Connector;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

pub use self::path::PeerPath;
pub(crate) use self::path::paths;
use self::piece_picker::PiecePicker;
use crate::peers::client::{DialError, PeerClient};
use crate::peers::models;
use crate::store::{
    IncomingModel, Manifest, Published, SourceSpec, Store, StoreError, TransferProgress, TransferStage,
};
use crate::transfer_limits::TransferLimiter;

/// Connections per path: enough that one always has bytes in flight while another sends its request.
const CONNECTIONS_PER_PATH: usize = 3;
/// Poll interval for paths.
const PATH_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time without a byte after which the download fails for now.
const STALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum size of a manifest: that of a model with a trillion parameters has some five megabytes.
const MAX_MANIFEST_BYTES: usize = 64 << 20;

/// Downloads models from other nodes.
#[derive(Clone)]
pub struct PeerDownloader {
    /// Destination.
    pub store: Store,
    /// TLS connector with this node's identity.
    pub connector: Connector,
    /// Rate limit for bytes from other nodes.
    pub limiter: TransferLimiter,
}

/// State shared by the connections of one download.
struct Transfer {
    id: String,
    incoming: IncomingModel,
    limiter: TransferLimiter,
    picker: Mutex<PiecePicker>,
    /// Notified when a piece may be requested again, or the download is complete.
    changed: Notify,
    /// Active connections over non-fallback paths, by peer.
    active_connections: Mutex<BTreeMap<String, usize>>,
    errors: Mutex<TransferErrors>,
    /// Peers that sent data which does not match the manifest.
    corrupt_peers: Mutex<BTreeSet<String>>,
    progress: watch::Sender<TransferProgress>,
}

struct TransferErrors {
    /// Time of the last received bytes.
    last_received: Instant,
    last_error: Option<String>,
    /// A disk error, which ends the download.
    fatal: Option<StoreError>,
}

impl PeerDownloader {
    /// Downloads the model with this content id over the available paths, and publishes it as `spec`.
    /// Resumes an earlier attempt.
    ///
    /// # Errors
    ///
    /// [`StoreError::Peers`] where no peer sends it, and disk errors.
    pub async fn download(
        &self,
        spec: &SourceSpec,
        id: &str,
        paths: impl Fn() -> BTreeSet<PeerPath> + Send,
        progress: &watch::Sender<TransferProgress>,
    ) -> Result<Published, StoreError> {
        if let Some(published) = self.store.adopt(spec, id).await? {
            return Ok(published);
        }
        progress.send_modify(|state| state.stage = TransferStage::Resolving);
        let manifest = self.manifest(id, &paths()).await?;
        let (store, asked) = (self.store.clone(), spec.clone());
        let opened = tokio::task::spawn_blocking(move || store.receive(&asked, manifest)).await;
        let receiving = opened.map_err(|error| StoreError::io(id)(std::io::Error::other(error)))??;
        let transfer = Arc::new(Transfer::new(id, receiving, self.limiter.clone(), progress.clone()));
        self.transfer_chunks(&transfer, paths).await?;
        progress.send_modify(|state| state.stage = TransferStage::Verifying);
        self.store.publish_received(spec, &transfer.incoming).await
    }

    /// The manifest, from the first peer that has the right one.
    async fn manifest(&self, id: &str, paths: &BTreeSet<PeerPath>) -> Result<Manifest, StoreError> {
        let mut last_error = None;
        for path in paths {
            let asked = async {
                let mut peer =
                    PeerClient::connect(&self.connector, &path.peer, &path.egress, path.to).await?;
                peer.get(&models::manifest_path(id), MAX_MANIFEST_BYTES).await
            };
            match asked.await.map(|parts| serde_json::from_slice::<Manifest>(&parts.concat())) {
                Ok(Ok(manifest)) if manifest.matches_id(id) => return Ok(manifest),
                Ok(_) => last_error = Some(format!("node {} has another manifest of it", path.peer)),
                Err(error) => last_error = Some(format!("node {}: {error}", path.peer)),
            }
        }
        Err(peers_error(id, last_error))
    }

    /// Keeps connections over all paths until every chunk is complete.
    async fn transfer_chunks(
        &self,
        transfer: &Arc<Transfer>,
        paths: impl Fn() -> BTreeSet<PeerPath> + Send,
    ) -> Result<(), StoreError> {
        let mut running: BTreeMap<PeerPath, JoinSet<()>> = BTreeMap::new();
        let mut numbers = 0..;
        loop {
            let usable = transfer.exclude_corrupt(paths());
            running.retain(|path, _| usable.contains(path));
            for path in usable {
                running.entry(path.clone()).or_insert_with(|| {
                    let mut connections = JoinSet::new();
                    for number in numbers.by_ref().take(CONNECTIONS_PER_PATH) {
                        let (path, connector) = (path.clone(), self.connector.clone());
                        connections.spawn(connection::run(number, path, connector, transfer.clone()));
                    }
                    connections
                });
            }
            transfer.remove_unreachable(&running);
            if transfer.picker().is_whole() {
                break;
            }
            transfer.check_stalled(running.is_empty())?;
            tokio::time::timeout(PATH_POLL_INTERVAL, transfer.wait_end()).await.ok();
        }
        for connections in running.values_mut() {
            connections.shutdown().await;
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn peers_error(id: &str, last_error: Option<String>) -> StoreError {
    let detail = last_error.unwrap_or_else(|| "no path leads to any of them".to_owned());
    StoreError::Peers { id: id.chars().take(12).collect(), detail }
}

impl Transfer {
    fn new(
        id: &str,
        incoming: IncomingModel,
        limiter: TransferLimiter,
        progress: watch::Sender<TransferProgress>,
    ) -> Self {
        let held = incoming.local_chunks();
        let lengths: Vec<u64> = held.chunks().iter().map(|chunk| chunk.length).collect();
        let mut order: Vec<u64> = (0..lengths.len() as u64).collect();
        order.shuffle(&mut rand::rng());
        let board = PiecePicker::new(lengths, &held.complete(), order);
        let (done, manifest) = (incoming.bytes_done(), held.manifest().clone());
        progress.send_modify(|state| {
            state.stage = TransferStage::Downloading;
            (state.done, state.total) = (done, manifest.bytes());
            (state.commit, state.shape) = (manifest.commit.clone(), Some(manifest.shape.clone()));
        });
        let errors = TransferErrors { last_received: Instant::now(), last_error: None, fatal: None };
        Self {
            id: id.to_owned(),
            incoming,
            limiter,
            picker: Mutex::new(board),
            changed: Notify::new(),
            active_connections: Mutex::default(),
            errors: Mutex::new(errors),
            corrupt_peers: Mutex::default(),
            progress,
        }
    }

    fn picker(&self) -> MutexGuard<'_, PiecePicker> {
        lock(&self.picker)
    }

    /// Paths to peers that sent no corrupt data.
    fn exclude_corrupt(&self, paths: BTreeSet<PeerPath>) -> BTreeSet<PeerPath> {
        let liars = lock(&self.corrupt_peers);
        paths.into_iter().filter(|path| !liars.contains(&path.peer)).collect()
    }

    /// Removes peers without a path from the picker.
    fn remove_unreachable(&self, running: &BTreeMap<PeerPath, JoinSet<()>>) {
        let mut board = self.picker();
        let removed = board.peers().filter(|peer| !running.keys().any(|path| path.peer == **peer));
        let removed: Vec<String> = removed.cloned().collect();
        for peer in removed {
            board.remove_peer(&peer);
        }
    }

    /// Fails when the download has stalled, with the last error.
    fn check_stalled(&self, alone: bool) -> Result<(), StoreError> {
        let mut errors = lock(&self.errors);
        if let Some(fatal) = errors.fatal.take() {
            return Err(fatal);
        }
        let betrayed = alone && !lock(&self.corrupt_peers).is_empty();
        if errors.last_received.elapsed() < STALL_TIMEOUT && !betrayed {
            return Ok(());
        }
        Err(peers_error(&self.id, errors.last_error.take()))
    }

    /// Waits until the download is complete, the disk fails, or a peer is excluded.
    async fn wait_end(&self) {
        let liars = lock(&self.corrupt_peers).len();
        loop {
            let changed = self.changed.notified();
            let fatal = lock(&self.errors).fatal.is_some();
            if self.picker().is_whole() || fatal || lock(&self.corrupt_peers).len() > liars {
                return;
            }
            changed.await;
        }
    }

    fn record_failure(&self, path: &PeerPath, error: &DialError) {
        let message = format!("node {} at {}: {error}", path.peer, path.to);
        tracing::debug!(message, "a path to a node with the model failed");
        lock(&self.errors).last_error = Some(message);
    }

    fn reject_peer(&self, peer: String) {
        tracing::warn!(
            peer,
            id = self.id,
            "a node sent bytes that do not match the model's hashes; nothing more is requested from it"
        );
        let mut errors = lock(&self.errors);
        errors.last_error = Some(format!(
            "node {peer} sent bytes that do not match the model's hashes; its disk may be failing"
        ));
        drop(errors);
        lock(&self.corrupt_peers).insert(peer);
        self.changed.notify_waiters();
    }

    fn fail(&self, error: StoreError) {
        lock(&self.errors).fatal = Some(error);
        self.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests;
