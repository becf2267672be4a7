//! Times of Kubernetes' own types: what Go reads, and how the server writes them. `Time` is whole seconds, `MicroTime`
//! six digits of a second, both in UTC. A typed client fails for a whole kind when one object holds anything else.
//!
//! Not here: `date-time` of custom resources, which Kubernetes checks and stores as sent; see [`super::format`].

use jiff::SignedDuration;
use jiff::civil::{Date, DateTime, Time};
use serde_json::Value;

use super::Schema;
use super::prune::{push_field, push_index};
use super::values::{Counterparts, shown};

/// The format of a `Time` in compiled schemas.
pub const TIME: &str = "date-time";
/// The format of a `MicroTime` in compiled schemas; the published ones say `date-time`, as Kubernetes' do.
pub const MICRO_TIME: &str = "micro-time";

/// How a time is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Precision {
    Seconds,
    Micros,
}

/// A time that Go does not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {value} is no time such as {example}")]
pub struct TimeError {
    path: String,
    value: String,
    example: &'static str,
}

/// Rewrites every time of an object of a built-in type to the form in which Kubernetes stores it. A time that an older
/// release let in may stay where `old` has the same, so that such an object can still be written.
pub fn normalize(schema: &Schema, new: &mut Value, old: Option<&Value>) -> Result<(), TimeError> {
    walk(schema, new, old, &mut String::new())
}

