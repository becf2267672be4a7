//! The watch cache: the current state as a sorted map, the recent history as a bounded ring of events, and
//! watchers that are cursors into that ring. A slow watcher therefore costs no memory; one that falls off the
//! ring gets an error. Objects that are not in use are kept as bytes only: a decoded object needs several
//! times as much.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use bytes::Bytes;
use tokio::sync::watch;

use super::{StoreError, StoredObject};

/// Events kept for watchers that reconnect: at the 30 writes per second of a busy small cluster this is ten
/// minutes, and at 1 KiB per object it is 20 MB.
pub const RING_EVENTS: usize = 20_000;

/// Maximum bytes of kept events: a burst of large objects must not fill the memory that models need.
const RING_BYTES: usize = 16 << 20;

/// Bytes of events that a watcher gets at once: they are decoded while it uses them.
const BATCH_BYTES: usize = 64 << 10;

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The key is new.
    Created,
    /// The key has a new value.
    Updated,
    /// The key is gone; the event carries its last value at the revision of the deletion.
    Deleted,
}

/// One change.
#[derive(Debug)]
pub struct StoreEvent {
    /// The kind of the change.
    pub kind: EventKind,
    /// The state after the change (for a deletion: before it, at the deletion's revision).
    pub record: Arc<StoredObject>,
    /// The state before the change.
    pub previous: Option<Arc<StoredObject>>,
}

/// A consistent read of a range.
#[derive(Debug)]
pub struct Snapshot {
    /// The records in key order.
    pub records: Vec<Arc<StoredObject>>,
    /// The revision they are consistent at.
    pub revision: u64,
}

/// A stored object in encoded form. All concurrent readers share one decoded copy; it is freed when the last
/// of them is done.
#[derive(Debug)]
struct EncodedObject {
    key: Arc<str>,
    create_revision: u64,
    revision: u64,
    value: Bytes,
    live: Mutex<Weak<StoredObject>>,
}

impl EncodedObject {
    fn from_object(record: &Arc<StoredObject>) -> Arc<Self> {
        Arc::new(Self {
            key: record.key.clone(),
            create_revision: record.create_revision,
            revision: record.revision,
            // A copy, because newly encoded bytes sit in a buffer with spare capacity.
            value: Bytes::copy_from_slice(&record.value),
            live: Mutex::new(Arc::downgrade(record)),
        })
    }

    fn upgrade(&self) -> Arc<StoredObject> {
        let mut awake = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(record) = awake.upgrade() {
            return record;
        }
        let record = Arc::new(StoredObject::new(
            self.key.clone(),
            self.create_revision,
            self.revision,
            self.value.clone(),
        ));
        *awake = Arc::downgrade(&record);
        record
    }
}

/// An event in encoded form.
#[derive(Debug)]
struct EncodedEvent {
    kind: EventKind,
    record: Arc<EncodedObject>,
    previous: Option<Arc<EncodedObject>>,
}

impl EncodedEvent {
    fn upgrade(&self) -> Arc<StoreEvent> {
        let previous = self.previous.as_ref().map(|previous| previous.upgrade());
        Arc::new(StoreEvent { kind: self.kind, record: self.record.upgrade(), previous })
    }
}

/// The map of the objects in storage.
fn encode_all(records: impl IntoIterator<Item = StoredObject>) -> BTreeMap<Arc<str>, Arc<EncodedObject>> {
    records
        .into_iter()
        .map(|record| (record.key.clone(), EncodedObject::from_object(&Arc::new(record))))
        .collect()
}

#[derive(Debug)]
struct CacheState {
    map: BTreeMap<Arc<str>, Arc<EncodedObject>>,
    ring: VecDeque<EncodedEvent>,
    /// Bytes of the values in the ring.
    ring_bytes: usize,
    /// Events at or before this revision are evicted.
    compacted: u64,
    revision: u64,
    /// How often the history was lost; a watcher from before must relist.
    resets: u64,
}

impl CacheState {
    fn evict_oldest(&mut self) {
        if let Some(event) = self.ring.pop_front() {
            self.ring_bytes -= event.record.value.len();
            self.compacted = event.record.revision;
        }
    }
}

/// The shared cache.
#[derive(Debug)]
pub struct Cache {
    state: RwLock<CacheState>,
    newest: watch::Sender<u64>,
    capacity: usize,
}

