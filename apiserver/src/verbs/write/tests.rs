//! Tests of the time limit of a write's retries, and of writes that the store's cache does not see yet.

use std::sync::{Mutex, PoisonError};

use futures::future::BoxFuture;
use tokio::time::Instant;

use super::*;
use crate::auth::signer::Signer;
use crate::flow_control::{FlowControl, SystemUsers};
use crate::metrics::Metrics;
use crate::object_limit::ObjectLimits;
use crate::store::embedded::Embedded;
use crate::store::reflector::Reflector;
use crate::store::{Snapshot, Store, StoreError, StoredObject, Watch};

/// A store in which three writes in a row conflict, or whose cache stays behind; it records the deadlines it was given.
struct Contended {
    store: Embedded,
    deadlines: Mutex<Vec<Instant>>,
    /// The revision of the cache, if it stays behind.
    cached: Option<u64>,
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
        if deadlines.len() > 3 || self.cached.is_some() {
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
        self.cached.unwrap_or_else(|| self.store.revision())
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

fn state_of(store: &Arc<Contended>, folder: &std::path::Path) -> Arc<ServerState> {
    let (_stop, stopping) = tokio::sync::watch::channel(false);
    let metrics = Metrics::new(prometheus::Registry::new()).unwrap();
    Arc::new(ServerState {
        kinds: Reflector::load(&**store),
        policies: Reflector::load(&**store),
        admission: Reflector::load(&**store),
        signer: Signer::ensure(&folder.join("sa.key")).unwrap(),
        flow: FlowControl::new(SystemUsers::default(), metrics.clone()),
        limits: ObjectLimits::default(),
        metrics,
        documents: crate::discovery::OpenApiDocuments::default(),
        store: store.clone(),
        stopping,
        closed: tokio::sync::mpsc::channel(1).0,
    })
}

/// A server with the Namespace `one`, whose store has this cache.
async fn server_with(folder: &std::path::Path, cached: Option<u64>) -> (Arc<Contended>, Arc<ServerState>) {
    let store = Embedded::open(&folder.join("store.redb")).unwrap();
    let store = Arc::new(Contended { store, deadlines: Mutex::default(), cached });
    let api = state_of(&store, folder);
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "one"}});
    crate::bootstrap::ensure(&api, "", namespace).await.unwrap();
    (store, api)
}

#[tokio::test]
async fn retried_write_keeps_its_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let (store, api) = server_with(folder.path(), None).await;
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

#[tokio::test]
async fn revocation_that_does_not_hold_yet_is_not_acknowledged() {
    let folder = tempfile::tempdir().unwrap();
    let (_store, api) = server_with(folder.path(), Some(1)).await;
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "b"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
    });
    let made = crate::bootstrap::ensure(&api, "", binding).await.unwrap_err();
    assert_eq!((made.code.as_u16(), made.reason), (504, "Timeout"), "{made}");
    let resource = api.kinds.current().of_kind("rbac.authorization.k8s.io/v1", "ClusterRoleBinding").unwrap();
    let call = Call::internal(resource, "", "b");
    let options = crate::verbs::delete::Options::default();
    let revoked = crate::verbs::delete::delete(&api, &call, &options).await.unwrap_err();
    assert_eq!((revoked.code.as_u16(), revoked.reason), (504, "Timeout"), "{revoked}");
    assert!(api.store.get(&call.key()).is_none(), "it is deleted nevertheless");
}
