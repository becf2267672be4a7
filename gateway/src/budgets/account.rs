//! The accounts of one Budget in this gateway: what it was granted, what its requests used and what those that run may use.
//! No clock and no IO.

use std::collections::{BTreeMap, HashMap};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use russet_crds::{Budget, BudgetPeriod, BudgetStatus};

use super::amount::{Amount, Thing};
use super::claim::{self, OwnShare, Shortage};
use super::journal::AccountKey;
use super::window::{LimitWindow, WindowKey};

/// What a gateway knows of a Budget.
pub(super) struct Accounts {
    /// The object as it was read last, by whoever read it.
    pub(super) object: Budget,
    uid: String,
    zone: TimeZone,
    limits: Vec<(BudgetPeriod, Amount)>,
    /// The windows of those that were reserved in last: a calendar is slow to ask for every request.
    current: Vec<LimitWindow>,
    accounts: BTreeMap<WindowKey, Account>,
    /// Whether something was reserved since the status was written.
    is_active: bool,
}

struct Account {
    window: LimitWindow,
    limit: Amount,
    granted: Amount,
    used: Amount,
    reserved: Amount,
    /// What the status says that was used.
    written: Amount,
}

impl Account {
    fn share(&self) -> OwnShare {
        OwnShare { window: self.window, limit: self.limit, used: self.used, reserved: self.reserved }
    }

    fn spare(&self) -> Amount {
        self.granted.minus(self.used).minus(self.reserved)
    }
}

/// A part of a window that a request may use.
#[derive(Clone, Debug)]
pub(super) struct Hold {
    pub(super) account: AccountKey,
    pub(super) amount: Amount,
}

impl Accounts {
    /// Those of an object that is seen for the first time, with what was used before this gateway started.
    pub(super) fn new(object: Budget, recovered: &HashMap<AccountKey, Amount>) -> Self {
        let mut accounts = Self {
            uid: String::new(),
            zone: TimeZone::UTC,
            limits: Vec::new(),
            current: Vec::new(),
            accounts: BTreeMap::new(),
            is_active: false,
            object: object.clone(),
        };
        accounts.update(object);
        let own = recovered.keys().filter(|(uid, _)| *uid == accounts.uid);
        let windows = own.filter_map(|(_, (per, start))| {
            LimitWindow::at(*per, &accounts.zone, Timestamp::from_second(*start).ok()?)
        });
        for window in windows.collect::<Vec<_>>() {
            accounts.open_window(window, recovered);
        }
        accounts
    }

    /// Counts all that the gateway was granted as used.
    pub(super) fn count_grants(&mut self, gateway: &str) {
        let windows = self.object.status.iter().flat_map(|status| &status.windows);
        let own = windows.filter(|one| one.gateways.iter().any(|share| share.gateway == gateway));
        let windows: Vec<LimitWindow> =
            own.map(|one| LimitWindow { per: one.per, start: one.starts_at.0, end: one.ends_at.0 }).collect();
        for window in windows {
            self.open_window(window, &HashMap::new());
            let status = self.object.status.clone().unwrap_or_default();
            let (granted, _) = claim::granted(&status, gateway, window);
            if let Some(account) = self.accounts.get_mut(&window.key()) {
                account.used = account.used.max(granted);
            }
        }
    }

    fn open_window(&mut self, window: LimitWindow, recovered: &HashMap<AccountKey, Amount>) {
        let (key, limit) = (window.key(), limit_of(&self.limits, window));
        let used = || recovered.get(&(self.uid.clone(), key)).copied().unwrap_or_default();
        self.accounts.entry(key).or_insert_with(|| Account {
            window,
            limit,
            granted: Amount::ZERO,
            used: used(),
            reserved: Amount::ZERO,
            written: Amount::ZERO,
        });
    }

