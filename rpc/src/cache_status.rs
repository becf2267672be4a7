//! What the caches of a process lack: kinds that do not fill or whose watch fails, and objects that cannot be
//! decoded. In words for `/readyz` and the log, and as metrics. Not here: the caches ([`crate::informer`]).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::runtime::watcher::Event;
use kube::{Resource, ResourceExt as _};
use parking_lot::Mutex;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntGaugeVec, Opts};

use crate::list_item::{ListItem, UndecodableObject};

/// How long a kind may be without a list, or its watch may fail, until that is told: a restarted API server
/// is back within seconds, and a person should know within a minute.
pub const UNSYNCED_PATIENCE: Duration = Duration::from_secs(30);
/// The longest time between two failures of one outage: a connection attempt takes up to 30 s, and the pause
/// after it two. A watch that resumes says nothing, so the end of an outage is seen by failures that stop.
const FAILURE_GAP: Duration = Duration::from_secs(45);
/// Interval of [`CacheStatus::report`]: with the patience before it less than a minute.
const REPORT_INTERVAL: Duration = Duration::from_secs(15);
/// Undecodable objects that are remembered by name for each kind. More are counted, and each is told again
/// whenever it changes.
const MAX_NAMED_OBJECTS: usize = 1000;

/// The state of all caches of a process; clones share it.
#[derive(Clone, Default)]
pub struct CacheStatus(Arc<Mutex<BTreeMap<String, KindStatus>>>);

/// Namespace and name.
type ObjectKey = (String, String);

struct KindStatus {
    /// Whether a list was completed.
    synced: bool,
    /// When the watch began.
    started: Instant,
    /// The first and the last failure of the current outage, and the last one's text.
    failures: Option<(Instant, Instant, String)>,
    /// Why which objects cannot be decoded.
    undecodable: BTreeMap<ObjectKey, String>,
    /// The same of the list in progress.
    listing: BTreeMap<ObjectKey, String>,
}

/// A kind whose cache is not what the server has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsyncedKind {
    /// The kind.
    pub kind: String,
    /// Whether it was listed before, so that the last known objects are in use.
    pub stale: bool,
    /// For how long.
    pub age: Duration,
    /// The last failure; absent when the server did not answer yet.
    pub error: Option<String>,
}

impl fmt::Display for UnsyncedKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, stale, age, error } = self;
        let what = if *stale { "not watched" } else { "not listed" };
        let error = error.as_deref().unwrap_or("the API server does not answer");
        write!(formatter, "{kind} objects are {what} since {} s: {error}", age.as_secs())
    }
}

impl KindStatus {
    /// Since when the kind is not synced or its watch fails, if that is long enough.
    fn broken_since(&self, now: Instant) -> Option<Instant> {
        if !self.synced {
            return (now.saturating_duration_since(self.started) >= UNSYNCED_PATIENCE)
                .then_some(self.started);
        }
        let (first, last, _) = self.failures.as_ref()?;
        let lasts = last.saturating_duration_since(*first) >= UNSYNCED_PATIENCE;
        (lasts && now.saturating_duration_since(*last) < FAILURE_GAP).then_some(*first)
    }
}

impl CacheStatus {
    /// A watch of this kind begins.
    pub fn start(&self, kind: &str, now: Instant) {
        self.0.lock().insert(
            kind.to_owned(),
            KindStatus {
                synced: false,
                started: now,
                failures: None,
                undecodable: BTreeMap::new(),
                listing: BTreeMap::new(),
            },
        );
    }

    /// No kind is watched any more.
    pub fn clear(&self) {
        self.0.lock().clear();
    }

    /// A list or watch of this kind failed.
    pub fn failed(&self, kind: &str, error: String, now: Instant) {
        if let Some(status) = self.0.lock().get_mut(kind) {
            let first = match &status.failures {
                Some((first, last, _)) if now.saturating_duration_since(*last) < FAILURE_GAP => *first,
                _ => now,
            };
            status.failures = Some((first, now, error));
        }
    }

