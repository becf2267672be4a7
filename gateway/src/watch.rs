//! A reflector for one kind: lists its objects, watches their changes, and lists again after every loss of
//! the API server. Not here: what the objects mean, and how an object that cannot be decoded is left out (`rpc`).

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::pin::Pin;

use futures::{Stream, StreamExt as _};
use kube::runtime::watcher::{Config, Event};
use kube::{Api, Client, Resource, ResourceExt as _};
use russet_rpc::cache_status::CacheStatus;
use russet_rpc::informer;
use russet_rpc::list_item::ListItem;
use serde::de::DeserializeOwned;

/// The events of a kind, each wrapped by `wrap`; `caches` tells what is wrong. Never ends: the gateway keeps the last
/// known state.
pub(crate) fn changes<K, C>(
    client: &Client,
    caches: &CacheStatus,
    wrap: fn(Event<ListItem<K>>) -> C,
) -> Pin<Box<dyn Stream<Item = C> + Send>>
where
    C: Send + 'static,
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let caches = caches.clone();
    let events = informer::changes(Api::all(client.clone()), Config::default(), caches.clone());
    Box::pin(events.map(move |event| {
        caches.observe(&event);
        wrap(event)
    }))
}

/// The objects of one kind. A list replaces the previous objects only once it is complete. An object that
/// cannot be decoded is hidden alone; it still counts as existing.
pub(crate) struct Reflected<K> {
    /// Whether a list was completed once.
    pub(crate) listed: bool,
    objects: BTreeMap<(String, String), Option<K>>,
    listing: BTreeMap<(String, String), Option<K>>,
}

impl<K> Default for Reflected<K> {
    fn default() -> Self {
        Self { listed: false, objects: BTreeMap::new(), listing: BTreeMap::new() }
    }
}

impl<K: Resource<DynamicType = ()> + Clone + Debug> Reflected<K> {
    /// Applies one event.
    pub(crate) fn apply(&mut self, event: Event<ListItem<K>>) {
        let key = |object: &ListItem<K>| (object.namespace().unwrap_or_default(), object.name_any());
        match event {
            Event::Init => self.listing.clear(),
            Event::InitApply(object) => {
                let key = key(&object);
                self.listing.insert(key, object.0.ok());
            }
            Event::InitDone => {
                self.objects = std::mem::take(&mut self.listing);
                self.listed = true;
            }
            Event::Apply(object) => {
                let key = key(&object);
                self.objects.insert(key, object.0.ok());
            }
            Event::Delete(object) => {
                self.objects.remove(&key(&object));
            }
        }
    }

    /// The objects that can be decoded.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &K> {
        self.objects.values().flatten()
    }

    /// Namespace and name of those that cannot.
    pub(crate) fn undecodable(&self) -> impl Iterator<Item = &(String, String)> {
        self.objects.iter().filter(|(_, object)| object.is_none()).map(|(name, _)| name)
    }

    /// The number of existing objects.
    pub(crate) fn count(&self) -> usize {
        self.objects.len()
    }
}

#[cfg(test)]
mod tests {
    use russet_crds::ModelRoute;

    use super::*;

    fn object(json: &serde_json::Value) -> ListItem<ModelRoute> {
        serde_json::from_str(&json.to_string()).unwrap()
    }

    fn route_json(name: &str, spec: serde_json::Value) -> serde_json::Value {
        serde_json::json!({
            "apiVersion": "russet.dev/v1alpha1", "kind": "ModelRoute",
            "metadata": {"namespace": "default", "name": name}, "spec": spec,
        })
    }

    fn good_json(name: &str) -> serde_json::Value {
        route_json(name, serde_json::json!({"models": ["m"], "targets": [{"deploymentRef": {"name": "d"}}]}))
    }

    fn route(name: &str, spec: serde_json::Value) -> ListItem<ModelRoute> {
        object(&route_json(name, spec))
    }

    fn good(name: &str) -> ListItem<ModelRoute> {
        object(&good_json(name))
    }

    #[test]
    fn a_broken_object_hides_itself_and_no_other() {
        let mut reflected = Reflected::default();
        let names = |reflected: &Reflected<ModelRoute>| {
            reflected.iter().map(|route| route.name_any()).collect::<Vec<_>>()
        };
        reflected.apply(Event::Init);
        reflected.apply(Event::InitApply(good("a")));
        reflected.apply(Event::InitApply(route("b", serde_json::json!({"models": 7}))));
        assert!(!reflected.listed && names(&reflected).is_empty());
        reflected.apply(Event::InitDone);
        assert!(reflected.listed);
        assert_eq!(names(&reflected), ["a"]);
        reflected.apply(Event::Apply(good("b")));
        assert_eq!(names(&reflected), ["a", "b"]);
        reflected.apply(Event::Apply(route("a", serde_json::json!({"models": 7}))));
        assert_eq!(names(&reflected), ["b"]);
        assert_eq!(reflected.count(), 2, "an object that cannot be decoded still counts");
        // An object may be deeper than its reader takes.
        let (open, close) = (r#"{"f:a":"#.repeat(124), "}".repeat(124));
        let fields = format!(r#""managedFields": [{{"fieldsV1": {open}{{}}{close}}}], "name": "deep""#);
        let deep =
            serde_json::to_string(&good_json("deep")).unwrap().replacen(r#""name":"deep""#, &fields, 1);
        reflected.apply(Event::Apply(serde_json::from_str(&deep).unwrap()));
        assert_eq!((names(&reflected), reflected.count()), (vec!["b".to_owned()], 3));
        // A new list counts only when it is complete.
        reflected.apply(Event::Init);
        assert_eq!(names(&reflected), ["b"]);
        reflected.apply(Event::InitApply(good("c")));
        reflected.apply(Event::InitDone);
        assert_eq!(names(&reflected), ["c"]);
        reflected.apply(Event::Delete(good("c")));
        assert!(names(&reflected).is_empty());
    }
}
