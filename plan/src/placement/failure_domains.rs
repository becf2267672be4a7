//! Spread over failure domains: a zone, a rack or a UPS, which owners name by a label, in which everything
//! fails together. Also the set of desired replicas, since the domain of a surplus replica decides which one
//! is removed.

use std::collections::{BTreeMap, BTreeSet};

use crate::snapshot::{GroupInfo, ObjectKey, Snapshot};
use crate::valid_deployment::ValidDeployment;

/// A failure domain: the nodes with one label value, or a single node without the label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum FailureDomain<'v> {
    Label(&'v str),
    Node(&'v str),
}

fn failure_domain<'v>(view: &'v Snapshot, key: &str, node: &'v str) -> FailureDomain<'v> {
    let label = view.nodes.get(node).and_then(|seen| seen.labels.get(key));
    label.map_or(FailureDomain::Node(node), |value| FailureDomain::Label(value))
}

/// The failure domains of a deployment's other replicas.
pub struct SiblingDomains<'v> {
    view: &'v Snapshot,
    key: &'v str,
    replicas: BTreeMap<i32, BTreeSet<FailureDomain<'v>>>,
}

impl<'v> SiblingDomains<'v> {
    /// For one replica, as if the groups for which `without` is true were gone.
    pub fn for_replica(
        view: &'v Snapshot,
        desired: &'v ValidDeployment,
        replica: i32,
        without: impl Fn(&ObjectKey) -> bool,
    ) -> Self {
        let key = desired.topology_key.as_str();
        let others = view
            .groups_of(&desired.namespace, &desired.name)
            .filter(|(key, group)| group.replica != replica && !group.deleting && !without(key));
        let mut replicas: BTreeMap<i32, BTreeSet<FailureDomain<'v>>> = BTreeMap::new();
        for (_, group) in others {
            let domains = group.nodes().map(|node| failure_domain(view, key, node));
            replicas.entry(group.replica).or_default().extend(domains);
        }
        Self { view, key, replicas }
    }

    /// How many of the other replicas have a rank in a domain of one of these nodes.
    pub fn siblings_sharing<'n>(&self, nodes: impl Iterator<Item = &'n str>) -> usize {
        if self.replicas.is_empty() {
            return 0;
        }
        let own: BTreeSet<FailureDomain<'_>> =
            nodes.map(|node| failure_domain(self.view, self.key, node)).collect();
        self.replicas.values().filter(|domains| own.iter().any(|one| domains.contains(one))).count()
    }

    /// The labelled domains that these nodes share with other replicas, and those replicas.
    pub fn shared_domains<'n>(&self, nodes: impl Iterator<Item = &'n str>) -> (Vec<String>, Vec<i32>) {
        let own: BTreeSet<FailureDomain<'_>> =
            nodes.map(|node| failure_domain(self.view, self.key, node)).collect();
        let labelled = own.iter().filter_map(|one| match one {
            FailureDomain::Label(value) => Some((one, *value)),
            FailureDomain::Node(_) => None,
        });
        let (mut values, mut with) = (Vec::new(), BTreeSet::new());
        for (one, value) in labelled {
            let there = self.replicas.iter().filter(|(_, domains)| domains.contains(one));
            let before = with.len();
            with.extend(there.map(|(replica, _)| *replica));
            if with.len() > before {
                values.push(value.to_owned());
            }
        }
        (values, with.into_iter().collect())
    }
}

/// The desired replicas, by index, and the surplus ones, in order of removal. `groups` are the deployment's
/// that are not being deleted.
///
/// Existing replicas stay, and new ones get the lowest free indices. Of a surplus, replicas that are not
/// ready are removed first, then those in the most crowded domain. Each removal is decided on the remaining
/// ones, so that an interrupted removal ends the same way.
pub fn desired_and_surplus(
    view: &Snapshot,
    groups: &[(&ObjectKey, &GroupInfo)],
    replicas: i32,
    key: &str,
) -> (BTreeSet<i32>, Vec<i32>) {
    let there: BTreeSet<i32> = groups.iter().map(|(_, group)| group.replica).collect();
    let count = usize::try_from(replicas).unwrap_or(0);
    if count == 0 {
        return (BTreeSet::new(), there.into_iter().collect());
    }
    if there.len() <= count {
        let free = (0..).filter(|index| !there.contains(index)).take(count - there.len());
        return (free.chain(there.iter().copied()).collect(), Vec::new());
    }
    let mut left = replica_domains(view, groups, key);
    let mut surplus = Vec::new();
    while let Some(goes) = most_crowded(&left).filter(|_| left.len() > count) {
        left.remove(&goes);
        surplus.push(goes);
    }
    (left.into_keys().collect(), surplus)
}

/// An existing replica.
struct ReplicaDomains<'v> {
    ready: bool,
    nodes: BTreeSet<&'v str>,
    domains: BTreeSet<FailureDomain<'v>>,
}

fn replica_domains<'v>(
    view: &'v Snapshot,
    groups: &[(&ObjectKey, &'v GroupInfo)],
    key: &str,
) -> BTreeMap<i32, ReplicaDomains<'v>> {
    let mut replicas: BTreeMap<i32, ReplicaDomains<'v>> = BTreeMap::new();
    for (_, group) in groups {
        let new = ReplicaDomains { ready: false, nodes: BTreeSet::new(), domains: BTreeSet::new() };
        let replica = replicas.entry(group.replica).or_insert(new);
        replica.ready |= group.ready;
        replica.nodes.extend(group.nodes());
        replica.domains.extend(group.nodes().map(|node| failure_domain(view, key, node)));
    }
    replicas
}

/// The one to remove first.
fn most_crowded(replicas: &BTreeMap<i32, ReplicaDomains<'_>>) -> Option<i32> {
    let rank = |(index, one): &(&i32, &ReplicaDomains<'_>)| {
        let beside = replicas.values().filter(|other| !other.domains.is_disjoint(&one.domains)).count();
        let on = replicas.values().filter(|other| !other.nodes.is_disjoint(&one.nodes)).count();
        (!one.ready, beside, on, **index)
    };
    replicas.iter().max_by_key(rank).map(|(index, _)| *index)
}
