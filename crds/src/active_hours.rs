//! Active hours: the times of day that [`Schedule`]s name. No clock: the time is an argument. No files: time zones are
//! those bundled with the release (IANA's, by jiff), so that every machine decides alike.

use std::sync::LazyLock;

use crate::{Day, Schedule};
use jiff::civil::{Date, Time, Weekday};
use jiff::tz::{TimeZone, TimeZoneDatabase};
use jiff::{Timestamp, ToSpan as _};

static ZONES: LazyLock<TimeZoneDatabase> = LazyLock::new(TimeZoneDatabase::bundled);

/// Days to evaluate: yesterday, for hours that are not over yet, and the next week and a day, so that weekly
/// hours are found.
const DAY_RANGE: std::ops::RangeInclusive<i64> = -1..=8;

/// Whether a time is in the hours, and until when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActiveHours {
    /// It is.
    pub open: bool,
    /// When that changes; `None` if never, or more than a week from now.
    pub until: Option<Timestamp>,
}

impl Default for ActiveHours {
    fn default() -> Self {
        Self { open: true, until: None }
    }
}

/// What is wrong with one of several schedules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidSchedule {
    /// Its place among them.
    pub index: usize,
    /// What is wrong.
    pub why: String,
}

/// The hours at `now`; without schedules they are always open.
pub fn active_hours(schedules: &[Schedule], now: Timestamp) -> Result<ActiveHours, InvalidSchedule> {
    if schedules.is_empty() {
        return Ok(ActiveHours::default());
    }
    let mut spans = Vec::new();
    for (index, schedule) in schedules.iter().enumerate() {
        let found = self::spans(schedule, now);
        spans.extend(found.map_err(|why| InvalidSchedule { index, why })?);
    }
    spans.sort();
    let mut merged: Vec<(Timestamp, Timestamp)> = Vec::new();
    for (from, until) in spans {
        match merged.last_mut().filter(|last| from <= last.1) {
            Some(last) => last.1 = last.1.max(until),
            None => merged.push((from, until)),
        }
    }
    let next = merged.iter().find(|(_, until)| now < *until);
    Ok(match next {
        Some((from, until)) if *from <= now => {
            // Hours beyond the evaluated days are evaluated again by then.
            ActiveHours { open: true, until: Some(*until) }
        }
        Some((from, _)) => ActiveHours { open: false, until: Some(*from) },
        None => ActiveHours { open: false, until: None },
    })
}

/// The time zone of this IANA name, or what is wrong with the name.
pub fn time_zone(name: &str) -> Result<TimeZone, String> {
    ZONES.get(name).map_err(|_| {
        format!("timeZone {name:?} is no IANA time zone; write one such as Europe/Berlin or UTC")
    })
}

/// When a schedule starts and ends around `now`. A time that a clock change skips counts as the one after it.
fn spans(schedule: &Schedule, now: Timestamp) -> Result<Vec<(Timestamp, Timestamp)>, String> {
    let Schedule { days, from, until, time_zone } = schedule;
    let zone = self::time_zone(time_zone)?;
    let time = |text: &str| {
        Time::strptime("%H:%M", text).map_err(|_| format!("{text:?} is no time of day; write it as 08:30"))
    };
    let (from, until) = (time(from)?, time(until)?);
    let today = now.to_zoned(zone.clone()).date();
    let mut spans = Vec::new();
    for offset in DAY_RANGE {
        let begins =
            |date: &Date| days.is_empty() || days.iter().any(|day| weekday(*day) == Some(date.weekday()));
        let Some(date) = today.checked_add(offset.days()).ok().filter(begins) else { continue };
        let last = if until > from { Some(date) } else { date.tomorrow().ok() };
        let at = |date: Date, time: Time| instant(&zone, date, time);
        if let Some((from, until)) = last.and_then(|last| Some((at(date, from)?, at(last, until)?))) {
            spans.push((from, until));
        }
    }
    Ok(spans)
}

fn instant(zone: &TimeZone, date: Date, time: Time) -> Option<Timestamp> {
    Some(date.to_datetime(time).to_zoned(zone.clone()).ok()?.timestamp())
}

fn weekday(day: Day) -> Option<Weekday> {
    Some(match day {
        Day::Mon => Weekday::Monday,
        Day::Tue => Weekday::Tuesday,
        Day::Wed => Weekday::Wednesday,
        Day::Thu => Weekday::Thursday,
        Day::Fri => Weekday::Friday,
        Day::Sat => Weekday::Saturday,
        Day::Sun => Weekday::Sunday,
        Day::Unknown => return None,
    })
}

