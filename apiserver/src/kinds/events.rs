//! The two API versions of an Event: core/v1 and events.k8s.io/v1 serve the same stored object with different
//! field names.

use serde_json::Value;

/// Field names: in core/v1, in events.k8s.io/v1.
const NAMES: &[(&str, &str)] = &[
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
    ("reportingComponent", "reportingController"),
];

/// Renames the fields for the requested API version.
pub fn convert(event: &mut Value, api_version: &str) {
    if event["apiVersion"].as_str() == Some(api_version) {
        return;
    }
    let Some(fields) = event.as_object_mut() else { return };
    for (core, new) in NAMES {
        let (from, to) = if api_version == "v1" { (new, core) } else { (core, new) };
        if let Some(value) = fields.remove(*from) {
            fields.insert((*to).into(), value);
        }
    }
    fields.insert("apiVersion".into(), Value::String(api_version.into()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn event_conversion_round_trips() {
        let new = json!({"apiVersion": "events.k8s.io/v1", "kind": "Event", "note": "hello", "regarding": {"name": "x"}});
        let mut event = new.clone();
        convert(&mut event, "v1");
        assert_eq!(
            event,
            json!({"apiVersion": "v1", "kind": "Event", "message": "hello", "involvedObject": {"name": "x"}})
        );
        convert(&mut event, "events.k8s.io/v1");
        assert_eq!(event, new);
    }
}
