//! Demand history: which hours of the week needed replicas in the last weeks, and what that lets expect. Not here:
//! what the expectation does to the number of replicas (`autoscaling`).

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use russet_crds::active_hours::time_zone;
use russet_crds::{Day, DayDemand, DemandHistory, PredictiveScaling};

/// Weeks that count of each hour.
const WEEKS: usize = 4;
/// Weeks that are kept: of the hours of today that are over, the last one is today.
const KEPT_WEEKS: usize = WEEKS + 1;
const HOURS_PER_DAY: usize = 24;
const HOUR: Duration = Duration::from_secs(3600);
/// Hours after which nothing is left of what was counted before.
const MAX_HOURS: usize = KEPT_WEEKS * 7 * HOURS_PER_DAY;
/// The longest time that a history is ahead of a clock, or behind it, for neither to be wrong.
const MAX_AHEAD: Duration = Duration::from_secs(24 * 3600);
const MAX_BEHIND: Duration = Duration::from_secs(7 * 24 * 3600);
/// How long a clock must say what the history does not for the history to follow it.
const CLOCK_CONFIRMATION: Duration = Duration::from_secs(3600);
/// Time after which the hour of a history without news is written anyway.
const MAX_UNWRITTEN: Duration = Duration::from_secs(24 * 3600);
/// The most that a digit counts.
const MAX_COUNT: i32 = 9;

/// What an hour of the week needed, the last week first.
type HourCounts = [i32; KEPT_WEEKS];

/// What requests need now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NeededNow {
    /// Replicas for the requests that gateways reported last.
    pub replicas: i32,
    /// When a gateway last reported requests: they are of that hour.
    pub reported: Option<Timestamp>,
    /// When a gateway last had one.
    pub last_request: Option<Timestamp>,
}

/// What the last weeks let expect now and in the next minutes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedDemand {
    /// Replicas to have.
    pub replicas: i32,
    /// The hour that needed them.
    pub hour: HourOfWeek,
    /// Weeks of the last four in which it did.
    pub weeks: u32,
}

/// An hour of the week.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HourOfWeek {
    /// Its day.
    pub day: Day,
    /// The hour of the day, 0 to 23.
    pub hour: u8,
}

impl fmt::Display for ExpectedDemand {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { replicas, hour: HourOfWeek { day, hour }, weeks } = self;
        let many = if *replicas == 1 { "1 replica was" } else { &format!("{replicas} replicas were") };
        write!(formatter, "{many} needed on {day:?} from {hour:02}:00 in {weeks} of the last {WEEKS} weeks")
    }
}

/// What is remembered of a history beside its status. Losing it loses nothing that was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HistoryMemory {
    /// Since when the clock says what the history does not.
    doubt: Option<Timestamp>,
    /// The hour that was counted last, and the most that it needed: the status in the cache may be older.
    peak: Option<(Timestamp, i32)>,
}

impl HistoryMemory {
    /// Takes the most that the hour of this history needed from what was counted before.
    pub fn keep_peak(&mut self, history: &mut DemandHistory) {
        let before = self.peak.filter(|(hour, _)| *hour == history.hour.0).map_or(0, |(_, most)| most);
        history.replicas = history.replicas.max(before);
        self.peak = Some((history.hour.0, history.replicas));
    }
}

/// Whether a history may be rolled forward to `now`: a clock that differs much from it must say so for an hour, which `memory`
/// keeps. Machines without a clock that runs on begin with a wrong one.
pub fn is_clock_plausible(history: &DemandHistory, memory: &mut HistoryMemory, now: Timestamp) -> bool {
    let doubt = &mut memory.doubt;
    let apart = |later: Timestamp, earlier: Timestamp| Duration::try_from(later.duration_since(earlier));
    let hour = history.hour.0;
    let is_near = apart(hour, now).unwrap_or_default() <= MAX_AHEAD
        && apart(now, hour).unwrap_or_default() <= MAX_BEHIND;
    if is_near {
        *doubt = None;
        return true;
    }
    let since = *doubt.get_or_insert(now);
    match apart(now, since) {
        Ok(confirmed) if confirmed <= MAX_BEHIND => confirmed >= CLOCK_CONFIRMATION,
        // It jumped again.
        _ => {
            *doubt = Some(now);
            false
        }
    }
}

