//! What the headers of a provider's answer say of its rate limits: for how long nothing is left. Pure. Not here: which models
//! are left alone for it, and how long at most (`pauses`).
//!
//! OpenAI and Anthropic refill what is spent all the time, and their reset is when all of it is back. A request fits much
//! earlier: one of a minute's 60 after a second. Tokens that an answer has spent hold nobody, since nobody knows how many the
//! next request needs; one that does not fit is refused, and that refusal counts.
//!
//! | who | remaining | reset |
//! |---|---|---|
//! | OpenRouter and others | `x-ratelimit-remaining` | `x-ratelimit-reset`: milliseconds or seconds since 1970, or seconds from now |
//! | OpenAI and others | `x-ratelimit-remaining-requests`, `-tokens` | `x-ratelimit-reset-requests`, `-tokens`: `1s`, `6m0s`, `20ms` |
//! | Anthropic | `anthropic-ratelimit-requests-remaining` and others | `anthropic-ratelimit-requests-reset`: RFC 3339 |

use std::time::Duration;

use jiff::Timestamp;
use reqwest::header::HeaderMap;
use serde_json::Value;

/// What Anthropic counts, each with a limit of its own.
const ANTHROPIC_COUNTS: [&str; 4] = ["requests", "tokens", "input-tokens", "output-tokens"];
/// What OpenAI counts.
const OPENAI_COUNTS: [&str; 2] = ["requests", "tokens"];
/// From here on a reset is a time in seconds since 1970 (2001), and below it seconds from now (32 years).
const MIN_EPOCH_SECONDS: f64 = 1e9;
/// From here on it is milliseconds since 1970 (1973).
const MIN_EPOCH_MILLISECONDS: f64 = 1e11;

/// A limit of which nothing remains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SpentLimit {
    /// Whose it is.
    pub(super) scope: LimitScope,
    /// How long nothing remains that a request needs, as the provider says.
    pub(super) left: Duration,
}

/// Whose a limit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LimitScope {
    /// Of those without a word of what they count: the account's at OpenRouter, a model's elsewhere.
    Unnamed,
    /// The model's: OpenAI and Anthropic have limits for each.
    Model,
}

/// What limits come with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LimitedReply {
    /// An answer.
    Answer,
    /// A 429 to a request that needs about so many tokens, and when it fits, if the provider says so.
    Refusal { tokens: u64, retry_after: Option<Duration> },
}

/// The limits of which nothing remains, by the headers of an answer.
pub(super) fn of_headers(headers: &HeaderMap, reply: LimitedReply, now: Timestamp) -> Vec<SpentLimit> {
    spent(|name| headers.get(name)?.to_str().ok().map(str::to_owned), reply, now)
}

/// The same by the body of an error: OpenRouter puts the headers into `error.metadata.headers`.
pub(super) fn of_error(error: &Value, reply: LimitedReply, now: Timestamp) -> Vec<SpentLimit> {
    let Some(headers) = error.pointer("/error/metadata/headers").and_then(Value::as_object) else {
        return Vec::new();
    };
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let find = |name: &str| headers.iter().find(|(one, _)| one.eq_ignore_ascii_case(name));
    spent(|name| find(name).map(|(_, value)| text(value)), reply, now)
}

fn spent(header: impl Fn(&str) -> Option<String>, reply: LimitedReply, now: Timestamp) -> Vec<SpentLimit> {
    let number = |name: &str| header(name)?.trim().parse::<u64>().ok();
    // The reset of a limit of which nothing remains, and all of it.
    let reset = |remaining: &str, reset: &str| {
        // A limit of nothing is none: nothing of it can remain.
        let limit = number(&remaining.replacen("remaining", "limit", 1));
        let is_spent = limit != Some(0) && number(remaining) == Some(0);
        Some((is_spent.then(|| until_reset(header(reset)?.trim(), now)).flatten()?, limit))
    };
    let unnamed = reset("x-ratelimit-remaining", "x-ratelimit-reset");
    let unnamed = unnamed.map(|(left, _)| SpentLimit { scope: LimitScope::Unnamed, left });
    let openai = OPENAI_COUNTS.iter().map(|count| {
        let names = (format!("x-ratelimit-remaining-{count}"), format!("x-ratelimit-reset-{count}"));
        (*count, names)
    });
    let anthropic = ANTHROPIC_COUNTS.iter().map(|count| {
        let name = format!("anthropic-ratelimit-{count}");
        (*count, (format!("{name}-remaining"), format!("{name}-reset")))
    });
    let named = openai.chain(anthropic).filter_map(|(count, (remaining, name))| {
        let (whole, limit) = reset(&remaining, &name)?;
        let left = refilled(count, whole, limit, reply)?;
        (!left.is_zero()).then_some(SpentLimit { scope: LimitScope::Model, left })
    });
    unnamed.into_iter().chain(named).collect()
}

