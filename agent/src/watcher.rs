//! Watches this node's Shards and ModelCopies. An object that cannot be decoded is left out alone and logged. A broken connection
//! is retried within seconds, and the last known objects stay valid until then.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use kube::runtime::reflector::{self, ObjectRef};
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt as _};
use russet_crds::{ModelCopy, Shard};
use russet_rpc::list_item::ListItem;
use russet_telemetry::tasks::TaskSet;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

/// The objects, or `None` until they were listed once.
pub(crate) type ObjectList<K> = watch::Receiver<Option<Vec<Arc<K>>>>;

/// Retry interval after a failed watch. Short, so that a restarted control plane is seen at once; there are
/// as many agents as machines, not thousands.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Duration of one watch. A control plane that lost power closes no connection; its loss is noticed when a
/// watch exceeds its duration, and this node gets no updates until then.
pub(crate) const WATCH_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn shards(client: Client, node: &str, tasks: &mut TaskSet) -> ObjectList<Shard> {
    start(Api::all(client), node, tasks)
}

pub(crate) fn copies(client: Client, node: &str, tasks: &mut TaskSet) -> ObjectList<ModelCopy> {
    start(Api::all(client), node, tasks)
}

fn start<K>(api: Api<ListItem<K>>, node: &str, tasks: &mut TaskSet) -> ObjectList<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let (sender, receiver) = watch::channel(None);
    let config = watcher::Config::default()
        .fields(&format!("spec.nodeName={node}"))
        .timeout(WATCH_TIMEOUT.as_secs() as u32);
    tasks.spawn("watch", async move {
        let kind = K::kind(&());
        let (store, mut writer) = reflector::store::<ListItem<K>>();
        let mut stream = watcher(api, config).boxed();
        let (mut listed, mut last) = (false, BTreeMap::new());
        while let Some(event) = stream.next().await {
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    tracing::debug!(%kind, %error, "watch interrupted");
                    tokio::time::sleep(RETRY_INTERVAL).await;
                    continue;
                }
            };
            writer.apply_watcher_event(&event);
            let whole = match event {
                watcher::Event::Init | watcher::Event::InitApply(_) => false,
                watcher::Event::InitDone => true,
                watcher::Event::Apply(_) | watcher::Event::Delete(_) => listed,
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
            Err(error) => {
                let object = ObjectRef::from_obj(object.as_ref());
                tracing::warn!(%object, %error, "an object this agent cannot parse is left unchanged");
                last.get(&key).map(|known| (key, known.clone()))
            }
        }
    });
    valid.collect()
}
