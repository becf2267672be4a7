//! The thread that writes: what waits for it becomes durable together. While one commit is on its way to the disk, the next
//! ones gather, so nothing waits for a timer.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::database::Database;
use super::{Change, ResponseStoreError};

/// Writes in one commit.
const MAX_GROUP: usize = 64;
/// Bytes after which a group takes no more: its writers wait for all of it.
const MAX_GROUP_BYTES: usize = 8 << 20;
/// Writes that wait; more wait for a place.
const MAX_WAITING: usize = 4 * MAX_GROUP;
/// Time between two looks for what is too old.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(3600);
/// What is too old and deleted at once; writes come between.
const MAX_EXPIRED: usize = 64;

/// A write that waits.
struct PendingWrite {
    change: Change,
    committed: oneshot::Sender<Result<usize, ResponseStoreError>>,
    _place: OwnedSemaphorePermit,
}

/// Writes on their way to the disk. The thread ends with it, after the last of them.
pub(super) struct CommitQueue {
    sender: Sender<PendingWrite>,
    places: Arc<Semaphore>,
}

impl CommitQueue {
    /// Starts the thread.
    pub(super) fn start(mut database: Database, retention: Duration) -> std::io::Result<Self> {
        let (sender, receiver) = mpsc::channel();
        let write = move || run(&mut database, &receiver, retention);
        std::thread::Builder::new().name("response-store".to_owned()).spawn(write)?;
        Ok(Self { sender, places: Arc::new(Semaphore::new(MAX_WAITING)) })
    }

    /// Makes a change durable; the number of rows that it changed.
    pub(super) async fn commit(&self, change: Change) -> Result<usize, ResponseStoreError> {
        let ended = || {
            ResponseStoreError::Failed("the thread that writes has ended; see the gateway's log".to_owned())
        };
        let place = self.places.clone().acquire_owned().await.map_err(|_| ended())?;
        let (committed, result) = oneshot::channel();
        self.sender.send(PendingWrite { change, committed, _place: place }).map_err(|_| ended())?;
        result.await.map_err(|_| ended())?
    }
}

fn run(database: &mut Database, receiver: &Receiver<PendingWrite>, retention: Duration) {
    let mut expiry_due = Instant::now();
    loop {
        match receiver.recv_timeout(expiry_due.saturating_duration_since(Instant::now())) {
            Ok(first) => commit(database, group(first, receiver)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if expiry_due <= Instant::now() {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let expired = database.expire(now.as_secs(), retention, MAX_EXPIRED);
            let expired = expired.unwrap_or_else(|error| {
                tracing::warn!(%error, "what is too old could not be deleted from the store");
                0
            });
            if expired < MAX_EXPIRED {
                expiry_due = Instant::now() + EXPIRY_INTERVAL;
            }
        }
    }
}

/// What waits now.
fn group(first: PendingWrite, receiver: &Receiver<PendingWrite>) -> Vec<PendingWrite> {
    let mut bytes = first.change.bytes();
    let mut group = vec![first];
    while group.len() < MAX_GROUP
        && bytes < MAX_GROUP_BYTES
        && let Ok(next) = receiver.try_recv()
    {
        bytes += next.change.bytes();
        group.push(next);
    }
    group
}

/// Commits a group; where that fails, each of its writes alone, so that one which is too large fails none of the others.
fn commit(database: &mut Database, group: Vec<PendingWrite>) {
    let changes: Vec<&Change> = group.iter().map(|waiting| &waiting.change).collect();
    let together = if changes.len() > 1 { database.commit(&changes).ok() } else { None };
    let results: Vec<Result<usize, ResponseStoreError>> = match together {
        Some(changed) => changed.into_iter().map(Ok).collect(),
        None => changes.iter().map(|change| Ok(database.commit(&[change])?.iter().sum())).collect(),
    };
    for (PendingWrite { committed, .. }, result) in group.into_iter().zip(results) {
        if let Err(error) = &result
            && !matches!(
                error,
                ResponseStoreError::Deleted
                    | ResponseStoreError::InUse { .. }
                    | ResponseStoreError::InboxFull { .. }
                    | ResponseStoreError::RunsFull { .. }
            )
        {
            tracing::error!(%error, "the store of responses failed a write");
        }
        // A client that left needs no word of it.
        let _ = committed.send(result);
    }
}
