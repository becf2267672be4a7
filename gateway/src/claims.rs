//! Claims on objects that one of several gateways runs, such as Benchmarks: the runner's heartbeats are new resource versions
//! of the object, and a status is written against the version that was read, so that of two gateways one gets a conflict.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource, ResourceExt as _};
use russet_crds::names;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::time::Instant;

use crate::api_timeout::{WriteError, with_timeout};

/// When each resource version of an object was first seen, by uid.
#[derive(Default)]
pub(crate) struct SeenVersions(BTreeMap<String, (Option<String>, Instant)>);

impl SeenVersions {
    /// Sees these objects; others are forgotten.
    pub(crate) fn observe<K: Resource>(&mut self, all: &[&K]) {
        let uids: BTreeSet<String> = all.iter().filter_map(|object| object.uid()).collect();
        self.0.retain(|uid, _| uids.contains(uid));
        let now = Instant::now();
        for object in all {
            let seen = self.0.entry(object.uid().unwrap_or_default()).or_insert((None, now));
            if seen.0 != object.resource_version() {
                *seen = (object.resource_version(), now);
            }
        }
    }

    /// Whether the object was written so lately.
    pub(crate) fn is_newer_than(&self, uid: &str, timeout: Duration) -> bool {
        self.0.get(uid).is_some_and(|(_, time)| time.elapsed() < timeout)
    }
}

/// Writes the status of an object against the resource version that was read; the object as it is then, and nothing where it
/// has changed or could not be written.
pub(crate) async fn replace_status<K>(client: &Client, object: &K, status: &impl Serialize) -> Option<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(client.clone(), &object.namespace().unwrap_or_default());
    let (kind, name) = (K::kind(&()), object.name_any());
    let patch = json!({
        "apiVersion": K::api_version(&()),
        "kind": kind,
        "metadata": {"name": name, "resourceVersion": object.resource_version()},
        "status": status,
    });
    let params = PatchParams::apply(names::GATEWAY_MANAGER).force();
    let patch = Patch::Apply(patch);
    let written = async {
        match api.patch_status(&name, &params, &patch).await {
            // The object is deleted or has changed; the watch will deliver the change.
            Err(kube::Error::Api(error)) if matches!(error.code, 404 | 409) => Ok(None),
            other => other.map(Some),
        }
    };
    with_timeout(written).await.unwrap_or_else(|WriteError { cause, .. }| {
        tracing::warn!(name, "cannot write the status of the {kind}: {cause}");
        None
    })
}
