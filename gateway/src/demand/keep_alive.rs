//! How long requests want a deployment to stay loaded after them: Ollama's `keep_alive`. Of each caller the last request
//! counts, so that one caller's wish ends no other's. Not here: that a deployment which scales to zero does so (`plan`).

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use russet_crds::KeepAliveDemand;

use crate::routes::IdleLimits;

/// Callers of a deployment that are distinguished; all further ones count as one.
const MAX_CALLERS: usize = 1000;
/// The end of `keep_alive: -1`, in seconds since 1970: the year 2200, near enough for dates everywhere.
const FOREVER: i64 = 7_258_118_400;

/// The last request of each caller of one deployment.
#[derive(Clone, Debug, Default)]
pub(super) struct KeepAlives {
    callers: BTreeMap<String, LastRequest>,
}

#[derive(Clone, Copy, Debug)]
struct LastRequest {
    ended: Timestamp,
    keep_alive: Option<Duration>,
}

impl KeepAlives {
    /// A request of this caller ended; `keep_alive` is its own, if it has one.
    pub(super) fn ended(&mut self, caller: &str, ended: Timestamp, keep_alive: Option<Duration>) {
        let known = self.callers.len() < MAX_CALLERS || self.callers.contains_key(caller);
        let caller = if known { caller } else { "" };
        self.callers.insert(caller.to_owned(), LastRequest { ended, keep_alive });
    }

    /// What is reported to the cluster; `None` where no caller's last request has a `keep_alive`.
    pub(super) fn report(&self) -> Option<KeepAliveDemand> {
        let ends = self.callers.values().filter_map(|last| Some(end(last.ended, last.keep_alive?)));
        let until = ends.max()?;
        let others = self.callers.values().filter(|last| last.keep_alive.is_none());
        let other_request_time = others.map(|last| Time(last.ended)).max_by_key(|time| time.0);
        Some(KeepAliveDemand { until: Time(until), other_request_time })
    }

    /// When the deployment scales to zero unless there are further requests; `None` where no request has ended.
    pub(super) fn expires(&self, limits: IdleLimits) -> Option<Timestamp> {
        let IdleLimits { idle, max_idle } = limits;
        let last = self.callers.values().map(|last| last.ended).max()?;
        let latest = end(last, max_idle);
        let end = |one: &LastRequest| match one.keep_alive {
            Some(keep_alive) => end(one.ended, keep_alive).min(latest),
            None => end(one.ended, idle),
        };
        self.callers.values().map(end).max()
    }
}

/// So long after this, in seconds that are full.
fn end(start: Timestamp, after: Duration) -> Timestamp {
    let seconds = i64::try_from(after.as_secs()).unwrap_or(i64::MAX);
    let second = start.as_second().saturating_add(seconds).min(FOREVER);
    Timestamp::from_second(second).unwrap_or(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn seconds(seconds: u64) -> Option<Duration> {
        Some(Duration::from_secs(seconds))
    }

    #[test]
    fn last_request_of_each_caller_says_how_long_a_model_stays() {
        // Caller, second of its request's end, its keep_alive.
        type Ask = (&'static str, i64, Option<Duration>);
        let found = |asks: &[Ask]| {
            let mut keep_alives = KeepAlives::default();
            for (caller, second, keep_alive) in asks {
                keep_alives.ended(caller, at(*second), *keep_alive);
            }
            let limits = IdleLimits { idle: Duration::from_secs(600), max_idle: Duration::from_secs(3600) };
            let report = keep_alives.report().map(|report| {
                let other = report.other_request_time.map(|time| time.0.as_second());
                (report.until.0.as_second(), other)
            });
            (report, keep_alives.expires(limits).map(Timestamp::as_second))
        };
        for (story, asks, report, expires) in [
            ("nobody asked", vec![], None, None),
            ("nobody says it", vec![("a", 100, None), ("b", 50, None)], None, Some(700)),
            ("shorter than usual", vec![("a", 100, seconds(5))], Some((105, None)), Some(105)),
            ("unloaded", vec![("a", 100, None), ("a", 200, seconds(0))], Some((200, None)), Some(200)),
            (
                "unloaded by another",
                vec![("b", 100, None), ("a", 200, seconds(0))],
                Some((200, Some(100))),
                Some(700),
            ),
            ("said once, and then no more", vec![("a", 100, seconds(9)), ("a", 200, None)], None, Some(800)),
            ("longer, as long as it may", vec![("a", 100, seconds(9000))], Some((9100, None)), Some(3700)),
            ("for ever", vec![("a", 100, Some(Duration::MAX))], Some((FOREVER, None)), Some(3700)),
        ] {
            assert_eq!(found(&asks), (report, expires), "{story}");
        }
    }

    #[test]
    fn callers_beyond_the_bound_count_as_one() {
        let mut keep_alives = KeepAlives::default();
        for caller in 0..MAX_CALLERS as i64 {
            keep_alives.ended(&format!("k{caller}"), at(caller), seconds(0));
        }
        keep_alives.ended("late", at(5000), None);
        keep_alives.ended("later", at(6000), seconds(1));
        assert_eq!(keep_alives.callers.len(), MAX_CALLERS + 1);
        assert_eq!(keep_alives.report().unwrap().until.0, at(6001));
        keep_alives.ended("k0", at(7000), seconds(0));
        assert_eq!(keep_alives.report().unwrap().until.0, at(7000));
    }
}