    /// Notes an event. Returns the object in it if it cannot be decoded and was not known to be so; that was
    /// logged then.
    pub fn observe<'a, K>(&self, event: &'a Event<ListItem<K>>) -> Option<&'a UndecodableObject>
    where
        K: Resource<DynamicType = ()>,
    {
        let kind = K::kind(&());
        let mut kinds = self.0.lock();
        let status = kinds.get_mut(kind.as_ref())?;
        // `Init` comes before the server is asked.
        if !matches!(event, Event::Init) && (status.synced || matches!(event, Event::InitDone)) {
            status.failures = None;
        }
        let (item, listed) = match event {
            Event::Init => {
                status.listing.clear();
                return None;
            }
            Event::InitDone => {
                status.synced = true;
                status.undecodable = std::mem::take(&mut status.listing);
                return None;
            }
            Event::Delete(item) => {
                status.undecodable.remove(&key(item));
                return None;
            }
            Event::InitApply(item) => (item, true),
            Event::Apply(item) => (item, false),
        };
        let key = key(item);
        let Err(undecodable) = &item.0 else {
            if !listed {
                status.undecodable.remove(&key);
            }
            return None;
        };
        let known = status.undecodable.get(&key) == Some(&undecodable.error);
        let named = if listed { &mut status.listing } else { &mut status.undecodable };
        if named.len() < MAX_NAMED_OBJECTS || named.contains_key(&key) {
            named.insert(key.clone(), undecodable.error.clone());
        }
        drop(kinds);
        if known {
            return None;
        }
        let ((namespace, name), error) = (key, &undecodable.error);
        tracing::warn!(%kind, namespace, name, error, "an object that cannot be decoded is left out; the others are kept");
        Some(undecodable)
    }

    /// The kinds that are not synced, or whose watch fails, for [`UNSYNCED_PATIENCE`] at least.
    pub fn unsynced(&self, now: Instant) -> Vec<UnsyncedKind> {
        let kinds = self.0.lock();
        let unsynced = kinds.iter().filter_map(|(kind, status)| {
            let since = status.broken_since(now)?;
            let age = now.saturating_duration_since(since);
            let error = status.failures.as_ref().map(|(_, _, error)| error.clone());
            Some(UnsyncedKind { kind: kind.clone(), stale: status.synced, age, error })
        });
        unsynced.collect()
    }

    /// The same as one text for `/readyz`; empty if there is none.
    pub fn problems(&self, now: Instant) -> String {
        let lines: Vec<String> = self.unsynced(now).iter().map(ToString::to_string).collect();
        lines.join("\n")
    }

    /// Tells at `warn` which kinds are not synced, and when they are again. Never ends.
    pub async fn report(&self) {
        let mut reported: Vec<String> = Vec::new();
        loop {
            tokio::time::sleep(REPORT_INTERVAL).await;
            let unsynced = self.unsynced(Instant::now());
            for kind in unsynced.iter().filter(|kind| !reported.contains(&kind.kind)) {
                tracing::warn!("{kind}");
            }
            for kind in reported.iter().filter(|kind| unsynced.iter().all(|unsynced| unsynced.kind != **kind))
            {
                tracing::info!(kind, "the cache is synced again");
            }
            reported = unsynced.into_iter().map(|unsynced| unsynced.kind).collect();
        }
    }

    /// `russet_cache_synced` and `russet_cache_undecodable_objects`, by kind.
    pub fn collector(&self) -> Result<impl Collector + 'static, prometheus::Error> {
        let gauge = |name: &str, help: &str| IntGaugeVec::new(Opts::new(name, help), &["kind"]);
        Ok(CacheCollector {
            status: self.clone(),
            synced: gauge(
                "russet_cache_synced",
                "1 if the objects of this kind were listed and are watched, 0 if not.",
            )?,
            undecodable: gauge(
                "russet_cache_undecodable_objects",
                "Objects of this kind that cannot be decoded and are left out.",
            )?,
        })
    }
}

fn key<K: Resource<DynamicType = ()>>(item: &ListItem<K>) -> ObjectKey {
    (item.namespace().unwrap_or_default(), item.meta().name.clone().unwrap_or_default())
}

struct CacheCollector {
    status: CacheStatus,
    synced: IntGaugeVec,
    undecodable: IntGaugeVec,
}