/// How long until a request fits into a limit that is empty now and whole after `reset`; none where nobody knows that it does
/// not fit.
fn refilled(count: &str, reset: Duration, limit: Option<u64>, reply: LimitedReply) -> Option<Duration> {
    let (needed, retry_after) = match reply {
        LimitedReply::Answer if count == "requests" => (1, None),
        LimitedReply::Answer => return None,
        LimitedReply::Refusal { retry_after, .. } if count == "requests" => (1, retry_after),
        LimitedReply::Refusal { tokens, retry_after } => (tokens.max(1), retry_after),
    };
    // Without its size nobody can say when a part of it is back.
    let part = limit.map_or(1.0, |limit| (needed as f64 / limit as f64).min(1.0));
    let left = reset.mul_f64(part);
    Some(retry_after.map_or(left, |named| named.min(reset)))
}

/// How long until a limit is reset; none where that is over, or nobody can read it.
fn until_reset(text: &str, now: Timestamp) -> Option<Duration> {
    let left = match text.parse::<f64>() {
        Ok(number) => {
            let since_1970 = |seconds: f64| seconds - now.as_millisecond() as f64 / 1000.0;
            let seconds = match number {
                number if number >= MIN_EPOCH_MILLISECONDS => since_1970(number / 1000.0),
                number if number >= MIN_EPOCH_SECONDS => since_1970(number),
                number => number,
            };
            Duration::try_from_secs_f64(seconds).ok()?
        }
        Err(_) => match text.parse::<Timestamp>() {
            Ok(at) => Duration::try_from(at.duration_since(now)).ok()?,
            Err(_) => span(text)?,
        },
    };
    (!left.is_zero()).then_some(left)
}

/// A span as Go writes it: `1s`, `6m0s`, `1h2m3.5s`, `20ms`.
fn span(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut sum = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|character: char| !character.is_ascii_digit() && character != '.')?;
        let (number, unit) = rest.split_at(digits);
        let end = unit.find(|character: char| !character.is_ascii_alphabetic()).unwrap_or(unit.len());
        let (unit, after) = unit.split_at(end);
        let seconds = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            _ => return None,
        };
        let part = Duration::try_from_secs_f64(number.parse::<f64>().ok()? * seconds).ok()?;
        sum = sum.checked_add(part)?;
        rest = after;
    }
    Some(sum)
}

#[cfg(test)]
mod tests {
    use reqwest::header::HeaderName;
    use serde_json::json;

    use super::*;

    fn now() -> Timestamp {
        "2026-11-29T10:00:00Z".parse().unwrap()
    }

    fn found(headers: &[(&str, &str)]) -> Vec<(LimitScope, u128)> {
        found_with(headers, LimitedReply::Answer)
    }

    fn found_with(headers: &[(&str, &str)], reply: LimitedReply) -> Vec<(LimitScope, u128)> {
        let headers = headers.iter().map(|(name, value)| {
            (name.to_ascii_lowercase().parse::<HeaderName>().unwrap(), value.parse().unwrap())
        });
        let spent = of_headers(&headers.collect(), reply, now());
        spent.into_iter().map(|one| (one.scope, one.left.as_millis())).collect()
    }

    #[test]
    fn headers_of_each_provider_say_when_nothing_is_left() {
        use LimitScope::{Model, Unnamed};
        let in_a_minute = (now().as_millisecond() + 60_000).to_string();
        let in_two = (now().as_second() + 120).to_string();
        for (headers, expected) in [
            (
                vec![
                    ("X-RateLimit-Limit", "50"),
                    ("X-RateLimit-Remaining", "0"),
                    ("X-RateLimit-Reset", &*in_a_minute),
                ],
                vec![(Unnamed, 60_000)],
            ),
            (vec![("X-RateLimit-Remaining", "0"), ("X-RateLimit-Reset", &*in_two)], vec![(Unnamed, 120_000)]),
            (vec![("X-RateLimit-Remaining", "0"), ("X-RateLimit-Reset", "7")], vec![(Unnamed, 7000)]),
            (vec![("X-RateLimit-Remaining", "1"), ("X-RateLimit-Reset", "7")], vec![]),
            (
                vec![("X-RateLimit-Limit", "0"), ("X-RateLimit-Remaining", "0"), ("X-RateLimit-Reset", "7")],
                vec![],
            ),
            (
                vec![
                    ("x-ratelimit-limit-tokens", "0"),
                    ("x-ratelimit-remaining-tokens", "0"),
                    ("x-ratelimit-reset-tokens", "6m0s"),
                ],
                vec![],
            ),
            (
                vec![
                    ("x-ratelimit-remaining-requests", "0"),
                    ("x-ratelimit-reset-requests", "6m0s"),
                    ("x-ratelimit-remaining-tokens", "149984"),
                    ("x-ratelimit-reset-tokens", "6ms"),
                ],
                vec![(Model, 360_000)],
            ),
            (
                vec![("x-ratelimit-remaining-requests", "0"), ("x-ratelimit-reset-requests", "1h2m3.5s")],
                vec![(Model, 3_723_500)],
            ),
            // One of 60 is back after a second.
            (
                vec![
                    ("x-ratelimit-limit-requests", "60"),
                    ("x-ratelimit-remaining-requests", "0"),
                    ("x-ratelimit-reset-requests", "1m0s"),
                ],
                vec![(Model, 1000)],
            ),
            // The next request may need few tokens.
            (vec![("x-ratelimit-remaining-tokens", "0"), ("x-ratelimit-reset-tokens", "6m0s")], vec![]),
            (
                vec![
                    ("anthropic-ratelimit-requests-remaining", "0"),
                    ("anthropic-ratelimit-requests-reset", "2026-11-29T10:00:30Z"),
                    ("anthropic-ratelimit-output-tokens-remaining", "0"),
                    ("anthropic-ratelimit-output-tokens-reset", "2026-11-29T10:01:00Z"),
                ],
                vec![(Model, 30_000)],
            ),
        ] {
            assert_eq!(found(&headers), expected, "{headers:?}");
        }
    }

