//! Stories of a deployment that scales with its demand, one evaluation per line.

use russet_crds::Day;

use super::*;
use crate::demand_history::HourOfWeek;

/// 0 or 1 to 4 replicas, 2 requests each, slow beyond 500 ms, scaled to zero after 600 s.
fn rules(min: i32) -> Autoscaling {
    Autoscaling {
        min_replicas: min,
        max_replicas: 4,
        target_queue: 2,
        target_ttft_milliseconds: Some(500),
        idle_seconds: 600,
        max_idle_seconds: None,
        predictive: None,
    }
}

/// One evaluation: second, input, and expected result.
struct ScalingStep {
    at: i64,
    seen: ScalingInput,
    room: i32,
    then: (i32, Reason),
}

/// All desired replicas have been ready for an hour.
fn runs(replicas: i32, waiting: u32, active: u32) -> ScalingInput {
    let idle_for = (waiting + active > 0).then_some(Duration::ZERO).or(Some(Duration::from_secs(1)));
    let demand =
        DemandSummary { waiting, active, idle_for, default_idle_for: idle_for, ..DemandSummary::default() };
    ScalingInput {
        replicas,
        ready_for: Some(Duration::from_secs(3600)),
        settled: true,
        demand,
        expected: None,
        by_history: false,
    }
}

fn scaling_step(at: i64, seen: ScalingInput, replicas: i32, reason: Reason) -> ScalingStep {
    ScalingStep { at, seen, room: 64, then: (replicas, reason) }
}

fn idle(replicas: i32, seconds: u64) -> ScalingInput {
    let mut seen = runs(replicas, 0, 0);
    seen.demand.idle_for = Some(Duration::from_secs(seconds));
    seen.demand.default_idle_for = seen.demand.idle_for;
    seen
}

/// One replica, whose only caller asked so many seconds ago and wants it for so many more.
fn kept(asked: u64, keep_for: u64) -> ScalingInput {
    let mut seen = idle(1, asked);
    seen.demand.default_idle_for = None;
    seen.demand.keep_for = Some(Duration::from_secs(keep_for));
    seen
}

fn slow(replicas: i32, millis: u32) -> ScalingInput {
    let mut seen = runs(replicas, 0, 1);
    seen.demand.ttft_milliseconds = Some(millis);
    seen
}

fn loads(seen: ScalingInput) -> ScalingInput {
    ScalingInput { settled: false, ..seen }
}

/// No replica is ready yet.
fn starts(seen: ScalingInput) -> ScalingInput {
    ScalingInput { ready_for: None, settled: false, ..seen }
}

fn asleep(waiting: u32) -> ScalingInput {
    let mut seen = starts(runs(0, waiting, 0));
    seen.settled = true;
    seen
}

/// Evaluates the steps of a story, one after the other.
fn check(story: &str, min: i32, looks: Vec<ScalingStep>) {
    let mut memory = ScalingHistory::default();
    for ScalingStep { at, seen, room, then } in looks {
        let now = Timestamp::from_second(at).unwrap();
        let ScalingDecision { replicas, reason, message, .. } =
            scale(&rules(min), &seen, &mut memory, now, |replicas| replicas.min(room));
        assert_eq!((replicas, reason), then, "{story}, at {at}: {message}");
    }
}

