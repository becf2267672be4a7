//! Responses that run without a client: how many there may be, their newest events, and how they are cancelled. Their older
//! events are in the store, so each needs little memory however long it is. Not here: what the events say, which is the
//! dialect's.
//!
//! ```text
//! begin ─▶ append ─▶ … ─▶ append ─▶ end          the newest events ──┐
//!            └─ 64 KiB ─▶ store: a chunk of events ──────────────────┴─▶ followers, from any number on
//! ```

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::response_store::{EventChunk, ResponseStore, ResponseStoreError};

/// Running responses of one owner: more than a person starts by hand.
const MAX_PER_OWNER: usize = 64;
/// Running responses of all owners.
const MAX_RUNNING: usize = 512;
/// Events that are kept in memory before they go to the store.
const MAX_TAIL_BYTES: usize = 64 << 10;

/// The responses that run.
#[derive(Default)]
pub(crate) struct BackgroundResponses {
    by_id: watch::Sender<HashMap<String, Arc<RunningResponse>>>,
}

/// A response that runs.
pub(crate) struct RunningResponse {
    owner: String,
    cancelled: CancellationToken,
    tail: watch::Sender<Tail>,
}

/// The newest events of a response.
#[derive(Default)]
struct Tail {
    /// Whether an engine generates it.
    is_generating: bool,
    has_ended: bool,
    /// Those that the store does not have yet.
    chunk: EventChunk,
}

/// Where the events of a running response from some number on are.
pub(crate) enum NextEvents {
    /// Here.
    Newest(EventChunk),
    /// In the store.
    Stored,
    /// There are no more.
    Ended,
}

impl BackgroundResponses {
    /// Begins a response; the number of running ones where that is too many.
    pub(crate) fn begin(
        self: &Arc<Self>,
        store: Arc<ResponseStore>,
        owner: &str,
        id: &str,
    ) -> Result<EventLog, usize> {
        let running = Arc::new(RunningResponse {
            owner: owner.to_owned(),
            cancelled: CancellationToken::new(),
            tail: watch::Sender::default(),
        });
        let mut too_many = None;
        self.by_id.send_if_modified(|by_id| {
            let owned = by_id.values().filter(|one| one.owner == owner).count();
            too_many = (owned >= MAX_PER_OWNER || by_id.len() >= MAX_RUNNING).then_some(owned);
            if too_many.is_none() {
                by_id.insert(id.to_owned(), running.clone());
            }
            too_many.is_none()
        });
        match too_many {
            Some(owned) => Err(owned),
            None => Ok(EventLog { responses: self.clone(), store, id: id.to_owned(), running }),
        }
    }

    /// A running response of this owner.
    pub(crate) fn get(&self, owner: &str, id: &str) -> Option<Arc<RunningResponse>> {
        self.by_id.borrow().get(id).filter(|running| running.owner == owner).cloned()
    }

    /// Waits until a response runs.
    pub(crate) async fn begun(&self, id: &str) {
        // The sender is here, so it is not gone.
        let _ = self.by_id.subscribe().wait_for(|by_id| by_id.contains_key(id)).await;
    }

    /// Waits until none runs.
    pub(crate) async fn idle(&self) {
        // The sender is here, so it is not gone.
        let _ = self.by_id.subscribe().wait_for(HashMap::is_empty).await;
    }
}

impl RunningResponse {
    /// Whether an engine generates it.
    pub(crate) fn is_generating(&self) -> bool {
        self.tail.borrow().is_generating
    }

    /// An engine generates it.
    pub(crate) fn generating(&self) {
        self.tail.send_if_modified(|tail| !std::mem::replace(&mut tail.is_generating, true));
    }

    /// Ends it early; returns once it has ended.
    pub(crate) async fn cancel(&self) {
        self.cancelled.cancel();
        let _ = self.tail.subscribe().wait_for(|tail| tail.has_ended).await;
    }

    /// Where the events numbered `from` and later are, once there are any.
    pub(crate) async fn events(&self, from: u64) -> NextEvents {
        let mut tail = self.tail.subscribe();
        let there = tail.wait_for(|tail| tail.has_ended || tail.chunk.next > from).await;
        match there {
            Ok(tail) if tail.chunk.first > from => NextEvents::Stored,
            Ok(tail) if tail.chunk.next > from => {
                let text = tail.chunk.from(from).to_vec();
                NextEvents::Newest(EventChunk { first: from, next: tail.chunk.next, text })
            }
            _ => NextEvents::Ended,
        }
    }
}

/// Takes the events of a running response, which ends when this is dropped.
pub(crate) struct EventLog {
    responses: Arc<BackgroundResponses>,
    store: Arc<ResponseStore>,
    id: String,
    running: Arc<RunningResponse>,
}

impl EventLog {
    /// The response.
    pub(crate) fn running(&self) -> Arc<RunningResponse> {
        self.running.clone()
    }

    /// Cancelled when the response is to end early.
    pub(crate) fn cancelled(&self) -> CancellationToken {
        self.running.cancelled.clone()
    }

