//! Expiry: Events an hour after their last occurrence, certificate signing requests once they no longer
//! matter, and bootstrap tokens of machines that never joined. The pure functions at the end decide about
//! each object. It goes through the store anyway, so it also reports how much there is.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde_json::Value;

use super::edit::remove;
use crate::auth::tokens;
use crate::kinds::builtin;
use crate::object;
use crate::state::ServerState;

/// Interval between two checks.
const POLL_INTERVAL: Duration = Duration::from_secs(60);
/// Seconds that Kubernetes keeps Events, and its controllers decided requests.
const HOUR: i64 = 3600;
/// Seconds after which an undecided request counts as abandoned by its client.
const DAY: i64 = 24 * HOUR;

/// Whether an object has expired.
type IsExpired = fn(&Value, Timestamp) -> bool;

/// Runs the controller.
pub async fn run(api: Arc<ServerState>) {
    let kinds: [(String, IsExpired); 3] = [
        (builtin::prefix("", "events"), is_old_event),
        (builtin::prefix("certificates.k8s.io", "certificatesigningrequests"), is_old_request),
        (tokens::bootstrap_prefix(), is_expired_token),
    ];
    loop {
        // It looks at every object.
        let storage = api.clone();
        let _ = tokio::task::spawn_blocking(move || report_storage(&storage)).await;
        tokio::time::sleep(POLL_INTERVAL).await;
        let now = Timestamp::now();
        for (prefix, is_over) in &kinds {
            let Ok(snapshot) = api.store.range(prefix, None, None) else { continue };
            for record in snapshot.records.iter().filter(|record| is_over(record.object(), now)) {
                if let Err(error) = remove(&api, record, "Background").await {
                    tracing::debug!(%error, key = record.key.as_ref(), "expired objects could not be deleted; this is retried");
                }
            }
        }
    }
}

/// Reports how much is stored of each resource.
fn report_storage(api: &ServerState) {
    let mut resources = BTreeMap::new();
    for resource in api.kinds.current().stored() {
        let Ok(snapshot) = api.store.range(&resource.prefix, None, None) else { continue };
        let name = if resource.group.is_empty() {
            resource.plural.clone()
        } else {
            format!("{}.{}", resource.plural, resource.group)
        };
        let bytes: usize = snapshot.records.iter().map(|record| record.value.len()).sum();
        resources.insert(name, (snapshot.records.len(), bytes));
    }
    api.metrics.storage(&resources);
}

fn older(time: &str, seconds: i64, now: Timestamp) -> bool {
    time.parse::<Timestamp>().is_ok_and(|time| now.as_second() - time.as_second() > seconds)
}

/// Whether the last occurrence of an Event is too long ago.
fn is_old_event(event: &Value, now: Timestamp) -> bool {
    let times = [
        object::meta(event, "creationTimestamp"),
        event["lastTimestamp"].as_str().unwrap_or_default(),
        event["eventTime"].as_str().unwrap_or_default(),
        event["series"]["lastObservedTime"].as_str().unwrap_or_default(),
    ];
    // A time to come would keep it for as long as its writer likes.
    let passed = times.iter().filter_map(|time| time.parse::<Timestamp>().ok()).filter(|time| *time <= now);
    passed.max().is_some_and(|last| now.as_second() - last.as_second() > HOUR)
}

/// Whether a signing request was decided long ago, or was never decided and is abandoned.
fn is_old_request(request: &Value, now: Timestamp) -> bool {
    let conditions = request["status"]["conditions"].as_array().map_or(&[][..], Vec::as_slice);
    if conditions.is_empty() {
        return older(object::meta(request, "creationTimestamp"), DAY, now);
    }
    conditions.iter().all(|condition| {
        let times = [&condition["lastUpdateTime"], &condition["lastTransitionTime"]];
        let decided = times.iter().find_map(|time| time.as_str());
        older(decided.unwrap_or(object::meta(request, "creationTimestamp")), HOUR, now)
    })
}

/// Whether a bootstrap token has expired.
fn is_expired_token(secret: &Value, now: Timestamp) -> bool {
    let expiration = secret["data"]["expiration"].as_str().and_then(|text| STANDARD.decode(text).ok());
    let expiration = expiration.and_then(|bytes| String::from_utf8(bytes).ok());
    expiration.is_some_and(|text| older(text.trim(), 0, now))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn expired_objects_are_deleted_and_live_ones_stay() {
        let now: Timestamp = "2026-01-02T12:00:00Z".parse().unwrap();
        let old = "2026-01-01T10:00:00Z";
        let made = json!({"creationTimestamp": old});
        let approved = json!([{"type": "Approved", "lastUpdateTime": "2026-01-02T11:30:00Z"}]);
        let event = json!({"metadata": made, "series": {"lastObservedTime": "2026-01-02T11:30:00.000000Z"}});
        for (over, expected, what) in [
            (is_old_event(&json!({"metadata": made}), now), true, "an event seen once, long ago"),
            (is_old_event(&event, now), false, "an event seen again"),
            (
                is_old_event(&json!({"metadata": made, "eventTime": "2099-01-01T00:00:00.000000Z"}), now),
                true,
                "an event of the future",
            ),
            (is_old_request(&json!({"metadata": made}), now), true, "an undecided request"),
            (
                is_old_request(&json!({"metadata": made, "status": {"conditions": approved}}), now),
                false,
                "decided lately",
            ),
            (
                is_expired_token(&json!({"data": {"expiration": STANDARD.encode(old)}}), now),
                true,
                "an expired token",
            ),
            (is_expired_token(&json!({"data": {}}), now), false, "a token without an end"),
        ] {
            assert_eq!(over, expected, "{what}");
        }
    }
}
