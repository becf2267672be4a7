//! What requests take of engines in energy and money: the time that an engine computed for one, at the watts of its
//! group and the price of their electricity. Pure. What is not known is not claimed: a sum with an unknown part has no
//! figure.

use russet_crds::{GroupEnergy, Money, PowerSource};

/// Microseconds of an hour.
const HOUR_MICROSECONDS: u128 = 3_600_000_000;

/// What one engine did for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EnginePart {
    /// Microseconds that its group computed for it, as the engine said last; none where it said nothing.
    pub(crate) engine_microseconds: Option<u64>,
    /// Whether it sent a part of an answer.
    pub(crate) has_answered: bool,
    /// Power of its group; none where nobody knows it.
    pub(crate) power: Option<GroupEnergy>,
}

/// What all engines together did for a request so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EngineTotal {
    has_parts: bool,
    engine_microseconds: u64,
    microjoules: u64,
    electricity: Money,
    source: Option<PowerSource>,
    /// Whether an engine answered without saying how long it computed.
    is_untimed: bool,
    /// Whether nobody knows the power of one.
    is_unpowered: bool,
    /// Whether nobody knows the price of its electricity.
    is_unpriced: bool,
}

/// What a request took, as far as it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EngineUse {
    /// Microseconds that engines computed for it.
    pub(crate) engine_microseconds: Option<u64>,
    /// Thousandths of a joule.
    pub(crate) millijoules: Option<u64>,
    /// Whether all the watts behind that were measured.
    pub(crate) source: Option<PowerSource>,
    /// What the electricity cost.
    pub(crate) electricity: Option<Money>,
    /// Whether an engine computed a part of it, and nobody knows at how many joules.
    pub(crate) is_unmetered: bool,
}

impl EnginePart {
    /// Millionths of a joule: watts times microseconds.
    fn microjoules(self) -> Option<u64> {
        Some(u64::from(self.power?.busy_watts).saturating_mul(self.engine_microseconds?))
    }

    /// What its electricity cost, rounded up.
    fn electricity(self) -> Option<Money> {
        let price = self.power?.price_per_hour?;
        let exact = u128::from(price.nanos) * u128::from(self.engine_microseconds?);
        Some(Money::of_nanos(exact.div_ceil(HOUR_MICROSECONDS)))
    }

    /// Thousandths of a joule, rounded up; none where they are not known.
    pub(crate) fn millijoules(self) -> Option<u64> {
        self.microjoules().map(|microjoules| microjoules.div_ceil(1000))
    }

    /// Joules, where they are known, and where their watts are from.
    pub(crate) fn joules(self) -> Option<(f64, PowerSource)> {
        Some((self.microjoules()? as f64 / 1e6, self.power?.source))
    }

    /// What its electricity cost, in the currency of all prices.
    pub(crate) fn cost(self) -> Option<f64> {
        Some(self.electricity()?.nanos as f64 / 1e9)
    }
}

impl EngineTotal {
    /// Adds what another engine did, or the same one for another response. One that was lost before it answered and
    /// said nothing adds nothing: what it computed until then is not known. Nor does one that refused the request: it
    /// computed nothing, at whatever watts.
    pub(crate) fn add(&mut self, part: EnginePart) {
        let EnginePart { engine_microseconds, has_answered, power } = part;
        let Some(microseconds) = engine_microseconds else {
            self.is_untimed |= has_answered;
            return;
        };
        if microseconds == 0 && !has_answered {
            return;
        }
        self.has_parts = true;
        self.engine_microseconds = self.engine_microseconds.saturating_add(microseconds);
        self.source = self.source.max(power.map(|power| power.source));
        match part.microjoules() {
            Some(microjoules) => self.microjoules = self.microjoules.saturating_add(microjoules),
            None => self.is_unpowered = true,
        }
        match part.electricity() {
            Some(electricity) => self.electricity = self.electricity.plus(electricity),
            None => self.is_unpriced = true,
        }
    }

