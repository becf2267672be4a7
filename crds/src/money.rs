//! Money: an amount, exact to the billionth, as a decimal in a string. It has no currency: prices and budgets of an owner
//! are in one, whichever that is.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Billionths of one.
const NANOS: u64 = 1_000_000_000;
/// Digits after the point.
const DECIMALS: usize = 9;

/// An amount of money of at least nothing, in billionths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Money {
    /// Billionths of the currency's unit.
    pub nanos: u64,
}

/// A text is no amount of money.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidMoney(String);

impl fmt::Display for InvalidMoney {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(text) = self;
        write!(
            formatter,
            "{text:?} is no amount of money; write a decimal such as \"12.50\", with at most nine digits before and after the point"
        )
    }
}

impl std::error::Error for InvalidMoney {}

impl Money {
    /// Nothing.
    pub const ZERO: Self = Self { nanos: 0 };
    /// The largest amount that a text may have. Sums and products stay there: an amount that is written can be read.
    pub const MAX: Self = Self { nanos: 999_999_999_999_999_999 };

    /// So many billionths, at most [`Self::MAX`].
    pub fn of_nanos(nanos: u128) -> Self {
        Self { nanos: u64::try_from(nanos).unwrap_or(u64::MAX) }.min(Self::MAX)
    }

    /// What `tokens` cost at this price for a million of them, rounded up.
    pub fn for_tokens(self, tokens: u64) -> Self {
        Self::of_nanos((u128::from(self.nanos) * u128::from(tokens)).div_ceil(1_000_000))
    }

    /// Both together.
    pub fn plus(self, other: Self) -> Self {
        Self::of_nanos(u128::from(self.nanos) + u128::from(other.nanos))
    }
}

impl FromStr for Money {
    type Err = InvalidMoney;

    fn from_str(text: &str) -> Result<Self, InvalidMoney> {
        let invalid = || InvalidMoney(text.chars().take(40).collect());
        let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
        let is_number = |part: &str| {
            (1..=DECIMALS).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit())
        };
        if !is_number(whole) || !is_number(fraction) {
            return Err(invalid());
        }
        let number = |part: &str| part.parse::<u64>().map_err(|_| invalid());
        let fraction = number(&format!("{fraction:0<DECIMALS$}"))?;
        Ok(Self { nanos: number(whole)? * NANOS + fraction })
    }
}

impl fmt::Display for Money {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A text of more digits could not be read again.
        let Self { nanos } = (*self).min(Self::MAX);
        let fraction = format!("{:09}", nanos % NANOS);
        // Cents are always shown.
        let (cents, rest) = fraction.split_at(2);
        write!(formatter, "{}.{cents}{}", nanos / NANOS, rest.trim_end_matches('0'))
    }
}

impl Serialize for Money {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Money {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Cow::<'_, str>::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for Money {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Money".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": r"^[0-9]{1,9}(\.[0-9]{1,9})?$", "maxLength": 19})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_and_written_exactly() {
        for (text, nanos, shown) in [
            ("0", 0, "0.00"),
            ("5", 5_000_000_000, "5.00"),
            ("0.15", 150_000_000, "0.15"),
            ("0.000000001", 1, "0.000000001"),
            ("12.5", 12_500_000_000, "12.50"),
            ("999999999.999999999", 999_999_999_999_999_999, "999999999.999999999"),
            ("007.10", 7_100_000_000, "7.10"),
        ] {
            let money: Money = text.parse().unwrap();
            assert_eq!((money.nanos, money.to_string().as_str()), (nanos, shown), "{text}");
            assert_eq!(shown.parse(), Ok(money));
            assert_eq!(
                serde_json::from_str::<Money>(&serde_json::to_string(&money).unwrap()).unwrap(),
                money
            );
        }
        for text in [
            "",
            ".",
            "1.",
            ".5",
            "-1",
            "+1",
            "1e3",
            "1,5",
            "1.2.3",
            "1 ",
            "1234567890",
            "0.1234567890",
            "NaN",
            "٣",
        ] {
            let error = text.parse::<Money>().unwrap_err().to_string();
            assert!(error.contains("12.50"), "{error}");
            assert!(serde_json::from_str::<Money>(&format!("{text:?}")).is_err(), "{text}");
        }
        assert!(serde_json::from_str::<Money>("0.15").is_err(), "a binary fraction is not exact");
    }

    #[test]
    fn tokens_cost_their_price_rounded_up_and_never_overflow() {
        let price = |text: &str| text.parse::<Money>().unwrap();
        for (text, tokens, nanos) in [
            ("0.15", 1_000_000, 150_000_000),
            ("0.15", 1, 150),
            ("0.000001", 1, 1),
            ("0", u64::MAX, 0),
            ("999999999", u64::MAX, Money::MAX.nanos),
            ("3", 0, 0),
        ] {
            assert_eq!(price(text).for_tokens(tokens).nanos, nanos, "{text} × {tokens}");
        }
        assert_eq!(Money { nanos: u64::MAX }.plus(Money { nanos: 1 }), Money::MAX);
    }

    #[test]
    fn amounts_that_saturate_are_read_as_they_are_written() {
        let dear: Money = "999999999.999999999".parse().unwrap();
        assert_eq!(dear, Money::MAX);
        for (money, read) in [
            (Money::ZERO, Money::ZERO),
            (dear, Money::MAX),
            (dear.plus(dear), Money::MAX),
            (dear.for_tokens(u64::MAX), Money::MAX),
            (Money::of_nanos(u128::MAX), Money::MAX),
            (Money::of_nanos(7), Money { nanos: 7 }),
            // Whoever builds one from a number.
            (Money { nanos: Money::MAX.nanos + 1 }, Money::MAX),
            (Money { nanos: u64::MAX }, Money::MAX),
        ] {
            let json = serde_json::to_string(&money).unwrap();
            assert_eq!(serde_json::from_str::<Money>(&json).unwrap(), read, "{json}");
        }
    }
}
