//! What controllers do to a stored object: edit it, remove a finalizer, delete it. One write each, no policy.

use std::sync::Arc;

use serde_json::Value;

use crate::call::Call;
use crate::object;
use crate::state::ServerState;
use crate::status::Result;
use crate::store::{Expect, StoredObject, Txn, TxnChange, TxnOutcome};
use crate::verbs::delete::{self, Options};
use crate::verbs::{list, write};

/// Edits a stored object without admission: removing finalizers or owners is bookkeeping that no rule of the
/// kind concerns. A terminating object without finalizers is removed. `change` returns false to leave the
/// object unchanged.
pub async fn edit(api: &ServerState, key: &str, change: impl Fn(&mut Value) -> bool) -> Result<()> {
    loop {
        let Some(record) = api.store.get(key) else { return Ok(()) };
        let mut edited = Value::clone(record.object());
        if !change(&mut edited) {
            return Ok(());
        }
        object::set_meta(&mut edited, "resourceVersion", Value::Null);
        let finished = object::is_terminating(&edited)
            && object::finalizers(&edited).is_empty()
            && write::spec_finalized(&edited);
        let change = if finished { TxnChange::Delete } else { TxnChange::Put(edited.to_string().into()) };
        let txn = Txn { key: key.to_string(), expect: Expect::Revision(record.revision), change };
        match api.store.txn(txn).await.map_err(list::storage_error)? {
            TxnOutcome::Committed(written) => {
                if let Some(resource) = api.kinds.current().of_key(key) {
                    write::after_commit(api, &resource, written.revision)?;
                }
                return Ok(());
            }
            TxnOutcome::Conflict(_) => {}
        }
    }
}

/// Removes one finalizer.
pub async fn release(api: &ServerState, key: &str, finalizer: &str) -> Result<()> {
    edit(api, key, |object| {
        let all = object::finalizers(object);
        let remaining: Vec<String> =
            all.iter().filter(|held| **held != finalizer).map(ToString::to_string).collect();
        if remaining.len() == all.len() {
            return false;
        }
        object::set_finalizers(object, remaining);
        true
    })
    .await
}

/// Deletes a stored object, unless it is gone or was replaced by another of the same name.
pub async fn remove(api: &Arc<ServerState>, record: &StoredObject, propagation: &str) -> Result<()> {
    let Some(resource) = api.kinds.current().of_key(&record.key) else { return Ok(()) };
    let object = record.object();
    let call = Call::internal(resource, object::namespace(object), object::name(object));
    let options = Options {
        propagation: propagation.into(),
        uid: Some(object::uid(object).to_string()),
        // The decision is about this revision; it may not hold for a later one.
        resource_version: Some(record.revision.to_string()),
        ..Options::default()
    };
    match delete::delete(api, &call, &options).await {
        Err(error) if matches!(error.code.as_u16(), 404 | 409) => Ok(()),
        other => other.map(|_| ()),
    }
}