impl From<Weekday> for Day {
    fn from(weekday: Weekday) -> Self {
        match weekday {
            Weekday::Monday => Self::Mon,
            Weekday::Tuesday => Self::Tue,
            Weekday::Wednesday => Self::Wed,
            Weekday::Thursday => Self::Thu,
            Weekday::Friday => Self::Fri,
            Weekday::Saturday => Self::Sat,
            Weekday::Sunday => Self::Sun,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(days: &[Day], from: &str, until: &str, zone: &str) -> Schedule {
        Schedule { days: days.to_vec(), from: from.into(), until: until.into(), time_zone: zone.into() }
    }

    #[test]
    fn every_hour_of_the_week_is_open_or_not() {
        let week = [Day::Mon, Day::Tue, Day::Wed, Day::Thu, Day::Fri];
        let work = vec![schedule(&week, "08:00", "18:00", "Europe/Berlin")];
        let night = vec![schedule(&[], "22:00", "06:00", "UTC")];
        let split = vec![schedule(&[], "08:00", "12:00", "UTC"), schedule(&[], "12:00", "13:00", "UTC")];
        // 2026-11-20 is a Friday.
        for (story, schedules, now, open, until) in [
            ("always", vec![], "2026-11-20T03:00:00Z", true, None),
            ("in the morning", work.clone(), "2026-11-20T07:00:00Z", true, Some("2026-11-20T17:00:00Z")),
            ("one second early", work.clone(), "2026-11-20T06:59:59Z", false, Some("2026-11-20T07:00:00Z")),
            ("its end is outside", work.clone(), "2026-11-20T17:00:00Z", false, Some("2026-11-23T07:00:00Z")),
            ("at night", night.clone(), "2026-11-20T23:00:00Z", true, Some("2026-11-21T06:00:00Z")),
            ("begun yesterday", night.clone(), "2026-11-21T05:59:00Z", true, Some("2026-11-21T06:00:00Z")),
            ("by day", night, "2026-11-21T06:00:00Z", false, Some("2026-11-21T22:00:00Z")),
            ("one after the other", split, "2026-11-20T11:00:00Z", true, Some("2026-11-20T13:00:00Z")),
            (
                "once a week, just over",
                vec![schedule(&[Day::Fri], "10:00", "11:00", "UTC")],
                "2026-11-20T11:00:00Z",
                false,
                Some("2026-11-27T10:00:00Z"),
            ),
            (
                "a whole day",
                vec![schedule(&[Day::Fri], "00:00", "00:00", "UTC")],
                "2026-11-20T23:59:59Z",
                true,
                Some("2026-11-21T00:00:00Z"),
            ),
            (
                "a day of a newer release is none",
                vec![schedule(&[Day::Unknown], "10:00", "11:00", "UTC")],
                "2026-11-20T10:30:00Z",
                false,
                None,
            ),
            // Clocks go forward on 2026-03-29 at 02:00: 02:30 does not exist and counts as 03:30.
            (
                "the hour that is not there",
                vec![schedule(&[], "02:30", "04:00", "Europe/Berlin")],
                "2026-03-29T01:00:00Z",
                false,
                Some("2026-03-29T01:30:00Z"),
            ),
        ] {
            let now: Timestamp = now.parse().unwrap();
            let expected = ActiveHours { open, until: until.map(|until| until.parse().unwrap()) };
            assert_eq!(active_hours(&schedules, now), Ok(expected), "{story}");
        }
    }

    #[test]
    fn invalid_schedule_times_are_named() {
        for (bad, expected) in [
            (schedule(&[], "8", "10:00", "UTC"), "\"8\" is no time of day"),
            (schedule(&[], "08:00", "24:00", "UTC"), "\"24:00\" is no time of day"),
            (schedule(&[], "08:00", "10:00", "Mars/Base"), "\"Mars/Base\" is no IANA time zone"),
        ] {
            let good = schedule(&[], "08:00", "10:00", "UTC");
            let error = active_hours(&[good, bad], Timestamp::UNIX_EPOCH).unwrap_err();
            assert!(error.index == 1 && error.why.contains(expected), "{error:?}");
        }
    }
}
