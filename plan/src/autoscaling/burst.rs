//! The incident in which a queue grew from 5 to 20: a deployment that one replica just serves gets twice the requests for
//! some minutes. Second by second, without a clock: requests come and are answered, gateways report every 15 s, a replica takes
//! its time to start, and the decisions are those of [`scale`].

use std::collections::VecDeque;

use russet_crds::{DEMAND_INTERVAL, Day};

use super::*;
use crate::demand_history::HourOfWeek;

/// Requests that a replica answers at a time (`kv.maxSequences`), and how long each takes.
const SLOTS: usize = 4;
const ANSWER_SECONDS: i64 = 10;
/// From the decision to a replica that answers.
const START_SECONDS: i64 = 40;
/// When twice as many requests begin to come, and when that ends.
const BURST: std::ops::Range<i64> = 300..375;
const END: i64 = 1200;

/// What clients saw.
#[derive(Debug)]
struct Outcome {
    /// From the arrival of requests to the ends of their answers, sorted, in seconds.
    latencies: Vec<i64>,
    longest_queue: usize,
    /// Seconds in which a replica was there, all together.
    replica_seconds: i64,
}

impl Outcome {
    fn p95(&self) -> i64 {
        self.latencies[self.latencies.len() * 95 / 100]
    }
}

/// Every third second a request comes, and in the burst two.
fn arrivals(second: i64) -> usize {
    match second % 3 {
        0 if BURST.contains(&second) => 2,
        0 => 1,
        _ => 0,
    }
}

fn incident(rules: &Autoscaling, expected: Option<ExpectedDemand>) -> Outcome {
    let mut memory = ScalingHistory::default();
    let mut ready: usize = 1;
    // When replicas that were asked for answer.
    let mut starting: VecDeque<i64> = VecDeque::new();
    // Arrivals of requests that wait, and arrivals and ends of those that run.
    let mut queue: VecDeque<i64> = VecDeque::new();
    let mut running: Vec<(i64, i64)> = Vec::new();
    let mut reported = DemandSummary::default();
    let mut seen = Outcome { latencies: Vec::new(), longest_queue: 0, replica_seconds: 0 };
    for second in 0..END {
        running.retain(|(arrived, ends)| {
            let over = *ends <= second;
            if over {
                seen.latencies.push(second - arrived);
            }
            !over
        });
        queue.extend(std::iter::repeat_n(second, arrivals(second)));
        while starting.front().is_some_and(|at| *at <= second) {
            starting.pop_front();
            ready += 1;
        }
        while running.len() < ready * SLOTS
            && let Some(arrived) = queue.pop_front()
        {
            running.push((arrived, second + ANSWER_SECONDS));
        }
        seen.longest_queue = seen.longest_queue.max(queue.len());
        // The gateway has sent what waits to an engine: both are active.
        if second % i64::try_from(DEMAND_INTERVAL.as_secs()).unwrap() == 0 {
            let active = u32::try_from(queue.len() + running.len()).unwrap();
            reported = DemandSummary { active, idle_for: Some(Duration::ZERO), ..DemandSummary::default() };
        }
        let replicas = ready + starting.len();
        let input = ScalingInput {
            replicas: i32::try_from(replicas).unwrap(),
            ready_for: Some(Duration::from_secs(3600)),
            settled: starting.is_empty(),
            demand: reported,
            expected: expected.filter(|_| (BURST.start - 60..BURST.end).contains(&second)),
            by_history: false,
        };
        let now = Timestamp::from_second(second).unwrap();
        let wanted = usize::try_from(scale(rules, &input, &mut memory, now, |all| all).replicas).unwrap();
        starting.extend(std::iter::repeat_n(second + START_SECONDS, wanted.saturating_sub(replicas)));
        // One that goes gives its requests to the others; by then they have room.
        ready -= replicas.saturating_sub(wanted).min(ready);
        seen.replica_seconds += i64::try_from(ready + starting.len()).unwrap();
    }
    seen.latencies.sort_unstable();
    seen
}

fn bounds(max_replicas: i32) -> Autoscaling {
    Autoscaling {
        min_replicas: 1,
        max_replicas,
        target_queue: 4,
        idle_seconds: 600,
        ..Autoscaling::default()
    }
}

#[test]
fn two_replicas_by_demand_keep_a_queue_of_20_short() {
    let hour = HourOfWeek { day: Day::Mon, hour: 9 };
    let history = ExpectedDemand { replicas: 2, hour, weeks: 3 };
    let one = incident(&bounds(1), None);
    let by_demand = incident(&bounds(2), None);
    let by_history = incident(&bounds(2), Some(history));
    for (name, seen) in
        [("one replica", &one), ("two by demand", &by_demand), ("two by demand and history", &by_history)]
    {
        println!(
            "{name}: p95 {} s, longest queue {}, {} replica seconds",
            seen.p95(),
            seen.longest_queue,
            seen.replica_seconds
        );
    }
    // The story: one replica lets the queue grow to 20.
    assert!(one.longest_queue >= 20, "{one:?}");
    // The bound: a report, and then two answers, one's own and that of another. With one replica alone it does not hold.
    let report = i64::try_from(DEMAND_INTERVAL.as_secs()).unwrap();
    let bound = report + 2 * ANSWER_SECONDS;
    assert!(by_demand.p95() <= bound && one.p95() > bound, "{bound} s: {by_demand:?}, {one:?}");
    assert!(by_demand.longest_queue < one.longest_queue);
    // With the history the second one is there before: nobody waits longer than for the answer of another.
    assert!(by_history.p95() <= 2 * ANSWER_SECONDS, "{by_history:?}");
    // And it costs no second replica for longer than the burst, the five minutes and its start.
    let most = END + (BURST.end - BURST.start) + 60 + 300 + 2 * report + START_SECONDS;
    assert!(by_history.replica_seconds <= most, "{by_history:?}");
}
