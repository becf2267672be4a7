//! The embedded store of a single server: a redb file with one writer thread. Writers queue; the thread takes
//! the whole queue, commits it as one batch with one fsync, publishes it to the watch cache, and only then
//! acknowledges. Reads never touch the disk.
//!
//! ```text
//! open ── commit has no room ──▶ full ── opened again, revision known ──▶ open
//!   └──── any other error, or another revision in the file ──▶ failed, until the process starts again
//! ```

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures::future::BoxFuture;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use tokio::sync::oneshot;

use super::cache::{Cache, EventKind, RING_EVENTS, Snapshot, StoreEvent, Watch};
use super::{Expect, Store, StoreError, StoredObject, Txn, TxnChange, TxnOutcome};

/// Current objects: key to create revision, revision (both 8 bytes, little endian) and JSON.
const CURRENT: TableDefinition<&str, &[u8]> = TableDefinition::new("current");
/// The newest revision, which must survive the deletion of objects.
const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
const REVISION: &str = "revision";
/// Maximum transactions per commit: enough to amortise an fsync, few enough that a burst is acknowledged in
/// steps.
const MAX_BATCH_TXNS: usize = 512;

/// Page cache of the file in bytes: all reads are served by the watch cache, so it only serves commits.
const PAGE_CACHE_BYTES: usize = 1 << 20;

/// Between two attempts to open a full disk's file again: each reads the whole file.
const REOPEN_INTERVAL: Duration = Duration::from_secs(1);

type Reply = oneshot::Sender<Result<TxnOutcome, StoreError>>;

/// The embedded store.
#[derive(Debug)]
pub struct Embedded {
    cache: Arc<Cache>,
    queue: Option<mpsc::Sender<(Txn, Reply)>>,
    writer: Option<JoinHandle<()>>,
    commits: Arc<AtomicU64>,
    failure: Failure,
}

/// Why the store accepts no writes, set by the writer.
#[derive(Clone, Debug, Default)]
struct Failure(Arc<Mutex<Option<StoreError>>>);

impl Failure {
    fn get(&self) -> Option<StoreError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, failure: Option<StoreError>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = failure;
    }
}

