//! How long a model stays loaded after a request: `keep_alive`, seconds as a number or a duration as Go writes it.

use std::time::Duration;

use serde_json::Value;

use crate::dialects::values::{JsonObject, shown};
use crate::error::GatewayError;

/// Below 0: the model stays. A deployment says how long that is at most.
const FOREVER: Duration = Duration::MAX;

/// Units of a duration, in seconds; of two that begin alike the longer one comes first.
const UNITS: [(&str, f64); 8] = [
    ("ns", 1e-9),
    ("us", 1e-6),
    ("µs", 1e-6),
    ("μs", 1e-6),
    ("ms", 1e-3),
    ("s", 1.0),
    ("m", 60.0),
    ("h", 3600.0),
];

/// The `keep_alive` of a request; `None` where it has none.
pub(super) fn keep_alive(fields: &JsonObject) -> Result<Option<Duration>, GatewayError> {
    let Some(value) = fields.get("keep_alive") else { return Ok(None) };
    let read = match value {
        Value::String(text) => seconds(text.trim()),
        number => number.as_f64(),
    };
    match read {
        Some(seconds) if seconds < 0.0 => Ok(Some(FOREVER)),
        Some(seconds) => Ok(Some(Duration::try_from_secs_f64(seconds).unwrap_or(FOREVER))),
        None => {
            let message = format!(
                "`keep_alive` must be a number of seconds or a duration such as \"5m\" or \"1h30m\", not {}",
                shown(value)
            );
            Err(GatewayError::field("keep_alive", message))
        }
    }
}

/// The seconds of a text: a number, or numbers with units.
fn seconds(text: &str) -> Option<f64> {
    if let Some(number) = number(text) {
        return Some(number);
    }
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text.strip_prefix('+').unwrap_or(text)),
    };
    let mut sum = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (count, behind) = rest.split_at(digits);
        let (unit, seconds) = UNITS.into_iter().find(|(unit, _)| behind.starts_with(unit))?;
        sum += number(count)? * seconds;
        rest = &behind[unit.len()..];
    }
    (!text.is_empty()).then_some(sign * sum)
}

/// A number of digits, a point and a sign: no `inf`, and no exponent.
fn number(text: &str) -> Option<f64> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'.' | b'-' | b'+'));
    text.parse().ok().filter(|_| is_plain)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keep_alive_is_seconds_or_a_duration() {
        let seconds = |seconds: f64| Some(Duration::from_secs_f64(seconds));
        for (value, expected) in [
            (json!(0), seconds(0.0)),
            (json!("0"), seconds(0.0)),
            (json!("0s"), seconds(0.0)),
            (json!("0ms"), seconds(0.0)),
            (json!(1800), seconds(1800.0)),
            (json!(0.5), seconds(0.5)),
            (json!("90"), seconds(90.0)),
            (json!("5m"), seconds(300.0)),
            (json!("1h30m"), seconds(5400.0)),
            (json!("1.5h"), seconds(5400.0)),
            (json!(" 10s "), seconds(10.0)),
            (json!("250ms"), seconds(0.25)),
            (json!(-1), Some(FOREVER)),
            (json!("-1"), Some(FOREVER)),
            (json!("-1m"), Some(FOREVER)),
            (json!(1e300), Some(FOREVER)),
            (json!("99999999999999999999999h"), Some(FOREVER)),
        ] {
            let fields = [("keep_alive".to_owned(), value.clone())].into_iter().collect();
            assert_eq!(keep_alive(&fields).unwrap(), expected, "{value}");
        }
        assert_eq!(keep_alive(&JsonObject::new()).unwrap(), None);
        for value in [
            json!(""),
            json!("soon"),
            json!("5 m"),
            json!("5x"),
            json!("m"),
            json!("inf"),
            json!(true),
            json!([5]),
        ] {
            let fields = [("keep_alive".to_owned(), value.clone())].into_iter().collect();
            let error = keep_alive(&fields).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("keep_alive"), "{value}");
        }
    }
}
