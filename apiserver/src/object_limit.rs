//! How many objects one may create: what ResourceQuotas of a namespace allow, certificate signing requests of one
//! requester, Events of one user. Checked after admission, before the write. Not here: the size of one object, see
//! `schema/bounds.rs`.

pub mod event_rate;
pub mod quota;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use serde_json::Value;
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

use crate::call::Call;
use crate::flow_control::too_many;
use crate::kinds::builtin;
use crate::state::ServerState;
use crate::status::{ApiError, Result};
use event_rate::EventRate;

/// Stored certificate signing requests of one requester, decided ones too: a machine has one, and an automation a few for
/// each of its services. Each may be 1 MiB and lives for an hour after it was decided, else for a day.
const MAX_SIGNING_REQUESTS: usize = 100;

/// State that limits of objects need beside the store.
#[derive(Debug, Default)]
pub struct ObjectLimits {
    locks: KeyedLocks,
    events: EventRate,
}

/// Keeps other creations that count the same objects waiting, until the object is stored.
#[derive(Debug, Default)]
pub struct Reservation {
    _lock: Option<OwnedMutexGuard<()>>,
}

/// Locks by name.
#[derive(Debug, Default)]
struct KeyedLocks(Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>);

impl KeyedLocks {
    async fn lock(&self, key: String, deadline: Instant) -> Result<OwnedMutexGuard<()>> {
        let lock = {
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            locks.retain(|_, lock| lock.strong_count() > 0);
            match locks.get(&key).and_then(Weak::upgrade) {
                Some(lock) => lock,
                None => {
                    let lock = Arc::new(tokio::sync::Mutex::new(()));
                    locks.insert(key, Arc::downgrade(&lock));
                    lock
                }
            }
        };
        tokio::time::timeout_at(deadline, lock.lock_owned())
            .await
            .map_err(|_| too_many("other creations that count the same objects are not stored yet"))
    }
}

/// Checks that the limits allow one more object; what is returned is kept until it is stored.
pub async fn reserve(api: &ServerState, call: &Call, new: &Value) -> Result<Reservation> {
    // The server's own objects are no tenant's.
    if call.user.is_server() {
        return Ok(Reservation::default());
    }
    count_event(api, call, new)?;
    if call.resource.prefix == builtin::prefix("certificates.k8s.io", "certificatesigningrequests") {
        let lock = api.limits.locks.lock(format!("user {}", call.user.name), call.deadline).await?;
        if signing_requests(api, &call.user.name)? >= MAX_SIGNING_REQUESTS {
            return Err(too_many(&format!(
                "user \"{}\" has {MAX_SIGNING_REQUESTS} certificate signing requests, as many as are kept; delete some",
                call.user.name
            )));
        }
        return Ok(Reservation { _lock: Some(lock) });
    }
    if call.namespace.is_empty() || quota::limits_of(api, call)?.is_empty() {
        return Ok(Reservation::default());
    }
    let lock = api.limits.locks.lock(format!("namespace {}", call.namespace), call.deadline).await?;
    quota::check(api, call)?;
    Ok(Reservation { _lock: Some(lock) })
}

/// Counts a created or changed Event. Controllers record what happens to others' objects: one tenant must not use up
/// what all the others need.
pub fn count_event(api: &ServerState, call: &Call, new: &Value) -> Result<()> {
    if call.resource.prefix != builtin::prefix("", "events")
        || call.user.is_server()
        || api.flow.system.users.contains(&call.user.name)
    {
        return Ok(());
    }
    let bytes = new.to_string().len();
    api.limits
        .events
        .take(call.user.flow(), bytes, std::time::Instant::now())
        .map_err(|seconds| too_many_events(&call.user.name, seconds))
}

/// Certificate signing requests of a user. Decided ones count: the operator denies wrong ones at once.
fn signing_requests(api: &ServerState, user: &str) -> Result<usize> {
    let prefix = builtin::prefix("certificates.k8s.io", "certificatesigningrequests");
    let snapshot = api.store.range(&prefix, None, None).map_err(crate::verbs::list::storage_error)?;
    let of_user = |request: &Value| request["spec"]["username"] == user;
    Ok(snapshot.records.iter().filter(|record| of_user(record.object())).count())
}

fn too_many_events(user: &str, seconds: u64) -> ApiError {
    let mut error = too_many(&format!("user \"{user}\" writes more Events than are kept"));
    error.retry_after = Some(seconds);
    error
}
