//! The canonical form of values of Kubernetes' own types. kube-apiserver decodes such an object into Go's types and
//! encodes it again; this server does the same to the values for which that makes a difference: times, base64, and nulls in
//! maps and lists of strings. A typed client fails for a whole kind when one object holds a time that Go does not read.
//!
//! Not here: custom resources, which are stored as sent, but for their metadata.

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{GeneralPurpose, GeneralPurposeConfig};
use serde_json::Value;

use super::prune::{push_field, push_index};
use super::time::Precision;
use super::values::{Counterparts, shown};
use super::{Schema, SchemaType};

/// The format of bytes in compiled schemas of Kubernetes' own types; the published ones say `byte`.
pub const BYTES: &str = "bytes";

/// Base64 as Go decodes it: the last character may carry bits that stand for nothing.
const BASE64: GeneralPurpose =
    GeneralPurpose::new(&STANDARD, GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true));

/// A time that Go does not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {value} is no time such as {example}")]
pub struct TimeError {
    path: String,
    value: String,
    example: &'static str,
}

/// Rewrites an object of a built-in type. A time that an older release let in may stay where `old` has the same, so that
/// such an object can still be written. Other values that cannot be rewritten are left to validation.
pub fn rewrite(schema: &Schema, new: &mut Value, old: Option<&Value>) -> Result<(), TimeError> {
    walk(schema, new, old, &mut String::new())
}

