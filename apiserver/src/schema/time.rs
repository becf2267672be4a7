//! Times of Kubernetes' own types: what Go reads, and how the server writes them. `Time` is whole seconds, `MicroTime`
//! six digits of a second, both in UTC.
//!
//! Not here: `date-time` of custom resources, which Kubernetes checks and stores as sent; see [`super::format`].

use jiff::SignedDuration;
use jiff::civil::{Date, DateTime, Time};

/// The format of a `Time` in compiled schemas.
pub const TIME: &str = "date-time";
/// The format of a `MicroTime` in compiled schemas; the published ones say `date-time`, as Kubernetes' do.
pub const MICRO_TIME: &str = "micro-time";

/// How a time is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Whole seconds: `Time`.
    Seconds,
    /// Six digits of a second: `MicroTime`.
    Micros,
}

impl Precision {
    /// The precision of a format of compiled schemas, if it is one of a time.
    pub fn of(format: &str) -> Option<Self> {
        match format {
            TIME => Some(Self::Seconds),
            MICRO_TIME => Some(Self::Micros),
            _ => None,
        }
    }

    /// A time in this form, for messages.
    pub fn example(self) -> &'static str {
        match self {
            Self::Seconds => "2026-01-02T15:04:05Z",
            Self::Micros => "2026-01-02T15:04:05.000000Z",
        }
    }

    /// The time as Kubernetes writes it; `None` if Go does not read it.
    pub fn canonical(self, text: &str) -> Option<String> {
        read(text, self).map(|time| write(time, self))
    }

    /// As [`Self::canonical`], of what earlier releases took for a time.
    pub fn mended(self, text: &str) -> Option<String> {
        let time = text.parse::<jiff::Timestamp>().ok()?;
        Some(write(time.to_zoned(jiff::tz::TimeZone::UTC).datetime(), self))
    }
}

fn write(time: DateTime, precision: Precision) -> String {
    let (date, clock) = (time.date(), time.time());
    let mut text = format!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}",
        date.year(),
        date.month(),
        date.day(),
        clock.hour(),
        clock.minute(),
        clock.second()
    );
    if precision == Precision::Micros {
        text.push_str(&format!(".{:06}", clock.subsec_nanosecond() / 1000));
    }
    text.push('Z');
    text
}

/// A time as `time.Parse` of Go reads it with the layout of `Time` or `MicroTime`, in UTC. In a `Time` a fraction of any
/// length may follow the seconds, in a `MicroTime` one of exactly six digits must.
fn read(text: &str, precision: Precision) -> Option<DateTime> {
    let mut rest = TimeText(text.as_bytes());
    let year = rest.digits(4)?;
    rest.byte(b"-")?;
    let month = rest.digits(2)?;
    rest.byte(b"-")?;
    let day = rest.digits(2)?;
    rest.byte(b"T")?;
    // The only field that Go also takes with one digit.
    let hour = if rest.digit_at(1) { rest.digits(2)? } else { rest.digits(1)? };
    rest.byte(b":")?;
    let minute = rest.digits(2)?;
    rest.byte(b":")?;
    let second = rest.digits(2)?;
    let nanosecond = match precision {
        Precision::Micros => {
            rest.byte(b".,")?;
            rest.digits(6)? * 1000
        }
        Precision::Seconds if rest.digit_at(1) && rest.byte(b".,").is_some() => rest.fraction(),
        Precision::Seconds => 0,
    };
    let sign = match rest.byte(b"Z+-")? {
        b'Z' => 0,
        b'+' => 1,
        _ => -1,
    };
    let mut offset = 0;
    if sign != 0 {
        let hours = rest.digits(2)?;
        rest.byte(b":")?;
        let minutes = rest.digits(2)?;
        if hours > 24 || minutes > 60 {
            return None;
        }
        offset = i64::from(sign) * i64::from(hours * 60 + minutes) * 60;
    }
    if !rest.0.is_empty() || second > 59 {
        return None;
    }
    let small = |number: i32| i8::try_from(number).ok();
    let date = Date::new(i16::try_from(year).ok()?, small(month)?, small(day)?).ok()?;
    let clock = Time::new(small(hour)?, small(minute)?, small(second)?, nanosecond).ok()?;
    let utc = date.to_datetime(clock).checked_sub(SignedDuration::from_secs(offset)).ok()?;
    (0..=9999).contains(&utc.year()).then_some(utc)
}