impl Embedded {
    /// Opens or creates the database and reads it into memory.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        Self::open_with_ring(path, RING_EVENTS)
    }

    /// As [`Self::open`], with a history of `ring` events.
    pub fn open_with_ring(path: &Path, ring: usize) -> Result<Self, StoreError> {
        let file = path.to_owned();
        let open = move || Ok(Database::builder().set_cache_size(PAGE_CACHE_BYTES).create(&file)?);
        Self::open_by(Box::new(open), REOPEN_INTERVAL, path, ring)
    }

    /// Opens the database at `path` by `open`, which is called again after the disk was full.
    fn open_by(
        open: OpenDatabase,
        reopen_interval: Duration,
        path: &Path,
        ring: usize,
    ) -> Result<Self, StoreError> {
        let failed = |why: String| StoreError::Open { path: path.display().to_string(), why };
        let database = open().map_err(|error| failed(error.to_string()))?;
        let (records, revision) = load(&database).map_err(|error| failed(error.to_string()))?;
        let revision = first_revision(revision, SystemTime::now());
        let cache = Arc::new(Cache::new(records, revision, ring));
        let commits = Arc::new(AtomicU64::new(0));
        let failure = Failure::default();
        let (queue, waiting) = mpsc::channel();
        let writer = {
            let (cache, commits, failure) = (cache.clone(), commits.clone(), failure.clone());
            let database = Some(database);
            let mut writer = Writer { open, reopen_interval, database, full: None, cache, commits, failure };
            std::thread::Builder::new()
                .name("store-writer".into())
                .spawn(move || writer.run(&waiting))
                .map_err(|error| failed(error.to_string()))?
        };
        Ok(Self { cache, queue: Some(queue), writer: Some(writer), commits, failure })
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        // Closing the queue ends the thread after its contents are durable; the file is released once the
        // thread is joined.
        self.queue.take();
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

/// An error if a process has opened the file. One that is damaged is not in use.
pub(super) fn check_unused(path: &Path) -> Result<(), String> {
    match Database::builder().open(path) {
        Err(error @ redb::DatabaseError::DatabaseAlreadyOpen) => Err(error.to_string()),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Creates a store with these objects, durably.
pub(super) fn create(path: &Path, records: &[StoredObject], revision: u64) -> Result<(), String> {
    let write = || -> Result<(), redb::Error> {
        let database = Database::builder().set_cache_size(PAGE_CACHE_BYTES).create(path)?;
        let writing = database.begin_write()?;
        {
            let mut current = writing.open_table(CURRENT)?;
            for record in records {
                current.insert(record.key.as_ref(), encode(record).as_slice())?;
            }
            writing.open_table(META)?.insert(REVISION, revision)?;
        }
        writing.commit()?;
        Ok(())
    };
    write().map_err(|error| error.to_string())
}

/// The revision at which a start begins: the clock in microseconds, which is later than every revision of
/// every history of this file, as nothing commits a million times a second; also of one that a restored file
/// knows nothing of. So every version from before this start has expired, and its watchers list anew. A clock
/// that went back is no harm: revisions only grow, and those of the future have expired too.
fn first_revision(stored: u64, now: SystemTime) -> u64 {
    let clock = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
    u64::try_from(clock).unwrap_or(0).max(stored.saturating_add(1))
}

fn load(database: &Database) -> Result<(Vec<StoredObject>, u64), redb::Error> {
    let opening = database.begin_write()?;
    opening.open_table(CURRENT)?;
    opening.open_table(META)?;
    opening.commit()?;
    let revision = stored_revision(database)?;
    let reading = database.begin_read()?;
    let mut records = Vec::new();
    for entry in reading.open_table(CURRENT)?.iter()? {
        let (key, value) = entry?;
        if let Some(record) = decode(key.value(), value.value()) {
            records.push(record);
        } else {
            tracing::warn!(key = key.value(), "a stored object is shorter than its header and is ignored");
        }
    }
    Ok((records, revision))
}

/// The newest revision in the file.
fn stored_revision(database: &Database) -> Result<u64, redb::Error> {
    let reading = database.begin_read()?;
    Ok(reading.open_table(META)?.get(REVISION)?.map_or(0, |value| value.value()))
}

fn encode(record: &StoredObject) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(16 + record.value.len());
    bytes.extend_from_slice(&record.create_revision.to_le_bytes());
    bytes.extend_from_slice(&record.revision.to_le_bytes());
    bytes.extend_from_slice(&record.value);
    bytes
}

fn decode(key: &str, bytes: &[u8]) -> Option<StoredObject> {
    let (created, rest) = bytes.split_first_chunk::<8>()?;
    let (revision, value) = rest.split_first_chunk::<8>()?;
    Some(StoredObject::new(
        key.into(),
        u64::from_le_bytes(*created),
        u64::from_le_bytes(*revision),
        Bytes::copy_from_slice(value),
    ))
}

/// The changes of one batch, decided against the cache and the batch's own earlier changes.
#[derive(Default)]
struct Batch {
    events: Vec<StoreEvent>,
    changed: HashMap<Arc<str>, Option<Arc<StoredObject>>>,
}

impl Batch {
    fn decide(&mut self, cache: &Cache, txn: Txn, revision: &mut u64) -> TxnOutcome {
        let current = match self.changed.get(txn.key.as_str()) {
            Some(changed) => changed.clone(),
            None => cache.get(&txn.key),
        };
        let holds = match (txn.expect, &current) {
            (Expect::Absent, None) => true,
            (Expect::Revision(expected), Some(record)) => record.revision == expected,
            (Expect::Absent, Some(_)) | (Expect::Revision(_), None) => false,
        };
        if !holds {
            return TxnOutcome::Conflict(current);
        }
        let key: Arc<str> =
            current.as_ref().map_or_else(|| txn.key.as_str().into(), |record| record.key.clone());
        let next = *revision + 1;
        let (kind, value, after) = match (txn.change, &current) {
            (TxnChange::Put(value), None) => (EventKind::Created, value, true),
            (TxnChange::Put(value), Some(_)) => (EventKind::Updated, value, true),
            (TxnChange::Delete, Some(record)) => (EventKind::Deleted, record.value.clone(), false),
            // Deleting a missing key changes nothing.
            (TxnChange::Delete, None) => return TxnOutcome::Conflict(None),
        };
        *revision = next;
        let created = current.as_ref().map_or(next, |record| record.create_revision);
        let record = Arc::new(StoredObject::new(key.clone(), created, next, value));
        self.changed.insert(key, after.then(|| record.clone()));
        self.events.push(StoreEvent { kind, record: record.clone(), previous: current });
        TxnOutcome::Committed(record)
    }

    fn commit(&self, database: &Database, revision: u64) -> Result<(), redb::Error> {
        // A write transaction is durable at commit by default: redb's default is `Durability::Immediate`.
        let writing = database.begin_write()?;
        {
            let mut current = writing.open_table(CURRENT)?;
            for (key, record) in &self.changed {
                match record {
                    Some(record) => current.insert(key.as_ref(), encode(record).as_slice())?,
                    None => current.remove(key.as_ref())?,
                };
            }
            writing.open_table(META)?.insert(REVISION, revision)?;
        }
        writing.commit()?;
        Ok(())
    }
}

/// Opens the database; called again after the disk was full.
type OpenDatabase = Box<dyn Fn() -> Result<Database, redb::Error> + Send>;

/// The writer thread.
struct Writer {
    open: OpenDatabase,
    reopen_interval: Duration,
    /// `None` after a failed commit: redb refuses everything after an I/O error.
    database: Option<Database>,
    full: Option<FullDisk>,
    cache: Arc<Cache>,
    commits: Arc<AtomicU64>,
    failure: Failure,
}

/// A batch whose commit had no room. Whether it is in the file is known once that is open again.
struct FullDisk {
    events: Vec<StoreEvent>,
    revision: u64,
    tried: Instant,
}

impl Writer {
    fn run(&mut self, waiting: &mpsc::Receiver<(Txn, Reply)>) {
        while let Ok(first) = waiting.recv() {
            self.reopen();
            let mut queued = vec![first];
            queued.extend(waiting.try_iter().take(MAX_BATCH_TXNS - 1));
            let mut revision = self.cache.revision();
            let mut batch = Batch::default();
            let mut decided = Vec::with_capacity(queued.len());
            let failure = self.failure.get();
            for (txn, reply) in queued {
                let outcome = match &failure {
                    Some(error) => Err(error.clone()),
                    None => Ok(batch.decide(&self.cache, txn, &mut revision)),
                };
                decided.push((outcome, reply));
            }
            if !batch.events.is_empty()
                && let Err(error) = self.commit(batch, revision)
            {
                for (outcome, _) in &mut decided {
                    *outcome = Err(error.clone());
                }
            }
            for (outcome, reply) in decided {
                // The caller may be gone; its change stays committed.
                let _ = reply.send(outcome);
            }
        }
    }

    /// Commits and publishes a batch.
    fn commit(&mut self, batch: Batch, revision: u64) -> Result<(), StoreError> {
        let Some(database) = &self.database else {
            return Err(self.failure.get().unwrap_or(StoreError::Closed));
        };
        let why = match batch.commit(database, revision) {
            Ok(()) => {
                self.commits.fetch_add(1, Ordering::Relaxed);
                self.cache.publish(batch.events, revision);
                return Ok(());
            }
            Err(why) => why,
        };
        self.database = None;
        let error = if has_no_room(&why) {
            self.full = Some(FullDisk { events: batch.events, revision, tried: Instant::now() });
            StoreError::Full { why: why.to_string() }
        } else {
            StoreError::Commit { why: why.to_string() }
        };
        tracing::error!(%error, "the store refuses further writes");
        self.failure.set(Some(error.clone()));
        Err(error)
    }

    /// Opens the file again after its disk was full. What is durable is decided by the revision in it.
    fn reopen(&mut self) {
        let Some(mut full) = self.full.take() else { return };
        if full.tried.elapsed() < self.reopen_interval {
            self.full = Some(full);
            return;
        }
        let (database, revision) = match (self.open)().and_then(|database| {
            let revision = stored_revision(&database)?;
            Ok((database, revision))
        }) {
            Ok(opened) => opened,
            Err(error) => {
                tracing::debug!(%error, "the store cannot be opened again yet");
                full.tried = Instant::now();
                self.full = Some(full);
                return;
            }
        };
        if revision == full.revision {
            // Its callers were told of an error; as with any lost answer, the change may have been made.
            self.cache.publish(full.events, revision);
        }
        let expected = self.cache.revision();
        if revision != expected {
            let why = format!("the file is at revision {revision}, not at {expected}");
            tracing::error!(why, "the store stays closed");
            self.failure.set(Some(StoreError::Commit { why }));
            return;
        }
        self.database = Some(database);
        self.failure.set(None);
        tracing::info!(revision, "the store's disk has room again; it accepts writes");
    }
}

/// Whether a commit failed for want of room, which passes without a repair.
fn has_no_room(error: &redb::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error, redb::Error::Io(error) if matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge))
}

