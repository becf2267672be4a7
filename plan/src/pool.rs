//! Pools: which nodes a selector matches, and the eligible nodes of one group with the links they require.
//! The source of a requirement, a NodePool or another object, is only a name here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use russet_crds::{FabricDemand, FabricKind, LabelOperator, NodePoolSpec, NodeSelector};

pub use crate::link_demand::LinkDemand;
use crate::note::Note;
use crate::quantity;

/// Labels of a node.
pub type Labels = BTreeMap<String, String>;

/// Eligible nodes for one group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EligibleNodes {
    /// The NodePool; `None` without pools.
    pub pool: Option<String>,
    /// The nodes; `None` for every node.
    pub nodes: Option<Arc<BTreeSet<String>>>,
    /// Links required between any two nodes of a group of several ranks.
    pub demand: Option<LinkDemand>,
    /// The objects with these requirements, for display.
    pub demanded_by: Vec<String>,
}

impl EligibleNodes {
    /// The same nodes with one more link requirement.
    pub fn with_demand(mut self, demand: LinkDemand, who: String) -> Self {
        self.demand = Some(self.demand.map_or(demand, |own| own.and(demand)));
        self.demanded_by.push(who);
        self
    }

    /// Whether a node is in it.
    pub fn contains(&self, node: &str) -> bool {
        self.nodes.as_ref().is_none_or(|nodes| nodes.contains(node))
    }
}

/// Parses a requirement; `field` is its path.
pub fn parse_demand(demand: &FabricDemand, field: &str) -> Result<LinkDemand, Note> {
    let FabricDemand { kind, min_bits_per_second } = demand;
    if *kind == FabricKind::Unknown {
        return Err(Note::Newer { field: format!("{field}.kind") });
    }
    let bits =
        min_bits_per_second.as_deref().map(|text| parse_rate(text, &format!("{field}.minBitsPerSecond")));
    Ok(LinkDemand { kind: *kind, bits: bits.transpose()?.unwrap_or(0) })
}

/// Parses a rate such as `60G`.
pub fn parse_rate(text: &str, field: &str) -> Result<u64, Note> {
    quantity::parse(text).map_err(|_| Note::Invalid {
        field: field.to_owned(),
        why: format!("{text:?} is not a number of bits per second; write one such as 60G"),
    })
}

/// Resolves a pool to these nodes, or says why it is invalid.
pub fn resolve<'a>(
    name: &str,
    spec: &NodePoolSpec,
    nodes: impl Iterator<Item = (&'a str, &'a Labels)>,
) -> Result<EligibleNodes, Note> {
    let NodePoolSpec { selector, fabric } = spec;
    if selector.match_expressions.iter().any(|rule| rule.operator == LabelOperator::Unknown) {
        return Err(Note::Newer { field: "spec.selector.matchExpressions[].operator".to_owned() });
    }
    let demand = fabric.as_ref().map(|fabric| self::parse_demand(fabric, "spec.fabric")).transpose()?;
    let taken =
        nodes.filter(|(_, labels)| matches_selector(selector, labels)).map(|(node, _)| node.to_owned());
    let nodes = Some(Arc::new(taken.collect()));
    let area = EligibleNodes { pool: Some(name.to_owned()), nodes, ..EligibleNodes::default() };
    Ok(match demand {
        Some(demand) => area.with_demand(demand, format!("NodePool {name}")),
        None => area,
    })
}

/// Whether a node with these labels matches a selector, with the semantics of Kubernetes.
pub fn matches_selector(selector: &NodeSelector, labels: &Labels) -> bool {
    let NodeSelector { match_labels, match_expressions } = selector;
    match_labels.iter().all(|(key, value)| labels.get(key) == Some(value))
        && match_expressions.iter().all(|rule| {
            let value = labels.get(&rule.key);
            let named = value.is_some_and(|value| rule.values.contains(value));
            match rule.operator {
                LabelOperator::In => named,
                LabelOperator::NotIn => !named,
                LabelOperator::Exists => value.is_some(),
                LabelOperator::DoesNotExist => value.is_none(),
                LabelOperator::Unknown => false,
            }
        })
}