#[test]
fn replicas_follow_demand_between_their_bounds() {
    use Reason::{Idle, NothingFits, ScaledByDemand as Demand, ScalingDisabled};
    for (story, min, looks) in [
        ("nothing to do", 1, vec![scaling_step(0, runs(1, 0, 2), 1, Demand)]),
        ("up at once, by as many as are needed", 1, vec![scaling_step(0, runs(1, 3, 2), 3, Demand)]),
        ("never beyond the most", 1, vec![scaling_step(0, runs(1, 900, 4), 4, Demand)]),
        ("never below the fewest", 2, vec![scaling_step(0, runs(1, 0, 0), 2, Demand)]),
        ("the most became fewer", 1, vec![scaling_step(0, runs(9, 90, 4), 4, Demand)]),
        (
            "up no further than fits, and once it fits, further",
            1,
            vec![
                ScalingStep { room: 2, ..scaling_step(0, runs(1, 8, 0), 2, NothingFits) },
                ScalingStep { room: 2, ..scaling_step(9, loads(runs(2, 8, 0)), 2, NothingFits) },
                scaling_step(18, runs(2, 8, 0), 4, Demand),
            ],
        ),
        (
            "nothing fits, nothing goes",
            1,
            vec![ScalingStep { room: 0, ..scaling_step(0, runs(3, 8, 0), 3, NothingFits) }],
        ),
        (
            "what loads is not counted twice",
            1,
            vec![scaling_step(0, runs(1, 6, 0), 3, Demand), scaling_step(5, loads(runs(3, 6, 0)), 3, Demand)],
        ),
        (
            "down after five minutes, to the most that was needed",
            1,
            vec![
                scaling_step(0, runs(4, 0, 2), 4, Demand),
                scaling_step(100, runs(4, 0, 4), 4, Demand),
                scaling_step(299, runs(4, 0, 1), 4, Demand),
                scaling_step(300, runs(4, 0, 1), 2, Demand),
                scaling_step(301, runs(2, 0, 1), 2, Demand),
                scaling_step(601, runs(2, 0, 1), 1, Demand),
            ],
        ),
        (
            "a moment of need begins the five minutes anew",
            1,
            vec![
                scaling_step(0, runs(2, 0, 1), 2, Demand),
                scaling_step(200, runs(2, 0, 4), 2, Demand),
                scaling_step(301, runs(2, 0, 1), 2, Demand),
                scaling_step(600, runs(2, 0, 1), 2, Demand),
                scaling_step(601, runs(2, 0, 1), 1, Demand),
            ],
        ),
        (
            "asleep after idleSeconds, however many there are",
            0,
            vec![
                scaling_step(0, idle(2, 599), 2, Demand),
                scaling_step(1, idle(2, 600), 0, Idle),
                scaling_step(2, asleep(0), 0, Idle),
            ],
        ),
        (
            "asleep at once, when its only caller wants it no more",
            0,
            vec![scaling_step(0, kept(5, 1), 1, Demand), scaling_step(1, kept(6, 0), 0, Idle)],
        ),
        ("a keep_alive beyond idleSeconds adds nothing", 0, vec![scaling_step(0, kept(600, 900), 0, Idle)]),
        ("with at least one no keep_alive counts", 1, vec![scaling_step(0, kept(5, 0), 1, Demand)]),
        ("woken by one that waits", 0, vec![scaling_step(0, asleep(1), 1, Demand)]),
        ("woken by many", 0, vec![scaling_step(0, asleep(5), 3, Demand)]),
        (
            "woken though there is no room, so that the planner says why",
            0,
            vec![ScalingStep { room: 0, ..scaling_step(0, asleep(5), 1, NothingFits) }],
        ),
        (
            "it does not sleep while it loads, whoever asked gave up",
            0,
            vec![scaling_step(0, starts(idle(1, 9000)), 1, Demand)],
        ),
        (
            "it does not sleep right after it woke",
            0,
            vec![scaling_step(
                0,
                ScalingInput { ready_for: Some(Duration::from_secs(599)), ..idle(1, 9000) },
                1,
                Demand,
            )],
        ),
        ("with at least one it never sleeps", 1, vec![scaling_step(0, idle(1, 9000), 1, Demand)]),
        ("a person stopped it", 1, vec![scaling_step(0, asleep(7), 0, ScalingDisabled)]),
        (
            "slow first tokens: one more a minute, once all answer",
            1,
            vec![
                scaling_step(0, slow(1, 501), 2, Demand),
                scaling_step(1, loads(slow(2, 900)), 2, Demand),
                scaling_step(100, loads(slow(2, 900)), 2, Demand),
                scaling_step(159, slow(2, 900), 2, Demand),
                scaling_step(160, slow(2, 900), 3, Demand),
            ],
        ),
        ("quick enough", 1, vec![scaling_step(0, slow(1, 500), 1, Demand)]),
        (
            "none goes while first tokens are slow",
            1,
            vec![
                scaling_step(0, loads(slow(3, 900)), 3, Demand),
                scaling_step(301, loads(slow(3, 900)), 3, Demand),
            ],
        ),
    ] {
        check(story, min, looks);
    }
}

