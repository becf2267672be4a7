//! Garbage collector: owner references. Every object's uid and every reference is indexed from the store's
//! events, which arrive in order, so an owner is always known before its dependents. The action for one
//! object is the pure [`decide`].

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::edit::{edit, release, remove};
use crate::object;
use crate::state::ServerState;
use crate::store::{EventKind, StoredObject};
use crate::verbs::delete::{FOREGROUND, ORPHAN};

/// The prefix this collector watches: all objects.
const WATCH_PREFIX: &str = "/registry/";

/// An object that others may refer to.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KnownObject {
    key: Arc<str>,
    namespace: String,
    /// Foreground deletion: it waits for its dependents.
    foreground: bool,
}

#[derive(Default)]
struct OwnerIndex {
    objects: HashMap<String, KnownObject>,
    /// Owner's uid to keys of dependents.
    dependents: HashMap<String, BTreeSet<Arc<str>>>,
    /// Key to the uids of its owners.
    owners: HashMap<Arc<str>, Vec<String>>,
}

impl OwnerIndex {
    fn remove_owners(&mut self, key: &Arc<str>) {
        for uid in self.owners.remove(key).unwrap_or_default() {
            if let Some(keys) = self.dependents.get_mut(&uid) {
                keys.remove(key);
                if keys.is_empty() {
                    self.dependents.remove(&uid);
                }
            }
        }
    }

    /// Indexes a written object; returns the keys to reconcile.
    fn on_written(&mut self, record: &StoredObject) -> Vec<Arc<str>> {
        let object = record.object();
        let uid = object::uid(object).to_string();
        if uid.is_empty() {
            return Vec::new();
        }
        let waiting = object::is_terminating(object);
        let finalizers = object::finalizers(object);
        let foreground = waiting && finalizers.contains(&FOREGROUND);
        let orphan = waiting && finalizers.contains(&ORPHAN);
        let known =
            KnownObject { key: record.key.clone(), namespace: object::namespace(object).into(), foreground };
        self.objects.insert(uid.clone(), known);
        self.remove_owners(&record.key);
        let owners: Vec<String> = object::owners(object)
            .iter()
            .filter_map(|owner| owner["uid"].as_str())
            .map(str::to_string)
            .collect();
        let mut look = Vec::new();
        if !owners.is_empty() {
            for owner in &owners {
                self.dependents.entry(owner.clone()).or_default().insert(record.key.clone());
            }
            // An owner that waits for its dependents may have lost or gained one.
            look.extend(
                owners
                    .iter()
                    .filter_map(|owner| self.objects.get(owner))
                    .filter(|owner| owner.foreground)
                    .map(|owner| owner.key.clone()),
            );
            self.owners.insert(record.key.clone(), owners);
            look.push(record.key.clone());
        }
        if foreground || orphan {
            look.push(record.key.clone());
            look.extend(self.dependents.get(&uid).into_iter().flatten().cloned());
        }
        look
    }

    /// Indexes a deleted object; returns the keys to reconcile.
    fn on_deleted(&mut self, record: &StoredObject) -> Vec<Arc<str>> {
        let uid = object::uid(record.object()).to_string();
        if self.objects.get(&uid).is_some_and(|known| known.key == record.key) {
            self.objects.remove(&uid);
        }
        let owners = self.owners.get(&record.key).cloned().unwrap_or_default();
        self.remove_owners(&record.key);
        let mut look: Vec<Arc<str>> = self.dependents.get(&uid).into_iter().flatten().cloned().collect();
        look.extend(owners.iter().filter_map(|owner| self.objects.get(owner)).map(|owner| owner.key.clone()));
        look
    }
}

/// The action for an object, by the state of its owners.
#[derive(Debug, PartialEq, Eq)]
enum OwnerDecision {
    Keep,
    /// Every owner is gone.
    Remove,
    /// Every remaining owner waits for this object to be deleted.
    RemoveInForeground,
    /// Some owners are gone and others remain: remove the references to the former.
    DropOwners(Vec<String>),
}

/// The state of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OwnerState {
    Absent,
    Present,
    Waiting,
}

fn decide(owners: &[(String, OwnerState)]) -> OwnerDecision {
    if owners.is_empty() {
        return OwnerDecision::Keep;
    }
    let any = |state| owners.iter().any(|(_, owner)| *owner == state);
    if any(OwnerState::Present) {
        let absent = owners.iter().filter(|(_, owner)| *owner == OwnerState::Absent);
        let absent: Vec<String> = absent.map(|(uid, _)| uid.clone()).collect();
        return if absent.is_empty() { OwnerDecision::Keep } else { OwnerDecision::DropOwners(absent) };
    }
    if any(OwnerState::Waiting) { OwnerDecision::RemoveInForeground } else { OwnerDecision::Remove }
}

