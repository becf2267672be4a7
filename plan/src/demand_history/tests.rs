//! What is counted of the hours of a week, and what follows.

use super::*;

/// Mondays have 08:00 UTC as 09:00 in Berlin. 2026-11-02 is a Monday.
fn rules(zone: &str) -> PredictiveScaling {
    PredictiveScaling { time_zone: zone.to_owned(), ..PredictiveScaling::default() }
}

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

/// Gateways report requests that need so many replicas.
fn requests(replicas: i32, reported: &str) -> NeededNow {
    let time = (replicas > 0).then(|| at(reported));
    NeededNow { replicas, reported: time, last_request: time }
}

/// The last request was then.
fn asked(time: &str) -> NeededNow {
    NeededNow { last_request: Some(at(time)), ..NeededNow::default() }
}

/// The history after these evaluations: when, and how many replicas the requests of that moment need.
fn counted(rules: &PredictiveScaling, seen: &[(&str, i32)]) -> DemandHistory {
    let mut history = None;
    for (time, needed) in seen {
        history = record(history.as_ref(), rules, requests(*needed, time), at(time));
    }
    history.unwrap()
}

/// What a day counted, the last week first, with the hours that counted nothing left out at the end.
fn weeks(history: &DemandHistory, day: Day) -> Vec<&str> {
    let found = history.days.iter().find(|one| one.day == day);
    found.map(|one| one.weeks.iter().map(|week| week.trim_end_matches('0')).collect()).unwrap_or_default()
}

#[test]
fn an_hour_counts_the_most_that_it_needed_at_once() {
    let seen = [
        ("2026-11-02T08:10:00Z", 1),
        ("2026-11-02T08:20:00Z", 3),
        ("2026-11-02T08:59:59Z", 2),
        ("2026-11-02T10:00:00Z", 0),
    ];
    let history = counted(&rules("Europe/Berlin"), &seen);
    assert_eq!(weeks(&history, Day::Mon), ["0000000003", "", "", "", ""]);
    assert_eq!((history.hour.0, history.replicas), (at("2026-11-02T10:00:00Z"), 0));
    // In a zone whose hours begin at half past they are parts of two hours.
    let history = counted(&rules("Asia/Kolkata"), &seen);
    assert_eq!(weeks(&history, Day::Mon)[0], "000000000000032");
    assert_eq!(history.hour.0, at("2026-11-02T09:30:00Z"));
}

#[test]
fn five_weeks_are_kept_and_the_oldest_goes() {
    let rules = rules("UTC");
    let mondays =
        ["11-02", "11-09", "11-16", "11-23", "11-30", "12-07"].map(|day| format!("2026-{day}T08:30:00Z"));
    let mut seen: Vec<(&str, i32)> =
        mondays.iter().zip([6, 5, 2, 0, 40, 1]).map(|(at, needed)| (at.as_str(), needed)).collect();
    let history = counted(&rules, &seen);
    // The hour that is counted now is not among them yet.
    let hours = ["000000009", "", "000000002", "000000005", "000000006"];
    assert_eq!((weeks(&history, Day::Mon), history.replicas), (hours.to_vec(), 1));
    seen.push(("2026-12-07T09:00:00Z", 0));
    let hours = ["000000001", "000000009", "", "000000002", "000000005"];
    assert_eq!(weeks(&counted(&rules, &seen), Day::Mon), hours);
    // Half a year without a request leaves nothing, in bounded time.
    seen.push(("2027-06-01T09:00:00Z", 0));
    assert_eq!(counted(&rules, &seen).days, []);
    seen.push(("9999-12-30T09:00:00Z", 0));
    assert_eq!(counted(&rules, &seen).days, []);
}

#[test]
fn a_request_between_two_evaluations_counts() {
    let rules = rules("UTC");
    let before = record(None, &rules, NeededNow::default(), at("2026-11-02T08:00:00Z"));
    let after =
        record(before.as_ref(), &rules, asked("2026-11-02T08:59:50Z"), at("2026-11-02T09:00:05Z")).unwrap();
    assert_eq!((weeks(&after, Day::Mon)[0], after.replicas), ("000000001", 0));
    // Of a gateway's report that came later than the hours it passed over.
    let late =
        record(Some(&after), &rules, asked("2026-11-03T02:00:00Z"), at("2026-11-03T04:00:00Z")).unwrap();
    assert_eq!(weeks(&late, Day::Tue)[0], "001");
}