    #[test]
    fn a_refusal_for_tokens_holds_until_the_request_fits() {
        use LimitScope::Model;
        let of = |limit: &'static str, retry_after: Option<u64>, tokens| {
            let mut headers =
                vec![("x-ratelimit-remaining-tokens", "0"), ("x-ratelimit-reset-tokens", "1m0s")];
            headers
                .extend([("x-ratelimit-limit-tokens", limit)].iter().filter(|(_, limit)| !limit.is_empty()));
            let retry_after = retry_after.map(Duration::from_secs);
            found_with(&headers, LimitedReply::Refusal { tokens, retry_after })
        };
        for (limit, retry_after, tokens, expected) in [
            // Half of what a minute has is back after half a minute.
            ("6000", None, 3000, 30_000),
            // More than there ever is.
            ("6000", None, 50_000, 60_000),
            ("6000", Some(7), 3000, 7000),
            // It is back then, whatever is said.
            ("6000", Some(3600), 3000, 60_000),
            // Of a limit that nobody names only the end is known.
            ("", None, 3000, 60_000),
        ] {
            let found = of(limit, retry_after, tokens);
            assert_eq!(found, [(Model, expected)], "{limit} {retry_after:?} {tokens}");
        }
    }

    #[test]
    fn nonsense_in_headers_is_no_limit() {
        for reset in [
            "",
            "soon",
            "-5",
            "0",
            "NaN",
            "inf",
            "1e300",
            "12x",
            "ms",
            "5",
            "1s2",
            "..s",
            "2026-11-29T09:00:00Z",
            "2026-11-29",
            "1000000000",
        ] {
            let headers = [("x-ratelimit-remaining-requests", "0"), ("x-ratelimit-reset-requests", reset)];
            let expected = if reset == "5" { vec![(LimitScope::Model, 5000)] } else { vec![] };
            assert_eq!(found(&headers), expected, "{reset}");
        }
        for remaining in ["", "-0", "none", "0.0", "00x"] {
            let headers = [("x-ratelimit-remaining", remaining), ("x-ratelimit-reset", "5")];
            assert_eq!(found(&headers), [], "{remaining}");
        }
        assert_eq!(found(&[("x-ratelimit-remaining", "0")]), []);
        assert_eq!(found(&[("x-ratelimit-reset", "5")]), []);
    }

    #[test]
    fn an_error_of_openrouter_has_the_headers_in_its_body() {
        let error = |headers: Value| json!({"error": {"code": 429, "message": "free-models-per-day", "metadata": {"headers": headers}}});
        let at = now().as_millisecond() + 5000;
        let spent = [SpentLimit { scope: LimitScope::Unnamed, left: Duration::from_secs(5) }];
        for headers in [
            json!({"X-RateLimit-Limit": "50", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": at.to_string()}),
            json!({"x-ratelimit-remaining": 0, "x-ratelimit-reset": at}),
        ] {
            assert_eq!(of_error(&error(headers.clone()), LimitedReply::Answer, now()), spent, "{headers}");
        }
        for wrong in [json!(7), json!([]), json!({"X-RateLimit-Remaining": {}}), Value::Null] {
            assert_eq!(of_error(&error(wrong.clone()), LimitedReply::Answer, now()), [], "{wrong}");
        }
        assert_eq!(of_error(&Value::Null, LimitedReply::Answer, now()), []);
    }
}