    /// Adds the text of whole events, each of which ends with an empty line.
    pub(crate) async fn append(&self, events: &[u8]) -> Result<(), ResponseStoreError> {
        if events.is_empty() {
            return Ok(());
        }
        self.running.tail.send_modify(|tail| {
            tail.chunk.text.extend_from_slice(events);
            tail.chunk.next += count_events(events);
        });
        if self.running.tail.borrow().chunk.text.len() < MAX_TAIL_BYTES { Ok(()) } else { self.flush().await }
    }

    /// No more events come: the store gets the rest.
    pub(crate) async fn end(self) -> Result<(), ResponseStoreError> {
        self.flush().await
    }

    /// Moves the newest events to the store.
    async fn flush(&self) -> Result<(), ResponseStoreError> {
        let chunk = self.running.tail.borrow().chunk.clone();
        if !chunk.text.is_empty() {
            self.store.append_events(&self.id, chunk.clone()).await?;
            // Followers of what was here find it there.
            self.running.tail.send_modify(|tail| {
                tail.chunk = EventChunk { first: chunk.next, next: chunk.next, text: Vec::new() };
            });
        }
        Ok(())
    }
}

impl Drop for EventLog {
    fn drop(&mut self) {
        self.responses.by_id.send_modify(|by_id| {
            by_id.remove(&self.id);
        });
        self.running.tail.send_modify(|tail| tail.has_ended = true);
    }
}

/// Events in this text. JSON has no line breaks, so an empty line ends an event.
fn count_events(text: &[u8]) -> u64 {
    text.windows(2).filter(|two| two == b"\n\n").count() as u64
}

impl EventChunk {
    /// The text of its events numbered `from` and later.
    pub(crate) fn from(&self, from: u64) -> &[u8] {
        let mut rest = self.text.as_slice();
        for _ in self.first..from.min(self.next) {
            let end = rest.windows(2).position(|two| two == b"\n\n").map_or(rest.len(), |end| end + 2);
            rest = &rest[end..];
        }
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::response_store::{NewRow, ResponseStoreConfig};

    async fn store(ids: &[&str]) -> (tempfile::TempDir, Arc<ResponseStore>) {
        let folder = tempfile::tempdir().unwrap();
        let config = ResponseStoreConfig::new(folder.path().join("responses.db"));
        let store = Arc::new(ResponseStore::open(&config).unwrap());
        for id in ids {
            let row = NewRow {
                id: (*id).into(),
                owner: "o".into(),
                created: 2_000_000_000,
                parent: None,
                finished: false,
                body: Default::default(),
                input: Default::default(),
                replay: None,
            };
            store.insert(row).await.unwrap();
        }
        (folder, store)
    }

    fn text(number: u64) -> String {
        format!("event: e\ndata: {number} {}\n\n", "x".repeat(1000))
    }

    /// The events from this number on, wherever they are.
    async fn follow(running: &RunningResponse, store: &ResponseStore, mut from: u64) -> String {
        let mut all = Vec::new();
        loop {
            let chunk = match running.events(from).await {
                NextEvents::Newest(chunk) => chunk,
                NextEvents::Stored => store.events("o", "1", from).unwrap().unwrap(),
                NextEvents::Ended => return String::from_utf8(all).unwrap(),
            };
            all.extend_from_slice(chunk.from(from));
            from = chunk.next;
        }
    }

    #[tokio::test]
    async fn followers_get_every_event_from_any_number_on() {
        let (_folder, store) = store(&["1"]).await;
        let responses = Arc::new(BackgroundResponses::default());
        let log = responses.begin(store.clone(), "o", "1").unwrap_or_else(|_| panic!());
        let running = responses.get("o", "1").unwrap();
        assert!(responses.get("other", "1").is_none());
        let follower = {
            let (running, store) = (running.clone(), store.clone());
            tokio::spawn(async move { follow(&running, &store, 0).await })
        };
        for number in 0..300 {
            log.append(text(number).as_bytes()).await.unwrap();
            let bytes = running.tail.borrow().chunk.text.len();
            assert!(bytes < MAX_TAIL_BYTES, "{bytes} bytes are in memory");
        }
        log.end().await.unwrap();
        responses.idle().await;
        let all = |from: u64| (from..300).map(text).collect::<String>();
        assert_eq!(follower.await.unwrap(), all(0));
        for from in [0, 1, 62, 63, 64, 65, 200, 299, 300, 301, u64::MAX] {
            assert_eq!(follow(&running, &store, from).await, all(from), "{from}");
        }
    }

    #[tokio::test]
    async fn an_owner_runs_a_bounded_number() {
        let (_folder, store) = store(&[]).await;
        let responses = Arc::new(BackgroundResponses::default());
        let begin = |owner: &str, id: usize| responses.begin(store.clone(), owner, &id.to_string());
        let mut logs: Vec<EventLog> = (0..MAX_PER_OWNER).map(|id| begin("a", id).ok().unwrap()).collect();
        assert_eq!(begin("a", 1000).err(), Some(MAX_PER_OWNER));
        logs.push(begin("b", 1000).ok().unwrap());
        logs.remove(0);
        assert!(begin("a", 1001).is_ok());
    }
}