/// The history at `now`, with what is needed then; the hours that have passed since the last call are closed. `None` if the
/// time zone is unknown.
pub fn record(
    history: Option<&DemandHistory>,
    rules: &PredictiveScaling,
    needed: NeededNow,
    now: Timestamp,
) -> Option<DemandHistory> {
    let zone = time_zone(&rules.time_zone).ok()?;
    let mut this_hour = start_of_hour(&zone, now)?;
    let mut history = match history.filter(|history| history.time_zone == rules.time_zone) {
        Some(history) => history.clone(),
        None => DemandHistory::new(&rules.time_zone, this_hour),
    };
    // No hour is closed twice: of two clocks the one that is behind counts in the hour of the other.
    let ahead = Duration::try_from(history.hour.0.duration_since(now)).unwrap_or_default();
    if ahead > MAX_AHEAD {
        history.hour.0 = this_hour;
        history.replicas = 0;
    } else {
        this_hour = this_hour.max(history.hour.0);
    }
    let NeededNow { replicas, reported, last_request } = needed;
    let is_in = |time: Option<Timestamp>, hour: Timestamp| {
        let end = hour.saturating_add(HOUR).unwrap_or(hour);
        time.is_some_and(|time| (hour..end).contains(&time))
    };
    // A report is of the hour in which it was made: the requests of one from before may have ended since.
    let in_hour = |hour| {
        let reported = if is_in(reported, hour) { replicas } else { 0 };
        reported.max(i32::from(is_in(last_request, hour)))
    };
    let mut hour = history.hour.0;
    for _ in 0..=MAX_HOURS {
        if hour >= this_hour {
            break;
        }
        shift(&mut history.days, hour_of_week(&zone, hour), history.replicas.max(in_hour(hour)));
        history.replicas = 0;
        hour = hour.saturating_add(HOUR).ok()?;
    }
    history.hour.0 = this_hour;
    history.replicas = history.replicas.max(in_hour(this_hour)).min(MAX_COUNT);
    Some(history)
}

/// Whether one history says more than another: the start of an hour that needs nothing alone is no news, for a day.
pub fn differs(before: Option<&DemandHistory>, after: Option<&DemandHistory>) -> bool {
    let (Some(before), Some(after)) = (before, after) else { return before.is_some() != after.is_some() };
    let apart = after.hour.0.duration_since(before.hour.0).unsigned_abs();
    before.time_zone != after.time_zone
        || before.replicas != after.replicas
        || before.days != after.days
        || apart >= MAX_UNWRITTEN
}

/// The replicas to have at `now`: those that this hour, or the one that begins within `leadSeconds`, needed in at least
/// `minWeeks` of the last weeks.
pub fn expected(
    rules: &PredictiveScaling,
    history: &DemandHistory,
    now: Timestamp,
) -> Option<ExpectedDemand> {
    let zone = time_zone(&rules.time_zone).ok()?;
    let soon = now.saturating_add(lead(rules)).ok()?;
    let today = hour_of_week(&zone, now);
    let of = |time| expected_in(rules, history, hour_of_week(&zone, time), today);
    let (now, soon) = (of(now), of(soon));
    [now, soon]
        .into_iter()
        .flatten()
        .reduce(|now, soon| if soon.replicas > now.replicas { soon } else { now })
}

/// What is wrong with the rules.
pub fn invalid(rules: &PredictiveScaling) -> Option<String> {
    time_zone(&rules.time_zone).err()
}

/// Time until [`expected`] may change; no watch event announces that.
pub fn until_change(rules: &PredictiveScaling, now: Timestamp) -> Option<Duration> {
    let zone = time_zone(&rules.time_zone).ok()?;
    let until_next = |time: Timestamp| {
        let into = Duration::try_from(time.duration_since(start_of_hour(&zone, time)?)).ok()?;
        HOUR.checked_sub(into)
    };
    let soon = now.saturating_add(lead(rules)).ok()?;
    [until_next(now), until_next(soon)].into_iter().flatten().min()
}

fn lead(rules: &PredictiveScaling) -> Duration {
    Duration::from_secs(rules.lead_seconds.into())
}

