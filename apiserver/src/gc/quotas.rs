//! Quota controller: keeps the status of ResourceQuotas, how many objects of each counted kind there are. Not here:
//! enforcement, see `object_limit/quota.rs`, which counts anew.

use std::sync::Arc;

use futures::FutureExt as _;
use serde_json::{Map, Value, json};

use super::controller::{self, Controller};
use super::edit::edit;
use crate::kinds::builtin;
use crate::object;
use crate::object_limit::quota;
use crate::state::ServerState;
use crate::status::Result;
use crate::store::{EventKind, StoreEvent};
use crate::verbs::list;

/// Runs the controller.
pub async fn run(api: Arc<ServerState>) {
    let tending = Controller {
        what: "resource quotas",
        prefix: builtin::prefix("", "namespaces"),
        watched: "/registry/".into(),
        map_event,
        reconcile: |api, key| reconcile(api, key).boxed(),
    };
    controller::run(api, tending).await;
}

/// Maps an event that changes what a quota counts to the key of its namespace.
fn map_event(event: &StoreEvent) -> Option<String> {
    let key = event.record.key.as_ref();
    if event.kind == EventKind::Updated && !key.starts_with(&builtin::prefix("", "resourcequotas")) {
        return None;
    }
    // Group, resource, namespace and name: what has no namespace has three parts.
    let mut parts = key.strip_prefix("/registry/")?.splitn(4, '/').skip(2);
    let (namespace, _name) = (parts.next()?, parts.next()?);
    Some(crate::kinds::builtin_namespace_key(namespace))
}

/// Writes the status of the quotas of one namespace.
async fn reconcile(api: &Arc<ServerState>, key: &str) -> Result<bool> {
    let Some(namespace) = key.strip_prefix(&builtin::prefix("", "namespaces")) else { return Ok(true) };
    let prefix = format!("{}{namespace}/", builtin::prefix("", "resourcequotas"));
    let quotas = api.store.range(&prefix, None, None).map_err(list::storage_error)?;
    for record in &quotas.records {
        let status = status(api, record.object())?;
        let written = edit(api, &record.key, |quota| {
            let differs = quota["status"] != status;
            quota["status"] = status.clone();
            differs
        });
        written.await?;
    }
    Ok(true)
}

fn status(api: &ServerState, stored: &Value) -> Result<Value> {
    let table = api.kinds.current();
    let mut used = Map::new();
    let hard = quota::hard(stored);
    for key in hard.keys() {
        let count = match quota::counted_prefix(&table, key) {
            Some(prefix) => quota::used(api, &prefix, object::namespace(stored))?,
            None => 0,
        };
        used.insert(key.clone(), json!(count.to_string()));
    }
    Ok(json!({"hard": hard, "used": used}))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoredObject;

    #[test]
    fn quotas_follow_creations_and_deletions_alone() {
        let event = |kind, key: &str| {
            let record = Arc::new(StoredObject::new(key.into(), 1, 1, "{}".into()));
            map_event(&StoreEvent { kind, record, previous: None })
        };
        let namespace = crate::kinds::builtin_namespace_key("a");
        for (kind, key, expected) in [
            (EventKind::Created, "/registry/core/configmaps/a/x", Some(&namespace)),
            (EventKind::Deleted, "/registry/example.com/things/a/x", Some(&namespace)),
            (EventKind::Updated, "/registry/core/configmaps/a/x", None),
            (EventKind::Updated, "/registry/core/resourcequotas/a/x", Some(&namespace)),
            (EventKind::Created, "/registry/core/namespaces/a", None),
        ] {
            assert_eq!(event(kind, key).as_ref(), expected, "{key}");
        }
    }
}
