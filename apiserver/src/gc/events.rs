//! Events are news: they go an hour after they were last told.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::Value;

use super::remove;
use crate::api::Api;
use crate::kinds::builtin;
use crate::object;

/// As long as the real server keeps them.
const KEPT_SECONDS: i64 = 3600;
/// How often they are looked through.
const LOOK: Duration = Duration::from_secs(60);

/// Runs the controller.
pub async fn run(api: Arc<Api>) {
    loop {
        tokio::time::sleep(LOOK).await;
        let Ok(snapshot) = api.store.range(&builtin::prefix("", "events"), None, None) else { continue };
        let now = Timestamp::now();
        for record in snapshot.records.iter().filter(|record| is_old(record.object(), now)) {
            if let Err(error) = remove(&api, record, "Background").await {
                tracing::debug!(%error, key = record.key.as_ref(), "an old event could not be deleted");
            }
        }
    }
}

/// Whether the last time an event was told is too long ago.
fn is_old(event: &Value, now: Timestamp) -> bool {
    let times = [
        object::meta(event, "creationTimestamp"),
        event["lastTimestamp"].as_str().unwrap_or_default(),
        event["eventTime"].as_str().unwrap_or_default(),
        event["series"]["lastObservedTime"].as_str().unwrap_or_default(),
    ];
    let last = times.iter().filter_map(|time| time.parse::<Timestamp>().ok()).max();
    last.is_some_and(|last| now.as_second() - last.as_second() > KEPT_SECONDS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_event_told_again_stays() {
        let now: Timestamp = "2026-01-01T12:00:00Z".parse().unwrap();
        let mut event = json!({"metadata": {"creationTimestamp": "2026-01-01T10:00:00Z"}});
        assert!(is_old(&event, now));
        event["series"] = json!({"lastObservedTime": "2026-01-01T11:30:00.000000Z"});
        assert!(!is_old(&event, now));
    }
}
