//! Storage: one trait with optimistic transactions, reads at a revision and watches. It knows bytes and keys,
//! not kinds. Two implementations feed the same [`cache::Cache`]: an embedded database for one server, and
//! etcd for several.

pub mod backup;
pub mod cache;
pub mod embedded;
pub mod etcd;
pub mod reflector;
mod splice;

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use futures::future::BoxFuture;
use serde_json::Value;
use tokio::time::Instant;

pub use cache::{EventKind, Snapshot, StoreEvent, Watch};

/// One stored object at one revision, in use: decoded and encoded at most once, shared by all readers and
/// watchers. When it is no longer in use only its bytes are kept ([`cache`]).
#[derive(Debug)]
pub struct StoredObject {
    /// The storage key, such as `/registry/apps/things/ns/name`.
    pub key: Arc<str>,
    /// The revision that created the object.
    pub create_revision: u64,
    /// The revision that wrote (or deleted) it: the object's `resourceVersion`.
    pub revision: u64,
    /// The stored bytes, which contain no `resourceVersion`.
    pub value: Bytes,
    object: OnceLock<Arc<Value>>,
    json: OnceLock<Bytes>,
    api_version: OnceLock<Box<str>>,
}

impl StoredObject {
    /// An object read from storage.
    pub fn new(key: Arc<str>, create_revision: u64, revision: u64, value: Bytes) -> Self {
        let (object, json, api_version) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        Self { key, create_revision, revision, value, object, json, api_version }
    }

    /// The decoded object with its `resourceVersion`.
    pub fn object(&self) -> &Arc<Value> {
        self.object.get_or_init(|| {
            // Only this server writes these bytes, and it writes objects; anything else decodes to an empty
            // object.
            let mut object: Value =
                serde_json::from_slice(&self.value).unwrap_or_else(|_| Value::Object(serde_json::Map::new()));
            if let Some(fields) = object.as_object_mut() {
                let metadata =
                    fields.entry("metadata").or_insert_with(|| Value::Object(serde_json::Map::new()));
                if let Some(metadata) = metadata.as_object_mut() {
                    metadata.insert("resourceVersion".into(), Value::String(self.revision.to_string()));
                }
            }
            Arc::new(object)
        })
    }

    /// The encoded object with its `resourceVersion`, which is inserted into the stored bytes without
    /// decoding them.
    pub fn json(&self) -> &Bytes {
        self.json.get_or_init(|| match splice::with_resource_version(&self.value, self.revision) {
            Some(json) => json,
            None => Bytes::from(self.object().to_string()),
        })
    }

    /// The `apiVersion` the object was written in; empty if it has none.
    pub fn api_version(&self) -> &str {
        self.api_version.get_or_init(|| splice::api_version(&self.value))
    }
}

/// The precondition of a transaction on its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// The key does not exist.
    Absent,
    /// The key was last written at this revision.
    Revision(u64),
}

/// The change of a transaction whose precondition holds.
#[derive(Clone, Debug)]
pub enum TxnChange {
    /// Store these bytes.
    Put(Bytes),
    /// Delete the key.
    Delete,
}

/// A compare-and-swap on one key.
#[derive(Clone, Debug)]
pub struct Txn {
    /// The key.
    pub key: String,
    /// The precondition.
    pub expect: Expect,
    /// The change.
    pub change: TxnChange,
}

/// The result of a transaction.
#[derive(Clone, Debug)]
pub enum TxnOutcome {
    /// Committed and durable. The object written, or for a deletion the last state at the deletion's
    /// revision.
    Committed(Arc<StoredObject>),
    /// The precondition did not hold; this is the current state of the key.
    Conflict(Option<Arc<StoredObject>>),
}

/// Why storage failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// The database could not be opened.
    #[error(
        "cannot open the store {path}: {why}; if another `russet serve` uses this data directory, stop it first"
    )]
    Open {
        /// The database file.
        path: String,
        /// The database's error.
        why: String,
    },
    /// A commit failed; no more is written, because the state of the disk is unknown until it is read again.
    #[error(
        "the store could not commit to disk ({why}); free space or repair the disk, then restart the server"
    )]
    Commit {
        /// The database's error.
        why: String,
    },
    /// The disk has no room for a commit; the file is opened again until it has.
    #[error(
        "the store's disk is full ({why}); free space there, and the store accepts writes again within seconds"
    )]
    Full {
        /// The database's error.
        why: String,
    },
    /// The deadline had passed before the write.
    #[error("the request waited until its deadline; nothing was changed, send it again")]
    Late,
    /// The etcd settings are invalid.
    #[error("the etcd settings are invalid: {why}")]
    Settings {
        /// The cause.
        why: String,
    },
    /// No etcd member responds, or they have no quorum; nothing was written.
    #[error(
        "etcd does not answer ({why}); nothing was changed. Check that a majority of its members is running and reachable: {endpoints}"
    )]
    Unreachable {
        /// All members.
        endpoints: String,
        /// The error of the last member tried.
        why: String,
    },
    /// A write was sent, but no response came.
    #[error(
        "it is unknown whether etcd made the change ({why}); read the object before retrying. Check that a majority of its members is running: {endpoints}"
    )]
    Undecided {
        /// All members.
        endpoints: String,
        /// The error of the last member tried.
        why: String,
    },
    /// etcd rejected the request.
    #[error("etcd refused the request: {why}")]
    Refused {
        /// etcd's error.
        why: String,
    },
    /// The server is stopping.
    #[error("the store is closed because the server is stopping; retry once it runs again")]
    Closed,
    /// The history no longer contains the revision.
    #[error("too old resource version: {asked} ({oldest})")]
    Compacted {
        /// The requested revision.
        asked: u64,
        /// The oldest available revision.
        oldest: u64,
    },
    /// The revision is in the future.
    #[error("Too large resource version: {asked}, current: {current}")]
    Future {
        /// The requested revision.
        asked: u64,
        /// The newest revision.
        current: u64,
    },
}

/// A store of keys with one global revision.
pub trait Store: Send + Sync + 'static {
    /// Compares and changes one key; resolves once the change is durable and visible to readers and watchers.
    fn txn(&self, txn: Txn) -> BoxFuture<'_, Result<TxnOutcome, StoreError>>;
    /// The same, but sends nothing after `deadline`. A store with one writer writes in the order of its calls, so a write
    /// that was called in time still precedes the Lease that another holder acquires after it.
    fn txn_by(&self, txn: Txn, deadline: Instant) -> BoxFuture<'_, Result<TxnOutcome, StoreError>> {
        if Instant::now() >= deadline {
            return Box::pin(std::future::ready(Err(StoreError::Late)));
        }
        self.txn(txn)
    }
    /// Waits until reads show everything that was acknowledged before this call, also by other servers. In a
    /// store with one writer they always do.
    fn read_barrier(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(std::future::ready(Ok(())))
    }
    /// The current state of one key.
    fn get(&self, key: &str) -> Option<Arc<StoredObject>>;
    /// All objects under `prefix` whose key is at least `start`, at `revision` or now.
    fn range(&self, prefix: &str, start: Option<&str>, revision: Option<u64>)
    -> Result<Snapshot, StoreError>;
    /// Every change under `prefix` after revision `from`.
    fn watch(&self, prefix: &str, from: u64) -> Result<Watch, StoreError>;
    /// The newest revision.
    fn revision(&self) -> u64;
    /// Compacts the history up to and including `revision`.
    fn compact(&self, revision: u64);
    /// Commits since start, each with one fsync.
    fn commits(&self) -> u64;
    /// Why the store accepts no more writes, if so.
    fn failure(&self) -> Option<StoreError>;
}
