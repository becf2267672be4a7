//! Rate limits and quiet hours of file transfers: an InferenceNode's `spec.transfers` for one kind of
//! transfer, shared by all such transfers of this machine.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Zoned;
use jiff::civil::Weekday as Day;
use russet_crds::{NodeTransfers, QuietHours, TransferLimits, Weekday};
use russet_plan::quantity;
use tokio::sync::watch;
use tokio::time::Instant;

/// Minimum rate: a lower one would look like a stalled source.
const MIN_BITS_PER_SECOND: u64 = 1_000_000;
/// Poll interval for the clock, which may be set.
const CLOCK_POLL_INTERVAL: Duration = Duration::from_secs(20);

const DAY_MINUTES: u32 = 24 * 60;
const WEEK_MINUTES: u32 = 7 * DAY_MINUTES;

/// Limits of both kinds of transfer.
#[derive(Clone, Default)]
pub struct TransferLimiters {
    /// Transfers from sources.
    pub sources: TransferLimiter,
    /// Transfers from other nodes.
    pub nodes: TransferLimiter,
}

impl TransferLimiters {
    /// Sets the limits, also for running transfers.
    pub fn set(&self, transfers: Option<&NodeTransfers>) {
        let limits = |kind: fn(&NodeTransfers) -> &Option<TransferLimits>| {
            transfers.and_then(|transfers| kind(transfers).clone()).unwrap_or_default()
        };
        self.sources.set(limits(|transfers| &transfers.from_sources));
        self.nodes.set(limits(|transfers| &transfers.from_nodes));
    }
}

/// Limits of one kind of transfer. Clones share them.
#[derive(Clone)]
pub struct TransferLimiter(Arc<LimiterState>);

struct LimiterState {
    limits: watch::Sender<TransferLimits>,
    /// When all admitted bytes will have been transferred at the current rate.
    next_free: Mutex<Option<Instant>>,
}

impl Default for TransferLimiter {
    fn default() -> Self {
        let limits = watch::Sender::new(TransferLimits::default());
        Self(Arc::new(LimiterState { limits, next_free: Mutex::default() }))
    }
}

impl TransferLimiter {
    /// Sets the limits.
    pub fn set(&self, limits: TransferLimits) {
        self.0.limits.send_if_modified(|known| {
            let changed = *known != limits;
            *known = limits;
            changed
        });
    }

    /// Waits until this many bytes may be transferred.
    pub async fn acquire(&self, bytes: u64) {
        let mut limits = self.0.limits.subscribe();
        let Some(rate) = bits_per_second(&limits.borrow_and_update()) else { return };
        let turn = {
            let mut free = self.next_free();
            let (turn, after) = reserve(*free, Instant::now(), bytes, rate);
            *free = Some(after);
            turn
        };
        tokio::select! {
            () = tokio::time::sleep_until(turn) => {}
            // A new rate cancels waits at the old one, and clears the debt.
            _ = limits.changed() => *self.next_free() = None,
        }
    }

