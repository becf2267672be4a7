//! Writes the status of AccessKeys: whether the key is accepted and when it was last used. Status is not
//! telemetry: a key in constant use costs one write per minute.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource as _};
use russet_crds::conditions::{self, Reason, Type};
use russet_crds::{AccessKey, AccessKeyStatus, names};
use serde_json::json;
use tokio::sync::watch;

use super::{ApiKey, Keyring, SecretRejection};
use crate::api_timeout::{WriteError, with_timeout};

/// Time between two checks for statuses to write: a new key is confirmed within seconds.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Time between two writes of one key's last use.
const LAST_USED_INTERVAL: SignedDuration = SignedDuration::from_secs(60);

/// Writes statuses until the future is dropped.
pub async fn report(client: Client, keyring: watch::Receiver<Arc<Keyring>>) {
    let mut poll = tokio::time::interval(POLL_INTERVAL);
    poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // Logged once each time writing begins to fail, not at every check.
    let mut failing = false;
    loop {
        poll.tick().await;
        let keyring = keyring.borrow().clone();
        for key in &keyring.keys {
            let Some(status) = decide(key, Timestamp::now()) else { continue };
            match with_timeout(write(&client, key, &status)).await {
                Ok(()) => failing = false,
                // A rejected write must not block the others; a server that does not respond would.
                Err(WriteError { cause, timed_out, .. }) => {
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(
                            key = key.full_name(),
                            "cannot write the status of the AccessKey: {cause}"
                        );
                    }
                    if timed_out {
                        break;
                    }
                }
            }
        }
    }
}

/// The status to write; `None` when the object already has it.
fn decide(key: &ApiKey, now: Timestamp) -> Option<AccessKeyStatus> {
    let mut status = AccessKeyStatus { observed_generation: key.generation, ..key.status.clone() };
    let (accepted, reason, message) = readiness(key, now);
    conditions::set(&mut status.conditions, Type::Ready, accepted, reason, message, key.generation, now);
    // Another gateway may have written a later use.
    let written = key.status.last_used.as_ref().map(|time| time.0);
    if let Some(used) = key.last_used()
        && written.is_none_or(|written| used.duration_since(written) >= LAST_USED_INTERVAL)
    {
        status.last_used = Some(Time(used));
    }
    (status != key.status).then_some(status)
}

fn readiness(key: &ApiKey, now: Timestamp) -> (bool, Reason, String) {
    match &key.rejection {
        Some(SecretRejection::Duplicate(first)) => {
            let message = format!(
                "AccessKey {first} is older, has the same secret and takes precedence; create a separate key with `russet key create`"
            );
            return (false, Reason::DuplicateSecret, message);
        }
        Some(SecretRejection::Foreign(owner)) => {
            let owner =
                owner.as_ref().map_or("another namespace".into(), |owner| format!("namespace {owner}"));
            let message = format!(
                "the secret was first that of an AccessKey in {owner}; create a separate key with `russet key create`, \
                 or annotate the AccessKey there with {}={}",
                names::SECRET_MOVES_TO,
                key.namespace
            );
            return (false, Reason::ForeignSecret, message);
        }
        None => {}
    }
    if let Some(range) = key.sources.invalid() {
        let message = format!(
            "{range} in spec.sourceRanges is no range of addresses such as 192.168.0.0/16, so it has none"
        );
        return (false, Reason::InvalidSpec, message);
    }
    if !key.enabled {
        return (false, Reason::KeyDisabled, "the gateway rejects the key: spec.state is Disabled".into());
    }
    match key.expires {
        Some(expires) if expires <= now => {
            (false, Reason::KeyExpired, format!("the key expired at {expires:.0}; create another one"))
        }
        Some(expires) => {
            (true, Reason::KeyAccepted, format!("the gateway accepts the key until {expires:.0}"))
        }
        None => (true, Reason::KeyAccepted, "the gateway accepts the key".into()),
    }
}

async fn write(client: &Client, key: &ApiKey, status: &AccessKeyStatus) -> Result<(), kube::Error> {
    let api: Api<AccessKey> = Api::namespaced(client.clone(), &key.namespace);
    let patch = json!({
        "apiVersion": AccessKey::api_version(&()),
        "kind": AccessKey::kind(&()),
        "metadata": {"name": key.name},
        "status": status,
    });
    // Force: the status belongs to the gateway, even if another manager edited it.
    let params = PatchParams::apply(names::GATEWAY_MANAGER).force();
    match api.patch_status(&key.name, &params, &Patch::Apply(patch)).await {
        // Deleted in the meantime: nothing reads the status any more.
        Err(kube::Error::Api(error)) if error.code == 404 => Ok(()),
        other => other.map(|_| ()),
    }
}

#[cfg(test)]
mod tests {
    use russet_crds::{AccessKeySpec, KeyState};

    use super::super::objects::tests::{access_key, at};
    use super::*;

    #[test]
    fn key_status_reports_acceptance_and_is_written_once() {
        let original = access_key("first", "s", |_| {});
        for (name, secret, change, now, expected) in [
            ("k", "t", (|_| {}) as fn(&mut AccessKeySpec), 5, ("True", "KeyAccepted")),
            ("k", "t", |spec| spec.expires_at = Some(at(9)), 5, ("True", "KeyAccepted")),
            ("k", "t", |spec| spec.expires_at = Some(at(9)), 9, ("False", "KeyExpired")),
            ("k", "t", |spec| spec.state = KeyState::Disabled, 5, ("False", "KeyDisabled")),
            ("k", "s", |_| {}, 5, ("False", "DuplicateSecret")),
        ] {
            let mut object = access_key(name, secret, change);
            let keyring = Keyring::default().updated([&original, &object], 2);
            let key = keyring.keys.iter().find(|key| key.name == name).unwrap();
            let status = decide(key, at(now).0).unwrap();
            let condition = conditions::get(&status.conditions, Type::Ready).unwrap();
            assert_eq!((condition.status.as_str(), condition.reason.as_str()), expected);
            object.status = Some(status);
            let keyring = Keyring::default().updated([&original, &object], 2);
            let key = keyring.keys.iter().find(|key| key.name == name).unwrap();
            assert_eq!(decide(key, at(now).0), None, "{expected:?}");
        }
    }

    #[test]
    fn a_use_is_written_at_most_once_a_minute() {
        let mut object = access_key("k", "s", |_| {});
        let mut keyring = Keyring::default().updated([&object], 1);
        let headers: axum::http::HeaderMap =
            [(axum::http::header::AUTHORIZATION, "Bearer s".parse().unwrap())].into_iter().collect();
        let mut writes = Vec::new();
        for second in 100..400 {
            keyring.caller(&headers, [127, 0, 0, 1].into(), true, at(second).0).unwrap();
            if let Some(status) = decide(&keyring.keys[0], at(second).0) {
                writes.push(status.last_used.clone().unwrap().0.as_second());
                object.status = Some(status);
                keyring = keyring.updated([&object], 1);
            }
        }
        assert_eq!(writes, [100, 160, 220, 280, 340]);
    }
}