/// For a selector that matches no node: the values of its labels that nodes have, as text.
pub fn hint<'a>(selector: &NodeSelector, nodes: impl Iterator<Item = &'a Labels> + Clone) -> String {
    /// Maximum number of values of one label to show.
    const SHOWN: usize = 8;
    let mut keys: Vec<&str> = selector.match_labels.keys().map(String::as_str).collect();
    keys.extend(selector.match_expressions.iter().map(|rule| rule.key.as_str()));
    keys.dedup();
    let have = keys.into_iter().map(|key| {
        let values: BTreeSet<&str> =
            nodes.clone().filter_map(|labels| labels.get(key)).map(String::as_str).collect();
        match values.len() {
            0 => format!("no node has the label {key}"),
            count => {
                let more = if count > SHOWN { ", …" } else { "" };
                let values: Vec<&str> = values.into_iter().take(SHOWN).collect();
                format!("{key} is {}{more} on the nodes there are", values.join(", "))
            }
        }
    });
    have.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use russet_crds::LabelRule;

    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn rule(key: &str, operator: LabelOperator, values: &[&str]) -> NodeSelector {
        let values = values.iter().map(|value| (*value).to_owned()).collect();
        let rule = LabelRule { key: key.to_owned(), operator, values };
        NodeSelector { match_expressions: vec![rule], ..NodeSelector::default() }
    }

    #[test]
    fn selectors_read_as_those_of_kubernetes() {
        use LabelOperator::*;
        let node = labels(&[("memory", "512Gi"), ("chip", "M3-Ultra")]);
        let exactly =
            |pairs: &[(&str, &str)]| NodeSelector { match_labels: labels(pairs), ..NodeSelector::default() };
        let both = NodeSelector {
            match_labels: labels(&[("memory", "512Gi")]),
            ..rule("chip", NotIn, &["M3-Ultra"])
        };
        for (selector, expected) in [
            (NodeSelector::default(), true),
            (exactly(&[("memory", "512Gi")]), true),
            (exactly(&[("memory", "512Gi"), ("chip", "M4-Max")]), false),
            (exactly(&[("rack", "a")]), false),
            (rule("chip", In, &["M4-Max", "M3-Ultra"]), true),
            (rule("chip", In, &["M4-Max"]), false),
            (rule("rack", In, &["a"]), false),
            (rule("chip", NotIn, &["M4-Max"]), true),
            (rule("rack", NotIn, &["a"]), true),
            (rule("chip", Exists, &[]), true),
            (rule("rack", Exists, &[]), false),
            (rule("chip", DoesNotExist, &[]), false),
            (rule("rack", DoesNotExist, &[]), true),
            (rule("chip", Unknown, &[]), false),
            (both, false),
        ] {
            assert_eq!(matches_selector(&selector, &node), expected, "{selector:?}");
        }
    }

    #[test]
    fn selector_without_matches_lists_existing_labels() {
        let nodes = [labels(&[("memory", "64Gi")]), labels(&[("memory", "512Gi")]), labels(&[])];
        let hint = |key: &str| super::hint(&rule(key, LabelOperator::Exists, &[]), nodes.iter());
        assert_eq!(hint("memory"), "memory is 512Gi, 64Gi on the nodes there are");
        assert_eq!(hint("rack"), "no node has the label rack");
    }

    #[test]
    fn pools_with_newer_words_or_invalid_rates_are_rejected() {
        let nodes = [("a", labels(&[]))];
        let area =
            |spec: &NodePoolSpec| super::resolve("p", spec, nodes.iter().map(|(node, it)| (*node, it)));
        let fabric = |kind, bits: &str| NodePoolSpec {
            fabric: Some(FabricDemand { kind, min_bits_per_second: Some(bits.to_owned()) }),
            ..NodePoolSpec::default()
        };
        let made = area(&fabric(FabricKind::Thunderbolt, "60G")).unwrap();
        assert_eq!(made.demand, Some(LinkDemand { kind: FabricKind::Thunderbolt, bits: 60_000_000_000 }));
        assert!(made.contains("a") && !made.contains("b"));
        let selector = rule("a", LabelOperator::Unknown, &[]);
        for (spec, words) in [
            (NodePoolSpec { selector, fabric: None }, "operator is a word of a newer release"),
            (fabric(FabricKind::Unknown, "1"), "spec.fabric.kind is a word of a newer release"),
            (fabric(FabricKind::Any, "99999999T"), "minBitsPerSecond: \"99999999T\" is not a number of bits"),
        ] {
            let note = area(&spec).unwrap_err().to_string();
            assert!(note.contains(words), "{note}");
        }
    }
}
