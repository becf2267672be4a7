//! The store of several servers: an external etcd. Writes are transactions on one key, compared by its mod
//! revision, which is also the object's `resourceVersion`. Reads come from the same watch cache as the
//! embedded store's; here it is fed by etcd's watch ([`watch`]), so it also contains the writes of other
//! servers. Two things keep reads as fresh as those of a single server. A write is acknowledged only when the
//! cache shows it. Before a request that must see what other servers acknowledged, [`Store::read_barrier`]
//! reads etcd's revision and waits for the cache to reach it.
//!
//! All keys have one prefix. Keys that are not API objects do not begin with `/registry/`.

mod compact;
mod members;
mod watch;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use etcd_client::{Compare, CompareOp, GetOptions, KeyValue, Txn as EtcdTxn, TxnOp, TxnOpResponse};
use futures::future::BoxFuture;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::cache::{Cache, RING_EVENTS, Snapshot, Watch};
use super::{Expect, Store, StoreError, StoredObject, Txn, TxnChange, TxnOutcome};
use members::Members;

/// The default prefix of objects and keys.
pub const PREFIX: &str = "/russet";
/// Compaction interval, as in Kubernetes: watches that are interrupted for a while resume without a relist.
pub const COMPACTION: Duration = Duration::from_secs(300);
/// How often etcd's revision is read when no request does, so that its health is known.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// How long a start waits for etcd.
const START_TIMEOUT: Duration = Duration::from_secs(45);
/// How long a request waits for the cache to catch up with etcd.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(3);

/// Connection settings of etcd.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// `http://` or `https://` and `host:port` of the members.
    pub endpoints: Vec<String>,
    /// The CA of the members' certificates.
    pub ca_file: Option<PathBuf>,
    /// This server's client certificate.
    pub cert_file: Option<PathBuf>,
    /// The key of that certificate.
    pub key_file: Option<PathBuf>,
    /// Prefix of every key.
    pub prefix: String,
    /// Compaction interval.
    pub compaction: Duration,
}

impl EtcdConfig {
    /// These members, without TLS, under the default prefix.
    pub fn new(endpoints: impl IntoIterator<Item = String>) -> Self {
        Self {
            endpoints: endpoints.into_iter().collect(),
            ca_file: None,
            cert_file: None,
            key_file: None,
            prefix: PREFIX.into(),
            compaction: COMPACTION,
        }
    }
}

/// State that the store and its tasks share.
#[derive(Debug)]
struct EtcdShared {
    members: Members,
    cache: Arc<Cache>,
    prefix: String,
    commits: AtomicU64,
    /// The error of the last request to etcd, if it failed.
    failure: Mutex<Option<StoreError>>,
    /// Makes the watch request a progress notification.
    progress: tokio::sync::Notify,
}

/// A store in etcd.
#[derive(Debug)]
pub struct Etcd {
    shared: Arc<EtcdShared>,
    queue: mpsc::UnboundedSender<oneshot::Sender<Result<(), StoreError>>>,
    /// Aborted when the store is dropped.
    _tasks: JoinSet<()>,
}

impl Etcd {
    /// Connects and reads everything into memory. Waits for an etcd that does not respond yet.
    pub async fn open(config: &EtcdConfig) -> Result<Self, StoreError> {
        let members = Members::new(config).await?;
        let prefix = format!("/{}", config.prefix.trim_matches('/'));
        let (records, revision) = initial_load(&members, &prefix).await?;
        let shared = Arc::new(EtcdShared {
            members,
            cache: Arc::new(Cache::new(records, revision, RING_EVENTS)),
            prefix,
            commits: AtomicU64::new(0),
            failure: Mutex::new(None),
            progress: tokio::sync::Notify::new(),
        });
        let (queue, waiting) = mpsc::unbounded_channel();
        let mut tasks = JoinSet::new();
        tasks.spawn(watch::run(shared.clone()));
        tasks.spawn(answer_waiters(shared.clone(), waiting));
        tasks.spawn(compact::run(shared.clone(), config.compaction));
        Ok(Self { shared, queue, _tasks: tasks })
    }
}