/// Runs the collector.
pub async fn run(api: Arc<ServerState>) {
    loop {
        if let Err(error) = collect(&api).await {
            // The history was compacted, or storage failed: list everything again.
            tracing::debug!(error, "the owner index is rebuilt");
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn collect(api: &Arc<ServerState>) -> Result<(), String> {
    let snapshot = api.store.range(WATCH_PREFIX, None, None).map_err(|error| error.to_string())?;
    let mut watch = api.store.watch(WATCH_PREFIX, snapshot.revision).map_err(|error| error.to_string())?;
    let mut index = OwnerIndex::default();
    let mut look: BTreeSet<Arc<str>> = BTreeSet::new();
    for record in &snapshot.records {
        index.on_written(record);
    }
    look.extend(index.owners.keys().cloned());
    look.extend(index.objects.values().filter(|known| known.foreground).map(|known| known.key.clone()));
    let orphaning =
        snapshot.records.iter().filter(|record| object::finalizers(record.object()).contains(&ORPHAN));
    look.extend(orphaning.map(|record| record.key.clone()));
    loop {
        for key in std::mem::take(&mut look) {
            if let Err(error) = reconcile(api, &index, &key, watch.revision()).await {
                tracing::warn!(%error, key = key.as_ref(), "an object could not be garbage collected; this is retried");
                look.insert(key);
            }
        }
        let events = if look.is_empty() {
            watch.next().await
        } else {
            // A reconciliation failed: retry soon, including new events.
            match tokio::time::timeout(Duration::from_millis(500), watch.next()).await {
                Ok(events) => events,
                Err(_) => continue,
            }
        };
        for event in events.map_err(|error| error.to_string())? {
            look.extend(match event.kind {
                EventKind::Created | EventKind::Updated => index.on_written(&event.record),
                EventKind::Deleted => index.on_deleted(&event.record),
            });
        }
    }
}

async fn reconcile(
    api: &Arc<ServerState>,
    index: &OwnerIndex,
    key: &Arc<str>,
    seen: u64,
) -> crate::status::Result<()> {
    let Some(record) = api.store.get(key) else { return Ok(()) };
    if record.revision > seen {
        // Written after the last event seen: it may have an owner that is not indexed yet. Its event queues
        // it again.
        return Ok(());
    }
    let object = record.object();
    let namespace = object::namespace(object);
    let owners: Vec<(String, OwnerState)> = object::owners(object)
        .iter()
        .map(|owner| {
            let uid = owner["uid"].as_str().unwrap_or_default().to_string();
            let state = match index.objects.get(&uid) {
                // An owner in another namespace does not count.
                Some(known) if !known.namespace.is_empty() && known.namespace != namespace => {
                    OwnerState::Absent
                }
                Some(known) if known.foreground => OwnerState::Waiting,
                Some(_) => OwnerState::Present,
                None => OwnerState::Absent,
            };
            (uid, state)
        })
        .collect();
    if !object::is_terminating(object) {
        match decide(&owners) {
            OwnerDecision::Keep => {}
            OwnerDecision::Remove => remove(api, &record, "Background").await?,
            OwnerDecision::RemoveInForeground => {
                let has_dependents = index.dependents.contains_key(object::uid(object));
                remove(api, &record, if has_dependents { "Foreground" } else { "Background" }).await?;
            }
            OwnerDecision::DropOwners(uids) => drop_owners(api, key, &uids).await?,
        }
        return Ok(());
    }
    let uid = object::uid(object);
    let dependents: Vec<Arc<StoredObject>> =
        index.dependents.get(uid).into_iter().flatten().filter_map(|key| api.store.get(key)).collect();
    let finalizers = object::finalizers(object);
    if finalizers.contains(&ORPHAN) {
        for dependent in &dependents {
            drop_owners(api, &dependent.key, &[uid.to_string()]).await?;
        }
        release(api, key, ORPHAN).await?;
    } else if finalizers.contains(&FOREGROUND) {
        let blocks = |dependent: &Arc<StoredObject>| {
            object::owners(dependent.object())
                .iter()
                .any(|owner| owner["uid"] == *uid && owner["blockOwnerDeletion"] == true)
        };
        if !dependents.iter().any(blocks) {
            release(api, key, FOREGROUND).await?;
        }
    }
    Ok(())
}

/// Removes references to these owners.
async fn drop_owners(api: &ServerState, key: &str, uids: &[String]) -> crate::status::Result<()> {
    edit(api, key, |object| {
        let gone =
            |owner: &Value| owner["uid"].as_str().is_some_and(|uid| uids.iter().any(|gone| gone == uid));
        let owners = object::owners(object);
        let remaining: Vec<Value> = owners.iter().filter(|owner| !gone(owner)).cloned().collect();
        if remaining.len() == owners.len() {
            return false;
        }
        let remaining = if remaining.is_empty() { Value::Null } else { Value::Array(remaining) };
        object::set_meta(object, "ownerReferences", remaining);
        true
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_is_deleted_once_all_its_owners_are_gone() {
        let of = |states: &[OwnerState]| -> Vec<(String, OwnerState)> {
            states.iter().enumerate().map(|(index, state)| (index.to_string(), *state)).collect()
        };
        use OwnerState::{Absent, Present, Waiting};
        for (owners, verdict) in [
            (of(&[]), OwnerDecision::Keep),
            (of(&[Present]), OwnerDecision::Keep),
            (of(&[Absent]), OwnerDecision::Remove),
            (of(&[Absent, Present]), OwnerDecision::DropOwners(vec!["0".into()])),
            (of(&[Absent, Waiting]), OwnerDecision::RemoveInForeground),
            (of(&[Present, Waiting]), OwnerDecision::Keep),
        ] {
            assert_eq!(decide(&owners), verdict, "{owners:?}");
        }
    }
}