/// With so many replicas that the last weeks let expect.
fn expects(replicas: i32, seen: ScalingInput) -> ScalingInput {
    let hour = HourOfWeek { day: Day::Tue, hour: 14 };
    ScalingInput { expected: Some(ExpectedDemand { replicas, hour, weeks: 3 }), ..seen }
}

#[test]
fn replicas_are_there_when_the_last_weeks_needed_them() {
    use Reason::{Idle, NothingFits, ScaledByDemand as Demand, ScaledByHistory as History, ScalingDisabled};
    for (story, min, looks) in [
        ("started before anybody asks", 0, vec![scaling_step(0, expects(1, asleep(0)), 1, History)]),
        ("as many as were needed", 0, vec![scaling_step(0, expects(3, asleep(0)), 3, History)]),
        ("never beyond maxReplicas", 0, vec![scaling_step(0, expects(9, asleep(0)), 4, History)]),
        (
            "kept without requests, and gone when the hours are over",
            0,
            vec![
                scaling_step(0, expects(1, idle(1, 9000)), 1, History),
                scaling_step(3600, idle(1, 9000), 0, Idle),
            ],
        ),
        (
            "as many as fit, the rest later",
            0,
            vec![
                ScalingStep { room: 1, ..scaling_step(0, expects(2, asleep(0)), 1, History) },
                ScalingStep { room: 1, ..scaling_step(9, expects(2, idle(1, 9000)), 1, NothingFits) },
                scaling_step(39, expects(2, idle(1, 9000)), 2, History),
            ],
        ),
        (
            "where none fits it starts none, and so preempts nobody",
            0,
            vec![ScalingStep { room: 0, ..scaling_step(0, expects(1, asleep(0)), 0, NothingFits) }],
        ),
        (
            "a request does, then",
            0,
            vec![ScalingStep { room: 0, ..scaling_step(0, expects(1, asleep(1)), 1, Demand) }],
        ),
        ("demand beyond it decides", 0, vec![scaling_step(0, expects(2, runs(1, 6, 0)), 3, Demand)]),
        ("demand that equals it too", 0, vec![scaling_step(0, expects(1, runs(1, 0, 1)), 1, Demand)]),
        ("it adds to the fewest", 1, vec![scaling_step(0, expects(2, runs(1, 0, 1)), 2, History)]),
        ("and is none of them", 2, vec![scaling_step(0, expects(2, runs(2, 0, 1)), 2, Demand)]),
        (
            "beyond the fewest they go as others do",
            1,
            vec![scaling_step(0, runs(2, 0, 0), 2, Demand), scaling_step(300, runs(2, 0, 0), 1, Demand)],
        ),
        ("a person stopped it", 1, vec![scaling_step(0, expects(2, asleep(0)), 0, ScalingDisabled)]),
        (
            "it never became ready, and its hours are over",
            0,
            vec![
                scaling_step(0, expects(1, asleep(0)), 1, History),
                scaling_step(60, expects(1, starts(idle(1, 9000))), 1, History),
                scaling_step(3600, starts(idle(1, 9000)), 0, Idle),
            ],
        ),
        (
            "the same under an operator that has restarted",
            0,
            vec![scaling_step(0, ScalingInput { by_history: true, ..starts(idle(1, 9000)) }, 0, Idle)],
        ),
        (
            "somebody asked meanwhile: it goes on to load",
            0,
            vec![
                scaling_step(0, expects(1, asleep(0)), 1, History),
                scaling_step(60, starts(runs(1, 1, 0)), 1, Demand),
                scaling_step(3600, starts(idle(1, 3000)), 1, Demand),
            ],
        ),
    ] {
        check(story, min, looks);
    }
}

