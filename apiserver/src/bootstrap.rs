//! Bootstraps the objects every control plane has: namespaces, default roles, the CA's Secret. Missing ones
//! are created at start; existing ones are left unchanged.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::auth::defaults;
use crate::auth::tokens::secret_key;
use crate::call::Call;
use crate::gc::edit;
use crate::kinds::builtin;
use crate::object;
use crate::pki::Authority;
use crate::state::ServerState;
use crate::status::{ApiError, Result};
use crate::store::{Expect, Txn, TxnChange, TxnOutcome};
use crate::verbs::write::WriteOrigin;
use crate::verbs::{create, list};

/// The namespaces that always exist.
pub const NAMESPACES: &[&str] =
    &["default", "kube-system", "kube-public", "kube-node-lease", "russet-system"];

/// Creates the missing objects.
pub async fn run(api: &Arc<ServerState>, authority: &Authority) -> Result<()> {
    for name in NAMESPACES {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        ensure(api, "", namespace).await?;
    }
    for object in defaults::cluster_roles().into_iter().chain(defaults::cluster_role_bindings()) {
        ensure(api, "", object).await?;
    }
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls",
        "metadata": {"name": "russet-ca", "namespace": "russet-system"},
        "data": {
            "tls.crt": STANDARD.encode(authority.cert_pem()),
            "tls.key": STANDARD.encode(authority.key_pem()),
        },
    });
    // A new CA, created because its files were lost, replaces the one whose key is gone.
    let key = secret_key("russet-system", "russet-ca");
    edit::edit(api, &key, |stored| {
        let differs = stored["data"] != secret["data"];
        object::copy_field(stored, &secret, "data");
        differs
    })
    .await?;
    ensure(api, "russet-system", secret).await?;
    seed_service(api).await
}

/// Creates an object unless one of its name exists.
pub async fn ensure(api: &Arc<ServerState>, namespace: &str, object: Value) -> Result<()> {
    let (api_version, kind) =
        (object["apiVersion"].as_str().unwrap_or_default(), object["kind"].as_str().unwrap_or_default());
    let resource = api.kinds.current().of_kind(api_version, kind).ok_or_else(ApiError::no_such_path)?;
    if api.store.get(&resource.key(namespace, object::name(&object))).is_some() {
        return Ok(());
    }
    let call = Call::internal(resource, namespace, object::name(&object));
    match create::create(api, &call, object, &mut Vec::new(), WriteOrigin::Write).await {
        Err(error) if error.reason == "AlreadyExists" => Ok(()),
        other => other.map(|_| ()),
    }
}

/// `services/kubernetes`, which some clients take as proof that a cluster is up. Services are read-only here,
/// so it is written directly to the store.
async fn seed_service(api: &Arc<ServerState>) -> Result<()> {
    let key = format!("{}default/kubernetes", builtin::prefix("", "services"));
    if api.store.get(&key).is_some() {
        return Ok(());
    }
    let service = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": "kubernetes", "namespace": "default", "uid": object::new_uid(),
            "creationTimestamp": object::timestamp(jiff::Timestamp::now()),
            "labels": {"component": "apiserver", "provider": "kubernetes"},
        },
        "spec": {
            "type": "ClusterIP", "clusterIP": "127.0.0.1", "clusterIPs": ["127.0.0.1"], "sessionAffinity": "None",
            "ports": [{"name": "https", "port": 443, "protocol": "TCP", "targetPort": 6443}],
        },
        "status": {"loadBalancer": {}},
    });
    let change = TxnChange::Put(service.to_string().into());
    match api.store.txn(Txn { key, expect: Expect::Absent, change }).await.map_err(list::storage_error)? {
        TxnOutcome::Committed(_) | TxnOutcome::Conflict(_) => Ok(()),
    }
}
