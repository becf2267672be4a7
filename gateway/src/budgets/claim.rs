//! Shares of a budget: what a status of a Budget becomes when a gateway asks for more, or says what it used. Pure. A status
//! is written only in place of the one that was read (compare and swap), so that all grants together stay within the limit.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use russet_crds::{BudgetStatus, BudgetWindow, GatewayUsage};

use super::amount::{Amount, Thing};
use super::window::LimitWindow;

/// Windows of one length that a status keeps. A clock that goes back finds what was used then.
const MAX_WINDOWS: usize = 4;
/// Of what is left a gateway asks for this part beyond its need, so that it asks seldom, and near the limit holds little.
pub(super) const SPARE: u64 = 8;

/// What a gateway has to do with a window.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnShare {
    pub(super) window: LimitWindow,
    pub(super) limit: Amount,
    /// What its requests used, and those that run may use.
    pub(super) used: Amount,
    pub(super) reserved: Amount,
}

/// Why there is not enough.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Shortage {
    /// The limit does not allow it.
    Limit {
        window: LimitWindow,
        thing: Thing,
        limit: Amount,
        used: Amount,
        /// What requests that run may still use, those of other gateways included.
        reserved: Amount,
        need: Amount,
        /// Whether another gateway holds some of it, which it gives back soon if it does not need it.
        is_held: bool,
    },
    /// The window is older than all that the status keeps: this machine's clock is wrong, or was.
    Clock(LimitWindow),
}

impl Shortage {
    /// Whether another gateway holds some of what is short.
    pub(super) fn is_held(&self) -> bool {
        matches!(self, Self::Limit { is_held: true, .. })
    }
}

/// The status with the gateway's grants so much larger, in all these windows or none, and some more for requests to come.
pub(super) fn claim(
    status: &BudgetStatus,
    gateway: &str,
    shares: &[OwnShare],
    need: Amount,
) -> Result<BudgetStatus, Box<Shortage>> {
    let mut status = status.clone();
    for share in shares {
        let OwnShare { window, limit, used, reserved } = *share;
        let (before, written) = granted(&status, gateway, window);
        // A clock that went back may have forgotten it.
        let used = used.max(written);
        let entry = window_of(&mut status.windows, window)?;
        let (granted_to_others, used_by_others) = of_others(entry, gateway);
        let least = used.plus(reserved).plus(need);
        if let Some(thing) = least.limited_by(limit).beyond(limit.minus(granted_to_others)) {
            let held = granted_to_others.minus(used_by_others);
            let shortage = Shortage::Limit {
                window,
                thing,
                limit,
                used: used.plus(used_by_others),
                reserved: reserved.plus(held),
                need,
                is_held: thing.of(held) > 0,
            };
            return Err(Box::new(shortage));
        }
        let spare = limit.minus(granted_to_others).minus(least).limited_by(limit).fraction(SPARE);
        // What was granted before may be reserved while this is written.
        set(entry, gateway, used, least.plus(spare).max(before));
    }
    Ok(status)
}

/// The status with what the gateway used, and with a grant of what runs and so much more; `None` where the status keeps nothing
/// of a window that old.
pub(super) fn settled(
    status: &BudgetStatus,
    gateway: &str,
    share: &OwnShare,
    spare: Amount,
) -> Option<BudgetStatus> {
    let mut status = status.clone();
    let entry = window_of(&mut status.windows, share.window).ok()?;
    set(entry, gateway, share.used, share.used.plus(share.reserved).plus(spare));
    Some(status)
}

