//! `watch`: a stream of changes from a revision on, optionally preceded by the current state. Objects are
//! encoded once and their bytes shared by all watchers; a watcher has no queue, only a cursor into the
//! store's history.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures::stream;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use rand::Rng;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::list;
use crate::call::Call;
use crate::flow_control::unsent_bytes::{UnsentBudget, UnsentPermit};
use crate::object;
use crate::output::{self, Body, Shape};
use crate::selector::Selector;
use crate::state::ServerState;
use crate::status::{ApiError, Result};
use crate::store::{EventKind, StoreError, StoreEvent, StoredObject, Watch};

/// Maximum timeout of a watch, far beyond what clients ask for and within what a clock can add.
const MAX_TIMEOUT: Duration = Duration::from_secs(7 * 24 * 3600);

/// Interval of bookmarks, which keep the revision of an idle watcher recent; Kubernetes sends one per minute.
const BOOKMARK: Duration = Duration::from_secs(60);
/// Watches without a timeout end after 30 to 60 minutes, so that clients spread over restarted servers.
const MIN_DEFAULT_TIMEOUT: Duration = Duration::from_secs(1800);
/// Size in bytes at which a batch of events is passed to the connection.
const CHUNK_BYTES: usize = 64 * 1024;
/// Time for the user's other watches to be read, before one that waits for them ends.
const UNSENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Handles a watch.
pub async fn handle(api: &Arc<ServerState>, call: Call) -> Result<Response<Body>> {
    let shape = call.shape()?;
    let query = &call.query;
    let mut fields = query.field_selector.clone();
    if !call.name.is_empty() {
        let separator = if fields.is_empty() { "" } else { "," };
        fields = format!("{fields}{separator}metadata.name={}", call.name);
    }
    let selector = Selector::parse(&query.label_selector, &fields, &call.resource)?;
    let revision = query.revision()?;
    let mut expired = None;
    if let Some(revision) = revision
        && !list::has_reached(&*api.store, revision).await?
    {
        // 410 and not the 504 of a list: a client that watches keeps its version on any other refusal, and
        // would wait until another history reaches it, and then miss what lies between.
        let error = StoreError::Future { asked: revision, current: api.store.revision() };
        expired = Some(ApiError::expired(format!("{error}; the store was restored or went back: list anew")));
    }
    let prefix = call.resource.prefix_of(&call.namespace);
    // Without a revision, and for streaming lists, the current state comes first.
    let initial = match query.initial_events {
        Some(requested) => requested,
        None => revision.is_none(),
    };
    let mut pending: VecDeque<PendingEvent> = VecDeque::new();
    let from = if initial {
        let snapshot = api.store.range(&prefix, None, None).map_err(list::storage_error)?;
        pending.extend(snapshot.records.into_iter().map(PendingEvent::Current));
        snapshot.revision
    } else {
        revision.unwrap_or_else(|| api.store.revision())
    };
    let watch = match api.store.watch(&prefix, from) {
        _ if expired.is_some() => None,
        Ok(watch) => Some(watch),
        Err(error @ StoreError::Compacted { .. }) => {
            expired = Some(ApiError::expired(error.to_string()));
            None
        }
        Err(error) => return Err(list::storage_error(error)),
    };
    let limit = match query.timeout_seconds {
        Some(seconds) if seconds > 0 => Duration::from_secs(seconds).min(MAX_TIMEOUT),
        _ => MIN_DEFAULT_TIMEOUT.mul_f64(rand::rng().random_range(1.0..2.0)),
    };
    let announce = query.initial_events == Some(true) && query.bookmarks;
    let feed = WatchFeed {
        unsent: api.flow.unsent.of(call.user.flow()),
        call,
        shape,
        selector,
        pending,
        announce: announce.then_some(from),
        watch,
        expired,
        headings: true,
        deadline: Instant::now() + limit,
        bookmark_at: Instant::now() + BOOKMARK,
        stopping: api.stopping.clone(),
        _open: api.metrics.open_watch(),
    };
    let stream = stream::unfold(Some(feed), |feed| async move {
        let mut feed = feed?;
        let chunk = feed.next().await?;
        let ended = feed.watch.is_none() && feed.expired.is_none();
        Some((Ok(Frame::data(chunk)), (!ended).then_some(feed)))
    });
    let mut response = Response::new(StreamBody::new(stream).boxed_unsync());
    *response.status_mut() = StatusCode::OK;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

/// What a watch will send.
enum PendingEvent {
    /// An object of the current state.
    Current(Arc<StoredObject>),
    /// A change.
    Change(Arc<StoreEvent>),
}

impl PendingEvent {
    fn bytes(&self) -> usize {
        match self {
            Self::Current(record) => record.value.len(),
            Self::Change(event) => {
                let before = event.previous.as_ref().map_or(0, |previous| previous.value.len());
                event.record.value.len().max(before)
            }
        }
    }
}

struct WatchFeed {
    call: Call,
    shape: Shape,
    selector: Selector,
    /// What was not encoded yet.
    pending: VecDeque<PendingEvent>,
    unsent: UnsentBudget,
    /// The revision of the bookmark that ends the current state.
    announce: Option<u64>,
    watch: Option<Watch>,
    expired: Option<ApiError>,
    headings: bool,
    deadline: Instant,
    bookmark_at: Instant,
    stopping: tokio::sync::watch::Receiver<bool>,
    _open: crate::metrics::OpenWatch,
}

impl WatchFeed {
    /// The next bytes; `None` ends the stream.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(error) = self.expired.take() {
                return Some(Bytes::from(format!(
                    "{}\n",
                    json!({"type": "ERROR", "object": error.to_value()})
                )));
            }
            if let Some(first) = self.pending.front().map(PendingEvent::bytes) {
                // Before anything is encoded: a client that does not read holds no more than its user may.
                let unsent = self.reserve(first.max(CHUNK_BYTES)).await?;
                let chunk = self.encode_pending();
                if !chunk.is_empty() {
                    return Some(unsent.keep_with(chunk));
                }
                continue;
            }
            let mut chunk = BytesMut::new();
            if let Some(revision) = self.announce.take() {
                self.bookmark(&mut chunk, revision, true);
            }
            if !chunk.is_empty() {
                return Some(chunk.freeze());
            }
            let watch = self.watch.as_mut()?;
            let bookmarks = self.call.query.bookmarks;
            tokio::select! {
                events = watch.next() => match events {
                    Ok(events) => self.pending.extend(events.into_iter().map(PendingEvent::Change)),
                    Err(StoreError::Closed) => return None,
                    Err(error) => {
                        self.watch = None;
                        self.expired = Some(ApiError::expired(error.to_string()));
                    }
                },
                () = tokio::time::sleep_until(self.bookmark_at), if bookmarks => {
                    self.bookmark_at = Instant::now() + BOOKMARK;
                    let revision = watch.revision();
                    self.bookmark(&mut chunk, revision, false);
                    return Some(chunk.freeze());
                }
                () = tokio::time::sleep_until(self.deadline) => return None,
                () = crate::state::stopped(self.stopping.clone()) => return None,
            }
        }
    }

    /// Room for bytes to send; `None` if the watch ends before there is some.
    async fn reserve(&self, bytes: usize) -> Option<UnsentPermit> {
        tokio::select! {
            permit = self.unsent.reserve(bytes) => permit,
            // Its client watches again from its last version.
            () = tokio::time::sleep(UNSENT_TIMEOUT) => None,
            () = tokio::time::sleep_until(self.deadline) => None,
            () = crate::state::stopped(self.stopping.clone()) => None,
        }
    }

    /// Encodes as much as a chunk takes; an object that is larger by itself.
    fn encode_pending(&mut self) -> BytesMut {
        let mut chunk = BytesMut::new();
        while let Some(bytes) = self.pending.front().map(PendingEvent::bytes) {
            if !chunk.is_empty() && chunk.len() + bytes > CHUNK_BYTES {
                break;
            }
            match self.pending.pop_front() {
                Some(PendingEvent::Current(record)) => self.append(&mut chunk, "ADDED", &record),
                Some(PendingEvent::Change(event)) => self.event(&mut chunk, &event),
                None => {}
            }
        }
        chunk
    }

    /// Maps a change in the store to an event of this watcher's selection.
    fn event(&mut self, chunk: &mut BytesMut, event: &StoreEvent) {
        if self.selector.is_empty() {
            let kind = match event.kind {
                EventKind::Created => "ADDED",
                EventKind::Updated => "MODIFIED",
                EventKind::Deleted => "DELETED",
            };
            return self.append(chunk, kind, &event.record);
        }
        let matches = |record: &Arc<StoredObject>| self.selector.matches(&self.call.resource.view(record));
        let before = event.previous.as_ref().is_some_and(matches);
        let after = event.kind != EventKind::Deleted && matches(&event.record);
        match (before, after) {
            (false, false) => {}
            (false, true) => self.append(chunk, "ADDED", &event.record),
            (true, true) => self.append(chunk, "MODIFIED", &event.record),
            (true, false) if event.kind == EventKind::Deleted => self.append(chunk, "DELETED", &event.record),
            (true, false) => {
                // The object left the selection: send its last selected state, at the revision at which it
                // left.
                let previous = event.previous.as_ref().map_or(&event.record, |previous| previous);
                let record = StoredObject::new(
                    previous.key.clone(),
                    previous.create_revision,
                    event.record.revision,
                    previous.value.clone(),
                );
                self.append(chunk, "DELETED", &Arc::new(record));
            }
        }
    }

    fn append(&mut self, chunk: &mut BytesMut, kind: &str, record: &Arc<StoredObject>) {
        let resource = &self.call.resource;
        let plain = self.shape == Shape::Object && resource.serves_as_stored(record);
        if kind == "ADDED" && !self.selector.is_empty() && !self.selector.matches(&resource.view(record)) {
            return;
        }
        let json = if plain {
            record.json().clone()
        } else {
            let view = resource.view(record);
            let include = &self.call.query.include_object;
            let shown = output::to_shape(resource, &view, self.shape, include, self.headings);
            self.headings = false;
            Bytes::from(shown.to_string())
        };
        const ENVELOPE: [&[u8]; 3] = [b"{\"type\":\"", b"\",\"object\":", b"}\n"];
        let [before, between, after] = ENVELOPE;
        // At once: a buffer that grows by itself doubles, and a watch of large objects held twice what counts.
        chunk.reserve(before.len() + kind.len() + between.len() + json.len() + after.len());
        for part in [before, kind.as_bytes(), between, &json, after] {
            chunk.put_slice(part);
        }
    }

    fn bookmark(&mut self, chunk: &mut BytesMut, revision: u64, initial_end: bool) {
        let mut bookmark = json!({
            "kind": self.call.resource.kind,
            "apiVersion": self.call.resource.api_version(),
            "metadata": {"resourceVersion": revision.to_string(), "creationTimestamp": Value::Null},
        });
        if initial_end {
            object::set_meta(&mut bookmark, "annotations", json!({"k8s.io/initial-events-end": "true"}));
        }
        let shown = match self.shape {
            Shape::Object => bookmark,
            Shape::Metadata => output::metadata_only(&bookmark),
            Shape::Table => json!({
                "kind": "Table", "apiVersion": "meta.k8s.io/v1", "columnDefinitions": [], "rows": [],
                "metadata": bookmark["metadata"],
            }),
        };
        chunk.put_slice(format!("{}\n", json!({"type": "BOOKMARK", "object": shown})).as_bytes());
    }
}
