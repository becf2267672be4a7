//! Demand for a deployment: the entries of its gateways, combined. The last entry of a gateway that is gone
//! expires soon.

use std::time::Duration;

use jiff::Timestamp;
use russet_crds::{DEMAND_INTERVAL, GatewayDemand, KeepAliveDemand};

/// Time to live of an entry's requests: four times its gateway's interval.
const DEMAND_TTL: Duration = DEMAND_INTERVAL.saturating_mul(4);

/// Demand of all gateways together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DemandSummary {
    /// Requests held until a replica is ready.
    pub waiting: u32,
    /// Requests running on replicas.
    pub active: u32,
    /// Time since the last request, zero while there are any; `None` if there never was one.
    pub idle_for: Option<Duration>,
    /// The same of callers whose last request has no `keep_alive`.
    pub default_idle_for: Option<Duration>,
    /// How long the other callers want it to stay from now on; `None` where there is none.
    pub keep_for: Option<Duration>,
    /// Time to first token in milliseconds, of the gateway with the slowest.
    pub ttft_milliseconds: Option<u32>,
}

impl DemandSummary {
    /// How long a deployment stays without further requests that may be idle for `idle`, or for `max_idle` where a
    /// request says so, and that has been ready for so long; `None` where none of these is known.
    pub fn stays_for(
        &self,
        idle: Duration,
        max_idle: Duration,
        ready_for: Option<Duration>,
    ) -> Option<Duration> {
        let by_default = self.default_idle_for.map(|idle_for| idle.saturating_sub(idle_for));
        let longest = max_idle.saturating_sub(self.idle_for.unwrap_or_default());
        let by_keep_alive = self.keep_for.map(|keep_for| keep_for.min(longest));
        // A replica that nobody asked yet stays as long as one that was asked when it became ready. Callers that all
        // say how long they want it need no such default.
        let ready_for = ready_for.filter(|_| self.default_idle_for.is_some() || self.keep_for.is_none());
        let since_ready = ready_for.map(|ready_for| idle.saturating_sub(ready_for));
        [by_default, by_keep_alive, since_ready].into_iter().flatten().max()
    }
}

/// Combines the entries of `ModelDeployment.status.demand` at `now`.
pub fn summarize(demand: &[GatewayDemand], now: Timestamp) -> DemandSummary {
    let mut summary = DemandSummary::default();
    let least = |one: Option<Duration>, other: Option<Duration>| one.into_iter().chain(other).min();
    for entry in demand {
        let GatewayDemand {
            gateway: _,
            reported_at,
            last_request_time,
            waiting,
            active,
            ttft_milliseconds,
            keep_alive,
        } = entry;
        let fresh = age(reported_at.0, now) <= DEMAND_TTL;
        if fresh {
            summary.waiting = summary.waiting.saturating_add(*waiting);
            summary.active = summary.active.saturating_add(*active);
            summary.ttft_milliseconds = summary.ttft_milliseconds.max(*ttft_milliseconds);
        }
        let idle_for = match last_request_time {
            _ if fresh && waiting.saturating_add(*active) > 0 => Some(Duration::ZERO),
            Some(last) => Some(age(last.0, now)),
            None => None,
        };
        let default_idle_for = match keep_alive {
            Some(KeepAliveDemand { until, other_request_time }) => {
                summary.keep_for = summary.keep_for.max(Some(age(now, until.0)));
                other_request_time.as_ref().map(|other| age(other.0, now))
            }
            None => idle_for,
        };
        summary.idle_for = least(summary.idle_for, idle_for);
        summary.default_idle_for = least(summary.default_idle_for, default_idle_for);
    }
    summary
}

/// When gateways last had a request, and when one last reported that it has some, as they say.
pub fn last_times(demand: &[GatewayDemand]) -> (Option<Timestamp>, Option<Timestamp>) {
    let requests =
        demand.iter().filter_map(|entry| entry.last_request_time.as_ref()).map(|time| time.0).max();
    let busy = demand.iter().filter(|entry| entry.waiting > 0 || entry.active > 0);
    (requests, busy.map(|entry| entry.reported_at.0).max())
}

/// When entries with requests expire unless renewed; no watch event announces that.
pub fn until_stale(demand: &[GatewayDemand], now: Timestamp) -> Option<Duration> {
    let says = demand.iter().filter(|one| one.waiting > 0 || one.active > 0);
    let ages = says.map(|one| age(one.reported_at.0, now));
    // A moment later: an entry is valid up to and including its last instant.
    ages.filter_map(|age| Some(DEMAND_TTL.checked_sub(age)? + Duration::from_millis(1))).min()
}