    /// Takes over what a newer object says; one that was created anew begins anew.
    pub(super) fn update(&mut self, object: Budget) {
        let uid = object.metadata.uid.clone().unwrap_or_default();
        if uid != self.uid {
            self.accounts.clear();
        }
        self.uid = uid;
        self.zone = TimeZone::get(&object.spec.time_zone).unwrap_or(TimeZone::UTC);
        self.current.clear();
        self.limits = object.spec.limits.iter().map(|limit| (limit.per, Amount::limit(limit))).collect();
        for account in self.accounts.values_mut() {
            account.limit = limit_of(&self.limits, account.window);
        }
        self.object = object;
    }

    /// Whether any limit counts tokens or money.
    pub(super) fn limits_answers(&self) -> bool {
        self.limits.iter().any(|(_, limit)| limit.tokens != u64::MAX || limit.money != u64::MAX)
    }

    /// Whether any limit counts money.
    pub(super) fn limits_money(&self) -> bool {
        self.limits.iter().any(|(_, limit)| limit.money != u64::MAX)
    }

    /// The windows of now, with what was used in them before this gateway started; `None` where a length is of a newer release.
    fn open(&mut self, recovered: &HashMap<AccountKey, Amount>, now: Timestamp) -> Option<Vec<WindowKey>> {
        if self.current.len() != self.limits.len() || !self.current.iter().all(|window| window.contains(now))
        {
            let windows = self.limits.iter().map(|(per, _)| LimitWindow::at(*per, &self.zone, now));
            self.current = windows.collect::<Option<_>>()?;
        }
        let keys = self.current.iter().map(LimitWindow::key).collect();
        for place in 0..self.current.len() {
            // Windows that are over, and have given all back, are forgotten; one that clocks came back to opens again.
            if !self.accounts.contains_key(&self.current[place].key()) {
                self.open_window(self.current[place], recovered);
            }
        }
        Some(keys)
    }

    /// Reserves so much in the windows of now, in all or none; `None` beyond what was granted.
    pub(super) fn try_hold(
        &mut self,
        need: Amount,
        recovered: &HashMap<AccountKey, Amount>,
        now: Timestamp,
    ) -> Option<Vec<Hold>> {
        let keys = self.open(recovered, now)?;
        let fits = |account: &Account| {
            let wanted = need.limited_by(account.limit);
            let sum = account.used.plus(account.reserved).plus(wanted);
            // A limit may be lower than what was granted before it changed.
            wanted.beyond(account.spare()).is_none()
                && sum.limited_by(account.limit).beyond(account.limit).is_none()
        };
        if !keys.iter().all(|key| self.accounts.get(key).is_some_and(fits)) {
            return None;
        }
        self.is_active = true;
        let mut holds = Vec::with_capacity(keys.len());
        for window in keys {
            let Some(account) = self.accounts.get_mut(&window) else { continue };
            let amount = need.limited_by(account.limit);
            account.reserved = account.reserved.plus(amount);
            holds.push(Hold { account: (self.uid.clone(), window), amount });
        }
        Some(holds)
    }

    /// A request uses no more of what it reserved, and used this.
    pub(super) fn settle(&mut self, hold: &Hold, used: Amount) {
        let (uid, window) = &hold.account;
        // One that was created anew owes nothing of what the one before it granted.
        if let Some(account) = self.accounts.get_mut(window).filter(|_| *uid == self.uid) {
            account.reserved = account.reserved.minus(hold.amount);
            account.used = account.used.plus(used);
        }
    }

    /// A request used more of a window, which nothing was reserved for.
    pub(super) fn charge(&mut self, (uid, window): &AccountKey, used: Amount) {
        if let Some(account) = self.accounts.get_mut(window).filter(|_| *uid == self.uid) {
            account.used = account.used.plus(used);
            self.is_active = true;
        }
    }