    /// What of it is known.
    pub(crate) fn known(self) -> EngineUse {
        let is_timed = self.has_parts && !self.is_untimed;
        let is_powered = is_timed && !self.is_unpowered;
        EngineUse {
            engine_microseconds: is_timed.then_some(self.engine_microseconds),
            millijoules: is_powered.then_some(self.microjoules / 1000),
            source: self.source.filter(|_| is_powered),
            electricity: (is_powered && !self.is_unpriced).then_some(self.electricity),
            is_unmetered: self.is_untimed || self.is_unpowered,
        }
    }
}

#[cfg(test)]
mod tests {
    use PowerSource::{Declared, Measured};

    use super::*;

    fn power(busy_watts: u32, source: PowerSource, price: Option<&str>) -> Option<GroupEnergy> {
        let price_per_hour = price.map(|price| price.parse().unwrap());
        Some(GroupEnergy { busy_watts, source, price_per_hour })
    }

    fn part(engine_microseconds: Option<u64>, power: Option<GroupEnergy>) -> EnginePart {
        EnginePart { engine_microseconds, has_answered: true, power }
    }

    #[test]
    fn energy_is_time_by_watts_and_nothing_unknown_is_claimed() {
        let measured = power(120, Measured, Some("0.036"));
        let declared = power(300, Declared, Some("0.15"));
        let unpriced = power(50, Measured, None);
        let second = Some(1_000_000);
        let lost = EnginePart { engine_microseconds: None, has_answered: false, power: measured };
        let refused = |power| EnginePart { engine_microseconds: Some(0), has_answered: false, power };
        for (story, parts, expected) in [
            ("nothing computed", vec![], (None, None, None, None)),
            (
                "a second at 120 W",
                vec![part(second, measured)],
                (second, Some(120_000), Some(Measured), Some("0.00001")),
            ),
            (
                "another engine goes on with it",
                vec![part(second, measured), part(Some(500_000), declared)],
                (Some(1_500_000), Some(270_000), Some(Declared), Some("0.000030834")),
            ),
            (
                "no price",
                vec![part(second, measured), part(second, unpriced)],
                (Some(2_000_000), Some(170_000), Some(Measured), None),
            ),
            (
                "no watts",
                vec![part(second, None), part(second, measured)],
                (Some(2_000_000), None, None, None),
            ),
            ("an old engine", vec![part(None, measured)], (None, None, None, None)),
            (
                "an old one goes on",
                vec![part(second, measured), part(None, measured)],
                (None, None, None, None),
            ),
            (
                "one that was lost at once",
                vec![lost, part(second, measured)],
                (second, Some(120_000), Some(Measured), Some("0.00001")),
            ),
            ("a client that left before the answer", vec![lost], (None, None, None, None)),
            ("a refusal", vec![refused(None)], (None, None, None, None)),
            (
                "one that refuses, of unknown watts and price",
                vec![refused(None), part(second, measured), refused(unpriced)],
                (second, Some(120_000), Some(Measured), Some("0.00001")),
            ),
            (
                "one that fails after it has computed",
                vec![EnginePart { engine_microseconds: second, ..lost }],
                (second, Some(120_000), Some(Measured), Some("0.00001")),
            ),
            (
                "more than there is",
                vec![part(Some(u64::MAX), measured); 2],
                (Some(u64::MAX), Some(u64::MAX / 1000), Some(Measured), Some("368934881.474191034")),
            ),
            (
                "more money than there is",
                vec![part(Some(u64::MAX), power(1, Declared, Some("999999999")))],
                (Some(u64::MAX), Some(u64::MAX / 1000), Some(Declared), Some("999999999.999999999")),
            ),
        ] {
            let mut total = EngineTotal::default();
            parts.into_iter().for_each(|part| total.add(part));
            let EngineUse { engine_microseconds, millijoules, source, electricity, is_unmetered } =
                total.known();
            let (time, energy, from, money) = expected;
            assert_eq!((engine_microseconds, millijoules, source), (time, energy, from), "{story}");
            assert_eq!(electricity, money.map(|money: &str| money.parse().unwrap()), "{story}");
            let names = ["no watts", "an old engine", "an old one goes on"];
            assert_eq!(is_unmetered, names.contains(&story), "{story}");
        }
    }
}