#[test]
fn a_report_counts_in_the_hour_in_which_it_was_made() {
    let rules = rules("UTC");
    let before = record(None, &rules, NeededNow::default(), at("2026-11-02T08:00:00Z"));
    // The last report of the hour before says three; they may be done since.
    let said = requests(3, "2026-11-02T08:59:50Z");
    let after = record(before.as_ref(), &rules, said, at("2026-11-02T09:00:00Z")).unwrap();
    assert_eq!((weeks(&after, Day::Mon)[0], after.replicas), ("000000003", 0));
    let said = requests(3, "2026-11-02T09:00:05Z");
    assert_eq!(record(Some(&after), &rules, said, at("2026-11-02T09:00:06Z")).unwrap().replicas, 3);
}

#[test]
fn clocks_that_disagree_close_no_hour_twice() {
    let rules = rules("UTC");
    let history = counted(&rules, &[("2026-11-02T08:30:00Z", 2), ("2026-11-02T09:00:00Z", 0)]);
    // The clock of another leader is a second behind; what is needed then counts, in the hour that has begun.
    let said = NeededNow { replicas: 1, reported: Some(at("2026-11-02T09:00:00Z")), last_request: None };
    let behind = record(Some(&history), &rules, said, at("2026-11-02T08:59:59Z")).unwrap();
    assert_eq!((behind.hour.0, behind.replicas), (history.hour.0, 1));
    assert_eq!(behind.days, history.days);
    // A clock was years ahead: the hours are those of the clock that is right.
    let ahead = counted(&rules, &[("2026-11-02T08:30:00Z", 2), ("2031-01-01T00:00:00Z", 1)]);
    let right = record(Some(&ahead), &rules, requests(1, "2026-11-02T09:30:00Z"), at("2026-11-02T09:30:00Z"));
    let right = right.unwrap();
    assert_eq!((right.hour.0, right.replicas), (at("2026-11-02T09:00:00Z"), 1));
}

#[test]
fn a_clock_that_differs_much_must_say_so_for_an_hour() {
    let history = counted(&rules("UTC"), &[("2026-11-02T08:30:00Z", 2)]);
    for (story, looks, expected) in [
        ("in time", vec!["2026-11-02T09:00:00Z"], true),
        ("after a weekend", vec!["2026-11-05T09:00:00Z"], true),
        ("a leader that is behind", vec!["2026-11-01T10:00:00Z"], true),
        ("it booted without a clock", vec!["1970-01-01T00:00:30Z", "1970-01-01T00:05:00Z"], false),
        ("and got the time", vec!["1970-01-01T00:00:30Z", "2026-11-02T09:00:00Z"], true),
        ("the cluster was off for weeks", vec!["2026-12-01T09:00:00Z", "2026-12-01T09:59:59Z"], false),
        ("and is on for an hour", vec!["2026-12-01T09:00:00Z", "2026-12-01T10:00:00Z"], true),
        (
            "it jumps about",
            vec!["2031-01-01T00:00:00Z", "1999-01-01T00:00:00Z", "1999-01-01T00:59:00Z"],
            false,
        ),
    ] {
        let mut memory = HistoryMemory::default();
        let found = looks.iter().map(|now| is_clock_plausible(&history, &mut memory, at(now))).last();
        assert_eq!(found, Some(expected), "{story}");
    }
}

#[test]
fn the_peak_of_an_hour_outlives_an_older_status() {
    let rules = rules("UTC");
    let older = counted(&rules, &[("2026-11-02T08:30:00Z", 1)]);
    let mut memory = HistoryMemory::default();
    let mut seen = |needed, now: &str| {
        let mut history = record(Some(&older), &rules, requests(needed, now), at(now)).unwrap();
        memory.keep_peak(&mut history);
        history.replicas
    };
    assert_eq!((seen(3, "2026-11-02T08:40:00Z"), seen(2, "2026-11-02T08:41:00Z")), (3, 3));
    assert_eq!(seen(1, "2026-11-02T09:01:00Z"), 1);
}