impl Cache {
    /// A cache with the contents of storage at `revision`.
    pub fn new(records: impl IntoIterator<Item = StoredObject>, revision: u64, capacity: usize) -> Self {
        Self {
            state: RwLock::new(CacheState {
                map: encode_all(records),
                ring: VecDeque::new(),
                ring_bytes: 0,
                compacted: revision,
                revision,
                resets: 0,
            }),
            newest: watch::Sender::new(revision),
            capacity,
        }
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, CacheState> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes durable changes visible, oldest first.
    pub fn publish(&self, events: Vec<StoreEvent>, revision: u64) {
        {
            let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
            for StoreEvent { kind, record, .. } in events {
                let record = EncodedObject::from_object(&record);
                let previous = match kind {
                    EventKind::Deleted => state.map.remove(&record.key),
                    EventKind::Created | EventKind::Updated => {
                        state.map.insert(record.key.clone(), record.clone())
                    }
                };
                state.ring_bytes += record.value.len();
                state.ring.push_back(EncodedEvent { kind, record, previous });
            }
            state.revision = state.revision.max(revision);
            while state.ring.len() > self.capacity || (state.ring_bytes > RING_BYTES && state.ring.len() > 1)
            {
                state.evict_oldest();
            }
        }
        self.newest.send_if_modified(|newest| {
            let later = revision > *newest;
            *newest = revision.max(*newest);
            later
        });
    }

    /// Replaces the contents after changes were missed; watchers cannot learn what happened in between.
    pub fn reset(&self, records: impl IntoIterator<Item = StoredObject>, revision: u64) {
        {
            let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
            state.map = encode_all(records);
            state.ring.clear();
            state.ring_bytes = 0;
            state.compacted = revision;
            state.revision = revision;
            state.resets += 1;
        }
        self.newest.send_replace(revision);
    }

    /// Subscribes to the newest revision.
    pub fn newest(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    /// The current state of one key.
    pub fn get(&self, key: &str) -> Option<Arc<StoredObject>> {
        let resting = self.read().map.get(key).cloned();
        resting.map(|resting| resting.upgrade())
    }

    /// The newest revision.
    pub fn revision(&self) -> u64 {
        self.read().revision
    }

    /// Evicts events up to and including `revision`.
    pub fn compact(&self, revision: u64) {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        while state.ring.front().is_some_and(|event| event.record.revision <= revision) {
            state.evict_oldest();
        }
        state.compacted = state.compacted.max(revision.min(state.revision));
    }

    /// The objects under a prefix from `start` on, now or at an earlier revision that the ring still covers.
    pub fn range(&self, prefix: &str, start: Option<&str>, at: Option<u64>) -> Result<Snapshot, StoreError> {
        let state = self.read();
        let revision = at.unwrap_or(state.revision);
        if revision > state.revision {
            return Err(StoreError::Future { asked: revision, current: state.revision });
        }
        if revision < state.compacted {
            return Err(StoreError::Compacted { asked: revision, oldest: state.compacted });
        }
        let from = start.unwrap_or(prefix).max(prefix);
        let current = state
            .map
            .range::<str, _>((Bound::Included(from), Bound::Unbounded))
            .take_while(|(key, _)| key.starts_with(prefix));
        if revision == state.revision {
            let records = current.map(|(_, record)| record.upgrade()).collect();
            return Ok(Snapshot { records, revision });
        }
        let mut past: BTreeMap<Arc<str>, Arc<EncodedObject>> =
            current.map(|(key, record)| (key.clone(), record.clone())).collect();
        for event in state.ring.iter().rev().take_while(|event| event.record.revision > revision) {
            let key = &event.record.key;
            if key.starts_with(prefix) && key.as_ref() >= from {
                match &event.previous {
                    Some(previous) => past.insert(key.clone(), previous.clone()),
                    None => past.remove(key),
                };
            }
        }
        Ok(Snapshot { records: past.into_values().map(|record| record.upgrade()).collect(), revision })
    }

    /// A cursor over changes under `prefix` after `from`.
    pub fn watch(self: &Arc<Self>, prefix: &str, from: u64) -> Result<Watch, StoreError> {
        let newest = self.newest.subscribe();
        let state = self.read();
        if from > state.revision {
            return Err(StoreError::Future { asked: from, current: state.revision });
        }
        if from < state.compacted {
            return Err(StoreError::Compacted { asked: from, oldest: state.compacted });
        }
        let resets = state.resets;
        drop(state);
        Ok(Watch { cache: self.clone(), prefix: prefix.to_string(), cursor: from, resets, newest })
    }

    /// The next changes, about [`BATCH_BYTES`] of them, and the revision up to which they are complete.
    fn since(&self, prefix: &str, from: u64, resets: u64) -> Result<(Vec<Arc<StoreEvent>>, u64), StoreError> {
        let state = self.read();
        if from < state.compacted || resets != state.resets {
            return Err(StoreError::Compacted { asked: from, oldest: state.compacted });
        }
        let first = state.ring.partition_point(|event| event.record.revision <= from);
        let (mut events, mut bytes, mut last) = (Vec::new(), 0, from);
        for event in state.ring.range(first..).filter(|event| event.record.key.starts_with(prefix)) {
            // Changes of one revision stay together.
            if bytes >= BATCH_BYTES && event.record.revision > last {
                return Ok((events, last));
            }
            events.push(event.upgrade());
            (bytes, last) = (bytes + event.record.value.len(), event.record.revision);
        }
        Ok((events, state.revision))
    }
}

/// A cursor into the event ring.
#[derive(Debug)]
pub struct Watch {
    cache: Arc<Cache>,
    prefix: String,
    cursor: u64,
    resets: u64,
    newest: watch::Receiver<u64>,
}

impl Watch {
    /// Waits for changes and returns them in order. Cancel-safe: nothing is lost when the future is dropped.
    pub async fn next(&mut self) -> Result<Vec<Arc<StoreEvent>>, StoreError> {
        loop {
            self.newest.borrow_and_update();
            let (events, revision) = self.cache.since(&self.prefix, self.cursor, self.resets)?;
            self.cursor = revision;
            if !events.is_empty() {
                return Ok(events);
            }
            if self.newest.changed().await.is_err() {
                return Err(StoreError::Closed);
            }
        }
    }

    /// The revision up to which every change has been returned.
    pub fn revision(&self) -> u64 {
        self.cursor
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn record(key: &str, revision: u64) -> Arc<StoredObject> {
        Arc::new(StoredObject::new(key.into(), revision, revision, Bytes::from_static(b"{}")))
    }

    fn put(cache: &Cache, key: &str, revision: u64) {
        let previous = cache.get(key);
        let kind = if previous.is_some() { EventKind::Updated } else { EventKind::Created };
        cache.publish(vec![StoreEvent { kind, record: record(key, revision), previous }], revision);
    }

    #[tokio::test]
    async fn watch_returns_changes_after_its_revision_under_its_prefix() {
        let cache = Arc::new(Cache::new([], 10, 100));
        put(&cache, "/a/1", 11);
        put(&cache, "/b/1", 12);
        put(&cache, "/a/1", 13);
        let mut watch = cache.watch("/a/", 11).unwrap();
        let events = watch.next().await.unwrap();
        assert_eq!(events.iter().map(|event| event.record.revision).collect::<Vec<_>>(), [13]);
        assert_eq!(watch.revision(), 13);
    }

    #[tokio::test]
    async fn lagging_watcher_receives_every_event_in_batches() {
        let cache = Arc::new(Cache::new([], 0, 100));
        for revision in 1..=9 {
            let value = Bytes::from(vec![b' '; BATCH_BYTES / 4]);
            let record = Arc::new(StoredObject::new("/a/1".into(), 1, revision, value));
            cache.publish(vec![StoreEvent { kind: EventKind::Updated, record, previous: None }], revision);
        }
        put(&cache, "/b/1", 10);
        let mut watch = cache.watch("/a/", 0).unwrap();
        for (expected, revision) in [(vec![1, 2, 3, 4], 4), (vec![5, 6, 7, 8], 8), (vec![9], 10)] {
            let events = watch.next().await.unwrap();
            assert_eq!(events.iter().map(|event| event.record.revision).collect::<Vec<_>>(), expected);
            assert_eq!(watch.revision(), revision);
        }
    }

    #[test]
    fn past_revisions_are_readable_until_evicted_from_the_ring() {
        let cache = Arc::new(Cache::new([], 0, 3));
        for revision in 1..=3 {
            put(&cache, &format!("/a/{revision}"), revision);
        }
        let past = cache.range("/a/", None, Some(2)).unwrap();
        assert_eq!(past.records.len(), 2);
        put(&cache, "/a/4", 4);
        put(&cache, "/a/5", 5);
        assert!(matches!(
            cache.range("/a/", None, Some(1)),
            Err(StoreError::Compacted { asked: 1, oldest: 2 })
        ));
        assert!(matches!(cache.watch("/a/", 1), Err(StoreError::Compacted { .. })));
        assert!(matches!(cache.watch("/a/", 6), Err(StoreError::Future { .. })));
        assert_eq!(cache.range("/a/", Some("/a/3"), None).unwrap().records.len(), 3);
    }

    #[test]
    fn readers_share_a_record_and_decoded_data_is_released() {
        let cache = Arc::new(Cache::new([], 0, 100));
        let written = record("/a/1", 1);
        let decoded = Arc::downgrade(written.object());
        cache.publish(
            vec![StoreEvent { kind: EventKind::Created, record: written.clone(), previous: None }],
            1,
        );
        let listed = cache.range("/a/", None, None).unwrap().records.remove(0);
        let (events, _) = cache.since("/a/", 0, 0).unwrap();
        for other in [&cache.get("/a/1").unwrap(), &listed, &events[0].record] {
            assert!(Arc::ptr_eq(other, &written));
        }
        drop((written, listed, events));
        assert!(decoded.upgrade().is_none(), "the cache alone keeps bytes");
        assert_eq!(cache.get("/a/1").unwrap().object()["metadata"]["resourceVersion"], "1");
    }

    #[tokio::test]
    async fn a_reset_ends_every_watch_even_when_the_revision_went_back() {
        for revision in [5, 20] {
            let cache = Arc::new(Cache::new([], 10, 100));
            let mut watch = cache.watch("/a/", 10).unwrap();
            cache.reset([StoredObject::new("/a/1".into(), 4, 4, Bytes::from_static(b"{}"))], revision);
            assert!(matches!(watch.next().await, Err(StoreError::Compacted { .. })), "{revision}");
            assert_eq!(
                (cache.revision(), cache.range("/a/", None, None).unwrap().records.len()),
                (revision, 1)
            );
            put(&cache, "/a/1", revision + 1);
            let mut fresh = cache.watch("/a/", revision).unwrap();
            assert_eq!(fresh.next().await.unwrap().len(), 1);
        }
    }
}
