//! Tests of the time limit of a write's retries.

use std::sync::{Mutex, PoisonError};

use futures::future::BoxFuture;
use tokio::time::Instant;

use super::*;
use crate::auth::signer::Signer;
use crate::metrics::Metrics;
use crate::store::embedded::Embedded;
use crate::store::reflector::Reflector;
use crate::store::{Snapshot, Store, StoreError, StoredObject, Watch};

/// A store in which three writes in a row conflict; it records the deadlines it was given.
struct Contended {
    store: Embedded,
    deadlines: Mutex<Vec<Instant>>,
}

impl Store for Contended {
    fn txn(&self, txn: Txn) -> BoxFuture<'_, std::result::Result<TxnOutcome, StoreError>> {
        self.store.txn(txn)
    }

    fn txn_by(
        &self,
        txn: Txn,
        deadline: Instant,
    ) -> BoxFuture<'_, std::result::Result<TxnOutcome, StoreError>> {
        if txn.expect == Expect::Absent {
            return self.store.txn(txn);
        }
        let mut deadlines = self.deadlines.lock().unwrap_or_else(PoisonError::into_inner);
        deadlines.push(deadline);
        if deadlines.len() > 3 {
            return self.store.txn(txn);
        }
        let current = self.store.get(&txn.key);
        Box::pin(std::future::ready(Ok(TxnOutcome::Conflict(current))))
    }

    fn get(&self, key: &str) -> Option<Arc<StoredObject>> {
        self.store.get(key)
    }

    fn range(
        &self,
        prefix: &str,
        start: Option<&str>,
        revision: Option<u64>,
    ) -> std::result::Result<Snapshot, StoreError> {
        self.store.range(prefix, start, revision)
    }

    fn watch(&self, prefix: &str, from: u64) -> std::result::Result<Watch, StoreError> {
        self.store.watch(prefix, from)
    }

    fn revision(&self) -> u64 {
        self.store.revision()
    }

    fn compact(&self, revision: u64) {
        self.store.compact(revision);
    }

    fn commits(&self) -> u64 {
        self.store.commits()
    }

    fn failure(&self) -> Option<StoreError> {
        self.store.failure()
    }
}

#[tokio::test]
async fn retried_write_keeps_its_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let store = Embedded::open(&folder.path().join("store.redb")).unwrap();
    let store = Arc::new(Contended { store, deadlines: Mutex::default() });
    let (_stop, stopping) = tokio::sync::watch::channel(false);
    let api = Arc::new(ServerState {
        kinds: Reflector::load(&*store),
        policies: Reflector::load(&*store),
        admission: Reflector::load(&*store),
        signer: Signer::ensure(&folder.path().join("sa.key")).unwrap(),
        metrics: Metrics::new(prometheus::Registry::new()).unwrap(),
        documents: crate::discovery::OpenApiDocuments::default(),
        store: store.clone(),
        stopping,
        closed: tokio::sync::mpsc::channel(1).0,
    });
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "one"}});
    crate::bootstrap::ensure(&api, "", namespace).await.unwrap();
    let resource = api.kinds.current().of_kind("v1", "Namespace").unwrap();
    let call = Call::internal(resource, "", "one");
    let label = |current: &Value| {
        let mut new = current.clone();
        object::set_meta(&mut new, "labels", json!({"a": "b"}));
        // No precondition: the server retries after conflicts.
        object::set_meta(&mut new, "resourceVersion", Value::Null);
        Ok((new, Vec::new()))
    };
    let (written, _) = modify(&api, &call, WriteOrigin::Write, label).await.unwrap();
    assert_eq!(written["metadata"]["labels"]["a"], "b");
    let deadlines = store.deadlines.lock().unwrap_or_else(PoisonError::into_inner).clone();
    assert_eq!(deadlines, [call.deadline; 4]);
}
