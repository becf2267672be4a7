//! What a machine draws, what its electricity and the machine itself cost, and what a group of ranks draws together.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Money;

/// Most watts of one machine: a rack of GPUs draws as much.
pub const MAX_NODE_WATTS: u32 = 100_000;
/// Seconds of a year, of which hardware loses its part.
const SECONDS_PER_YEAR: u64 = 31_557_600;

/// What the owner says of a machine's power and price.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "!has(self.idleWatts) || !has(self.busyWatts) || self.busyWatts >= self.idleWatts",
    "message": "busyWatts is at least idleWatts: a machine draws no less while it computes"
}]))]
pub struct NodeEnergy {
    /// Watts of the whole machine while it waits; used where the agent cannot measure them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = MAX_NODE_WATTS))]
    pub idle_watts: Option<u32>,
    /// Watts of the whole machine while it computes; used where the agent cannot measure them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = MAX_NODE_WATTS))]
    pub busy_watts: Option<u32>,
    /// Price of a kilowatt hour, in the currency of all prices, such as `"0.32"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_kilowatt_hour: Option<Money>,
    /// The machine itself, which is written off whether it computes or not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hardware: Option<NodeHardware>,
}

/// What a machine cost, and for how long.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeHardware {
    /// Price of the machine.
    pub price: Money,
    /// Years over which the price is written off, in equal parts.
    #[schemars(range(min = 1, max = 50))]
    pub lifetime_years: u32,
}

impl NodeHardware {
    /// The part of the price that the time from `from` to `until` takes, in seconds since the machine joined. Once its
    /// lifetime is over, all of it is written off.
    pub fn written_off(&self, from: u64, until: u64) -> Money {
        let lifetime = SECONDS_PER_YEAR.saturating_mul(self.lifetime_years.max(1).into());
        let nanos_until = |seconds: u64| {
            u128::from(self.price.nanos) * u128::from(seconds.min(lifetime)) / u128::from(lifetime)
        };
        // Differences of what is written off at two times add up to the price.
        Money::of_nanos(nanos_until(until).saturating_sub(nanos_until(from)))
    }
}

/// Watts of a machine, as its agent measured them: averages, in whole watts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MeasuredPower {
    /// Watts while no engine computes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_watts: Option<u32>,
    /// Watts while an engine computes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_watts: Option<u32>,
}

/// Where a figure of watts comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum PowerSource {
    /// Agents measured it.
    Measured,
    /// An owner says so in the spec of a node, of one at least.
    Declared,
    /// A value from a newer release; nothing is claimed of it.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

impl PowerSource {
    /// The word in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Declared => "declared",
            Self::Unknown => "unknown",
        }
    }
}

/// Power of all machines of a group while its ranks compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GroupEnergy {
    /// Watts of all of them together.
    pub busy_watts: u32,
    /// `Measured` where that is so of all of them.
    pub source: PowerSource,
    /// Price of an hour at these watts; absent unless every node has a price of electricity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_hour: Option<Money>,
}

impl NodeEnergy {
    /// Watts of the machine while it computes, measured if they are: else as declared.
    pub fn busy(&self, measured: Option<&MeasuredPower>) -> Option<(u32, PowerSource)> {
        pick(measured.and_then(|measured| measured.busy_watts), self.busy_watts)
    }

    /// Watts of the machine while it waits, measured if they are: else as declared.
    pub fn idle(&self, measured: Option<&MeasuredPower>) -> Option<(u32, PowerSource)> {
        pick(measured.and_then(|measured| measured.idle_watts), self.idle_watts)
    }
}

fn pick(measured: Option<u32>, declared: Option<u32>) -> Option<(u32, PowerSource)> {
    let from = |source| move |watts| (watts, source);
    measured.map(from(PowerSource::Measured)).or(declared.map(from(PowerSource::Declared)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_watts_come_before_declared_ones() {
        let declared = NodeEnergy { idle_watts: Some(10), busy_watts: Some(100), ..NodeEnergy::default() };
        let measured = MeasuredPower { idle_watts: None, busy_watts: Some(80) };
        let some = |watts, source| Some((watts, source));
        assert_eq!(declared.busy(Some(&measured)), some(80, PowerSource::Measured));
        assert_eq!(declared.idle(Some(&measured)), some(10, PowerSource::Declared));
        assert_eq!(declared.busy(None), some(100, PowerSource::Declared));
        assert_eq!(NodeEnergy::default().busy(None), None);
    }

    #[test]
    fn hardware_is_written_off_in_equal_parts() {
        const YEAR: u64 = SECONDS_PER_YEAR;
        for (price, lifetime_years, from, until, expected) in [
            ("4000", 4, 0, YEAR, "1000"),
            ("4000", 4, 2 * YEAR, 3 * YEAR, "1000"),
            ("4000", 4, 0, 0, "0"),
            ("3155.76", 1, 0, 100_000, "10"),
            ("1", 0, 0, YEAR, "1"),
            ("4000", 4, 3 * YEAR, 9 * YEAR, "1000"),
            ("4000", 4, 4 * YEAR, 5 * YEAR, "0"),
            ("4000", 4, YEAR, 0, "0"),
            ("10", 1, YEAR / 3, YEAR, "6.666666667"),
            ("999999999", 1, 0, u64::MAX, "999999999"),
        ] {
            let hardware = NodeHardware { price: price.parse().unwrap(), lifetime_years };
            let expected: Money = expected.parse().unwrap();
            assert_eq!(hardware.written_off(from, until), expected, "{hardware:?} from {from} to {until}");
        }
    }
}