fn window_of(
    windows: &mut Vec<BudgetWindow>,
    window: LimitWindow,
) -> Result<&mut BudgetWindow, Box<Shortage>> {
    if !windows.iter().any(|one| window.is(one)) {
        let mut starts: Vec<Timestamp> =
            windows.iter().filter(|one| one.per == window.per).map(|one| one.starts_at.0).collect();
        starts.sort();
        if starts.len() >= MAX_WINDOWS {
            if window.start < starts[0] {
                return Err(Box::new(Shortage::Clock(window)));
            }
            let oldest = starts[starts.len() - MAX_WINDOWS];
            windows.retain(|one| one.per != window.per || one.starts_at.0 > oldest);
        }
        windows.push(BudgetWindow {
            per: window.per,
            starts_at: Time(window.start),
            ends_at: Time(window.end),
            used: Amount::ZERO.usage(),
            gateways: Vec::new(),
        });
        windows.sort_by_key(|one| (one.per, one.starts_at.0));
    }
    windows.iter_mut().find(|one| window.is(one)).ok_or_else(|| Box::new(Shortage::Clock(window)))
}

/// Sets a gateway's share; what it used never becomes less.
fn set(entry: &mut BudgetWindow, gateway: &str, used: Amount, granted: Amount) {
    let place = entry.gateways.iter().position(|one| one.gateway == gateway);
    let place = place.unwrap_or_else(|| {
        entry.gateways.push(GatewayUsage { gateway: gateway.to_owned(), ..GatewayUsage::default() });
        entry.gateways.len() - 1
    });
    let own = &mut entry.gateways[place];
    let used = used.max(Amount::of(&own.used));
    (own.used, own.granted) = (used.usage(), granted.max(used).usage());
    let total = entry.gateways.iter().fold(Amount::ZERO, |sum, one| sum.plus(Amount::of(&one.used)));
    entry.used = total.usage();
}

/// What was granted to all other gateways, and what they used.
fn of_others(entry: &BudgetWindow, gateway: &str) -> (Amount, Amount) {
    let others = entry.gateways.iter().filter(|one| one.gateway != gateway);
    others.fold((Amount::ZERO, Amount::ZERO), |(granted, used), one| {
        (granted.plus(Amount::of(&one.granted)), used.plus(Amount::of(&one.used)))
    })
}

/// What was granted to all other gateways in a window.
pub(super) fn granted_to_others(status: &BudgetStatus, gateway: &str, window: LimitWindow) -> Amount {
    let entry = status.windows.iter().find(|one| window.is(one));
    entry.map_or(Amount::ZERO, |entry| of_others(entry, gateway).0)
}

/// The grant of a gateway in a window, and what the status says that it used.
pub(super) fn granted(status: &BudgetStatus, gateway: &str, window: LimitWindow) -> (Amount, Amount) {
    let entry = status.windows.iter().find(|one| window.is(one));
    let own = entry.and_then(|entry| entry.gateways.iter().find(|one| one.gateway == gateway));
    own.map_or((Amount::ZERO, Amount::ZERO), |own| (Amount::of(&own.granted), Amount::of(&own.used)))
}

#[cfg(test)]
mod tests {
    use jiff::tz::TimeZone;
    use russet_crds::BudgetPeriod;

    use super::*;

    fn window(second: i64) -> LimitWindow {
        let now = Timestamp::from_second(second).unwrap();
        LimitWindow::at(BudgetPeriod::Minute, &TimeZone::UTC, now).unwrap()
    }

    fn tokens(tokens: u64) -> Amount {
        Amount { tokens, ..Amount::ZERO }
    }

    fn share(second: i64, limit: u64, used: u64, reserved: u64) -> OwnShare {
        let limit = Amount { tokens: limit, ..Amount::MAX };
        OwnShare { window: window(second), limit, used: tokens(used), reserved: tokens(reserved) }
    }

