//! What machines cost in a period, whether they are asked or not: their hardware, written off in equal parts, and what
//! they would draw if they only waited. Pure.

use jiff::Timestamp;
use russet_crds::{InferenceNode, Money};

/// Seconds of an hour, and watts of a kilowatt.
const KILOWATT_HOUR_JOULES: u128 = 3_600 * 1000;

/// What the machines that a cluster has now cost in a period, each from when it joined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineCosts {
    /// How many there are.
    pub machines: usize,
    /// The part of their price that the period took, of those that have one.
    pub hardware: Money,
    /// Machines without a price.
    pub without_price: usize,
    /// Thousandths of a joule that they would have drawn if they had waited all the time, of those with a figure.
    pub idle_millijoules: u64,
    /// What that electricity would have cost, of those with a price of it.
    pub idle_electricity: Money,
    /// Machines of which nobody knows what they draw while they wait.
    pub without_idle_watts: usize,
    /// Machines of which that is known, and not the price of their electricity.
    pub without_electricity_price: usize,
}

/// When the machines begin to cost what is compared with answers: where both the period and the log have begun. Of what was
/// answered before, nothing counts.
pub fn costs_begin(since: Timestamp, log_began: Option<Timestamp>) -> Timestamp {
    log_began.map_or(since, |began| began.max(since))
}

/// What these machines cost between two times.
pub fn machine_costs(nodes: &[InferenceNode], since: Timestamp, until: Timestamp) -> MachineCosts {
    let mut costs = MachineCosts { machines: nodes.len(), ..MachineCosts::default() };
    for node in nodes {
        let joined = node.metadata.creation_timestamp.as_ref().map_or(since, |created| created.0);
        let age =
            |at: Timestamp| u64::try_from(at.as_second().saturating_sub(joined.as_second())).unwrap_or(0);
        let seconds = age(until).saturating_sub(age(since));
        let energy = node.spec.energy.clone().unwrap_or_default();
        match &energy.hardware {
            Some(hardware) => {
                costs.hardware = costs.hardware.plus(hardware.written_off(age(since), age(until)))
            }
            None => costs.without_price += 1,
        }
        let measured = node.status.as_ref().and_then(|status| status.energy.as_ref());
        let Some((watts, _)) = energy.idle(measured) else {
            costs.without_idle_watts += 1;
            continue;
        };
        let joules = u64::from(watts).saturating_mul(seconds);
        costs.idle_millijoules = costs.idle_millijoules.saturating_add(joules.saturating_mul(1000));
        let Some(price) = energy.price_per_kilowatt_hour else {
            costs.without_electricity_price += 1;
            continue;
        };
        let electricity =
            Money::of_nanos(u128::from(price.nanos) * u128::from(joules) / KILOWATT_HOUR_JOULES);
        costs.idle_electricity = costs.idle_electricity.plus(electricity);
    }
    costs
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use russet_crds::{InferenceNodeSpec, InferenceNodeStatus, MeasuredPower, NodeEnergy, NodeHardware};

    use super::*;

    fn money(text: &str) -> Money {
        text.parse().unwrap()
    }

    #[test]
    fn machines_cost_from_when_they_joined_asked_or_not() {
        let at = |second| Timestamp::from_second(1_000_000_000 + second).unwrap();
        let (since, until) = (at(0), at(315_576));
        let node = |name: &str, energy: Option<NodeEnergy>, joined: i64| {
            let mut node = InferenceNode::new(name, InferenceNodeSpec { energy, ..Default::default() });
            node.metadata.creation_timestamp = Some(Time(at(joined)));
            node
        };
        let energy = NodeEnergy {
            idle_watts: Some(10),
            busy_watts: Some(100),
            price_per_kilowatt_hour: Some(money("0.50")),
            hardware: Some(NodeHardware { price: money("3000"), lifetime_years: 3 }),
        };
        // A hundredth of a year: 10 of 1,000 a year, and 876.6 Wh of 10 W.
        let whole = MachineCosts {
            machines: 1,
            hardware: money("10"),
            idle_millijoules: 3_155_760_000,
            idle_electricity: money("0.4383"),
            ..MachineCosts::default()
        };
        let old = node("old", Some(energy.clone()), -1000);
        assert_eq!(machine_costs(std::slice::from_ref(&old), since, until), whole);
        let young = node("young", Some(energy), 315_576 / 2);
        let mut measured = node("measured", None, 0);
        let power = MeasuredPower { idle_watts: Some(5), busy_watts: None };
        measured.status = Some(InferenceNodeStatus { energy: Some(power), ..InferenceNodeStatus::default() });
        // Its lifetime ends in the middle of the period.
        let past = node("past", old.spec.energy.clone(), 315_576 / 2 - 3 * 31_557_600);
        let silent = node("silent", None, 0);
        let later = node("later", silent.spec.energy.clone(), 400_000);
        let costs = machine_costs(&[old, young, past, measured, silent, later], since, until);
        let expected = MachineCosts {
            machines: 6,
            hardware: money("20"),
            without_price: 3,
            idle_millijoules: 2 * 3_155_760_000 + 2 * 1_577_880_000,
            idle_electricity: money("1.09575"),
            without_idle_watts: 2,
            // What it draws is known, at no price: it is not for nothing.
            without_electricity_price: 1,
        };
        assert_eq!(costs, expected);
        assert_eq!(machine_costs(&[], since, until), MachineCosts::default());
    }

    #[test]
    fn machines_cost_from_where_the_log_begins() {
        let at = |second| Timestamp::from_second(second).unwrap();
        for (since, log_began, expected) in
            [(100, None, 100), (100, Some(50), 100), (100, Some(100), 100), (100, Some(400), 400)]
        {
            assert_eq!(costs_begin(at(since), log_began.map(at)), at(expected), "{since} {log_began:?}");
        }
    }
}