fn walk(schema: &Schema, new: &mut Value, old: Option<&Value>, path: &mut String) -> Result<(), TimeError> {
    let length = path.len();
    match new {
        Value::String(text) => {
            let precision = match schema.checks.format.as_str() {
                TIME => Precision::Seconds,
                MICRO_TIME => Precision::Micros,
                _ => return Ok(()),
            };
            match read(text, precision) {
                Some(time) => *text = write(time, precision),
                None if old.and_then(Value::as_str) == Some(text) => {
                    if let Some(time) = read_leniently(text) {
                        *text = write(time, precision);
                    }
                }
                None => {
                    let example = match precision {
                        Precision::Seconds => "2026-01-02T15:04:05Z",
                        Precision::Micros => "2026-01-02T15:04:05.000000Z",
                    };
                    let value = shown(&Value::String(text.clone()));
                    return Err(TimeError { path: path.clone(), value, example });
                }
            }
        }
        Value::Object(map) => {
            for (name, child) in map.iter_mut() {
                let Some(field) = schema.field(name) else { continue };
                push_field(path, name);
                walk(field, child, old.and_then(|old| old.get(name)), path)?;
                path.truncate(length);
            }
        }
        Value::Array(items) => {
            let Some(field) = &schema.items else { return Ok(()) };
            let before = Counterparts::new(schema, old);
            for (index, item) in items.iter_mut().enumerate() {
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

fn write(time: DateTime, precision: Precision) -> String {
    let (date, clock) = (time.date(), time.time());
    let mut text = format!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}",
        date.year(),
        date.month(),
        date.day(),
        clock.hour(),
        clock.minute(),
        clock.second()
    );
    if precision == Precision::Micros {
        text.push_str(&format!(".{:06}", clock.subsec_nanosecond() / 1000));
    }
    text.push('Z');
    text
}

/// A time as `time.Parse` of Go reads it with the layout of `Time` or `MicroTime`, in UTC. In a `Time` a fraction of any
/// length may follow the seconds, in a `MicroTime` one of exactly six digits must.
fn read(text: &str, precision: Precision) -> Option<DateTime> {
    let mut rest = TimeText(text.as_bytes());
    let year = rest.digits(4)?;
    rest.byte(b"-")?;
    let month = rest.digits(2)?;
    rest.byte(b"-")?;
    let day = rest.digits(2)?;
    rest.byte(b"T")?;
    // The only field that Go also takes with one digit.
    let hour = if rest.digit_at(1) { rest.digits(2)? } else { rest.digits(1)? };
    rest.byte(b":")?;
    let minute = rest.digits(2)?;
    rest.byte(b":")?;
    let second = rest.digits(2)?;
    let nanosecond = match precision {
        Precision::Micros => {
            rest.byte(b".,")?;
            rest.digits(6)? * 1000
        }
        Precision::Seconds if rest.digit_at(1) && rest.byte(b".,").is_some() => rest.fraction(),
        Precision::Seconds => 0,
    };
    let sign = match rest.byte(b"Z+-")? {
        b'Z' => 0,
        b'+' => 1,
        _ => -1,
    };
    let mut offset = 0;
    if sign != 0 {
        let hours = rest.digits(2)?;
        rest.byte(b":")?;
        let minutes = rest.digits(2)?;
        if hours > 24 || minutes > 60 {
            return None;
        }
        offset = i64::from(sign) * i64::from(hours * 60 + minutes) * 60;
    }
    if !rest.0.is_empty() || second > 59 {
        return None;
    }
    let small = |number: i32| i8::try_from(number).ok();
    let date = Date::new(i16::try_from(year).ok()?, small(month)?, small(day)?).ok()?;
    let clock = Time::new(small(hour)?, small(minute)?, small(second)?, nanosecond).ok()?;
    let utc = date.to_datetime(clock).checked_sub(SignedDuration::from_secs(offset)).ok()?;
    (0..=9999).contains(&utc.year()).then_some(utc)
}

/// What releases before this module took for a time.
fn read_leniently(text: &str) -> Option<DateTime> {
    let time = text.parse::<jiff::Timestamp>().ok()?;
    Some(time.to_zoned(jiff::tz::TimeZone::UTC).datetime())
}

/// What is left of a text.
struct TimeText<'a>(&'a [u8]);

impl TimeText<'_> {
    /// Takes one of these bytes.
    fn byte(&mut self, allowed: &[u8]) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        if !allowed.contains(first) {
            return None;
        }
        self.0 = rest;
        Some(*first)
    }

    /// Whether the byte at `index` is a digit.
    fn digit_at(&self, index: usize) -> bool {
        self.0.get(index).is_some_and(u8::is_ascii_digit)
    }

    /// Takes a number of exactly this many digits, at most nine.
    fn digits(&mut self, count: usize) -> Option<i32> {
        let (digits, rest) = self.0.split_at_checked(count)?;
        if !digits.iter().all(u8::is_ascii_digit) {
            return None;
        }
        self.0 = rest;
        Some(digits.iter().fold(0, |number, digit| number * 10 + i32::from(digit - b'0')))
    }

    /// Takes all digits of a fraction, and returns it in nanoseconds; further digits do not count.
    fn fraction(&mut self) -> i32 {
        let (mut nanoseconds, mut unit) = (0, 100_000_000);
        while let Some(digit) = self.digits(1) {
            nanoseconds += digit * unit;
            unit /= 10;
        }
        nanoseconds
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::schema::builtin::builtin_schema;

    #[test]
    fn times_are_read_as_go_does_and_written_as_kubernetes() {
        for (text, seconds, micros) in [
            ("2026-11-25T00:00:19Z", Some("2026-11-25T00:00:19Z"), None),
            ("2026-11-25T00:00:19.103Z", Some("2026-11-25T00:00:19Z"), None),
            (
                "2026-11-25T00:00:19.103456Z",
                Some("2026-11-25T00:00:19Z"),
                Some("2026-11-25T00:00:19.103456Z"),
            ),
            (
                "2026-11-25T00:00:19,103456Z",
                Some("2026-11-25T00:00:19Z"),
                Some("2026-11-25T00:00:19.103456Z"),
            ),
            ("2026-11-25T00:00:19.123456789Z", Some("2026-11-25T00:00:19Z"), None),
            ("2026-11-25T01:00:19+01:30", Some("2026-11-24T23:30:19Z"), None),
            (
                "2026-11-25T01:00:19.000001-01:30",
                Some("2026-11-25T02:30:19Z"),
                Some("2026-11-25T02:30:19.000001Z"),
            ),
            ("2026-11-25T1:00:19Z", Some("2026-11-25T01:00:19Z"), None),
            ("9999-12-31T23:59:59Z", Some("9999-12-31T23:59:59Z"), None),
            ("0001-01-01T00:00:00Z", Some("0001-01-01T00:00:00Z"), None),
            ("2024-02-29T00:00:00Z", Some("2024-02-29T00:00:00Z"), None),
            ("2026-02-29T00:00:00Z", None, None),
            ("2026-11-25 00:00:19Z", None, None),
            ("2026-11-25 00:00:19.103456Z", None, None),
            ("2026-11-25t00:00:19Z", None, None),
            ("2026-11-25T00:00:19z", None, None),
            ("2026-11-25T00:00:60Z", None, None),
            ("2026-11-25T24:00:00Z", None, None),
            ("2026-11-25T00:00Z", None, None),
            ("2026-11-25T00:00:19.Z", None, None),
            ("2026-11-25T00:00:19", None, None),
            ("2026-11-25T00:00:19Z[UTC]", None, None),
            ("2026-11-25T00:00:19+25:00", None, None),
            ("2026-11-25T00:00:19+0100", None, None),
            ("9999-12-31T23:59:59-01:00", None, None),
            ("20261125T000019Z", None, None),
            ("2026-11-25", None, None),
            ("", None, None),
        ] {
            let shown = |precision| read(text, precision).map(|time| write(time, precision));
            assert_eq!(shown(Precision::Seconds).as_deref(), seconds, "{text} as Time");
            assert_eq!(shown(Precision::Micros).as_deref(), micros, "{text} as MicroTime");
        }
    }

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
            normalize(schema, &mut written, None).expect(kind);
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
                let error = normalize(schema, &mut poisoned.clone(), None).expect_err(path).to_string();
                assert!(error.starts_with(&format!("{path}: \"2026-11-25 00:00:00Z\"")), "{kind}: {error}");
            }
        }
    }

    #[test]
    fn time_that_an_older_release_stored_is_mended() {
        let schema = builtin_schema("coordination.k8s.io", "v1", "Lease").expect("a Lease");
        let old = json!({"spec": {"renewTime": "2026-11-25 00:00:19.103Z"}});
        let mut new = json!({"spec": {"renewTime": "2026-11-25 00:00:19.103Z", "holderIdentity": "x"}});
        assert!(normalize(schema, &mut new.clone(), None).is_err());
        normalize(schema, &mut new, Some(&old)).expect("it was there before");
        assert_eq!(new["spec"]["renewTime"], "2026-11-25T00:00:19.103000Z");
    }
}