fn walk(schema: &Schema, new: &mut Value, old: Option<&Value>, path: &mut String) -> Result<(), TimeError> {
    let length = path.len();
    match new {
        Value::String(text) => {
            if schema.checks.format == BYTES {
                if let Some(bytes) = decode_base64(text) {
                    *text = BASE64.encode(bytes);
                }
                return Ok(());
            }
            let Some(precision) = Precision::of(&schema.checks.format) else { return Ok(()) };
            if let Some(canonical) = precision.canonical(text) {
                *text = canonical;
            } else if old.and_then(Value::as_str) == Some(text) {
                *text = precision.mended(text).unwrap_or_else(|| text.clone());
            } else {
                let value = shown(&Value::String(text.clone()));
                return Err(TimeError { path: path.clone(), value, example: precision.example() });
            }
        }
        Value::Object(map) => {
            for (name, child) in map.iter_mut() {
                let Some(field) = schema.field(name) else { continue };
                if child.is_null()
                    && field.kind == SchemaType::String
                    && !schema.properties.contains_key(name)
                {
                    *child = Value::String(String::new());
                }
                push_field(path, name);
                walk(field, child, old.and_then(|old| old.get(name)), path)?;
                path.truncate(length);
            }
        }
        Value::Array(items) => {
            let Some(field) = &schema.items else { return Ok(()) };
            let before = Counterparts::new(schema, old);
            for (index, item) in items.iter_mut().enumerate() {
                if item.is_null() && field.kind == SchemaType::String {
                    *item = Value::String(String::new());
                }
                push_index(path, index);
                let counterpart = before.of(item);
                walk(field, item, counterpart, path)?;
                path.truncate(length);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
    Ok(())
}

/// Bytes in base64, with line ends anywhere, as `base64` of a shell prints them.
pub fn decode_base64(text: &str) -> Option<Vec<u8>> {
    if text.contains(['\n', '\r']) {
        return BASE64.decode(text.replace(['\n', '\r'], "")).ok();
    }
    BASE64.decode(text).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::schema::builtin::builtin_schema;

    #[test]
    fn every_time_of_a_kind_is_rewritten_or_named() {
        let (micro, whole) = ("2026-11-25T01:00:00.500000+01:00", "2026-11-25T01:00:00.5+01:00");
        let (micro_after, whole_after) = ("2026-11-25T00:00:00.500000Z", "2026-11-25T00:00:00Z");
        let cases = [
            (
                "coordination.k8s.io",
                "Lease",
                json!({"spec": {"renewTime": micro, "acquireTime": micro}}),
                vec!["spec.acquireTime", "spec.renewTime"],
            ),
            (
                "",
                "Event",
                json!({"eventTime": micro, "series": {"lastObservedTime": micro}, "firstTimestamp": whole, "lastTimestamp": whole}),
                vec!["eventTime", "firstTimestamp", "lastTimestamp", "series.lastObservedTime"],
            ),
            (
                "events.k8s.io",
                "Event",
                json!({"eventTime": micro, "series": {"lastObservedTime": micro}, "deprecatedFirstTimestamp": whole, "deprecatedLastTimestamp": whole}),
                vec![
                    "deprecatedFirstTimestamp",
                    "deprecatedLastTimestamp",
                    "eventTime",
                    "series.lastObservedTime",
                ],
            ),
            (
                "",
                "Namespace",
                json!({"status": {"conditions": [{"type": "X", "lastTransitionTime": whole}]}}),
                vec!["status.conditions[0].lastTransitionTime"],
            ),
            (
                "certificates.k8s.io",
                "CertificateSigningRequest",
                json!({"status": {"conditions": [{"type": "X", "lastTransitionTime": whole, "lastUpdateTime": whole}]}}),
                vec!["status.conditions[0].lastTransitionTime", "status.conditions[0].lastUpdateTime"],
            ),
            (
                "apiextensions.k8s.io",
                "CustomResourceDefinition",
                json!({"status": {"conditions": [{"type": "X", "lastTransitionTime": whole}]}}),
                vec!["status.conditions[0].lastTransitionTime"],
            ),
            (
                "admissionregistration.k8s.io",
                "ValidatingAdmissionPolicy",
                json!({"status": {"conditions": [{"type": "X", "lastTransitionTime": whole}]}}),
                vec!["status.conditions[0].lastTransitionTime"],
            ),
            (
                "",
                "ConfigMap",
                json!({"metadata": {"creationTimestamp": whole, "deletionTimestamp": whole, "managedFields": [{"time": whole}]}, "data": {"time": "any"}}),
                vec![
                    "metadata.creationTimestamp",
                    "metadata.deletionTimestamp",
                    "metadata.managedFields[0].time",
                ],
            ),
        ];
        for (group, kind, object, paths) in cases {
            let schema = builtin_schema(group, "v1", kind).expect(kind);
            let mut written = object.clone();
            rewrite(schema, &mut written, None).expect(kind);
            let expected = object.to_string().replace(micro, micro_after).replace(whole, whole_after);
            assert_eq!(written, serde_json::from_str::<Value>(&expected).expect(kind), "{group} {kind}");
            // Each time of it alone, in a form that Go does not read.
            let pointers: Vec<String> = paths
                .iter()
                .map(|path| format!("/{}", path.replace(['.', '['], "/").replace(']', "")))
                .collect();
            for (path, pointer) in paths.iter().zip(&pointers) {
                let mut poisoned = object.clone();
                *poisoned.pointer_mut(pointer).expect(pointer) = "2026-11-25 00:00:00Z".into();
                let error = rewrite(schema, &mut poisoned.clone(), None).expect_err(path).to_string();
                assert!(error.starts_with(&format!("{path}: \"2026-11-25 00:00:00Z\"")), "{kind}: {error}");
            }
        }
    }

    #[test]
    fn time_that_an_older_release_stored_is_mended() {
        let schema = builtin_schema("coordination.k8s.io", "v1", "Lease").expect("a Lease");
        let old = json!({"spec": {"renewTime": "2026-11-25 00:00:19.103Z"}});
        let mut new = json!({"spec": {"renewTime": "2026-11-25 00:00:19.103Z", "holderIdentity": "x"}});
        assert!(rewrite(schema, &mut new.clone(), None).is_err());
        rewrite(schema, &mut new, Some(&old)).expect("it was there before");
        assert_eq!(new["spec"]["renewTime"], "2026-11-25T00:00:19.103000Z");
    }

    #[test]
    fn base64_and_nulls_are_rewritten_as_go_does() {
        let schema = builtin_schema("", "v1", "Secret").expect("a Secret");
        let mut secret = json!({
            "metadata": {"labels": {"a": null}, "annotations": {"b": null}, "finalizers": [null], "name": null},
            "data": {"lines": "aGVs\nbG8=\r\n", "bits": "aGl=", "none": "", "null": null, "bad": "a*"},
            "stringData": {"s": null, "t": "a\nb"},
        });
        rewrite(schema, &mut secret, None).expect("no time");
        assert_eq!(
            secret,
            json!({
                "metadata": {"labels": {"a": ""}, "annotations": {"b": ""}, "finalizers": [""], "name": null},
                "data": {"lines": "aGVsbG8=", "bits": "aGk=", "none": "", "null": "", "bad": "a*"},
                "stringData": {"s": "", "t": "a\nb"},
            })
        );
        let schema =
            builtin_schema("certificates.k8s.io", "v1", "CertificateSigningRequest").expect("a request");
        let mut request = json!({"spec": {"request": "aGVs\nbG8="}});
        rewrite(schema, &mut request, None).expect("no time");
        assert_eq!(request["spec"]["request"], "aGVsbG8=");
        let schema = builtin_schema("", "v1", "ConfigMap").expect("a ConfigMap");
        let mut map = json!({"data": {"a": null}, "binaryData": {"b": "aGVs\nbG8="}});
        rewrite(schema, &mut map, None).expect("no time");
        assert_eq!(map, json!({"data": {"a": ""}, "binaryData": {"b": "aGVsbG8="}}));
    }
}