impl Collector for CacheCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.synced.desc().into_iter().chain(self.undecodable.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.synced.reset();
        self.undecodable.reset();
        for (kind, status) in &*self.status.0.lock() {
            let synced = status.synced && status.broken_since(Instant::now()).is_none();
            self.synced.with_label_values(&[kind]).set(synced.into());
            let undecodable = i64::try_from(status.undecodable.len()).unwrap_or(i64::MAX);
            self.undecodable.with_label_values(&[kind]).set(undecodable);
        }
        self.synced.collect().into_iter().chain(self.undecodable.collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::coordination::v1::Lease;
    use prometheus::{Registry, TextEncoder};

    use super::*;

    fn item(name: &str, good: bool) -> ListItem<Lease> {
        let holder = if good { "\"a\"" } else { "7" };
        let json = format!(
            r#"{{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {{"namespace": "n", "name": "{name}"}}, "spec": {{"holderIdentity": {holder}}}}}"#
        );
        serde_json::from_str(&json).unwrap()
    }

    fn metrics(status: &CacheStatus) -> String {
        let registry = Registry::new();
        registry.register(Box::new(status.collector().unwrap())).unwrap();
        TextEncoder::new().encode_to_string(&registry.gather()).unwrap()
    }

    #[test]
    fn undecodable_objects_are_reported_once_and_counted() {
        let status = CacheStatus::default();
        status.start("Lease", Instant::now());
        let message = |event: Event<ListItem<Lease>>| status.observe(&event).is_some();
        let count = |count: usize| {
            let line = format!("russet_cache_undecodable_objects{{kind=\"Lease\"}} {count}\n");
            assert!(metrics(&status).contains(&line), "{count}: {}", metrics(&status));
        };
        assert!(!message(Event::Init));
        assert!(!message(Event::InitApply(item("good", true))));
        assert!(message(Event::InitApply(item("bad", false))));
        assert!(!message(Event::InitDone));
        count(1);
        // The next list has it again: nothing new.
        assert!(
            !message(Event::Init)
                && !message(Event::InitApply(item("bad", false)))
                && !message(Event::InitDone)
        );
        count(1);
        assert!(message(Event::Apply(item("good", false))));
        count(2);
        assert!(!message(Event::Apply(item("good", true))));
        assert!(!message(Event::Delete(item("bad", false))));
        count(0);
    }

    #[test]
    fn a_cache_that_does_not_fill_is_named_with_its_error() {
        let (status, start) = (CacheStatus::default(), Instant::now());
        status.start("Lease", start);
        status.start("Node", start);
        assert!(metrics(&status).contains("russet_cache_synced{kind=\"Lease\"} 0\n"));
        let later = start + UNSYNCED_PATIENCE;
        assert!(status.unsynced(later - Duration::from_secs(1)).is_empty());
        status.failed("Lease", "403 Forbidden".to_owned(), start);
        assert_eq!(
            status.problems(later),
            "Lease objects are not listed since 30 s: 403 Forbidden\n\
             Node objects are not listed since 30 s: the API server does not answer"
        );
        status.observe(&Event::<ListItem<Lease>>::InitDone);
        assert!(metrics(&status).contains("russet_cache_synced{kind=\"Lease\"} 1\n"));
        assert_eq!(status.unsynced(later).len(), 1);
        // A watch that broke later, and came back without an event.
        let seconds = |seconds| later + Duration::from_secs(seconds);
        for second in [0, 20, 29] {
            status.failed("Lease", "gone".to_owned(), seconds(second));
        }
        assert_eq!(status.unsynced(seconds(31)).len(), 1, "only the one that was never listed");
        status.failed("Lease", "still gone".to_owned(), seconds(31));
        let lease = status.unsynced(seconds(32)).remove(0);
        assert!(lease.stale && lease.error.as_deref() == Some("still gone"), "{lease}");
        assert_eq!(status.unsynced(seconds(31 + 45)).len(), 1);
        // The next outage begins by itself, and an event ends it.
        status.failed("Lease", "gone".to_owned(), seconds(200));
        assert_eq!(status.unsynced(seconds(201)).len(), 1);
        status.failed("Lease", "gone".to_owned(), seconds(232));
        assert_eq!(status.unsynced(seconds(232)).len(), 2);
        status.observe(&Event::Apply(item("a", true)));
        assert_eq!(status.unsynced(seconds(232)).len(), 1);
    }
}
