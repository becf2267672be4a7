//! Fabric domains: sets of nodes that are pairwise linked as a pool requires. Found along the links, never by
//! enumerating sets or cycles of nodes.

use std::collections::{BTreeMap, BTreeSet};

use russet_crds::{FabricDomain, FabricKind, Link, LinkKind};

use super::Fabric;
use crate::nodes::Nodes;
use crate::pool::LinkDemand;

/// Maximum steps of the search for domains. Nodes have few ports, so a search is short; this bounds one over
/// a faulty report of thousands of links.
const MAX_STEPS: u32 = 20_000;
/// Maximum number of unlinked pairs to name.
const MAX_SHOWN_PAIRS: usize = 3;

/// The links between nodes, regardless of use.
#[derive(Clone, Debug)]
pub struct LinkGraph<'a> {
    nodes: &'a Nodes,
    cables: Fabric<'a>,
}

impl<'a> LinkGraph<'a> {
    /// The links that `nodes` report.
    pub fn new(nodes: &'a Nodes) -> Self {
        Self { nodes, cables: Fabric::new(nodes, BTreeMap::new()) }
    }

    fn ends(&self, node: &str, peer: &str, kind: FabricKind) -> impl Iterator<Item = &'a Link> {
        let links = self.nodes.get(node).map(|node| node.links.as_slice()).unwrap_or_default();
        links.iter().filter(move |link| {
            link.peer == peer
                && match kind {
                    FabricKind::Any => true,
                    FabricKind::Thunderbolt => link.kind == LinkKind::Thunderbolt,
                    FabricKind::ThunderboltRdma => {
                        link.kind == LinkKind::Thunderbolt && link.rdma_device.is_some()
                    }
                    FabricKind::Unknown => false,
                }
        })
    }

    /// Whether both nodes report such a link.
    fn joined(&self, a: &str, b: &str, kind: FabricKind) -> bool {
        match kind {
            FabricKind::ThunderboltRdma => self.cables.joined(a, b),
            _ => [(a, b), (b, a)].iter().all(|(node, peer)| self.ends(node, peer, kind).next().is_some()),
        }
    }

    /// Speed of their best such link, if both report one.
    fn bits(&self, a: &str, b: &str, kind: FabricKind) -> Option<u64> {
        let best = |node, peer| self.ends(node, peer, kind).filter_map(|link| link.bits_per_second).max();
        Some(best(a, b)?.min(best(b, a)?))
    }

    /// Whether two nodes are linked as required.
    pub fn satisfies(&self, a: &str, b: &str, demand: LinkDemand) -> bool {
        let LinkDemand { kind, bits } = demand;
        self.joined(a, b, kind) && (bits == 0 || self.bits(a, b, kind).is_some_and(|has| has >= bits))
    }

    /// What two nodes lack to be linked as required.
    fn missing_link(&self, a: &str, b: &str, demand: LinkDemand) -> String {
        let LinkDemand { kind, bits } = demand;
        if !self.joined(a, b, kind) {
            if kind == FabricKind::ThunderboltRdma {
                return self.cables.refusal(a, b);
            }
            let silent = if self.ends(a, b, kind).next().is_none() { (a, b) } else { (b, a) };
            let words = if kind == FabricKind::Thunderbolt { "Thunderbolt link" } else { "link" };
            return format!("node {} reports no {words} to node {}", silent.0, silent.1);
        }
        match self.bits(a, b, kind) {
            None => format!("the speed of the link between {a} and {b} is not reported"),
            Some(has) => {
                format!("{a} and {b} are joined with {}, not {}", show_bits(has), show_bits(bits))
            }
        }
    }

    /// The first few pairs among `names` that are not linked as required.
    pub fn missing_links(&self, names: &[&str], demand: LinkDemand) -> String {
        let missing = every_two(names).filter(|(a, b)| !self.satisfies(a, b, demand));
        missing
            .take(MAX_SHOWN_PAIRS)
            .map(|(a, b)| self.missing_link(a, b, demand))
            .collect::<Vec<_>>()
            .join("; ")
    }

    /// The maximal subsets of `names` that are pairwise linked as required, of at least two nodes, each in
    /// the order of the names; the largest first.
    pub fn domains<'n>(&self, names: &[&'n str], demand: LinkDemand) -> Vec<Vec<&'n str>> {
        let index: BTreeMap<&str, usize> = names.iter().enumerate().map(|(at, name)| (*name, at)).collect();
        let near = |at: usize| -> BTreeSet<usize> {
            let name = names[at];
            let links = self.nodes.get(name).map(|node| node.links.as_slice()).unwrap_or_default();
            let peers = links.iter().filter_map(|link| index.get(link.peer.as_str()).copied());
            peers.filter(|&peer| peer != at && self.satisfies(name, names[peer], demand)).collect()
        };
        let near: Vec<BTreeSet<usize>> = (0..names.len()).map(near).collect();
        let mut search = CliqueSearch { near: &near, found: Vec::new(), steps: MAX_STEPS };
        // Each node with those after it: sets with earlier nodes were found already.
        for (at, near) in near.iter().enumerate() {
            let (before, after) = near.iter().copied().partition(|&other| other < at);
            search.grow(&mut vec![at], after, before);
        }
        search.found.sort_by_key(|set| (std::cmp::Reverse(set.len()), set.clone()));
        search.found.into_iter().map(|set| set.into_iter().map(|at| names[at]).collect()).collect()
    }

    /// The domains for a status, with the worst kind and speed of their links.
    pub fn status_domains(
        &self,
        names: &[&str],
        demand: Option<LinkDemand>,
        most: usize,
    ) -> Vec<FabricDomain> {
        let kinds = [FabricKind::ThunderboltRdma, FabricKind::Thunderbolt, FabricKind::Any];
        let demand = demand.unwrap_or_default();
        let mut shown: Vec<FabricDomain> = Vec::new();
        for kind in kinds.into_iter().filter(|kind| *kind >= demand.kind) {
            for nodes in self.domains(names, LinkDemand { kind, ..demand }) {
                // Skip the same nodes with a better link, and subsets of a larger domain.
                if shown
                    .iter()
                    .any(|other| nodes.iter().all(|node| other.nodes.iter().any(|has| has == node)))
                {
                    continue;
                }
                let bits: Option<Vec<u64>> = every_two(&nodes).map(|(a, b)| self.bits(a, b, kind)).collect();
                let min_bits_per_second = bits.and_then(|bits| bits.into_iter().min());
                let nodes = nodes.into_iter().map(str::to_owned).collect();
                shown.push(FabricDomain { nodes, kind, min_bits_per_second });
            }
        }
        shown.sort_by_key(|domain| std::cmp::Reverse(domain.nodes.len()));
        shown.truncate(most);
        shown
    }
}

