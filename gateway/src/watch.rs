//! A reflector for one kind: lists its objects, watches their changes, and lists again after every loss of
//! the API server. Not here: what the objects mean.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::pin::Pin;
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use kube::core::DeserializeGuard;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt as _, watcher as watch_kind};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;

/// The events of a kind, each wrapped by `wrap`. Never ends.
pub(crate) fn changes<K, C>(
    client: &Client,
    wrap: fn(Event<DeserializeGuard<K>>) -> C,
) -> Pin<Box<dyn Stream<Item = C> + Send>>
where
    C: Send + 'static,
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let api: Api<DeserializeGuard<K>> = Api::all(client.clone());
    // A server that disappeared without closing the connection is detected when the watch times out: keep it
    // short.
    let config = watcher::Config::default().timeout(60);
    // Logged once when the server becomes unavailable and once when it is back, not at every attempt.
    let mut unavailable = false;
    let stream = watch_kind(api, config).backoff(WatchBackoff::default()).filter_map(move |event| {
        let kind = K::kind(&());
        let change = match event {
            Ok(event) => {
                if std::mem::take(&mut unavailable) {
                    tracing::info!(%kind, "watching the API server again");
                }
                Some(wrap(event))
            }
            Err(error) => {
                if !std::mem::replace(&mut unavailable, true) {
                    let error = russet_telemetry::errors::chain(&error);
                    tracing::warn!(%kind, "cannot watch the API server; the gateway keeps the last known state: {error}");
                }
                None
            }
        };
        std::future::ready(change)
    });
    Box::pin(stream)
}

/// Backoff between attempts to reach the API server. Short, because a restarted control plane is back within
/// seconds and the few gateways cannot overload it.
#[derive(Default)]
struct WatchBackoff {
    failures: u32,
}

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let delay = Duration::from_millis(250 << self.failures.min(3));
        self.failures = self.failures.saturating_add(1);
        Some(delay)
    }
}

impl Backoff for WatchBackoff {
    fn reset(&mut self) {
        self.failures = 0;
    }
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
    pub(crate) fn apply(&mut self, event: Event<DeserializeGuard<K>>) {
        let key = |object: &DeserializeGuard<K>| (object.namespace().unwrap_or_default(), object.name_any());
        match event {
            Event::Init => self.listing.clear(),
            Event::InitApply(object) => {
                let key = key(&object);
                self.listing.insert(key, valid(object));
            }
            Event::InitDone => {
                self.objects = std::mem::take(&mut self.listing);
                self.listed = true;
            }
            Event::Apply(object) => {
                let key = key(&object);
                self.objects.insert(key, valid(object));
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

    /// The number of existing objects.
    pub(crate) fn count(&self) -> usize {
        self.objects.len()
    }
}

/// An object that this release cannot decode must not hide the others.
fn valid<K: Resource<DynamicType = ()>>(object: DeserializeGuard<K>) -> Option<K> {
    match object.0 {
        Ok(object) => Some(object),
        Err(invalid) => {
            let name = invalid.metadata.name.as_deref().unwrap_or("?");
            tracing::warn!(kind = %K::kind(&()), name, "ignoring an object that cannot be decoded: {}", invalid.error);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use russet_crds::ModelRoute;

    use super::*;

    fn object(json: serde_json::Value) -> DeserializeGuard<ModelRoute> {
        serde_json::from_value(json).unwrap()
    }

    fn route(name: &str, spec: serde_json::Value) -> DeserializeGuard<ModelRoute> {
        object(serde_json::json!({
            "apiVersion": "russet.dev/v1alpha1", "kind": "ModelRoute",
            "metadata": {"namespace": "default", "name": name}, "spec": spec,
        }))
    }

    fn good(name: &str) -> DeserializeGuard<ModelRoute> {
        route(name, serde_json::json!({"models": ["m"], "targets": [{"deploymentRef": {"name": "d"}}]}))
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
        // A new list counts only when it is complete.
        reflected.apply(Event::Init);
        assert_eq!(names(&reflected), ["b"]);
        reflected.apply(Event::InitApply(good("c")));
        reflected.apply(Event::InitDone);
        assert_eq!(names(&reflected), ["c"]);
        reflected.apply(Event::Delete(good("c")));
        assert!(names(&reflected).is_empty());
    }

    #[test]
    fn the_api_server_is_asked_again_within_two_seconds() {
        let mut backoff = WatchBackoff::default();
        let waits: Vec<u128> = backoff.by_ref().take(5).map(|wait| wait.as_millis()).collect();
        assert_eq!(waits, [250, 500, 1000, 2000, 2000]);
        backoff.reset();
        assert_eq!(backoff.next(), Some(Duration::from_millis(250)));
    }
}