#[test]
fn what_requests_need_excludes_what_history_expects() {
    for (story, seen, room, needed) in [
        ("nobody asks", expects(3, idle(3, 9000)), 64, 0),
        ("one asks", expects(3, runs(3, 0, 1)), 64, 1),
        ("more ask than fit", runs(1, 6, 0), 1, 3),
        ("more ask than may be", runs(1, 90, 0), 64, 4),
        ("first tokens are slow", slow(2, 900), 64, 3),
        ("they are, of more replicas than were asked for", expects(3, slow(3, 900)), 64, 1),
    ] {
        let mut memory = ScalingHistory::default();
        let now = Timestamp::UNIX_EPOCH;
        let decision = scale(&rules(0), &seen, &mut memory, now, |replicas| replicas.min(room));
        assert_eq!(decision.needed, needed, "{story}: {}", decision.message);
    }
}

#[test]
fn the_message_says_from_how_many_to_how_many_and_why() {
    let now = Timestamp::UNIX_EPOCH;
    for (min, seen, room, expected) in [
        (1, runs(1, 3, 2), 64, "from 1 to 3 replicas: 5 requests (3 of them held), 2 a replica"),
        (1, slow(1, 900), 64, "from 1 to 2 replicas: first tokens take 900 ms, more than 500"),
        (
            1,
            runs(1, 8, 0),
            2,
            "from 1 to 2 replicas: 8 requests (8 of them held), 2 a replica; 4 are needed, 2 fit",
        ),
        (1, runs(2, 8, 0), 2, "2 replicas; 4 are needed, 2 fit"),
        (
            0,
            expects(1, asleep(0)),
            64,
            "from 0 to 1 replica: 1 replica was needed on Tue from 14:00 in 3 of the last 4 weeks",
        ),
        (
            0,
            expects(3, asleep(0)),
            2,
            "from 0 to 2 replicas: 3 replicas were needed on Tue from 14:00 in 3 of the last 4 weeks; 2 fit",
        ),
        (
            0,
            expects(1, asleep(0)),
            0,
            "1 replica was needed on Tue from 14:00 in 3 of the last 4 weeks, and none fits now; the next request starts it",
        ),
        (
            0,
            expects(2, idle(2, 9000)),
            64,
            "2 replicas: 2 replicas were needed on Tue from 14:00 in 3 of the last 4 weeks",
        ),
        (0, idle(1, 600), 64, "no requests for 600 s; the next request starts it"),
        (
            1,
            asleep(1),
            64,
            "spec.replicas is 0, which stops it; set it to 1 or more and demand decides again",
        ),
    ] {
        let decision =
            scale(&rules(min), &seen, &mut ScalingHistory::default(), now, |replicas| replicas.min(room));
        assert_eq!(decision.message, expected);
    }
}

#[test]
fn autoscaler_requeues_when_a_deadline_is_due() {
    let again = |min, seen, room: i32, memory: &mut ScalingHistory| {
        let decision =
            scale(&rules(min), &seen, memory, Timestamp::UNIX_EPOCH, |replicas| replicas.min(room));
        decision.requeue_after.map(|again| again.as_secs())
    };
    let mut fresh = ScalingHistory::default();
    assert_eq!(again(1, runs(2, 0, 1), 64, &mut fresh), Some(300), "to be fewer");
    assert_eq!(again(0, idle(1, 400), 64, &mut ScalingHistory::default()), Some(200), "to sleep");
    assert_eq!(
        again(0, idle(2, 400), 64, &mut ScalingHistory::default()),
        Some(200),
        "to sleep, before there are fewer"
    );
    assert_eq!(again(1, runs(1, 9, 0), 1, &mut ScalingHistory::default()), Some(30), "for room");
    assert_eq!(again(1, runs(1, 0, 1), 64, &mut ScalingHistory::default()), None);
    let mut moved = ScalingHistory { last_change: Some(Timestamp::UNIX_EPOCH), ..ScalingHistory::default() };
    assert_eq!(again(1, slow(1, 900), 64, &mut moved), Some(60), "for first tokens");
}
