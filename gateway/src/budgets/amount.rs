//! Amounts of what budgets limit: requests, tokens, money and energy.

use russet_crds::{BudgetLimit, BudgetUsage, Money};
use serde::{Deserialize, Serialize};

/// Requests, tokens, billionths of money and thousandths of a joule. As a limit, `u64::MAX` is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Amount {
    pub(crate) requests: u64,
    pub(crate) tokens: u64,
    pub(crate) money: u64,
    /// The journal of an earlier release has none.
    #[serde(default)]
    pub(crate) millijoules: u64,
}

impl Amount {
    /// No limit.
    pub(super) const MAX: Self = Self::each(u64::MAX);
    pub(crate) const ZERO: Self = Self::each(0);

    const fn each(count: u64) -> Self {
        Self { requests: count, tokens: count, money: count, millijoules: count }
    }

    /// What a limit allows.
    pub(super) fn limit(limit: &BudgetLimit) -> Self {
        let count = |value: Option<i64>| value.map_or(u64::MAX, |value| u64::try_from(value).unwrap_or(0));
        Self {
            requests: count(limit.requests),
            tokens: count(limit.tokens),
            money: limit.money.map_or(u64::MAX, |money| money.nanos),
            millijoules: match limit.joules {
                Some(joules) => u64::try_from(joules).unwrap_or(0).saturating_mul(1000),
                None => u64::MAX,
            },
        }
    }

    /// What a status says.
    pub(super) fn of(usage: &BudgetUsage) -> Self {
        let count = |value: i64| u64::try_from(value).unwrap_or(0);
        Self {
            requests: count(usage.requests),
            tokens: count(usage.tokens),
            money: usage.money.nanos,
            millijoules: count(usage.millijoules),
        }
    }

    /// The same for a status.
    pub(super) fn usage(self) -> BudgetUsage {
        let count = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        BudgetUsage {
            requests: count(self.requests),
            tokens: count(self.tokens),
            money: Money { nanos: self.money },
            millijoules: count(self.millijoules),
        }
    }

    /// Thing by thing.
    fn zip(self, other: Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            requests: combine(self.requests, other.requests),
            tokens: combine(self.tokens, other.tokens),
            money: combine(self.money, other.money),
            millijoules: combine(self.millijoules, other.millijoules),
        }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        self.zip(other, u64::saturating_add)
    }

    /// What is left of it, at least nothing.
    pub(super) fn minus(self, other: Self) -> Self {
        self.zip(other, u64::saturating_sub)
    }

    pub(super) fn max(self, other: Self) -> Self {
        self.zip(other, u64::max)
    }

    pub(super) fn min(self, other: Self) -> Self {
        self.zip(other, u64::min)
    }

    /// The same of those things that are limited, nothing of others.
    pub(super) fn limited_by(self, limit: Self) -> Self {
        self.zip(limit, |amount, limit| if limit == u64::MAX { 0 } else { amount })
    }

    /// So much of it.
    pub(super) fn fraction(self, of: u64) -> Self {
        self.zip(Self::ZERO, |amount, _| amount / of)
    }

    /// The first thing of which this is more than there is.
    pub(super) fn beyond(self, available: Self) -> Option<Thing> {
        Thing::ALL.into_iter().find(|thing| thing.of(self) > thing.of(available))
    }
}

/// What is limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Thing {
    Requests,
    Tokens,
    Money,
    Energy,
}

impl Thing {
    pub(super) const ALL: [Self; 4] = [Self::Requests, Self::Tokens, Self::Money, Self::Energy];

    /// How much of it an amount has.
    pub(super) fn of(self, amount: Amount) -> u64 {
        match self {
            Self::Requests => amount.requests,
            Self::Tokens => amount.tokens,
            Self::Money => amount.money,
            Self::Energy => amount.millijoules,
        }
    }

    /// A number of it, for people.
    pub(super) fn shown(self, amount: Amount) -> String {
        match self {
            Self::Requests => amount.requests.to_string(),
            Self::Tokens => amount.tokens.to_string(),
            Self::Money => Money { nanos: amount.money }.to_string(),
            Self::Energy => joules(amount.millijoules),
        }
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Tokens => "tokens",
            Self::Money => "money",
            Self::Energy => "joules",
        }
    }
}

/// Joules as people write them: without zeros at the end.
fn joules(millijoules: u64) -> String {
    match (millijoules / 1000, millijoules % 1000) {
        (whole, 0) => whole.to_string(),
        (whole, part) => format!("{whole}.{part:03}").trim_end_matches('0').to_owned(),
    }
}