/// Every pair of `names`.
fn every_two<'n>(names: &[&'n str]) -> impl Iterator<Item = (&'n str, &'n str)> {
    names.iter().enumerate().flat_map(|(at, a)| names[at + 1..].iter().map(move |b| (*a, *b)))
}

/// Bits per second as text: `60 Gbit/s`.
pub fn show_bits(bits: u64) -> String {
    for (unit, name) in [(1_000_000_000, "Gbit/s"), (1_000_000, "Mbit/s"), (1_000, "kbit/s")] {
        if bits >= unit {
            let tenths = (u128::from(bits) * 10 + u128::from(unit) / 2) / u128::from(unit);
            return match tenths % 10 {
                0 => format!("{} {name}", tenths / 10),
                tenth => format!("{}.{tenth} {name}", tenths / 10),
            };
        }
    }
    format!("{bits} bit/s")
}

/// Bron–Kerbosch search for maximal cliques.
struct CliqueSearch<'s> {
    near: &'s [BTreeSet<usize>],
    found: Vec<Vec<usize>>,
    steps: u32,
}

impl CliqueSearch<'_> {
    /// `may` are nodes that can extend the set; `might` are nodes of sets that were found before.
    fn grow(&mut self, set: &mut Vec<usize>, may: BTreeSet<usize>, might: BTreeSet<usize>) {
        let Some(steps) = self.steps.checked_sub(1) else { return };
        self.steps = steps;
        if may.is_empty() {
            if might.is_empty() && set.len() > 1 {
                let mut found = set.clone();
                found.sort_unstable();
                self.found.push(found);
            }
            return;
        }
        // Every maximal set contains this node or one that is not linked with it.
        let pivot = may.union(&might).max_by_key(|&&at| self.near[at].intersection(&may).count());
        let pivot = pivot.map(|&at| &self.near[at]);
        let (mut may, mut might) = (may, might);
        let tried: Vec<usize> =
            may.iter().copied().filter(|at| pivot.is_none_or(|near| !near.contains(at))).collect();
        for at in tried {
            let near = &self.near[at];
            set.push(at);
            self.grow(
                set,
                may.intersection(near).copied().collect(),
                might.intersection(near).copied().collect(),
            );
            set.pop();
            may.remove(&at);
            might.insert(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::NodeInfo;

    /// Nodes with a cable for every pair, at this many Gbit/s unless 0; RDMA if both have it.
    fn cluster(names: &[&str], rdma: &[&str], pairs: &[(&str, &str, u64)]) -> Nodes {
        let mut nodes: Nodes = names.iter().map(|name| ((*name).to_owned(), NodeInfo::default())).collect();
        for (a, b, gigabits) in pairs {
            for (node, peer) in [(a, b), (b, a)] {
                let link = Link {
                    peer: (*peer).to_string(),
                    interface: format!("en-{peer}"),
                    kind: LinkKind::Thunderbolt,
                    rdma_device: rdma.contains(node).then(|| format!("rdma_en-{peer}")),
                    bits_per_second: (*gigabits > 0).then_some(gigabits * 1_000_000_000),
                    ..Link::default()
                };
                nodes.get_mut(*node).unwrap().links.push(link);
            }
        }
        nodes
    }

    fn text(domains: &[Vec<&str>]) -> String {
        domains.iter().map(|nodes| nodes.concat()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn domains_are_the_largest_sets_in_which_every_two_are_joined() {
        let names = ["a", "b", "c", "d", "e"];
        let ring = [("a", "b", 0), ("b", "c", 0), ("c", "d", 0), ("a", "d", 0)];
        let mesh: Vec<(&str, &str, u64)> = [ring.as_slice(), &[("a", "c", 0), ("b", "d", 0)]].concat();
        for (pairs, expected) in [
            (vec![], ""),
            (vec![("a", "b", 0)], "ab"),
            (ring.to_vec(), "ab ad bc cd"),
            (vec![("a", "b", 0), ("b", "c", 0), ("a", "c", 0), ("c", "d", 0)], "abc cd"),
            (mesh.clone(), "abcd"),
            ([mesh, vec![("d", "e", 0)]].concat(), "abcd de"),
        ] {
            let nodes = cluster(&names, &[], &pairs);
            let demand = LinkDemand { kind: FabricKind::Thunderbolt, bits: 0 };
            assert_eq!(text(&LinkGraph::new(&nodes).domains(&names, demand)), expected, "{pairs:?}");
        }
    }

    #[test]
    fn unlinked_pair_names_the_missing_link() {
        let mut nodes =
            cluster(&["a", "b", "c", "d"], &["a", "b"], &[("a", "b", 80), ("a", "c", 40), ("a", "d", 0)]);
        nodes.get_mut("c").unwrap().links.clear();
        let web = LinkGraph::new(&nodes);
        for (pair, kind, gigabits, expected) in [
            (["a", "b"], FabricKind::ThunderboltRdma, 80, ""),
            (["a", "b"], FabricKind::Any, 100, "a and b are joined with 80 Gbit/s, not 100 Gbit/s"),
            (["a", "c"], FabricKind::Any, 0, "node c reports no link to node a"),
            (["a", "d"], FabricKind::Thunderbolt, 0, ""),
            (["a", "d"], FabricKind::Thunderbolt, 1, "the speed of the link between a and d is not reported"),
            (
                ["a", "d"],
                FabricKind::ThunderboltRdma,
                0,
                "a and d have no RDMA link: node d has no RDMA device on its Thunderbolt link en-a to node a",
            ),
        ] {
            let demand = LinkDemand { kind, bits: gigabits * 1_000_000_000 };
            assert_eq!(web.missing_links(&pair, demand), expected);
            assert_eq!(web.satisfies(pair[0], pair[1], demand), expected.is_empty(), "{pair:?} {kind:?}");
        }
    }

    #[test]
    fn status_shows_each_domain_once_with_kind_and_slowest_link() {
        let names = ["a", "b", "c"];
        let nodes = cluster(&names, &["a", "b"], &[("a", "b", 80), ("b", "c", 40), ("a", "c", 40)]);
        let line = |domain: &FabricDomain| {
            format!("{} {:?} {:?}", domain.nodes.concat(), domain.kind, domain.min_bits_per_second)
        };
        let shown = |demand| {
            LinkGraph::new(&nodes).status_domains(&names, demand, 16).iter().map(line).collect::<Vec<_>>()
        };
        assert_eq!(
            shown(None),
            ["abc Thunderbolt Some(40000000000)", "ab ThunderboltRdma Some(80000000000)"]
        );
        let demand = LinkDemand { kind: FabricKind::Any, bits: 60_000_000_000 };
        assert_eq!(shown(Some(demand)), ["ab ThunderboltRdma Some(80000000000)"]);
        assert_eq!(LinkGraph::new(&nodes).status_domains(&names, None, 1).len(), 1);
    }

    #[test]
    fn domain_search_terminates_on_thousands_of_links() {
        let names: Vec<String> = (0..120).map(|at| format!("n{at:03}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut pairs = Vec::new();
        for (at, a) in names.iter().enumerate() {
            // All pairs except within groups of three: more maximal sets than can be listed.
            pairs.extend(
                names[at + 1..].iter().enumerate().filter(|(step, _)| step % 3 > 0).map(|(_, b)| (*a, *b, 0)),
            );
        }
        let nodes = cluster(&names, &[], &pairs);
        let found =
            LinkGraph::new(&nodes).domains(&names, LinkDemand { kind: FabricKind::Thunderbolt, bits: 0 });
        assert!(!found.is_empty() && found.len() <= MAX_STEPS as usize);
    }
}