/// What is left of a text.
struct TimeText<'a>(&'a [u8]);

impl TimeText<'_> {
    /// Takes one of these bytes.
    fn byte(&mut self, allowed: &[u8]) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        if !allowed.contains(first) {
            return None;
        }
        self.0 = rest;
        Some(*first)
    }

    /// Whether the byte at `index` is a digit.
    fn digit_at(&self, index: usize) -> bool {
        self.0.get(index).is_some_and(u8::is_ascii_digit)
    }

    /// Takes a number of exactly this many digits, at most nine.
    fn digits(&mut self, count: usize) -> Option<i32> {
        let (digits, rest) = self.0.split_at_checked(count)?;
        if !digits.iter().all(u8::is_ascii_digit) {
            return None;
        }
        self.0 = rest;
        Some(digits.iter().fold(0, |number, digit| number * 10 + i32::from(digit - b'0')))
    }

    /// Takes all digits of a fraction, and returns it in nanoseconds; further digits do not count.
    fn fraction(&mut self) -> i32 {
        let (mut nanoseconds, mut unit) = (0, 100_000_000);
        while let Some(digit) = self.digits(1) {
            nanoseconds += digit * unit;
            unit /= 10;
        }
        nanoseconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_go_does_and_written_as_kubernetes() {
        for (text, seconds, micros) in [
            ("2026-11-25T00:00:19Z", Some("2026-11-25T00:00:19Z"), None),
            ("2026-11-25T00:00:19.103Z", Some("2026-11-25T00:00:19Z"), None),
            (
                "2026-11-25T00:00:19.103456Z",
                Some("2026-11-25T00:00:19Z"),
                Some("2026-11-25T00:00:19.103456Z"),
            ),
            (
                "2026-11-25T00:00:19,103456Z",
                Some("2026-11-25T00:00:19Z"),
                Some("2026-11-25T00:00:19.103456Z"),
            ),
            ("2026-11-25T00:00:19.123456789Z", Some("2026-11-25T00:00:19Z"), None),
            ("2026-11-25T01:00:19+01:30", Some("2026-11-24T23:30:19Z"), None),
            (
                "2026-11-25T01:00:19.000001-01:30",
                Some("2026-11-25T02:30:19Z"),
                Some("2026-11-25T02:30:19.000001Z"),
            ),
            ("2026-11-25T1:00:19Z", Some("2026-11-25T01:00:19Z"), None),
            ("9999-12-31T23:59:59Z", Some("9999-12-31T23:59:59Z"), None),
            ("0001-01-01T00:00:00Z", Some("0001-01-01T00:00:00Z"), None),
            ("2024-02-29T00:00:00Z", Some("2024-02-29T00:00:00Z"), None),
            ("2026-02-29T00:00:00Z", None, None),
            ("2026-11-25 00:00:19Z", None, None),
            ("2026-11-25 00:00:19.103456Z", None, None),
            ("2026-11-25t00:00:19Z", None, None),
            ("2026-11-25T00:00:19z", None, None),
            ("2026-11-25T00:00:60Z", None, None),
            ("2026-11-25T24:00:00Z", None, None),
            ("2026-11-25T00:00Z", None, None),
            ("2026-11-25T00:00:19.Z", None, None),
            ("2026-11-25T00:00:19", None, None),
            ("2026-11-25T00:00:19Z[UTC]", None, None),
            ("2026-11-25T00:00:19+25:00", None, None),
            ("2026-11-25T00:00:19+0100", None, None),
            ("9999-12-31T23:59:59-01:00", None, None),
            ("20261125T000019Z", None, None),
            ("2026-11-25", None, None),
            ("", None, None),
        ] {
            assert_eq!(Precision::Seconds.canonical(text).as_deref(), seconds, "{text} as Time");
            assert_eq!(Precision::Micros.canonical(text).as_deref(), micros, "{text} as MicroTime");
        }
    }
}