#[test]
fn another_time_zone_begins_anew_and_a_wrong_one_is_none() {
    let history = counted(&rules("UTC"), &[("2026-11-02T08:30:00Z", 2), ("2026-11-02T09:00:00Z", 0)]);
    let now = at("2026-11-02T09:00:00Z");
    let moved = record(Some(&history), &rules("Europe/Berlin"), NeededNow::default(), now).unwrap();
    assert_eq!((moved.days.len(), moved.time_zone.as_str()), (0, "Europe/Berlin"));
    assert_eq!(record(Some(&history), &rules("Mars/Base"), NeededNow::default(), now), None);
    assert!(invalid(&rules("Mars/Base")).unwrap().contains("\"Mars/Base\" is no IANA time zone"));
    assert_eq!(invalid(&rules("Europe/Berlin")), None);
    assert_eq!(until_change(&rules("Mars/Base"), now), None);
}

#[test]
fn the_start_of_an_idle_hour_is_no_news() {
    let rules = rules("UTC");
    let first = counted(&rules, &[("2026-11-02T08:30:00Z", 1)]);
    let same = record(Some(&first), &rules, requests(1, "2026-11-02T08:40:00Z"), at("2026-11-02T08:40:00Z"));
    assert!(!differs(Some(&first), same.as_ref()));
    let more = record(Some(&first), &rules, requests(2, "2026-11-02T08:41:00Z"), at("2026-11-02T08:41:00Z"));
    assert!(differs(Some(&first), more.as_ref()));
    let next = record(Some(&first), &rules, NeededNow::default(), at("2026-11-02T09:00:00Z"));
    assert!(differs(Some(&first), next.as_ref()));
    let idle = record(next.as_ref(), &rules, NeededNow::default(), at("2026-11-02T23:00:00Z"));
    assert!(!differs(next.as_ref(), idle.as_ref()), "{idle:?}");
    let tomorrow = record(next.as_ref(), &rules, NeededNow::default(), at("2026-11-03T09:00:00Z"));
    assert!(differs(next.as_ref(), tomorrow.as_ref()), "the hour is never further behind than a day");
    assert!(differs(None, idle.as_ref()) && differs(idle.as_ref(), None) && !differs(None, None));
}

/// A history in which 09:00 needed 2, 3, 0 and 1 replicas, the last week first, and 10:00 one in the last week alone.
fn mondays() -> DemandHistory {
    let week = |nine: u32, ten: u32| format!("000000000{nine}{ten}0000000000000");
    let weeks = vec![week(2, 1), week(3, 0), week(0, 0), week(1, 0)];
    let hour = at("2026-11-30T00:00:00Z");
    DemandHistory { days: vec![DayDemand { day: Day::Mon, weeks }], ..DemandHistory::new("UTC", hour) }
}

#[test]
fn as_many_are_expected_as_enough_weeks_needed() {
    for (story, min_weeks, ceiling, now, expected) in [
        ("each of three weeks needed one", 3, 9, "2026-11-30T09:30:00Z", Some(1)),
        ("each of two weeks needed two", 2, 9, "2026-11-30T09:30:00Z", Some(2)),
        ("one week needed three", 1, 9, "2026-11-30T09:30:00Z", Some(3)),
        ("not every week needed any", 4, 9, "2026-11-30T09:30:00Z", None),
        ("the ceiling", 1, 2, "2026-11-30T09:30:00Z", Some(2)),
        ("long before", 2, 9, "2026-11-30T08:54:59Z", None),
        ("leadSeconds before", 2, 9, "2026-11-30T08:55:00Z", Some(2)),
        ("an hour that only one week needed", 2, 9, "2026-11-30T10:30:00Z", None),
        ("the same with one week", 1, 9, "2026-11-30T10:30:00Z", Some(1)),
        ("the hour that needs more counts", 1, 9, "2026-11-30T09:57:00Z", Some(3)),
        ("another day", 1, 9, "2026-12-01T09:30:00Z", None),
    ] {
        let rules = PredictiveScaling { min_weeks, max_replicas: ceiling, ..rules("UTC") };
        let found = super::expected(&rules, &mondays(), at(now));
        assert_eq!(found.map(|found| found.replicas), expected, "{story}: {found:?}");
    }
    let rules = PredictiveScaling { max_replicas: 9, ..rules("UTC") };
    let said = super::expected(&rules, &mondays(), at("2026-11-30T08:55:00Z")).unwrap().to_string();
    assert_eq!(said, "2 replicas were needed on Mon from 09:00 in 2 of the last 4 weeks");
    let rules = PredictiveScaling { min_weeks: 3, ..rules };
    let said = super::expected(&rules, &mondays(), at("2026-11-30T09:00:00Z")).unwrap().to_string();
    assert_eq!(said, "1 replica was needed on Mon from 09:00 in 3 of the last 4 weeks");
}