    /// The status that grants so much more, in all windows of now.
    pub(super) fn claim(
        &mut self,
        gateway: &str,
        need: Amount,
        recovered: &HashMap<AccountKey, Amount>,
        now: Timestamp,
    ) -> Result<BudgetStatus, ClaimError> {
        let keys = self.open(recovered, now).ok_or(ClaimError::UnknownPeriod)?;
        let shares: Vec<OwnShare> =
            keys.iter().filter_map(|key| self.accounts.get(key)).map(Account::share).collect();
        let status = self.object.status.clone().unwrap_or_default();
        claim::claim(&status, gateway, &shares, need).map_err(ClaimError::Short)
    }

    /// Takes over an object that this gateway wrote: its grants are those of the status.
    pub(super) fn written(&mut self, object: Budget, gateway: &str) {
        let status = object.status.clone().unwrap_or_default();
        for account in self.accounts.values_mut() {
            (account.granted, account.written) = claim::granted(&status, gateway, account.window);
            account.used = account.used.max(account.written);
        }
        self.update(object);
    }

    /// The status with what this gateway used, and without what it needs no longer. What it gives back it does not use from here
    /// on, whether the write arrives or not.
    pub(super) fn give_back(&mut self, gateway: &str, now: Timestamp) -> BudgetStatus {
        let is_active = std::mem::take(&mut self.is_active);
        let mut status = self.object.status.clone().unwrap_or_default();
        for account in self.accounts.values_mut() {
            let least = account.used.plus(account.reserved);
            let free =
                account.limit.minus(claim::granted_to_others(&status, gateway, account.window)).minus(least);
            let keeps =
                if is_active { free.limited_by(account.limit).fraction(claim::SPARE) } else { Amount::ZERO };
            let spare = account.spare().min(keeps);
            account.granted = least.plus(spare);
            match claim::settled(&status, gateway, &account.share(), spare) {
                Some(settled) => status = settled,
                None => account.written = account.used,
            }
        }
        self.accounts.retain(|_, account| {
            account.window.end > now || account.reserved != Amount::ZERO || account.used != account.written
        });
        status
    }

    /// What is used in the windows of now, in each of the thing that is nearest to its limit, with that part of the limit.
    pub(super) fn usage(&self, status: &BudgetStatus, now: Timestamp) -> Vec<LimitUsage> {
        let usage = |(per, limit): &(BudgetPeriod, Amount)| {
            let window = LimitWindow::at(*per, &self.zone, now)?;
            let entry = status.windows.iter().find(|one| window.is(one));
            let used = entry.map_or(Amount::ZERO, |entry| Amount::of(&entry.used));
            let things = Thing::ALL.into_iter().filter(|thing| thing.of(*limit) != u64::MAX);
            let part = |thing: &Thing| match thing.of(*limit) {
                0 => 1.0,
                limit => thing.of(used) as f64 / limit as f64,
            };
            let nearest = things.max_by(|one, other| part(one).total_cmp(&part(other)))?;
            let part = part(&nearest);
            let (used, limit) = (nearest.shown(used), nearest.shown(*limit));
            let text = match nearest {
                Thing::Money => format!("{used} of {limit} per {}", per.as_str()),
                Thing::Requests | Thing::Tokens | Thing::Energy => {
                    format!("{used} of {limit} {} per {}", nearest.as_str(), per.as_str())
                }
            };
            Some(LimitUsage { text, part })
        };
        self.limits.iter().filter_map(usage).collect()
    }
}

/// The limit of a window's length; none where it has none any more.
fn limit_of(limits: &[(BudgetPeriod, Amount)], window: LimitWindow) -> Amount {
    let limit = limits.iter().find(|(per, _)| *per == window.per);
    limit.map_or(Amount::MAX, |(_, limit)| *limit)
}

/// What is used of a limit.
pub(super) struct LimitUsage {
    /// For people.
    pub(super) text: String,
    /// 1 is all of it.
    pub(super) part: f64,
}

/// Why nothing more is granted.
#[derive(Debug)]
pub(super) enum ClaimError {
    Short(Box<Shortage>),
    /// A limit is of a newer release.
    UnknownPeriod,
}
