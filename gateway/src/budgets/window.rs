//! The minute, hour, day or month that a limit counts in. Pure: the clock is an argument.

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp, ToSpan as _, Unit};
use russet_crds::{BudgetPeriod, BudgetWindow};

/// A minute, hour, day or month.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LimitWindow {
    pub(super) per: BudgetPeriod,
    pub(super) start: Timestamp,
    pub(super) end: Timestamp,
}

/// A window by its length and its beginning, in seconds since 1970.
pub(super) type WindowKey = (BudgetPeriod, i64);

impl LimitWindow {
    /// The window of this length in which `now` is; `None` for a length of a newer release, and at the ends of time.
    pub(super) fn at(per: BudgetPeriod, zone: &TimeZone, now: Timestamp) -> Option<Self> {
        let day = |date: jiff::civil::Date| zone.to_zoned(date.at(0, 0, 0, 0)).ok();
        let date = now.to_zoned(zone.clone()).date();
        let (start, end) = match per {
            BudgetPeriod::Minute => return Self::of_clock(per, Unit::Minute, zone, now),
            BudgetPeriod::Hour => return Self::of_clock(per, Unit::Hour, zone, now),
            BudgetPeriod::Day => (day(date)?, day(date.checked_add(1.day()).ok()?)?),
            BudgetPeriod::Month => {
                let first = date.first_of_month();
                (day(first)?, day(first.checked_add(1.month()).ok()?)?)
            }
            BudgetPeriod::Unknown => return None,
        };
        Some(Self { per, start: start.timestamp(), end: end.timestamp() })
    }

    /// A minute or an hour: by the offset that holds now, so that the hour that clocks repeat is two.
    fn of_clock(per: BudgetPeriod, unit: Unit, zone: &TimeZone, now: Timestamp) -> Option<Self> {
        let seconds = if unit == Unit::Hour { 3600 } else { 60 };
        let offset = i64::from(zone.to_offset(now).seconds());
        let start = (now.as_second() + offset).div_euclid(seconds) * seconds - offset;
        let start = Timestamp::from_second(start).ok()?;
        let end = start.checked_add(SignedDuration::from_secs(seconds)).ok()?;
        Some(Self { per, start, end })
    }

    /// Whether a time is in it.
    pub(super) fn contains(&self, time: Timestamp) -> bool {
        self.start <= time && time < self.end
    }

    /// Whether a status means it by this entry.
    pub(super) fn is(&self, entry: &BudgetWindow) -> bool {
        entry.per == self.per && entry.starts_at.0 == self.start
    }

    pub(super) fn key(&self) -> WindowKey {
        (self.per, self.start.as_second())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn windows_begin_and_end_by_the_calendar_of_their_zone() {
        use BudgetPeriod::{Day, Hour, Minute, Month};
        for (per, zone, now, start, end) in [
            (Minute, "UTC", "2026-11-29T13:19:31Z", "2026-11-29T13:19:00Z", "2026-11-29T13:20:00Z"),
            (Hour, "Asia/Kolkata", "2026-11-29T13:19:31Z", "2026-11-29T12:30:00Z", "2026-11-29T13:30:00Z"),
            (Day, "Europe/Berlin", "2026-11-29T23:30:00Z", "2026-11-29T23:00:00Z", "2026-11-30T23:00:00Z"),
            // The day on which clocks go back has 25 hours, and an hour that comes twice is two.
            (Day, "Europe/Berlin", "2026-10-25T12:00:00Z", "2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z"),
            (Hour, "Europe/Berlin", "2026-10-25T00:30:00Z", "2026-10-25T00:00:00Z", "2026-10-25T01:00:00Z"),
            (Hour, "Europe/Berlin", "2026-10-25T01:30:00Z", "2026-10-25T01:00:00Z", "2026-10-25T02:00:00Z"),
            (
                Month,
                "America/New_York",
                "2026-12-01T04:59:59Z",
                "2026-11-01T04:00:00Z",
                "2026-12-01T05:00:00Z",
            ),
            (Month, "UTC", "2026-12-31T23:59:59Z", "2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z"),
        ] {
            let window = LimitWindow::at(per, &TimeZone::get(zone).unwrap(), at(now)).unwrap();
            assert_eq!((window.start, window.end), (at(start), at(end)), "{per:?} in {zone} at {now}");
        }
        assert_eq!(LimitWindow::at(BudgetPeriod::Unknown, &TimeZone::UTC, at("2026-01-01T00:00:00Z")), None);
    }

    #[test]
    fn windows_of_a_length_follow_each_other_without_a_gap() {
        for zone in ["UTC", "Europe/Berlin", "America/Sao_Paulo", "Pacific/Apia", "Australia/Lord_Howe"] {
            let zone = TimeZone::get(zone).unwrap();
            for per in [BudgetPeriod::Hour, BudgetPeriod::Day, BudgetPeriod::Month] {
                let mut window = LimitWindow::at(per, &zone, at("2011-11-15T00:00:00Z")).unwrap();
                for _ in 0..2000 {
                    let next = LimitWindow::at(per, &zone, window.end).unwrap();
                    assert_eq!(next.start, window.end, "{per:?}");
                    assert!(next.end > next.start);
                    let last = window.end - SignedDuration::from_nanos(1);
                    assert_eq!(LimitWindow::at(per, &zone, last), Some(window));
                    window = next;
                }
            }
        }
    }
}