    fn next_free(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.0.next_free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Message for users during quiet hours.
    pub fn quiet_message(&self) -> Option<String> {
        let limits = self.0.limits.borrow();
        let now = Zoned::now();
        let left = quiet_minutes_left(&limits.quiet_hours, minute_of_week(&now))?;
        let text = match left {
            WEEK_MINUTES.. => "at any time".to_owned(),
            left => {
                let end = now.checked_add(jiff::Span::new().minutes(left)).unwrap_or(now);
                format!("until {}", end.strftime("%a %H:%M"))
            }
        };
        Some(format!("quiet hours in spec.transfers of this node: nothing is downloaded {text}"))
    }

    /// Waits until quiet hours begin.
    pub async fn wait_until_quiet(&self) {
        self.wait_until(|pace| pace.quiet_message().is_some()).await;
    }

    /// Waits until transfers are allowed.
    pub async fn wait_until_allowed(&self) {
        self.wait_until(|pace| pace.quiet_message().is_none()).await;
    }

    async fn wait_until(&self, is_so: impl Fn(&Self) -> bool) {
        let mut limits = self.0.limits.subscribe();
        while !is_so(self) {
            // The sender belongs to this struct.
            tokio::time::timeout(CLOCK_POLL_INTERVAL, limits.changed()).await.ok();
        }
    }
}

/// When this many bytes may start, and when the next ones may.
fn reserve(free: Option<Instant>, now: Instant, bytes: u64, rate: u64) -> (Instant, Instant) {
    let turn = free.map_or(now, |free| free.max(now));
    (turn, turn + Duration::from_secs_f64(bytes as f64 * 8.0 / rate as f64))
}

/// The limit in bits per second.
fn bits_per_second(limits: &TransferLimits) -> Option<u64> {
    let text = limits.max_bits_per_second.as_deref()?;
    // The API server rejects invalid values.
    Some(quantity::parse(text).ok()?.max(MIN_BITS_PER_SECOND))
}

/// Minutes since the beginning of the week.
fn minute_of_week(now: &Zoned) -> u32 {
    let minutes = i64::from(now.weekday().to_monday_zero_offset()) * i64::from(DAY_MINUTES)
        + i64::from(now.hour()) * 60
        + i64::from(now.minute());
    u32::try_from(minutes).unwrap_or(0)
}

/// Remaining minutes of quiet hours, if they apply now; [`WEEK_MINUTES`] where they never end.
fn quiet_minutes_left(hours: &[QuietHours], minute: u32) -> Option<u32> {
    let parts: Vec<(u32, u32)> = hours.iter().flat_map(quiet_intervals).collect();
    let is_quiet = |minute: u32| {
        // An interval from last week may not have ended.
        parts.iter().any(|(begin, length)| (minute + WEEK_MINUTES - begin) % WEEK_MINUTES < *length)
    };
    let end =
        (0..WEEK_MINUTES).find(|later| !is_quiet((minute + later) % WEEK_MINUTES)).unwrap_or(WEEK_MINUTES);
    (end > 0).then_some(end)
}

/// Start minutes in the week, and lengths in minutes.
fn quiet_intervals(hours: &QuietHours) -> Vec<(u32, u32)> {
    let (Some(from), Some(until)) = (minute_of_day(&hours.from), minute_of_day(&hours.until)) else {
        return Vec::new();
    };
    let length = if until > from { until - from } else { until + DAY_MINUTES - from };
    let begins = |day: Day| {
        let is_it = |word: &Weekday| civil_weekday(*word) == Some(day);
        hours.days.is_empty() || hours.days.iter().any(is_it)
    };
    let days = Day::Monday.cycle_forward().take(7).enumerate().filter(|(_, day)| begins(*day));
    days.filter_map(|(number, _)| Some((u32::try_from(number).ok()? * DAY_MINUTES + from, length))).collect()
}

fn civil_weekday(word: Weekday) -> Option<Day> {
    Some(match word {
        Weekday::Mon => Day::Monday,
        Weekday::Tue => Day::Tuesday,
        Weekday::Wed => Day::Wednesday,
        Weekday::Thu => Day::Thursday,
        Weekday::Fri => Day::Friday,
        Weekday::Sat => Day::Saturday,
        Weekday::Sun => Day::Sunday,
        Weekday::Unknown => return None,
    })
}

/// Minutes since midnight.
fn minute_of_day(text: &str) -> Option<u32> {
    let (hours, minutes) = text.split_once(':')?;
    Some(hours.parse::<u32>().ok()? * 60 + minutes.parse::<u32>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hours(text: &str) -> QuietHours {
        let (from, rest) = text.split_once('-').unwrap();
        let (until, days) = rest.split_once(' ').unwrap_or((rest, ""));
        let days = days.split(' ').filter(|day| !day.is_empty());
        let days = days.map(|day| serde_json::from_value(day.into()).unwrap()).collect();
        QuietHours { from: from.to_owned(), until: until.to_owned(), days }
    }

    #[test]
    fn quiet_hours_span_midnight_and_the_end_of_the_week() {
        let at = |text: &str| {
            let now: jiff::civil::DateTime = text.parse().unwrap();
            minute_of_week(&now.to_zoned(jiff::tz::TimeZone::UTC).unwrap())
        };
        // 2026-11-23 is a Monday.
        for (story, parts, now, expected) in [
            ("none", vec![], "2026-11-23T10:00", None),
            ("in the middle", vec!["08:00-18:00"], "2026-11-23T10:00", Some(8 * 60)),
            ("the first minute", vec!["08:00-18:00"], "2026-11-23T08:00", Some(10 * 60)),
            ("just over", vec!["08:00-18:00"], "2026-11-23T18:00", None),
            ("not on this day", vec!["08:00-18:00 Tue Wed"], "2026-11-23T10:00", None),
            ("over midnight", vec!["22:00-06:00 Mon"], "2026-11-24T05:00", Some(60)),
            ("of the day before alone", vec!["22:00-06:00 Mon"], "2026-11-23T05:00", None),
            ("over the week's end", vec!["22:00-06:00 Sun"], "2026-11-23T05:59", Some(1)),
            ("one after the other", vec!["08:00-12:00", "12:00-13:00"], "2026-11-23T11:00", Some(120)),
            ("a whole day", vec!["00:00-00:00 Mon"], "2026-11-23T00:00", Some(DAY_MINUTES)),
            ("always", vec!["05:00-05:00"], "2026-11-23T10:00", Some(WEEK_MINUTES)),
            ("a day of a newer release", vec!["08:00-18:00 Moonday"], "2026-11-23T10:00", None),
        ] {
            let parts: Vec<QuietHours> = parts.into_iter().map(hours).collect();
            assert_eq!(quiet_minutes_left(&parts, at(now)), expected, "{story}");
        }
    }

    #[test]
    fn rate_below_the_minimum_becomes_the_minimum() {
        let limits =
            |text: &str| TransferLimits { max_bits_per_second: Some(text.into()), ..Default::default() };
        assert_eq!(bits_per_second(&TransferLimits::default()), None);
        assert_eq!(bits_per_second(&limits("200M")), Some(200_000_000));
        assert_eq!(bits_per_second(&limits("5k")), Some(MIN_BITS_PER_SECOND));
    }

    #[test]
    fn rate_limiter_queues_transfers_and_saves_no_credit() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut free = None;
        for number in 0..10 {
            let (turn, after) = reserve(free, start, 1_000_000, 8_000_000);
            assert_eq!((turn - start, after - start), (number * second, (number + 1) * second));
            free = Some(after);
        }
        let late = start + 60 * second;
        assert_eq!(reserve(free, late, 1_000_000, 8_000_000), (late, late + second));
    }

    #[tokio::test]
    async fn waiting_transfer_proceeds_when_the_rate_changes() {
        let pace = TransferLimiter::default();
        pace.set(TransferLimits { max_bits_per_second: Some("8M".into()), ..Default::default() });
        // Years of bytes; the next one waits behind them.
        pace.acquire(1 << 50).await;
        let (mut limits, waits) = (pace.0.limits.subscribe(), pace.acquire(1));
        let mut waits = std::pin::pin!(waits);
        assert!(futures::poll!(&mut waits).is_pending());
        pace.set(TransferLimits::default());
        limits.changed().await.unwrap();
        waits.await;
    }

    #[tokio::test]
    async fn changes_of_quiet_hours_take_effect_at_once() {
        let pace = TransferLimiter::default();
        pace.wait_until_allowed().await;
        let quiet = TransferLimits { quiet_hours: vec![hours("00:00-00:00")], ..Default::default() };
        let (hushed, _) = tokio::join!(pace.wait_until_quiet(), async { pace.set(quiet) });
        assert_eq!(hushed, ());
        assert!(pace.quiet_message().unwrap().contains("at any time"), "{:?}", pace.quiet_message());
        tokio::join!(pace.wait_until_allowed(), async { pace.set(TransferLimits::default()) });
        assert_eq!(pace.quiet_message(), None);
    }
}