/// Clocks differ: an entry from the future counts as new.
fn age(then: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(then)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const NOW: i64 = 100_000;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// An entry written, and last requested, this many seconds ago.
    fn entry(
        reported: i64,
        asked: Option<i64>,
        waiting: u32,
        active: u32,
        ttft: Option<u32>,
    ) -> GatewayDemand {
        let entry = json!({
            "gateway": "g", "reportedAt": at(NOW - reported), "lastRequestTime": asked.map(|ago| at(NOW - ago)),
            "waiting": waiting, "active": active, "ttftMilliseconds": ttft,
        });
        serde_json::from_value(entry).unwrap()
    }

    #[test]
    fn gateways_add_up_and_those_that_are_gone_do_not_count() {
        for (story, entries, waiting, active, idle_for, ttft) in [
            ("nobody ever asked", vec![], 0, 0, None, None),
            ("a gateway that had none", vec![entry(5, None, 0, 0, None)], 0, 0, None, None),
            ("one waits", vec![entry(5, Some(5), 1, 0, None)], 1, 0, Some(0), None),
            ("one is answered", vec![entry(15, Some(15), 0, 1, Some(80))], 0, 1, Some(0), Some(80)),
            (
                "two gateways",
                vec![entry(9, Some(9), 2, 3, Some(80)), entry(1, Some(1), 1, 4, Some(50))],
                3,
                7,
                Some(0),
                Some(80),
            ),
            ("done a while ago", vec![entry(700, Some(705), 0, 0, Some(90))], 0, 0, Some(705), None),
            (
                "the one asked last counts",
                vec![entry(700, Some(700), 0, 0, None), entry(30, Some(40), 0, 0, None)],
                0,
                0,
                Some(40),
                None,
            ),
            ("still fresh after a minute", vec![entry(60, Some(60), 1, 1, None)], 1, 1, Some(0), None),
            ("a gateway died with requests", vec![entry(61, Some(61), 9, 9, Some(70))], 0, 0, Some(61), None),
            ("its clock is ahead", vec![entry(-500, Some(-500), 1, 0, None)], 1, 0, Some(0), None),
            ("its clock was ahead", vec![entry(-500, Some(-500), 0, 0, None)], 0, 0, Some(0), None),
        ] {
            let idle_for = idle_for.map(Duration::from_secs);
            let expected = DemandSummary {
                waiting,
                active,
                idle_for,
                default_idle_for: idle_for,
                keep_for: None,
                ttft_milliseconds: ttft,
            };
            assert_eq!(summarize(&entries, at(NOW)), expected, "{story}");
        }
    }

    #[test]
    fn a_keep_alive_counts_for_the_callers_that_say_it() {
        // Until when, and when another caller asked last, in seconds from now.
        let keeps = |reported: i64, until: i64, other: Option<i64>| {
            let keep_alive =
                json!({"until": at(NOW + until), "otherRequestTime": other.map(|ago| at(NOW - ago))});
            GatewayDemand {
                keep_alive: Some(serde_json::from_value(keep_alive).unwrap()),
                ..entry(reported, Some(reported), 0, 0, None)
            }
        };
        let hour = Some(3600);
        for (story, entries, ready, stays) in [
            ("nobody ever asked", vec![], None, None),
            ("nobody ever asked since it is ready", vec![], Some(200), Some(400)),
            ("no keep_alive", vec![entry(100, Some(100), 0, 0, None)], hour, Some(500)),
            ("unloaded", vec![keeps(10, -10, None)], hour, Some(0)),
            ("unloaded as soon as it was ready", vec![keeps(1, -1, None)], Some(2), Some(0)),
            ("unloaded by one of two", vec![keeps(10, -10, Some(100))], hour, Some(500)),
            (
                "unloaded at one of two gateways",
                vec![keeps(10, -10, None), entry(100, Some(100), 0, 0, None)],
                hour,
                Some(500),
            ),
            ("shorter", vec![keeps(10, 20, None)], hour, Some(20)),
            ("longer", vec![keeps(10, 1800, None)], hour, Some(1800)),
            ("longer than it may", vec![keeps(10, 1_000_000, None)], hour, Some(7190)),
            (
                "longer at the gateway asked first",
                vec![keeps(500, 1000, None), keeps(10, 5, None)],
                hour,
                Some(1000),
            ),
        ] {
            let seconds = Duration::from_secs;
            let summary = summarize(&entries, at(NOW));
            let found = summary.stays_for(seconds(600), seconds(7200), ready.map(seconds));
            assert_eq!(found, stays.map(seconds), "{story}");
        }
    }

    #[test]
    fn demand_knows_when_its_next_entry_goes_stale() {
        let entries = [entry(20, Some(20), 0, 0, None), entry(10, Some(10), 1, 0, None)];
        let until = until_stale(&entries, at(NOW)).unwrap();
        let later = at(NOW) + until;
        assert_eq!(summarize(&entries, at(NOW)).waiting, 1);
        assert_eq!(summarize(&entries, later).waiting, 0);
        assert_eq!(until_stale(&entries[..1], at(NOW)), None);
        assert_eq!(until_stale(&entries, later), None);
    }
}
