//! This node's Shards and ModelCopies, as `rpc`'s informer has them. An object that cannot be decoded stays as it was
//! before, and the last known objects stay valid while no watch succeeds.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use futures::StreamExt as _;
use kube::runtime::reflector;
use kube::runtime::watcher::{Config, Event};
use kube::{Api, Client, Resource, ResourceExt as _};
use russet_crds::{ModelCopy, Shard};
use russet_rpc::cache_status::CacheStatus;
use russet_rpc::informer;
use russet_rpc::list_item::ListItem;
use russet_telemetry::tasks::TaskSet;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

/// The objects, or `None` until they were listed once.
pub(crate) type ObjectList<K> = watch::Receiver<Option<Vec<Arc<K>>>>;

/// Where the objects come from, and what is wrong with them.
pub(crate) struct NodeWatcher<'a> {
    /// Client of the API server.
    pub(crate) client: Client,
    /// Name of this node.
    pub(crate) node: &'a str,
    /// Says which lists and watches fail.
    pub(crate) caches: CacheStatus,
}

impl NodeWatcher<'_> {
    /// The ranks bound to this node.
    pub(crate) fn shards(&self, tasks: &mut TaskSet) -> ObjectList<Shard> {
        self.start(tasks)
    }

    /// The copies requested from this node.
    pub(crate) fn copies(&self, tasks: &mut TaskSet) -> ObjectList<ModelCopy> {
        self.start(tasks)
    }

    fn start<K>(&self, tasks: &mut TaskSet) -> ObjectList<K>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
    {
        let (sender, receiver) = watch::channel(None);
        let config = Config::default().fields(&format!("spec.nodeName={}", self.node));
        let (api, caches) = (Api::all(self.client.clone()), self.caches.clone());
        tasks.spawn("watch", async move {
            let (store, mut writer) = reflector::store::<ListItem<K>>();
            let mut changes = std::pin::pin!(informer::changes(api, config, caches.clone()));
            let (mut listed, mut last) = (false, BTreeMap::new());
            while let Some(event) = changes.next().await {
                caches.observe(&event);
                writer.apply_watcher_event(&event);
                let whole = match event {
                    Event::Init | Event::InitApply(_) => false,
                    Event::InitDone => true,
                    Event::Apply(_) | Event::Delete(_) => listed,
                };
                if whole {
                    listed = true;
                    last = valid(&store, &last);
                    sender.send_replace(Some(last.values().cloned().collect()));
                }
            }
        });
        receiver
    }
}

/// Objects in order of namespace and name, by UID.
type KnownObjects<K> = BTreeMap<(Option<String>, String, Option<String>), Arc<K>>;

/// The valid objects. An object that was valid before stays as it was: treating it as deleted would stop its
/// engine.
fn valid<K>(store: &reflector::Store<ListItem<K>>, last: &KnownObjects<K>) -> KnownObjects<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + 'static,
{
    let objects = store.state();
    let valid = objects.iter().filter_map(|object| {
        let key = (object.namespace(), object.name_any(), object.uid());
        match &object.0 {
            Ok(valid) => Some((key, Arc::new(valid.clone()))),
            Err(_) => last.get(&key).map(|known| (key, known.clone())),
        }
    });
    valid.collect()
}