    #[test]
    fn grants_of_all_gateways_stay_within_the_limit() {
        let random = &mut rand::rng();
        for _ in 0..2000 {
            let limit = rand::Rng::random_range(random, 0..2000);
            let mut status = BudgetStatus::default();
            let mut own = [(0, 0); 3];
            for _ in 0..60 {
                let gateway = rand::Rng::random_range(random, 0..3);
                let (used, reserved) = own[gateway];
                let name = format!("g{gateway}");
                let need = rand::Rng::random_range(random, 0..100);
                let asked = share(0, limit, used, reserved);
                match claim(&status, &name, &[asked], tokens(need)) {
                    Ok(next) => {
                        status = next;
                        own[gateway].1 += need;
                    }
                    Err(shortage) => {
                        assert!(
                            matches!(*shortage, Shortage::Limit { thing: Thing::Tokens, .. }),
                            "{shortage:?}"
                        );
                    }
                }
                // Some of what runs ends, having used less.
                let ended = rand::Rng::random_range(random, 0..=own[gateway].1);
                own[gateway] = (own[gateway].0 + ended / 2, own[gateway].1 - ended);
                if rand::Rng::random_bool(random, 0.3) {
                    let (used, reserved) = own[gateway];
                    status = settled(&status, &name, &share(0, limit, used, reserved), Amount::ZERO).unwrap();
                }
                let granted: i64 =
                    status.windows.iter().flat_map(|one| &one.gateways).map(|one| one.granted.tokens).sum();
                assert!(granted <= limit as i64, "{granted} of {limit}: {status:?}");
                let running: u64 = own.iter().map(|(used, reserved)| used + reserved).sum();
                assert!(running <= limit, "{own:?} of {limit}");
            }
        }
    }

    #[test]
    fn what_is_short_is_said_with_who_holds_it() {
        let status = claim(&BudgetStatus::default(), "a", &[share(0, 100, 0, 0)], tokens(60)).unwrap();
        assert_eq!(status.windows[0].gateways[0].granted.tokens, 65);
        let short = claim(&status, "b", &[share(0, 100, 0, 0)], tokens(36)).unwrap_err();
        let Shortage::Limit { reserved, is_held, used, .. } = *short else { panic!("{short:?}") };
        assert_eq!((reserved.tokens, used.tokens, is_held), (65, 0, true));
        // The other gave back what it did not need, and another used what it had.
        let status = settled(&status, "a", &share(0, 100, 60, 0), Amount::ZERO).unwrap();
        let status = claim(&status, "b", &[share(0, 100, 0, 0)], tokens(36)).unwrap();
        let short = claim(&status, "b", &[share(0, 100, 36, 0)], tokens(5)).unwrap_err();
        let Shortage::Limit { used, is_held, .. } = *short else { panic!("{short:?}") };
        assert_eq!((used.tokens, is_held), (96, false));
        assert!(claim(&status, "b", &[share(0, 100, 36, 0)], tokens(4)).is_ok());
    }

    #[test]
    fn a_clock_that_jumps_opens_no_window_twice() {
        let mut status = BudgetStatus::default();
        for second in [0, 60, 120] {
            status = claim(&status, "a", &[share(second, 100, 0, 0)], tokens(90)).unwrap();
        }
        // Ten years on, and back: what was used is still there.
        status = claim(&status, "a", &[share(315_360_000, 100, 0, 0)], tokens(90)).unwrap();
        assert!(claim(&status, "b", &[share(120, 100, 0, 0)], tokens(20)).is_err());
        assert!(claim(&status, "b", &[share(60, 100, 0, 0)], tokens(20)).is_err());
        status = claim(&status, "a", &[share(180, 100, 0, 0)], tokens(90)).unwrap();
        assert_eq!(status.windows.len(), MAX_WINDOWS);
        // Of the first minute nothing is known any more, so it is not given out again.
        assert_eq!(
            claim(&status, "b", &[share(0, 100, 0, 0)], tokens(1)),
            Err(Box::new(Shortage::Clock(window(0))))
        );
    }

    #[test]
    fn what_is_not_limited_is_counted_and_never_short() {
        let unlimited = OwnShare { limit: Amount { money: 5, ..Amount::MAX }, ..share(0, 1, 7, 3) };
        let need = Amount { requests: 1, tokens: u64::MAX, money: 5, millijoules: 1 };
        let status = claim(&BudgetStatus::default(), "a", &[unlimited], need).unwrap();
        assert_eq!(status.windows[0].used.tokens, 7);
        let short = claim(&status, "b", &[unlimited], Amount { money: 1, ..need }).unwrap_err();
        assert!(matches!(*short, Shortage::Limit { thing: Thing::Money, .. }), "{short:?}");
    }
}