/// What an hour of the week is expected to need, if it is one of those of its day that were needed most. It is `now`.
fn expected_in(
    rules: &PredictiveScaling,
    history: &DemandHistory,
    hour: HourOfWeek,
    now: HourOfWeek,
) -> Option<ExpectedDemand> {
    let counts = day_counts(&history.days, hour.day);
    // The same four weeks of all hours of the day, whether they are over today or not: else the ceiling would let in later
    // hours, on a day on which the earlier ones turn out to need nothing.
    let weeks = |index: usize| -> [i32; WEEKS] {
        let is_over = hour.day == now.day && index < usize::from(now.hour);
        std::array::from_fn(|week| counts[index][week + usize::from(is_over)])
    };
    let replicas = |weeks: &[i32; WEEKS]| {
        let mut sorted = *weeks;
        sorted.sort_unstable_by(|one, other| other.cmp(one));
        let week = usize::try_from(rules.min_weeks.max(1) - 1).unwrap_or(WEEKS);
        sorted.get(week).copied().unwrap_or_default().min(rules.max_replicas)
    };
    let weeks_with = |weeks: &[i32; WEEKS], least: i32| weeks.iter().filter(|count| **count >= least).count();
    let mut busy: Vec<usize> = (0..HOURS_PER_DAY).filter(|index| replicas(&weeks(*index)) > 0).collect();
    // Stable: of equals the earlier hours stay.
    busy.sort_by_key(|index| {
        let weeks = weeks(*index);
        std::cmp::Reverse((weeks_with(&weeks, 1), weeks.iter().sum::<i32>()))
    });
    busy.truncate(usize::try_from(rules.max_hours_per_day).unwrap_or(HOURS_PER_DAY));
    let weeks = weeks(busy.into_iter().find(|index| *index == usize::from(hour.hour))?);
    let replicas = replicas(&weeks);
    Some(ExpectedDemand {
        replicas,
        hour,
        weeks: u32::try_from(weeks_with(&weeks, replicas)).unwrap_or_default(),
    })
}

/// What the hours of a day needed; what is no digit counts as none.
fn day_counts(days: &[DayDemand], day: Day) -> [HourCounts; HOURS_PER_DAY] {
    let mut counts = [[0; KEPT_WEEKS]; HOURS_PER_DAY];
    let weeks = days.iter().find(|one| one.day == day).map(|one| one.weeks.as_slice()).unwrap_or_default();
    for (week, digits) in weeks.iter().take(KEPT_WEEKS).enumerate() {
        for (hour, digit) in digits.chars().take(HOURS_PER_DAY).enumerate() {
            counts[hour][week] =
                digit.to_digit(10).and_then(|digit| i32::try_from(digit).ok()).unwrap_or_default();
        }
    }
    counts
}

/// Closes an hour: its last week is the one that needed `replicas`, and the oldest is forgotten.
fn shift(days: &mut Vec<DayDemand>, hour: HourOfWeek, replicas: i32) {
    let mut counts = day_counts(days, hour.day);
    let Some(slot) = counts.get_mut(usize::from(hour.hour)) else { return };
    slot.rotate_right(1);
    slot[0] = replicas.clamp(0, MAX_COUNT);
    days.retain(|one| one.day != hour.day);
    if counts.iter().flatten().any(|count| *count > 0) {
        let digits = |week: usize| {
            let digit = |counts: &HourCounts| {
                u32::try_from(counts[week]).ok().and_then(|it| char::from_digit(it, 10))
            };
            counts.iter().map(|counts| digit(counts).unwrap_or('0')).collect()
        };
        days.push(DayDemand { day: hour.day, weeks: (0..KEPT_WEEKS).map(digits).collect() });
        days.sort_by_key(|one| one.day);
    }
}

fn hour_of_week(zone: &TimeZone, time: Timestamp) -> HourOfWeek {
    let local = time.to_zoned(zone.clone());
    HourOfWeek { day: local.weekday().into(), hour: local.hour().unsigned_abs() }
}

/// The start of the local hour that has this time.
fn start_of_hour(zone: &TimeZone, time: Timestamp) -> Option<Timestamp> {
    let local = time.to_zoned(zone.clone());
    let into = i64::from(local.minute()) * 60 + i64::from(local.second());
    Timestamp::from_second(time.as_second() - into).ok()
}

#[cfg(test)]
mod tests;
