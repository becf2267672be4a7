//! Demand for a deployment: the entries of its gateways, combined. The last entry of a gateway that is gone
//! expires soon.

use std::time::Duration;

use jiff::Timestamp;
use russet_crds::{DEMAND_INTERVAL, GatewayDemand};

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
    /// Time to first token in milliseconds, of the gateway with the slowest.
    pub ttft_milliseconds: Option<u32>,
}

/// Combines the entries of `ModelDeployment.status.demand` at `now`.
pub fn summarize(demand: &[GatewayDemand], now: Timestamp) -> DemandSummary {
    let mut summary = DemandSummary::default();
    for GatewayDemand { gateway: _, reported_at, last_request_time, waiting, active, ttft_milliseconds } in
        demand
    {
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
        if let Some(idle_for) = idle_for {
            summary.idle_for = Some(summary.idle_for.map_or(idle_for, |least| least.min(idle_for)));
        }
    }
    summary
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
            let expected = DemandSummary { waiting, active, idle_for, ttft_milliseconds: ttft };
            assert_eq!(summarize(&entries, at(NOW)), expected, "{story}");
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
