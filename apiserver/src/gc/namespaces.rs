//! Namespace controller: a new namespace gets a service account and the CA certificate; a terminating one is
//! removed after everything in it is deleted.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::FutureExt as _;
use serde_json::{Value, json};

use super::controller::{self, Controller};
use super::edit::{edit, remove};
use super::remaining::Remaining;
use crate::auth::tokens::secret_key;
use crate::bootstrap;
use crate::kinds::builtin;
use crate::kinds::rules::NAMESPACE_CONTENTS;
use crate::object;
use crate::state::ServerState;
use crate::status::Result;
use crate::store::{EventKind, StoreEvent};

/// The ConfigMap with the CA certificate in every namespace, under Kubernetes' name.
const ROOT_CA: &str = "kube-root-ca.crt";

/// Runs the controller.
pub async fn run(api: Arc<ServerState>) {
    let tending = Controller {
        what: "namespaces",
        prefix: builtin::prefix("", "namespaces"),
        watched: "/registry/core/".into(),
        map_event,
        reconcile: |api, key| reconcile(api, key).boxed(),
    };
    controller::run(api, tending).await;
}

/// Maps an event to its namespace's key: the namespace's own event, or one of an object that it must contain.
fn map_event(event: &StoreEvent) -> Option<String> {
    let key = event.record.key.as_ref();
    if key.starts_with(&builtin::prefix("", "namespaces")) {
        return Some(key.to_string());
    }
    let required = ["serviceaccounts", "configmaps"];
    let lost = event.kind == EventKind::Deleted || key.ends_with(ROOT_CA);
    let held = lost && required.iter().any(|plural| key.starts_with(&builtin::prefix("", plural)));
    held.then(|| crate::kinds::builtin_namespace_key(object::namespace(event.record.object())))
}

/// Reconciles one namespace; returns whether it is done.
async fn reconcile(api: &Arc<ServerState>, key: &str) -> Result<bool> {
    let Some(record) = api.store.get(key) else { return Ok(true) };
    let name = object::name(record.object());
    if object::is_terminating(record.object()) {
        return delete_contents(api, name, key).await;
    }
    // Releases that let an update remove it may have stored a namespace without it.
    edit(api, key, |namespace| {
        let lacks = namespace["spec"]["finalizers"].as_array().is_none_or(Vec::is_empty);
        if lacks && !object::is_terminating(namespace) {
            namespace["spec"] = json!({"finalizers": [NAMESPACE_CONTENTS]});
            return true;
        }
        false
    })
    .await?;
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": name}});
    bootstrap::ensure(api, name, account).await?;
    let secret = api.store.get(&secret_key("russet-system", "russet-ca"));
    let certificate = secret
        .and_then(|secret| STANDARD.decode(secret.object()["data"]["tls.crt"].as_str()?).ok())
        .and_then(|bytes| String::from_utf8(bytes).ok());
    if let Some(certificate) = certificate {
        let root = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": ROOT_CA, "namespace": name},
            "data": {"ca.crt": certificate},
        });
        // A client may have changed it, and clients that trust this CA must not trust the changed one.
        let map = format!("{}{name}/{ROOT_CA}", builtin::prefix("", "configmaps"));
        edit(api, &map, |stored| {
            let differs = stored["data"] != root["data"];
            object::copy_field(stored, &root, "data");
            differs
        })
        .await?;
        bootstrap::ensure(api, name, root).await?;
    }
    Ok(true)
}

/// Deletes the contents of a terminating namespace, and removes its finalizer once it is empty.
async fn delete_contents(api: &Arc<ServerState>, name: &str, key: &str) -> Result<bool> {
    let mut remaining = Remaining::default();
    for resource in api.kinds.current().stored().iter().filter(|resource| resource.namespaced) {
        let snapshot = api
            .store
            .range(&resource.prefix_of(name), None, None)
            .map_err(crate::verbs::list::storage_error)?;
        for record in &snapshot.records {
            if !object::is_terminating(record.object()) {
                remove(api, record, "Background").await?;
            }
            if let Some(left) = api.store.get(&record.key) {
                remaining.add(&resource.group, &resource.plural, left.object());
            }
        }
    }
    let now = object::timestamp(jiff::Timestamp::now());
    if !remaining.is_empty() {
        edit(api, key, |namespace| remaining.set_conditions(namespace, &now)).await?;
        return Ok(false);
    }
    edit(api, key, |namespace| {
        let changed = remaining.set_conditions(namespace, &now);
        let held = namespace["spec"]["finalizers"]
            .as_array()
            .is_some_and(|all| all.contains(&json!(NAMESPACE_CONTENTS)));
        if let Some(all) = namespace["spec"]["finalizers"].as_array_mut() {
            all.retain(|finalizer: &Value| finalizer != NAMESPACE_CONTENTS);
        }
        held || changed
    })
    .await?;
    // Other finalizers may still block its deletion; its next event reconciles it again.
    Ok(true)
}
