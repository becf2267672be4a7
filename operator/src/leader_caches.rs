//! Access to the leader's caches for its metrics, and for Prometheus, which asks for the targets of machines
//! and engines. Not here: decisions.

use std::sync::Arc;
use std::time::Instant;

use kube::ResourceExt as _;
use kube::runtime::reflector::ObjectRef;
use parking_lot::Mutex;
use russet_crds::Shard;
use russet_rpc::cache_status::CacheStatus;
use serde_json::{Value, json};

use crate::stores::Stores;

/// The leader's caches; empty in a process that stands by, so that only one of several operators reports.
#[derive(Clone, Default)]
pub struct LeaderCaches {
    stores: Arc<Mutex<Option<Stores>>>,
    status: CacheStatus,
}

/// Publishes the caches until it is dropped.
pub(crate) struct PublishGuard(LeaderCaches);

impl Drop for PublishGuard {
    fn drop(&mut self) {
        *self.0.stores.lock() = None;
    }
}

/// The status of the watches of a leader, until it is dropped.
pub(crate) struct StatusGuard(CacheStatus);

impl Drop for StatusGuard {
    fn drop(&mut self) {
        self.0.clear();
    }
}

impl LeaderCaches {
    /// The status that the watches of this leader write. It is empty again when the guard is dropped.
    pub(crate) fn lead(&self) -> (CacheStatus, StatusGuard) {
        (self.status.clone(), StatusGuard(self.status.clone()))
    }

    /// Publishes these caches, which are synced.
    pub(crate) fn publish(&self, stores: &Stores) -> PublishGuard {
        *self.stores.lock() = Some(stores.clone());
        PublishGuard(self.clone())
    }

    /// The caches of a leader.
    pub(crate) fn stores(&self) -> Option<Stores> {
        self.stores.lock().clone()
    }

    /// What the caches lack, also while they fill.
    pub(crate) fn status(&self) -> &CacheStatus {
        &self.status
    }

    /// The same in lines, for `/readyz`; empty if nothing is wrong.
    pub fn problems(&self) -> String {
        self.status.problems(Instant::now())
    }

    /// Metrics targets of agents and engines, for Prometheus' HTTP service discovery. An engine serves its
    /// metrics on its machine's loopback only, so its agent proxies them.
    pub fn targets(&self) -> String {
        let Some(stores) = self.stores() else { return "[]".to_owned() };
        let mut targets: Vec<Value> = Vec::new();
        let mut nodes = stores.nodes.state();
        nodes.sort_by_key(|node| node.name_any());
        for node in nodes {
            let address = node.status.as_ref().and_then(|status| status.metrics_address.as_deref());
            let Some(address) = address else { continue };
            targets.push(target(address, json!({"component": "agent", "node": node.name_any()})));
        }
        let mut shards = stores.shards.state();
        shards.sort_by_key(|shard| (shard.namespace(), shard.name_any()));
        for shard in shards {
            let shows = shard.status.as_ref().is_some_and(|status| status.metrics_address.is_some());
            let node = stores.nodes.get(&ObjectRef::new(&shard.spec.node_name));
            let address = node.and_then(|node| node.status.as_ref()?.metrics_address.clone());
            if let (true, Some(address), Some(uid)) = (shows, address, shard.uid()) {
                targets.push(target(&address, engine(&shard, &uid)));
            }
        }
        Value::from(targets).to_string()
    }
}

fn target(address: &str, labels: Value) -> Value {
    json!({"targets": [address], "labels": labels})
}

fn engine(shard: &Shard, uid: &str) -> Value {
    let labels = shard.labels();
    let label = |name: &str| labels.get(name).cloned().unwrap_or_default();
    json!({
        "__metrics_path__": format!("/engines/{uid}/metrics"),
        "component": "engine",
        "node": shard.spec.node_name,
        "namespace": shard.namespace().unwrap_or_default(),
        "deployment": label(russet_crds::names::LABEL_DEPLOYMENT),
        "group": shard.spec.group_ref.name,
        "rank": shard.spec.rank.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use russet_crds::{
        InferenceNode, InferenceNodeSpec, InferenceNodeStatus, LocalReference, ShardSpec, ShardStatus, names,
    };

    use super::*;
    use crate::metrics::tests::filled;

    #[test]
    fn scrape_targets_list_agents_and_their_engines_only() {
        let mut node = InferenceNode::new("a", InferenceNodeSpec::default());
        let address = Some("10.0.0.1:9100".to_owned());
        node.status =
            Some(InferenceNodeStatus { metrics_address: address, ..InferenceNodeStatus::default() });
        let silent = InferenceNode::new("b", InferenceNodeSpec::default());
        let shard = |name: &str, node: &str, shows: bool| {
            let group_ref = LocalReference::new("chat-0-1234");
            let spec = ShardSpec { node_name: node.to_owned(), group_ref, rank: 1, ..ShardSpec::default() };
            let mut shard = Shard::new(name, spec);
            shard.metadata.namespace = Some("default".to_owned());
            shard.metadata.uid = Some(format!("uid-{name}"));
            shard.metadata.labels =
                Some(BTreeMap::from([(names::LABEL_DEPLOYMENT.to_owned(), "chat".to_owned())]));
            let metrics_address = shows.then(|| "127.0.0.1:4".to_owned());
            shard.status = Some(ShardStatus { metrics_address, ..ShardStatus::default() });
            shard
        };
        let shards = vec![shard("here", "a", true), shard("starts", "a", false), shard("away", "b", true)];
        let stores = filled(|objects| {
            objects.nodes = vec![node, silent];
            objects.shards = shards;
        });
        let leader_caches = LeaderCaches::default();
        assert_eq!(leader_caches.targets(), "[]");
        let shown = leader_caches.publish(&stores);
        let targets: Value = serde_json::from_str(&leader_caches.targets()).unwrap();
        let targets = targets.as_array().unwrap();
        assert_eq!(targets.len(), 2, "{targets:?}");
        assert_eq!(targets[0]["labels"], json!({"component": "agent", "node": "a"}));
        assert_eq!(targets[1]["targets"], json!(["10.0.0.1:9100"]));
        assert_eq!(targets[1]["labels"]["__metrics_path__"], "/engines/uid-here/metrics");
        assert_eq!(targets[1]["labels"]["deployment"], "chat");
        drop(shown);
        assert_eq!(leader_caches.targets(), "[]", "who stands by names nobody");
    }
}
