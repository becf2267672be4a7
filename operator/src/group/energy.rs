//! What the machines of a group draw together while its ranks compute, and what an hour of that costs. Pure.

use russet_crds::{GroupEnergy, InferenceNode, Money, PowerSource};

/// Watts of a kilowatt.
const KILO: u64 = 1000;

/// What is known of a node's power.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodePower {
    /// Watts while it computes, and where they are from.
    busy: Option<(u32, PowerSource)>,
    /// Price of an hour at these watts.
    price_per_hour: Option<Money>,
}

impl NodePower {
    /// Of a node.
    pub fn of(node: &InferenceNode) -> Self {
        let declared = node.spec.energy.clone().unwrap_or_default();
        let busy = declared.busy(node.status.as_ref().and_then(|status| status.energy.as_ref()));
        let price = |watts: u32| {
            let nanos = declared.price_per_kilowatt_hour?.nanos.saturating_mul(watts.into()).div_ceil(KILO);
            Some(Money { nanos })
        };
        Self { busy, price_per_hour: busy.and_then(|(watts, _)| price(watts)) }
    }
}

/// Power of a group with these nodes; `None` where one of them has no figure, or none that this release knows.
pub fn group_energy(nodes: impl IntoIterator<Item = NodePower>) -> Option<GroupEnergy> {
    let mut sum = None;
    for NodePower { busy, price_per_hour } in nodes {
        let (busy_watts, source) = busy.filter(|(_, source)| *source != PowerSource::Unknown)?;
        let node = GroupEnergy { busy_watts, source, price_per_hour };
        sum = Some(sum.map_or(node, |sum: GroupEnergy| GroupEnergy {
            busy_watts: sum.busy_watts.saturating_add(busy_watts),
            source: sum.source.max(source),
            price_per_hour: sum.price_per_hour.zip(price_per_hour).map(|(sum, node)| sum.plus(node)),
        }));
    }
    sum
}

#[cfg(test)]
mod tests {
    use russet_crds::{InferenceNodeSpec, InferenceNodeStatus, MeasuredPower, NodeEnergy};

    use super::*;

    fn node(declared: Option<u32>, measured: Option<u32>, price: Option<&str>) -> NodePower {
        let price_per_kilowatt_hour = price.map(|price| price.parse().unwrap());
        let energy = NodeEnergy { busy_watts: declared, price_per_kilowatt_hour, ..NodeEnergy::default() };
        let spec = InferenceNodeSpec { energy: Some(energy), ..InferenceNodeSpec::default() };
        let mut node = InferenceNode::new("a", spec);
        let energy = measured.map(|busy| MeasuredPower { busy_watts: Some(busy), idle_watts: None });
        node.status = Some(InferenceNodeStatus { energy, ..InferenceNodeStatus::default() });
        NodePower::of(&node)
    }

    #[test]
    fn a_group_draws_what_its_nodes_do_or_nothing_is_claimed() {
        use PowerSource::{Declared, Measured};
        let measured = node(Some(300), Some(120), Some("0.30"));
        let declared = node(Some(300), None, Some("0.50"));
        let unpriced = node(None, Some(50), None);
        let silent = node(None, None, Some("0.30"));
        for (story, nodes, expected) in [
            ("one that is measured", vec![measured], Some((120, Measured, Some("0.036")))),
            ("one that is declared", vec![declared], Some((300, Declared, Some("0.15")))),
            ("one declared makes all", vec![measured, declared], Some((420, Declared, Some("0.186")))),
            ("one without a price", vec![unpriced, measured], Some((170, Measured, None))),
            ("one without a figure", vec![measured, silent], None),
            ("a node that is not there", vec![measured, NodePower::default()], None),
            ("no nodes", vec![], None),
            (
                "prices are rounded up",
                vec![node(Some(1), None, Some("0.000000001"))],
                Some((1, Declared, Some("0.000000001"))),
            ),
        ] {
            let expected = expected.map(|(busy_watts, source, price): (u32, _, Option<&str>)| GroupEnergy {
                busy_watts,
                source,
                price_per_hour: price.map(|price| price.parse().unwrap()),
            });
            assert_eq!(group_energy(nodes), expected, "{story}");
        }
    }
}