/// The initial read; etcd may still be starting. A rejected certificate is not retried.
async fn initial_load(members: &Members, prefix: &str) -> Result<(Vec<StoredObject>, u64), StoreError> {
    let started = Instant::now();
    loop {
        match watch::load(members, prefix).await {
            Ok(loaded) => return Ok(loaded),
            Err(failure) => {
                let certificate = failure.concerns_certificates();
                let error = failure.into_read_error(members);
                if certificate || started.elapsed() >= START_TIMEOUT {
                    return Err(error);
                }
                tracing::warn!(%error, "waiting for etcd, {} s at most", START_TIMEOUT.as_secs());
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

impl EtcdShared {
    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn record_result<T>(&self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        let failed = match &result {
            Ok(_) => None,
            Err(error @ (StoreError::Unreachable { .. } | StoreError::Undecided { .. })) => {
                Some(error.clone())
            }
            // The request was invalid; etcd is healthy.
            Err(_) => return result,
        };
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        match (failure.is_some(), &failed) {
            (false, Some(error)) => tracing::error!(%error, "etcd does not answer"),
            (true, None) => tracing::info!("etcd answers again"),
            _ => {}
        }
        *failure = failed;
        result
    }

    /// Waits until the cache has reached `revision`. Every write of a Russet server arrives as an event; for
    /// revisions of others, under other prefixes, the watch's progress is requested.
    async fn wait_for_revision(&self, revision: u64) -> Result<(), StoreError> {
        let mut newest = self.cache.newest();
        let reached = async {
            loop {
                let soon = tokio::time::timeout(
                    watch::PROGRESS_DELAY,
                    newest.wait_for(|newest| *newest >= revision),
                );
                match soon.await {
                    Ok(Ok(_)) => return,
                    // The sender is in the cache, which this store owns.
                    Ok(Err(_)) => return,
                    Err(_) => self.progress.notify_one(),
                }
            }
        };
        tokio::time::timeout(CATCH_UP_TIMEOUT, reached).await.map_err(|_| StoreError::Unreachable {
            endpoints: self.members.urls(),
            why: format!(
                "its watch is at revision {} and not at {revision} after {} s",
                self.cache.revision(),
                CATCH_UP_TIMEOUT.as_secs()
            ),
        })
    }

    /// etcd's current revision, which requires a quorum of its members.
    async fn revision(&self) -> Result<u64, StoreError> {
        let nothing = self.key("/revision");
        let options = GetOptions::new().with_count_only();
        let asked = self
            .members
            .request(|mut kv| {
                let (nothing, options) = (nothing.clone(), options.clone());
                async move { kv.get(nothing, Some(options)).await }
            })
            .await;
        let answer = asked.map_err(|failure| failure.into_read_error(&self.members))?;
        Ok(answer.value.header().map_or(0, |header| header.revision().unsigned_abs()))
    }

    async fn write(&self, txn: Txn, deadline: Instant) -> Result<TxnOutcome, StoreError> {
        let key = self.key(&txn.key);
        let compare = match txn.expect {
            Expect::Absent => Compare::mod_revision(key.clone(), CompareOp::Equal, 0),
            Expect::Revision(revision) => Compare::mod_revision(
                key.clone(),
                CompareOp::Equal,
                i64::try_from(revision).unwrap_or(i64::MAX),
            ),
        };
        let change = match &txn.change {
            TxnChange::Put(value) => TxnOp::put(key.clone(), value.to_vec(), None),
            TxnChange::Delete => TxnOp::delete(key.clone(), None),
        };
        let request = EtcdTxn::new().when([compare]).and_then([change]).or_else([TxnOp::get(key, None)]);
        let before = self.cache.get(&txn.key);
        let asked = self
            .members
            .request_by(deadline, |mut kv| {
                let request = request.clone();
                async move { kv.txn(request).await }
            })
            .await;
        let answer = asked.map_err(|failure| failure.into_write_error(&self.members))?;
        let revision = answer.value.header().map_or(0, |header| header.revision().unsigned_abs());
        let visible = self.wait_for_revision(revision).await;
        if !answer.value.succeeded() {
            visible?;
        }
        // The write is committed even if this server's own watch lags; the next reader waits for it.
        let found = answer.value.op_responses().into_iter().find_map(|response| match response {
            TxnOpResponse::Get(got) => Some(got.kvs().first().and_then(|kv| record(&self.prefix, kv))),
            _ => None,
        });
        Ok(match (answer.value.succeeded(), found.flatten()) {
            (true, _) => TxnOutcome::Committed(self.committed_object(&txn, before.as_deref(), revision)),
            // The reply was lost and the request retried: the current value is the one that the first attempt
            // wrote.
            (false, Some(current)) if answer.repeated && is_own_write(&txn.change, &current.value) => {
                TxnOutcome::Committed(Arc::new(current))
            }
            (false, None) if answer.repeated && matches!(txn.change, TxnChange::Delete) => {
                TxnOutcome::Committed(self.committed_object(&txn, before.as_deref(), revision))
            }
            // Another writer wrote, before the first attempt or after it: that cannot be known any more.
            (false, _) if answer.repeated => {
                let why = format!(
                    "another writer changed {} while the response of etcd was lost",
                    txn.key.as_str()
                );
                return Err(StoreError::Undecided { endpoints: self.members.urls(), why });
            }
            (false, current) => TxnOutcome::Conflict(current.map(Arc::new)),
        })
    }

    /// The object committed at `revision`.
    fn committed_object(&self, txn: &Txn, before: Option<&StoredObject>, revision: u64) -> Arc<StoredObject> {
        if let Some(current) = self.cache.get(&txn.key).filter(|current| current.revision == revision) {
            return current;
        }
        let created = before.map_or(revision, |before| before.create_revision);
        let value = match (&txn.change, before) {
            (TxnChange::Put(value), _) => value.clone(),
            (TxnChange::Delete, Some(before)) => before.value.clone(),
            (TxnChange::Delete, None) => Bytes::new(),
        };
        Arc::new(StoredObject::new(txn.key.as_str().into(), created, revision, value))
    }
}

fn is_own_write(change: &TxnChange, value: &Bytes) -> bool {
    matches!(change, TxnChange::Put(put) if put == value)
}

/// An etcd key as a stored object; `None` for keys outside the prefix.
fn record(prefix: &str, kv: &KeyValue) -> Option<StoredObject> {
    let key = kv.key_str().ok()?.strip_prefix(prefix)?;
    Some(StoredObject::new(
        key.into(),
        kv.create_revision().unsigned_abs(),
        kv.mod_revision().unsigned_abs(),
        Bytes::copy_from_slice(kv.value()),
    ))
}

/// Serves the read barriers: answers all queued waiters with one request, and checks etcd periodically.
async fn answer_waiters(
    shared: Arc<EtcdShared>,
    mut waiting: mpsc::UnboundedReceiver<oneshot::Sender<Result<(), StoreError>>>,
) {
    let mut waiters = Vec::new();
    loop {
        if let Ok(0) = tokio::time::timeout(HEARTBEAT, waiting.recv_many(&mut waiters, usize::MAX)).await {
            return;
        }
        let result = match shared.revision().await {
            Ok(revision) => shared.wait_for_revision(revision).await,
            Err(error) => Err(error),
        };
        let result = shared.record_result(result);
        for waiter in waiters.drain(..) {
            // The waiter may be gone.
            let _ = waiter.send(result.clone());
        }
    }
}

impl Store for Etcd {
    fn txn(&self, txn: Txn) -> BoxFuture<'_, Result<TxnOutcome, StoreError>> {
        self.txn_by(txn, Instant::now() + members::REQUEST_TIMEOUT)
    }

    fn txn_by(&self, txn: Txn, deadline: Instant) -> BoxFuture<'_, Result<TxnOutcome, StoreError>> {
        Box::pin(async move {
            let outcome = self.shared.record_result(self.shared.write(txn, deadline).await);
            if matches!(outcome, Ok(TxnOutcome::Committed(_))) {
                self.shared.commits.fetch_add(1, Ordering::Relaxed);
            }
            outcome
        })
    }

    fn read_barrier(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        let (reply, answer) = oneshot::channel();
        let sent = self.queue.send(reply).is_ok();
        Box::pin(async move {
            if !sent {
                return Err(StoreError::Closed);
            }
            match tokio::time::timeout(CATCH_UP_TIMEOUT, answer).await {
                Ok(answer) => answer.unwrap_or(Err(StoreError::Closed)),
                Err(_) => Err(StoreError::Unreachable {
                    endpoints: self.shared.members.urls(),
                    why: format!("it did not report its revision within {} s", CATCH_UP_TIMEOUT.as_secs()),
                }),
            }
        })
    }

    fn get(&self, key: &str) -> Option<Arc<StoredObject>> {
        self.shared.cache.get(key)
    }

    fn range(
        &self,
        prefix: &str,
        start: Option<&str>,
        revision: Option<u64>,
    ) -> Result<Snapshot, StoreError> {
        self.shared.cache.range(prefix, start, revision)
    }

    fn watch(&self, prefix: &str, from: u64) -> Result<Watch, StoreError> {
        self.shared.cache.watch(prefix, from)
    }

    fn revision(&self) -> u64 {
        self.shared.cache.revision()
    }

    fn compact(&self, revision: u64) {
        self.shared.cache.compact(revision);
    }

    fn commits(&self) -> u64 {
        self.shared.commits.load(Ordering::Relaxed)
    }

    fn failure(&self) -> Option<StoreError> {
        self.shared.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