impl Store for Embedded {
    fn txn(&self, txn: Txn) -> BoxFuture<'_, Result<TxnOutcome, StoreError>> {
        let (reply, outcome) = oneshot::channel();
        let sent = self.queue.as_ref().is_some_and(|queue| queue.send((txn, reply)).is_ok());
        Box::pin(async move {
            if !sent {
                return Err(StoreError::Closed);
            }
            outcome.await.unwrap_or(Err(StoreError::Closed))
        })
    }

    fn get(&self, key: &str) -> Option<Arc<StoredObject>> {
        self.cache.get(key)
    }

    fn range(
        &self,
        prefix: &str,
        start: Option<&str>,
        revision: Option<u64>,
    ) -> Result<Snapshot, StoreError> {
        self.cache.range(prefix, start, revision)
    }

    fn watch(&self, prefix: &str, from: u64) -> Result<Watch, StoreError> {
        self.cache.watch(prefix, from)
    }

    fn revision(&self) -> u64 {
        self.cache.revision()
    }

    fn compact(&self, revision: u64) {
        self.cache.compact(revision);
    }

    fn failure(&self) -> Option<StoreError> {
        self.failure.get()
    }

    fn commits(&self) -> u64 {
        self.commits.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn put(key: &str, expect: Expect, value: &'static str) -> Txn {
        Txn { key: key.into(), expect, change: TxnChange::Put(Bytes::from_static(value.as_bytes())) }
    }

    fn done(outcome: TxnOutcome) -> Arc<StoredObject> {
        match outcome {
            TxnOutcome::Committed(record) => record,
            TxnOutcome::Conflict(current) => panic!("refused, current {current:?}"),
        }
    }

    #[tokio::test]
    async fn acknowledged_writes_survive_reopening() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store.redb");
        let store = Embedded::open(&path).unwrap();
        let first = done(store.txn(put("/a", Expect::Absent, r#"{"x":1}"#)).await.unwrap());
        let second =
            done(store.txn(put("/a", Expect::Revision(first.revision), r#"{"x":2}"#)).await.unwrap());
        done(store.txn(put("/b", Expect::Absent, "{}")).await.unwrap());
        let gone = store.get("/b").unwrap().revision;
        let deleted = Txn { key: "/b".into(), expect: Expect::Revision(gone), change: TxnChange::Delete };
        done(store.txn(deleted).await.unwrap());
        let revision = store.revision();
        drop(store);
        let store = Embedded::open(&path).unwrap();
        assert!(store.revision() > revision, "a start is a history of its own");
        let record = store.get("/a").unwrap();
        assert_eq!((record.create_revision, record.revision), (first.revision, second.revision));
        assert_eq!(record.object()["x"], 2);
        assert_eq!(record.object()["metadata"]["resourceVersion"], second.revision.to_string());
        assert!(store.get("/b").is_none());
    }

    #[test]
    fn revisions_begin_after_every_earlier_history() {
        let at = |seconds: u64| UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        for (story, stored, now, first) in [
            ("an old file", 500, at(1_800_000_000), 1_800_000_000_000_000),
            ("its next start", 1_800_000_000_000_100, at(1_800_000_001), 1_800_000_001_000_000),
            ("a clock that went back", 1_800_000_000_000_100, at(1), 1_800_000_000_000_101),
        ] {
            assert_eq!(first_revision(stored, now), first, "{story}");
        }
    }

    /// A file that is put back knows nothing of the writes after it: their versions have expired, before as
    /// well as after as many writes of the new history.
    #[tokio::test]
    async fn versions_of_a_lost_history_have_expired() {
        let folder = tempfile::tempdir().unwrap();
        let (path, copy) = (folder.path().join("store.redb"), folder.path().join("copy"));
        let write = async |store: &Embedded, name: &str| {
            for number in 0..100 {
                done(store.txn(put(&format!("/{name}/{number}"), Expect::Absent, "{}")).await.unwrap());
            }
            store.revision()
        };
        let store = Embedded::open(&path).unwrap();
        let kept = write(&store, "kept").await;
        drop(store);
        std::fs::copy(&path, &copy).unwrap();
        let store = Embedded::open(&path).unwrap();
        let lost = write(&store, "lost").await;
        drop(store);
        std::fs::copy(&copy, &path).unwrap();
        let store = Embedded::open(&path).unwrap();
        for _ in 0..2 {
            for version in [kept, lost - 50, lost] {
                let watch = store.watch("/", version);
                assert!(matches!(watch, Err(StoreError::Compacted { .. })), "{version}: {watch:?}");
            }
            write(&store, &format!("new-{}", store.revision())).await;
        }
        assert!(store.get("/lost/1").is_none() && store.get("/kept/1").is_some());
    }

    #[tokio::test]
    async fn of_many_writers_on_one_revision_exactly_one_wins() {
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(Embedded::open(&folder.path().join("store.redb")).unwrap());
        let first = done(store.txn(put("/a", Expect::Absent, "{}")).await.unwrap());
        let attempts = (0..64).map(|_| store.txn(put("/a", Expect::Revision(first.revision), r#"{"n":1}"#)));
        let outcomes = futures::future::join_all(attempts).await;
        let won = outcomes.iter().filter(|outcome| matches!(outcome, Ok(TxnOutcome::Committed(_)))).count();
        assert_eq!(won, 1);
        assert!(store.commits() < 60, "64 writers shared {} commits", store.commits());
    }

    /// A file whose disk can be full.
    #[derive(Debug)]
    struct SmallDisk {
        file: redb::backends::FileBackend,
        full: Arc<AtomicBool>,
    }

    impl SmallDisk {
        fn room(&self) -> io::Result<()> {
            match self.full.load(Ordering::SeqCst) {
                true => Err(io::ErrorKind::StorageFull.into()),
                false => Ok(()),
            }
        }
    }

    impl redb::StorageBackend for SmallDisk {
        fn len(&self) -> io::Result<u64> {
            self.file.len()
        }

        fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
            self.file.read(offset, out)
        }

        fn set_len(&self, len: u64) -> io::Result<()> {
            self.room()?;
            self.file.set_len(len)
        }

        fn sync_data(&self) -> io::Result<()> {
            self.file.sync_data()
        }

        fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
            self.room()?;
            self.file.write(offset, data)
        }

        fn close(&self) -> io::Result<()> {
            self.file.close()
        }
    }

    #[tokio::test]
    async fn store_accepts_writes_again_when_its_disk_has_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store.redb");
        let full = Arc::new(AtomicBool::new(false));
        let open = {
            let (path, full) = (path.clone(), full.clone());
            move || {
                let mut options = std::fs::OpenOptions::new();
                let file = options.read(true).write(true).create(true).truncate(false).open(&path)?;
                let file = redb::backends::FileBackend::new(file)?;
                let disk = SmallDisk { file, full: full.clone() };
                Ok(Database::builder().create_with_backend(disk)?)
            }
        };
        let store = Embedded::open_by(Box::new(open), Duration::ZERO, &path, RING_EVENTS).unwrap();
        let first = done(store.txn(put("/a", Expect::Absent, "{}")).await.unwrap());
        for round in 0..3 {
            full.store(true, Ordering::SeqCst);
            for _ in 0..3 {
                let refused = store.txn(put("/b", Expect::Absent, "{}")).await.unwrap_err();
                assert!(matches!(refused, StoreError::Full { .. }), "round {round}: {refused}");
                assert!(store.failure().is_some() && store.get("/a").is_some());
            }
            full.store(false, Ordering::SeqCst);
            let key = format!("/kept-{round}");
            done(store.txn(put(&key, Expect::Absent, "{}")).await.unwrap());
            assert!(store.failure().is_none(), "round {round}");
        }
        assert!(store.get("/b").is_none());
        let revision = store.revision();
        drop(store);
        let store = Embedded::open(&path).unwrap();
        assert_eq!((store.revision(), store.get("/a").unwrap().revision), (revision, first.revision));
        assert!((0..3).all(|round| store.get(&format!("/kept-{round}")).is_some()));
    }
}
