//! The life of a namespace: at its beginning it gets a service account and the authority's certificate, at its end
//! everything in it is deleted before it goes itself.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::{edit, remove};
use crate::api::Api;
use crate::bootstrap;
use crate::kinds::builtin;
use crate::object;
use crate::status::Result;
use crate::store::EventKind;

/// How soon a namespace whose objects are held by finalizers is looked at again.
const AGAIN: Duration = Duration::from_millis(100);
/// The certificate authority's certificate in every namespace, under the name Kubernetes gives it.
const ROOT_CA: &str = "kube-root-ca.crt";

/// Runs the controller.
pub async fn run(api: Arc<Api>) {
    loop {
        if let Err(error) = follow(&api).await {
            tracing::debug!(error, "the namespaces are read again");
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn follow(api: &Arc<Api>) -> std::result::Result<(), String> {
    let core = "/registry/core/";
    let prefix = builtin::prefix("", "namespaces");
    let furniture = [builtin::prefix("", "serviceaccounts"), builtin::prefix("", "configmaps")];
    let snapshot = api.store.range(&prefix, None, None).map_err(|error| error.to_string())?;
    let mut watch = api.store.watch(core, snapshot.revision).map_err(|error| error.to_string())?;
    let mut look: BTreeSet<String> =
        snapshot.records.iter().map(|record| object::name(record.object()).to_string()).collect();
    loop {
        let mut again = BTreeSet::new();
        for name in std::mem::take(&mut look) {
            match tend(api, &name).await {
                Ok(true) => {}
                Ok(false) => {
                    again.insert(name);
                }
                Err(error) => {
                    tracing::debug!(%error, name, "a namespace is tried again");
                    again.insert(name);
                }
            }
        }
        look = again;
        let events = if look.is_empty() {
            watch.next().await
        } else {
            match tokio::time::timeout(AGAIN, watch.next()).await {
                Ok(events) => events,
                Err(_) => continue,
            }
        };
        for event in events.map_err(|error| error.to_string())? {
            let key = event.record.key.as_ref();
            if key.starts_with(&prefix) {
                look.insert(object::name(event.record.object()).to_string());
            } else if (event.kind == EventKind::Deleted || key.ends_with(ROOT_CA))
                && furniture.iter().any(|prefix| key.starts_with(prefix))
            {
                look.insert(object::namespace(event.record.object()).to_string());
            }
        }
    }
}

/// Brings one namespace on; tells whether nothing is left to do.
async fn tend(api: &Arc<Api>, name: &str) -> Result<bool> {
    let key = crate::kinds::builtin_namespace_key(name);
    let Some(record) = api.store.get(&key) else { return Ok(true) };
    if object::is_terminating(record.object()) {
        return empty(api, name, &key).await;
    }
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": name}});
    bootstrap::ensure(api, name, account).await?;
    let secret = api.store.get(&format!("{}russet-system/russet-ca", builtin::prefix("", "secrets")));
    let certificate = secret
        .and_then(|secret| STANDARD.decode(secret.object()["data"]["tls.crt"].as_str()?).ok())
        .and_then(|bytes| String::from_utf8(bytes).ok());
    if let Some(certificate) = certificate {
        let root = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": ROOT_CA, "namespace": name},
            "data": {"ca.crt": certificate},
        });
        // Somebody may have changed it, and what trusts it must not trust them.
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

/// Deletes what is in a terminating namespace, and once nothing is, lets it go.
async fn empty(api: &Arc<Api>, name: &str, key: &str) -> Result<bool> {
    let mut left = 0;
    for resource in api.kinds.table().stored().iter().filter(|resource| resource.namespaced) {
        let snapshot = api
            .store
            .range(&resource.prefix_of(name), None, None)
            .map_err(crate::verbs::list::storage_error)?;
        for record in &snapshot.records {
            if !object::is_terminating(record.object()) {
                remove(api, record, "Background").await?;
            }
            left += usize::from(api.store.get(&record.key).is_some());
        }
    }
    if left > 0 {
        return Ok(false);
    }
    edit(api, key, |namespace| {
        let held =
            namespace["spec"]["finalizers"].as_array().is_some_and(|all| all.contains(&json!("kubernetes")));
        if let Some(all) = namespace["spec"]["finalizers"].as_array_mut() {
            all.retain(|finalizer: &Value| finalizer != "kubernetes");
        }
        held
    })
    .await?;
    // Other finalizers may hold it still; its next event brings it back here.
    Ok(true)
}
