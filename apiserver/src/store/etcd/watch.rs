//! Feeds the cache from etcd: a full read, then a watch from its revision. An interrupted watch resumes at
//! its last revision on the next member. If its history was compacted, everything is read again,
//! and the cache's own watchers must relist, too.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{EventType, GetOptions, WatchOptions, WatchResponse};

use super::members::{EtcdFailure, Members};
use super::{EtcdShared, record};
use crate::store::StoredObject;
use crate::store::cache::{EventKind, StoreEvent};

/// How long a reader waits for events before it requests a progress notification of the watch.
pub(super) const PROGRESS_DELAY: Duration = Duration::from_millis(50);
/// Keys per page: half a MiB at 1 KiB per object.
const PAGE_KEYS: i64 = 500;
/// A watch that lasted this long counts as established.
const STABLE_AFTER: Duration = Duration::from_secs(10);
/// Time between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Watches until the store is dropped.
pub(super) async fn run(shared: Arc<EtcdShared>) {
    // An outage is logged once; the next successful request to etcd logs its end.
    let mut logged = false;
    loop {
        let started = tokio::time::Instant::now();
        let ended = follow(&shared).await;
        logged &= started.elapsed() < STABLE_AFTER;
        match ended {
            WatchEnd::MemberChanged => {}
            WatchEnd::Compacted => {
                match load(&shared.members, &shared.prefix).await {
                    Ok((records, revision)) => {
                        tracing::warn!(revision, "etcd's history was compacted; watchers list again");
                        shared.cache.reset(records, revision);
                    }
                    Err(failure) => tracing::warn!(?failure, "etcd cannot be read; this is retried"),
                }
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
            WatchEnd::Broken { at, why } => {
                if std::mem::replace(&mut logged, true) {
                    tracing::debug!(why, "the watch of etcd cannot be opened");
                } else {
                    tracing::warn!(why, "the watch of etcd broke; it is opened again");
                }
                shared.members.fail_over(at);
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
        }
    }
}

/// Why a watch ended.
enum WatchEnd {
    /// The store failed over to another member.
    MemberChanged,
    /// The next revision is no longer in etcd's history.
    Compacted,
    /// The member or its connection failed.
    Broken { at: usize, why: String },
}

async fn follow(shared: &EtcdShared) -> WatchEnd {
    let mut current = shared.members.current();
    let at = *current.borrow_and_update();
    let broken = |why: String| WatchEnd::Broken { at, why };
    let Some(mut client) = shared.members.watcher(at) else { return broken("no such member".into()) };
    let from = shared.cache.revision();
    // An etcd restored from a backup is behind the revisions read from it before.
    match shared.revision().await {
        Ok(revision) if revision < from => return WatchEnd::Compacted,
        Ok(_) => {}
        Err(error) => return broken(error.to_string()),
    }
    let start = i64::try_from(from + 1).unwrap_or(i64::MAX);
    let options = WatchOptions::new().with_prefix().with_start_revision(start).with_progress_notify();
    let opening = client.watch(format!("{}/", shared.prefix), Some(options));
    let mut stream = tokio::select! {
        opened = opening => match opened {
            Ok(stream) => stream,
            Err(error) => return broken(super::members::error_text(&error)),
        },
        _ = current.changed() => return WatchEnd::MemberChanged,
    };
    loop {
        tokio::select! {
            message = stream.message() => match message {
                Ok(Some(response)) if response.canceled() => {
                    return if response.compact_revision() > 0 {
                        WatchEnd::Compacted
                    } else {
                        broken(response.cancel_reason().to_string())
                    };
                }
                Ok(Some(response)) => apply_response(shared, &response),
                Ok(None) => return broken("etcd closed the watch".into()),
                Err(error) => return broken(super::members::error_text(&error)),
            },
            () = shared.progress.notified() => {
                if let Err(error) = stream.request_progress().await {
                    return broken(super::members::error_text(&error));
                }
            }
            _ = current.changed() => return WatchEnd::MemberChanged,
        }
    }
}

/// Publishes the changes or the progress in a response.
fn apply_response(shared: &EtcdShared, response: &WatchResponse) {
    let mut events: Vec<StoreEvent> = Vec::new();
    for event in response.events() {
        let Some(written) = event.kv().and_then(|kv| record(&shared.prefix, kv)) else { continue };
        // One response may change a key more than once.
        let earlier = events.iter().rev().find(|event| event.record.key == written.key);
        let previous = match earlier {
            Some(StoreEvent { kind: EventKind::Deleted, .. }) => None,
            Some(event) => Some(event.record.clone()),
            None => shared.cache.get(&written.key),
        };
        let (kind, record) = match (event.event_type(), &previous) {
            (EventType::Put, None) => (EventKind::Created, written),
            (EventType::Put, Some(previous)) => {
                let key = previous.key.clone();
                (
                    EventKind::Updated,
                    StoredObject::new(key, written.create_revision, written.revision, written.value),
                )
            }
            (EventType::Delete, Some(previous)) => {
                let last = StoredObject::new(
                    previous.key.clone(),
                    previous.create_revision,
                    written.revision,
                    previous.value.clone(),
                );
                (EventKind::Deleted, last)
            }
            // A deletion whose creation no watcher saw is skipped.
            (EventType::Delete, None) => continue,
        };
        events.push(StoreEvent { kind, record: Arc::new(record), previous });
    }
    let last = response.events().iter().filter_map(|event| event.kv()).map(|kv| kv.mod_revision()).max();
    // A response without events, except the one that opens the watch, reports progress up to the revision of
    // its header. With events the header may be further than they are.
    let progress = match last {
        Some(revision) => Some(revision),
        None if response.created() => None,
        None => response.header().map(|header| header.revision()),
    };
    if let Some(revision) = progress {
        shared.cache.publish(events, revision.unsigned_abs());
    }
}

/// All objects under the prefix, at one revision.
pub(super) async fn load(members: &Members, prefix: &str) -> Result<(Vec<StoredObject>, u64), EtcdFailure> {
    let end = format!("{prefix}0"); // the character after the slash
    let mut start = format!("{prefix}/");
    let mut revision = 0;
    let mut records = Vec::new();
    loop {
        let options = GetOptions::new().with_range(end.clone()).with_limit(PAGE_KEYS).with_revision(revision);
        let answer = members
            .request(|mut kv| {
                let (start, options) = (start.clone(), options.clone());
                async move { kv.get(start, Some(options)).await }
            })
            .await?;
        let page = answer.value;
        if revision == 0 {
            revision = page.header().map_or(0, |header| header.revision());
        }
        records.extend(page.kvs().iter().filter_map(|kv| record(prefix, kv)));
        match page.kvs().last() {
            Some(last) if page.more() => start = format!("{}\0", String::from_utf8_lossy(last.key())),
            _ => return Ok((records, revision.unsigned_abs())),
        }
    }
}