#[test]
fn only_the_hours_of_a_day_that_were_needed_most() {
    // Each hour from 08:00 on was needed in two weeks; 12:00 in three, and 15:00 by more replicas.
    let digits = |twelve: u32, fifteen: u32| format!("00000000{}{twelve}11{fifteen}11111111", "1111");
    let third = format!("000000000000{}00000000000", 1);
    let weeks = vec![digits(1, 4), digits(1, 4), third];
    let hour = at("2026-11-30T00:00:00Z");
    let history =
        DemandHistory { days: vec![DayDemand { day: Day::Mon, weeks }], ..DemandHistory::new("UTC", hour) };
    // At the beginning of the day.
    let of = |hour: u8| HourOfWeek { day: Day::Mon, hour };
    let open = |most: u32| -> Vec<u8> {
        let rules = PredictiveScaling { max_hours_per_day: most, lead_seconds: 0, ..rules("UTC") };
        (0..24).filter(|hour| expected_in(&rules, &history, of(*hour), of(0)).is_some()).collect()
    };
    assert_eq!(open(1), [12]);
    assert_eq!(open(2), [12, 15]);
    assert_eq!(open(4), [8, 9, 12, 15]);
    assert_eq!(open(24), (8..24).collect::<Vec<_>>());
}

#[test]
fn a_day_off_lets_in_no_hours_beyond_the_ceiling() {
    // Each hour from 08:00 to 19:59 was needed in all weeks, and today nobody asks.
    let weeks = vec![format!("{}{}{}", "0".repeat(8), "1".repeat(12), "0".repeat(4)); 5];
    let hour = at("2026-11-30T00:00:00Z");
    let mut history =
        DemandHistory { days: vec![DayDemand { day: Day::Mon, weeks }], ..DemandHistory::new("UTC", hour) };
    let rules = PredictiveScaling { max_hours_per_day: 4, lead_seconds: 0, ..rules("UTC") };
    let mut open = Vec::new();
    for hour in 0..24 {
        let now = at(&format!("2026-11-30T{hour:02}:10:00Z"));
        history = record(Some(&history), &rules, NeededNow::default(), now).unwrap();
        if super::expected(&rules, &history, now).is_some() {
            open.push(hour);
        }
    }
    assert_eq!(open, [8, 9, 10, 11]);
}

#[test]
fn the_next_change_is_an_hour_or_what_leads_to_one() {
    for (lead, now, expected) in [
        (300, "2026-11-30T08:00:00Z", 55 * 60),
        (300, "2026-11-30T08:55:00Z", 5 * 60),
        (300, "2026-11-30T08:54:59Z", 1),
        (0, "2026-11-30T08:20:00Z", 40 * 60),
        (3600, "2026-11-30T08:20:00Z", 40 * 60),
    ] {
        let rules = PredictiveScaling { lead_seconds: lead, ..rules("UTC") };
        let found = until_change(&rules, at(now)).unwrap();
        assert_eq!(found, Duration::from_secs(expected), "{lead} s at {now}");
    }
}

#[test]
fn digits_that_nobody_wrote_count_as_none() {
    let weeks = vec!["9x-é9".to_owned(), "9".repeat(900), String::new(), String::new(), "9".repeat(24)];
    let days = vec![DayDemand { day: Day::Mon, weeks }, DayDemand { day: Day::Unknown, weeks: Vec::new() }];
    let history = DemandHistory { days, ..DemandHistory::new("UTC", at("2026-11-30T00:30:00Z")) };
    let rules = PredictiveScaling { lead_seconds: 0, ..rules("UTC") };
    let found = super::expected(&rules, &history, at("2026-11-30T04:00:00Z")).unwrap();
    assert_eq!((found.replicas, found.weeks), (1, 2));
    assert!(super::expected(&rules, &history, at("2026-11-30T02:00:00Z")).is_none());
    let next = record(Some(&history), &rules, NeededNow::default(), at("2026-11-30T05:00:00Z")).unwrap();
    assert_eq!(super::tests::weeks(&next, Day::Mon).len(), 5);
}
