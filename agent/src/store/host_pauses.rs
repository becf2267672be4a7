//! Pauses that hosts ask for (429, 503): one per host for everything that this agent reads there, so that a hub that
//! asks one copy to wait is not asked by the next. Pure but for the lock.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use jiff::fmt::rfc2822;
use reqwest::Url;
use reqwest::header::{DATE, HeaderMap, RETRY_AFTER};

/// Longest pause that is honoured: rates of hubs are counted over minutes, and a wrong date must not end a download.
const MAX_PAUSE: Duration = Duration::from_secs(3600);
/// Longest pause after refusals without a time; it doubles from one second.
const MAX_UNTIMED_PAUSE: Duration = Duration::from_secs(60);
/// Hosts that are remembered: more than any cluster's models are at, and few bytes.
const MAX_HOSTS: usize = 1024;

/// The hosts that asked for a pause.
#[derive(Clone, Debug, Default)]
pub(super) struct HostPauses(Arc<Mutex<BTreeMap<String, HostPause>>>);

#[derive(Clone, Copy, Debug)]
struct HostPause {
    until: Instant,
    /// Refusals in a row.
    refusals: u32,
}

impl HostPauses {
    /// Time until the host of `url` may be asked again, if it asked for a pause.
    pub fn left(&self, url: &Url, now: Instant) -> Option<Duration> {
        let pauses = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let until = pauses.get(&host(url))?.until;
        Some(until.saturating_duration_since(now)).filter(|left| !left.is_zero())
    }

    /// Records that the host of `url` refused a request for now; returns the pause.
    pub fn refused(&self, url: &Url, headers: &HeaderMap, now: Instant) -> Duration {
        let asked = pause(headers, Timestamp::now());
        let mut pauses = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if pauses.len() >= MAX_HOSTS {
            pauses.retain(|_, pause| pause.until > now);
        }
        let known = pauses.get(&host(url)).copied();
        let refusals = known.map_or(0, |pause| pause.refusals);
        let untimed = Duration::from_secs(1 << refusals.min(6)).min(MAX_UNTIMED_PAUSE);
        let mut until = now + asked.unwrap_or(untimed);
        // Answers of requests that were on their way together shorten no pause, and count once.
        if let Some(known) = known.filter(|known| known.until > now) {
            until = until.max(known.until);
        }
        let refusals = if known.is_some_and(|known| known.until > now) { refusals } else { refusals + 1 };
        if pauses.len() < MAX_HOSTS {
            pauses.insert(host(url), HostPause { until, refusals });
        }
        until - now
    }

    /// Records that the host of `url` answered.
    pub fn answered(&self, url: &Url, now: Instant) {
        let mut pauses = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if pauses.get(&host(url)).is_some_and(|pause| pause.until <= now) {
            pauses.remove(&host(url));
        }
    }
}

fn host(url: &Url) -> String {
    url.origin().ascii_serialization()
}

/// The pause that a response asks for: `Retry-After` in seconds or as a date, otherwise the time until the spent quota of
/// `RateLimit` (the IETF's draft) is renewed.
fn pause(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    let retry_after = text(RETRY_AFTER.as_str()).and_then(|after| match after.parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => {
            let at = date(after)?;
            // Clocks differ: the host's own counts.
            let now = text(DATE.as_str()).and_then(date).unwrap_or(now);
            Duration::try_from(at.duration_since(now)).ok()
        }
    });
    let asked = retry_after.or_else(|| rate_limit(text("ratelimit")?));
    asked
        .or_else(|| text("ratelimit-reset")?.parse().ok().map(Duration::from_secs))
        .map(|it| it.min(MAX_PAUSE))
}

fn date(text: &str) -> Option<Timestamp> {
    rfc2822::parse(text).ok().map(|date| date.timestamp())
}

/// The time in `"api";r=0;t=7`: of several quotas the longest among those that are spent.
fn rate_limit(text: &str) -> Option<Duration> {
    let quotas: Vec<(Option<u64>, u64)> = text
        .split(',')
        .filter_map(|quota| {
            let value = |name: &str| {
                quota.split(';').skip(1).find_map(|part| {
                    let (key, value) = part.split_once('=')?;
                    (key.trim() == name).then(|| value.trim().parse::<u64>().ok())?
                })
            };
            Some((value("r"), value("t")?))
        })
        .collect();
    let spent = quotas.iter().filter(|(left, _)| *left == Some(0)).map(|(_, time)| *time).max();
    spent.or_else(|| quotas.iter().map(|(_, time)| *time).max()).map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| ((*name).try_into().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn pause_is_read_from_seconds_dates_and_rate_limits() {
        let now: Timestamp = "2026-11-25T10:00:00Z".parse().unwrap();
        for (pairs, seconds) in [
            (&[("retry-after", "7")][..], Some(7)),
            (&[("retry-after", "Wed, 25 Nov 2026 10:05:00 GMT")], Some(300)),
            // The host's clock is an hour ahead.
            (
                &[
                    ("retry-after", "Wed, 25 Nov 2026 11:05:00 GMT"),
                    ("date", "Wed, 25 Nov 2026 11:00:00 GMT"),
                ],
                Some(300),
            ),
            (&[("retry-after", "Wed, 25 Nov 2026 09:00:00 GMT")], None),
            (&[("retry-after", "Thu, 26 Nov 2026 10:00:00 GMT")], Some(3600)),
            (&[("retry-after", "999999999999")], Some(3600)),
            (&[("retry-after", "soon")], None),
            (&[("ratelimit", r#""api";r=0;t=7"#)], Some(7)),
            (&[("ratelimit", r#""pages";r=50;t=90, "api"; r=0; t=12"#)], Some(12)),
            (&[("ratelimit", r#""api";r=3;t=9"#)], Some(9)),
            (&[("ratelimit", "nonsense")], None),
            (&[("ratelimit", "nonsense"), ("ratelimit-reset", "5")], Some(5)),
            (&[("retry-after", "3"), ("ratelimit", r#""api";r=0;t=7"#)], Some(3)),
            (&[], None),
        ] {
            assert_eq!(pause(&headers(pairs), now).map(|it| it.as_secs()), seconds, "{pairs:?}");
        }
    }

    #[test]
    fn pause_of_a_host_is_one_and_grows_without_a_time() {
        let pauses = HostPauses::default();
        let [one, other] = ["https://hub/a", "https://mirror/a"].map(|url| Url::parse(url).unwrap());
        let nothing = HeaderMap::new();
        let (mut seen, mut now) = (Vec::new(), Instant::now());
        for _ in 0..8 {
            assert_eq!(pauses.left(&one, now), None);
            let pause = pauses.refused(&one, &nothing, now);
            // Another request was on its way; its answer, or one that is good, ends no pause.
            assert_eq!(pauses.refused(&one, &nothing, now), pause);
            pauses.answered(&one, now);
            assert_eq!((pauses.left(&one, now), pauses.left(&other, now)), (Some(pause), None));
            seen.push(pause.as_secs());
            now += pause;
        }
        assert_eq!(seen, [1, 2, 4, 8, 16, 32, 60, 60]);
        pauses.answered(&one, now);
        assert_eq!(pauses.refused(&one, &nothing, now).as_secs(), 1);
    }
}
